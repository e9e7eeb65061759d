"""Say from sizes alone how far a conversion with constants will turn each state: the spread of what they replace.

Of every token two numbers change, and constants take their place. What the branch reads grows by g = s, the size of its
state, where an in norm goes, and by 1 / s where one comes. What it adds then has the size r g, with r that of what its
writers give, or behind an out norm one size for all; before it had the size b. With f = r g / b, or 1 / b,

    error  =  rms over tokens of  t |(f / mean f - 1) + (g / mean g - 1)|

where t is how far the branch turns its state: the size of its part across the sum, over the sum's. (Norms see no more
of a state than its direction.) The second term stands for what a branch does that is not linear in what it reads: an
attention or a gated MLP that reads twice the size gives about four times as much.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ir import Block, Placement, Where
from .measuring import Meter

NORMS = {
    Placement.NONE: "", Placement.POST: "", Placement.PRE: "i", Placement.PERI: "io", Placement.OUTPUT: "o",
}  # fmt: skip
"""Which norms a branch has in each placement: i, in; o, out. One behind the sum turns no state."""


def expected(meter: Meter, index: int, block: Block) -> dict[str, float]:
    """Return, for every placement but its own, how far converting a block alone is expected to turn its state.

    In radians, root mean square over tokens; nothing where it is unknown. index: the number of its sum in its stream.
    """
    here, turning = NORMS.get(block.placement), meter.turning[block.name]
    out = block.at(Where.OUT)
    nodes = block.anchor.branch, out.origin[0] if out else block.anchor.branch
    values = [meter.states[index].tokens, *(meter.values[n][0].tokens for n in nodes)]
    if here is None or not turning or len({len(v) for v in values}) > 1:
        return {}
    share, found = torch.cat(turning).double(), {}
    if len(share) != len(values[0]):
        return {}
    kept = (values[0] > 0) & (values[1] > 0) & (values[2] > 0)
    state, branch, raw = (v[kept] for v in values)
    for placement, norms in NORMS.items():
        if placement is not block.placement:
            read = torch.ones_like(state)
            if ("i" in norms) != ("i" in here):
                read = state if "i" in here else 1 / state
            added = (1 if "o" in norms else raw * read) / branch
            found[str(placement)] = error(share[kept], added, read)
    return found


def error(share: Tensor, added: Tensor, read: Tensor) -> float:
    """Return the root mean square of share times what two factors differ from their means by, together."""
    if not len(share):
        return 0.0
    weight = share.square() / share.square().sum().clamp_min(torch.finfo(share.dtype).tiny)
    apart = sum(f / (weight * f).sum().clamp_min(1e-300) - 1 for f in (added, read))
    assert isinstance(apart, Tensor)
    return float((share * apart).square().mean().sqrt())
