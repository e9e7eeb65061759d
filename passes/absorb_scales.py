"""Take constant factors beside the stream into the weights, gains and eps next to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lnrewrite.algebra.trunk import Absorber
from lnrewrite.ir import Exactness, Proposal, Stream
from lnrewrite.pipeline import Context, Pass


@dataclass(frozen=True)
class AbsorbScales(Pass):
    """Absorb LayerScale, residual multipliers, DeepNorm and KEEL alphas, 1/sqrt(l) behind norms, and trunk scalars.

    With D a factor (a number, or one per channel) and N_eps a norm:

        x + D (W h + c)         =  x + (D W) h + D c                   LayerScale, residual multipliers: into the writer
        s (g N(x) + b)          =  (s g) N(x) + s b                    LayerNorm Scaling, factors behind an out norm
        N_eps(s f)              =  sign(s) N_{eps/s^2}(f)              scalar gates before an out norm
        N_eps(a x + W h + c)    =  N_{eps/a^2}(x + (W h + c) / a)      DeepNorm, KEEL
        s_l (x + v_l), read by N_eps: carry x^ = x / S, S the product of the s so far, v_l / S and eps / S^2
        D (x + W h + c) + s     =  D (x + W h + c + D^-1 s)            stored norms of the trunk, vectors: the trunk
                                   is carried without D, readers take D, writers D^-1; norms read one number

    Before::

        stream toy width=8
          block h.0 attention pre
            in     layer(eps=1e-05 gamma=@g beta=@b) -> @q:1(inexact)
            scale  read *0.5
            scale  written *@lambda vector
            writes @o:0+@c
          block h.1 mlp post scale=2.0
            post   layer(eps=4e-06) -> @head:1
            reads  @up:1
            writes @down:0

    After::

        stream toy width=8
          block h.0 attention pre
            in     layer(eps=1e-05 gamma=@g beta=@b) -> @q:1(inexact)
            writes @o:0+@c
          block h.1 mlp post
            post   layer(eps=1e-06) -> @head:1
            reads  @up:1
            writes @down:0

    So batch norms, PowerNorm and Unified Normalization behind sums go (where all of them can), and Admin's omega goes
    into the gain of the norm before it.

    Refuses a factor whose neighbours are shared (LN102), out of sight (LN104), or that is computed (LN105), one per
    channel before a norm (LN125), and factors of the trunk that something else would see, that are zero, that a norm
    would see as several, or that would take its size out of 1e-2 to 1e2 (LN126; where no norm sees it 1e-6 to 1e6).

    Source: Xiong et al. DeepNorm (arXiv 2203.00555), KEEL (2601.19895), LayerNorm Scaling (2502.05795), LayerScale
    (2103.17239), Admin (2004.08249), PowerNorm (2003.07845); the eps terms are derived.
    """

    name: ClassVar[str] = "absorb-scales"
    exactness: ClassVar[Exactness] = Exactness.ALGEBRAIC

    def plan(self, stream: Stream, context: Context) -> Proposal:
        """Propose an edit for each block with factors, and for each norm that reads a trunk whose size changes."""
        absorber = Absorber(stream, context)
        edits = absorber.edits()
        refusals = tuple(absorber.refusals)
        return Proposal(
            tuple(edits), refusals=refusals, vectors=absorber.vectors, otherwise="no factor stands beside it"
        )
