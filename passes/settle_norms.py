"""Write a norm that is none as the affine map it is, and one that is an RMSNorm or a LayerNorm as that."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import numpy as np

from lnrewrite.algebra.basis import Closed
from lnrewrite.algebra.stored import gain_and_bias
from lnrewrite.errors import Code, LnrewriteError, Refusal
from lnrewrite.ir import (
    Block,
    Center,
    Edit,
    Exactness,
    FoldReader,
    Kind,
    Linear,
    Norm,
    Operation,
    Proposal,
    ScaleWriter,
    SetNorm,
    Site,
    Stream,
    Value,
    Vectors,
    Where,
)
from lnrewrite.pipeline import Context, Pass

LARGEST = 1e-5
"""The largest clamp on a mean square that may become an eps: that of usual norms."""
SMALLEST = 1e-30
"""The least eps of what a norm with any becomes: rows of zeros stay zeros, in float32 too."""


@dataclass(frozen=True)
class SettleNorms(Pass):
    """Fold norms that divide by one number whatever they read, and write l2 and std norms as what they are.

    With M = I - 11^T/n the matrix that takes the mean off, c a number and v the variance of what is read (for rms
    norms the mean square):

        g M x / c + b                  =  affine: its readers take W diag(g/c) M and W b, or its writers do
        LayerNorm_e(x), e far above v  =  M x / sqrt(e)            but for v / (2 e) of itself
        g x / max(|x|, e)              =  RMSNorm_{e^2/n}(x) g / sqrt(n)   but for e^2 / (2 |x|^2) of itself
        g x / sqrt(|x|^2 + e)          =  RMSNorm_{e/n}(x) g / sqrt(n)
        (x - m) / (s + 0)              =  LayerNorm_0(x)           unbiased: over sqrt(n / (n - 1))
        (x - m) / sqrt(u + e)          =  LayerNorm_{e(n-1)/n}(x) sqrt((n - 1) / n)   u = x.var(), unbiased in torch

    So a GPT-2 whose norms were taken away, which is stored as LayerNorms of eps 1e12 with gains times 1e6, has none
    left; from eps 1e9 on a norm counts as one number. SimpleRMSNorm is an RMSNorm, and moves and rotates as one.

    Before::

        stream toy width=8
          block h.0 mlp none
            in     layer(eps=1000000000000.0 gamma=@g) -> @up:1
            writes @down:0
          final  l2(eps=1e-12 gamma=@f) -> @head:1

    After::

        stream toy width=8
          block h.0 mlp none
            reads  @up:1
            writes @down:0
          final  rms(eps=1.25e-25 gamma=@f) -> @head:1

    Refuses l2 and std norms whose eps stands beside the root, or clamps a mean square above 1e-5: they are others' only
    as it goes to 0 (LN129); and norms that are none, but whose neighbors are shared (LN102), have no place for a shift
    (LN103), or are out of sight (LN101, LN104).

    Source: You can remove GPT2's LayerNorm (arXiv 2409.13710), SimpleRMSNorm (2307.14995); the bounds are derived.
    """

    name: ClassVar[str] = "settle-norms"
    exactness: ClassVar[Exactness] = Exactness.ASYMPTOTIC
    everywhere: ClassVar[bool] = True

    def plan(self, stream: Stream, context: Context) -> Proposal:
        """Propose one edit for each norm that is none, or another."""
        edits, refusals, vectors, done = list[Edit](), list[Refusal](), Vectors(), set[Site]()
        for place in stream.located():
            name, block, site = place
            if site.norm.over or not (site.norm.fixed or site.norm.kind in (Kind.L2, Kind.STD)):
                continue
            width, operations = site.width or stream.width, list[Operation]()
            try:
                if site.norm.fixed:
                    gain, shift = gain_and_bias(site.norm, width, context, vectors)
                    assert gain is not None  # the number is in it
                    if site not in done:  # parallel blocks may hold one norm
                        operations += _folded(stream, block, site, Center(width), gain, shift)
                    operations.append(SetNorm(site.where, None, index=place.number))
                    bound = 1 / (2 * site.norm.eps) if site.norm.eps else 0.0
                    note = f"error below {bound:.3g} variance of itself" if bound else ""
                else:
                    norm, factor = _settled(site.norm, width)
                    gamma = vectors.add(context.gain(site.norm) * factor * np.ones(width))
                    operations.append(SetNorm(site.where, norm, gamma, index=place.number))
                    bound = max(site.norm.eps**2, norm.eps * width) / 2 if _clamped(site.norm) else 0.0
                    note = f"error below {bound:.3g} / |x|^2 of itself" if bound else ""
            except Closed as closed:
                refusals.append(closed.refusal(name))
            except LnrewriteError as error:
                refusals.append(Refusal(Code.LN105, name, f"its gain is computed: {error.why}", error.remedy))
            else:
                done.add(site)
                edits.append(Edit(place.target, tuple(operations), note=note, bound=bound))
        return Proposal(tuple(edits), refusals=tuple(refusals), vectors=vectors, otherwise="it is the norm it seems")


def _folded(
    stream: Stream, block: Block | None, site: Site, center: Center, gain: Value, shift: Value | None
) -> list[Operation]:
    """Give the map to all that reads the norm or, at a branch's end, to all that it reads."""
    centered = site.norm.kind is not Kind.RMS
    if site.where is Where.OUT:
        writers = () if block and block.scaled("written") else stream.producers(block, site)
        _free(writers, Code.LN104, "its input is not computed by linear maps alone", shift is not None)
        first = writers[0]
        means = [ScaleWriter(w, center) for w in writers if centered]
        return [*means, *(ScaleWriter(w, gain, shift if w is first else None) for w in writers)]
    if site.where in (Where.POST, Where.EMBEDDING):
        raise Closed(Code.LN101, "the skip carries what it gives, so that its readers cannot take it over")
    what = f"{site.taps[0]} also reads it" if site.taps else "no linear map reads it"
    _free(() if site.taps else site.readers, Code.LN101, what, shift is not None)
    if centered and (apart := [r.param for r in site.readers if r.apart]):
        raise Closed(Code.LN104, f"{apart[0]} keeps channels apart, and takes no mean off")
    folds: list[Operation] = [FoldReader(r, gain, shift) for r in site.readers]
    return folds + [FoldReader(r, center) for r in site.readers if centered]


def _free(linears: tuple[Linear, ...], code: Code, otherwise: str, shift: bool) -> None:
    """Raise Closed where linears are none, shared, or have no place for a shift."""
    if not linears:
        raise Closed(code, otherwise)
    if shared := [r.param for r in linears if r.shared]:
        raise Closed(Code.LN102, f"{shared[0]} is also used elsewhere", "run untie first")
    if shift and (bad := [r.param for r in linears if not r.exact]):
        raise Closed(Code.LN103, f"{bad[0]} has no place for a shift")


def _clamped(norm: Norm) -> bool:
    return norm.kind is Kind.L2 and norm.variant == 0


def _settled(norm: Norm, width: int) -> tuple[Norm, float]:
    """Return the rms or layer norm that an l2 or std norm is, and the factor of its gain. Raises Closed."""
    rooted = norm.variant == 2
    beside = norm.variant == 1 or (norm.kind is Kind.STD and not rooted)
    if beside and norm.eps > 1e-20:
        size = "deviation" if norm.kind is Kind.STD else "length"
        why = f"eps is added to the {size} itself: another norm would be off by eps / {size}"
        raise Closed(Code.LN129, why)
    if _clamped(norm) and norm.eps**2 > LARGEST * width:
        why = f"lengths below {norm.eps:.3g} count as that: another norm would be off by {norm.eps**2 / 2:.3g} / |x|^2"
        raise Closed(Code.LN129, why)
    if norm.kind is Kind.STD:
        share = (width - 1) / width if norm.variant else 1.0
        kind, eps, factor = Kind.LAYER, norm.eps * share if rooted else 0.0, sqrt(share)
    else:
        kind, eps, factor = Kind.RMS, (norm.eps if rooted else norm.eps**2) / width, 1 / sqrt(width)
    eps = max(eps, SMALLEST) if norm.eps else eps
    return Norm(kind, eps, norm.gamma if not norm.computed else None, norm.beta, axis=norm.axis), factor
