"""The picture: a trained residual network as streams that blocks read from and write to.

Everything here is frozen, hashable and free of tensors; parameters are named, never held. Detection makes a
`Network`, passes look at it and propose edits, backends carry them out.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby


class Kind(enum.StrEnum):
    """Say what a norm computes over its axis: u = (x - m) / s, then u * gamma + beta.

    layer: m = mean, s = sqrt(var + eps). rms: m = 0, s = sqrt(mean(x^2) + eps). std: m = mean, s = std + eps.
    l2: m = 0, s = max(|x|, eps), |x| + eps or sqrt(|x|^2 + eps). batch, group, instance: the statistics run over other
    axes than the channels. power: m = 0, s = sqrt(v + eps) for stored v (PowerNorm, arXiv 2003.07845). dynamic_tanh:
    u = tanh(a x), no statistics (DyT, arXiv 2503.10622). weight_standardised: what is normed is a weight, not a value
    (arXiv 1903.10520).
    """

    LAYER = "layer"
    RMS = "rms"
    STD = "std"
    L2 = "l2"
    BATCH = "batch"
    GROUP = "group"
    INSTANCE = "instance"
    POWER = "power"
    TANH = "dynamic_tanh"
    WEIGHT = "weight_standardised"


class Where(enum.StrEnum):
    """Say where a norm sits: three sites of a block (in, out, post), inside its branch, or at a stream's ends."""

    IN = "in"
    OUT = "out"
    POST = "post"
    INNER = "inner"
    EMBEDDING = "embedding"
    FINAL = "final"


class Side(enum.StrEnum):
    """Say at which edge of a block a barrier stands.

    read: between the trunk (or its in norm) and the readers. raw: the branch reads the bare trunk beside its norm.
    written: between the writers and the out norm or the trunk. ends: between the out norm and the trunk. added: a term
    of the sum that no linear map writes. carried: on the trunk, behind the sum.
    """

    READ = "read"
    RAW = "raw"
    WRITTEN = "written"
    ENDS = "ends"
    ADDED = "added"
    CARRIED = "carried"


class Placement(enum.StrEnum):
    """Name where a block's norms sit (see `Block.placement`)."""

    PRE = "pre"
    POST = "post"
    PERI = "peri"
    OUTPUT = "output"
    INNER = "inner"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Norm:
    """Describe one norm; `gamma` and `beta` name parameters, equality includes eps.

    `plus_one` says that the gain is 1 + gamma (Gemma). `gamma` may be an expression of parameters that no single
    name describes (a sigmoid of a weight): then it is the name of the node that computes it and `computed` is true;
    so may `beta`.
    `mean` and `variance` name the stored statistics of a batch norm, which make it an affine map. `factor` is a number
    that u is multiplied by before the gain (sqrt(width) behind an l2 norm). `axis` is the channels' place in what it
    reads, counted from the end. `over` is a norm that this one reads and nothing else does: norm of norm.
    """

    kind: Kind
    eps: float
    gamma: str | None = None
    beta: str | None = None
    plus_one: bool = False
    computed: bool = False
    mean: str | None = None
    variance: str | None = None
    factor: float = 1.0
    axis: int = -1
    over: Norm | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.eps) and self.eps >= 0):
            raise ValueError(f"a norm's eps must be finite and not negative, got {self.eps}")
        if self.plus_one and not self.gamma:
            raise ValueError("plus_one needs a gamma")


@dataclass(frozen=True, slots=True)
class Linear:
    """Name a linear map at the edge of a branch: `param`'s axis `axis` runs over the stream's channels.

    A reader contracts that axis with what it reads; a writer produces it. `bias` is the vector added to the map's
    output. `uses` counts the places that read the parameter: an edit changes it for all of them. `exact` is false for
    a map whose bias a shift cannot be folded into (a padded convolution, gathered experts). `table` marks a writer
    whose rows are taken as they are: looked up (an embedding) or added (a position, a class token). `apart` marks a
    reader that keeps channels apart (a depthwise convolution): it takes a factor for each, no mixture of them.
    """

    param: str
    axis: int
    bias: str | None = None
    uses: int = 1
    exact: bool = True
    table: bool = False
    apart: bool = False
    node: str = field(default="", compare=False)

    @property
    def shared(self) -> bool:
        """Say whether the parameter is used elsewhere too."""
        return self.uses > 1


@dataclass(frozen=True, slots=True)
class Arm:
    """Name linears inside a branch whose output's scale goes on to other linears of it, and nowhere else.

    What `makers` are divided by, by a positive number, `takers` can be multiplied by. `run` is the number of channels
    of a head where each head's channels reach the takers unmixed, so that they may be rotated too; else 0. `values`
    names the nodes whose size follows the makers'.
    """

    makers: tuple[Linear, ...]
    takers: tuple[Linear, ...]
    run: int = 0
    values: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Scale:
    """Multiply by a constant that stands alone in the graph: `by` is a number, or names a parameter or a node.

    `at` says where: `read` (between the in norm and the readers), `written` (between the writers and the out norm or,
    without one, the add), `branch` (between the out norm and the add), `skip` (what the sum takes of the state before),
    `trunk` (on what the sum hands on). `vector` is true for one number per channel, `inverse` for a division,
    `computed` where `by` names a node.
    """

    at: str
    by: float | str
    vector: bool = False
    inverse: bool = False
    computed: bool = False
    node: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Barrier:
    """Name an operator `op` at an edge of a block which no linear edit passes."""

    at: Side
    op: str

    def __str__(self) -> str:
        return SAID[self.at].format(op=self.op)


SAID = {
    Side.READ: "read by {op}", Side.RAW: "reads the raw stream too", Side.WRITTEN: "written by {op}",
    Side.ENDS: "ends in {op}", Side.ADDED: "adds {op}", Side.CARRIED: "carried through {op}",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Site:
    """Place one norm: where it sits, the linears that read its output, and any other consumer of it.

    `readers` and `taps` together are every consumer: an edit of the norm's affine is whole when it reaches all of
    them. `writers` are the linears that make up all of its input and serve nothing else; none where it has others (an
    out norm's are the block's, an embedding norm's the stream's sources), `width` the size of what it normalises (0:
    the stream's). `modulated` says that data multiply the norm: `adaptive` (a gain computed from a condition),
    `time-dependent` (stored gains mixed by a scalar of the condition), `gated` (an activation of another value).
    `origin` names the graph nodes that compute the norm: input first, output last.
    """

    where: Where
    norm: Norm
    readers: tuple[Linear, ...] = ()
    taps: tuple[str, ...] = ()
    writers: tuple[Linear, ...] = ()
    width: int = 0
    modulated: str = field(default="", compare=False)
    origin: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Anchor:
    """Tell a backend where a block lives in its graph, by node name.

    `state` is the trunk value that the block reads (for post, the norm's output), `branch` the branch's last value
    before the add, `add` the node that adds it to the trunk and `skip` the add's other operand. Several adds of one
    sum share `total`, the sum's last add. `axis` is the channels' place in these values, counted from the end. `inside`
    are the branch's values between readers and writers: neither of the stream's size nor a norm's.
    """

    state: str = ""
    branch: str = ""
    add: str = ""
    skip: str = ""
    total: str = ""
    axis: int = -1
    inside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Block:
    """Describe one residual branch: x' = skip(x) + branch(x).

    `sites` holds its norms in dataflow order; `readers` the first linears that see the stream, `writers` the last
    before the add. `parallel_group` numbers branches that share one sum. `scale` is the number that multiplies the
    skip (DeepNorm); `scales` are the block's other constant factors in dataflow order. `added` are the linears and
    tables that write further terms of the sum (positions, conditions), told of its first block alone. `barriers` are
    what no linear edit passes; a block without them is accounted for. `arms` are linears inside the branch that share
    a free factor.
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
    arms: tuple[Arm, ...] = ()
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
        """Derive the placement from the sites: a trunk norm makes it post whatever the branch holds."""
        held = {s.where for s in self.sites}
        if Where.POST in held:
            return Placement.POST
        if Where.IN in held:
            return Placement.PERI if Where.OUT in held else Placement.PRE
        if Where.OUT in held:
            return Placement.OUTPUT
        if any(s.where is Where.INNER and s.readers and not s.taps for s in self.sites):
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

    def located(self) -> Iterator[tuple[str, Block | None, Site]]:
        """Yield (site name, block, site) for every norm; the block is None at the stream's ends."""
        if self.embedding:
            yield f"{self.name}.embedding", None, self.embedding
        for block in self.blocks:
            for site in block.sites:
                yield site_name(block, site), block, site
        if self.final:
            yield f"{self.name}.final", None, self.final


    def makers(self, block: Block | None, site: Site) -> tuple[Linear, ...]:
        """Return the linears whose sum, scaled at most, a norm reads; none where something else has a part in it."""
        if site.where is Where.EMBEDDING:
            return () if self.opaque else self.sources
        if site.where is Where.OUT and block:
            return () if block.barrier(Side.WRITTEN) else block.writers
        return site.writers


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


@dataclass(frozen=True, slots=True)
class Network:
    """Hold all that was seen in one model: its streams, norms that are on no stream, and what was not understood.

    `computed` names the nodes that compute a linear map's weight from parameters (weight standardisation).
    """

    streams: tuple[Stream, ...] = ()
    elsewhere: tuple[Site, ...] = ()
    refusals: tuple[object, ...] = ()
    computed: tuple[str, ...] = field(default=(), compare=False)

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
