"""Attention of ONNX Runtime as functions in torch, in the terms of `torch_table.py`.

Source: the documentation of its contributed operators (microsoft/onnxruntime, docs/ContribOperators.md). Quantized
caches are not taken.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def heads(x: Tensor, count: int) -> Tensor:
    """Return x [b, s, count d] by heads, [b, count, s, d]; what is by heads already stays."""
    return x if x.dim() == 4 else x.unflatten(-1, (count, -1)).transpose(1, 2)


def rotated(x: Tensor, places: Tensor, cos: Tensor, sin: Tensor, interleaved: int) -> Tensor:
    """Turn the first pairs of x [b, n, s, d], as many as the tables [positions, pairs] hold, by places [b or 1, s]."""
    c, s = (table[places.long()].unsqueeze(1) for table in (cos, sin))
    turned, rest = x[..., : 2 * c.shape[-1]], x[..., 2 * c.shape[-1] :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = a * c - b * s, b * c + a * s
    return torch.cat([torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1), rest], -1)


def after(past: Tensor | None, x: Tensor) -> Tensor:
    """Return a cache [b, n, p, d] with what comes behind it."""
    return x if past is None else torch.cat([past, x], 2)


def put(past: Tensor | None, x: Tensor, at: Tensor, size: int) -> Tensor:
    """Return a cache [b, n, p, d], made as long as `size`, with new keys or values x [b, n, s, d] at places [b, s]."""
    room = size - (0 if past is None else past.shape[2])
    held = after(past, x.new_zeros(*x.shape[:2], room, x.shape[3]))
    return held.scatter(2, at[:, None, :, None].expand_as(x), x)


def multi_head_attention(
    q: Tensor, k: Tensor | None = None, v: Tensor | None = None, bias: Tensor | None = None,
    padding: Tensor | None = None, added: Tensor | None = None, past_k: Tensor | None = None,
    past_v: Tensor | None = None, *, num_heads: int, scale: float | None = None, mask_filter_value: float = -1e4,
    unidirectional: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    if k is None or v is None or (bias is not None and k.dim() == 4):
        raise NotImplementedError("MultiHeadAttention of packed inputs, or a bias on heads")
    if bias is not None:
        q, k, v = (x + b for x, b in zip((q, k, v), bias.split([x.shape[-1] for x in (q, k, v)]), strict=True))
    q, k, v = (heads(x, num_heads) for x in (q, k, v))
    k, v = after(past_k, k), after(past_v, v)
    if padding is not None:
        hidden = torch.where(padded(padding, k), torch.zeros((), dtype=q.dtype), mask_filter_value)
        added = hidden if added is None else added + hidden
    if unidirectional:
        before = 0 if past_k is None else past_k.shape[2]
        if k.shape[2] > before + q.shape[2]:
            raise NotImplementedError("MultiHeadAttention that is causal, of fewer queries than keys")
        ahead = torch.arange(k.shape[2]) > before + torch.arange(q.shape[2])[:, None]
        added = torch.where(ahead, -torch.inf, torch.zeros((), dtype=q.dtype) if added is None else added)
    return F.scaled_dot_product_attention(q, k, v, added, scale=scale or None).transpose(1, 2).flatten(2), k, v


def padded(mask: Tensor, k: Tensor) -> Tensor:
    """Return which of the keys k [b, n, s, d] a mask shows, [b, 1, 1 or queries, s]: numbers of keys, or 1 for each."""
    if mask.dim() == 1 and len(mask) == len(k):
        mask = torch.arange(k.shape[2]) < mask[:, None]
    if mask.dim() not in {2, 3} or mask.shape[-1] != k.shape[2]:
        raise NotImplementedError("MultiHeadAttention with a mask of packed tokens, or of new keys alone")
    return (mask > 0).unflatten(0, (len(mask), *[1] * (4 - mask.dim())))


def group_query_attention(
    q: Tensor, k: Tensor | None = None, v: Tensor | None = None, past_k: Tensor | None = None,
    past_v: Tensor | None = None, lengths: Tensor | None = None, total: Tensor | None = None,
    cos: Tensor | None = None, sin: Tensor | None = None, places: Tensor | None = None, added: Tensor | None = None,
    sink: Tensor | None = None, *, num_heads: int, kv_num_heads: int, do_rotary: int = 0, rotary_interleaved: int = 0,
    scale: float = 0.0, softcap: float = 0.0, local_window_size: int = -1, smooth_softmax: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    if k is None or v is None:
        size = q.shape[-1] // (num_heads + 2 * kv_num_heads)
        q, k, v = q.split([n * size for n in (num_heads, kv_num_heads, kv_num_heads)], -1)
    q, k, v = (heads(x, n) for x, n in ((q, num_heads), (k, kv_num_heads), (v, kv_num_heads)))
    if lengths is None or total is None:
        raise NotImplementedError("GroupQueryAttention that is not told how many keys there are")
    new, size = q.shape[2], max(int(total), 0 if past_k is None else past_k.shape[2])
    at = (lengths.long().reshape(-1, 1) + 1 - new).clamp(min=0) + torch.arange(new)  # [b, new]: where new keys go
    if do_rotary and cos is not None and sin is not None:
        turns = at if places is None else places
        q, k = (rotated(x, turns, cos, sin, rotary_interleaved) for x in (q, k))
    k, v = (put(past, x, at, size) for past, x in ((past_k, k), (past_v, v)))
    keys, values = (x.repeat_interleave(num_heads // kv_num_heads, 1) for x in (k, v))
    scores = q @ keys.mT * (scale or q.shape[-1] ** -0.5)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    back = (at[..., None] - torch.arange(size)).unsqueeze(1)
    hidden = (back < 0) | (back >= local_window_size if local_window_size >= 0 else torch.tensor(False))
    if added is not None:  # [.., total]: there may be room behind
        scores = scores + F.pad(added, (0, size - added.shape[-1]))
    scores = scores.masked_fill(hidden, -torch.inf)
    if smooth_softmax or sink is not None:  # one more key, without a value
        more = torch.zeros(num_heads) if sink is None else sink
        scores = torch.cat([scores, more.to(scores).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    found = scores.softmax(-1)[..., :size] @ values
    return found.transpose(1, 2).flatten(2), k, v


def rotary_embedding(
    x: Tensor, places: Tensor, cos: Tensor, sin: Tensor, *, interleaved: int = 0, num_heads: int = 0,
    rotary_embedding_dim: int = 0, scale: float = 1.0,
) -> Tensor:  # fmt: skip
    size = x.shape[-1] if x.dim() == 4 else x.shape[-1] // num_heads if num_heads else 2 * cos.shape[-1]
    new = x.shape[-2]
    if places.numel() == 1:  # where the first stands
        places = places.reshape(1, 1) + torch.arange(new)
    found = rotated(x if x.dim() == 4 else heads(x, x.shape[-1] // size), places, cos, sin, interleaved)
    return found if x.dim() == 4 else found.transpose(1, 2).flatten(2)


def matmul_nbits(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None = None, order: Tensor | None = None,
    bias: Tensor | None = None, *, K: int, N: int, block_size: int, bits: int = 4, accuracy_level: int = 0,
) -> Tensor:  # fmt: skip
    if order is not None or bits not in {2, 4, 8} or (zeros is not None and zeros.is_floating_point()):
        raise NotImplementedError("MatMulNBits with an order of its columns, of 3, 5, 6 or 7 bits, or zeros of floats")
    blocks = -(-K // block_size)
    codes = unpacked(packed.reshape(N, blocks, -1), bits)[..., :block_size]
    middle = 1 << (bits - 1) if zeros is None else unpacked(zeros.reshape(N, -1), bits)[:, :blocks, None]
    weight = ((codes - middle) * scales.reshape(N, blocks, 1).to(x)).reshape(N, -1)[:, :K]
    return F.linear(x, weight, bias)


def unpacked(bytes_: Tensor, bits: int) -> Tensor:
    """Return the numbers that bytes hold, the lowest bits first."""
    parts = [(bytes_.int() >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, -1).flatten(-2)
