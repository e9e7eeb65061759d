"""Certify a picture: use each edge of it as a pass would, in ways that change nothing if it is right, and look.

The trial edits multiply by powers of two and divide again one step further on, so that no number is rounded: a norm is
written anew with a larger gain and its readers take that back, a branch's writers write more and its end gives less.
Where the outputs move, the picture does not hold on the model at hand, and a barrier takes the place of the claim.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..errors import Code, LnrewriteError, Refusal
from ..ir import (
    Affine,
    Barrier,
    Block,
    Edit,
    FoldReader,
    Kind,
    Linear,
    Network,
    Norm,
    Number,
    Operation,
    Proposal,
    ScaleWriter,
    SetNorm,
    Side,
    Site,
    Stream,
    Value,
    Vectors,
    Where,
    site_name,
    sums,
)
from .protocols import Batch, Samples, gain_of, kept_of
from .sounding import Edits, Provable, sound

if TYPE_CHECKING:
    from .protocols import Floats

CONTRADICTED = "what a trial run contradicts"
"""What stands, as a barrier or a tap, where a claim of the picture was tried and does not hold."""
SUM, ROUGH = 1e-3, 5e-2
"""How far a sum may be from its terms, relative to the largest: computed as the model is stored, or in half."""
TWICE, HALF = Number(2.0), Number(0.5)
SIDES = {Where.IN: Side.READ, Where.OUT: Side.WRITTEN, Where.POST: Side.CARRIED}


class Certifiable(Provable, Protocol):
    """Describe what a program needs so that its picture can be certified."""

    @property
    def network(self) -> Network: ...
    @property
    def narrow(self) -> bool: ...
    def values(self, param: str) -> Floats: ...
    def trials(self, seed: int) -> Sequence[Batch]: ...
    def samples(self, batches: Sequence[Batch]) -> Mapping[str, Samples]: ...


@dataclass(frozen=True, eq=False)
class Trial:
    """Hold an edit that changes nothing if the picture is right: `of` names the norm, or the block, that it tries.

    `side` is the edge of the block; without one it is a norm inside the branch or at the stream's ends, or its scale
    pairs.
    """

    of: str
    side: Side | None
    edit: Edit


def certify(program: Certifiable, seed: int = 0) -> Network | None:
    """Return a program's picture with barriers where it does not hold, and refusals (LN208) that tell of them.

    None where the program cannot be run: it holds no weights, or takes no made-up inputs.
    """
    evidence, network = program.evidence(seed), program.network
    if evidence is None:
        return None
    tried = [(s, Trials(s, program, seed)) for s in network.streams]
    trials = [(s, t.vectors, list(t.all())) for s, t in tried]
    wanted = [(s, Proposal(tuple(t.edit for t in found), vectors=v)) for s, v, found in trials if found]
    kept = [p for together in disjoint(wanted) for _, p in sound(program, together, "certify", evidence)[0]]
    held = {id(edit) for p in kept for edit in p.edits}
    wrong = {(t.of, t.side) for _, _, found in trials for t in found if id(t.edit) not in held}
    wrong |= {(name, Side.ADDED) for name in _wrong_sums(program, seed)}
    if not wrong:
        return network
    rows = sorted((of, EDGES.get(side, "it")) for of, side in wrong)
    why, remedy = "{} is not as it looks: the outputs move in a trial", "please report this model"
    told = tuple(Refusal(Code.LN208, of, why.format(edge), remedy) for of, edge in rows)
    streams = tuple(_corrected(s, wrong) for s in network.streams)
    return replace(network, streams=streams, refusals=(*network.refusals, *told))


def disjoint(wanted: Edits) -> list[list[tuple[Stream, Proposal]]]:
    """Put the trials of streams that share a parameter apart: together they might not hold where each does."""
    found: list[tuple[set[str], list[tuple[Stream, Proposal]]]] = []
    for stream, proposal in wanted:
        used = {name for edit in proposal.edits for operation in edit.operations for name in edited(operation)}
        place = next((row for row in found if not row[0] & used), None)
        if place is None:
            found.append(place := (set(), []))
        place[0].update(used)
        place[1].append((stream, proposal))
    return [together for _, together in found]


def edited(operation: Operation) -> Iterator[str]:
    """Yield the parameters that an operation writes anew."""
    match operation:
        case FoldReader(reader=linear) | ScaleWriter(writer=linear):
            yield linear.param
        case SetNorm(norm=Norm(gamma=str() as gamma)):
            yield gamma


EDGES: dict[Side | None, str] = {
    Side.READ: "what reads it", Side.WRITTEN: "what writes it", Side.ADDED: "its sum", Side.CARRIED: "its trunk norm",
}  # fmt: skip


# ---- what is tried ----


class Trials:
    """Make up the trials of one stream; a parameter that has other uses is not tried."""

    def __init__(self, stream: Stream, program: Certifiable, seed: int) -> None:
        self.stream, self.program, self.random, self.vectors = stream, program, np.random.default_rng(seed), Vectors()

    def all(self) -> Iterator[Trial]:
        """Yield a trial for each norm and what reads or writes it, each bare edge, and each branch's scale pairs."""
        seen = set[tuple[str, ...]]()
        for place in self.stream.located():
            name, block, site = place
            if site.origin[-1:] not in seen and site.norm.kind in (Kind.LAYER, Kind.RMS) and not site.norm.over:
                operations = self.norm(block, site)
                yield Trial(name, SIDES.get(site.where), Edit(place.target, operations))
            seen.add(site.origin[-1:])  # parallel blocks may hold one norm
        for block in self.stream.blocks:
            yield from self.bare(block)

    def norm(self, block: Block | None, site: Site) -> tuple[Operation, ...]:
        """Return what writes a norm anew: with a gain that its readers take back, or reading more of its writers."""
        norm, index = site.norm, block.index(site) if block else 0
        width = site.width or self.stream.width
        if width and not site.taps and not norm.computed and free(site.readers):
            by = self.powers(width)
            try:
                gamma = self.vectors.add(gain_of(replace(norm, factor=1.0), self.program.values) * by)
                beta = self.vectors.add(self.program.values(norm.beta).reshape(-1) * by) if norm.beta else None
            except LnrewriteError:  # a bias that is computed
                return (SetNorm(site.where, norm, index=index),)
            return (SetNorm(site.where, norm, gamma, beta, index), *folds(site.readers, self.vectors.add(1 / by)))
        if site.where is Where.OUT and block and free(made := self.stream.producers(block, site)):
            return (*scaled(made, TWICE), SetNorm(site.where, replace(norm, eps=norm.eps * 4), index=index))
        return (SetNorm(site.where, norm, index=index),)

    def bare(self, block: Block) -> Iterator[Trial]:
        """Yield the trials of what reads the stream without a norm, of what writes to it so, and of the scale pairs."""
        if not self.stream.width:
            return
        by = self.powers(self.stream.width)
        there, back = self.vectors.add(by), self.vectors.add(1 / by)
        if not block.at(Where.IN) and not block.barrier(Side.READ) and free(block.readers):
            edit = Edit(block.name, (Affine(Where.IN, there), *folds(block.readers, back)))
            yield Trial(block.name, Side.READ, edit)
        if not block.at(Where.OUT) and not block.barrier(Side.WRITTEN) and free(block.writers):
            edit = Edit(block.name, (*scaled(block.writers, there), Affine(Where.OUT, back)))
            yield Trial(block.name, Side.WRITTEN, edit)
        pairs = [p for p in block.scale_pairs if free((*p.producers, *p.consumers))]
        if pairs:
            moved = [o for p in pairs for o in (*scaled(p.producers, TWICE), *folds(p.consumers, HALF))]
            yield Trial(block.name, None, Edit(block.name, tuple(moved)))

    def powers(self, width: int) -> Floats:
        """Return a power of two for each channel."""
        return self.random.choice([0.5, 1.0, 2.0], width)


def free(linears: Collection[Linear]) -> bool:
    """Return whether there are linear maps and an edit of them touches nothing else."""
    return bool(linears) and not any(w.shared for w in linears)


def folds(readers: Iterable[Linear], scale: Value) -> list[Operation]:
    """Return what lets readers see values that were divided by `scale`."""
    return [FoldReader(r, scale) for r in dict.fromkeys(readers)]


def scaled(writers: Iterable[Linear], scale: Value) -> list[Operation]:
    """Return what lets writers write `scale` times as much."""
    return [ScaleWriter(w, scale) for w in dict.fromkeys(writers)]


def _wrong_sums(program: Certifiable, seed: int) -> Iterator[str]:
    """Yield the first block of each sum that is not its skip, times its factor, plus its branches."""
    try:
        samples = dict(program.samples(program.trials(seed)[:1]))
    except LnrewriteError:  # NaN or infinite values on made-up inputs
        return
    for group in (g for s in program.network.streams for g in sums(s)):
        first, seen = group[0], samples[group[0].name]
        if first.added or any(b.barrier(side) for b in group for side in (Side.ADDED, Side.CARRIED)):
            continue
        terms = [seen.state, *(samples[b.name].branch for b in group)]
        if any(t.shape != seen.total.shape for t in terms):  # the stream changes its number of tokens
            continue
        try:
            terms[0] = terms[0] * kept_of(first, program.values)
        except LnrewriteError:  # a factor that is computed
            continue
        largest = max(abs(t).max(initial=1e-30) for t in (*terms, seen.total))
        if abs(sum(terms) - seen.total).max(initial=0) > (ROUGH if program.narrow else SUM) * largest:
            yield first.name


# ---- what follows ----


def _corrected(stream: Stream, wrong: Collection[tuple[str, Side | None]]) -> Stream:
    """Return a stream with a barrier at each edge, and a tap on each norm, that did not hold."""

    def site(name: str, held: Site) -> Site:
        off = (name, SIDES.get(held.where)) in wrong
        return replace(held, taps=(*held.taps, CONTRADICTED), writers=()) if off else held

    def block(b: Block) -> Block:
        names = {b.name, *(site_name(b, s) for s in b.sites)}
        sides = sorted({side for of, side in wrong if of in names and side})
        return replace(
            b,
            sites=tuple(site(site_name(b, s), s) for s in b.sites),
            barriers=(*b.barriers, *(Barrier(side, CONTRADICTED) for side in sides)),
            scale_pairs=() if (b.name, None) in wrong else b.scale_pairs,
        )

    embedding, final = (held and site(f"{stream.name}.{held.where}", held) for held in (stream.embedding, stream.final))
    return replace(
        stream,
        blocks=tuple(map(block, stream.blocks)),
        embedding=embedding,
        final=final,
        opaque=stream.opaque if embedding == stream.embedding else CONTRADICTED,
        exits=stream.exits if final == stream.final else (*stream.exits, CONTRADICTED),
    )
