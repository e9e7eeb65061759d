"""What is installed here, and what each target can do with it: `lnrewrite doctor` and `lnrewrite --version -v`."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import click

from .._version import __version__
from ..layout import aligned
from .options import Screen, options

LIBRARIES = (
    "torch", "numpy", "networkx", "click", "safetensors", "onnx", "onnx-ir", "onnxscript", "onnxruntime",
    "onnxruntime-gpu", "onnxruntime-genai", "transformers", "datasets",
)  # fmt: skip
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}


def versions() -> dict[str, str | None]:
    """Return the versions of what lnrewrite works with, None for what is not installed. Nothing is imported."""
    found: dict[str, str | None] = {"lnrewrite": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def targets() -> dict[str, str]:
    """Return, for each target of `export`, what can be done with it here, in words."""
    if not find_spec("onnx") or not find_spec("onnxruntime"):
        return dict.fromkeys((*PROVIDERS, "generic"), "nothing: pip install lnrewrite[onnx]")
    import onnxruntime

    here = set(onnxruntime.get_available_providers())
    elsewhere = "export; its forms are proved on the CPU, and not run as they are"
    found = {name: "export, prove, bench" if each in here else elsewhere for name, each in PROVIDERS.items()}
    return {**found, "generic": "export, prove"}


def diagnosis() -> dict[str, Any]:
    """Return all that `doctor` tells, as JSON."""
    import torch

    from ..kernels.library import find

    library = find()
    tools = {name: shutil.which(name) for name in ("c++", "nvcc")}
    return {
        "versions": versions(),
        "system": f"{platform.system()} {platform.machine()}",
        "executable": sys.executable,
        "cuda": torch.cuda.is_available(),
        "targets": targets(),
        "kernels": str(library) if library else None,
        "tools": tools,
    }


@click.command()
@options()
def doctor(screen: Screen) -> None:
    """Tell what is installed, and what each target can do here."""
    with screen.working("looking"):
        found = diagnosis()
    screen.answer(found, lambda: "\n".join(_lines(found)))


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    yield from versions_told(found["versions"])
    yield ""
    yield f"python      {found['executable']} ({found['system']})"
    yield f"torch       {'with CUDA' if found['cuda'] else 'on the CPU alone'}"
    kernels = found["kernels"] or "not built: lnrewrite kernels build (export --fuse custom needs them to run)"
    yield f"kernels     {kernels}"
    yield from (f"{name:<12}{path or 'not found'}" for name, path in found["tools"].items())
    yield ""
    rows = list(found["targets"].items())
    yield from aligned(("target", "here"), rows, ("target", "here"))


def versions_told(found: Mapping[str, str | None]) -> Iterator[str]:
    """Yield a line for each library."""
    rows = [(name, number or "not installed") for name, number in found.items()]
    yield from aligned(("library", "version"), rows, ("library", "version"))
