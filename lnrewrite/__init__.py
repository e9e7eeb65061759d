"""Rewrite the normalisation of trained networks: move norms, fold them away, and prove what was done.

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
passes made is run against the model before it is returned (`proving`); an edit that does not hold is left out and
refused (`sounding`).

Layers; imports go down only, and tests/test_layers.py enforces it:

    cli                                             nothing imports it
    program, live, folders, onnx_program, healing/  torch and onnx, each imported inside what needs it
    targets/                                        the forms that norms have in ONNX, and what a target runs best
    backends/, kernels/                             lift a graph, apply edits to it: torch.fx and ONNX; our operators
    detect/                                         norms recognised by their algebra; residual blocks
    pipeline, sounding, spelling, registry, foreign the run loop, its text, plugins, others' JSON: standard library
    opgraph, machine, ref, rotations                a view of graphs, an fp64 reference machine, orthogonal matrices
    stream, schemes, text, plan, basis, report, ... the picture, its text form, edits and refusals: standard library

`passes/`, imported as `lnrewrite.passes`, stands beside them and sees only the last three rows. The package itself
never imports it: shipped passes are found through the entry-point group `lnrewrite.passes`, like anyone's.

Importing `lnrewrite` imports neither torch nor onnx; the names below load what they need on first use.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

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
    "explain",
    "heal",
    "load",
    "norm_add_norm",
    "rewrite",
    "session",
    "unrewrite",
    "verify",
]

if TYPE_CHECKING:
    from .benching import bench
    from .codes import explain
    from .diagnostics import LnrewriteError, Refused, UsageError
    from .healing.session import heal
    from .kernels.torch_op import norm_add_norm
    from .live import rewrite, unrewrite
    from .onnx_program import OnnxProgram
    from .pipeline import Pipeline, Result
    from .program import Program, capture, convert, load
    from .sessions import session
    from .verifying import verify

_HOME = {
    "LnrewriteError": "diagnostics",
    "Refused": "diagnostics",
    "UsageError": "diagnostics",
    "explain": "codes",
    "Pipeline": "pipeline",
    "Result": "pipeline",
    "OnnxProgram": "onnx_program",
    "Program": "program",
    "bench": "benching",
    "capture": "program",
    "convert": "program",
    "heal": "healing.session",
    "load": "program",
    "norm_add_norm": "kernels.torch_op",
    "rewrite": "live",
    "session": "sessions",
    "unrewrite": "live",
    "verify": "verifying",
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
