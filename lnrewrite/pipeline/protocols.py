"""What a pass is, what it sees, and what a run needs of a program: words that the run loop, passes and models share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol, Self, TypeVar

from ..ir import Array, Block, Exactness, Network, Norm, Proposal, Scale, Stream
from ..ir.select import select
from .report import Fitted
from .results import Drift, Gap

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

Batch = Mapping[str, Any] | Sequence[Any]
"""One call's inputs: a mapping of keyword inputs, or a sequence of positional ones."""
Bases = Mapping[str, Array | None]
"""Blocks, and by what the state behind the sum of each is to be multiplied, per channel, to be like the original's."""


class Proposer(Protocol):
    """Describe what a pipeline runs: a `Pass`, or any frozen dataclass that holds what is named here.

    One without the base class sees streams alone, and a model without blocks stays as it is.
    """

    name: ClassVar[str]

    @property
    def exactness(self) -> Exactness: ...
    @property
    def needs_data(self) -> bool: ...
    def propose(self, stream: Stream, context: Context) -> Proposal:
        """Return whole edits, refusals and sites not spoken of, which together name every site and block."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class Samples:
    """Hold what one block saw and did on the calibration data: numpy arrays [tokens, channels].

    `state` is the trunk value that the block's skip starts from (for post-LN the trunk norm's output), `before` that
    trunk norm's input where there is one, `read` what the readers see, `written` the branch before its out norm,
    `branch` what is added, `total` the sum. All blocks of a stream hold the same tokens in the same rows.
    """

    state: Floats
    before: Floats
    read: Floats
    written: Floats
    branch: Floats
    total: Floats


def _unknown(start: str, end: str, axis: int) -> NoReturn:
    raise LookupError(f"nothing is known of the values from {start} to {end}")


@dataclass(frozen=True, eq=False, slots=True)
class Context:
    """Give a pass what lies beyond its stream; everything is a question, nothing can be changed through it.

    `samples()` runs the model on the calibration data, once, and returns block name -> `Samples`; `peaks()` the size of
    the largest number in each value of the graph, by node; `recorded(axes)` values of nodes on the same data, as arrays
    [tokens, channels], with the channels of each from its axis. `affine(start, end, axis)` are a and s, per channel, of
    a piece of graph that computes a x + s. `is_ones(param)` and `is_zeros(param)` look at a parameter's values,
    `values(param)` returns them as a float64 array and raises LnrewriteError LN105 where they are computed: catch it,
    and refuse. `seed` is for a pass that draws random numbers, `fits` says that the weights of branches are fitted to
    the calibration data when the edits are made.
    """

    network: Network
    samples: Callable[[], Mapping[str, Samples]]
    is_ones: Callable[[str], bool]
    is_zeros: Callable[[str], bool]
    values: Callable[[str], Floats]
    seed: int = 0
    shape: Callable[[str], tuple[int, ...]] = lambda param: ()
    affine: Callable[[str, str, int], tuple[Floats, Floats]] = _unknown
    peaks: Callable[[], Mapping[str, float]] = dict
    fits: bool = False
    recorded: Callable[[Mapping[str, int]], Mapping[str, Floats]] = lambda axes: {}

    def gain(self, norm: Norm) -> Floats | float:
        """Return what a norm multiplies by: a vector [width], 1 + gamma where it is stored so; a number without one."""
        return gain_of(norm, self.values)

    def selected(self, expression: str | None) -> frozenset[str]:
        """Return the names of the blocks that a `blocks=` option selects; None selects all."""
        return select(self.network, expression)


def gain_of(norm: Norm, values: Callable[[str], Floats]) -> Floats | float:
    """Return what a norm multiplies by, given a parameter's `values`: see `Context.gain`."""
    return norm.factor * (1.0 if norm.gamma is None else values(norm.gamma).reshape(-1) + norm.plus_one)


def factor_of(scales: Iterable[Scale], values: Callable[[str], Floats]) -> Floats | float:
    """Return the product of constant factors, given a parameter's `values`: a number, or one for each channel.

    Raises LnrewriteError LN105 for one that is computed.
    """
    total: Floats | float = 1.0
    for scale in scales:
        by: Floats | float = scale.by if isinstance(scale.by, float | int) else values(scale.by).reshape(-1)
        by = by if scale.vector or isinstance(by, float | int) else float(by[0])
        total = total / by if scale.inverse else total * by
    return total


def kept_of(block: Block, values: Callable[[str], Floats]) -> Floats | float:
    """Return what a sum multiplies its skip by: see `factor_of`."""
    return block.scale * factor_of(block.scaled("skip"), values)


class Model(Protocol):
    """Describe what `Pipeline.run` needs of a program; the program is never changed, `apply` returns another one."""

    @property
    def network(self) -> Network: ...
    @property
    def certified(self) -> Network:
        """Return the network as it holds on the model: tried, with barriers where it does not."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what a user should know about how the model was opened and captured."""
        ...

    @property
    def fixed_paths(self) -> tuple[str, ...]:
        """Return what the capture fixed that the model chooses by its data."""
        ...

    @property
    def narrow(self) -> bool:
        """Return whether weights are stored in fewer than 32 bits, so that edits are rounded."""
        ...

    def apply(self, edits: Sequence[tuple[Stream, Proposal]], label: str, *, consume: bool = False) -> tuple[Self, int]:
        """Carry the edits out and return the new program with their number; `consume` may use this one up."""
        ...

    def placed(self, batch: Batch) -> Batch:
        """Return a batch where the model runs."""
        ...

    def samples(self, batches: Sequence[Batch]) -> Mapping[str, Samples]:
        """Run the model on the batches and return what each block saw and did."""
        ...

    def fitted(
        self, original: Self, blocks: Bases, fit: Sequence[Batch], held: Sequence[Batch]
    ) -> tuple[Self, tuple[Fitted, ...], tuple[str, ...]]:
        """Return the model with the parameters of some blocks' branches fitted to what `original` does on data.

        Also what was done, and notes; this model may be used up. blocks: those, each with the basis of its sum.
        """
        ...

    def recorded(self, batches: Sequence[Batch], axes: Mapping[str, int]) -> Mapping[str, Floats]:
        """Run the model on the batches and return values of its graph, [tokens, channels at the axis of each]."""
        ...

    def peaks(self, batches: Sequence[Batch]) -> Mapping[str, float]:
        """Run the model on the batches and return the size of the largest number in each value of its graph."""
        ...

    def synthetic(self, seed: int) -> Sequence[Batch]:
        """Make up inputs that the model accepts."""
        ...

    def is_ones(self, param: str) -> bool: ...
    def is_zeros(self, param: str) -> bool: ...
    def values(self, param: str) -> Floats: ...
    def shape(self, param: str) -> tuple[int, ...]: ...
    def affine(self, start: str, end: str, axis: int) -> tuple[Floats, Floats]: ...
    def drift(self, other: Self, batches: Sequence[Batch], held_out: bool) -> Drift:
        """Compare `other`'s outputs with this model's on the batches."""
        ...

    def evidence(self, seed: int) -> object | None:
        """Return what this model computes on made-up inputs of two sizes; None where it cannot be run."""
        ...

    def away(self, evidence: Any) -> Gap:
        """Return how far this model's outputs are from another's evidence."""
        ...


M = TypeVar("M", bound=Model)
