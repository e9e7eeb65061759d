"""Put a norm before the last map of each branch (Sub-LN), with gains fitted on data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from lnrewrite.algebra.fitting import careful_eps, fit, unit, usual
from lnrewrite.algebra.placement import usual_norm
from lnrewrite.errors import Code, Refusal
from lnrewrite.ir import Block, Edit, Exactness, Norm, Proposal, SetNorm, Stream, Vectors, Where
from lnrewrite.pipeline import Context, Pass
from lnrewrite.pipeline.shares import anywhere


@dataclass(frozen=True)
class NormWriters(Pass):
    """Put a norm before the map that ends each branch: with norms before the branches too, that is Sub-LN.

    With h what the map W reads, N(h) = h / s(h), and w = 1 / s(x')^2, as the next norm divides the sum by its size::

        W h + c  ~  W (g N(h)) + c        g = E[w h N(h)] / E[w N(h)^2] per channel

    Exact but for one scalar per token: the size of h, for which the gain stands. Given data, the branches' own weights
    are fitted as well, as `place` has them.

    Before (norm-writers)::

        stream net width=4
          block 0 mlp pre
            in     rms(eps=1e-05 gamma=@g) -> @a:1
            writes @b:0

    After::

        stream net width=4
          block 0 mlp pre
            in     rms(eps=1e-05 gamma=@g) -> @a:1
            inner  rms(eps=1e-05 gamma=@0.norm_inner.weight) -> @b:0
            writes @b:0

    Refuses branches that do not end in one linear map of a value with its channels last (LN110), and dead ones
    (LN112). Source: Wang et al., Magneto (arXiv 2210.06423); the fit is that of `place`.
    """

    name: ClassVar[str] = "norm-writers"
    exactness: ClassVar[Exactness] = Exactness.CALIBRATED
    needs_data: ClassVar[bool] = True
    needs_blocks: ClassVar[bool] = True
    shares: ClassVar[bool] = True

    norm: Literal["auto", "layer", "rms"] = "auto"
    blocks: str | None = None
    fit: Literal["auto", "reconstruct", "constants"] = "auto"

    @property
    def plainer(self) -> Pass | None:
        """Return the pass with constants alone, where this one has the branches' weights fitted."""
        return replace(self, fit="constants") if self.fit != "constants" else None

    def plan(self, stream: Stream, context: Context) -> Proposal:
        """Propose a norm for each block that has none before its last map."""
        edits, refusals, skipped, vectors = list[Edit](), list[Refusal](), list[tuple[str, str]](), Vectors()
        ends = [(f"{stream.name}.{w}", s) for w, s in (("embedding", stream.embedding), ("final", stream.final))]
        skipped += [(name, "embedding and final norms belong to no block") for name, site in ends if site]
        wanted = list[Block]()
        selected = context.selected(self.blocks)
        for block in stream.blocks:
            if block.name not in selected:
                skipped.append((block.name, "not selected"))
            elif _normed(block):
                skipped.append((block.name, "a norm stands there already"))
            elif not block.anchor.hidden:
                why = "it does not end in one linear map of one value"
                refusals.append(Refusal(Code.LN110, block.name, why, "exclude it with blocks="))
            else:
                wanted.append(block)
        if not wanted:
            return Proposal((), tuple(refusals), tuple(skipped))
        kind, eps, beta = usual_norm((s.norm for _, s in stream.sites() if s.where is not Where.INNER), self.norm)
        axes = {b.anchor.hidden: -1 for b in wanted} | {b.anchor.total: b.anchor.axis for b in wanted}
        seen = context.recorded(axes)
        for block in wanted:
            hidden, total = seen[block.anchor.hidden], seen[block.anchor.total]
            if not anywhere(hidden.any()):
                why = "what its last map reads is zero on the calibration data"
                refusals.append(Refusal(Code.LN112, block.name, why, "exclude it with blocks="))
                continue
            weight = usual(hidden)
            if len(total) == len(hidden):
                weight = weight / np.maximum((total * total).mean(-1), 1e-300)
            small = careful_eps(eps, hidden)
            found = fit(unit(kind, hidden, small), hidden, weight, beta)
            gamma, shift = vectors.add(found.scale), None if found.shift is None else vectors.add(found.shift)
            index = sum(s.where is Where.INNER for s in block.sites)
            put = SetNorm(Where.INNER, Norm(kind, small), gamma, shift, index)
            edits.append(Edit(block.name, (put,), found.error))
        return Proposal(tuple(edits), tuple(refusals), tuple(skipped), vectors)


def _normed(block: Block) -> bool:
    """Return whether a norm inside the branch is all that its writers read."""
    return any(s.where is Where.INNER and not s.taps and s.readers == block.writers for s in block.sites)
