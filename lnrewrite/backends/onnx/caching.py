"""Put ONNX Runtime's attention over a cache in the place of a captured decoder's, wherever it computes the same."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from ..torch.module import CapturedModule, register
from .grouped import MASK, Grouped, attend, bias, find, flat, lengths, merged, padding, turned
from .rotation import Bench, Rotation

aten = torch.ops.aten
COS, SIN = "cos_cache", "sin_cache"
"""The names of the tables of rotary embedding."""


def group(module: CapturedModule, most: int) -> bool:
    """Write the attentions of a decoder as the kernel computes them, in place; return whether it computes all of them.

    Then nothing but the kernel sees the cache's tensors, which may be longer than what they hold: how many tokens there
    were before is told by attention_mask.

    module: a copy of what `CachedDecoder.capture` gives, to be translated. most: how many positions the model knows.
    """
    placed = {node.name: node for node in module.graph.find_nodes(op="placeholder")}
    ids, past = placed["input_ids"], placed["past_0"]
    sizes = [str(ids.meta["val"].shape[0]), str(ids.meta["val"].shape[1]), str(past.meta["val"].shape[2])]
    bench = Bench(module, placed.get("position_ids"), (sizes[0], sizes[1], sizes[2]))
    found = list(find(bench, most)) if MASK in placed else []
    if found:
        writing = _Writing(module, ids, placed[MASK], found[0].node)
        writing.positions = bench.positions
        for each in found:
            writing.one(each)
    module.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "get_attr", "output"))
    cache = [node for name, node in placed.items() if name.startswith("past_")]
    users = {user for node in cache for user in node.users}
    sized = [user for user in users if user.target is aten.sym_size.int]
    whole = all(user.target in (attend, lengths) for user in users.difference(sized))
    if found and whole:
        _measure(module.graph, ids, placed[MASK], [user for user in sized if user.args[1] == 2])
    return bool(found) and whole


def _measure(graph: fx.Graph, ids: fx.Node, mask: fx.Node, sized: list[fx.Node]) -> None:
    """Tell the number of tokens before these by the mask, which has one more number for each of these."""
    if not sized:
        return
    with graph.inserting_after(max(graph.find_nodes(op="placeholder"), key=list(graph.nodes).index)):
        told = graph.call_function(before, (ids, mask))
    for node in sized:
        node.replace_all_uses_with(told, propagate_meta=False)
        told.meta["val"] = node.meta["val"]


def before(ids: Tensor, mask: Tensor) -> int:
    """Return how many tokens were there before these."""
    return mask.shape[1] - ids.shape[1]


class _Writing:
    """Hold what all attentions of a model share: lengths, masks as biases, tables."""

    def __init__(self, module: CapturedModule, ids: fx.Node, mask: fx.Node, first: fx.Node) -> None:
        self.module, self.graph, self.ids, self.mask = module, module.graph, ids, mask
        with self.graph.inserting_before(first):
            both = self.graph.call_function(lengths, (ids, mask))
            self.lengths = [self.graph.call_function(operator.getitem, (both, i)) for i in (0, 1)]
        self.positions: fx.Node | None = None
        self.biases: dict[fx.Node, fx.Node] = {}
        self.tables: list[tuple[Rotation, str, str]] = []

    def one(self, found: Grouped) -> None:
        """Replace one attention."""
        graph, node, turn = self.graph, found.node, found.turn
        value = node.meta["val"]
        with graph.inserting_before(node):
            q, k, v = (self.flat(n) for n in (found.q, found.k, found.v))
            held: list[fx.Node | None] = [graph.get_attr(name) for name in self.table(turn)] if turn else [None, None]
            if turn and not found.inside:
                how = (self.positions, *held, value.shape[-1], turn.interleaved)
                q, k = (graph.call_function(turned, (x, *how)) for x in (q, k))
                held = [None, None]
            mask = self.bias(found)
            numbers = (found.parts.scale, found.parts.cap, bool(turn and turn.interleaved))
            rest = (*found.past, *self.lengths, *held, mask, *numbers)
            made = graph.call_function(attend, (q, k, v, *rest))
            outputs = [graph.call_function(operator.getitem, (made, i)) for i in range(3)]
        for old, new in zip(found.present, outputs[1:], strict=True):
            new.meta["val"] = old.meta["val"]
            for user in [u for u in old.users if u.op == "output"]:
                user.replace_input_with(old, new)
        end = _merging(node)
        if end is None:
            with graph.inserting_before(node):
                shape = [*map(self.size, value.shape[:1]), -1, *value.shape[1::2]]
                split = graph.call_function(aten.reshape.default, (outputs[0], shape))
                outputs[0] = graph.call_function(aten.transpose.int, (split, 1, 2))
            end = node
        outputs[0].meta["val"] = end.meta["val"]
        end.replace_all_uses_with(outputs[0])

    def size(self, size: int | torch.SymInt) -> int | fx.Node:
        """Return the batch as a number, or as what computes it."""
        if isinstance(size, int):
            return size
        return self.graph.call_function(aten.sym_size.int, (self.ids, 0))

    def flat(self, node: fx.Node) -> fx.Node:
        """Return heads of four axes as three, without a step where they were three."""
        heads_second = isinstance(node.meta["val"].shape[1], int)
        if heads_second and node.target is aten.transpose.int and node.args[1:] in ((1, 2), (2, 1)):
            node, heads_second = node.args[0], False  # type: ignore[assignment]
        if heads_second:
            return self.graph.call_function(merged, (node,))
        shape = node.meta["val"].shape
        source = node.args[0] if node.target is aten.reshape.default else None
        if isinstance(source, fx.Node):
            before = source.meta["val"].shape
            if [str(d) for d in before] == [*map(str, shape[:2]), str(shape[2] * shape[3])]:
                return source
        return self.graph.call_function(flat, (node,))

    def bias(self, found: Grouped) -> fx.Node:
        """Return a mask as a bias, one for all layers that have it: of padding alone where that is all it says."""
        mask, like = found.parts.mask, found.q
        if mask not in self.biases:
            call = (padding, (self.mask, self.ids, like)) if found.plain else (bias, (mask, like))
            self.biases[mask] = self.graph.call_function(*call)
        return self.biases[mask]

    def table(self, turn: Rotation) -> tuple[str, str]:
        """Return the names of a rotation's tables, which layers share."""
        for known, cos, sin in self.tables:
            if known.cos is turn.cos:
                return cos, sin
        number = f"_{len(self.tables)}" if self.tables else ""
        cos, sin = COS + number, SIN + number
        for name, tensor in ((cos, turn.cos), (sin, turn.sin)):
            register(self.module, name, torch.nn.Parameter(tensor.contiguous(), requires_grad=False))
        self.tables.append((turn, cos, sin))
        return cos, sin


def _merging(node: fx.Node) -> fx.Node | None:
    """Return where attention's heads stand as [batch, new, heads * size], behind nothing but changes of shape."""
    value: Tensor = node.meta["val"]
    batch, heads, new, size = map(str, value.shape)
    layouts = [batch, heads, new, size], [batch, new, heads, size]
    end, wide, turned = node, [batch, new, str(value.shape[1] * value.shape[3])], False
    while len(end.users) == 1:
        (user,) = end.users
        if user.op != "call_function" or not isinstance(user.meta.get("val"), Tensor):
            return None
        shape = [str(d) for d in user.meta["val"].shape]
        if user.target is aten.transpose.int and not turned and {*user.args[1:]} == {1, 2}:
            turned = True
        elif user.target not in (aten.clone.default, aten.reshape.default):
            return None
        elif turned and shape == wide:
            return user
        if shape != layouts[turned]:
            return None
        end = user
    return None
