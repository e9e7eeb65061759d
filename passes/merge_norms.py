"""Make one norm of a norm of a norm."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import copysign, sqrt
from typing import ClassVar

import numpy as np

from lnrewrite.algebra.basis import Closed
from lnrewrite.errors import Code, Refusal
from lnrewrite.ir import Edit, Exactness, Kind, Norm, Proposal, SetNorm, Stream, Vectors
from lnrewrite.pipeline import Context, Pass


@dataclass(frozen=True)
class MergeNorms(Pass):
    """Merge a norm with the norm that it alone reads: N2(c N1(x)), where c is one number for all channels.

    With r the size that N1 divides by (its RMS or, for layer norm, its standard deviation) and N the kind of N1 (or
    layer, where N2 is one and both are)

        N2_e2(c N1_e1(x))  =  sign(c) / sqrt(1 + e2/c^2)  N_e(x),    e = e1 e2 / (c^2 + e2)

    so eps is carried and the factor goes into the gain. LayerNorm of RMSNorm is a LayerNorm only as eps goes to 0: with
    m and v the mean and variance of x it is (x - m) / sqrt(v (1 + e2) + e2 m^2 + e1 e2). `asymptotic=true` allows it:
    dropping e2 m^2 changes the result by less than e2 m^2 / (2 v) of itself.

    Before::

        stream toy width=8
          block h.0 mlp pre
            in     rms(eps=0.5) -> @up:1
            writes @down:0
          final  rms(eps=1.0 gamma=@g) over layer(eps=1.0) -> @head:1

    After::

        stream toy width=8
          block h.0 mlp pre
            in     rms(eps=0.5) -> @up:1
            writes @down:0
          final  layer(eps=0.5 gamma=@g) -> @head:1

    Refuses a gain in between that differs from channel to channel, or a bias (LN128), kinds that do not merge (LN111),
    and LayerNorm of RMSNorm without `asymptotic=true` (LN129).

    Source: derived; without eps, norms are idempotent.
    """

    name: ClassVar[str] = "merge-norms"
    everywhere: ClassVar[bool] = True

    asymptotic: bool = False

    @property
    def exactness(self) -> Exactness:
        """Return asymptotic where that is allowed, else algebraic."""
        return Exactness.ASYMPTOTIC if self.asymptotic else Exactness.ALGEBRAIC

    def plan(self, stream: Stream, context: Context) -> Proposal:
        """Propose one edit for each norm of a norm."""
        edits, refusals, vectors = list[Edit](), list[Refusal](), Vectors()
        for place in stream.located():
            name, _, site = place
            if not site.norm.over:
                continue
            try:
                norm, factor = self._merged(site.norm, site.norm.over, context)
            except Closed as closed:
                refusals.append(closed.refusal(name))
                continue
            gamma = context.gain(norm) * factor * np.ones(site.width or stream.width)
            note = "" if norm.kind is site.norm.over.kind else f"error below {site.norm.eps:.1g} mean^2 / (2 variance)"
            edits.append(
                Edit(place.target, (SetNorm(site.where, norm, vectors.add(gamma), index=place.number),), note=note)
            )
        return Proposal(tuple(edits), refusals=tuple(refusals), vectors=vectors, otherwise="it does not read a norm")

    def _merged(self, top: Norm, under: Norm, context: Context) -> tuple[Norm, float]:
        """Return the one norm, and the factor of its gain. Raises Closed where there is none."""
        kinds = {top.kind, under.kind}
        if not kinds <= {Kind.LAYER, Kind.RMS} or top.computed or under.over:
            raise Closed(Code.LN111, f"a {top.kind} norm of a {under.kind} norm cannot be merged")
        if under.kind is Kind.RMS and top.kind is Kind.LAYER and not self.asymptotic:
            why = "LayerNorm of RMSNorm is one norm only in the limit of eps going to 0"
            raise Closed(Code.LN129, why, "set asymptotic=true if the mean is small")
        c = 1.0
        if under.gamma is not None:
            gain = np.asarray(context.gain(under) if not under.computed else [0.0, 1.0])
            if not np.all(gain == gain.flat[0]) or gain.flat[0] == 0:
                raise Closed(Code.LN128, "the gain of the norm below differs from channel to channel")
            c = float(gain.flat[0])
        if under.beta is not None and np.any(context.values(under.beta)):
            raise Closed(Code.LN128, "the norm below has a bias")
        eps = under.eps * top.eps / (c * c + top.eps)
        kind = Kind.LAYER if Kind.LAYER in kinds else Kind.RMS
        return replace(top, kind=kind, eps=eps, over=None), copysign(1 / sqrt(1 + top.eps / (c * c)), c)
