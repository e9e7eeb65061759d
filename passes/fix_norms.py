"""Make every norm divide by one number, in the form that classes with norms can hold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt
from typing import ClassVar

import numpy as np

from lnrewrite.algebra.fitting import fit, of_all, spread, unit, usual
from lnrewrite.errors import Code, LnrewriteError, Refusal
from lnrewrite.ir import Edit, Exactness, Kind, Proposal, SetNorm, Site, Stream, Vectors, Where
from lnrewrite.ir.parts import FIXED
from lnrewrite.pipeline import Context, Pass


@dataclass(frozen=True)
class FixNorms(Pass):
    """Take the norms of a stream away and keep their operators: with a huge eps they divide by one number.

    With s the size that a norm divides by (the standard deviation or, for rms norms, the RMS), e the new eps and c one
    number for each channel, fitted so that c (x - m) comes closest to (x - m) / s on the calibration data,

        g N(x) + b  ~  g c (x - m) + b  =  (g c sqrt(e)) N_e(x) + b        but for v / (2 e) of itself, v = s^2

    Nothing of the network but numbers changes, so that a checkpoint stays one of its stock class: of GPT-2, the form
    in which networks without LayerNorm are published. The final norm goes too, as configs hold one eps for all norms.
    Heal the result as it is; `settle-norms` then folds what is left of the norms, exactly up to the bound.

    Refuses norms of other kinds (LN111), gains that are computed (LN105), norms behind sums or at the ends of branches,
    which `place` takes away (LN110).

    Source: You can remove GPT2's LayerNorm (arXiv 2409.13710), whose checkpoints have eps 1e12 and gains times 1e6.
    """

    name: ClassVar[str] = "fix-norms"
    exactness: ClassVar[Exactness] = Exactness.CALIBRATED
    needs_data: ClassVar[bool] = True
    needs_blocks: ClassVar[bool] = True
    shares: ClassVar[bool] = True

    eps: float = 1e12

    def __post_init__(self) -> None:
        if not FIXED <= self.eps <= 1e24:
            raise ValueError(f"eps must be from {FIXED:g} to 1e24, where a norm divides by one number")

    def plan(self, stream: Stream, context: Context) -> Proposal:
        """Propose one edit for each norm that reads the stream."""
        edits, refusals, vectors, done = list[Edit](), list[Refusal](), Vectors(), dict[Site, Edit]()
        samples = context.samples() if stream.blocks else {}
        for place in stream.located():
            name, block, site = place
            if site.norm.fixed or site.where is Where.INNER:
                continue
            if site.norm.kind not in (Kind.LAYER, Kind.RMS) or site.norm.over:
                refusals.append(Refusal(Code.LN111, name, f"a {site.norm.kind} norm has no such form"))
            elif site.where not in (Where.IN, Where.FINAL):
                refusals.append(Refusal(Code.LN110, name, "it norms no state of the stream", "run place{to=pre} first"))
            else:
                seen = samples[block.name].state if block else samples[stream.blocks[-1].name].total
                try:
                    edit = done.get(site) or self.fixed(place.target, place.number, site, seen, context, vectors)
                except LnrewriteError as error:
                    refusals.append(Refusal(Code.LN105, name, f"its gain is computed: {error.why}", error.remedy))
                else:
                    done[site] = replace(edit, target=place.target)
                    edits.append(done[site])
        return Proposal(tuple(edits), tuple(refusals), vectors=vectors, otherwise="it reads no state of the stream")

    def fixed(self, target: str, index: int, site: Site, seen: np.ndarray, context: Context, vectors: Vectors) -> Edit:
        """Return the edit of one norm; `seen` [tokens, width] is what it reads."""
        norm = site.norm
        base = seen - seen.mean(-1, keepdims=True) if norm.kind is Kind.LAYER else seen
        found = fit(base, unit(norm.kind, seen, norm.eps), usual(seen), bool(norm.beta))
        gain = context.gain(norm) * np.ones(seen.shape[1])
        gamma = vectors.add(gain * found.scale * sqrt(self.eps))
        beta = context.values(norm.beta).reshape(-1) if norm.beta else None
        shift = None if beta is None else vectors.add(beta + gain * (0.0 if found.shift is None else found.shift))
        bound = float(of_all(spread(norm.kind, seen) ** 2).max()) / (2 * self.eps)
        made = replace(norm, eps=self.eps, gamma=None if norm.computed else norm.gamma, computed=False)
        operation = SetNorm(site.where, made, gamma, shift, index)
        return Edit(target, (operation,), expected=found.error, note=f"one number but for {bound:.1g} of itself")
