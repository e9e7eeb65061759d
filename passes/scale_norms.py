"""Give the norms of a network the factors of LayerNorm Scaling, and their gains what these take away."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import numpy as np

from lnrewrite.errors import Code, LnrewriteError, Refusal
from lnrewrite.ir import (
    Affine,
    Block,
    Edit,
    Exactness,
    Kind,
    Number,
    Proposal,
    SetNorm,
    Site,
    Stream,
    Vectors,
    Where,
    layers,
)
from lnrewrite.pipeline import Context, Pass


@dataclass(frozen=True)
class ScaleNorms(Pass):
    """Divide what the norms of layer l give by sqrt(l), and multiply their gains by it.

    LayerNorm Scaling trains a network whose norms give 1 / sqrt(l) (g N(x) + b). A network that was trained without
    those factors keeps its outputs only if its gains make up for them, so that is what is written::

        g N(x) + b  =  1 / sqrt(l) (sqrt(l) g N(x) + sqrt(l) b)

    The form is that of the paper, the starting point for training on with its factors fixed; what a network computes
    does not change. A layer ends with its MLP; where there is none, each sum is a layer. `absorb-scales` goes back.

    Before::

        stream toy width=8
          block h.0 mlp pre
            in     rms(eps=1e-06 gamma=@g0) -> @u0:1
            writes @d0:0
          block h.1 mlp pre
            in     rms(eps=1e-06 gamma=@g1) -> @u1:1
            writes @d1:0

    After::

        stream toy width=8
          block h.0 mlp pre
            in     rms(eps=1e-06 gamma=@g0) -> @u0:1
            writes @d0:0
          block h.1 mlp pre
            in     rms(eps=1e-06 gamma=@g1) -> @u1:1
            writes @d1:0

    Refuses norms of other kinds or over another axis than the last (LN111), gains that are computed (LN105), and norms
    that something outside of their branch reads too (LN101). Source: Sun et al., The Curse of Depth (arXiv 2502.05795).
    """

    name: ClassVar[str] = "scale-norms"
    exactness: ClassVar[Exactness] = Exactness.ALGEBRAIC
    needs_blocks: ClassVar[bool] = True

    blocks: str | None = None

    def plan(self, stream: Stream, context: Context) -> Proposal:
        """Propose one edit for each block behind the first layer that reads a norm."""
        edits, refusals, skipped, vectors = list[Edit](), list[Refusal](), list[tuple[str, str]](), Vectors()
        selected = context.selected(self.blocks)
        for block, layer in zip(stream.blocks, layers(stream), strict=True):
            held = [s for s in block.sites if s.where is Where.IN]
            if layer == 1 or not held or block.scaled("read") or block.name not in selected:
                why = "its factor is 1" if layer == 1 else "no norm stands before it" if not held else "it has a factor"
                skipped.append((block.name, why if block.name in selected else "not selected"))
            elif refusal := _refusal(stream, block, held):
                refusals.append(refusal)
            else:
                try:
                    edits.append(_scaled(stream, block, held[0], sqrt(layer), context, vectors))
                except LnrewriteError as error:
                    told = f"its gain is computed: {error.why}"
                    refusals.append(Refusal(Code.LN105, block.name, told, error.remedy))
        return Proposal(tuple(edits), tuple(refusals), tuple(skipped), vectors, "it norms nothing that a branch reads")


def _refusal(stream: Stream, block: Block, held: list[Site]) -> Refusal | None:
    """Return what stands in the way of a factor behind a block's norm, if anything."""
    site = held[0]
    if len(held) > 1 or site.norm.kind not in (Kind.LAYER, Kind.RMS) or site.norm.over:
        one = "a norm of a norm" if site.norm.over else f"a {site.norm.kind} norm"
        what = "several norms" if len(held) > 1 else one
        return Refusal(Code.LN111, block.name, f"its branch starts with {what}")
    if site.norm.axis != -1:
        why = f"its norm is over axis {site.norm.axis}, where its factor would not be seen again"
        return Refusal(Code.LN111, block.name, why)
    if site.norm.computed:
        return Refusal(Code.LN105, block.name, "the gain of its norm is computed", "store the gain as a parameter")
    sharing = [b for b in stream.blocks if site in b.sites]
    if site.taps or set(site.readers) - {r for b in sharing for r in b.readers} or len(sharing) > 1:
        what = site.taps[0] if site.taps else sharing[-1].name if len(sharing) > 1 else "another branch"
        return Refusal(Code.LN101, block.name, f"{what} also reads its norm")
    return None


def _scaled(stream: Stream, block: Block, site: Site, by: float, context: Context, vectors: Vectors) -> Edit:
    """Return the edit of one block's norm."""
    norm = site.norm
    gamma = vectors.add(context.gain(norm) * by * np.ones(stream.width))
    beta = vectors.add(context.values(norm.beta).reshape(-1) * by) if norm.beta else None
    return Edit(block.name, (SetNorm(Where.IN, norm, gamma, beta), Affine(Where.IN, Number(1 / by))))
