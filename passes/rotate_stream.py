"""Rotate a stream by an orthogonal matrix, which spreads outlying channels over all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from lnrewrite.algebra.basis import Basis, Choice, Closed
from lnrewrite.errors import Code
from lnrewrite.ir import (
    Block,
    Edit,
    Exactness,
    FoldReader,
    Kind,
    Linear,
    Operation,
    Proposal,
    Rotation,
    ScaleWriter,
    Side,
    Site,
    Stream,
    Where,
    site_name,
)
from lnrewrite.pipeline import Context, Pass

FOLD = "run fold-affine{final=true} first (after untie where the head is tied)"


@dataclass(frozen=True)
class RotateStream(Pass):
    """Change the basis of the stream by an orthogonal matrix Q, block-diagonal with equal blocks.

    An RMSNorm without gain and bias does not see a rotation, so that the linears behind it can take it back:

        W RMS(x)  =  (W Q^T) RMS(Q x)

    Q goes into what starts the stream and into every writer, W <- Q W, c <- Q c. Channels far larger than the others,
    which cost a quantiser its range, are spread over a block; each attention head's values are turned too, where the
    output projection alone reads them. kind=hadamard is a Walsh-Hadamard matrix with random signs, in blocks of the
    largest power of two that divides the width (or of `block` channels); kind=random draws a dense block. A table tied
    to the head wants the same on both sides, so that the tie stays.

    Before (rotate-stream{seed=1})::

        stream toy width=8
          source @wte:1(uses=2,table)
          block h.0 attention pre
            in     rms(eps=1e-05) -> @q:1
            writes @o:0+@c
          final  rms(eps=1e-05) -> @wte:1(uses=2)

    After::

        stream toy width=8
          source @wte:1(uses=2,table)
          block h.0 attention pre
            in     rms(eps=1e-05) -> @q:1
            writes @o:0+@c
          final  rms(eps=1e-05) -> @wte:1(uses=2)

    Refuses a stream with LayerNorms on it (LN111), gains and biases that are not folded (LN122; an output norm's cannot
    be), readers or writers out of sight (LN101, LN104), other readers of its states (LN120), factors per channel
    (LN123), blocks that do not fill the width (LN124).

    Source: QuaRot (arXiv 2404.00456), SpinQuant (2405.16406), SliceGPT (2401.15024).
    """

    name: ClassVar[str] = "rotate-stream"
    exactness: ClassVar[Exactness] = Exactness.ALGEBRAIC

    kind: Literal["hadamard", "random"] = "hadamard"
    block: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.block < 0 or self.seed < 0:
            raise ValueError("block and seed must not be negative")

    def plan(self, stream: Stream, context: Context) -> Proposal:
        """Propose one change of the whole stream."""
        if not stream.width:
            return Proposal(otherwise="it is on no stream")
        try:
            edits = _Rotated(stream, Rotation(self.kind, self._size(stream.width), self.seed)).edits()
        except Closed as closed:
            return Proposal(refusals=(closed.refusal(stream.name),))
        return Proposal(tuple(edits), otherwise="a norm without gain does not see a rotation")

    def _size(self, width: int) -> int:
        """Return the size of a block of Q. Raises Closed LN124 where the blocks do not fill the width."""
        power = width & -width
        size = self.block or (power if self.kind == "hadamard" else width)
        if size < 1 or width % size or (self.kind == "hadamard" and size & (size - 1)):
            sort = "power of two" if self.kind == "hadamard" else "number"
            why = f"blocks of {size} do not fill {width} channels"
            raise Closed(Code.LN124, why, f"choose a {sort} that divides {width}")
        return size


@dataclass
class _Rotated(Basis):
    """Rotate a stream."""

    def back(self, readers: tuple[Linear, ...]) -> tuple[Operation, ...]:
        assert isinstance(self.value, Rotation)
        if apart := [r.param for r in readers if r.apart]:
            raise Closed(Code.LN103, f"{apart[0]} reads each channel separately (depthwise)")
        return tuple(FoldReader(r, self.value.transposed) for r in readers)

    def read(self, block: Block | None, site: Site) -> tuple[Operation, ...]:
        self.plain(block, site)
        who = site_name(block, site) if block else "the final norm"
        if block and block.barrier(Side.READ) or site.taps or not site.readers:
            said = next(iter(site.taps), "something other than a linear map")
            raise Closed(Code.LN101, f"{who} is read by {said}, which cannot undo the rotation")
        branches = {r for b in self.stream.blocks if site in b.sites for r in b.readers}
        if block and (others := [r.param for r in site.readers if r not in branches]):
            raise Closed(Code.LN101, f"{who} is also read by {others[0]}, which is not in the branch")
        return self.back(block.readers if block else site.readers)

    def settled(self) -> tuple[Edit, ...]:
        """Return the edits, with a rotation of each attention head's values that the output projection takes back."""
        assert isinstance(self.value, Rotation)
        for block in self.stream.blocks:
            for pair in block.scale_pairs:
                if pair.run > 1 and (self.value.kind == "random" or not pair.run & (pair.run - 1)):
                    turn = replace(self.value, block=pair.run)
                    made = tuple(ScaleWriter(p, turn) for p in pair.producers)
                    taken = tuple(FoldReader(c, turn.transposed) for c in pair.consumers)
                    self.choices.append(Choice(block.name, (*made, *taken), ()))
        return super().settled()

    def plain(self, block: Block | None, site: Site) -> None:
        """Raise Closed unless a norm is an RMSNorm without gain and bias."""
        norm, who = site.norm, site_name(block, site) if block else f"the {site.where} norm"
        if norm.kind is not Kind.RMS:
            remedy = "run layernorm-to-rmsnorm first" if norm.kind is Kind.LAYER else ""
            raise Closed(Code.LN111, f"{who} is a {norm.kind} norm", remedy)
        if norm.over:
            raise Closed(Code.LN111, f"{who} is a norm of a norm", "run merge-norms first")
        if norm.gamma is not None or norm.beta is not None:
            folds = site.where in (Where.IN, Where.FINAL)
            raise Closed(Code.LN122, f"{who} has a gain or a bias", FOLD if folds else "")

    def bare(self, block: Block | None, readers: tuple[Linear, ...], closed: bool) -> tuple[Operation, ...]:
        if closed or not readers:
            raise Closed(
                Code.LN101, f"{block.name if block else 'the end'} reads the stream without a linear map", FOLD
            )
        return self.back(readers)

    def made(self, block: Block | None, site: Site, writers: tuple[Linear, ...]) -> tuple[Operation, ...]:
        self.plain(block, site)
        if not writers:
            raise Closed(Code.LN104, f"the input of the {site.where} norm is not computed by linear maps alone")
        return self.multiplied(writers)

    def through(self, block: Block, site: Site, last: bool) -> tuple[Operation, ...]:
        self.plain(block, site)
        if last and site.taps:
            raise Closed(Code.LN101, f"the last trunk norm is also read by {site.taps[0]}")
        return self.back(site.readers) if last else ()

    def explicit(self, where: Where) -> tuple[Operation, ...] | Closed:
        if where is Where.EMBEDDING:
            return Closed(Code.LN102, "the source of the stream cannot be rotated in its weights", "run untie first")
        return Closed(Code.LN104, "so it cannot be rotated in weights")
