"""Run pieces of a captured graph on numbers that stand in for some of its values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...compat.torch import pytree
from .computing import attribute, plainly, valued
from .contexts import quiet
from .module import CapturedModule
from .widened import Read, in_float64, widest


def on_data(graph: fx.Graph, apart: Collection[fx.Node] = ()) -> set[fx.Node]:
    """Return the tensors, and groups of them, that are computed from what a graph is given, but for some inputs."""
    found = set[fx.Node]()
    for node in graph.nodes:
        given = node.op == "placeholder" and node not in apart or not found.isdisjoint(node.all_input_nodes)
        if given and isinstance(node.meta.get("val"), Tensor | tuple | list):
            found.add(node)
    return found


def unwound(graph: fx.Graph, ends: Collection[fx.Node], data: Collection[fx.Node]) -> Iterator[tuple[fx.Node, bool]]:
    """Yield what some nodes are computed from, of data, the last first, and whether all comes from it alone."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    open_ = set(ends)
    while open_:
        last = max(open_, key=order.__getitem__)
        yield last, len(open_) == 1
        open_ = (open_ - {last}) | {n for n in last.all_input_nodes if n in data}


class Evaluator:
    """Compute values of a captured graph in float64, each from those that are held.

    inputs: what the model is called with, by name. read: gives a parameter's or a buffer's values by its name.
    """

    def __init__(self, module: CapturedModule, inputs: Mapping[str, Tensor], read: Read) -> None:
        self.nodes = {node.name: node for node in module.graph.nodes}
        self.module, self.inputs, self.read = module, inputs, read

    def shape(self, name: str) -> list[int]:
        """Return the shape of a value for these inputs. Raises LookupError for a size that they do not tell."""
        known: dict[str, int] = {}
        for node in self.module.graph.find_nodes(op="placeholder"):
            given = self.inputs[node.name]
            known |= {str(d): n for d, n in zip(node.meta["val"].shape, given.shape, strict=True)}
        sizes = self.nodes[name].meta["val"].shape
        return [d if isinstance(d, int) else prod(known[part] for part in str(d).split("*")) for d in sizes]

    def __call__(self, end: str, held: Mapping[str, Tensor]) -> Tensor:
        """Return a value, computed from the values that `held` gives by their nodes' names, and from the inputs."""
        known = {self.nodes[name]: value for name, value in held.items()}
        with quiet():
            found = valued(self.nodes[end], known, self._leaf, self._call)
        assert isinstance(found, Tensor), end
        return found

    def _leaf(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self.inputs[node.name]
        found = attribute(self.module, node)
        if isinstance(found, nn.Module):
            return in_float64(found)
        found = self.read(str(node.target))
        return found.double() if found.is_floating_point() else found

    def _call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        return plainly(node, *pytree.tree_map(self._meant, (args, kwargs)))

    @staticmethod
    def _meant(value: object) -> object:
        """Return what an operator is meant to get: no fewer bits than float64, and no device without numbers."""
        if isinstance(value, torch.device) and value.type == "meta":
            return torch.device("cpu")
        return widest(value)

    def size(self, name: str) -> int:
        """Return how many numbers of a value belong to a token: its last axis."""
        return int(self.nodes[name].meta["val"].shape[-1])

    def rank(self, name: str) -> int:
        """Return the number of a value's axes."""
        return len(self.nodes[name].meta["val"].shape)

    def behind(self, end: str, starts: Collection[str]) -> str:
        """Return which operand of a node is computed from some others. Raises LookupError where none is."""
        marked = {self.nodes[name] for name in starts}
        for node in self.module.graph.nodes:
            if any(n in marked for n in node.all_input_nodes):
                marked.add(node)
            if node.name == end:
                break
        return next(n.name for n in self.nodes[end].all_input_nodes if n in marked)

    def before(self, end: str, starts: Collection[str]) -> Iterator[fx.Node]:
        """Yield the nodes that a value is computed from, but for some and what those alone are computed from."""
        seen, todo = {self.nodes[name] for name in starts}, [self.nodes[end]]
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                yield node
                todo += node.all_input_nodes
