"""What the picture is made of: norms, linear maps, factors and barriers, each at its place."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field, replace


class Kind(enum.StrEnum):
    """Describe what a norm computes over its axis: u = (x - m) / s, then u * gamma + beta.

    layer: m = mean, s = sqrt(var + eps). rms: m = 0, s = sqrt(mean(x^2) + eps). std: m = mean, s = std + eps.
    l2: m = 0, s = max(|x|, eps), |x| + eps or sqrt(|x|^2 + eps). centered: m = mean, s = 1 (a LayerNorm whose deviation
    was fixed, arXiv 2409.13710). batch, group, instance: the statistics run over other
    axes than the channels. power: m = 0, s = sqrt(v + eps) for stored v (PowerNorm, arXiv 2003.07845). dynamic_tanh:
    u = tanh(a x), no statistics (DyT, arXiv 2503.10622). dynamic_erf: u = erf(a x + s) (Derf, arXiv 2512.10938). crms:
    m = 0, s = sqrt((sum x^2 + (sum x)^2) / (n + 1) + eps), x a row of mean zero without its last number (arXiv
    2305.14858). weight_standardised: what is normed is a weight, not a value
    (arXiv 1903.10520).
    """

    LAYER = "layer"
    RMS = "rms"
    STD = "std"
    L2 = "l2"
    CENTERED = "centered"
    BATCH = "batch"
    GROUP = "group"
    INSTANCE = "instance"
    POWER = "power"
    TANH = "dynamic_tanh"
    ERF = "dynamic_erf"
    CRMS = "crms"
    WEIGHT = "weight_standardised"


FIXED = 1e9
"""The eps from which on a norm divides by one number: to 6e-8, half the last bit of a float32, up to a variance of 120,
and of 120,000 with the usual 1e12.
"""


class Where(enum.StrEnum):
    """Describe where a norm sits: three sites of a block (in, out, post), inside its branch, or at a stream's ends."""

    IN = "in"
    OUT = "out"
    POST = "post"
    INNER = "inner"
    EMBEDDING = "embedding"
    FINAL = "final"


class Side(enum.StrEnum):
    """Describe at which edge of a block a barrier stands.

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
    that u is multiplied by before the gain (sqrt(width) behind an l2 norm). `variant` tells the spellings of a kind
    apart: std 1, of the unbiased deviation; l2 1, |x| + eps; l2 2, sqrt(|x|^2 + eps). `axis` is the channels' place in
    what it reads, counted from the end. `over` is a norm that this one reads and nothing else does: norm of norm.
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
    variant: int = 0
    axis: int = -1
    over: Norm | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.eps) and self.eps >= 0):
            raise ValueError(f"a norm's eps must be finite and not negative, got {self.eps}")
        if self.plus_one and not self.gamma:
            raise ValueError("plus_one needs a gamma")

    @property
    def bare(self) -> Norm:
        """Return the norm without its gain and bias."""
        return replace(self, gamma=None, beta=None, plus_one=False, computed=False)

    @property
    def fixed(self) -> float | None:
        """Return the number that the norm divides by whatever it reads, up to a stated bound: then it is no norm.

        With eps far above the variance v, sqrt(v + eps) is sqrt(eps) but for v / (2 eps) of itself (arXiv 2409.13710).
        """
        if self.kind is Kind.CENTERED:
            return 1.0
        return math.sqrt(self.eps) if self.kind in {Kind.LAYER, Kind.RMS} and self.eps >= FIXED else None


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
        """Return whether the parameter is used elsewhere too."""
        return self.uses > 1


@dataclass(frozen=True, slots=True)
class ScalePair:
    """Name linears inside a branch whose output's scale goes on to other linears of it, and nowhere else.

    What `producers` are divided by, by a positive number, `consumers` can be multiplied by (cross-layer equalization,
    arXiv 1906.04721). `run` is the number of channels of a head where each head's channels reach the consumers unmixed,
    so that they may be rotated too; else 0. `values` names the nodes whose size follows the producers'.
    """

    producers: tuple[Linear, ...]
    consumers: tuple[Linear, ...]
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
class Gate:
    """Say that a node gives its operand `kept` where the constant `by` (a number, or its node) is `idle` throughout.

    x * 1 is x; x + 0 f is x for every finite f.
    """

    node: str
    kept: str
    by: float | str
    idle: float


@dataclass(frozen=True, slots=True)
class Barrier:
    """Name an operator `op` at an edge of a block which no linear edit passes."""

    at: Side
    op: str

    def __str__(self) -> str:
        return SAID[self.at].format(op=self.op)


RECALL = "a sum with an earlier state"
"""What a trunk is carried through where it takes an earlier state up again: one map of all states passes it."""

SAID = {
    Side.READ: "read by {op}", Side.RAW: "reads the raw stream too", Side.WRITTEN: "written by {op}",
    Side.ENDS: "ends in {op}", Side.ADDED: "adds {op}", Side.CARRIED: "carried through {op}",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Site:
    """Place one norm: where it sits, the linears that read its output, and any other consumer of it.

    `readers` and `taps` together are every consumer: an edit of the norm's affine is whole when it reaches all of
    them. `writers` are the linears that make up all of its input and serve nothing else; none where it has others (an
    out norm's are the block's, unless they take no more than a batch norm's factors; an embedding norm's the stream's
    sources), `width` the size of what it normalizes (0: the stream's). `modulated` says that data multiply the norm:
    `adaptive` (a gain computed from a condition), `time-dependent` (stored gains mixed by a scalar of the condition),
    `gated` (an activation of another value). `origin` names the graph nodes that compute the norm: input first, output
    last.
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
    """Record for a backend where a block lives in its graph, by node name.

    `state` is the trunk value that the block reads (for post, the norm's output), `branch` the branch's last value
    before the add, `add` the node that adds it to the trunk and `skip` the add's other operand. Several adds of one
    sum share `total`, the sum's last add. `axis` is the channels' place in these values, counted from the end. `inside`
    are the branch's values between readers and writers: neither of the stream's size nor a norm's. `hidden` is what the
    branch's only writer reads, with its channels last; empty where something else reads it too, or there are several.
    """

    state: str = ""
    branch: str = ""
    add: str = ""
    skip: str = ""
    total: str = ""
    axis: int = -1
    inside: tuple[str, ...] = ()
    hidden: str = ""
