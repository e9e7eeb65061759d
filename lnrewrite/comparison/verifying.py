"""Compare two models by running both: the judge of a rewrite's claim, the measure of a calibrated one's drift."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..backends.outputs import difference
from ..backends.torch.capture import evaluating, quiet
from ..backends.torch.fixed import elsewhere, other_path
from ..backends.torch.widened import Float64, in_float64
from ..errors import Code, LnrewriteError, UsageError, did_you_mean
from ..ir import Exactness
from ..pipeline.protocols import Batch

TOLERANCE = {
    Exactness.STRUCTURAL: 0.0,
    Exactness.ALGEBRAIC: 1e-7,
    Exactness.ASYMPTOTIC: 1e-3,
    Exactness.CALIBRATED: 0.5,
    Exactness.LEARNED: 1.0,
}
"""The largest relative error, in float64, that a rewrite of each class may show."""

ACROSS = 2e-5
"""The largest relative error between a model of torch and its ONNX form, whose constants are rounded to float32."""

HALF = 2e-2
"""The largest relative error between two ways to compute a model in float16 or bfloat16."""


def verify(
    a: Any, b: Any, *, tolerance: str | float | None = None, seed: int = 0, inputs: Sequence[Batch] | None = None
) -> dict[str, Any]:
    """Run two models on the same inputs in float64, at two batch sizes and lengths, and compare what they give.

    a, b: programs or modules (a module needs `inputs`: batches of keyword inputs), of torch or ONNX: outputs are
    compared in order. tolerance: an exactness class or a relative error; None means algebraic, or `ACROSS` between
    torch and ONNX, where constants were rounded to float32. A file with operators of lnrewrite is compared by their
    definitions; where their kernels are built, `kernels` says how far those are from them, as written. Returns the
    object of `verify --json`: verdict `equal` (bit by bit), `within` (the tolerance) or `different`, max_abs, max_rel
    (max |a - b| / max |a|), cosine, shapes_tried, dtype (float32 where ONNX Runtime lacks a kernel for float64), notes
    on the two programs. Raises LnrewriteError LN402 where the two cannot be compared.
    """
    check_tolerance(tolerance)
    batches = list(inputs) if inputs is not None else _batches(a, seed)
    first, second = _double(a), _double(b)
    narrow = "float32" in (_precision(first), _precision(second))
    same = isinstance(first, fx.GraphModule) == isinstance(second, fx.GraphModule)
    bound = check_tolerance(tolerance if tolerance is not None or (same and not narrow) else ACROSS)
    found = _compared(first, second, batches, bound, "float32" if narrow else "float64")
    for program in (a, b):
        if (kernels := getattr(program, "kernels", None)) is not None:
            allowed = HALF if held_in_half(program) else ACROSS
            found["kernels"] = _compared(program.module(), kernels, batches, allowed, "as written")
            if found["kernels"]["verdict"] == "different":
                found["verdict"] = "different"
    found["notes"] = list(dict.fromkeys(note for program in (a, b) for note in getattr(program, "notes", ())))
    return found


def held_in_half(program: Any) -> bool:
    """Return whether a program computes in half precision."""
    return any(op.dtype in {"float16", "bfloat16"} for op in program.graph)


def proof(program: Any, candidate: torch.nn.Module, bound: float, seed: int = 0) -> dict[str, Any]:
    """Run a program and what was written of it as they are, at two batch sizes and lengths; return as `verify` does."""
    return _compared(program.module(), candidate, _batches(program, seed), bound, "as written")


def _compared(
    first: torch.nn.Module, second: torch.nn.Module, batches: Sequence[Batch], bound: float, dtype: str
) -> dict[str, Any]:
    worst, scale, dots, shapes = 0.0, 0.0, [0.0, 0.0, 0.0], []
    for index, batch in enumerate(batches):
        try:
            one = _outputs(first, batch, "the reference", dtype)
        except LnrewriteError:
            if index:  # a size that the model does not take: relations between sizes are not known
                continue
            raise
        two = _outputs(second, batch, "the candidate", dtype)
        if len(one) != len(two) or any(x.shape != y.shape for x, y in zip(one, two, strict=True)):
            raise _incomparable(f"outputs {_shapes(one)} and {_shapes(two)}")
        shapes.append(list(next(t for t in pytree.tree_leaves(batch) if isinstance(t, torch.Tensor)).shape))
        for x, y in zip(one, two, strict=True):
            error, largest = difference(x, y)
            worst, scale = max(worst, error), max(scale, largest)
            x, y = (torch.nan_to_num(t.double(), 0.0, 0.0, 0.0) for t in (x, y))
            dots = [d + v.sum().item() for d, v in zip(dots, (x * y, x * x, y * y), strict=True)]
    relative = worst / scale if scale else worst
    verdict = "equal" if worst == 0 else "within" if relative <= bound else "different"
    norm = (dots[1] * dots[2]) ** 0.5
    return {
        "verdict": verdict,
        "max_abs": worst,
        "max_rel": relative,
        "cosine": dots[0] / norm if norm else 1.0,
        "shapes_tried": shapes,
        "dtype": dtype,
    }


def check_tolerance(tolerance: str | float | None) -> float:
    """Return the relative error that a tolerance allows.

    Raises UsageError LN003 for a word that is no class, and for a number that is negative, infinite or NaN.
    """
    if tolerance is None:
        return TOLERANCE[Exactness.ALGEBRAIC]
    try:
        if not 0 <= (bound := float(tolerance)) < math.inf:
            why = "no error is compared with that"
            raise UsageError(Code.LN003, f"tolerance {tolerance!r}", why, "give a finite number that is not negative")
        return bound
    except (ValueError, OverflowError):
        known = {str(e): t for e, t in TOLERANCE.items()}
        if tolerance not in known:
            why = "it is neither a number nor an exactness class"
            raise UsageError(Code.LN003, f"tolerance {tolerance!r}", why, did_you_mean(str(tolerance), known)) from None
        return known[str(tolerance)]


def _incomparable(why: str) -> LnrewriteError:
    return LnrewriteError(
        Code.LN402, "verify", f"the models cannot be compared: {why}", "give models with the same inputs"
    )


def _batches(program: Any, seed: int) -> list[Batch]:
    """Return made-up inputs at the program's own size and, where it is dynamic, at others."""
    if not hasattr(program, "synthetic"):
        raise _incomparable("a bare module says nothing of its inputs; give inputs=[...]")
    return list(program.trials(seed))


def _precision(module: torch.nn.Module) -> str:
    return str(getattr(module, "precision", "float64"))


def _double(model: Any) -> torch.nn.Module:
    module = model.module() if hasattr(model, "inspect") else model
    if hasattr(module, "precision"):
        return module.double()
    return in_float64(module)


def _outputs(module: torch.nn.Module, batch: Batch, who: str, dtype: str) -> list[torch.Tensor]:
    def up(t: torch.Tensor) -> torch.Tensor:
        return t.double() if t.is_floating_point() else t

    if dtype != "as written":
        batch = pytree.tree_map_only(torch.Tensor, up, batch)
    names = getattr(module, "inputs", None)
    if names is not None and isinstance(batch, Mapping) and len(names) == len(batch) and set(names) != set(batch):
        batch = dict(zip(names, batch.values(), strict=True))
    torch_in_double = dtype != "as written" and not hasattr(module, "precision")
    mode = Float64() if torch_in_double else contextlib.nullcontext()
    try:
        with quiet(), mode, torch.no_grad():
            out = module(**batch) if isinstance(batch, Mapping) else module(*batch)
    except (TypeError, RuntimeError, AssertionError, ValueError, LookupError, LnrewriteError) as why:
        raise _incomparable(f"{who} does not run on the inputs ({why})") from why
    return [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point()]


def _shapes(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(str(list(t.shape)) for t in tensors) or "none"


@contextmanager
def _running(*modules: torch.nn.Module) -> Any:
    with evaluating(modules[0]), evaluating(modules[-1]), quiet():
        yield


def drift(a: torch.nn.Module, b: torch.nn.Module, batches: Sequence[Batch], held_out: bool) -> dict[str, Any]:
    """Measure how far b's outputs are from a's on the batches: the `drift` object of a report, but for `data`.

    relative_error = |a - b| / |a| and cosine over all floating point outputs together; for logits also kl (nats per
    row, a against b) and top1_agreement, else null. Batches on which b takes another path than was captured are left
    out and counted as off_path. Raises LnrewriteError LN033 where all are.
    """
    sums = torch.zeros(4, dtype=torch.float64)
    kl, agree, rows, off = 0.0, 0, 0, list[str]()
    with _running(a, b):
        for batch in batches:
            one = a(**batch) if isinstance(batch, Mapping) else a(*batch)
            try:
                two = b(**batch) if isinstance(batch, Mapping) else b(*batch)
            except RuntimeError as error:
                if not (path := other_path(error)):
                    raise
                off.append(path)
                continue
            for x, y in zip(_floats(one), _floats(two), strict=True):
                sums += torch.stack([((x - y) ** 2).sum(), (x * x).sum(), (x * y).sum(), (y * y).sum()])
            p, q = logits(one), logits(two)
            if p is not None and q is not None:
                p, q = p.double().flatten(0, -2), q.double().flatten(0, -2)
                lp, lq = p.log_softmax(-1), q.log_softmax(-1)
                kl += (lp.exp() * (lp - lq)).sum().item()
                agree += int((p.argmax(-1) == q.argmax(-1)).sum())
                rows += len(p)
    if len(off) == len(batches):
        raise elsewhere("the result", off[0])
    difference, aa, ab, bb = sums.tolist()
    return {
        "held_out": held_out,
        "samples": len(batches) - len(off),
        **({"off_path": len(off)} if off else {}),
        "relative_error": (difference / aa) ** 0.5 if aa else None,
        "cosine": ab / (aa * bb) ** 0.5 if aa and bb else None,
        "kl": kl / rows if rows else None,
        "top1_agreement": agree / rows if rows else None,
    }


def _floats(out: Any) -> list[torch.Tensor]:
    return [t.double() for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point()]


def logits(out: Any) -> torch.Tensor | None:
    """Return a model's logits [..., classes]: the output of that name, or its only tensor of rank 3."""
    named = out.get("logits") if hasattr(out, "get") else getattr(out, "logits", None)
    if isinstance(named, torch.Tensor) and named.dim() >= 2:
        return named
    tensors = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
    return tensors[0] if len(tensors) == 1 and tensors[0].dim() == 3 else None
