"""What rotary embedding does to queries and keys, found by running it: in whatever words the model writes it.

    y[.., i] = x[.., i] cos(p w_i) - x[.., i + r/2] sin(p w_i),   y[.., i + r/2] = x[.., i + r/2] cos + x[.., i] sin

for a token at position p, i < r/2; the channels from r on stay. Interleaved, the partners are 2i and 2i + 1. The piece
of graph from x to y is run on random numbers, and holds if that is what comes out; cosines and sines are read off from
what it makes of ones. Only differences of positions matter in attention, if the angles are the same at each step:
then a kernel may count positions by itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, fx

from ...compat.torch import OpOverload, operator_name
from ..torch.computing import attribute, valued
from ..torch.evaluating import on_data, unwound

CHUNK = 512
"""How many positions are rotated at once."""
CLOSE = 1e-5
LINEAR = {"linear", "mm", "bmm", "matmul", "addmm", "embedding", "native_layer_norm", "layer_norm", "convolution"}
Sizes = Mapping[str, int]
Through = Callable[[Tensor, int], Tensor]
"""Rotates [batch, heads, new, size] from a position on."""


@dataclass(frozen=True, eq=False)
class Rotation:
    """Hold what one piece of graph does: `x`, what it starts from, channels rotated, the tables [positions, r / 2].

    far: cosines and sines at the last position. steady: whether a position is rotated alike whatever else a call has;
    frequencies that the longest text of a call chooses (longrope) are not.
    """

    x: fx.Node
    interleaved: bool
    cos: Tensor
    sin: Tensor
    far: Tensor
    steady: bool

    def like(self, other: Rotation) -> bool:
        """Return whether another rotates by the same angles, as far as both tables reach, and at the last position."""
        few = min(len(self.cos), len(other.cos))
        alike = self.interleaved == other.interleaved and torch.equal(self.cos[:few], other.cos[:few])
        return alike and torch.equal(self.far, other.far)


class Bench:
    """Run pieces of a captured decoder's graph at any sizes.

    batch, new, past: the symbols of its sizes. The tensors of parameters are the module's own.
    """

    def __init__(self, module: fx.GraphModule, positions: fx.Node | None, symbols: tuple[str, str, str]) -> None:
        self.module, self.positions, self.symbols = module, positions, symbols

    def shape(self, node: fx.Node, sizes: Sizes) -> list[int]:
        """Return the shape of a node's value at other sizes. Raises LookupError for a size that they do not tell."""
        return [d if isinstance(d, int) else sizes[str(d)] for d in node.meta["val"].shape]

    def run(self, end: fx.Node, held: Mapping[fx.Node, Tensor], start: int, batch: int, new: int) -> Tensor:
        """Compute a node from the values that are held, for `new` tokens from position `start` on."""
        sizes = dict(zip(self.symbols, (batch, new, start), strict=True))
        places = {} if self.positions is None else {self.positions: torch.arange(start, start + new).expand(batch, -1)}

        def leaf(node: fx.Node) -> Any:
            if node.op == "placeholder":
                return torch.zeros(self.shape(node, sizes), dtype=node.meta["val"].dtype)
            found = attribute(self.module, node)
            return found.detach() if isinstance(found, Tensor) else found

        found = valued(end, {**places, **held}, leaf)
        assert isinstance(found, Tensor)
        return found

    @cached_property
    def data(self) -> set[fx.Node]:
        """Return the nodes that depend on what the tokens are, not on where they stand alone."""
        return on_data(self.module.graph, [self.positions] if self.positions else [])


def rotation(bench: Bench, end: fx.Node, most: int, few: int | None = None) -> Rotation | None:
    """Return what rotates [batch, heads, new, size] into `end`, for positions below `most`; None where nothing does.

    few: the rows of the tables, `most` without.
    """
    for x in reversed(_starts(bench, end)):
        try:
            found = _read(bench, x, end, most, few or most)
        except (LookupError, RuntimeError, TypeError, AttributeError):  # a piece that does not run alone
            continue
        if found is not None:
            return found
    return None


def _starts(bench: Bench, end: fx.Node) -> list[fx.Node]:
    """Return the nodes that alone, with positions, `end` is computed from, the nearest first, up to a linear map."""
    found = list[fx.Node]()
    for last, alone in unwound(bench.module.graph, {end}, bench.data):
        value = last.meta["val"]
        if alone and last is not end and isinstance(value, Tensor) and value.dim() == 4:
            found.append(last)
        if len(found) == 8 or not _elementary(last):
            break
    return found


def _elementary(node: fx.Node) -> bool:
    """Return whether a node may be part of a rotation: it can be run, and is no map between channels."""
    operator_ = isinstance(node.target, OpOverload) and operator_name(node.target) not in LINEAR
    return node.op == "call_function" and (operator_ or node.target is operator.getitem)


def _read(bench: Bench, x: fx.Node, end: fx.Node, most: int, count: int) -> Rotation | None:
    """Return the rotation from `x` [b, heads, s, size], or [b, s, heads, size], to `end`, None where it is another."""
    own, (rows, heads, tokens, size) = ([str(d) for d in n.meta["val"].shape] for n in (x, end))
    if own not in ([rows, heads, tokens, size], [rows, tokens, heads, size]):
        return None
    turned = own[1] != heads
    batch, new, start = 2, 7, 3
    sizes = dict(zip(bench.symbols, (batch, new, start), strict=True))
    shape = bench.shape(end, sizes)
    dtype = x.meta["val"].dtype

    def through(given: Tensor, start: int) -> Tensor:
        b, _, s, _ = given.shape
        own = given.transpose(1, 2).contiguous() if turned else given
        return bench.run(end, {x: own.to(dtype)}, start, b, s).double()

    given = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype).double()
    got = through(given, start)
    if torch.equal(got, given):
        return None
    for interleaved in (False, True):
        for width in dict.fromkeys((shape[-1], shape[-1] // 2, shape[-1] // 4, *_moved(given, got))):
            if width < 2 or width % 2:
                continue
            cos, sin = _tables(through, shape, interleaved, width, start, new)
            if _close(got, rotated(given, cos, sin, interleaved), dtype):
                if not _relative(through, shape, interleaved, width, dtype):
                    return None
                read = partial(_tables, through, shape, interleaved, width)
                cos, sin = read(0, count)
                far = torch.cat(read(most - 1, 1))
                return Rotation(x, interleaved, cos.to(dtype), sin.to(dtype), far, _steady(read, cos, sin, dtype))
    return None


def _moved(given: Tensor, got: Tensor) -> list[int]:
    """Return how many channels a rotation changes."""
    changed = ((given - got).abs().amax((0, 1, 2)) > 0).nonzero()
    return [int(changed.max()) + 1] if len(changed) else []


def _tables(
    through: Through, shape: list[int], interleaved: bool, size: int, start: int, count: int
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines [count, size / 2] from a position on: what is made of ones in the first halves."""
    first, second = halves(size, interleaved)
    cos, sin = list[Tensor](), list[Tensor]()
    for begin in range(start, start + count, CHUNK):
        s = min(CHUNK, start + count - begin)
        ones = torch.zeros(1, shape[1], s, shape[-1], dtype=torch.float64)
        ones[..., first] = 1
        made = through(ones, begin)
        cos.append(made[0, 0][:, first])
        sin.append(made[0, 0][:, second])
    return torch.cat(cos), torch.cat(sin)


def _steady(read: Callable[[int, int], tuple[Tensor, Tensor]], cos: Tensor, sin: Tensor, dtype: torch.dtype) -> bool:
    """Return whether two positions alone, at the start of each chunk and around it, are rotated as the tables say."""
    for begin in (max(at - 1, 0) for at in range(0, len(cos), CHUNK)):
        rows = slice(begin, min(begin + 2, len(cos)))
        found = read(begin, rows.stop - begin)
        if not all(_close(one, all_of[rows], dtype) for one, all_of in zip(found, (cos, sin), strict=True)):
            return False
    return True


def halves(size: int, interleaved: bool) -> tuple[slice, slice]:
    """Return the channels of the first and the second partners."""
    return (slice(0, size, 2), slice(1, size, 2)) if interleaved else (slice(0, size // 2), slice(size // 2, size))


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate x [b, heads, s, size] by tables [s, r / 2]."""
    first, second = halves(2 * cos.shape[-1], interleaved)
    y = x.clone()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., second] * cos + x[..., first] * sin
    return y


def _relative(through: Through, shape: list[int], interleaved: bool, size: int, dtype: torch.dtype) -> bool:
    """Return whether the angle between two positions depends on their difference alone."""
    cos, sin = _tables(through, shape, interleaved, size, 0, 64)
    same = cos[1:] * cos[:-1] + sin[1:] * sin[:-1]
    other = sin[1:] * cos[:-1] - cos[1:] * sin[:-1]
    return all(_close(each, each[:1].expand_as(each), dtype, 10) for each in (same, other))


def _close(a: Tensor, b: Tensor, dtype: torch.dtype, times: float = 1) -> bool:
    bound = CLOSE if dtype is torch.float32 else 4 * torch.finfo(dtype).eps
    return bool((a - b).abs().max() <= times * bound * b.abs().max())
