"""How a branch's value joins its stream, what else is in the sum, and what becomes of the stream after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .choices import Piece, gain, matrix, shift

Join = Callable[[Piece, Tensor, Tensor, dict[str, Any]], Tensor]


def _wide(t: Tensor, x: Tensor, axis: int) -> Tensor:
    """Return a value per channel, [width] or [batch, width], in a shape that goes with the stream's."""
    if axis == -1:
        return t if t.dim() < 2 else t.reshape(t.shape[0], *[1] * (x.dim() - 2), -1)
    return t.reshape(*t.shape, *[1] * (x.dim() - 2))


def held(width: int, vocabulary: int) -> dict[str, Any]:
    """Return what the sums below take."""
    return {
        "a": gain(1), "b": gain(1, mean=0.3), "v": gain(width, mean=0.5), "u": gain(width, mean=0.5), "c": matrix(width, 3),
        "g": matrix(width, width), "bias": shift(width), "pos": shift(32, width), "table": shift(vocabulary, width),
        "fixed": torch.randn(width), "w": matrix(width, width), "perm": torch.randperm(width),
        "mask": (torch.arange(width) % 3 > 0).float(), "lambdas": gain(3, mean=0.6),
    }  # fmt: skip


def joins(axis: int) -> dict[str, Join]:
    """Return the ways in which a branch's value joins the stream."""

    def wide(t: Tensor, x: Tensor) -> Tensor:
        return _wide(t, x, axis)

    def last(run: Callable[[Tensor, Tensor], Tensor]) -> Join:
        return lambda s, x, f, more: run(x, f)

    return {
        "plus": last(lambda x, f: x + f),
        "the other way": last(lambda x, f: f + x),
        "torch.add": last(lambda x, f: torch.add(x, f)),
        "alpha": last(lambda x, f: torch.add(x, f, alpha=0.4)),
        "minus": last(lambda x, f: x - f),
        "minus minus": last(lambda x, f: x - (-f)),
        "rsub": last(lambda x, f: torch.rsub(x, f)),
        "lerp": last(lambda x, f: torch.lerp(x, f, 0.25)),
        "addcmul": lambda s, x, f, more: torch.addcmul(x, f, wide(s.v, x)),
        "addcdiv": lambda s, x, f, more: torch.addcdiv(x, f, wide(s.v, x), value=0.5),
        "stack": last(lambda x, f: torch.stack([x, f]).sum(0)),
        "stacked mean": last(lambda x, f: torch.stack([x, f]).mean(0)),
        "sum of a list": last(lambda x, f: sum([x, f])),  # type: ignore[arg-type,return-value]
        "in place": last(lambda x, f: x.clone().add_(f)),
        "halves": last(
            lambda x, f: torch.cat([a + b for a, b in zip(x.chunk(2, axis), f.chunk(2, axis), strict=True)], axis)
        ),
        "half only": last(
            lambda x, f: torch.cat([x.chunk(2, axis)[0], x.chunk(2, axis)[1] + f.chunk(2, axis)[1]], axis)
        ),
        "addmm": lambda s, x, f, more: _addmm(s, x, f, axis),
        "baddbmm": lambda s, x, f, more: (
            torch.baddbmm(x, f, s.w.T.expand(f.shape[0], -1, -1), beta=0.9) if x.dim() == 3 and axis == -1 else x + f
        ),
        "branch halved": last(lambda x, f: x + 0.5 * f),
        "branch divided": last(lambda x, f: x + f / 3.0),
        "skip halved": last(lambda x, f: 0.5 * x + f),
        "skip doubled": last(lambda x, f: x * 2 + f),
        "mean": last(lambda x, f: (x + f) / 2),
        "sum times": last(lambda x, f: (x + f) * 0.5**0.5),
        "learned branch": lambda s, x, f, more: x + s.a * f,
        "learned skip": lambda s, x, f, more: s.a * x + f,
        "both learned": lambda s, x, f, more: s.lambdas[0] * x + s.lambdas[1] * f,
        "layer scale": lambda s, x, f, more: x + wide(s.v, x) * f,
        "skip scaled per channel": lambda s, x, f, more: wide(s.v, x) * x + f,
        "both per channel": lambda s, x, f, more: wide(s.u, x) * x + wide(s.v, x) * f,
        "gated": lambda s, x, f, more: x + torch.sigmoid(s.b) * f,
        "tanh gate": lambda s, x, f, more: x + f * torch.tanh(wide(s.v, x)),
        "convex": lambda s, x, f, more: torch.sigmoid(s.b) * x + (1 - torch.sigmoid(s.b)) * f,
        "gated by the stream": lambda s, x, f, more: x + torch.sigmoid(_over(x, s.g, axis)) * f,
        "highway": lambda s, x, f, more: (lambda t: t * f + (1 - t) * x)(torch.sigmoid(_over(x, s.g, axis))),
        "gated by the condition": lambda s, x, f, more: x + wide(torch.tanh(F.linear(more["condition"], s.c)), x) * f,
        "masked tokens": last(lambda x, f: x + f * (torch.arange(f.shape[-2]) % 3 > 0).to(f)[:, None]),
        "masked channels": lambda s, x, f, more: x + torch.where(wide(s.mask, x) > 0, f, 0.0),
        "tokens in between": last(lambda x, f: x + F.pad(f, (0, 0, 1, -1))),
        "skip rolled": last(lambda x, f: x.roll(1, axis) + f),
        "skip flipped": last(lambda x, f: x.flip(axis) + f),
        "skip permuted": lambda s, x, f, more: x.index_select(axis, s.perm) + f,
        "skip clamped": last(lambda x, f: x.clamp(-2, 2) + f),
        "skip's gradient cut": last(lambda x, f: x.detach() + f),
        "skip through a linear": lambda s, x, f, more: _over(x, s.w, axis) + f,
        "scatter": last(lambda x, f: x.scatter_add(-1, torch.arange(f.shape[-1]).expand_as(f), f)),
        "index_add": lambda s, x, f, more: x.index_add(axis, s.perm, f),
        "no skip": last(lambda x, f: f),
        "activated": last(lambda x, f: torch.relu(x + f)),
        "twice": last(lambda x, f: x + f + f),
        "product": last(lambda x, f: x * (1 + 0.1 * f)),
        "maximum": last(lambda x, f: torch.maximum(x, f)),
        "where": last(lambda x, f: torch.where(f > 0, x + f, x)),
        "einsum": lambda s, x, f, more: torch.einsum("k,k...->...", s.lambdas[:2], torch.stack([x, f])),
    }


def _over(x: Tensor, w: Tensor, axis: int) -> Tensor:
    return F.linear(x.movedim(axis, -1), w).movedim(-1, axis)


def _addmm(s: Piece, x: Tensor, f: Tensor, axis: int) -> Tensor:
    x, f = x.movedim(axis, -1), f.movedim(axis, -1)
    return torch.addmm(x.flatten(0, -2), f.flatten(0, -2), s.w).reshape(x.shape).movedim(-1, axis)


def extras(axis: int) -> dict[str, Join]:
    """Return what else may be added: before the branch, behind it, or to it."""

    def wide(t: Tensor, x: Tensor) -> Tensor:
        return _wide(t, x, axis)

    found: dict[str, Join] = {
        "none": lambda s, x, f, more: None,  # type: ignore[return-value,dict-item]
        "bias": lambda s, x, f, more: wide(s.bias, x),
        "constant": lambda s, x, f, more: wide(s.fixed, x),
        "number": lambda s, x, f, more: torch.full_like(x, 0.3),
        "condition": lambda s, x, f, more: wide(F.linear(more["condition"], s.c), x),
        "source": lambda s, x, f, more: more["source"],
        "source scaled": lambda s, x, f, more: s.b * more["source"],
        "source per channel": lambda s, x, f, more: wide(s.v, x) * more["source"],
        "of the stream": lambda s, x, f, more: 0.1 * x.mean(axis, keepdim=True),
        "mean over tokens": lambda s, x, f, more: 0.1 * x.mean(-2, keepdim=True),
        "linear of the stream": lambda s, x, f, more: _over(x, s.g, axis),
    }
    if axis == -1:
        found |= {
            "positions": lambda s, x, f, more: s.pos[: x.shape[1]],
            "sinusoids": lambda s, x, f, more: torch.sin(torch.arange(x.shape[1]).to(x))[:, None] * s.fixed,
            "table": lambda s, x, f, more: F.embedding(more["ids"], s.table) if "ids" in more else wide(s.bias, x),
            "input": lambda s, x, f, more: more["other"],
            "input through a linear": lambda s, x, f, more: F.linear(more["other"], s.w),
            "first tokens only": lambda s, x, f, more: F.pad(more["other"][:, :2], (0, 0, 0, x.shape[1] - 2)),
        }
    return found


TRUNK: dict[str, Callable[[Piece, Tensor, int], Tensor]] = {
    "as is": lambda s, x, axis: x,
    "halved": lambda s, x, axis: x * 0.5,
    "learned": lambda s, x, axis: x * s.a,
    "learned, sliced": lambda s, x, axis: x * s.lambdas[2],
    "per channel": lambda s, x, axis: x * _wide(s.v, x, axis),
    "rolled": lambda s, x, axis: x.roll(1, axis),
    "tokens rolled": lambda s, x, axis: x.roll(1, -2 if axis == -1 else -1),
    "activated": lambda s, x, axis: F.leaky_relu(x, 0.2),
    "clamped": lambda s, x, axis: x.clamp(-3, 3),
    "there and back": lambda s, x, axis: x.flatten(0, 1).unflatten(0, x.shape[:2]),
    "cut and joined": lambda s, x, axis: torch.cat(x.chunk(2, axis), axis),
    "dropout": lambda s, x, axis: F.dropout(x, 0.1, False),
    "cast": lambda s, x, axis: x.float().type_as(x),
    "detached": lambda s, x, axis: x.detach(),
    "a linear": lambda s, x, axis: _over(x, s.w, axis),
}
"""What becomes of a stream behind a block."""
LENGTHS: dict[str, Callable[[Piece, Tensor], Tensor]] = {
    "as is": lambda s, x: x,
    "tokens dropped": lambda s, x: x[:, 1:],
    "a token before": lambda s, x: torch.cat([s.fixed.expand(x.shape[0], 1, -1), x], 1),
    "padded": lambda s, x: F.pad(x, (0, 0, 1, 0), value=1.0),
    "every other token": lambda s, x: x[:, ::2],
    "tokens in pairs": lambda s, x: (x[:, :-1:2] + x[:, 1::2]) / 2,
}
"""What becomes of its tokens, before the last block."""
