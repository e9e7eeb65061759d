"""Say from sizes alone how far a conversion with constants will turn each state: the spread of what they replace.

Of every token two numbers change, and constants take their place. Let s be the size that its state has, or would have
without the trunk norms before it; b the size of what a branch adds to that, r of what its writers give. What the branch
reads has the size 1 behind an in norm or a trunk norm, else s: g is that in the other placement by that in this one.
What it adds there is r g, s r g behind a trunk norm, and one size for all behind an out norm: f is that by b. Then

    error  =  rms over tokens of  atan t |(f / mean f - 1) + (g / mean g - 1)|

where t is how far the branch turns its state: the size of its part across the sum, over the sum's. (Norms see no more
of a state than its direction.) The second term stands for what a branch does that is not linear in what it reads: an
attention or a gated MLP that reads twice the size gives about four times as much. The size of what an attention's
queries read is besides the temperature of its softmax. That moves its weights to other tokens, whose values turn the
branch and do not lengthen it, so it adds to the square a term of its own: the mean of (t (g / mean g - 1))^2. Where the
block has norms within, queries and keys have sizes of their own, and there is no such term.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ir import Block, Placement, Where, sums
from .measuring import Meter

NORMS = {
    Placement.NONE: "", Placement.POST: "t", Placement.PRE: "i", Placement.PERI: "io", Placement.OUTPUT: "o",
}  # fmt: skip
"""Which norms a block has in each placement: i, in; o, out; t, on the trunk."""


def expected(meter: Meter, index: int, block: Block, grown: Tensor | None) -> dict[str, float]:
    """Return, for every placement but its own, how far converting a block is expected to turn its state.

    In radians, root mean square over tokens; nothing where it is unknown. index: the number of its sum in its stream.
    grown: `growth` at that sum.
    """
    here, turning = NORMS.get(block.placement), meter.turning[block.name]
    out = block.at(Where.OUT)
    nodes = block.anchor.branch, out.origin[0] if out else block.anchor.branch
    values = [meter.states[index].tokens, *(meter.values[n][0].tokens for n in nodes)]
    if here is None or grown is None or not turning or len({len(v) for v in (*values, grown, torch.cat(turning))}) > 1:
        return {}
    kept = torch.stack([*values, grown]).amin(0) > 0
    share = torch.cat(turning).double()[kept]
    state, branch, raw, by = (v[kept] for v in (*values, grown))
    size, now, one, found = state * by, branch * by, torch.ones_like(state), {}
    for placement, norms in NORMS.items():
        if placement is not block.placement:
            read = (one if set("it") & set(norms) else size) / (one if "i" in here else state)
            added = (one if "o" in norms else raw * read * (size if "t" in norms else 1)) / now
            found[str(placement)] = error(share, added, read, block.kind == "attention" and not block.at(Where.INNER))
    return found


def growth(meter: Meter) -> list[Tensor | None]:
    """Return, for each sum, by how much each token's state would be larger without the trunk norms before it.

    None where that is unknown: behind a sum of other tokens than the source's.
    """
    by: Tensor | None = torch.ones_like(meter.states[0].tokens)
    found = []
    for k, group in enumerate(sums(meter.stream), 1):
        found.append(by)
        if by is not None and group[-1].at(Where.POST):
            total, state = meter.values[group[-1].anchor.total][0].tokens, meter.states[k].tokens
            grown = total / state.clamp_min(torch.finfo(state.dtype).tiny)
            by = by * grown if len(grown) == len(by) else None
    return found


def error(share: Tensor, added: Tensor, read: Tensor, tempered: bool = False) -> float:
    """Return the root mean square angle that comes of share times what two factors differ from their means by.

    tempered: whether what is read sets the temperature of a softmax as well.
    """
    if not len(share):
        return 0.0
    weight = share.square() / share.square().sum().clamp_min(torch.finfo(share.dtype).tiny)
    f, g = (by / (weight * by).sum().clamp_min(1e-300) - 1 for by in (added, read))
    apart = (f + g).square() + (g.square() if tempered else 0)
    return float((share * apart.sqrt()).atan().square().mean().sqrt())
