"""See a captured model as a training loop needs it: parts, one for each sum, with every state of the stream at hand.

A view shares its parameters with the captured module and is cut behind each sum of a residual stream, so that a part
is what people shard (`fully_shard`) and recompute (activation checkpointing), whatever the model is called.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from ..algebra.fitting import OUTLIER
from ..backends.torch.module import CapturedModule
from ..backends.torch.parts import Parts
from ..compat.torch import output_tree, pytree
from ..ir import Kind, sums
from ..models.program import Program
from .tapers import Taper

TAPERS = "lnrewrite.tapers"
"""What the state of the tapers is called in a view's graph: no parameter of the model, the same tensor everywhere."""

FOLLOW = 0.1
"""How far the size of a taper that has not moved yet follows the tokens in one step."""


@dataclass(frozen=True)
class ViewOutput:
    """Hold one run: the model's outputs as its tree, the state behind each sum, and how far tapered sizes spread.

    `states` maps a block's name to [..., width]; `spread` is the mean over tapers of E[log(s / rho)^2], or None.
    """

    outputs: object
    states: Mapping[str, Tensor]
    spread: Tensor | None


class View(Parts):
    """Run a captured module part by part; tapers stand where they belong, their state in the buffer `tapers`.

    That is a row for each: the power for usual tokens, the power for outliers, and log rho. `detached` cuts the
    gradient between parts, so that each learns from its own state alone; `recompute` keeps no activations inside a
    part. Both may be set at any time.
    """

    tapers: Tensor

    def __init__(self, program: Program, tapers: Sequence[Taper] = (), twin: CapturedModule | None = None) -> None:
        """See a program; the parameters are those of its module, or of a twin of that."""
        module, network = twin or program.module(), program.network
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        result = graph.graph_copy(module.graph, copies)
        named = {old.name: new for old, new in copies.items()}
        ends = {named[(b := g[-1]).anchor.total]: (b.name, b.anchor.axis) for s in network.streams for g in sums(s)}
        repeats = {named[n]: named[r] for n, r in program.graph.alias.items() if n in named and r in named}
        spreads = [_insert(graph, named, repeats, taper, i) for i, taper in enumerate(tapers)]
        super().__init__(module, graph, set(ends), _nodes(result) | set(ends) | set(spreads), {TAPERS})
        self.detached = self.recompute = False
        rows = [[float(t.going), float(t.going), math.log(t.rho)] for t in tapers]
        self.register_buffer("tapers", torch.tensor(rows, dtype=torch.float64).view(-1, 3))
        self.seen = torch.zeros(2, len(rows))
        self._together = [[i for i, t in enumerate(tapers) if t.value == v] for v in {t.value: 0 for t in tapers}]
        self._spec, self._result, self._sums, self._spreads = output_tree(module), result, ends, spreads

    def forward(self, *inputs: Tensor) -> ViewOutput:
        """Run on the flat inputs of the captured graph."""
        values: dict[fx.Node, Tensor] = dict(zip(self.inputs, inputs, strict=True))
        states: dict[str, Tensor] = {}
        for part, module in zip(self.steps, self.parts, strict=True):
            given = [self.shared(n) if n.op == "get_attr" else values[n] for n in part.reads]
            kept = self.recompute and torch.is_grad_enabled()
            made = checkpoint(module, *given, use_reentrant=False) if kept else module(*given)
            values.update(zip(part.makes, made, strict=True))
            for node in part.makes:
                if node in self._sums:
                    name, axis = self._sums[node]
                    states[name] = values[node].movedim(axis, -1)
                    if self.detached:
                        values[node] = values[node].detach()
            for node in part.drops:
                del values[node]
        found = [values[n] for n in self._spreads]
        if found:
            self.seen = torch.stack([each.detach() for each in found], 1)
        flat = fx.node.map_arg(self._result, lambda n: values[n])
        outputs: object = flat
        if self._spec is not None:
            outputs = pytree.tree_unflatten(list(flat), self._spec)  # type: ignore[arg-type]
        return ViewOutput(outputs, states, torch.stack([f[0] for f in found]).mean() if found else None)

    def first(self, name: str) -> str | None:
        """Return the first of the names that a parameter has, None for a name of none."""
        return self._named.get(name)

    def move(self, powers: Sequence[tuple[float, float]]) -> None:
        """Set the powers of all tapers, for usual tokens and for outliers."""
        self.tapers[:, :2] = torch.tensor(powers, dtype=torch.float64).view(-1, 2)

    def follow(self, seen: Tensor) -> None:
        """Let sizes follow what was `seen` of them, where tapers still are norms, which hold any: [2, tapers].

        Tapers of one value have one size.
        """
        still = (self.tapers[:, :2] == 1).all(1).tolist()
        for together in self._together:
            if all(still[i] for i in together):
                self.tapers[together, 2] += FOLLOW * seen[1, together[0]].to(self.tapers)

    @property
    def sizes(self) -> list[float]:
        """Return the size that each taper has for its constant."""
        return [float(size) for size in self.tapers[:, 2].exp()]

    def sync(self, now: bool) -> None:
        """Say whether the next backward shares its gradients with other processes, or adds them up here."""
        if isinstance(self, FSDPModule):
            self.set_requires_gradient_sync(now)

    def shared(self, node: fx.Node) -> Tensor:
        """Return what several parts read: the state of the tapers, or a parameter."""
        return self.tapers if node.target == TAPERS else super().shared(node)


def _nodes(result: fx.node.Argument) -> set[fx.Node]:
    """Return the nodes that a graph's output names."""
    found: list[fx.Node] = []
    fx.node.map_arg(result, lambda n: found.append(n))
    return set(found)


def _insert(
    graph: fx.Graph, named: Mapping[str, fx.Node], copies: Mapping[fx.Node, fx.Node], taper: Taper, index: int
) -> fx.Node:
    """Put one taper where it belongs and return the node that tells of the sizes that it meets.

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
        state = graph.get_attr(TAPERS)
    with graph.inserting_after(state):
        how = (norm.kind is Kind.LAYER, norm.eps, norm.plus_one, taper.bare)
        both = graph.call_function(tapered, (source, state, index, *affine, *how))
    with graph.inserting_after(both):
        new, spread = (graph.call_function(_item, (both, i)) for i in (1, 0))
    for user, read in old:
        user.replace_input_with(read, new)
    return spread


def _item(pair: tuple[Tensor, ...], index: int) -> Tensor:
    return pair[index]


def tapered(
    x: Tensor, state: Tensor, index: int, gamma: Tensor | None, beta: Tensor | None,
    centered: bool, eps: float, plus_one: bool, bare: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return [E[l^2], E[l]] of l = log(s / rho), the latter of usual tokens alone, and T(x).

    Powers and log rho are state[index]; a token at `OUTLIER` times rho has the power for outliers, one at half as much
    the usual one, and between the two a mix of both. Computed in float32 at least, returned as x is.
    """
    high = x.to(torch.promote_types(x.dtype, torch.float32))
    t, outliers, rho = state[index].to(high.dtype).unbind()
    mean = high.mean(-1, keepdim=True) if centered else torch.zeros((), dtype=high.dtype, device=high.device)
    log = 0.5 * ((high - mean).square().mean(-1, keepdim=True) + eps).log() - rho
    far = ((log - math.log(OUTLIER)) / math.log(2) + 1).clamp(0, 1)
    power = t + (outliers - t) * far
    y = (high - power * mean) * torch.exp(-power * log)
    if not bare:
        y = y / rho.exp()
    if gamma is not None:
        y = y * (gamma.to(high.dtype) + plus_one)
    if beta is not None:
        y = y + beta.to(high.dtype)
    near = log.new_ones(()) - far
    return torch.stack([log.square().mean(), (near * log).sum() / near.sum().clamp(min=1)]), y.to(x.dtype)
