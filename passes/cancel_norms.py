"""Remove a norm where all that its readers compute is normed again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lnrewrite.algebra.basis import Closed
from lnrewrite.errors import Code, LnrewriteError, Refusal
from lnrewrite.ir import (
    Block,
    Center,
    Edit,
    Exactness,
    FoldReader,
    Kind,
    Operation,
    Proposal,
    SetNorm,
    Site,
    Stream,
    Vectors,
    Where,
    site_name,
)
from lnrewrite.pipeline import Context, Pass

SCALELESS = (Kind.LAYER, Kind.RMS)


@dataclass(frozen=True)
class CancelNorms(Pass):
    """Cancel a norm whose readers have no bias and are each read by another norm alone (q, k and v norms).

    A norm divides each token by its size s, and a norm behind a linear map divides by it again. With N1(x) = g x / s
    and u = W diag(g) x / s, of mean square m,

        N2_e(W N1(x))  =  u / sqrt(m + e)
        N2_e(W diag(g) x)  =  u / sqrt(m + e / s^2)        off by less than e |1 - 1 / s^2| / (2 m) of itself

    which is exact as e goes to 0; for layer norms W takes the mean off too. N2 may norm all of what W gives, or each
    head of it. The outputs are compared with ten times e before the result is given.

    Before::

        stream toy width=8
          source @wte:1(table)
          block h.0 attention pre
            in     rms(eps=1e-06 gamma=@g) -> @q:1 @k:1
            inner  rms(eps=1e-20 gamma=@a) width=6 <- @q:0 -> taps matmul
            inner  rms(eps=1e-20) width=6 <- @k:0 -> taps matmul
            writes @o:0

    After::

        stream toy width=8
          source @wte:1(table)
          block h.0 attention none
            inner  rms(eps=1e-20 gamma=@a) width=6 <- @q:0 -> taps matmul
            inner  rms(eps=1e-20) width=6 <- @k:0 -> taps matmul
            reads  @q:1 @k:1
            writes @o:0

    Refuses a reader that has a bias, or whose output something else reads: it sees the size (LN131); one that is used
    elsewhere (LN102), a bias of the norm itself (LN131), and a norm that something else reads (LN101).

    Source: proposition 3 of FlashNorm (arXiv 2407.09577); google-deepmind/gemma#638 for Gemma 4.
    """

    name: ClassVar[str] = "cancel-norms"
    exactness: ClassVar[Exactness] = Exactness.ASYMPTOTIC

    def plan(self, stream: Stream, context: Context) -> Proposal:
        """Propose one edit for each norm that another one makes redundant."""
        edits, refusals, skipped, vectors = list[Edit](), list[Refusal](), list[tuple[str, str]](), Vectors()
        for block, site in ((b, s) for b in stream.blocks for s in b.sites if s.where is Where.IN):
            name, again = site_name(block, site), list(_again(block, site))
            if not again or site.norm.kind not in SCALELESS or site.norm.fixed:
                skipped.append((name, "nothing that reads it is normed again"))
                continue
            try:
                _unseen(block, site, again, context)
                operations = [
                    *_folds(stream, site, context, vectors),
                    SetNorm(site.where, None, index=block.index(site)),
                ]
            except Closed as closed:
                refusals.append(closed.refusal(name))
            except LnrewriteError as error:
                refusals.append(Refusal(Code.LN105, name, f"its gain is computed: {error.why}", error.remedy))
            else:
                eps = max(s.norm.eps for s in again)
                note = f"error about {eps / 2:.1g} |1 - 1 / mean square| of itself"
                edits.append(Edit(block.name, tuple(operations), note=note, bound=eps))
        return Proposal(
            tuple(edits), tuple(refusals), tuple(skipped), vectors, "it is not a norm that readers norm again"
        )


def _again(block: Block, site: Site) -> Iterator[Site]:
    """Yield the norms that read nothing but what the readers of a norm compute."""
    nodes = {r.node or r.param for r in site.readers}
    for other in block.sites:
        made = {w.node or w.param for w in other.writers}
        if (
            other.where is Where.INNER
            and other.norm.kind in SCALELESS
            and not other.norm.over
            and made
            and made <= nodes
        ):
            yield other


def _unseen(block: Block, site: Site, again: list[Site], context: Context) -> None:
    """Raise Closed where something sees the size of what the norm reads."""
    if site.taps or not site.readers:
        raise Closed(Code.LN101, f"{site.taps[0]} also reads it" if site.taps else "no linear map reads it")
    normed = {w.node or w.param for s in again for w in s.writers}
    for reader in site.readers:
        if (reader.node or reader.param) not in normed:
            raise Closed(Code.LN131, f"what {reader.param} gives is not normed again")
        if reader.bias is not None or not reader.exact:
            raise Closed(Code.LN131, f"{reader.param} has a bias, which sees the size")
    if site.norm.beta and np.any(context.values(site.norm.beta)):
        raise Closed(Code.LN131, "its own bias sees the size")
    if block.scaled("read"):
        raise Closed(Code.LN104, "a factor stands behind it", "run absorb-scales first")


def _folds(stream: Stream, site: Site, context: Context, vectors: Vectors) -> Iterator[Operation]:
    """Yield what gives the norm's gain, and the mean that it takes off, to its readers."""
    layer = site.norm.kind is Kind.LAYER
    if (site.norm.gamma or layer) and (shared := [r.param for r in site.readers if r.shared]):
        raise Closed(Code.LN102, f"{shared[0]} is also used elsewhere", "run untie first")
    for reader in site.readers:
        if site.norm.gamma:
            yield FoldReader(reader, vectors.add(context.gain(site.norm) * np.ones(stream.width)))
        if layer:
            yield FoldReader(reader, Center(stream.width))
