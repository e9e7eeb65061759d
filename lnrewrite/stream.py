"""The picture: a trained residual network as streams that blocks read from and write to.

Everything here is frozen, hashable and free of tensors; parameters are named, never held. Detection makes a
`Network`, passes look at it and propose edits, backends carry them out.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass, field


class Kind(enum.StrEnum):
    """Say what a norm computes over its axis: u = (x - m) / s, then u * gamma + beta.

    layer: m = mean, s = sqrt(var + eps). rms: m = 0, s = sqrt(mean(x^2) + eps). std: m = mean, s = std + eps.
    l2: m = 0, s = max(|x|, eps) or |x| + eps. batch, group: the statistics run over other axes than the channels.
    """

    LAYER = "layer"
    RMS = "rms"
    STD = "std"
    L2 = "l2"
    BATCH = "batch"
    GROUP = "group"


class Where(enum.StrEnum):
    """Say where a norm sits: three sites of a block (in, out, post), inside its branch, or at a stream's ends."""

    IN = "in"
    OUT = "out"
    POST = "post"
    INNER = "inner"
    EMBEDDING = "embedding"
    FINAL = "final"


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
    name describes (a sigmoid of a weight): then it is the name of the node that computes it and `computed` is true.
    """

    kind: Kind
    eps: float
    gamma: str | None = None
    beta: str | None = None
    plus_one: bool = False
    computed: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.eps) and self.eps >= 0):
            raise ValueError(f"a norm's eps must be finite and not negative, got {self.eps}")
        if self.plus_one and not self.gamma:
            raise ValueError("plus_one needs a gamma")


@dataclass(frozen=True, slots=True)
class Linear:
    """Name a linear map at the edge of a branch: `param`'s axis `axis` runs over the stream's channels.

    A reader contracts that axis with what it reads; a writer produces it. `bias` is the vector added to the map's
    output. `shared` is true when the parameter is used elsewhere too, so that an edit here would change more.
    `exact` is false for a map whose bias a shift cannot be folded into (a padded convolution, gathered experts).
    """

    param: str
    axis: int
    bias: str | None = None
    shared: bool = False
    exact: bool = True
    node: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Site:
    """Place one norm: where it sits, the linears that read its output, and any other consumer of it.

    `readers` and `taps` together are every consumer: an edit of the norm's affine is whole when it reaches all of
    them. `origin` names the graph nodes that compute the norm: input first, output last.
    """

    where: Where
    norm: Norm
    readers: tuple[Linear, ...] = ()
    taps: tuple[str, ...] = ()
    origin: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Anchor:
    """Tell a backend where a block lives in its graph, by node name.

    `state` is the trunk value that the block reads (for post, the norm's output), `branch` the branch's last value
    before the add, `add` the node that adds it to the trunk and `skip` the add's other operand. Several adds of one
    sum share `total`, the sum's last add. `axis` is the channels' place in these values, counted from the end.
    """

    state: str = ""
    branch: str = ""
    add: str = ""
    skip: str = ""
    total: str = ""
    axis: int = -1


@dataclass(frozen=True, slots=True)
class Block:
    """Describe one residual branch: x' = skip(x) + branch(x).

    `sites` holds its norms in dataflow order; `readers` the first linears that see the stream, `writers` the last
    before the add. `parallel_group` numbers branches that share one sum. `scale` is a constant that multiplies the
    skip (DeepNorm); `opaque` says in words what stands between the trunk and the readers, or the writers and the
    trunk, that no affine edit passes through (empty when nothing does).
    """

    name: str
    kind: str = "other"
    sites: tuple[Site, ...] = ()
    readers: tuple[Linear, ...] = ()
    writers: tuple[Linear, ...] = ()
    parallel_group: int | None = None
    scale: float = 1.0
    opaque: str = ""
    anchor: Anchor = field(default=Anchor(), compare=False)

    def at(self, where: Where) -> Site | None:
        """Return the block's first site of that kind, or None."""
        return next((s for s in self.sites if s.where is where), None)

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

    `sources` names the parameters that start the stream, `taps` the consumers of its states that are no block and no
    end norm. `source`, `last` name the nodes of the first and the last state.
    """

    name: str
    width: int
    blocks: tuple[Block, ...] = ()
    sources: tuple[str, ...] = ()
    embedding: Site | None = None
    final: Site | None = None
    taps: tuple[str, ...] = ()
    source: str = field(default="", compare=False)
    last: str = field(default="", compare=False)

    def verify(self) -> None:
        """Raise ValueError where the picture contradicts itself."""
        names = [b.name for b in self.blocks]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise ValueError(f"stream {self.name}: block names must be unique: {', '.join(twice)}")
        if self.width < 1:
            raise ValueError(f"stream {self.name}: width must be positive, got {self.width}")

    def sites(self) -> Iterator[tuple[str, Site]]:
        """Yield (site name, site) for every norm on the stream and in its branches, in dataflow order."""
        if self.embedding:
            yield f"{self.name}.embedding", self.embedding
        for block in self.blocks:
            for site in block.sites:
                yield site_name(block, site), site
        if self.final:
            yield f"{self.name}.final", self.final


def site_name(block: Block, site: Site) -> str:
    """Name a block's site: `block.where`, numbered where a branch holds several inner norms."""
    same = [s for s in block.sites if s.where is site.where]
    index = next(i for i, s in enumerate(same) if s is site)
    return f"{block.name}.{site.where}" + (f"{index + 1}" if len(same) > 1 else "")


@dataclass(frozen=True, slots=True)
class Network:
    """Hold all that was seen in one model: its streams, norms that are on no stream, and what was not understood."""

    streams: tuple[Stream, ...] = ()
    elsewhere: tuple[Site, ...] = ()
    refusals: tuple[object, ...] = ()

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Return the blocks of all streams in execution order."""
        return tuple(b for s in self.streams for b in s.blocks)

    @property
    def placement(self) -> str:
        """Return the one placement that all blocks share, `mixed`, or `none` when there is no block."""
        found = {b.placement.value for b in self.blocks}
        return "mixed" if len(found) > 1 else found.pop() if found else Placement.NONE.value
