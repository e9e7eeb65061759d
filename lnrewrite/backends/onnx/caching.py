"""Put ONNX Runtime's kernels in the place of what a captured part computes, wherever they compute the same."""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch import Tensor, fx

from ..torch.evaluating import on_data
from ..torch.module import CapturedModule, register
from .attention import sees, unhidden
from .experts import mix_with
from .heads import MASK, Attention, find, same
from .kernel_calls import apart, attend, attend_heads, bias, flat, lengths, merged, padding, turned
from .norms import UNBIASED
from .rotation import Bench, Rotation
from .rows import count_rows

aten = torch.ops.aten
COS, SIN = "cos_cache", "sin_cache"
"""The names of the tables of rotary embedding."""


def attend_with(module: CapturedModule, kernels: Collection[str], unread: bool = True) -> None:
    """Write attentions without rotary embedding, and experts, as the kernels compute them, in place.

    unread: nothing reads what rows give that see nothing; otherwise it is zero, as torch's.
    """
    writing = _Writing(module)
    writing.read = set() if unread else on_data(module.graph)
    for each in list(find(module.graph, kernels)):
        writing.one(each)
    _finish(module, kernels)


def group(module: CapturedModule, most: int, kernels: Collection[str]) -> bool:
    """Write a decoder's attentions and experts as the kernels compute them; return whether one has all the attentions.

    Then nothing but the kernel sees the cache's tensors, which may be longer than what they hold: how many tokens there
    were before is told by attention_mask.

    module: a copy of what `CachedDecoder.capture` gives, to be translated. most: how many positions the model knows.
    """
    placed = {node.name: node for node in module.graph.find_nodes(op="placeholder")}
    if MASK not in placed:
        attend_with(module, kernels)
        return False
    ids, mask, past = placed.get("input_ids") or placed["inputs_embeds"], placed[MASK], placed["past_0"]
    sizes = [str(ids.meta["val"].shape[0]), str(ids.meta["val"].shape[1]), str(past.meta["val"].shape[2])]
    bench = Bench(module, placed.get("position_ids"), (sizes[0], sizes[1], sizes[2]))
    writing = _Writing(module, ids, mask, bench.positions)
    for each in list(find(module.graph, kernels, bench, most)):
        writing.one(each)
    _finish(module, kernels)
    if UNBIASED in kernels:
        count_rows(module.graph, ids, mask, bench.positions)
        _sweep(module)
    cache = [node for name, node in placed.items() if name.startswith("past_")]
    users = {user for node in cache for user in node.users}
    sized = [user for user in users if user.target is aten.sym_size.int]
    whole = bool(writing.lengths) and all(user.target is attend for user in users.difference(sized))
    if whole:
        _measure(module.graph, ids, mask, [user for user in sized if user.args[1] == 2])
    return whole


def _finish(module: CapturedModule, kernels: Collection[str]) -> None:
    mix_with(module, kernels)
    _sweep(module)


def _sweep(module: CapturedModule) -> None:
    module.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "get_attr", "output"))


def _measure(graph: fx.Graph, ids: fx.Node, mask: fx.Node, sized: list[fx.Node]) -> None:
    """Tell the number of tokens before these by the mask, which has one more number for each of these."""
    if not sized:
        return
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        told = graph.call_function(before, (ids, mask))
    for node in sized:
        node.replace_all_uses_with(told, propagate_meta=False)
        told.meta["val"] = node.meta["val"]


def before(ids: Tensor, mask: Tensor) -> int:
    """Return how many tokens were there before these."""
    return mask.shape[1] - ids.shape[1]


class _Writing:
    """Hold what all attentions of a part share: lengths, masks as biases, tables."""

    def __init__(
        self,
        module: CapturedModule,
        ids: fx.Node | None = None,
        mask: fx.Node | None = None,
        positions: fx.Node | None = None,
    ) -> None:
        self.module, self.graph, self.ids, self.mask, self.positions = module, module.graph, ids, mask, positions
        self.read: set[fx.Node] = set()  # data, where what is made for rows that see nothing is read
        self.shown: dict[fx.Node, fx.Node] = {}
        self.lengths: list[fx.Node] = []
        self.biases: dict[fx.Node, fx.Node] = {}
        self.tables: list[tuple[Rotation, str, str]] = []

    def one(self, found: Attention) -> None:
        """Replace one attention."""
        graph, node = self.graph, found.node
        value = node.meta["val"]
        with graph.inserting_before(node):
            made = self.grouped(found) if found.grouped else self.headed(found)
            outputs = [graph.call_function(operator.getitem, (made, i)) for i in range(3 if found.present else 1)]
        for old, new in zip(found.present or (), outputs[1:], strict=True):
            new.meta["val"] = old.meta["val"]
            for user in [u for u in old.users if u.op == "output"]:
                user.replace_input_with(old, new)
        merging = _merging(node)
        flat, seeing = merging is not None, self.seeing(found)
        if seeing is not None and str(seeing.meta["val"].shape[1]) != "1":
            flat = False  # each head has its own
        with graph.inserting_before(node):
            if not flat:
                outputs[0] = graph.call_function(apart, (outputs[0], value.shape[1]))
            if seeing is not None:
                outputs[0] = graph.call_function(unhidden, (outputs[0], seeing, flat))
        end = merging if merging is not None and flat else node
        outputs[0].meta["val"] = end.meta["val"]
        end.replace_all_uses_with(outputs[0])

    def grouped(self, found: Attention) -> fx.Node:
        """Call the kernel that keeps a cache which heads share, and rotates."""
        graph, turn = self.graph, found.turn
        if not self.lengths:
            both = graph.call_function(lengths, (self.ids, self.mask))
            self.lengths = [graph.call_function(operator.getitem, (both, i)) for i in (0, 1)]
        q, k, v = (self.flat(n) for n in (found.q, found.k, found.v))
        held: list[fx.Node | None] = [graph.get_attr(name) for name in self.table(turn)] if turn else [None, None]
        if turn and not found.inside:
            q, k = (self.turned(x, found) for x in (q, k))
            held = [None, None]
        assert found.past is not None
        numbers = (found.parts.scale, found.parts.cap, bool(turn and turn.interleaved))
        rest = (*found.past, *self.lengths, *held, self.bias(found), *numbers, found.window or 0)
        return graph.call_function(attend, (q, k, v, *rest))

    def headed(self, found: Attention) -> fx.Node:
        """Call the kernel that takes keys and values of all heads: as they are made, or turned already."""
        q, k, v = self.flat(found.q), found.k, found.v
        if found.present or _lie_flat(k) and _lie_flat(v):
            k, v = self.flat(k), self.flat(v)
        if found.turn:
            q = self.turned(q, found)
            if found.present:
                k = self.turned(k, found)
            elif found.turned:
                self.turn_kept(found)
        numbers = (found.node.meta["val"].shape[1], found.parts.scale, found.present is not None)
        return self.graph.call_function(
            attend_heads, (q, k, v, self.bias(found), *(found.past or (None, None)), *numbers)
        )

    def turned(self, x: fx.Node, found: Attention) -> fx.Node:
        """Rotate heads that lie flat by the operator for it."""
        assert found.turn is not None
        held = [self.graph.get_attr(name) for name in self.table(found.turn)]
        how = (self.positions, *held, found.node.meta["val"].shape[-1], found.turn.interleaved)
        return self.graph.call_function(turned, (x, *how))

    def turn_kept(self, found: Attention) -> None:
        """Rotate new keys that go into a cache by the operator for it."""
        assert found.turned is not None
        old, x = found.turned
        with self.graph.inserting_before(old.next):
            heads = self.graph.call_function(apart, (self.turned(self.flat(x), found), old.meta["val"].shape[1]))
        heads.meta["val"] = old.meta["val"]
        old.replace_all_uses_with(heads)

    def flat(self, node: fx.Node) -> fx.Node:
        """Return heads of four axes as three, without a step where they were three."""
        heads_second = isinstance(node.meta["val"].shape[1], int)
        if heads_second and _lie_flat(node):
            node, heads_second = same(node).args[0], False  # type: ignore[assignment]
        if heads_second:
            return self.graph.call_function(merged, (node,))
        shape = node.meta["val"].shape
        source = node.args[0] if node.target is aten.reshape.default else None
        if isinstance(source, fx.Node):
            before = source.meta["val"].shape
            if [str(d) for d in before] == [*map(str, shape[:2]), str(shape[2] * shape[3])]:
                return source
        return self.graph.call_function(flat, (node,))

    def bias(self, found: Attention) -> fx.Node | None:
        """Return a mask as a bias, one for all layers that have it; of padding alone where the kernel does the rest."""
        if found.parts.mask is None:
            return None
        mask, made = (same(found.parts.mask), bias) if found.window is None else (self.mask, padding)
        assert mask is not None
        if mask not in self.biases:
            self.biases[mask] = self.graph.call_function(made, (mask, found.parts.q))
        return self.biases[mask]

    def seeing(self, found: Attention) -> fx.Node | None:
        """Return which rows see anything, one for all layers that have a mask; None where that is not asked."""
        mask = found.parts.mask
        if mask is None or mask not in self.read:
            return None
        if mask not in self.shown:
            with self.graph.inserting_after(mask):
                self.shown[mask] = made = self.graph.call_function(sees, (mask,))
            made.meta["val"] = mask.meta["val"][..., :1]
        return self.shown[mask]

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


def _lie_flat(node: fx.Node) -> bool:
    """Return whether heads [batch, heads, new, size] are turned from [batch, new, heads, size]."""
    node = same(node)
    return node.target is aten.transpose.int and node.args[1:] in ((1, 2), (2, 1))


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
