"""Take norms in and out by degrees: a network that starts as the teacher exactly and ends as its conversion exactly.

A norm divides each token by a size of its own, s; a network without it has one constant rho in that place. A taper is
the norm in between, with a power t of the token's size (a norm: t = 1; a constant scale: t = 0)::

    T_t(x) = gamma / rho * (x - t mean(x)) * (s(x) / rho)^(-t) + beta

Norms that come go from t = 0 to t = 1, norms that go from 1 to 0. A constant is wrong by the whole size of an outlier
(the first token of many decoders, hundreds of times the others), so outliers have a power of their own: they keep their
norm until all others have lost it. Moves to and from the trunk taper the *skip* alone: in x' = x + F(N x) the skip
becomes T_t(x), which ends as N(x), so that x' = N(x) + F(N x) is Post-LN; read backwards that is post to pre.
Both ends are identities, eps included, so nothing is left of the schedule when it is over:
`folding.py` carries the ends out.

Source: the identities B.9 in `place`; for the schedule FakeLN (arXiv 2409.13710, 2507.02559), which gives the first
token a constant of its own, takes that away last, and goes layer by layer within a stage; TaperNorm (2602.10408).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..algebra.fitting import Floats, careful_eps, spread, usual
from ..algebra.placement import WRITABLE, switches
from ..errors import Code, LnrewriteError
from ..ir import Block, Edit, Kind, Norm, Operation, Proposal, SetNorm, Site, Stream, Vectors, Where, sums
from ..ir.select import select
from ..models.program import Program
from ..pipeline.driver import Pipeline
from ..pipeline.protocols import Batch, Samples

VALUES = "values"
PLACES = frozenset({VALUES, *Where})
"""What a stage may be called, beside a block selection: where the norms sit, or the values of attention."""

LAG = 1.0
"""How much later the last taper of a stage starts than the first, in the time that one of them takes."""


@dataclass(frozen=True)
class Taper:
    """Place one taper: a norm of `source`, in place of `value` wherever that is read or, given `reads`, by those alone.

    `site` names the site whose norm comes or goes, `norm` what it computes, `rho` is the typical size of a token there,
    and `stage` says in which part of the schedule it moves. `skip` says that it acts on the skip of a sum, and `bare`
    that it does without gain and 1 / rho there. `outliers` says whether it met any; they move in a stage of their own,
    the last. Within a stage tapers start one after the other: `turn` is 0 for the first and 1 for the last.
    """

    site: str
    source: str
    value: str
    norm: Norm
    rho: float
    going: bool
    reads: tuple[str, ...] = ()
    skip: bool = False
    bare: bool = False
    stage: int = 0
    turn: float = 0.0
    outliers: bool = False

    def powers(self, done: float, last: int) -> tuple[float, float]:
        """Return the power for usual tokens and that for outliers when so many stages are done; `last` is theirs."""
        usual = min(1.0, max(0.0, (done - self.stage) * (1 + LAG) - LAG * self.turn))
        if not self.going:
            return usual, usual
        return 1 - usual, 1 - (min(1.0, max(0.0, done - last)) if last > self.stage else usual)


@dataclass
class Tapering:
    """Plan how the norms of `start` (a teacher) come and go; `wanted` maps blocks to the sites that shall hold a norm.

    `program` is `start` with the norms that come already in their places (as norms, t = 1), `tapers` are all that
    moves; `folding.fold` ends it. `final` takes the final norms away too. Raises LnrewriteError LN602 where a move has
    no exact start.
    """

    start: Program
    wanted: Mapping[str, frozenset[Where]]
    batches: Sequence[Batch]
    style: tuple[Kind, float, bool]
    stages: Sequence[str] = ()
    final: bool = False

    @cached_property
    def samples(self) -> Mapping[str, Samples]:
        return self.start.samples(self.batches)

    def moves(self, block: Block, where: Where, coming: bool) -> bool:
        """Return whether a block of the teacher gets (or loses) its norm at `where`."""
        held, wanted = switches(block), self.wanted.get(block.name, frozenset(switches(block)))
        return where in (wanted - held if coming else held - wanted)

    def onto(self, stream: Stream) -> bool:
        """Return whether the norms of a stream move onto its trunk."""
        return any(self.moves(b, Where.POST, True) for b in stream.blocks)

    def off(self, stream: Stream) -> bool:
        """Return whether the norms of a stream move off its trunk."""
        return any(self.moves(b, Where.POST, False) for b in stream.blocks)

    @cached_property
    def program(self) -> Program:
        """Return a copy of the teacher with the norms that come put in, and with `final` a head of its own."""
        base = Pipeline.parse("untie").run(self.start).program if self.final else self.start
        found = []
        for stream in base.network.streams:
            self.check(stream)
            vectors = Vectors()
            edits = [e for b in stream.blocks if (e := self.coming(stream, b, vectors)).operations]
            found += [(stream, Proposal(tuple(edits), vectors=vectors))] if edits else []
        return base.apply(found, "heal")[0]

    def check(self, stream: Stream) -> None:
        """Raise LnrewriteError LN602 for a move between branch and trunk that is not of the whole stream."""
        blocks = stream.blocks
        if self.onto(stream) and not (stream.final and all(self.moves(b, Where.POST, True) for b in blocks)):
            _refuse(stream, "norms move onto the trunk only for all blocks at once, before a final norm")
        if self.onto(stream) and any(switches(b) != {Where.IN} for b in blocks):
            _refuse(stream, "norms move onto the trunk only from pre")
        if self.off(stream):
            held = all(switches(b) <= {Where.POST} for b in blocks) and all(g[-1].at(Where.POST) for g in sums(stream))
            if not held or not stream.embedding or any(Where.IN not in self.wanted.get(b.name, ()) for b in blocks):
                why = (
                    "norms move off the trunk only from post to pre or peri, for all blocks at once, after a first norm"
                )
                _refuse(stream, why)

    def coming(self, stream: Stream, block: Block, vectors: Vectors) -> Edit:
        """Return the norms that a block gets inside its branch, with the gain that undoes their constant."""
        kind, eps, beta = self.style
        first = block in sums(stream)[0]
        operations: list[Operation] = []
        for where in (Where.IN, Where.OUT):
            if self.moves(block, where, True) and not (where is Where.IN and self.off(stream) and not first):
                seen = self.samples[block.name]
                values = seen.state if where is Where.IN else seen.branch
                gain = vectors.add(np.full(stream.width, _typical(kind, values)))
                shift = vectors.add(np.zeros(stream.width)) if beta else None
                norm = Norm(kind, careful_eps(eps, values), axis=block.anchor.axis)
                operations.append(SetNorm(where, norm, gain, shift))
        return Edit(block.name, tuple(operations))

    @cached_property
    def tapers(self) -> tuple[Taper, ...]:
        """Return every taper, in the order in which tokens meet them."""
        old = {b.name: b for b in self.start.network.blocks}
        found: list[Taper] = []
        for stream in self.program.network.streams:
            groups = sums(stream)
            for index, group in enumerate(groups):
                for block in group:
                    found += self.inside(stream, old[block.name], block)
                if index and (self.onto(stream) or self.off(stream)):
                    found.append(self.on_skip(stream, groups[index - 1][-1], group))
                elif not index and self.onto(stream) and not stream.embedding:
                    found.append(self.on_skip(stream, None, group))
            if self.final and stream.final:
                total = self.samples[stream.blocks[-1].name].total
                found.append(_taper(f"{stream.name}.final", stream.final, total, going=True))
        unique = {(t.value, t.reads): t for t in reversed(found)}
        staged = [replace(t, stage=self.stage(t)) for t in reversed(unique.values())]
        places = {stage: [t for t in staged if t.stage == stage] for stage in {t.stage for t in staged}}
        return tuple(replace(t, turn=places[t.stage].index(t) / max(1, len(places[t.stage]) - 1)) for t in staged)

    @cached_property
    def last(self) -> int:
        """Return the last stage: that of outliers, where any norm that goes met some."""
        met = any(t.going and t.outliers for t in self.tapers)
        return max((t.stage for t in self.tapers), default=0) + met

    def inside(self, stream: Stream, was: Block, block: Block) -> Iterator[Taper]:
        """Yield the tapers of a block's own norms, in and out."""
        seen = self.samples[block.name]
        trunk = self.onto(stream) or self.off(stream)
        for where, values in ((Where.IN, seen.state), (Where.OUT, seen.written)):
            site = block.at(where)
            going, coming = self.moves(was, where, False), self.moves(was, where, True)
            embedded = stream.embedding is not None and block in sums(stream)[0]
            if site and (going or coming) and not (where is Where.IN and trunk and not embedded):
                whole = _taper(f"{block.name}.{where}", site, values, going)
                values_of = self.value_readers(block, site) if going and where is Where.IN else ()
                rest = tuple(r.node for r in site.readers if r.node not in values_of)
                yield replace(whole, reads=rest) if values_of else whole
                if values_of:
                    yield replace(whole, site=f"{block.name}.values", reads=values_of)

    def value_readers(self, block: Block, site: Site) -> tuple[str, ...]:
        """Return the maps that make an attention's values, where they are to move in a stage of their own and can."""
        if VALUES not in self.stages or block.kind != "attention" or site.taps:
            return ()
        made = {producer.node for pair in block.scale_pairs for producer in pair.producers}
        found = tuple(r.node for r in site.readers if r.node in made)
        direct = all(site.origin[-1] in self.program.graph[r.node].data for r in site.readers)
        return found if direct and len(found) < len(site.readers) else ()

    def on_skip(self, stream: Stream, before: Block | None, group: list[Block]) -> Taper:
        """Return the taper on the skip of one sum: the norm that its blocks read, or the trunk's norm before it."""
        block = group[0]
        adds = tuple(b.anchor.add for b in group) + (block.anchor.total,)
        if self.onto(stream):
            site = block.at(Where.IN)
            assert site is not None
            bare = site.norm.bare
            rho = _typical(bare.kind, self.samples[block.name].state)
            name = f"{before.name}.post" if before else f"{stream.name}.embedding"
            return Taper(name, site.origin[0], block.anchor.skip, bare, rho, False, adds, True, bare=True)
        assert before is not None
        site = before.at(Where.POST)
        assert site is not None
        found = _taper(f"{before.name}.post", site, self.samples[before.name].total, going=True)
        return replace(found, reads=adds, skip=True)

    def stage(self, taper: Taper) -> int:
        """Return in which stage a taper moves: the first that names its place or selects its block; the rest come last.

        In a pipeline of mlp, attention, values and final that is the order published for GPT-2 (arXiv 2409.13710).
        """
        block, _, where = taper.site.rpartition(".")
        for index, expression in enumerate(self.stages):
            if expression == where:
                return index
            if expression not in PLACES and where != VALUES and block in select(self.start.network, expression):
                return index
        return len(self.stages) if self.stages else 0


def _taper(name: str, site: Site, values: Floats, going: bool) -> Taper:
    """Return the taper that stands for a norm wherever it is read."""
    norm = site.norm
    if norm.kind not in WRITABLE or norm.computed or norm.over or norm.factor != 1.0 or site.modulated:
        remedy = "heal without --progressive, or exclude the block from the conversion"
        raise LnrewriteError(Code.LN602, name, "its norm is not a plain layer or rms norm", remedy)
    rho, outliers = _typical(norm.kind, values), bool((usual(values) == 0).any())
    return Taper(name, site.origin[0], site.origin[-1], norm, rho, going, outliers=outliers)


def _typical(kind: Kind, values: Floats) -> float:
    """Return the typical size of a token: the geometric mean over rows [tokens, width], outliers left out."""
    sizes = spread(kind, values)[usual(values) > 0]
    sizes = sizes[sizes > 0]
    return float(np.exp(np.log(sizes).mean())) if len(sizes) else 1.0


def _refuse(stream: Stream, why: str) -> None:
    raise LnrewriteError(Code.LN602, stream.name, why, "heal without --progressive")
