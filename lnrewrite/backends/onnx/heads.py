"""Attention that ONNX Runtime has one operator for, which may keep a cache and rotate too.

    k = cat(past_k, rotate(k_new)), v = cat(past_v, v_new)
    softmax(f(rotate(q) k^T) + mask) v, f a scale and perhaps a cap, k and v repeated over the heads that share them
      -> y, present_k, present_v = GroupQueryAttention(q, k_new, v_new, past_k, past_v, lengths, total, cos, sin, mask)

    softmax(scale q k^T + mask) v, heads of any size, with a cache of as many heads as q has, or with none
      -> y, present_k, present_v = MultiHeadAttention(q, k_new, v_new, mask, past_k, past_v)
      -> y = MultiHeadAttention(q, k, v, mask)

The first, where its contract is kept. Every row's keys are as long as the cache and the new tokens together, padding
too: the mask, as a bias, hides what a row does not see, padding alone where it shows all else that the kernel does.
With a bias CUDA's kernel computes all scores first, and keeps them: there, masks that hide no more than later tokens,
padding and what lies beyond a window are told by numbers, how many keys each row has, and how wide the window is; see
`rows.py`. Positions are counted by the kernel, from a row's length on: a row that is padded on the left is rotated
further than the model does, keys and queries alike, which their products do not see. Several new tokens after a past
need a batch of one; the size of a head is a multiple of 8, of 16 with rotary inside, else RotaryEmbedding stands before
it. The second keeps no cache that heads share: what repeats keys and values stays before it, as does RotaryEmbedding.
Rows that see nothing, which are padding, get means where torch gives zeros: nothing reads them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ...compat.torch import operator_name
from .eager import Written, written
from .norms import GROUPED, HEADED
from .rotation import Bench, Rotation, rotation

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default
PLAIN, ROTARY = 8, 16
"""What the size of a head is a multiple of, and the number of channels that are rotated where the kernel does it."""
MASK = "attention_mask"
FEW = 64
"""How many positions tell one table of angles from another."""
WHOLE = 1 << 62
"""A slice to here ends where its tensor does."""
Pair = tuple[fx.Node, fx.Node]


@dataclass(frozen=True, slots=True)
class Attention:
    """Hold the nodes of one attention; q, k, v are [batch, heads, new, size], `turn` rotates q and k.

    parts: what it is computed of. past, present: its cache, where the kernel keeps it. grouped: whether it is
    GroupQueryAttention. window: how many tokens the mask shows besides padding, 0 for all before, None where it says
    more than that. inside: whether the kernel rotates; else an operator before it does. turned: new keys, rotated and
    as they were, that others read too.
    """

    node: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    parts: Written
    past: Pair | None = None
    present: Pair | None = None
    turn: Rotation | None = None
    turned: Pair | None = None
    grouped: bool = False
    window: int | None = None
    inside: bool = False


@dataclass(frozen=True, slots=True)
class _Kept:
    """Hold new keys or values, those before them (None: there are none), and both, which the graph gives."""

    new: fx.Node
    past: fx.Node | None
    both: fx.Node


def find(graph: fx.Graph, kernels: Collection[str], bench: Bench | None = None, most: int = 0) -> Iterator[Attention]:
    """Yield the attentions that one of the kernels computes.

    bench: of a decoder with a cache, whose rotations are found; their tables reach to `most` positions.
    """
    tables: list[Rotation] = []
    masks: dict[fx.Node, tuple[bool, int | None]] = {}
    for node in graph.nodes:
        parts = _parts(node) if node.op == "call_function" else None
        if parts is None:
            continue
        kept = [_kept(end) for end in (parts.key, parts.value)]
        found = None
        if bench is not None and GROUPED in kernels and (found := _grouped(node, parts, kept)) and parts.mask:
            if parts.mask not in masks:
                masks[parts.mask] = _hides(bench, parts.mask, most)
            causal, window = masks[parts.mask]
            found = replace(found, window=window) if causal else None
        if found is None and HEADED in kernels:
            found = _headed(node, parts, kept)
        if found is not None:
            yield found if bench is None else _turned(bench, found, most, tables)


def _parts(node: fx.Node) -> Written | None:
    """Return what an attention is computed of, whose heads are an axis; None for any other node."""
    parts = _called(node) if node.target is SDPA else written(node)
    ends = () if parts is None else (parts.q, parts.key, parts.value, parts.mask)
    return parts if all(end is None or end.meta["val"].dim() == 4 for end in ends) else None


def _called(node: fx.Node) -> Written | None:
    """Return the parts of an attention that is one operator of torch."""
    how = node.kwargs
    given: list[Any] = [*node.args[:4], how.get("attn_mask")][:4]
    if len(node.args) > 4 or how.get("is_causal") or how.get("dropout_p"):
        return None
    scale = how.get("scale")
    scale = given[0].meta["val"].shape[-1] ** -0.5 if scale is None else scale
    return Written(given[0], given[1], given[2], given[3], scale, 0.0) if isinstance(scale, float) else None


def _grouped(node: fx.Node, parts: Written, kept: Sequence[_Kept | None]) -> Attention | None:
    """Return what GroupQueryAttention computes, if its mask does not look ahead."""
    keys, values = kept
    if keys is None or values is None or keys.past is None or values.past is None or parts.mask is None:
        return None
    shapes = [n.meta["val"].shape for n in (parts.q, keys.new, values.new)]
    if len({shape[-1] for shape in shapes}) > 1 or shapes[0][-1] % PLAIN:
        return None
    if shapes[1][1] != shapes[2][1] or shapes[0][1] % shapes[1][1]:
        return None
    cache = (keys.past, values.past), (keys.both, values.both)
    return Attention(node, parts.q, keys.new, values.new, parts, *cache, grouped=True)


def _headed(node: fx.Node, parts: Written, kept: Sequence[_Kept | None]) -> Attention | None:
    """Return what MultiHeadAttention computes; the cache stays outside where heads share it."""
    q, k, v = ([*map(str, n.meta["val"].shape)] for n in (parts.q, parts.key, parts.value))
    if parts.cap or k != v or q[:2] != k[:2] or q[3] != k[3]:
        return None
    if parts.mask is not None:
        mask, wanted = [*map(str, parts.mask.meta["val"].shape)], [*q[:3], k[2]]
        if mask[3] != k[2] or any(own not in ("1", other) for own, other in zip(mask, wanted, strict=True)):
            return None
    keys, values = kept
    if keys is None or values is None:
        return Attention(node, parts.q, parts.key, parts.value, parts)
    shapes = [[*map(str, n.new.meta["val"].shape)] for n in (keys, values)]
    if q[1:2] != shapes[0][1:2] or shapes[0] != shapes[1] or (keys.past is None) != (values.past is None):
        return Attention(node, parts.q, parts.key, parts.value, parts, turned=(keys.new, keys.new))
    past = (keys.past, values.past) if keys.past is not None and values.past is not None else None
    return Attention(node, parts.q, keys.new, values.new, parts, past, (keys.both, values.both))


def _kept(node: fx.Node) -> _Kept | None:
    """Return what `node` is of a cache: its tensor with new tokens behind it, heads repeated or not."""
    both = same(node)
    if _is(both, "reshape") and _is(spread := same(both.all_input_nodes[0]), "expand"):
        inner = same(spread.all_input_nodes[0])
        if _is(inner, "unsqueeze") and inner.args[1] == 2:
            both = same(inner.all_input_nodes[0])
    if not any(user.op == "output" for user in both.users):
        return None
    if not _is(both, "cat") or both.args[1:2] not in ((2,), (-2,)) or len(both.all_input_nodes) != 2:
        return None
    past, new = both.all_input_nodes
    if past.op == "placeholder":
        return _Kept(new, past, both)
    return _Kept(new, None, both) if past.meta["val"].shape == (0,) else None  # a cache that holds nothing yet


def _is(node: fx.Node, name: str) -> bool:
    return node.op == "call_function" and operator_name(node.target) == name


def same(node: fx.Node) -> fx.Node:
    """Return what a node is a copy of: slices of everything and copies."""
    while any(_is(node, name) for name in ("clone", "contiguous", "alias", "detach")) or is_whole(node):
        node = node.all_input_nodes[0]
    return node


def is_whole(node: fx.Node) -> bool:
    """Return whether a node is a slice of everything."""
    if not _is(node, "slice"):
        return False
    start, end = (*node.args[2:4], None, None)[:2]
    return start in (0, None) and (end is None or isinstance(end, int) and end >= WHOLE) and node.args[4:] in ((), (1,))


def _hides(bench: Bench, mask: fx.Node, most: int) -> tuple[bool, int | None]:
    """Return whether a mask hides every later token, as the kernel does whatever its bias is, and its window.

    0: it has none; None: it hides other things besides padding. It is run: on rows with padding, and on the last two of
    as many tokens as the model knows, to which a window shows equally many, and a chunk does not.
    """
    held = next(n for n in bench.module.graph.find_nodes(op="placeholder") if n.name == MASK)
    given = torch.randint(0, 2, (3, 9), generator=torch.Generator().manual_seed(0))
    given[:, -1] = 1
    exact = True

    def seen(padding: Tensor, new: int) -> Tensor:
        nonlocal exact
        rows, keys = padding.shape
        found = bench.run(mask, {held: padding}, keys - new, rows, new)
        if found.dtype is torch.bool:
            return found
        shown = found > torch.finfo(found.dtype).min
        exact &= not bool(found[shown].any())  # what is seen has nothing added to it
        return shown

    try:
        some, last = seen(given, 5), seen(torch.ones(1, most, dtype=torch.int64), 2)
    except (LookupError, RuntimeError, TypeError, AttributeError):
        return False, None
    back = torch.arange(4, 9)[:, None] - torch.arange(9)
    behind = torch.arange(most - 2, most)[:, None] - torch.arange(most)
    wide = int(last[..., -1, :].sum()) if last.shape == (1, 1, 2, most) else 0
    plain = exact and some.shape[1] == 1 and wide > 1 and torch.equal(last[0, 0], (behind >= 0) & (behind < wide))
    plain = plain and torch.equal(some[:, 0], (back >= 0) & (back < wide) & given[:, None].bool())
    window = 0 if wide == most else wide
    return not bool(some[..., back < 0].any()), (window if plain else None)


def _turned(bench: Bench, found: Attention, most: int, tables: list[Rotation]) -> Attention:
    """Take the rotation of queries and keys out of the graph where both are rotated alike."""
    new = found.k if found.present else (found.turned or (None,))[0]
    q, k = (rotation(bench, end, most, FEW) if end is not None else None for end in (found.q, new))
    if q is None or k is None or not q.like(k):
        return replace(found, turned=None)
    known = next((t for t in tables if t.like(q)), None)
    if known is None:
        known = rotation(bench, found.q, most)
        assert known is not None
        tables.append(known)
    inside = found.grouped and not (found.q.meta["val"].shape[-1] % ROTARY or q.cos.shape[-1] * 2 % ROTARY)
    if not known.steady or (not inside and bench.positions is None):
        return replace(found, turned=None)
    found = replace(found, q=q.x, turn=replace(known, x=q.x), inside=inside)
    return replace(found, k=k.x) if found.present or new is None else replace(found, turned=(new, k.x))
