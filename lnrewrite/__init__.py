"""Rewrite the normalization of trained networks: move norms, fold them away, and prove what was done.

One idea: a trained residual network is a *stream* that *blocks* read from and write to. A block reads through
*readers* (the first linears that see the stream, usually behind a norm), computes, and writes through *writers*
(the last linears before the add). Everything here is algebra on that picture, so a model is lifted once, decided
on once, and rewritten in whatever form it came: detection and passes see neither torch nor ONNX.

    model -> backend -> operator graph -> detect -> Stream -> passes -> edits -> backend -> model
                                                                                  ONNX -> target forms -> file
                                                       a living module <- recipe <- difference of two torch graphs

A pass *proposes*: it looks at an immutable `Stream` and returns whole edits (the norm and what compensates it),
refusals (a code, why, what to do), and the sites that it does not speak of. Every site of a stream ends as one of the
three; nothing is skipped silently. A backend carries the edits out and counts what it found changed.

What a rewrite claims is a type, `Exactness`, ordered: structural < algebraic < asymptotic < calibrated < learned. A
pipeline's is the maximum over the passes that edited something, and `verify` takes its tolerance from it. What exact
passes made is run against the model before it is returned (`comparison.proving`); an edit that does not hold is left
out and refused (`pipeline.sounding`).

Rooms, a floor a line; imports go down only, and import-linter holds it (pyproject.toml, tests/test_layers.py):

    cli/                          click commands; nothing imports it
    rehosting, probing/           a folder in, a folder of a stock architecture out; a stream's figures by depth
    benched                       beside them: times of any model
    api                           the way in: any MODEL loaded, a file or a module converted
    hosts/                        stock architectures that hold what was made, and a folder written as one
    checkpoints/                  a checkpoint folder in, a folder out
    healing/                      short trainings, of programs and of modules in Python
    live/, runtime/               modules rewritten in place; ONNX Runtime as users run it
    models/                       a model with its picture: captured from torch, or read from ONNX
    export/                       the forms that norms have in ONNX, and what a target runs best
    data/, comparison/            what a model is called with; how far two models are apart, and proofs
    reconstruction/               beside them: fits a converted model's branches to data, block by block
    backends/                     lift a graph, apply edits to it: torch.fx and ONNX
    algebra/                      what passes share: changes of basis, placements, fitted gains
    detect/, pipeline/, testing/  norms and blocks recognized; the run loop, its text and report; a reference machine
    pictures/                     beside them: streams and a probe's figures as SVG and HTML, for people to look at
    ir/, loading/, kernels/       the picture, its text, edits, inputs; files read without running them; our operators
    codes/                        beside them: a page for each diagnostic code
    files/                        OUT, landed whole or not at all
    errors, recipe/, demo/        diagnostics; what ships inside a rewritten folder; one small trained network
    compat/                       beside them: the private names of torch and transformers that we use, each once
    quiet, layout, _version       beside them: logging; tables and pages for people; the version

`passes/`, imported as `lnrewrite.passes`, stands beside them and sees ir, pipeline, algebra and errors alone. The
package itself never imports it: shipped passes are found through the entry-point group `lnrewrite.passes`, like
anyone's.

Importing `lnrewrite` imports neither torch nor onnx; the names below load what they need on first use.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from ._version import __version__

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # ONNX Runtime reads it when it is imported, and else calls home

__all__ = [
    "LnrewriteError",
    "OnnxProgram",
    "Pipeline",
    "Program",
    "Refused",
    "Result",
    "UsageError",
    "__version__",
    "bench",
    "capture",
    "convert",
    "diff",
    "explain",
    "export_model",
    "heal",
    "load",
    "norm_add_norm",
    "probe",
    "rehost",
    "rewrite",
    "rewrite_file",
    "session",
    "unrewrite",
    "verify",
]

if TYPE_CHECKING:
    from .api import convert, export_model, load, rewrite_file
    from .benched import bench
    from .codes import explain
    from .comparison.verifying import verify
    from .errors import LnrewriteError, Refused, UsageError
    from .healing.session import heal
    from .kernels.torch_op import norm_add_norm
    from .live.rewriting import rewrite, unrewrite
    from .models.onnx_program import OnnxProgram
    from .models.program import Program, capture
    from .pipeline.driver import Pipeline, Result
    from .probing.diffing import diff
    from .probing.probe import probe
    from .rehosting import rehost
    from .runtime.sessions import session

_HOME = {
    "LnrewriteError": "errors",
    "Refused": "errors",
    "UsageError": "errors",
    "explain": "codes",
    "export_model": "api",
    "Pipeline": "pipeline.driver",
    "Result": "pipeline.driver",
    "OnnxProgram": "models.onnx_program",
    "Program": "models.program",
    "bench": "benched",
    "capture": "models.program",
    "convert": "api",
    "diff": "probing.diffing",
    "heal": "healing.session",
    "load": "api",
    "norm_add_norm": "kernels.torch_op",
    "probe": "probing.probe",
    "rehost": "rehosting",
    "rewrite": "live.rewriting",
    "rewrite_file": "api",
    "session": "runtime.sessions",
    "unrewrite": "live.rewriting",
    "verify": "comparison.verifying",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first asked for (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
