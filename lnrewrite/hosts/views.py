"""A captured network, seen so that its pieces can be run: its one stream, its weights as rows, its blocks' cores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ..backends.torch.evaluating import Evaluator
from ..backends.torch.lift import parameter_names
from ..backends.torch.module import stored
from ..compat.torch import OpOverload, operator_name
from ..ir import Block, Linear, Norm, Stream, Where
from ..models.program import Program
from .host import Misfit

TOKENS, ROWS = 24, 2
"""The sizes at which pieces are run."""


@dataclass(frozen=True, eq=False)
class View:
    """Hold a program with one stream; `carried` are weights that take the place of its own, by name.

    padding: the id that no token is drawn as, for networks that count places by it.
    """

    program: Program
    carried: dict[str, Tensor] = field(default_factory=dict)
    padding: int = -1

    @cached_property
    def stream(self) -> Stream:
        """Return the one stream. Raises Misfit where there are several, or none."""
        streams = [s for s in self.program.network.streams if s.blocks]
        if len(streams) != 1:
            raise Misfit(f"it has {len(streams)} residual streams, and a host has one")
        return streams[0]

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        """Return what the network is called with: random tokens, none of them padding. Raises Misfit without tokens."""
        draw = torch.Generator().manual_seed(0)
        found: dict[str, Tensor] = {}
        limits = self.program.id_limits()
        for name, like in self.program.example_inputs().items():
            if not isinstance(like, torch.Tensor):
                continue
            if like.dim() != 2 or like.is_floating_point():
                raise Misfit(f"it takes {name}, and a host takes tokens")
            shape = [like.shape[i] if i not in self.axes(name) else (ROWS, TOKENS)[i] for i in range(2)]
            rows = limits.get(name, 0)
            ids = torch.randint(0, rows or 1, shape, generator=draw)
            found[name] = torch.where(ids == self.padding, (ids + 1) % rows, ids) if rows else torch.ones_like(ids)
        return found

    def axes(self, name: str) -> Mapping[int, str]:
        """Return the free axes of an input."""
        return self.program.dynamic_axes().get(name, {})

    @cached_property
    def run(self) -> Evaluator:
        """Return what runs pieces of the graph."""
        return Evaluator(self.program.module(), self.inputs, self.tensor)

    @cached_property
    def _first(self) -> dict[str, str]:
        return parameter_names(self.program.module())

    def tensor(self, name: str) -> Tensor:
        """Return a parameter or buffer as it is stored: what was carried over, where something was."""
        first = self._first.get(name, name)
        found = self.carried.get(first)
        held = stored(self.program.module(), name) if found is None else found
        if held is None or held.is_meta:
            raise LookupError(f"{name} holds no numbers")
        return held.detach()

    def rows(self, linear: Linear) -> Tensor:
        """Return a linear map's weight [rows, width] in float64: a row for each number that it makes, or takes."""
        weight = self.tensor(linear.param)
        if weight.dim() != 2:
            raise Misfit(f"{linear.param} is not a matrix")
        return weight if linear.axis == 1 else weight.T

    def bias(self, linear: Linear) -> Tensor | None:
        """Return a linear map's bias in float64, None where it has none."""
        return None if linear.bias is None else self.tensor(linear.bias).double()

    def gain(self, norm: Norm, width: int) -> Tensor:
        """Return what a norm multiplies by [width] in float64."""
        if not norm.gamma:
            return torch.full((width,), norm.factor, dtype=torch.float64)
        held = torch.from_numpy(self.program.values(norm.gamma)) if norm.computed else self.tensor(norm.gamma).double()
        return norm.factor * (held + 1 if norm.plus_one else held)

    def shift(self, norm: Norm, width: int) -> Tensor:
        """Return what a norm adds [width] in float64."""
        return self.tensor(norm.beta).double() if norm.beta else torch.zeros(width, dtype=torch.float64)

    def core(self, block: Block) -> Core:
        """Return what stands between a block's readers and its writer. Raises Misfit where it has several writers."""
        site = block.at(Where.IN)
        readers = block.readers or (site.readers if site else ())
        if len(block.writers) != 1 or not readers:
            raise Misfit(f"{block.name} has {len(readers)} maps that read and {len(block.writers)} that write")
        return Core(self, block, readers, block.writers[0])


@dataclass(frozen=True, eq=False)
class Core:
    """Hold what stands between a block's readers and its writer, as a function of numbers."""

    view: View
    block: Block
    readers: tuple[Linear, ...]
    writer: Linear

    @cached_property
    def sizes(self) -> list[int]:
        """Return how many numbers each reader makes for a token."""
        return [self.view.run.size(r.node) for r in self.readers]

    @cached_property
    def out(self) -> int:
        """Return how many numbers the writer takes for a token."""
        return self.view.program.shape(self.writer.param)[1 - self.writer.axis]

    def __call__(self, rows: Tensor) -> Tensor:
        """Return what the writer reads [tokens, out] where the readers make `rows` [tokens, sizes together].

        The stream itself is not a number here: what reads it past the readers comes out as NaN.
        """
        run, anchor = self.view.run, self.block.anchor
        held = {anchor.state: torch.full(run.shape(anchor.state), torch.nan, dtype=torch.float64)}
        ids = next(iter(self.view.inputs.values()))
        for reader, part in zip(self.readers, rows.split(self.sizes, -1), strict=True):
            rank = run.rank(reader.node)
            held[reader.node] = part if rank == 2 else part.reshape(*ids.shape, -1)
        return run(run.behind(self.writer.node, [r.node for r in self.readers]), held).reshape(len(rows), -1)

    @property
    def tokens(self) -> int:
        """Return how many tokens a run takes."""
        return next(iter(self.view.inputs.values())).numel()

    @cached_property
    def windows(self) -> frozenset[int]:
        """Return the constants that its mask compares places by: the sizes of windows, which short runs do not show."""
        run, found = self.view.run, set[int]()
        starts = [self.block.anchor.state, *(r.node for r in self.readers)]
        for node in run.before(self.writer.node, starts):
            value = node.meta.get("val")
            if node.op == "call_function" and isinstance(value, Tensor) and not value.is_floating_point():
                found |= {abs(int(a)) for a in node.args if isinstance(a, (int, float)) and _counts(node.target, a)}
            if node.op == "get_attr" and isinstance(value, Tensor) and value.dtype is torch.bool and value.dim() > 1:
                mask = self.view.tensor(str(node.target))
                if not torch.equal(mask, torch.ones_like(mask).tril()):
                    found.add(int(mask.sum(-1).max()))
        return frozenset(found)


PLACED = {"sub", "add", "lt", "le", "gt", "ge", "tril", "triu", "tril_", "triu_"}
"""Operators that a mask compares places with."""


def _counts(target: object, number: float) -> bool:
    return isinstance(target, OpOverload) and operator_name(target) in PLACED and abs(number) >= 2
