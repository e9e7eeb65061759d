"""Measure a stream while a model runs: some sizes of each token are kept, and no state longer than its batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import Code, LnrewriteError
from ..ir import Block, Stream, Where, sums
from .figures import Massive, State

MASSIVE, TIMES = 100.0, 1000.0
"""What makes an activation massive: its size, and by how many times it passes the median (arXiv 2402.17762)."""
PIECE = 64
"""How many tokens are measured at a time."""
HELD = 1 << 27
"""How many bytes of one batch's states are held, to compare each with all before it; of larger ones fewer tokens."""


def state_nodes(stream: Stream) -> list[tuple[str, int]]:
    """Return the nodes of a stream's states, and their channels' axis: the source, and what each sum hands on.

    Behind a trunk norm that is the norm's output.
    """
    if not stream.blocks:
        return []
    first = stream.blocks[0].anchor
    found = [(first.state, first.axis)]
    for group in sums(stream):
        trunk = group[-1].at(Where.POST)
        anchor = group[-1].anchor
        found.append((trunk.origin[-1] if trunk else anchor.total, trunk.norm.axis if trunk else anchor.axis))
    return found


def tokens_of(value: Tensor, axis: int) -> Tensor:
    """Return a value as rows [tokens, channels]."""
    rows = value.movedim(axis, -1)
    return rows.reshape(-1, rows.shape[-1])


def pieces(rows: Tensor) -> Iterator[Tensor]:
    """Yield rows some at a time, in float64: large intermediates come and go in every state, and memory falls apart."""
    for piece in rows.split(PIECE):
        yield piece.double()


def kurtosis(rows: Tensor) -> Tensor:
    """Return the kurtosis of each token's channels, for those tokens whose channels differ."""
    squares = (rows - rows.mean(-1, keepdim=True)).square()
    variance = squares.mean(-1)
    apart = variance > 0
    return squares.square().mean(-1)[apart] / variance[apart].square()


def finite(rows: Tensor, stream: str, what: str) -> Tensor:
    """Return a value. Raises LnrewriteError LN026 where it is NaN or infinite."""
    if not bool(torch.isfinite(rows).all()):
        why = f"{what} is NaN or infinite on this data"
        raise LnrewriteError(Code.LN026, stream, why, "run the model in float32, or check the data")
    return rows


@dataclass
class Mean:
    """Take the mean of numbers as they come."""

    total: float = 0.0
    count: int = 0

    def add(self, numbers: Tensor) -> None:
        """Add a batch's numbers."""
        self.total, self.count = self.total + float(numbers.sum()), self.count + numbers.numel()

    @property
    def value(self) -> float | None:
        """Return the mean; None of no numbers."""
        return self.total / self.count if self.count else None


@dataclass
class Sizes:
    """Keep a value's size for each token, batch by batch: the RMS of its channels."""

    held: list[Tensor] = field(default_factory=list)

    def add(self, rows: Tensor) -> None:
        """Add a batch's tokens [tokens, channels]."""
        self.held += [piece.square().mean(-1).sqrt().float() for piece in pieces(rows)]

    @property
    def tokens(self) -> Tensor:
        """Return one size for each token of all batches."""
        return torch.cat(self.held).double()

    @property
    def whole(self) -> float:
        """Return the root mean square of all numbers."""
        return float(self.tokens.square().mean().sqrt())


class Meter:
    """Measure one stream: show it its values as they are made, and say where a batch ends."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.nodes = stream, state_nodes(stream)
        names = [g[-1].name for g in sums(stream)]
        self.after: list[str | None] = [None, *names]
        self.states = [Sizes() for _ in self.nodes]
        self.variance, self.kurtosis = ([Mean() for _ in self.nodes] for _ in range(2))
        self.channels: list[Tensor | None] = [None for _ in self.nodes]
        self.massive: dict[tuple[int, int], Massive] = {}
        self.values = {name: (Sizes(), axis) for b in stream.blocks for name, axis in value_nodes(b)}
        self.turning: dict[str, list[Tensor]] = {b.name: [] for b in stream.blocks}
        self.waiting: dict[str, Tensor] = {}
        self.cosines: dict[tuple[int, int], Mean] = {}
        self.held: dict[int, Tensor] = {}
        self.first, self.rows = 0, 0

    @property
    def wanted(self) -> list[str]:
        """Return the nodes whose values are to be shown."""
        return [n for n, _ in self.nodes] + list(self.values)

    def see(self, name: str, value: Tensor) -> None:
        """Take a node's value."""
        for index, (node, axis) in enumerate(self.nodes):
            if node == name:
                self._state(index, value, axis)
        if name in self.values:
            sizes, axis = self.values[name]
            sizes.add(rows := tokens_of(value, axis))
            self._turn(name, rows)

    def end(self) -> None:
        """End a batch: nothing of it is held any longer."""
        self.held, self.waiting, self.first, self.rows = {}, {}, self.first + self.rows, 0

    def _turn(self, name: str, rows: Tensor) -> None:
        """Keep, for each token, how large the part of a branch is that turns its sum, over the sum's size."""
        for block in self.stream.blocks:
            anchor = block.anchor
            if name == anchor.branch:
                self.waiting[block.name] = rows
            branch = self.waiting.pop(block.name, None) if name == anchor.total else None
            if branch is not None and branch.shape == rows.shape:
                both = zip(pieces(branch), pieces(rows), strict=True)
                self.turning[block.name] += [turned(part, total) for part, total in both]

    def _state(self, index: int, value: Tensor, axis: int) -> None:
        rows = finite(tokens_of(value, axis), self.stream.name, f"the state behind {self.after[index] or 'its source'}")
        self.states[index].add(rows)
        for piece in pieces(rows):
            self.variance[index].add(piece.var(-1, correction=0))
            self.kurtosis[index].add(kurtosis(piece))
        shape = tuple(value.movedim(axis, -1).shape[:-1])
        self.rows = shape[0] if len(shape) > 1 else 0
        self._largest(index, rows, shape)
        self._compare(index, rows)

    def _largest(self, index: int, rows: Tensor, shape: Sequence[int]) -> None:
        """Note the largest size of each channel, and what is massive."""
        sizes = rows.abs().float()
        largest, at = sizes.max(0)
        before = self.channels[index]
        self.channels[index] = largest if before is None else torch.maximum(before, largest)
        if float(largest.max()) <= MASSIVE:
            return
        median = float(sizes.flatten().kthvalue((sizes.numel() + 1) // 2).values)
        for channel in (largest > max(MASSIVE, TIMES * median)).nonzero().flatten().tolist():
            value, (first, *rest) = float(rows[at[channel], channel]), _place(int(at[channel]), shape)
            token = (first + self.first * (len(shape) > 1), *rest)
            known = self.massive.get((index, channel))
            if known is None or abs(known.value) < abs(value):
                ratio = abs(value) / median if median else None
                self.massive[index, channel] = Massive(self.after[index], channel, value, ratio, token)

    def _compare(self, index: int, rows: Tensor) -> None:
        """Keep the cosines between this state's tokens and those of each state before it."""
        limit = max(64, HELD // (8 * len(self.nodes) * rows.shape[-1]))
        if len(rows) > limit:
            rows = rows[torch.linspace(0, len(rows) - 1, limit).long()]
        rows = rows.double()
        unit = rows / rows.norm(dim=-1, keepdim=True).clamp_min(1e-300)
        for earlier, other in self.held.items():
            if other.shape == unit.shape:
                self.cosines.setdefault((earlier, index), Mean()).add(torch.linalg.vecdot(other, unit))
        self.held[index] = unit

    def cosine(self, start: int, end: int) -> float | None:
        """Return the mean cosine between two states, over tokens."""
        mean = self.cosines.get((start, end), Mean()).value
        return None if mean is None else max(-1.0, min(1.0, mean))

    def figures(self) -> tuple[State, ...]:
        """Return the figures of every state."""
        return tuple(self._figures(k) for k in range(len(self.nodes)))

    def _figures(self, index: int) -> State:
        sizes, channels = self.states[index], self.channels[index]
        assert channels is not None
        tokens = sizes.tokens
        mean = float(tokens.mean())
        return State(
            self.after[index],
            variance=self.variance[index].value or 0.0,
            rms=sizes.whole,
            size_cv=float(tokens.std(correction=0)) / mean if mean else 0.0,
            kurtosis=self.kurtosis[index].value,
            max_abs=float(channels.max()),
            channel=int(channels.argmax()),
        )

    def distances(self) -> tuple[tuple[float | None, ...], ...]:
        """Return the angular distances between states n sums apart, for n = 1, 2, ..."""
        many = len(self.nodes)
        return tuple(tuple(self._angle(s, s + n) for s in range(many - n)) for n in range(1, many))

    def _angle(self, start: int, end: int) -> float | None:
        cosine = self.cosine(start, end)
        return None if cosine is None else math.acos(cosine) / math.pi


def turned(branch: Tensor, total: Tensor) -> Tensor:
    """Return the size of a branch's part across its sum, over the sum's, for each token [tokens, channels]."""
    square = total.square().sum(-1, keepdim=True).clamp_min(torch.finfo(total.dtype).tiny)
    across = branch - (branch * total).sum(-1, keepdim=True) / square * total
    return (across.square().sum(-1) / square[:, 0]).sqrt().float()


def value_nodes(block: Block) -> Iterator[tuple[str, int]]:
    """Yield the other values of a block whose sizes are kept: its branch, before and behind an out norm, its sum."""
    yield block.anchor.branch, block.anchor.axis
    out = block.at(Where.OUT)
    if out:
        yield out.origin[0], out.norm.axis
    yield block.anchor.total, block.anchor.axis


def _place(row: int, shape: Sequence[int]) -> Iterator[int]:
    """Yield the indices of a row in the axes that were joined."""
    for size in (math.prod(shape[i + 1 :]) for i in range(len(shape))):
        yield row // size
        row %= size
