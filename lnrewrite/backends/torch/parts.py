"""Cut a captured graph into parts, one for each of some nodes, so that it can be run, and kept in memory, by parts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, fx, nn

from ...compat.torch import schema_of
from .module import CapturedModule, stored


@dataclass(frozen=True)
class Step:
    """Describe what one part reads, what it makes, and what nothing reads after it."""

    reads: tuple[fx.Node, ...]
    makes: tuple[fx.Node, ...]
    drops: tuple[fx.Node, ...]


class Part(nn.Module):
    """Hold the graph of one part; a module of a plain class, which sharding can put its own in place of."""

    def __init__(self, body: fx.GraphModule) -> None:
        super().__init__()
        self.body = body

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        return self.body(*given)


class Parts(nn.Module):
    """Hold a graph over a captured module's parameters in parts, each of which ends in one of `ends`.

    What several parts read of the parameters is held in `common`, what one alone reads, in that part; all are the
    module's own tensors. `kept` are nodes that are never dropped, `apart` the names in the graph that are no parameters
    of it but attributes of a subclass.
    """

    def __init__(
        self,
        module: CapturedModule,
        graph: fx.Graph,
        ends: Collection[fx.Node],
        kept: Collection[fx.Node] = (),
        apart: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.inputs = graph.find_nodes(op="placeholder")
        self.common = nn.Module()
        self._origins: dict[str, str] = {}
        self._places: dict[str, str] = {}
        first = {id(p): name for name, p in module.named_parameters()}
        self._named = {n: first[id(p)] for n, p in module.named_parameters(remove_duplicate=False)}
        self.steps, bodies = self._cut(module, graph, ends, kept, apart)
        self.parts = nn.ModuleList(Part(body) for body in bodies)

    def origin(self, name: str) -> str:
        """Return the name that the captured module has for one of the parameters held here, of tied ones the first."""
        return self._named[self._origins.get(name) or name.split(".body.", 1)[1]]

    def shared(self, node: fx.Node) -> Tensor:
        """Return the parameter or buffer that a node of the graph stands for and several parts read."""
        found = getattr(self.common, self._places[str(node.target)])
        assert isinstance(found, Tensor)
        return found

    def _cut(
        self,
        module: CapturedModule,
        graph: fx.Graph,
        ends: Collection[fx.Node],
        kept: Collection[fx.Node],
        apart: Collection[str],
    ) -> tuple[list[Step], list[fx.GraphModule]]:
        parts = _between(graph, ends)
        place = {node: index for index, part in enumerate(parts) for node in part}
        readers = {n: {place[u] for u in n.users if u in place} for n in graph.nodes}
        held = [n for n in graph.find_nodes(op="get_attr") if n.target not in apart]
        tensors: dict[int, set[int]] = {}
        for node in held:
            tensors.setdefault(id(_held(module, node)), set()).update(readers[node])
        alone = {n for n in held if len(tensors[id(_held(module, n))]) == 1 or isinstance(_held(module, n), nn.Module)}
        for node in held:
            if node not in alone and isinstance(tensor := _held(module, node), Tensor):
                self._register(str(node.target), tensor)
        last = {n: max(r, default=-1) for n, r in readers.items()}
        steps, bodies = [], []
        for index, part in enumerate(parts):
            inside = set(part)
            reads = list(dict.fromkeys(n for node in part for n in node.all_input_nodes if n not in inside | alone))
            makes = [n for n in part if last[n] > index or n in kept or n in ends]
            drops = [n for n in (*reads, *makes) if last[n] <= index and n not in kept and n.op != "get_attr"]
            steps.append(Step(tuple(reads), tuple(makes), tuple(dict.fromkeys(drops))))
            bodies.append(_module(module, part, reads, makes))
        return steps, bodies

    def _register(self, origin: str, tensor: Tensor) -> None:
        """Hold a tensor under a number, which no attribute of a module is named by."""
        if origin in self._places:
            return
        place = self._places[origin] = str(len(self._places))
        if isinstance(tensor, nn.Parameter):
            self.common.register_parameter(place, tensor)
            self._origins[f"common.{place}"] = origin
        else:
            self.common.register_buffer(place, tensor)


def _between(graph: fx.Graph, ends: Collection[fx.Node]) -> list[list[fx.Node]]:
    """Return a graph's operators in parts, each with what the first of `ends` that it leads to needs, in order.

    Where an operator does more than it returns (writes, changes how torch runs), each has what stands before its end.
    """
    order = [node for node in graph.nodes if node.op == "call_function"]
    own = {end: index for index, end in enumerate(node for node in order if node in ends)}
    straight, place, least = any(map(_acts, order)), dict[fx.Node, int](), len(own)
    for node in reversed(order):
        leads = min((place[u] for u in node.users if u in place), default=len(own))
        least = place[node] = own.get(node, least if straight else leads)
    parts: list[list[fx.Node]] = [[] for _ in range(len(own) + 1)]
    for node in order:
        parts[place[node]].append(node)
    return [p for p in parts if p]


def _acts(node: fx.Node) -> bool:
    """Return whether an operator does more than it returns."""
    schema = schema_of(node.target)
    return schema.is_mutable if schema else not node.users


def _module(
    module: CapturedModule, part: Iterable[fx.Node], reads: Sequence[fx.Node], makes: Sequence[fx.Node]
) -> fx.GraphModule:
    """Return one part as a module of its own, parameters shared."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {n: graph.placeholder(n.name) for n in reads}
    held: dict[str, Tensor | nn.Module] = {}
    for node in part:
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source not in copies:
                held[str(source.target)] = _held(module, source)
                copies[source] = graph.get_attr(str(source.target))
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(tuple(copies[n] for n in makes))
    return fx.GraphModule(held, graph)


def _held(module: CapturedModule, node: fx.Node) -> Tensor | nn.Module:
    """Return the tensor, or the graph that an operator calls, which a node stands for."""
    found = stored(module, str(node.target))
    return module.get_submodule(str(node.target)) if found is None else found
