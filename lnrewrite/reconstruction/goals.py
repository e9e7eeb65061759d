"""What a state of the converted model shall be: the original's, or its direction where the sizes differ by design."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..pipeline.shares import anywhere, total

FEEDBACK = 0.7
"""How much of the error that the state before a branch has is to be made good by that branch; the rest is left."""
LEAST = 1e-20


@dataclass(frozen=True)
class Measure:
    """See states [..., width on `axis`] as rows [tokens, width], as they are compared: token by token.

    directions: what a norm without gain makes of them, since the sizes differ by design; `centered` for layer norms.
    """

    axis: int
    directions: bool
    centered: bool

    def __call__(self, state: Tensor) -> Tensor:
        """Return a state's rows, without their size where directions are compared."""
        x = state.movedim(self.axis, -1).flatten(0, -2)
        if not self.directions:
            return x
        x = x - x.mean(-1, keepdim=True) if self.centered else x
        return x / _size(x)


@dataclass(frozen=True)
class Goal:
    """Say what a state shall be on one batch: near `target` [tokens, width]; `weight` [tokens, 1] is a token's size.

    1 is the size of what the original's branch adds, over all tokens.
    """

    measure: Measure
    target: Tensor
    weight: Tensor

    def residual(self, state: Tensor) -> Tensor:
        """Return [tokens, width], whose squares are to be small."""
        return (self.measure(state) - self.target) / self.weight


def goals_of(
    measure: Measure,
    totals: Sequence[Tensor],
    starts: Sequence[Tensor],
    before: Sequence[tuple[Tensor, Tensor]],
    like: Tensor,
) -> list[Goal]:
    """Return the goals on some batches.

    totals, starts: the original's states behind the sum and before it. before: both models' states behind the sum
    before that; how they differ is what the branch cannot know, mostly noise to it, so part of that is left alone.
    like: a state, for a process that has none of these batches.
    """
    plain = replace(measure, directions=False)
    targets, starts = [plain(t) for t in totals], [plain(s) for s in starts]
    sizes = [_size(t) for t in targets]
    added = sum(float(((t - s) / r).square().sum()) for t, s, r in zip(targets, starts, sizes, strict=True))
    unit = max(math.sqrt(total(float(added))), LEAST)
    theirs, ours = [measure(a) for a, _ in before], [measure(b) for _, b in before]
    other = any(a.shape != s.shape for a, s in zip(theirs, starts, strict=bool(before)))
    if anywhere(before) and not anywhere(other):
        none = measure(like)[:0]
        by = _slope([*theirs, none], [*starts, none])
        pairs = zip(targets, theirs, ours, strict=True)
        targets = [t - (1 - FEEDBACK) * by * (a - b) for t, a, b in pairs]
    if measure.directions:
        back = [replace(measure, axis=-1)(t) for t in targets]
        return [Goal(measure, t, torch.tensor(unit)) for t in back]
    return [Goal(measure, t, r * unit) for t, r in zip(targets, sizes, strict=True)]


def _size(x: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True).sqrt() + LEAST


def _slope(x: Sequence[Tensor], y: Sequence[Tensor]) -> Tensor:
    """Return, per channel, the slope of y over x, tokens of y weighted by their size: what a state hands on."""
    a, b = torch.cat(list(x)), torch.cat(list(y))
    w = _size(b) ** -2
    whole = total(w.sum())
    a, b = (v - total((w * v).sum(0)) / whole for v in (a, b))
    return total((w * a * b).sum(0)) / (total((w * a * a).sum(0)) + LEAST)
