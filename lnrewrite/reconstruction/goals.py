"""What a state of the converted model shall be: the original's, or its direction where the sizes differ by design."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..backends.hiding import Shown
from ..pipeline.protocols import Batch
from ..pipeline.shares import anywhere, total

FEEDBACK = 0.7
"""How much of the error that the state before a branch has is to be made good by that branch; the rest is left."""
SMALL = 0.1
"""A token of less than this share of the usual size (padding, mostly) counts as one of that size."""
LEAST = 1e-15


@dataclass(frozen=True)
class Measure:
    """See states [..., width on `axis`] as rows [tokens, width], as they are compared: token by token.

    directions: what a norm without gain makes of them, since the sizes differ by design; `centered` for layer norms.
    basis: what takes a state of the converted model to the original's channels, [width]; None where they are the same.
    shown: which tokens count, bool[tokens]; None where all do.
    """

    axis: int
    directions: bool
    centered: bool
    basis: Tensor | None = None
    shown: Tensor | None = None

    def __call__(self, state: Tensor) -> Tensor:
        """Return a state's rows, without their size where directions are compared."""
        x = state.movedim(self.axis, -1).flatten(0, -2)
        if self.shown is not None and len(self.shown) == len(x):
            x = x[self.shown]
        if not self.directions:
            return x
        x = x - x.mean(-1, keepdim=True) if self.centered else x
        return x / size(x)

    def based(self, state: Tensor) -> Tensor:
        """Return a state of the converted model in the original's channels."""
        if self.basis is None:
            return state
        return (state.movedim(self.axis, -1) * self.basis.to(state)).movedim(-1, self.axis)

    def on(self, shown: Shown, name: str, state: Tensor, batch: Batch) -> Measure:
        """Return the measure on one batch, given a state of it, with what is known of the tokens that count."""
        return replace(self, shown=shown.rows(name, state.movedim(self.axis, -1), batch))


@dataclass(frozen=True)
class Goal:
    """Say what a state shall be on one batch: near `target` [tokens, width]; `weight` [tokens, 1] is a token's size.

    1 is the size of what the original's branch adds, over all tokens.
    """

    measure: Measure
    target: Tensor
    weight: Tensor

    def residual(self, state: Tensor) -> Tensor:
        """Return [tokens, width], whose squares are to be small, of a state of the converted model."""
        return (self.measure(self.measure.based(state)) - self.target) / self.weight


def goals_of(
    measures: Sequence[Measure],
    totals: Sequence[Tensor],
    starts: Sequence[Tensor],
    before: Sequence[tuple[Tensor, Tensor]],
    like: tuple[Measure, Tensor],
) -> list[Goal]:
    """Return the goals on some batches, each with a measure.

    totals, starts: the original's states behind the sum and before it. before: both models' states behind the sum
    before that, in the original's channels; how they differ is what the branch cannot know, mostly noise to it, so part
    of that is left alone.
    like: a measure and a state, for a process that has none of these batches.
    """
    plain = [replace(m, directions=False) for m in measures]
    targets = [m(t) for m, t in zip(plain, totals, strict=True)]
    starts = [m(s) for m, s in zip(plain, starts, strict=True)]
    sizes = [size(t) for t in targets]
    added = sum(float(((t - s) / r).square().sum()) for t, s, r in zip(targets, starts, sizes, strict=True))
    unit = max(math.sqrt(total(float(added))), LEAST)
    known = list(zip(measures, before, strict=bool(before)))
    theirs, ours = [m(a) for m, (a, _) in known], [m(b) for m, (_, b) in known]
    other = any(a.shape != s.shape for a, s in zip(theirs, starts, strict=bool(before)))
    if anywhere(before) and not anywhere(other):
        none = like[0](like[1])[:0]
        by = _slope([*theirs, none], [*starts, none])
        pairs = zip(targets, theirs, ours, strict=True)
        targets = [t - (1 - FEEDBACK) * by * (a - b) for t, a, b in pairs]
    if like[0].directions:
        rows = replace(like[0], axis=-1)
        return [Goal(m, rows(t), torch.tensor(unit)) for m, t in zip(measures, targets, strict=True)]
    return [Goal(m, t, r * unit) for m, t, r in zip(measures, targets, sizes, strict=True)]


def size(x: Tensor) -> Tensor:
    """Return the root mean square of rows [tokens, width], `SMALL` of the usual one at least: [tokens, 1]."""
    found = x.square().mean(-1, keepdim=True)
    return torch.maximum(found, SMALL**2 * ordinary(found)).clamp_min(LEAST**2).sqrt()


def ordinary(x: Tensor) -> Tensor:
    """Return the median of what is above 0, without a gradient; 0 where nothing is."""
    x = x.detach()
    return torch.where(x > 0, x, torch.nan).nanmedian().nan_to_num(0.0)


def _slope(x: Sequence[Tensor], y: Sequence[Tensor]) -> Tensor:
    """Return, per channel, the slope of y over x, tokens of y weighted by their size: what a state hands on."""
    a, b = torch.cat(list(x)), torch.cat(list(y))
    w = size(b) ** -2
    whole = total(w.sum())
    a, b = (v - total((w * v).sum(0)) / whole for v in (a, b))
    return total((w * a * b).sum(0)) / (total((w * a * a).sum(0)) + LEAST)
