"""Work out what parameters alone decide, once, and take out what it turns out to be nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lnrewrite.errors import Code, LnrewriteError, Refusal
from lnrewrite.ir import Bypass, Edit, Exactness, Freeze, Gate, Proposal, Stream
from lnrewrite.pipeline import Context, Pass


@dataclass(frozen=True)
class PropagateConstants(Pass):
    """Store weights, gains and factors that are computed from parameters, and drop factors 1 and terms 0.

    Whatever operators compute it, what depends on parameters alone is one set of numbers: it is run once, in float64,
    and stored, so that other passes see a plain parameter (sigma-reparametrization, weight standardization, a softmax
    over stored logits, 1 - gate). A stored gate that is open or shut is a gate no more:

        1 * x      =  x
        x + 0 * f  =  x                for every finite f: what computes f is not run again

    A TaperNorm whose gate has arrived at 0 has no norm left after it. Before::

        stream toy width=8
          block h.0 mlp none
            scale  read *@size
            reads  @up:1
            writes @down:0

    After::

        stream toy width=8
          block h.0 mlp none
            scale  read *@size
            reads  @up:1
            writes @down:0

    Which says nothing of what computes `size`: a picture leaves that out, and what is no picture yet, such as a weight
    that is computed, comes into one by this pass. Quantized weights, which are computed from integers, stay as they
    are, and so does what depends on an input's size. Refuses what does not run by itself (LN105).

    Source: constant folding; the gates of TaperNorm (arXiv 2602.10408), sigma-reparam (2303.06296), weight
    standardization (1903.10520).
    """

    name: ClassVar[str] = "propagate-constants"
    exactness: ClassVar[Exactness] = Exactness.ALGEBRAIC
    everywhere: ClassVar[bool] = True

    def plan(self, stream: Stream, context: Context) -> Proposal:
        """Propose one edit for each value that is stored, and for each gate that is 0 or 1; once for all streams."""
        edits, refusals = list[Edit](), list[Refusal]()
        if stream.width:
            return Proposal(otherwise="it is not a computed weight")
        target = stream.blocks[0].name
        for node in context.network.computed:
            try:
                if np.isfinite(context.values(node)).all():
                    edits.append(Edit(target, (Freeze(node),), note=f"{node} is stored"))
            except LnrewriteError as error:
                refusals.append(Refusal(Code.LN105, node, f"it does not run by itself: {error.why}", error.remedy))
        dropped = {g.node: g for g in context.network.gates if _idle(g, context)}
        edits += [Edit(target, (Bypass(g.node, g.kept),), note=f"{g.by} is {g.idle:g}") for g in dropped.values()]
        return Proposal(tuple(edits), refusals=tuple(refusals), otherwise="it is not a computed weight")


def _idle(gate: Gate, context: Context) -> bool:
    """Return whether a gate does nothing."""
    try:
        by = context.values(gate.by) if isinstance(gate.by, str) else np.asarray(gate.by)
    except LnrewriteError:
        return False
    return bool(by.size) and bool(np.all(by == gate.idle))
