"""The picture: a trained residual network as streams that blocks read from and write to.

Everything here is frozen, hashable and free of tensors; parameters are named, never held. Detection makes a
`Network`, passes look at it and propose edits, backends carry them out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from ..errors import Refusal
from .parts import Anchor, Barrier, Gate, Linear, Placement, Scale, ScalePair, Side, Site, Where


@dataclass(frozen=True, slots=True)
class Block:
    """Describe one residual branch: x' = skip(x) + branch(x).

    `sites` holds its norms in dataflow order; `readers` the first linears that see the stream, `writers` the last
    before the add. `parallel_group` numbers branches that share one sum. `scale` is the number that multiplies the
    skip (DeepNorm); `scales` are the block's other constant factors in dataflow order. `added` are the linears and
    tables that write further terms of the sum (positions, conditions), told of its first block alone. `barriers` are
    what no linear edit passes; a block without them is accounted for. `scale_pairs` are linears inside the branch that
    share a free factor.
    """

    name: str
    kind: str = "other"
    sites: tuple[Site, ...] = ()
    readers: tuple[Linear, ...] = ()
    writers: tuple[Linear, ...] = ()
    parallel_group: int | None = None
    scale: float = 1.0
    scales: tuple[Scale, ...] = ()
    added: tuple[Linear, ...] = ()
    barriers: tuple[Barrier, ...] = ()
    scale_pairs: tuple[ScalePair, ...] = ()
    anchor: Anchor = field(default=Anchor(), compare=False)

    def barrier(self, at: Side) -> Barrier | None:
        """Return what stands at an edge of the block, or None."""
        return next((b for b in self.barriers if b.at is at), None)

    def at(self, where: Where, index: int = 0) -> Site | None:
        """Return the block's first site of that kind (or a later one), or None."""
        held = [s for s in self.sites if s.where is where]
        return held[index] if index < len(held) else None

    def index(self, site: Site) -> int:
        """Return which of the block's sites of that kind this one is."""
        return next(i for i, s in enumerate(s for s in self.sites if s.where is site.where) if s is site)

    def scaled(self, *at: str) -> tuple[Scale, ...]:
        """Return the block's constant factors at these places."""
        return tuple(s for s in self.scales if s.at in at)

    @property
    def placement(self) -> Placement:
        """Derive the placement from the sites: a trunk norm makes it post whatever the branch holds.

        A norm that divides by one number is none.
        """
        held = {s.where for s in self.sites if s.norm.fixed is None}
        if Where.POST in held:
            return Placement.POST
        if Where.IN in held:
            return Placement.PERI if Where.OUT in held else Placement.PRE
        if Where.OUT in held:
            return Placement.OUTPUT
        if any(s.where in held and s.where is Where.INNER and s.readers and not s.taps for s in self.sites):
            return Placement.INNER
        return Placement.NONE


@dataclass(frozen=True, slots=True)
class Stream:
    """Hold one residual stream: `width` channels, its sources, blocks in execution order and end norms.

    `sources` are the tables and linear maps whose sum starts the stream (behind an embedding norm: what that norm
    reads), `opaque` says in words what else does. `taps` are the consumers of its states that are no block and no end
    norm; `readers` and `exits` the linears that read the last state bare, and what else does. `source`, `last` name the
    nodes of the first and the last state.
    """

    name: str
    width: int
    blocks: tuple[Block, ...] = ()
    sources: tuple[Linear, ...] = ()
    opaque: str = ""
    embedding: Site | None = None
    final: Site | None = None
    taps: tuple[str, ...] = ()
    readers: tuple[Linear, ...] = ()
    exits: tuple[str, ...] = ()
    source: str = field(default="", compare=False)
    last: str = field(default="", compare=False)

    def verify(self) -> None:
        """Raise ValueError where the picture contradicts itself."""
        names = [b.name for b in self.blocks]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise ValueError(f"stream {self.name}: block names must be unique: {', '.join(twice)}")
        if self.width < 0:
            raise ValueError(f"stream {self.name}: width must not be negative, got {self.width}")

    def sites(self) -> Iterator[tuple[str, Site]]:
        """Yield (site name, site) for every norm on the stream and in its branches, in dataflow order."""
        for name, _, site in self.located():
            yield name, site

    def located(self) -> Iterator[Located]:
        """Yield every norm on the stream and in its branches with its place, in dataflow order."""
        if self.embedding:
            yield Located(f"{self.name}.embedding", None, self.embedding)
        for block in self.blocks:
            for site in block.sites:
                yield Located(site_name(block, site), block, site)
        if self.final:
            yield Located(f"{self.name}.final", None, self.final)

    def producers(self, block: Block | None, site: Site) -> tuple[Linear, ...]:
        """Return the linears whose sum, scaled at most, a norm reads; none where something else has a part in it."""
        if site.where is Where.EMBEDDING:
            return () if self.opaque else self.sources
        if site.where is Where.OUT and block:
            return site.writers if block.barrier(Side.WRITTEN) else block.writers
        return site.writers


class Located(NamedTuple):
    """Place a norm in its stream: the site's name, and its block; None at the stream's ends."""

    name: str
    block: Block | None
    site: Site

    @property
    def target(self) -> str:
        """Return what an edit of the norm names as its target."""
        return self.block.name if self.block else self.name

    @property
    def number(self) -> int:
        """Return which of the block's sites of that kind it is."""
        return self.block.index(self.site) if self.block else 0


def site_name(block: Block, site: Site) -> str:
    """Name a block's site: `block.where`, numbered where a branch holds several inner norms."""
    several = sum(s.where is site.where for s in block.sites) > 1
    return f"{block.name}.{site.where}" + (f"{block.index(site) + 1}" if several else "")


def sums(stream: Stream) -> list[list[Block]]:
    """Return the blocks in execution order, those that share one sum together."""

    def one_sum(numbered: tuple[int, Block]) -> tuple[int | None, int]:
        group = numbered[1].parallel_group
        return group, numbered[0] if group is None else 0

    return [[b for _, b in run] for _, run in groupby(enumerate(stream.blocks), key=one_sum)]


def layers(stream: Stream) -> list[int]:
    """Return the number of each block's layer, from 1: one ends with its MLP; without any, each sum is a layer."""
    ends = {"mlp", "moe"}
    whole = not any(b.kind in ends for b in stream.blocks)
    numbers, layer = list[int](), 1
    for group in sums(stream):
        numbers += [layer] * len(group)
        layer += whole or any(b.kind in ends for b in group)
    return numbers


@dataclass(frozen=True, slots=True)
class Network:
    """Hold all that was seen in one model: its streams, norms that are on no stream, and what was not understood.

    `computed` names the nodes that compute a weight or a factor from parameters alone (weight standardization),
    `gates` are the constant factors that may do nothing.
    """

    streams: tuple[Stream, ...] = ()
    elsewhere: tuple[Site, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    computed: tuple[str, ...] = field(default=(), compare=False)
    gates: tuple[Gate, ...] = field(default=(), compare=False)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Return the blocks of all streams in execution order."""
        return tuple(b for s in self.streams for b in s.blocks)

    @property
    def rest(self) -> Stream:
        """Return the norms on no stream as the inner norms of one block, in a stream of width 0 that is none."""
        return Stream("elsewhere", 0, (Block("elsewhere", sites=self.elsewhere),))

    @property
    def placement(self) -> str:
        """Return the one placement that all blocks share, `mixed`, or `none` when there is no block."""
        found = {b.placement.value for b in self.blocks}
        return "mixed" if len(found) > 1 else found.pop() if found else Placement.NONE.value
