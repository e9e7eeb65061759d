"""Multiply a whole stream by a constant, so that its values fit the range of a format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from lnrewrite.algebra.basis import Basis, Closed
from lnrewrite.algebra.headroom import Headroom
from lnrewrite.algebra.renorming import renormed
from lnrewrite.ir import (
    Affine,
    Block,
    Exactness,
    FoldReader,
    Kind,
    Linear,
    Number,
    Operation,
    Proposal,
    ScaleWriter,
    Site,
    Stream,
    Vectors,
    Where,
)
from lnrewrite.pipeline import Context, Pass

FP16 = 65504.0
LARGEST = 1e9
"""A stream is not multiplied by more: its squares have to stay in float32."""


@dataclass(frozen=True)
class RescaleStream(Pass):
    """Multiply every state of the stream by `by`; the outputs stay.

    A norm does not see the size of what it reads, but for its eps, which goes along:

        N_eps(x)  =  N_{c^2 eps}(c x),   c > 0

    So c goes into what starts the stream and into every writer (behind an output or trunk norm: its gain and bias), c^2
    into the eps of every norm that reads it, and 1/c into linears that read it bare. Where weights cannot take c (a
    table tied to the head, experts, a quantised writer) one multiplication stands in the graph. With a power of two no
    number is rounded.

    Before (rescale-stream{by=0.5})::

        stream toy width=8
          source @wte:1(uses=2,table)
          block h.0 attention peri
            in     layer(eps=1e-05 gamma=@g beta=@b) -> @q:1
            out    rms(eps=1e-06 gamma=@p)
            writes @o:0+@c
          final  layer(eps=1e-05 gamma=@f) -> @wte:1(uses=2)

    After::

        stream toy width=8
          source @wte:1(uses=2,table)
          block h.0 attention peri
            in     layer(eps=2.5e-06 gamma=@g beta=@b) -> @q:1
            out    rms(eps=1e-06 gamma=@p)
            writes @o:0+@c
          final  layer(eps=2.5e-06 gamma=@f) -> @wte:1(uses=2)

    `fit=fp16` chooses powers of two from calibration data so that no value passes `share` of the largest fp16 number:
    for the stream, for what an output norm reads (its eps goes along), and inside branches where a factor can move from
    one linear to the next (a gated MLP's linear arm, the linears around a ReLU, value and output projection).

    Refuses a stream whose states are read by something else too (LN120), norms other than layer and rms on it (LN111),
    and names the values inside branches that stay beyond the limit (LN130).

    Source: the scale invariance of norms; scaling T5 for fp16 in huggingface/transformers issue 9295.
    """

    name: ClassVar[str] = "rescale-stream"
    exactness: ClassVar[Exactness] = Exactness.ALGEBRAIC
    shares: ClassVar[bool] = True

    by: float | None = None
    fit: Literal["fp16"] | None = None
    share: float = 0.25

    def __post_init__(self) -> None:
        if (self.by is None) == (self.fit is None):
            raise ValueError("one of by= and fit= is needed, by=0.5 or fit=fp16")
        if not (self.by is None or 1 / LARGEST <= self.by <= LARGEST) or not 0 < self.share <= 1:
            raise ValueError(f"by must be positive, from {1 / LARGEST:g} to {LARGEST:g}, share between 0 and 1")

    @property
    def needs_data(self) -> bool:
        """Return True: a fit looks at data; the edits are exact all the same."""
        return self.fit is not None

    def plan(self, stream: Stream, context: Context) -> Proposal:
        """Propose one change of the whole stream and, for a fit, of the linears inside branches."""
        if not stream.width:
            return Proposal(otherwise="it is on no stream")
        peaks = Headroom(stream, context.peaks() if self.fit else {}, self.share * FP16)
        by = peaks.stream() if self.by is None else self.by
        scaled = _Scaled(stream, Number(by), context=context, inner=peaks.inner())
        try:
            edits = scaled.edits() if by != 1 or scaled.inner else ()
        except Closed as closed:
            return Proposal(refusals=(closed.refusal(stream.name),))
        edits = (*edits, *peaks.inside())
        return Proposal(
            tuple(edits), refusals=tuple(peaks.left()), vectors=scaled.vectors, otherwise="nothing to scale"
        )


@dataclass
class _Scaled(Basis):
    """Multiply a stream by a number."""

    context: Context = field(kw_only=True)
    inner: Mapping[str, float] = field(default_factory=dict)
    vectors: Vectors = field(default_factory=Vectors)

    mixes = False

    @property
    def by(self) -> float:
        assert isinstance(self.value, Number)
        return self.value.value

    def renormed(self, block: Block | None, site: Site, read: float, by: float) -> tuple[Operation, ...]:
        """Make a norm read `read` times what it read, and give `by` times what it gave."""
        return tuple(renormed(self.stream, self.context, self.vectors, block, site, 1 / read, by))

    def read(self, block: Block | None, site: Site) -> tuple[Operation, ...]:
        return self.renormed(block, site, self.by, 1.0)

    def bare(self, block: Block | None, readers: tuple[Linear, ...], closed: bool) -> tuple[Operation, ...]:
        if closed and block:
            return (Affine(Where.IN, Number(1 / self.by)),)
        return tuple(FoldReader(r, Number(1 / self.by)) for r in readers)

    def made(self, block: Block | None, site: Site, writers: tuple[Linear, ...]) -> tuple[Operation, ...]:
        if site.norm.kind not in (Kind.LAYER, Kind.RMS) or site.norm.computed:
            where = Where.OUT if block else Where.EMBEDDING
            return (Affine(where, Number(self.by)),)
        by = self.inner.get(block.name, 1.0) if block else 1.0
        by = by if writers and not any(w.shared for w in writers) else 1.0
        below = tuple(ScaleWriter(w, Number(by)) for w in writers if by != 1)
        return (*below, *self.renormed(block, site, by, self.by))

    def through(self, block: Block, site: Site, last: bool) -> tuple[Operation, ...]:
        return self.renormed(block, site, self.by, 1.0 if last else self.by)

    def explicit(self, where: Where) -> tuple[Operation, ...] | Closed:
        return (Affine(where, self.value),)
