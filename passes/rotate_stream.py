"""Rotate a stream by an orthogonal matrix, which spreads outlying channels over all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from lnrewrite.algebra.basis import Choice, Closed
from lnrewrite.algebra.mixing import Mixing
from lnrewrite.errors import Code
from lnrewrite.ir import Edit, Exactness, FoldReader, Proposal, Rotation, ScaleWriter, Stream, Value
from lnrewrite.pipeline import Context, Pass


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
class _Rotated(Mixing):
    """Rotate a stream."""

    @property
    def inverse(self) -> Value:
        assert isinstance(self.value, Rotation)
        return self.value.transposed

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
