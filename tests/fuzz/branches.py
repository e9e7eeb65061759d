"""What a block computes between its in norm and the sum: MLPs, attention, experts, mixers of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .choices import Choices, Piece, matrix, shift
from .linears import linear
from .norms import norm

HIDDEN = 12
HEADS = 2
ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "relu": torch.relu,
    "silu": F.silu,
    "square": lambda h: torch.relu(h).square(),
    "identity": lambda h: h,
    "leaky": lambda h: F.leaky_relu(h, 0.1),
    "sin": torch.sin,
}


def branch(c: Choices, width: int, axis: int) -> nn.Module:
    """Return a branch: called with what it reads, the stream itself, and what else the net knows."""
    if axis == 1:
        return _mlp(c, width, axis)
    kinds: dict[str, Callable[..., nn.Module]] = {
        "mlp": _mlp, "attention": _attention, "gated": _gated, "single": _single, "experts": _experts, "scan": _scan,
        "split": _split, "routed": _routed,
    }  # fmt: skip
    weights = ["mlp", "attention", "gated"] * 3 + list(kinds)
    return kinds[c.any("kind", weights)](c, width, axis)


def _mlp(c: Choices, width: int, axis: int) -> nn.Module:
    act = ACTS[c.any("act", ACTS)]
    inner = norm(c.at("inner"), HIDDEN, axis) if c.pick("inner norm", ("no", "yes")) == "yes" else nn.Identity()
    up, down = linear(c.at("up"), width, HIDDEN, axis), linear(c.at("down"), HIDDEN, width, axis)
    return Piece(lambda s, h, x, more: s.down(s.inner(act(s.up(h)))), up=up, inner=inner, down=down)


def _single(c: Choices, width: int, axis: int) -> nn.Module:
    return Piece(lambda s, h, x, more: s.only(h), only=linear(c.at("only"), width, width, axis))


GATES: dict[str, tuple[str, Callable[[Piece, Tensor, Tensor, dict[str, Any]], Tensor]]] = {
    "two linears": ("gate up", lambda s, h, x, more: F.silu(s.gate(h)) * s.up(h)),
    "fused": ("both", lambda s, h, x, more: (lambda a, b: F.silu(a) * b)(*s.both(h).chunk(2, -1))),
    "glu": ("both", lambda s, h, x, more: F.glu(s.both(h), -1)),
    "sliced weights": ("", lambda s, h, x, more: F.silu(F.linear(h, s.w[:HIDDEN])) * F.linear(h, s.w[HIDDEN:])),
    "by the stream": ("gate up", lambda s, h, x, more: torch.sigmoid(s.gate(x)) * s.up(h)),
    "by the condition": (
        "up",
        lambda s, h, x, more: torch.sigmoid(F.linear(more["condition"], s.c))[:, None] * s.up(h),
    ),
    "product": ("gate up", lambda s, h, x, more: s.gate(h) * s.up(h)),
    "by the source": ("gate up", lambda s, h, x, more: torch.sigmoid(s.gate(more["source"])) * s.up(h)),
}
"""The linears that a gated branch takes, and what it makes of them."""


def _gated(c: Choices, width: int, axis: int) -> nn.Module:
    names, gate = GATES[c.any("gate", GATES)]
    linears = {name: linear(c.at(name), width, HIDDEN * (1 + (name == "both"))) for name in names.split()}
    return Piece(
        lambda s, h, x, more: s.down(gate(s, h, x, more)), down=linear(c.at("down"), HIDDEN, width), **linears,
        w=matrix(2 * HIDDEN, width), c=matrix(HIDDEN, 3),
    )  # fmt: skip


def _experts(c: Choices, width: int, axis: int) -> nn.Module:
    how = c.any("experts", ("dense", "bmm", "one token each", "indexed weights"))

    def run(s: Piece, h: Tensor, x: Tensor, more: dict[str, Any]) -> Tensor:
        weights = torch.softmax(s.router(h), -1)
        if how == "dense":
            up = torch.tanh(torch.einsum("bti,eoi->beto", h, s.up))
            return torch.einsum("beto,eio,bte->bti", up, s.down, weights)
        if how == "bmm":
            flat = h.flatten(0, 1).expand(3, -1, -1)
            found = torch.bmm(torch.tanh(torch.bmm(flat, s.up.mT)), s.down.mT)
            return (found * weights.flatten(0, 1).T[..., None]).sum(0).view_as(h)
        chosen = weights.argmax(-1)
        if how == "indexed weights":
            up = torch.tanh((s.up[chosen] @ h[..., None]).squeeze(-1))
            return (s.down[chosen] @ up[..., None]).squeeze(-1) * weights.amax(-1, keepdim=True)
        parts = [F.linear(torch.tanh(F.linear(h, s.up[e])), s.down[e]) * (chosen == e)[..., None] for e in range(3)]
        return parts[0] + parts[1] + parts[2]

    router = linear(c.at("router"), width, 3)
    return Piece(run, router=router, up=matrix(3, HIDDEN, width), down=matrix(3, width, HIDDEN))


def _scan(c: Choices, width: int, axis: int) -> nn.Module:
    how = c.any("scan", ("mean so far", "decay", "conv", "difference"))

    def run(s: Piece, h: Tensor, x: Tensor, more: dict[str, Any]) -> Tensor:
        v = s.value(h)
        steps = torch.arange(1, v.shape[1] + 1).to(v)[:, None]
        if how == "mean so far":
            v = v.cumsum(1) / steps
        elif how == "decay":
            v = (v * torch.exp(0.1 * steps)).cumsum(1) * torch.exp(-0.1 * steps)
        elif how == "conv":
            v = F.conv1d(F.pad(v.mT, (2, 0)), s.deep, s.low, groups=v.shape[-1]).mT
        else:
            v = v - F.pad(v, (0, 0, 1, -1))
        return s.out(v * torch.sigmoid(s.gate(h)))

    return Piece(
        run, value=linear(c.at("value"), width, HIDDEN), gate=linear(c.at("gate"), width, HIDDEN),
        out=linear(c.at("out"), HIDDEN, width), deep=matrix(HIDDEN, 1, 3), low=shift(HIDDEN),
    )  # fmt: skip


def _split(c: Choices, width: int, axis: int) -> nn.Module:
    """Return a branch whose halves of channels go through linears of their own."""
    half = width // 2
    left, right = linear(c.at("left"), half, half), linear(c.at("right"), width, half)
    return Piece(
        lambda s, h, x, more: torch.cat([s.left(torch.tanh(h[..., :half])), s.right(h).tanh()], -1),
        left=left,
        right=right,
    )


def _routed(c: Choices, width: int, axis: int) -> nn.Module:
    """Return a branch that works on the tokens that a router chooses (mixture of depths), of equal ones the last."""

    def run(s: Piece, h: Tensor, x: Tensor, more: dict[str, Any]) -> Tensor:
        score = s.router(h) + torch.arange(h.shape[1]).to(h)[:, None] / 100
        chosen = score.topk(2, 1).indices.expand(-1, -1, h.shape[-1])
        found = s.down(torch.tanh(s.up(h.gather(1, chosen))))
        return torch.zeros_like(h).scatter_add(1, chosen, found)

    return Piece(
        run, router=linear(c.at("router"), width, 1), up=linear(c.at("up"), width, HIDDEN),
        down=linear(c.at("down"), HIDDEN, width),
    )  # fmt: skip


# ---- attention ----


def _attention(c: Choices, width: int, axis: int) -> nn.Module:
    size = 4
    heads = HEADS if c.pick("grouped", ("no", "one key")) == "no" else 1
    how = c.any("weights", PROJECTIONS)
    soft = c.any("softmax", ("sdpa", "written", "causal", "linear", "sigmoid"))
    turn = c.pick("positions", ("none", "rotary", "alibi"), 3)
    inner = c.pick("query norm", ("no", "yes"), 2) == "yes"
    values = c.pick("values from", ("the norm", "the stream", "the source")) if how == "three" else "the norm"
    gated = c.pick("gated", ("no", "yes"))
    full, less = HEADS * size, heads * size

    def project(s: Piece, h: Tensor) -> tuple[Tensor, ...]:
        if how == "three":
            return s.q(h), s.k(h), s.v(h)
        if how == "fused":
            return s.qkv(h).split([full, less, less], -1)
        if how == "fused by heads":
            q, k, v = s.qkv3(h).unflatten(-1, (HEADS, 3, size)).unbind(-2)
            return q.flatten(-2), k.flatten(-2)[..., :less], v.flatten(-2)[..., :less]
        w, b = s.w, s.b
        cuts = (0, full, full + less, full + 2 * less)
        return tuple(F.linear(h, w[a:z], b[a:z]) for a, z in zip(cuts, cuts[1:], strict=False))

    def run(s: Piece, h: Tensor, x: Tensor, more: dict[str, Any]) -> Tensor:
        q, k, v = project(s, h)
        if values != "the norm":
            v = s.v(x if values == "the stream" else more["source"])
        q, k, v = (t.unflatten(-1, (-1, size)).transpose(1, 2) for t in (q, k, v))
        if inner:
            q, k = s.qn(q), s.kn(k)
        if turn == "rotary":
            q, k = _rotated(q), _rotated(k)
        if heads != HEADS:
            k, v = k.repeat_interleave(HEADS, 1), v.repeat_interleave(HEADS, 1)
        y = _attend(soft, q, k, v, turn).transpose(1, 2).flatten(-2)
        return s.out(y * torch.sigmoid(s.gate(h)) if gated == "yes" else y)

    wide = {"q": full, "k": less, "v": less, "qkv": full + 2 * less, "qkv3": 3 * full, "gate": full}
    names = PROJECTIONS[how] + ("gate",) * (gated == "yes")
    linears = {name: linear(c.at(name), width, wide[name]) for name in names}
    norms = {name: norm(c.at("norm"), size) for name in ("qn", "kn") if inner}
    more = {"w": matrix(full + 2 * less, width), "b": shift(full + 2 * less)}
    return Piece(run, out=linear(c.at("out"), full, width), **linears, **norms, **more)


PROJECTIONS: dict[str, tuple[str, ...]] = {
    "three": ("q", "k", "v"), "fused": ("qkv",), "fused, sliced weight": (), "fused by heads": ("qkv3",),
}  # fmt: skip
"""The linears that make queries, keys and values."""


def _attend(soft: str, q: Tensor, k: Tensor, v: Tensor, turn: str) -> Tensor:
    steps = torch.arange(q.shape[-2])
    bias = -0.1 * (steps[:, None] - steps).abs().to(q) if turn == "alibi" else torch.zeros_like(q[0, 0, :, 0])
    if soft == "sdpa" and turn != "alibi":
        return F.scaled_dot_product_attention(q, k, v)
    if soft == "linear":
        return F.elu(q) @ (k.mT @ v) / q.shape[-2]
    scores = q @ k.mT * 0.5 + bias
    if soft == "causal":
        scores = scores.masked_fill(steps[None] > steps[:, None], float("-inf"))
    return (torch.sigmoid(scores) if soft == "sigmoid" else torch.softmax(scores, -1)) @ v


def _rotated(q: Tensor) -> Tensor:
    angles = torch.outer(torch.arange(q.shape[-2]).to(q), torch.tensor([1.0, 0.1], dtype=q.dtype))
    cos, sin = (t.repeat(1, 2) for t in (angles.cos(), angles.sin()))
    a, b = q.chunk(2, -1)
    return q * cos + torch.cat([-b, a], -1) * sin
