"""Say from sizes alone how far a conversion with constants will move each block: the spread of what constants replace.

What a branch adds to its state, relative to it, depends on the state's size s in one of three ways:

    constant   none, post    the branch sees the size, or the trunk has none
    1 / s      pre           the branch is blind to the size
    c / s      peri, output  and its own size is divided out

A conversion replaces the numbers of one way by those of another and one constant each, so it is wrong where they differ
from token to token: by their spread, weighted by how much of the state the branch is.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import torch
from torch import Tensor

from ..ir import Block, Placement, Where
from .measuring import Meter


class Way(enum.Enum):
    """Name how a branch's part of its state follows the state's size."""

    CONSTANT = enum.auto()
    BLIND = enum.auto()
    DIVIDED = enum.auto()


WAYS: Mapping[Placement, Way] = {
    Placement.NONE: Way.CONSTANT, Placement.POST: Way.CONSTANT, Placement.PRE: Way.BLIND,
    Placement.PERI: Way.DIVIDED, Placement.OUTPUT: Way.DIVIDED,
}  # fmt: skip


def expected(meter: Meter, index: int, block: Block) -> dict[str, float]:
    """Return, for every placement but its own, the relative error expected of converting a block; none where unknown.

    index: the number of the block's sum in its stream.
    """
    here = WAYS.get(block.placement)
    values = [meter.states[index], *(meter.values[n][0] for n in _sizes(block))]
    if here is None or len({len(v.tokens) for v in values}) > 1:
        return {}
    state, branch, raw, total = (v.tokens for v in values)
    parts = {
        frozenset((Way.CONSTANT, Way.BLIND)): state,
        frozenset((Way.BLIND, Way.DIVIDED)): branch if here is Way.BLIND else raw,
        frozenset((Way.CONSTANT, Way.DIVIDED)): branch if here is Way.CONSTANT else raw * state,
    }
    share = branch / total.clamp_min(torch.finfo(total.dtype).tiny)
    found = {}
    for placement, way in WAYS.items():
        if placement is not block.placement:
            found[str(placement)] = 0.0 if way is here else spread(parts[frozenset((here, way))], share)
    return found


def spread(sizes: Tensor, share: Tensor) -> float:
    """Return the least root mean square of share (sizes / c - 1) over all constants c."""
    kept = sizes > 0
    s, w = sizes[kept], share[kept].square()
    if not len(s) or not float((w * s.square()).sum()):
        return 0.0
    c = (w * s.square()).sum() / (w * s).sum()
    return float((w * (s / c - 1).square()).mean().sqrt())


def _sizes(block: Block) -> list[str]:
    """Return the nodes of a block's branch, of it before an out norm, and of its sum."""
    out = block.at(Where.OUT)
    return [block.anchor.branch, out.origin[0] if out else block.anchor.branch, block.anchor.total]
