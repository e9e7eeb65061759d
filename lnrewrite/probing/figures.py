"""The figures of a model's streams: what `lnr.probe` returns and `probe --json` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from html import escape

from ..errors import LnrewriteError, visible
from ..pipeline.results import Json


@dataclass(frozen=True, slots=True)
class State:
    """Hold the figures of one state of a stream, over all tokens of the data.

    after: the last block of the sum that made it; None for the stream's source. variance: of a token's channels, mean
    over tokens. rms: root of the mean square of all its numbers. size_cv: a token's RMS, its standard deviation over
    tokens by its mean. kurtosis: of a token's channels (a normal distribution has 3), mean over the tokens whose
    channels differ; None where no token's do. max_abs: the largest number's size, in channel `channel`.
    """

    after: str | None
    variance: float
    rms: float
    size_cv: float
    kurtosis: float | None
    max_abs: float
    channel: int


@dataclass(frozen=True, slots=True)
class BlockFigures:
    """Hold the figures of one block, over all tokens of the data.

    branch_ratio: the RMS of what is added by that of the state before it. influence: 1 - the mean over tokens of the
    cosine between the states before and behind its sum (Block Influence, arXiv 2403.03853); None where those differ in
    shape. gradient_norm: of the loss by the block's own parameters; None where nothing was differentiated.
    sink: the share of attention that falls on the first position, mean over heads and over the positions that see more
    than it (arXiv 2309.17453); None where no attention was seen. expected_error: by placement, how far
    converting the block with constants is expected to turn the state behind it, in radians (`predicting`).
    """

    name: str
    kind: str
    placement: str
    branch_ratio: float
    influence: float | None
    gradient_norm: float | None = None
    sink: float | None = None
    expected_error: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gain:
    """Hold what a norm's stored gain is: the RMS of its numbers, the largest size, and whether there is a bias."""

    site: str
    kind: str
    eps: float
    rms: float
    max_abs: float
    bias_rms: float


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """Hold the figures of one stream: its states, blocks and norms.

    angular_distance[n - 1] holds, for each state that has one n sums behind it, arccos of the mean cosine between the
    two over pi, in 0 to 1 (arXiv 2403.17887); None where they differ in shape.
    """

    name: str
    width: int
    states: tuple[State, ...]
    blocks: tuple[BlockFigures, ...]
    angular_distance: tuple[tuple[float | None, ...], ...]
    gains: tuple[Gain, ...] = ()

    def steps(self) -> Iterator[tuple[State, tuple[BlockFigures, ...]]]:
        """Yield each state and the blocks of the sum that made it; none for the source."""
        rest = iter(self.blocks)
        for state in self.states:
            made: list[BlockFigures] = []
            for block in rest if state.after is not None else ():
                made.append(block)
                if block.name == state.after:
                    break
            yield state, tuple(made)


@dataclass(frozen=True, slots=True)
class Massive:
    """Hold a massive activation: beyond 100, and 1,000 times the median size of its state (arXiv 2402.17762).

    after: the block behind which it stands, None for the source. value: the largest of its channel, at `token` (the
    indices of all axes but the channels', counted over the batches in the first). ratio: its size by the median's, None
    where that is 0.
    """

    after: str | None
    channel: int
    value: float
    ratio: float | None
    token: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Outlier:
    """Hold how far the largest number stands out of what linear maps read of a stream at one place.

    at: the norm behind which they read, or the block that reads a state bare. max_abs: the largest number's size, in
    channel `channel`. ratio: that by the RMS of all numbers. kurtosis: of a token's channels, as of a `State`.
    int8_token, int8_tensor: what rounding to 8 bits loses, by absolute maximum with one scale for each token, and with
    one for each batch: the root mean square of the error by that of the numbers.
    """

    at: str
    max_abs: float
    channel: int
    ratio: float
    kurtosis: float | None
    int8_token: float
    int8_tensor: float


@dataclass(frozen=True, slots=True)
class Headroom:
    """Hold the largest number that a linear map or a stream reads or writes, at node `at`, and 65504 by it."""

    max_abs: float
    headroom: float | None
    at: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Hold what a model's streams hold on data. tokens: how many were seen; differentiated: what the gradients are of.

    picture: the object of `inspect --json`, which the report draws; no part of the JSON. Its text is the table that
    `lnrewrite probe` prints; a notebook shows the report.
    """

    model: str
    format: str
    placement: str
    data: str
    tokens: int
    streams: tuple[StreamFigures, ...]
    massive: tuple[Massive, ...]
    fp16: Headroom
    outliers: tuple[Outlier, ...] = ()
    differentiated: str | None = None
    notes: tuple[str, ...] = ()
    picture: Json | None = field(default=None, repr=False, compare=False)

    def worst(self) -> list[Outlier]:
        """Return the outliers, those first that stand out farthest."""
        return sorted(self.outliers, key=lambda each: -each.ratio)

    def to_dict(self) -> Json:
        """Return the JSON object of `probe --json`."""
        return {name: value for name, value in asdict(self).items() if name != "picture"}

    def to_html(self) -> str:
        """Return the report of `probe -o OUT.html`. Raises LnrewriteError LN018 where matplotlib is not installed."""
        from ..pictures.page import report

        return report([("", self)])

    def _repr_html_(self) -> str:
        from ..pictures.page import report_body

        try:
            return report_body([("", self)])
        except LnrewriteError:  # nothing draws charts here
            return f"<pre>{escape(visible(str(self)))}</pre>"

    def __str__(self) -> str:
        from .words import told

        return told(self)
