"""Multiply a whole stream by a constant, so that its values fit the range of a format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import floor, log2
from typing import ClassVar, Literal

import numpy as np

from lnrewrite.algebra.basis import Basis, Closed
from lnrewrite.errors import Code, Refusal
from lnrewrite.ir import (
    Affine,
    Block,
    Edit,
    Exactness,
    FoldReader,
    Kind,
    Linear,
    Norm,
    Number,
    Operation,
    Proposal,
    ScalePair,
    ScaleWriter,
    SetNorm,
    Site,
    Stream,
    Value,
    Vectors,
    Where,
    site_name,
)
from lnrewrite.pipeline import Context, Pass

FP16 = 65504.0
LARGEST = 1e9
"""A stream is not multiplied by more: its squares have to stay in float32."""
MASK = 1e30


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
class Headroom:
    """Choose powers of two that bring the largest numbers, `peaks` by node, below `limit`."""

    stream_: Stream
    peaks: Mapping[str, float]
    limit: float

    def down(self, nodes: Iterable[str]) -> float:
        """Return the largest power of two, 1 at most, that brings these values below the limit."""
        largest = max((self.peaks.get(n, 0.0) for n in nodes), default=0.0)
        return 1.0 if largest <= self.limit else 2.0 ** floor(log2(self.limit / largest))

    def stream(self) -> float:
        """Return the factor of the stream."""
        anchors = [b.anchor for b in self.stream_.blocks]
        return self.down(n for a in anchors for n in (a.state, a.skip, a.branch, a.total))

    def inner(self) -> dict[str, float]:
        """Return, by block, the factor of what its out norm reads."""
        found = {b.name: self.down(s.origin[:1]) for b in self.stream_.blocks if (s := b.at(Where.OUT)) and s.origin}
        return {name: by for name, by in found.items() if by != 1}

    def inside(self) -> Iterator[Edit]:
        """Yield the edits that move a factor from one linear of a branch to the next: W2 f(W1 x) = k W2 f(W1 x / k)."""
        for block in self.stream_.blocks:
            operations: list[Operation] = []
            for pair in self.movable(block):
                if (by := self.down(pair.values)) != 1:
                    operations += [ScaleWriter(m, Number(by)) for m in pair.producers]
                    operations += [FoldReader(t, Number(1 / by)) for t in pair.consumers]
            if operations:
                yield Edit(block.name, tuple(operations))

    def movable(self, block: Block) -> list[ScalePair]:
        return [p for p in block.scale_pairs if not any(w.shared for w in (*p.producers, *p.consumers))]

    def left(self) -> Iterator[Refusal]:
        """Yield the values that stay beyond the limit. Masks are told by their size, near the end of float32."""
        for block in self.stream_.blocks:
            free = {v for pair in self.movable(block) for v in pair.values}
            for node in block.anchor.inside:
                if node not in free and self.limit < self.peaks.get(node, 0.0) < MASK:
                    why = f"it reaches {self.peaks[node]:.2g} inside {block.name}, where no factor can be moved"
                    yield Refusal(Code.LN130, node, why, "keep this branch in float32 or bfloat16")


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

    def read(self, block: Block | None, site: Site) -> tuple[Operation, ...]:
        return (SetNorm(site.where, self.widened(block, site), index=block.index(site) if block else 0),)

    def widened(self, block: Block | None, site: Site) -> Norm:
        """Return the norm with eps c^2."""
        if site.norm.kind not in (Kind.LAYER, Kind.RMS) or site.norm.over:
            who = site_name(block, site) if block else f"the {site.where} norm"
            what = "a norm of a norm" if site.norm.over else f"a {site.norm.kind} norm"
            raise Closed(Code.LN111, f"{who} is {what}", "run merge-norms first" if site.norm.over else "")
        return replace(site.norm, eps=site.norm.eps * self.by**2)

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
        norm = replace(site.norm, eps=site.norm.eps * by**2)
        below = tuple(ScaleWriter(w, Number(by)) for w in writers if by != 1)
        return (*below, SetNorm(site.where, norm, *self.larger(site), index=block.index(site) if block else 0))

    def larger(self, site: Site) -> tuple[Value | None, Value | None]:
        """Return c times a norm's gain and bias."""
        norm = site.norm
        gamma = self.vectors.add(self.context.gain(norm) * np.full(self.stream.width, self.by))
        beta = self.vectors.add(self.context.values(norm.beta).reshape(-1) * self.by) if norm.beta else None
        return gamma, beta

    def through(self, block: Block, site: Site, last: bool) -> tuple[Operation, ...]:
        if site.norm.computed and not last:
            raise Closed(Code.LN105, f"the gain of {site_name(block, site)} is computed", "store it as a parameter")
        values = (None, None) if last else self.larger(site)
        return (SetNorm(Where.POST, self.widened(block, site), *values, index=block.index(site)),)

    def explicit(self, where: Where) -> tuple[Operation, ...] | Closed:
        return (Affine(where, self.value),)
