"""Kernels of attention in a graph that is traced, and what is computed for them: they have shapes and no values."""

from __future__ import annotations

import torch
from torch import Tensor

from .norms import CONTRIB, EXPERTS, GROUPED, HEADED

TURNING = f"{CONTRIB}::RotaryEmbedding"
LEAST = -3e4
"""What is added to a score that is hidden: no weight is left of it, and half precision holds it with any score added.

In a row that sees nothing the sum of the least number and a score would be minus infinity, and all of it NaN.
"""


def lengths(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the last index of each row's keys [batch], and their number: attention_mask tells it, [batch, keys]."""
    total = mask.shape[1]
    last = torch.full((ids.shape[0],), total - 1, dtype=torch.int32, device=ids.device)
    return last, torch.full((), total, dtype=torch.int32, device=ids.device)


def padding(mask: Tensor, q: Tensor) -> Tensor:
    """Return what is added to the scores of q [batch, heads, new, size] to hide what mask [batch, keys] does: padding.

    The kernel itself hides what comes later, and what lies beyond a window.
    """
    return bias(mask.bool().unsqueeze(1).unsqueeze(2), q)


def bias(mask: Tensor, q: Tensor) -> Tensor:
    """Return what is added to the scores of q [batch, heads, new, size] in the place of a mask."""
    least = torch.full((), LEAST, dtype=q.dtype, device=q.device)
    if mask.shape[2] == 1:
        mask = mask.expand(-1, -1, q.shape[2], -1)
    if mask.dtype is torch.bool:
        return torch.where(mask, torch.zeros_like(least), least)
    return torch.maximum(mask.to(q.dtype), least)


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


def apart(x: Tensor, heads: int) -> Tensor:
    """Return [batch, new, heads * size] as [batch, heads, new, size]."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def attend(
    q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor, last: Tensor, total: Tensor,
    cos: Tensor | None, sin: Tensor | None, mask: Tensor | None, scale: float, cap: float, interleaved: bool,
    window: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Represent the kernel in a graph that is traced: it has shapes and no values."""
    size, kv = past_k.shape[3], past_k.shape[1]
    held: dict[str, int | float] = {"num_heads": q.shape[2] // size, "kv_num_heads": kv, "scale": scale}
    if cap:
        held["softcap"] = cap
    if cos is not None:
        held |= {"do_rotary": 1, "rotary_interleaved": int(interleaved)}
    if window:
        held["local_window_size"] = window
    given = [q, k, v, past_k, past_v, last, total, cos, sin, None, mask]
    while given[-1] is None:
        given.pop()
    present = (past_k.shape[0], kv, past_k.shape[2] + q.shape[1], size)
    return tuple(
        torch.onnx.ops.symbolic_multi_out(
            f"{CONTRIB}::{GROUPED}", given, {**held},
            dtypes=(q.dtype,) * 3, shapes=(q.shape, present, present), version=1,
        )
    )  # fmt: skip


def attend_heads(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, past_k: Tensor | None, past_v: Tensor | None,
    heads: int, scale: float, gives: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Represent the kernel that keeps a cache of all heads, or none: see `attend`. gives: whether the cache is read."""
    given = [q, k, v, None, None, mask, past_k, past_v]
    while given[-1] is None:
        given.pop()
    past = 0 if past_k is None else past_k.shape[2]
    present = (q.shape[0], heads, past + k.shape[1], q.shape[2] // heads)
    count = 3 if gives else 1
    return tuple(
        torch.onnx.ops.symbolic_multi_out(
            f"{CONTRIB}::{HEADED}", given, {"num_heads": heads, "scale": scale},
            dtypes=(q.dtype,) * count, shapes=(q.shape, present, present)[:count], version=1,
        )
    )  # fmt: skip


def mixed(
    x: Tensor, logits: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None,
    k: int, normalized: bool, alpha: float, beta: float, limit: float,
) -> Tensor:  # fmt: skip
    """Represent the operator that sends each token of x [tokens, width] through k experts: see `experts`.

    Its weights always sum to one: told otherwise, the kernel for CPUs gives zeros where a node makes x (1.31).
    """
    held: dict[str, int | float | str] = {"k": k, "normalize_routing_weights": 1}
    held |= {"activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": alpha, "activation_beta": beta}
    if limit < float("inf"):
        held["swiglu_limit"] = limit
    given = [x, logits, up, up_bias, down] if down_bias is None else [x, logits, up, up_bias, down, down_bias]
    y = torch.onnx.ops.symbolic(f"{CONTRIB}::{EXPERTS}", given, {**held}, dtype=x.dtype, shape=x.shape, version=1)
    return y if normalized else y * logits.softmax(-1).topk(k).values.sum(-1, keepdim=True)
