"""Fold batch norms into the linear maps beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from lnrewrite.algebra.stored import STORED, affine, is_affine
from lnrewrite.errors import Code, Refusal
from lnrewrite.ir import (
    Block,
    Edit,
    Exactness,
    FoldReader,
    Operation,
    Proposal,
    ScaleWriter,
    SetNorm,
    Site,
    Stream,
    Vector,
    Vectors,
    Where,
)
from lnrewrite.pipeline import Context, Pass


@dataclass(frozen=True)
class FoldBatchnorm(Pass):
    """Fold a batch norm with stored statistics into the linear or convolution before it or, failing that, behind it.

    At inference it is one affine map per channel, y = a x + s with a = gamma / sqrt(variance + eps), s = beta - a mean:

        a (W h + c) + s  =  (diag(a) W) h + (a c + s)               before it
        W (a x + s) + c  =  (W diag(a)) x + (c + W s)               behind it

    RepBN, the batch norm of x plus eta x, is such a map too.

    Before::

        stream toy width=8
          block h.0 conv none
            inner  batch(eps=1e-05 gamma=@g beta=@b mean=@m variance=@v) width=6 <- @conv:0+@bias
            reads  @up:1
            writes @down:0

    After::

        stream toy width=8
          block h.0 conv none
            reads  @up:1
            writes @down:0

    Refuses one whose neighbours are shared (LN102), are no linear maps or have other readers (LN104), or have no place
    for the shift, as a padded convolution behind it (LN103). Statistics of the batch itself are no constants (LN111).

    Source: the usual folding of batch norm; RepBN of SLAB (arXiv 2405.11582).
    """

    name: ClassVar[str] = "fold-batchnorm"
    exactness: ClassVar[Exactness] = Exactness.ALGEBRAIC
    everywhere: ClassVar[bool] = True

    def plan(self, stream: Stream, context: Context) -> Proposal:
        """Propose one edit for each batch norm."""
        edits, refusals, vectors, folded = list[Edit](), list[Refusal](), Vectors(), set[Site]()
        for place in stream.located():
            name, block, site = place
            if site.norm.kind not in STORED:
                continue
            if not is_affine(site):
                why = "its statistics are not stored"
                refusals.append(Refusal(Code.LN111, name, why, "capture the model in eval mode"))
                continue
            a, s = (vectors.add(values) for values in affine(site, context))
            ways = list(_ways(site, block, stream, (a, s)))
            if isinstance(ways[0], Refusal):
                refusals.append(ways[0].at(name))
            else:
                gone = SetNorm(site.where, None, index=place.number)
                operations = () if site in folded else ways[0]  # parallel blocks may hold one norm
                edits.append(Edit(place.target, (*operations, gone)))
                folded.add(site)
        return Proposal(tuple(edits), refusals=tuple(refusals), vectors=vectors, otherwise="not a batch norm")


def _ways(
    site: Site, block: Block | None, stream: Stream, by: tuple[Vector, Vector]
) -> Iterator[tuple[Operation, ...] | Refusal]:
    """Yield the operations of the first way that is open, else what closes the last."""
    a, s = by
    between = block.scaled("written") if block and site.where is Where.OUT else ()
    writers = () if between else stream.producers(block, site)
    if writers and not any(w.shared for w in writers) and writers[0].exact:
        yield (ScaleWriter(writers[0], a, s), *(ScaleWriter(w, a) for w in writers[1:]))
    if site.readers and not site.taps:
        if shared := [r.param for r in site.readers if r.shared]:
            yield Refusal(Code.LN102, "", f"{shared[0]} is also used elsewhere", "run untie first")
        if bad := [r.param for r in site.readers if not r.exact]:
            yield Refusal(Code.LN103, "", f"{bad[0]} has no place for a shift")
        yield tuple(FoldReader(r, a, s) for r in site.readers)
    yield Refusal(Code.LN104, "", "no linear map stands alone before or after it")
