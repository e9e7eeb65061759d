"""Compute losses in one walk over a vocabulary or a width, with gradients of their own.

Written with torch's operators, a divergence of logits holds five copies of [tokens, vocabulary] in float32 and as many
again for its gradient: for a vocabulary of 32,000 that is more time than the head takes. Here a few rows at a time are
computed, in float32 at least, and nothing but the logits themselves is kept for the gradient (as the fused losses of
Liger-Kernel, arXiv 2410.10989).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

IGNORED = -100
"""A target that counts for nothing, as in torch and transformers."""

CACHED, LARGE = 2**16, 2**24
"""Numbers that are computed at a time: by a CPU's core what fits into its cache, else four times 64 MB of float32."""

TINY = 1e-12
"""The eps of a norm that only tells directions apart."""


def compared(mine: Tensor, its: Tensor | None, targets: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of logits [..., classes] with targets int64[...], and KL(its || mine), both [...].

    In nats, zero where a target is IGNORED, and where there is none, or no other logits. Classes without a chance, at
    -inf, add nothing. No gradient goes into `its`.
    """
    flat = [None if t is None else t.reshape(-1, mine.shape[-1]) for t in (mine, its)]
    rows = None if targets is None else targets.reshape(-1)
    entropy, divergence = _Compared.apply(*flat, rows)
    return entropy.view(mine.shape[:-1]), divergence.view(mine.shape[:-1])


class _Context(Protocol):
    """Describe what torch passes from a function's forward to its backward."""

    saved_tensors: tuple[Tensor | None, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


class _Compared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, mine: Tensor, its: Tensor | None, targets: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(mine, its, targets)
        high = torch.promote_types(mine.dtype, torch.float32)
        entropy, divergence = torch.zeros(2, len(mine), dtype=high, device=mine.device)
        for part in _parts(mine):
            q = mine[part].to(high).log_softmax(-1)
            if targets is not None:
                entropy[part] = F.nll_loss(q, targets[part], ignore_index=IGNORED, reduction="none")
            if its is not None:
                p = its[part].to(high).log_softmax(-1)
                chance = p.exp()
                divergence[part] = torch.linalg.vecdot(chance, p.sub_(q).masked_fill_(chance == 0, 0))
        return entropy, divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, by_entropy: Tensor, by_divergence: Tensor) -> tuple[Tensor, None, None]:
        mine, its, targets = ctx.saved_tensors
        assert mine is not None
        gradient = torch.empty_like(mine)
        weight = by_divergence.clone() if its is not None else torch.zeros_like(by_divergence)
        if targets is not None:
            counted = targets != IGNORED
            by_entropy = by_entropy * counted
            weight += by_entropy
            places = torch.where(counted, targets, 0)[:, None]
        for part in _parts(mine):
            q = mine[part].to(weight.dtype).softmax(-1).mul_(weight[part, None])
            if its is not None:
                q.addcmul_(its[part].to(weight.dtype).softmax(-1), by_divergence[part, None], value=-1)
            if targets is not None:
                q.scatter_add_(-1, places[part], -by_entropy[part, None])
            gradient[part] = q
        return gradient, None, None


def _parts(rows: Tensor) -> Iterator[slice]:
    numbers = CACHED * torch.get_num_threads() if rows.device.type == "cpu" else LARGE
    step = max(1, numbers // rows.shape[-1])
    return (slice(start, start + step) for start in range(0, len(rows), step))


def apart(mine: Tensor, its: Tensor, centered: bool) -> Tensor:
    """Return the mean squared distance of states [..., width] after a bare norm, layer (centered) or rms: [...].

    No gradient goes into `its`.
    """
    found: Tensor = _Apart.apply(mine, its, centered)
    return found


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, mine: Tensor, its: Tensor, centered: bool) -> Tensor:
        unit, scale = _unit(mine, centered)
        way = unit - _unit(its, centered)[0]
        width = mine.shape[-1]
        found = torch.linalg.vector_norm(way, dim=-1).square() / width
        if ctx.needs_input_grad[0]:  # the norm takes out what lies along the state; the mean is out already
            along = torch.linalg.vecdot(way, unit)[..., None] / width
            ctx.save_for_backward(way.addcmul_(unit, along, value=-1).mul_(scale * (2 / width)))
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, by_row: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        assert slope is not None
        return slope * by_row[..., None], None, None


def _unit(x: Tensor, centered: bool) -> tuple[Tensor, Tensor]:
    """Return [..., width] with mean square one, and what it was multiplied by, [..., 1]."""
    high = x.to(torch.promote_types(x.dtype, torch.float32))
    if centered:
        high = high - high.mean(-1, keepdim=True)
    scale = (torch.linalg.vector_norm(high, dim=-1, keepdim=True).square() / x.shape[-1] + TINY).rsqrt()
    return high * scale, scale
