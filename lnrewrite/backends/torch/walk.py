"""Take a captured model through data a part at a time: only one part is run, or has its weights here, at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, fx, nn

from ...compat.memory import give_back
from ...compat.torch import pytree
from ...pipeline.protocols import Batch
from .feeding import flat_inputs
from .module import CapturedModule, stored
from .parts import Parts
from .widened import Read, is_narrow, widest

See = Callable[[str, int, Tensor], object]
"""Takes a node's name, the number of a batch, and the value."""


class Walk:
    """Stand before one part of a model with all that it and later ones read, for every batch.

    `ends` are nodes by name: the parts end behind them. A model in half precision is taken through in float32, any in
    `to` where that is given; its parameters are as they are stored. read: gives a parameter's values by its name, for
    a module on the meta device: those of a part are there while it is run.
    """

    def __init__(
        self,
        module: CapturedModule,
        ends: Sequence[str],
        batches: Sequence[Batch],
        read: Read | None = None,
        to: torch.dtype | None = None,
    ) -> None:
        nodes = {n.name: n for n in module.graph.nodes}
        self.outputs = module.graph.output_node()
        whole = {nodes[n] for n in ends if nodes[n].op != "placeholder"}
        self.parts = Parts(module, module.graph, whole, kept=self.outputs.all_input_nodes)
        self.module, self.read = module, read
        self.ends, self.index = frozenset(ends), 0
        self.to = to or (torch.float32 if is_narrow(module) else None)
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
        """Return the next part as it is run: a copy where the model's numbers are elsewhere, or stored in less."""
        if self.to is None and self.read is None:
            return self.stored
        made = copy.deepcopy(self.stored)
        for node in made.graph.nodes:
            node.args, node.kwargs = pytree.tree_map(self._meant, (node.args, dict(node.kwargs)))
        made.recompile()
        for name, held in [*made.named_parameters(), *made.named_buffers()]:
            path, _, leaf = name.rpartition(".")
            holder, value = made.get_submodule(path), self._value(name, held)
            setattr(holder, leaf, nn.Parameter(value, held.requires_grad) if isinstance(held, nn.Parameter) else value)
        return made

    @cached_property
    def shared(self) -> dict[fx.Node, Tensor]:
        """Return what the next part reads of the parameters that several parts do."""
        reads = [n for n in self.parts.steps[self.index].reads if n.op == "get_attr"]
        return {n: self._value(str(n.target), self.parts.shared(n)) for n in reads}

    def origin(self, name: str) -> str:
        """Return the model's name for a parameter of the next part."""
        return self.parts.origin(f"parts.{self.index}.body.{name}")

    def given(self, batch: int) -> list[Tensor]:
        """Return what the next part reads of one batch."""
        values = self.values[batch]
        return [self.shared[n] if n.op == "get_attr" else values[n] for n in self.parts.steps[self.index].reads]

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
    def go(self, see: See | None = None) -> list[Tensor]:
        """Run the next part on every batch, stand behind it, and return what it ended in; empty behind all ends.

        see: is shown the values that the part makes, as they are made.
        """
        step, end = self.parts.steps[self.index], self.end
        ended: list[Tensor] = []
        for batch, values in enumerate(self.values):
            given = self.given(batch)
            made = _Shown(self.body, batch, see).run(*given) if see else self.body(*given)
            values.update(zip(step.makes, made, strict=True))
            del given, made
            ended += [v for n, v in values.items() if n.name == end]
            for node in step.drops:
                values.pop(node, None)
        self._drop()
        self.index += 1
        return ended

    def _drop(self) -> None:
        """Give back the memory of the next part's copies: a graph module is held in circles, its tensors go by hand."""
        body = self.__dict__.pop("body", None)
        self.__dict__.pop("shared", None)
        if body is not None and body is not self.stored:
            for held in (*body.parameters(), *body.buffers()):
                held.data = held.data.new_empty(0)
        if self.read is not None:
            give_back()

    def results(self) -> list[object]:
        """Go to the end, and return the model's trees of outputs, one for each batch."""
        while not self.over:
            self.go()
        found = []
        for values in self.values:
            made = {n: self._constant(n) if n.op == "get_attr" else values[n] for n in self.outputs.all_input_nodes}
            flat = fx.map_arg(self.outputs.args[0], made.__getitem__)
            found.append(self.module.graph.process_outputs(flat))
        return found

    def known(self, names: Collection[str]) -> dict[str, list[Tensor]]:
        """Return which of some nodes no part makes, the inputs and the parameters, with their value for every batch."""
        found = {n.name: [v[n] for v in self.values] for n in self.parts.inputs if n.name in names}
        for node in self.module.graph.find_nodes(op="get_attr"):
            if node.name in names:
                found[node.name] = [self._constant(node)] * len(self.values)
        return found

    def _constant(self, node: fx.Node) -> Tensor:
        held = stored(self.module, str(node.target))
        assert held is not None, node.target
        return self._value(str(node.target), held)

    def _value(self, name: str, held: Tensor) -> Tensor:
        """Return a parameter's numbers as they are computed with."""
        return self._wide(self.read(name) if self.read is not None and held.is_meta else held)

    def _wide(self, value: Tensor) -> Tensor:
        wide = self.to is not None and isinstance(value, Tensor) and value.is_floating_point()
        return value.detach().to(self.to) if wide else value

    def _meant(self, value: object) -> object:
        """Return what an operator is meant to get: no fewer bits, and no device without numbers."""
        if isinstance(value, torch.device) and value.type == "meta":
            return torch.device("cpu")
        return value if self.to is None else widest(value, self.to)


class _Shown(fx.Interpreter):
    """Run a part and show what its operators make."""

    def __init__(self, body: fx.GraphModule, batch: int, see: See) -> None:
        super().__init__(body)
        self.batch, self.see = batch, see

    def run_node(self, n: fx.Node) -> object:
        value = super().run_node(n)
        if n.op == "call_function":
            self.see(n.name, self.batch, value[0] if isinstance(value, (tuple, list)) else value)
        return value
