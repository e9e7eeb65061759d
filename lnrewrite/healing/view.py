"""See a captured model as a training loop needs it: parts, one for each sum, with every state of the stream at hand.

A view shares its parameters with the captured module and is cut behind each sum of a residual stream, so that a part
is what people shard (`fully_shard`) and recompute (activation checkpointing), whatever the model is called.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from ..backends.torch.module import CapturedModule, stored
from ..compat.torch import output_tree, pytree
from ..ir import Kind, sums
from ..models.program import Program
from .tapers import Taper

POWERS = "lnrewrite.powers"
"""What the tapers' powers are called in a view's graph: no parameter of the model, and the same tensor everywhere."""


@dataclass(frozen=True)
class ViewOutput:
    """Hold one run: the model's outputs as its tree, the state behind each sum, and how far tapered sizes spread.

    `states` maps a block's name to [..., width]; `spread` is the mean over tapers of E[log(s / rho)^2], or None.
    """

    outputs: object
    states: Mapping[str, Tensor]
    spread: Tensor | None


@dataclass(frozen=True)
class _Part:
    """Describe what one part reads, what it makes, and what nothing reads after it."""

    reads: tuple[fx.Node, ...]
    makes: tuple[fx.Node, ...]
    drops: tuple[fx.Node, ...]


class View(nn.Module):
    """Run a captured module part by part; tapers stand where they belong, their powers in the buffer `powers`.

    `detached` cuts the gradient between parts, so that each learns from its own state alone; `recompute` keeps no
    activations inside a part. Both may be set at any time.
    """

    powers: Tensor

    def __init__(self, program: Program, tapers: Sequence[Taper] = ()) -> None:
        super().__init__()
        module, network = program.module(), program.network
        self.detached = self.recompute = False
        self.register_buffer("powers", torch.tensor([float(t.going) for t in tapers]))
        self._spec = output_tree(module)
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        self._result = graph.graph_copy(module.graph, copies)
        named = {old.name: new for old, new in copies.items()}
        self._sums = {named[g[-1].anchor.total]: g[-1].name for s in network.streams for g in sums(s)}
        repeats = {named[n]: named[r] for n, r in program.graph.alias.items() if n in named and r in named}
        self._spreads = [_insert(graph, named, repeats, taper, i) for i, taper in enumerate(tapers)]
        self._inputs = [n for n in graph.nodes if n.op == "placeholder"]
        self._held: dict[str, str] = {}
        first = {id(p): name for name, p in module.named_parameters()}
        self._named = {n: first[id(p)] for n, p in module.named_parameters(remove_duplicate=False)}
        self._parts, bodies = _cut(self, module, graph, set(self._sums))
        self.parts = nn.ModuleList(Part(body) for body in bodies)

    def forward(self, *inputs: Tensor) -> ViewOutput:
        """Run on the flat inputs of the captured graph."""
        values: dict[fx.Node, Tensor] = dict(zip(self._inputs, inputs, strict=True))
        states: dict[str, Tensor] = {}
        for part, module in zip(self._parts, self.parts, strict=True):
            given = [self._shared(n) if n.op == "get_attr" else values[n] for n in part.reads]
            kept = self.recompute and torch.is_grad_enabled()
            made = checkpoint(module, *given, use_reentrant=False) if kept else module(*given)
            values.update(zip(part.makes, made, strict=True))
            for node in part.makes:
                if node in self._sums:
                    states[self._sums[node]] = values[node]
                    if self.detached:
                        values[node] = values[node].detach()
            for node in part.drops:
                del values[node]
        found = [values[n] for n in self._spreads]
        flat = fx.node.map_arg(self._result, lambda n: values[n])
        outputs: object = flat
        if self._spec is not None:
            outputs = pytree.tree_unflatten(list(flat), self._spec)  # type: ignore[arg-type]
        return ViewOutput(outputs, states, torch.stack(found).mean() if found else None)

    def origin(self, name: str) -> str:
        """Return the name that the captured module has for one of the view's parameters, of tied ones the first."""
        return self._named[self._held.get(name) or name.split(".body.", 1)[1]]

    def _shared(self, node: fx.Node) -> Tensor:
        found = self.powers if node.target == POWERS else stored(self, _safe(node.target))
        assert found is not None
        return found


class Part(nn.Module):
    """Hold the graph between two sums; a module of a plain class, which sharding can put its own in place of."""

    def __init__(self, body: fx.GraphModule) -> None:
        super().__init__()
        self.body = body

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        return self.body(*given)


def _cut(
    view: View, module: CapturedModule, graph: fx.Graph, ends: set[fx.Node]
) -> tuple[list[_Part], list[fx.GraphModule]]:
    """Cut a graph behind each of `ends`; what several parts read of the parameters is registered on the view."""
    parts: list[list[fx.Node]] = [[]]
    for node in graph.nodes:
        if node.op == "call_function":
            parts[-1].append(node)
            if node in ends:
                parts.append([])
    parts = [p for p in parts if p]
    place = {node: index for index, part in enumerate(parts) for node in part}
    readers = {n: {place[u] for u in n.users if u in place} for n in graph.nodes}
    held = [n for n in graph.find_nodes(op="get_attr") if n.target != POWERS]
    tensors: dict[int, set[int]] = {}
    for node in held:
        tensors.setdefault(id(_tensor(module, node)), set()).update(readers[node])
    alone = {n for n in held if len(tensors[id(_tensor(module, n))]) == 1}
    for node in held:
        if node not in alone:
            _register(view, str(node.target), _tensor(module, node))
    last = {n: max(r, default=-1) for n, r in readers.items()}
    wanted = set(view._sums) | set(view._spreads)
    fx.node.map_arg(view._result, lambda n: wanted.add(n))
    found, modules = [], []
    for index, part in enumerate(parts):
        inside = set(part)
        reads = list(dict.fromkeys(n for node in part for n in node.all_input_nodes if n not in inside | alone))
        makes = [n for n in part if last[n] > index or n in wanted]
        drops = [n for n in (*reads, *makes) if last[n] <= index and n not in wanted and n.op != "get_attr"]
        found.append(_Part(tuple(reads), tuple(makes), tuple(dict.fromkeys(drops))))
        modules.append(_module(module, part, reads, makes))
    return found, modules


def _module(
    module: CapturedModule, part: Iterable[fx.Node], reads: Sequence[fx.Node], makes: Sequence[fx.Node]
) -> fx.GraphModule:
    """Return one part as a module of its own, parameters shared."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {n: graph.placeholder(n.name) for n in reads}
    held: dict[str, Tensor] = {}
    for node in part:
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source not in copies:
                held[str(source.target)] = _tensor(module, source)
                copies[source] = graph.get_attr(str(source.target))
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(tuple(copies[n] for n in makes))
    return fx.GraphModule(held, graph)


def _insert(
    graph: fx.Graph, named: Mapping[str, fx.Node], copies: Mapping[fx.Node, fx.Node], taper: Taper, index: int
) -> fx.Node:
    """Put one taper where it belongs and return the node that tells how far its sizes spread.

    `copies` maps values that only repeat another (a dropout of eval mode) to that one.
    """
    source, value, norm = named[taper.source], named[taper.value], taper.norm
    if taper.reads:
        readers = dict.fromkeys(named[reader] for reader in taper.reads)
        old = [(reader, n) for reader in readers for n in reader.all_input_nodes if copies.get(n, n) is value]
    else:
        old = [(user, value) for user in value.users]
    last = max((source, value), key=list(graph.nodes).index)
    with graph.inserting_after(last):
        affine = [None if n is None else graph.get_attr(n) for n in (norm.gamma, norm.beta)]
        powers = graph.get_attr(POWERS)
    with graph.inserting_after(powers):
        how = (norm.kind is Kind.LAYER, norm.eps, norm.plus_one, taper.rho, taper.bare)
        both = graph.call_function(tapered, (source, powers, index, *affine, *how))
    with graph.inserting_after(both):
        new, spread = (graph.call_function(_item, (both, i)) for i in (1, 0))
    for user, read in old:
        user.replace_input_with(read, new)
    return spread


def _item(pair: tuple[Tensor, ...], index: int) -> Tensor:
    return pair[index]


def tapered(
    x: Tensor, powers: Tensor, index: int, gamma: Tensor | None, beta: Tensor | None,
    centred: bool, eps: float, plus_one: bool, rho: float, bare: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return E[log(s / rho)^2] and T_t(x), t = powers[index]; computed in float32 at least, returned as x is."""
    high = x.to(torch.promote_types(x.dtype, torch.float32))
    t = powers[index].to(high.dtype)
    mean = high.mean(-1, keepdim=True) if centred else torch.zeros((), dtype=high.dtype, device=high.device)
    log = 0.5 * ((high - mean).square().mean(-1, keepdim=True) + eps).log() - math.log(rho)
    y = (high - t * mean) * torch.exp(-t * log)
    if not bare:
        y = y / rho
    if gamma is not None:
        y = y * (gamma.to(high.dtype) + plus_one)
    if beta is not None:
        y = y + beta.to(high.dtype)
    return log.square().mean(), y.to(x.dtype)


def _tensor(module: CapturedModule, node: fx.Node) -> Tensor:
    found = stored(module, str(node.target))
    assert isinstance(found, Tensor), node.target
    return found


def _safe(name: object) -> str:
    return str(name).replace(".", "__")


def _register(view: View, origin: str, tensor: Tensor) -> None:
    name = _safe(origin)
    if stored(view, name) is not None:
        return
    if isinstance(tensor, nn.Parameter):
        view.register_parameter(name, tensor)
        view._held[name] = origin
    else:
        view.register_buffer(name, tensor)
