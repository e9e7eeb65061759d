"""Take a captured model through data a part at a time: no more than one part is run, or kept in float32, at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, fx

from ..backends.torch.feeding import flat_inputs
from ..backends.torch.module import CapturedModule
from ..backends.torch.parts import Parts
from ..backends.torch.widened import is_narrow, widened
from ..pipeline.protocols import Batch


class Walk:
    """Stand before one part of a model with all that it and later ones read, for every batch.

    `ends` are nodes by name: the parts end behind them. A model in half precision is taken through in float32, its
    parameters as they are stored.
    """

    def __init__(self, module: CapturedModule, ends: Sequence[str], batches: Sequence[Batch]) -> None:
        nodes = {n.name: n for n in module.graph.nodes}
        self.parts = Parts(module, module.graph, {nodes[n] for n in ends if nodes[n].op != "placeholder"})
        self.ends, self.index = frozenset(ends), 0
        self.narrow = is_narrow(module)
        taken = [cast(list[Tensor], flat_inputs(module, b)) for b in batches]  # numbers go through as they are
        self.values = [{n: self._wide(v) for n, v in zip(self.parts.inputs, given, strict=True)} for given in taken]

    @property
    def over(self) -> bool:
        """Return whether no part is left."""
        return self.index == len(self.parts.steps)

    @property
    def end(self) -> str | None:
        """Return the one of `ends` that the next part ends in; None for what comes behind them all."""
        return next((n.name for n in self.parts.steps[self.index].makes if n.name in self.ends), None)

    @property
    def stored(self) -> fx.GraphModule:
        """Return the next part over the model's own parameters."""
        body = self.parts.parts[self.index].body
        assert isinstance(body, fx.GraphModule)
        return body

    @cached_property
    def body(self) -> fx.GraphModule:
        """Return the next part as it is run: a copy in float32 where the model is stored in less."""
        found = widened(self.stored, torch.float32) if self.narrow else self.stored
        assert isinstance(found, fx.GraphModule)
        return found

    def origin(self, name: str) -> str:
        """Return the model's name for a parameter of the next part."""
        return self.parts.origin(f"parts.{self.index}.body.{name}")

    def given(self, batch: int) -> list[Tensor]:
        """Return what the next part reads of one batch."""
        reads, values = self.parts.steps[self.index].reads, self.values[batch]
        return [self._wide(self.parts.shared(n)) if n.op == "get_attr" else values[n] for n in reads]

    def function(self, parameters: Sequence[str]) -> Callable[..., Tensor]:
        """Return what computes the end of the next part from what it reads and, behind that, some parameters."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        nodes = list(self.body.graph.nodes)
        for node in nodes:
            if node.op == "placeholder":
                copies[node] = graph.placeholder(node.name)
        given = {name: graph.placeholder(f"parameter_{i}") for i, name in enumerate(parameters)}
        for node in nodes:
            if node.op == "get_attr" and node.target in given:
                copies[node] = given[str(node.target)]
            elif node.op not in ("placeholder", "output"):
                copies[node] = graph.node_copy(node, lambda n: copies[n])
        place = [n.name for n in self.parts.steps[self.index].makes].index(self.end or "")
        graph.output(copies[nodes[-1].args[0][place]])
        graph.eliminate_dead_code()
        return fx.GraphModule(self.body, graph).forward

    @torch.no_grad()
    def go(self) -> list[Tensor]:
        """Run the next part on every batch, stand behind it, and return what it ended in; empty behind all ends."""
        step, end = self.parts.steps[self.index], self.end
        ended: list[Tensor] = []
        for batch, values in enumerate(self.values):
            values.update(zip(step.makes, self.body(*self.given(batch)), strict=True))
            ended += [v for n, v in values.items() if n.name == end]
            for node in step.drops:
                values.pop(node, None)
        self.__dict__.pop("body", None)
        self.index += 1
        return ended

    def taken(self, name: str) -> list[Tensor]:
        """Return an input of the model, for every batch."""
        return [next(v for n, v in values.items() if n.name == name) for values in self.values]

    def _wide(self, value: Tensor) -> Tensor:
        narrow = self.narrow and isinstance(value, Tensor) and value.is_floating_point()
        return value.detach().float() if narrow else value
