"""What a pass proposes: whole edits, refusals, and sites it does not speak of. Edits are data, for a backend."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from ..errors import Refusal
from .network import Stream, site_name
from .parts import Linear, Norm, Scale, Where


class Exactness(enum.IntEnum):
    """Order what a rewrite claims; a pipeline's class is the maximum over its passes.

    structural: the same operations. algebraic: an identity over the reals, eps included. asymptotic: an identity as
    eps goes to 0, with a stated bound. calibrated: close on sample data. learned: needs training.
    """

    STRUCTURAL = 0
    ALGEBRAIC = 1
    ASYMPTOTIC = 2
    CALIBRATED = 3
    LEARNED = 4

    def __str__(self) -> str:
        return self.name.lower()


class Array(Protocol):
    """Represent a numpy array without importing numpy."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> object: ...
    def tobytes(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Vector:
    """Point to a vector [channels] or matrix [channels, channels] beside the proposal's edits, by content (sha256)."""

    digest: str


@dataclass(frozen=True, slots=True)
class Gain:
    """Represent the value of a norm's own gain (gamma, or 1 + gamma) or bias parameter."""

    param: str
    plus_one: bool = False


@dataclass(frozen=True, slots=True)
class Number:
    """Represent one number for all channels: value * I."""

    value: float


@dataclass(frozen=True, slots=True)
class Center:
    """Represent the matrix that leaves `left` of the mean of each run of channels: I - (1 - left) 11^T / width."""

    width: int
    left: float = 0.0


@dataclass(frozen=True, slots=True)
class Rotation:
    """Represent an orthogonal matrix Q, the same on each run of `block` channels; `back` for its transpose.

    kind: `hadamard` (H diag(s): a normalized Walsh-Hadamard matrix, `block` a power of two, with signs s drawn for
    each channel of the block) or `random` (uniform over orthogonal matrices); both are drawn from `seed`.
    """

    kind: str
    block: int
    seed: int
    back: bool = False

    @property
    def transposed(self) -> Rotation:
        """Return the inverse."""
        return replace(self, back=not self.back)


Value = Vector | Gain | Number | Center | Rotation


@dataclass(frozen=True, slots=True)
class Size:
    """Represent S, one number per token that the graph computes: what trunk norms would have divided it by.

    S = S' s(y / S') / c: y is what `norm` reads, the one behind the sum of a block, or at the stream's start, that `of`
    names; S' is `before`, 1 without; s(z) = sqrt(var(z) + eps), for an rms norm sqrt(mean(z^2) + eps); c is `usual`.
    The norm itself may be gone. `inverse` stands for 1 / S.
    """

    of: str
    norm: Norm
    before: Size | None = None
    usual: float = 1.0
    inverse: bool = False


@dataclass(frozen=True, slots=True)
class SetNorm:
    """Put `norm` at a block's (or stream's) site, or remove it (None).

    A site that holds a norm gets its description replaced: same input, same consumers. gamma, beta: the effective gain
    (what multiplies, whatever `plus_one` says) and bias to start from; None takes the parameter that `norm` names as it
    is. A value for a norm that names no parameter makes a new one. `index` counts the block's norms of that kind.
    """

    where: Where
    norm: Norm | None
    gamma: Value | None = None
    beta: Value | None = None
    index: int = 0


@dataclass(frozen=True, slots=True)
class FoldReader:
    """Make a reader see u instead of scale * u + shift: W <- W diag(scale), c <- c + W_old shift.

    A matrix for scale is a dense fold: the reader saw scale @ u + shift, W <- W scale.
    """

    reader: Linear
    scale: Value | None = None
    shift: Value | None = None


@dataclass(frozen=True, slots=True)
class ScaleWriter:
    """Make a writer write scale * f + shift: W <- diag(scale) W (or scale W for a matrix), c <- scale * c + shift.

    Where a linear's channels are several runs of the scale's (heads), each run is scaled alike.
    """

    writer: Linear
    scale: Value
    shift: Value | None = None


@dataclass(frozen=True, slots=True)
class Affine:
    """Insert u -> scale * u + shift.

    At `in` it stands where the block reads the stream (after an in norm), at `out` just before the add, at `post` on
    the skip's edge alone: what the block passes on to its add; at `embedding` where the stream starts, behind its
    embedding norm. `before` says before the norm there, `in` one that is put in later; at `post` what is behind the
    block's sum. A `Center` as scale is one explicit subtraction of the whole mean; a `Size` goes without a shift.
    """

    where: Where
    scale: Value | Size | None = None
    shift: Value | None = None
    before: bool = False


@dataclass(frozen=True, slots=True)
class DropScale:
    """Take a constant factor of the block out of the graph; None stands for the one on its skip."""

    scale: Scale | None


@dataclass(frozen=True, slots=True)
class Normalize:
    """Replace every row of a table by its norm, gain and bias included."""

    table: Linear
    norm: Norm


@dataclass(frozen=True, slots=True)
class Untie:
    """Give one use of a shared parameter its own copy."""

    linear: Linear


@dataclass(frozen=True, slots=True)
class Freeze:
    """Store what a node computes from parameters as a parameter of its own."""

    node: str


@dataclass(frozen=True, slots=True)
class Bypass:
    """Let what reads a node read another one, which gives the same."""

    node: str
    kept: str


Operation = SetNorm | FoldReader | ScaleWriter | Affine | DropScale | Normalize | Untie | Freeze | Bypass


@dataclass(frozen=True, slots=True)
class Edit:
    """Change one block (or a stream's end) as a whole: the norm *and* what compensates it.

    `target` is a block's name, or `stream.embedding` / `stream.final`. `expected` is the relative squared error that
    the edit is expected to cause at its own site (None where it is exact) and `note` says what it rests on. `bound` is
    the relative error that an asymptotic edit states for values of size one; the proof allows for it. `basis` is what
    the state behind the block's sum is then to be multiplied by, per channel, for one like the original's.
    """

    target: str
    operations: tuple[Operation, ...]
    expected: float | None = None
    note: str = ""
    bound: float = 0.0
    basis: Vector | None = None


@dataclass(frozen=True, slots=True)
class Proposal:
    """Hold what one pass wants to do to one stream; `vectors` are the arrays its edits point to.

    `otherwise` is why a site that nothing here names is not applicable; without it each site has to be named.
    """

    edits: tuple[Edit, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    not_applicable: tuple[tuple[str, str], ...] = ()
    vectors: Mapping[str, Array] = field(default_factory=dict, compare=False)
    otherwise: str = field(default="", compare=False)

    def completed(self, stream: Stream) -> Proposal:
        """Return the proposal with a row for each site of the stream that no edit sets and nothing else names."""
        if not self.otherwise:
            return self
        named = {r.site for r in self.refusals} | {site for site, _ in self.not_applicable}
        blocks = {b.name: b for b in stream.blocks}
        for edit in self.edits:
            block = blocks.get(edit.target)
            for operation in (o for o in edit.operations if isinstance(o, SetNorm)):
                site = block.at(operation.where, operation.index) if block else None
                named.add(site_name(block, site) if block and site else edit.target)
            named |= {edit.target} if block and not block.sites else set()
        owners = {site_name(b, s): b.name for b in stream.blocks for s in b.sites}
        wanted = [name for name, _ in stream.sites()] + [b.name for b in stream.blocks if not b.sites]
        wanted = wanted if stream.width else [n for n, _ in stream.sites()]
        silent = [n for n in wanted if named.isdisjoint({n, owners.get(n, n), stream.name})]
        rows = (*self.not_applicable, *((name, self.otherwise) for name in silent))
        return replace(self, not_applicable=rows, otherwise="")


class Vectors(dict[str, Array]):
    """Collect the arrays of a proposal under their content's digest."""

    def add(self, array: Array) -> Vector:
        """Store `array` and return the pointer to it: equal content, equal pointer."""
        digest = hashlib.sha256(str((array.shape, str(array.dtype))).encode() + array.tobytes()).hexdigest()[:16]
        self[digest] = array
        return Vector(digest)
