"""Compare two models by running both: the judge of a rewrite's claim, the measure of a calibrated one's drift."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from ..backends.hiding import Shown
from ..backends.outputs import Outputs, difference
from ..backends.running import Runnable, as_runnable, floats, incomparable, numbers
from ..backends.torch.contexts import evaluating, quiet
from ..backends.torch.fixed import elsewhere, other_path
from ..backends.torch.fused import compared
from ..compat.torch import pytree, tensors_in
from ..errors import Code, LnrewriteError, UsageError, did_you_mean
from ..ir import Exactness, Network
from ..pipeline.protocols import Batch
from ..pipeline.results import Comparison, Drift, Json, Verdict
from ..pipeline.shares import everyone, total

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

NOISE = 64
"""The error in any output, in units of the last place of the largest of all, that is rounding."""

PIECE = 2**22
"""Numbers that a measurement widens to float64 at a time."""

AS_WRITTEN = "as written"
"""What a model computes in that nothing is asked of."""


def verify(
    a: Runnable | nn.Module,
    b: Runnable | nn.Module,
    *,
    tolerance: str | float | None = None,
    seed: int = 0,
    inputs: Sequence[Batch] | None = None,
) -> Json:
    """Run two models on the same inputs in float64, at two batch sizes and lengths, and compare what they give.

    a, b: programs or modules (a module needs `inputs`: batches of keyword inputs), of torch or ONNX: outputs are
    compared in order. tolerance: an exactness class or a relative error; None means algebraic, or `ACROSS` between
    torch and ONNX, where constants were rounded to float32. A file with operators of lnrewrite is compared by their
    definitions; where their kernels are built, `kernels` says how far those are from them, as written. Returns the
    object of `verify --json`: verdict `equal` (bit by bit), `within` (the tolerance) or `different`, max_abs, max_rel
    (max |a - b| / max |a| of the output where it is largest; of integers and truth values the share that differs; what
    is rounding of the largest output is none in a small one), cosine, shapes_tried, dtype (float32 where ONNX Runtime
    lacks a kernel for float64), notes on the two programs. Raises LnrewriteError LN402 where they cannot be compared.
    """
    return compare(as_runnable(a), as_runnable(b), tolerance, seed, inputs).to_dict()


def compare(
    a: Runnable,
    b: Runnable,
    tolerance: str | float | None = None,
    seed: int = 0,
    inputs: Sequence[Batch] | None = None,
) -> Comparison:
    """Compare two models as `verify` does."""
    check_tolerance(tolerance)
    batches = list(inputs) if inputs is not None else list(a.trials(seed))
    first, second = a.in_float64(), b.in_float64()
    narrow = "float32" in (first.precision, second.precision)
    alike = first.traced == second.traced
    bound = check_tolerance(tolerance if tolerance is not None or (alike and not narrow) else ACROSS)
    found = _compared(first, second, batches, bound, "float32" if narrow else "float64")
    for model in (a, b):
        if (kernels := model.kernels) is not None:
            defined = _compared(model, kernels, batches, HALF if model.in_half else ACROSS, AS_WRITTEN)
            found = replace(found, kernels=defined, verdict=defined.verdict if defined.differs else found.verdict)
    return replace(found, notes=tuple(dict.fromkeys(note for model in (a, b) for note in model.notes)))


def proof(program: Runnable, candidate: nn.Module, bound: float, seed: int = 0) -> Comparison:
    """Run a program and what was written of it as they are, at two batch sizes and lengths, and compare them."""
    return _compared(program, as_runnable(candidate), list(program.trials(seed)), bound, AS_WRITTEN)


def _compared(first: Runnable, second: Runnable, batches: Sequence[Batch], bound: float, dtype: str) -> Comparison:
    errors, scales, shares = defaultdict[int, float](float), defaultdict[int, float](float), [0.0]
    dots, shapes, whole = [0.0, 0.0, 0.0], [], 0.0
    for index, batch in enumerate(batches):
        try:
            one = _outputs(first, batch, "the reference")
        except LnrewriteError:
            if index:  # a size that the model does not take: relations between sizes are not known
                continue
            raise
        two = _outputs(second, batch, "the candidate")
        if len(one) != len(two) or any(x.shape != y.shape for x, y in zip(one, two, strict=True)):
            raise incomparable(f"outputs {_shapes(one)} and {_shapes(two)}")
        shapes.append(tuple(tensors_in(batch)[0].shape))
        for place, (x, y) in enumerate(zip(one, two, strict=True)):
            if not (x.is_floating_point() and y.is_floating_point()):
                shares.append((x != y).double().mean().item() if x.numel() else 0.0)
                whole = max(whole, (x.double() - y.double()).abs().max().item() if x.numel() else 0.0)
                continue
            error, largest = difference(x, y)
            errors[place], scales[place] = max(errors[place], error), max(scales[place], largest)
            x, y = (torch.nan_to_num(t.double(), 0.0, 0.0, 0.0) for t in (x, y))
            dots = [d + v.sum().item() for d, v in zip(dots, (x * y, x * x, y * y), strict=True)]
    worst, scale = max(errors.values(), default=0.0), max(scales.values(), default=0.0)
    noise = NOISE * torch.finfo(torch.float64 if dtype == "float64" else torch.float32).eps * scale
    parts = [error / scales[place] if scales[place] else error for place, error in errors.items() if error > noise]
    relative = max([worst / scale if scale else worst, *parts, *shares])
    verdict = Verdict.EQUAL if worst == relative == 0 else Verdict.WITHIN if relative <= bound else Verdict.DIFFERENT
    norm = (dots[1] * dots[2]) ** 0.5
    return Comparison(verdict, max(worst, whole), relative, dots[0] / norm if norm else 1.0, tuple(shapes), dtype)


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


def _outputs(model: Runnable, batch: Batch, who: str) -> Outputs:
    try:
        return numbers(model.call(batch))
    except (TypeError, RuntimeError, AssertionError, ValueError, LookupError, LnrewriteError) as why:
        raise incomparable(f"{who} does not run on the inputs ({why})") from why


def _shapes(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(str(list(t.shape)) for t in tensors) or "none"


def drift(a: nn.Module, b: nn.Module, batches: Sequence[Batch], held_out: bool) -> Drift:
    """Measure how far b's outputs are from a's on the batches.

    relative_error = |a - b| / |a| and cosine over all floating point outputs together; for logits also kl (nats per
    row, a against b) and top1_agreement, else None. Batches on which b takes another path than was captured are left
    out and counted as off_path. Raises LnrewriteError LN033 where all are.
    """
    with evaluating(a), evaluating(b):
        return measured(as_runnable(a), as_runnable(b), batches, held_out)


def measured(
    first: Runnable, second: Runnable, batches: Sequence[Batch], held_out: bool, shown: Shown | None = None
) -> Drift:
    """Measure how far the second's outputs are from the first's, as `drift` does; `shown`: which tokens count."""
    sums, off = torch.zeros(7, dtype=torch.float64), list[str]()
    shown = shown or shown_by(first, batches)
    with quiet():
        for batch in batches:
            one = first.call(batch)
            try:
                two = second.call(batch)
            except RuntimeError as error:
                if not (path := other_path(error)):
                    raise
                off.append(path)
                continue
            sums += distances(one, two, partial(shown.cut, batch=batch))
            del one, two
    off, many = [path for part in everyone(off) for path in part], total(len(batches))
    if len(off) == many:
        raise elsewhere("the result", off[0])
    return replace(drift_of(total(sums), held_out, many - len(off)), off_path=len(off))


def shown_by(model: Runnable, batches: Sequence[Batch]) -> Shown:
    """Return which tokens of each output count, outputs named by their numbers."""
    with quiet():
        return Shown.tried(batches, lambda batch: {str(k): x for k, x in enumerate(floats(model.call(batch)))})


def distances(
    one: object, two: object, cut: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, value: value
) -> torch.Tensor:
    """Return what a drift is made of, float64[7], which adds up over batches and rows; a piece is widened at a time.

    |a - b|^2, |a|^2, ab and |b|^2 over all outputs, KL(a || b) of the logits, how often both choose the same, and rows.
    What is infinite alike in both (classes that a model never chooses) is no difference, and has no size.
    `cut` takes what counts from an output, given its number.
    """
    sums = torch.zeros(7, dtype=torch.float64)
    both, named = (floats(one), floats(two)), (logits(one), logits(two))
    pairs = [(cut(str(k), x), cut(str(k), y)) for k, (x, y) in enumerate(zip(*both, strict=True))]
    for x, y in pairs:
        for a, b in zip(x.flatten().split(PIECE), y.flatten().split(PIECE), strict=True):
            alike = (a == b) & a.isinf()
            a, b = (t.double().masked_fill(alike, 0) for t in (a, b))
            sums[:4] += torch.stack([((a - b) ** 2).sum(), (a * a).sum(), (a * b).sum(), (b * b).sum()]).cpu()
    at = [pair for pair, x in zip(pairs, both[0], strict=True) if x is named[0]]
    if named[1] is not None and at:
        p, q = at[0]
        step = max(1, PIECE // max(1, p.shape[-1]))
        for a, b in zip(*(x.reshape(-1, x.shape[-1]).split(step) for x in (p, q)), strict=True):
            sums[4] += compared(b.double(), a.double(), None)[1].sum().cpu()
            sums[5] += (a.argmax(-1) == b.argmax(-1)).sum().cpu()
            sums[6] += len(a)
    return sums


def drift_of(sums: torch.Tensor, held_out: bool, samples: int) -> Drift:
    """Return the drift that `distances` of so many batches add up to."""
    difference, aa, ab, bb, kl, agree, rows = sums.tolist()
    return Drift(
        held_out,
        samples,
        relative_error=(difference / aa) ** 0.5 if aa else None,
        cosine=ab / (aa * bb) ** 0.5 if aa and bb else None,
        kl=kl / rows if rows else None,
        top1_agreement=agree / rows if rows else None,
    )


@runtime_checkable
class _WithLogits(Protocol):
    """Describe the output of a model that names its logits."""

    logits: object


def logits(out: object) -> torch.Tensor | None:
    """Return a model's logits [..., classes]: the output of that name, or its only tensor of rank 3."""
    named = out.get("logits") if isinstance(out, Mapping) else out.logits if isinstance(out, _WithLogits) else None
    if isinstance(named, torch.Tensor) and named.dim() >= 2:
        return named
    tensors = tensors_in(out)
    return tensors[0] if len(tensors) == 1 and tensors[0].dim() == 3 else None


def scores_of(out: object, network: Network) -> int | None:
    """Return the number of the logits among a model's outputs; None where it has none, or what may be its states."""
    found, leaves = logits(out), pytree.tree_leaves(out)
    if found is None or any(found.shape[-1] == stream.width for stream in network.streams):
        return None
    return next(k for k, leaf in enumerate(leaves) if leaf is found)
