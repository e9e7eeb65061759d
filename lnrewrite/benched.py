"""The way to timings: any MODEL in, what is no ONNX file yet exported for the target, times out."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from .api import export_source
from .loading.identify import identify
from .loading.source import Format, OpenOptions
from .models.checks import need_onnx
from .pipeline.results import Json
from .quiet import LOGGER


def bench(
    models: Sequence[str],
    *,
    factory: str | Callable[[], nn.Module] | None = None,
    trust_pickle: bool = False,
    trust_remote_code: bool = False,
    inputs: Mapping[str, object] | Sequence[object] | None = None,
    device: str = "cpu",
    seed: int = 0,
    target: str = "cpu",
    **how: Any,
) -> Json:
    """Time models in ONNX Runtime on one input and return the object of `bench --json`: medians in ms, and ratios.

    models: any MODEL; an ONNX file is timed as it is, another as `export` with its defaults writes it for the target,
    in a folder that goes afterwards. target: cpu, or cuda (IO binding, a CUDA graph of these inputs' shapes, no
    fallback to the CPU). how: threads of the CPU (1), rounds (9, new sessions of each model) and runs (11) in each, as
    `lnrewrite.runtime.benching.bench` takes them. inputs: as `load` takes them, for all models alike; made up from the
    first where None. Raises as `load` and `export_model`, and LnrewriteError LN520 where a model does not take the
    first one's inputs, or does not load or run on the target.
    """
    need_onnx("bench")
    from .runtime.benching import bench as timed
    from .runtime.sessions import check_target

    check_target(target)
    options = OpenOptions(factory, trust_pickle, trust_remote_code, inputs, device, seed)
    sources, written = [identify(model, options) for model in models], []
    with tempfile.TemporaryDirectory(prefix="lnrewrite-") as place:
        for number, source in enumerate(sources):
            if source.format is Format.ONNX and source.path is not None:
                written.append(source.graph)
                continue
            LOGGER.info(f"exporting {source.name}")
            written.append(Path(place) / f"{number}.onnx")
            export_source(source, written[-1], force=False, target=target)
        return timed(written, names=list(models), inputs=inputs, seed=seed, target=target, **how)
