"""Normalize an embedding table once, in place of every row that is looked up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lnrewrite.errors import Code, Refusal
from lnrewrite.ir import Edit, Exactness, Kind, Normalize, Proposal, SetNorm, Site, Stream, Where
from lnrewrite.pipeline import Context, Pass


@dataclass(frozen=True)
class FoldEmbeddingNorm(Pass):
    """Replace a table by its normalized rows, where the embedding norm reads nothing but what is looked up in it.

    A norm works row by row, and a lookup picks rows:

        N(E[token])  =  N(E)[token]

    Before::

        stream toy width=8
          source @wte:1(table)
          embedding layer(eps=1e-05 gamma=@g beta=@b)
          block h.0 attention pre
            in     layer(eps=1e-05) -> @q:1
            writes @o:0

    After::

        stream toy width=8
          source @wte:1(table)
          block h.0 attention pre
            in     layer(eps=1e-05) -> @q:1
            writes @o:0

    Refuses a table with other uses, such as the head (LN102), a sum of tables or a scaled one (LN127), and norms other
    than layer and rms (LN111).

    Source: derived; the embedding norm of Peri-LN (arXiv 2502.02732) and BLOOM (2211.05100).
    """

    name: ClassVar[str] = "fold-embedding-norm"
    exactness: ClassVar[Exactness] = Exactness.ALGEBRAIC

    def plan(self, stream: Stream, context: Context) -> Proposal:
        """Propose one edit for the embedding norm."""
        site, name = stream.embedding, f"{stream.name}.embedding"
        if site is None:
            return Proposal(otherwise="not an embedding norm")
        if refusal := _refusal(stream, site, name):
            return Proposal(refusals=(refusal,), otherwise="not an embedding norm")
        edit = Edit(name, (Normalize(stream.sources[0], site.norm), SetNorm(Where.EMBEDDING, None)))
        return Proposal((edit,), otherwise="not an embedding norm")


def _refusal(stream: Stream, site: Site, name: str) -> Refusal | None:
    """Return what stands in the way, if anything."""
    tables = stream.sources
    if site.norm.kind not in (Kind.LAYER, Kind.RMS) or site.norm.over or site.norm.computed:
        return Refusal(Code.LN111, name, f"this form of {site.norm.kind} norm cannot be folded")
    if stream.opaque or len(tables) != 1 or not tables[0].table or not tables[0].exact:
        what = stream.opaque or ("a scaled table" if len(tables) == 1 else f"a sum of {len(tables)} sources")
        return Refusal(Code.LN127, name, f"it reads {what}, not the rows of one table")
    if tables[0].shared:
        return Refusal(Code.LN102, name, f"{tables[0].param} is also used elsewhere", "run untie first")
    return None
