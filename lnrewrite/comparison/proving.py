"""Prove that a rewritten torch program computes what its source computes: both run in float64 on the same inputs.

What the source gave is kept as `Evidence`; a rewrite is held against it. How far apart two right programs may be
depends on how their weights are stored: an exact fold into float32 is off by what rounding the weights does, which is
measured on the model itself by moving each of them by less than its last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..backends.outputs import Outputs, apart
from ..backends.running import numbers
from ..backends.torch.contexts import evaluating, quiet
from ..backends.torch.feeding import flat_inputs
from ..backends.torch.module import CapturedModule
from ..backends.torch.widened import Read, Widened, doubled
from ..pipeline.protocols import Batch
from ..pipeline.results import Gap

FLOORS = {torch.float64: 1e-11}
"""The relative difference that needs no explanation, by the dtype of the weights."""
FLOOR = 1e-7
NARROW = 2.0**-19
"""The same where a program is run in float32 for want of float64.

Each number is off by up to 2^-24 of itself then, and a sum of n products by about sqrt(n) as much, as the errors of its
steps have either sign. Two programs that spell one function otherwise stray so each: 2 sqrt(n) 2^-24, at n = 256, which
is no wide layer. Moving the weights does not show it: each of them strays once, and the sums at each step.
"""
SPREAD = 10.0
"""By how many times what rounding the weights does an exact rewrite may be off."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """Hold inputs and what a program made of them; `wide` is false where an operator has no kernel for float64.

    way: which of several ways to run a program it was, counted from 0.
    """

    batches: tuple[Batch, ...]
    outputs: tuple[Outputs, ...]
    wide: bool
    way: int = 0


def evidence(module: CapturedModule, batches: Sequence[Batch], read: Read | None = None) -> Evidence | None:
    """Run a module on each batch that it takes, in float64 where it can; None where it takes none.

    read: where the weights come from, if the module holds none; they are used as they are stored then, for memory.
    """
    for wide in (True, False) if read is None else (False,):
        if found := gathered(partial(_run, module, wide=wide, read=read), batches, wide):
            return found
    return None


def gathered(run: Callable[[Batch], Outputs], batches: Iterable[Batch], wide: bool) -> Evidence | None:
    """Return what running a model gives on the first batches that it takes, two at most; None where it takes none."""
    found: list[tuple[Batch, Outputs]] = []
    for batch in batches:
        try:
            found.append((batch, run(batch)))
        except Exception:  # a size or a path that the model does not take, or an operator without a kernel
            continue
        if len(found) == 2:
            break
    return Evidence(tuple(b for b, _ in found), tuple(o for _, o in found), wide) if found else None


def away(module: CapturedModule, wanted: Evidence, read: Read | None = None) -> Gap:
    """Return how far a module's outputs are from the evidence; infinitely far where it gives none."""
    try:
        found = [_run(module, batch, wanted.wide, read=read) for batch in wanted.batches]
    except Exception:  # what does not run computes nothing
        return Gap(math.inf)
    error = apart(wanted.outputs, found)
    if error <= max((FLOORS.get(p.dtype, FLOOR) for p in module.parameters()), default=FLOOR):
        return Gap(error, rounding=True)
    moved = _run(module, wanted.batches[-1], wanted.wide, True, read)
    return judged(error, apart(found[-1:], [moved]))


def judged(error: float, noise: float) -> Gap:
    """Return a gap of outputs that the rounding of the weights moves by `noise`."""
    return Gap(error, rounding=math.isfinite(noise) and error <= SPREAD * noise)


def _run(module: CapturedModule, batch: Batch, wide: bool, jitter: bool = False, read: Read | None = None) -> Outputs:
    """Return a module's outputs in float64; what it draws at random is the same each time."""
    inputs = flat_inputs(module, batch)
    if wide:
        inputs = [doubled(t) if isinstance(t, torch.Tensor) else t for t in inputs]
    with evaluating(module), quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        outputs = Widened(module, wide, jitter, read).run(*inputs, enable_io_processing=False)
    return [t.double() for t in numbers(outputs)]
