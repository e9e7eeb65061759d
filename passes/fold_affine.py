"""Fold the gain and bias of reading norms into the linears that read them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from lnrewrite.algebra.stored import gain_and_bias
from lnrewrite.errors import Code, LnrewriteError, Refusal
from lnrewrite.ir import (
    Edit,
    Exactness,
    FoldReader,
    Kind,
    Proposal,
    SetNorm,
    Site,
    Stream,
    Vectors,
    Where,
)
from lnrewrite.pipeline import Context, Pass

_KINDS = {Kind.LAYER, Kind.RMS, Kind.CRMS, Kind.STD, Kind.L2}
"""Norms by what they read alone: they are that without a gain too, and it stands behind them."""
_CARRIED = {
    Where.EMBEDDING: "the skip carries the norm's gain, so that its readers cannot take it over",
    Where.POST: "the skip carries the norm's gain, so that its readers cannot take it over",
    Where.OUT: "an add follows the gain, not a linear map",
}


@dataclass(frozen=True)
class FoldAffine(Pass):
    """Fold the gain and bias of reading norms into all the linears that read them.

    A bare norm is what other rewrites need (rotations, norm of norm, dropping a norm), and one multiply less to run.
    With u the normalized value and W's columns over the channels, every reader of gamma * u + beta becomes

        W (gamma * u + beta) + c  =  (W diag(gamma)) u + (c + W beta)

    which holds over the reals whatever the norm is, eps included. In norms fold, and inner norms whose consumers are
    all linear (Sub-LN), on no stream too where they can; `final` folds the final norm into the head. Before::

        stream toy width=8
          block h.0 attention pre
            in     layer(eps=1e-05 gamma=@ln.weight beta=@ln.bias) -> @q.weight:1+@q.bias @k.weight:1
            writes @o.weight:0

    After::

        stream toy width=8
          block h.0 attention pre
            in     layer(eps=1e-05) -> @q.weight:1+@q.bias @k.weight:1+@k.bias
            writes @o.weight:0

    A norm that is spelled out (std, l2) stays so, without its gain and bias. A gain that is computed from parameters
    alone is worked out once. Refuses one that cannot be (LN105), a norm that something else than linears reads (LN101),
    a reader that is used elsewhere too (LN102), weights that are computed (LN104), and a bias that a reader has no
    place for (LN103).
    Embedding, trunk and output gains are not addressed: no linear stands alone behind them.

    Source: `fold_ln` of TransformerLens, `fuse_ln_linear` of SliceGPT (arXiv 2401.15024) and QuaRot (2404.00456).
    """

    name: ClassVar[str] = "fold-affine"
    exactness: ClassVar[Exactness] = Exactness.ALGEBRAIC
    everywhere: ClassVar[bool] = True

    final: bool = False

    def plan(self, stream: Stream, context: Context) -> Proposal:
        """Propose one edit for each norm: its affine goes, and every reader takes it over."""
        edits: list[Edit] = []
        refusals: list[Refusal] = []
        skipped = [(b.name, "the block holds no norm") for b in stream.blocks if not b.sites]
        folded: set[Site] = set()
        vectors, beside = Vectors(), stream == context.network.rest
        for place in stream.located():
            name, _, site = place
            if why := self._not_addressed(site):
                skipped.append((name, why))
            elif (blocked := next(_blocked(name, site), None)) and beside:
                skipped.append((name, f"it is on no stream, and {blocked.why}"))
            elif blocked:
                refusals.append(blocked)
            else:  # parallel blocks may hold one norm: its readers are folded with the first, its affine goes from each
                try:
                    width = site.width or stream.width
                    scale, shift = gain_and_bias(replace(site.norm, factor=1.0), width, context, vectors)
                except LnrewriteError as error:
                    refusals.append(Refusal(Code.LN105, name, f"its gain is computed: {error.why}", error.remedy))
                    continue
                readers = () if site in folded else [FoldReader(r, scale, shift) for r in dict.fromkeys(site.readers)]
                edits.append(Edit(place.target, (*readers, SetNorm(site.where, site.norm.bare, index=place.number))))
                folded.add(site)
        return Proposal(tuple(edits), tuple(refusals), tuple(skipped), vectors)

    def _not_addressed(self, site: Site) -> str:
        """Return why the identity does not speak of a site; empty where it does."""
        if site.norm.gamma is None and site.norm.beta is None:
            return "nothing to fold"
        if site.norm.kind not in _KINDS:
            return f"the gain of a {site.norm.kind} norm is a part of it"
        if site.where is Where.INNER and (site.taps or not site.readers):
            return "it is inside the branch and its consumers are not all linear"
        if site.where is Where.FINAL and not self.final:
            return "the final norm is folded with final=true only"
        return _CARRIED.get(site.where, "")


def _blocked(name: str, site: Site) -> Iterator[Refusal]:
    """Yield what stands in the way of folding, most telling first."""
    if hidden := [tap for tap in site.taps if tap in {"linear", "matmul", "mm", "bmm", "conv"}]:
        why = f"it is read by a {hidden[0]} whose weights are quantized, adapted or computed"
        yield Refusal(Code.LN104, name, why, "dequantize or merge the weights, or run propagate-constants, first")
    if site.taps or not site.readers:
        what = f"{site.taps[0]} also reads it" if site.taps else "no linear map reads it"
        yield Refusal(Code.LN101, name, f"{what}, so its gain and bias cannot be folded")
    for reader in site.readers:
        if reader.shared:
            yield Refusal(Code.LN102, name, f"{reader.param} is also used elsewhere", "run untie first")
        if not reader.exact and site.norm.beta is not None:
            yield Refusal(Code.LN103, name, f"{reader.param} has no place for a shift")
