"""Attention that reads a cache as ONNX Runtime's one operator for it, which keeps the cache and rotates too.

    k = cat(past_k, rotate(k_new)), v = cat(past_v, v_new)
    softmax(f(rotate(q) k^T) + mask) v, f a scale and perhaps a cap, k and v repeated over the heads that share them
      -> y, present_k, present_v = GroupQueryAttention(q, k_new, v_new, past_k, past_v, lengths, total, cos, sin, mask)

Every row's keys are as long as the cache and the new tokens together, padding too: the mask, as a bias, hides what a
row does not see. Positions are counted by the kernel, from the cache's length on: a row that is padded on the left is
rotated further than the model does, keys and queries alike, which their products do not see. The kernel's contract:
several new tokens after a past need a batch of one; the size of a head is a multiple of 8, of 16 with rotary inside,
else RotaryEmbedding stands before it.
Rows that see nothing, which are padding, get means where torch gives zeros: nothing reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from ...compat.torch import operator_name
from .eager import Written, written
from .norms import CONTRIB
from .rotation import Bench, Rotation, rotation

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default
KERNEL, TURNING = f"{CONTRIB}::GroupQueryAttention", f"{CONTRIB}::RotaryEmbedding"
PLAIN, ROTARY = 8, 16
"""What the size of a head is a multiple of, and the number of channels that are rotated where the kernel does it."""
MASK = "attention_mask"
LEAST = -3e4
"""What is added to a score that is hidden: no weight is left of it, and half precision holds it with any score added.

In a row that sees nothing the sum of the least number and a score would be minus infinity, and all of it NaN.
"""
FEW = 64
"""How many positions tell one table of angles from another."""
WHOLE = 1 << 62
"""A slice to here ends where its tensor does."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """Hold the nodes of one attention over a cache; q, k, v are [batch, heads, new, size], `turn` rotates q and k.

    parts: what it is computed of. plain: whether the mask hides nothing but later tokens and padding. inside: whether
    the kernel rotates; else an operator before it does.
    """

    node: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    past: tuple[fx.Node, fx.Node]
    present: tuple[fx.Node, fx.Node]
    parts: Written
    turn: Rotation | None = None
    plain: bool = False
    inside: bool = False


def find(bench: Bench, most: int) -> Iterator[Grouped]:
    """Yield the attentions that the kernel computes; tables of rotary embedding reach to `most` positions."""
    tables: list[Rotation] = []
    masks: dict[fx.Node, tuple[bool, bool]] = {}
    for node in bench.module.graph.nodes:
        if node.op != "call_function" or (found := _read(node)) is None:
            continue
        if found.parts.mask not in masks:
            masks[found.parts.mask] = _hides(bench, found.parts.mask, most)
        causal, plain = masks[found.parts.mask]
        if causal:
            yield replace(_turned(bench, found, most, tables), plain=plain)


def _read(node: fx.Node) -> Grouped | None:
    """Return what an attention consists of; None where the kernel does not compute it."""
    parts = _called(node) if node.target is SDPA else written(node)
    if parts is None or parts.mask.meta["val"].dim() != 4:
        return None
    keys, values = _appended(parts.key), _appended(parts.value)
    if keys is None or values is None:
        return None
    (k, *kept_k), (v, *kept_v) = keys, values
    shapes = [n.meta["val"].shape for n in (parts.q, k, v)]
    if len({shape[-1] for shape in shapes}) > 1 or shapes[0][-1] % PLAIN:
        return None
    if shapes[1][1] != shapes[2][1] or shapes[0][1] % shapes[1][1]:
        return None
    return Grouped(node, parts.q, k, v, (kept_k[0], kept_v[0]), (kept_k[1], kept_v[1]), parts)


def _called(node: fx.Node) -> Written | None:
    """Return the parts of an attention that is one operator of torch."""
    how = node.kwargs
    if len(node.all_input_nodes) != 4 or len(node.args) > 4 or how.get("is_causal") or how.get("dropout_p"):
        return None
    q, key, value, mask = node.all_input_nodes
    scale = how.get("scale")
    scale = q.meta["val"].shape[-1] ** -0.5 if scale is None else scale
    return Written(q, key, value, mask, scale, 0.0) if isinstance(scale, float) else None


def _appended(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """Return (new, past, both) where `node` is a cache's tensor with new tokens behind it, heads repeated or not."""
    both = _same(node)
    if _is(both, "reshape") and _is(spread := _same(both.all_input_nodes[0]), "expand"):
        inner = _same(spread.all_input_nodes[0])
        if _is(inner, "unsqueeze") and inner.args[1] == 2:
            both = _same(inner.all_input_nodes[0])
    if not _is(both, "cat") or both.args[1:2] not in ((2,), (-2,)) or len(both.all_input_nodes) != 2:
        return None
    past, new = both.all_input_nodes
    held = past.op == "placeholder" and any(user.op == "output" for user in both.users)
    return (new, past, both) if held else None


def _is(node: fx.Node, name: str) -> bool:
    return node.op == "call_function" and operator_name(node.target) == name


def _same(node: fx.Node) -> fx.Node:
    """Return what a node is a copy of: slices of everything and copies."""
    while any(_is(node, name) for name in ("clone", "contiguous", "alias", "detach")) or _is_whole(node):
        node = node.all_input_nodes[0]
    return node


def _is_whole(node: fx.Node) -> bool:
    """Return whether a node is a slice of everything."""
    if not _is(node, "slice"):
        return False
    start, end = (*node.args[2:4], None, None)[:2]
    return start in (0, None) and (end is None or isinstance(end, int) and end >= WHOLE) and node.args[4:] in ((), (1,))


def _hides(bench: Bench, mask: fx.Node, most: int) -> tuple[bool, bool]:
    """Return whether a mask hides every later token, as the kernel does whatever its bias is, and nothing but padding.

    It is run: on rows with padding, and on one token behind as many others as the model knows, for a window hides some.
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

    earlier = torch.ones(5, 9, dtype=torch.bool).tril(4)
    try:
        some, last = seen(given, 5), seen(torch.ones(1, most, dtype=torch.int64), 1)
    except (LookupError, RuntimeError, TypeError, AttributeError):
        return False, False
    plain = exact and bool(last.all()) and torch.equal(some[:, 0], earlier & given[:, None].bool())
    return not bool(some[..., ~earlier].any()), plain and some.shape[1] == 1


def _turned(bench: Bench, found: Grouped, most: int, tables: list[Rotation]) -> Grouped:
    """Take the rotation of queries and keys out of the graph where both are rotated alike."""
    q, k = (rotation(bench, end, FEW) for end in (found.q, found.k))
    if q is None or k is None or not q.like(k):
        return found
    known = next((t for t in tables if t.interleaved == q.interleaved and torch.equal(t.cos[:FEW], q.cos)), None)
    if known is None:
        known = rotation(bench, found.q, most)
        assert known is not None
        tables.append(known)
    inside = not (found.q.meta["val"].shape[-1] % ROTARY or q.cos.shape[-1] * 2 % ROTARY)
    if not inside and bench.positions is None:
        return found
    return replace(found, q=q.x, k=k.x, turn=replace(known, x=q.x), inside=inside)


# ---- what is traced in the place of it ----


def lengths(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the last index of each row's keys [batch], and their number: attention_mask tells it, [batch, keys]."""
    total = mask.shape[1]
    last = torch.full((ids.shape[0],), total - 1, dtype=torch.int32, device=ids.device)
    return last, torch.full((), total, dtype=torch.int32, device=ids.device)


def bias(mask: Tensor, like: Tensor) -> Tensor:
    """Return what is added to scores in the place of a mask."""
    least = torch.full((), LEAST, dtype=like.dtype, device=like.device)
    if mask.dtype is torch.bool:
        return torch.where(mask, torch.zeros_like(least), least)
    return torch.maximum(mask.to(like.dtype), least)


def padding(mask: Tensor, ids: Tensor, like: Tensor) -> Tensor:
    """Return what is added to the scores of tokens [batch, new] for padding in attention_mask [batch, keys]."""
    hidden = (1 - mask.to(like.dtype)) * LEAST
    return hidden[:, None, None].expand(-1, 1, ids.shape[1], -1)


def merged(x: Tensor) -> Tensor:
    """Return [batch, heads, new, size] as [batch, new, heads * size]."""
    return x.transpose(1, 2).flatten(2)


def flat(x: Tensor) -> Tensor:
    """Return [batch, new, heads, size] as [batch, new, heads * size]."""
    return x.flatten(2)


def turned(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, size: int, interleaved: bool) -> Tensor:
    """Represent the operator that rotates heads of a size, x [batch, new, heads * size], in a graph that is traced."""
    width = 2 * cos.shape[1]
    held = {"interleaved": int(interleaved), "num_heads": x.shape[2] // size}
    held |= {"rotary_embedding_dim": width} if width < size else {}
    return torch.onnx.ops.symbolic(TURNING, (x, positions, cos, sin), {**held}, dtype=x.dtype, shape=x.shape, version=1)


def attend(
    q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor, last: Tensor, total: Tensor,
    cos: Tensor | None, sin: Tensor | None, mask: Tensor, scale: float, cap: float, interleaved: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Represent the kernel in a graph that is traced: it has shapes and no values."""
    size, kv = past_k.shape[3], past_k.shape[1]
    held: dict[str, int | float] = {"num_heads": q.shape[2] // size, "kv_num_heads": kv, "scale": scale}
    if cap:
        held["softcap"] = cap
    if cos is not None:
        held |= {"do_rotary": 1, "rotary_interleaved": int(interleaved)}
    present = (past_k.shape[0], kv, past_k.shape[2] + q.shape[1], size)
    return tuple(
        torch.onnx.ops.symbolic_multi_out(
            KERNEL, (q, k, v, past_k, past_v, last, total, cos, sin, None, mask), {**held},
            dtypes=(q.dtype,) * 3, shapes=(q.shape, present, present), version=1,
        )
    )  # fmt: skip
