"""Linear maps in many spellings, and what moves, masks or scales channels and tokens around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .choices import Choices, Piece, gain, matrix, shift

Run = Callable[[Piece, Tensor], Tensor]


def _flat(h: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    return run(h.flatten(0, -2)).unflatten(0, h.shape[:-1])


def _tokens(h: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """Run what wants [batch, channels, tokens]."""
    return (
        run(h.transpose(1, 2)).transpose(1, 2)
        if h.dim() == 3
        else run(h.flatten(1, 2).mT).mT.reshape(*h.shape[:-1], -1)
    )


LINEARS: dict[str, Run] = {
    "linear": lambda s, h: F.linear(h, s.w, s.b),
    "module": lambda s, h: s.linear(h),
    "no bias": lambda s, h: F.linear(h, s.w),
    "matmul": lambda s, h: h @ s.w.T + s.b,
    "stored transposed": lambda s, h: torch.matmul(h, s.wt) + s.b,
    "from the left": lambda s, h: (s.w @ h.mT).mT + s.b,
    "einsum": lambda s, h: torch.einsum("...i,oi->...o", h, s.w) + s.b,
    "einsum heads": lambda s, h: torch.einsum("...i,iho->...ho", h, s.wt.unflatten(-1, (2, -1))).flatten(-2) + s.b,
    "scaled weight": lambda s, h: F.linear(h, s.w * 0.5, s.b),
    "computed bias": lambda s, h: F.linear(h, s.w, s.b * 0.5),
    "sliced bias": lambda s, h: F.linear(h, s.w, s.bb[: s.b.shape[0]]),
    "scaled rows": lambda s, h: F.linear(h, s.w * s.out[:, None], s.b * s.out),
    "scaled columns": lambda s, h: F.linear(h, s.w * s.inp, s.b),
    "weight norm": lambda s, h: F.linear(h, s.out[:, None] * F.normalize(s.w, dim=1), s.b),
    "masked weight": lambda s, h: F.linear(h, s.w * (s.w > 0), s.b),
    "sliced weight": lambda s, h: F.linear(h, s.big[: s.w.shape[0]], s.b),
    "sliced result": lambda s, h: F.linear(h, s.big, s.bb)[..., : s.w.shape[0]],
    "sum of two": lambda s, h: F.linear(h, s.w, s.b) + F.linear(h, s.big[: s.w.shape[0]]),
    "low rank": lambda s, h: F.linear(h, s.w, s.b) + (h @ s.down) @ s.up,
    "in two steps": lambda s, h: F.linear((h @ s.down) @ s.up, s.w @ s.wt @ s.w, s.b),
    "addmm": lambda s, h: _flat(h, lambda f: torch.addmm(s.b, f, s.wt)),
    "addmm with factors": lambda s, h: _flat(h, lambda f: torch.addmm(s.b, f, s.wt, alpha=0.5, beta=2.0)),
    "bmm": lambda s, h: torch.bmm(h.flatten(1, -2), s.wt.expand(h.shape[0], -1, -1)).reshape(*h.shape[:-1], -1) + s.b,
    "baddbmm": lambda s, h: torch.baddbmm(s.b, h.flatten(1, -2), s.wt.expand(h.shape[0], -1, -1)).reshape(*h.shape[:-1], -1),
    "conv": lambda s, h: _tokens(h, lambda t: F.conv1d(t, s.w[..., None], s.b)),
    "conv of 3": lambda s, h: _tokens(h, lambda t: F.conv1d(t, s.w3, s.b, padding=1)),
    "causal conv": lambda s, h: _tokens(h, lambda t: F.conv1d(F.pad(t, (2, 0)), s.w3, s.b)),
    "grouped conv": lambda s, h: _tokens(h, lambda t: F.conv1d(t, s.w[:, : h.shape[-1] // 2, None], s.b, groups=2)),
    "depthwise first": lambda s, h: F.linear(_tokens(h, lambda t: F.conv1d(t, s.deep, s.low, padding=1, groups=t.shape[1])), s.w, s.b),
    "halves of outputs": lambda s, h: torch.cat([F.linear(h, w, b) for w, b in zip(s.w.chunk(2), s.b.chunk(2), strict=True)], -1),
    "halves of inputs": lambda s, h: sum(F.linear(x, w) for x, w in zip(h.chunk(2, -1), s.w.chunk(2, 1), strict=True)) + s.b,
    "blocks": lambda s, h: torch.cat([F.linear(x, w) for x, w in zip(h.chunk(2, -1), s.blocks, strict=True)], -1) + s.b,
    "block einsum": lambda s, h: torch.einsum("...gi,goi->...go", h.unflatten(-1, (2, -1)), s.blocks).flatten(-2) + s.b,
    "experts": lambda s, h: torch.einsum("...i,eoi,...e->...o", h, s.experts, torch.softmax(h @ s.router, -1)),
    "bilinear": lambda s, h: F.bilinear(h, h, s.third, s.b),
    "sum of products": lambda s, h: (h[..., None, :] * s.w).sum(-1) + s.b,
    "weight of tokens": lambda s, h: F.linear(h, s.w + 0.1 * s.w.mean(), s.b),
    "row of a stack": lambda s, h: F.linear(h, s.stack[1], s.stack_b[1]),
    "from bfloat16": lambda s, h: F.linear(h, s.low_w.to(h.dtype), s.b),
    "from int8": lambda s, h: F.linear(h, s.ints.to(h.dtype) * s.out[:, None] * 0.02, s.b),
    "read twice": lambda s, h: F.linear(h, s.w, s.b) + F.linear(h.mean(-2, keepdim=True), s.w),
    "addmv": lambda s, h: F.linear(torch.cat([h, torch.ones_like(h[..., :1])], -1), torch.cat([s.w, s.b[:, None]], 1)),
}  # fmt: skip


def linear(c: Choices, i: int, o: int, axis: int = -1) -> nn.Module:
    """Return a linear map of `i` channels to `o`, with what is done to channels and tokens before and behind it."""
    before, behind = moved(c.at("before"), i), moved(c.at("behind"), o)
    halves = {"einsum heads", "halves of outputs", "blocks", "block einsum", "grouped conv"} if (i | o) % 2 else set()
    how = c.pick("linear", [name for name in LINEARS if name not in halves], 1.5)
    linear = nn.Linear(i, o)
    held = {
        "linear": linear, "w": matrix(o, i), "wt": nn.Parameter(matrix(o, i).T.contiguous()), "b": shift(o),
        "big": matrix(2 * o, i), "bb": shift(2 * o), "out": gain(o), "inp": gain(i), "down": matrix(i, 3),
        "up": matrix(3, o if how == "low rank" else i), "w3": matrix(o, i, 3), "deep": matrix(i, 1, 3), "low": shift(i),
        "blocks": matrix(2, o // 2, i // 2) if o % 2 == 0 == i % 2 else None, "experts": matrix(3, o, i), "router": matrix(i, 3),
        "third": matrix(o, i, i), "stack": matrix(3, o, i), "stack_b": shift(3, o),
        "low_w": nn.Parameter(matrix(o, i).data.bfloat16()), "ints": torch.randint(-20, 20, (o, i), dtype=torch.int8),
    }  # fmt: skip
    run = LINEARS[how]
    if axis == -1:
        return Piece(
            lambda s, h: behind(s.behind, run(s, before(s.before, h))), before=_moving(i), behind=_moving(o), **held
        )
    conv = c.pick("conv", CONVS)

    def over(s: Piece, h: Tensor) -> Tensor:
        h = before(s.before, h.movedim(axis, -1)).movedim(-1, axis)
        h = CONVS[conv](s, h) if h.dim() == 4 else run(s, h.movedim(axis, -1)).movedim(-1, axis)
        return behind(s.behind, h.movedim(axis, -1)).movedim(-1, axis)

    return Piece(over, before=_moving(i), behind=_moving(o), w33=matrix(o, i, 3, 3), deep2=matrix(i, 1, 3, 3), **held)


CONVS: dict[str, Run] = {
    "1x1": lambda s, h: F.conv2d(h, s.w[..., None, None], s.b),
    "3x3": lambda s, h: F.conv2d(h, s.w33, s.b, padding=1),
    "3x3 padded apart": lambda s, h: F.conv2d(F.pad(h, (1, 1, 1, 1)), s.w33, s.b),
    "3x3 padded with ones": lambda s, h: F.conv2d(F.pad(h, (1, 1, 1, 1), value=1.0), s.w33, s.b),
    "reflected": lambda s, h: F.conv2d(F.pad(h, (1, 1, 1, 1), mode="reflect"), s.w33, s.b),
    "depthwise": lambda s, h: F.conv2d(F.conv2d(h, s.deep2, s.low, padding=1, groups=h.shape[1]), s.w[..., None, None]),
    "linear": lambda s, h: F.linear(h.movedim(1, -1), s.w, s.b).movedim(-1, 1),
    "einsum": lambda s, h: torch.einsum("bchw,oc->bohw", h, s.w) + s.b[:, None, None],
    "matmul": lambda s, h: (s.w @ h.flatten(2)).unflatten(2, h.shape[2:]) + s.b[:, None, None],
    "tensordot": lambda s, h: torch.tensordot(s.w, h, ([1], [1])).movedim(1, 0),
    "grouped": lambda s, h: F.conv2d(h, s.w[:, : h.shape[1] // 2, None, None], s.b, groups=2),
}  # fmt: skip


# ---- what moves channels and tokens ----

MOVES: dict[str, Run] = {
    "as is": lambda s, h: h,
    "index_select": lambda s, h: h.index_select(-1, s.perm),
    "indexed": lambda s, h: h[..., s.perm],
    "flipped": lambda s, h: h.flip(-1),
    "rolled": lambda s, h: h.roll(1, -1),
    "padded and cut": lambda s, h: F.pad(h, (1, -1)),
    "last channel padded": lambda s, h: F.pad(h[..., :-1], (0, 1)),
    "last channel padded with 1": lambda s, h: F.pad(h[..., :-1], (0, 1), value=1.0),
    "halves swapped": lambda s, h: torch.cat([h[..., h.shape[-1] // 2 :], h[..., : h.shape[-1] // 2]], -1),
    "halves joined": lambda s, h: torch.cat(h.tensor_split(2, -1), -1),
    "half negated": lambda s, h: torch.cat([h[..., :2], -h[..., 2:]], -1),
    "shuffled": lambda s, h: h.unflatten(-1, (2, -1)).mT.flatten(-2) if h.shape[-1] % 2 == 0 else h,
    "heads": lambda s, h: h.unflatten(-1, (2, -1)).flatten(-2) if h.shape[-1] % 2 == 0 else h,
    "repeated": lambda s, h: h.repeat_interleave(2, dim=-1)[..., ::2],
    "tiled": lambda s, h: h.repeat(*[1] * (h.dim() - 1), 2)[..., h.shape[-1] :],
    "unbound": lambda s, h: torch.stack(h.unbind(-1), -1),
    "masked": lambda s, h: h * s.mask,
    "chosen": lambda s, h: torch.where(s.mask > 0, h, 0.0),
    "filled": lambda s, h: h.masked_fill(s.mask == 0, 1.0),
    "scaled": lambda s, h: h * 0.5,
    "negated": lambda s, h: -h,
    "divided": lambda s, h: h / s.v,
    "scaled per channel": lambda s, h: s.v * h,
    "shifted per channel": lambda s, h: h + s.u,
    "shifted": lambda s, h: h + 0.5,
    "subtracted from": lambda s, h: 1.0 - h,
    "rounded": lambda s, h: torch.div(h, 0.37, rounding_mode="floor"),
    "dropout": lambda s, h: F.dropout(h, 0.5, training=False),
    "cloned": lambda s, h: h.clone().contiguous(),
    "detached": lambda s, h: h.detach(),
    "there and back": lambda s, h: h.transpose(-1, -2).contiguous().transpose(-1, -2),
    "cast": lambda s, h: h.float().type_as(h),
    "expanded": lambda s, h: h[None].expand(2, *h.shape).mean(0),
    "softcapped": lambda s, h: 3 * torch.tanh(h / 3),
    "clamped": lambda s, h: h.clamp(-1, 1),
    "less its mean": lambda s, h: h - h.mean(-1, keepdim=True),
    "less its tokens' mean": lambda s, h: h - h.mean(-2, keepdim=True),
    "summed over tokens": lambda s, h: h.cumsum(-2),
    "tokens rolled": lambda s, h: h.roll(1, -2),
    "tokens flipped": lambda s, h: h.flip(-2),
    "tokens shifted": lambda s, h: F.pad(h, (0, 0, 1, -1)),
    "a token of ones": lambda s, h: F.pad(h, (0, 0, 1, 0), value=1.0)[..., :-1, :],
    "tokens repeated": lambda s, h: h.repeat_interleave(2, dim=-2)[..., ::2, :],
    "tokens masked": lambda s, h: h * (torch.arange(h.shape[-2]) % 3 > 0).to(h)[:, None],
    "tokens filled": lambda s, h: h.masked_fill((torch.arange(h.shape[-2]) % 3 == 0)[:, None], 0.3),
    "tokens gathered": lambda s, h: h.gather(-2, torch.zeros_like(h, dtype=torch.long)[..., :1, :].expand_as(h)),
    "token difference": lambda s, h: h - 0.5 * h.roll(1, -2),
    "gated by itself": lambda s, h: h * torch.sigmoid(h.mean(-1, keepdim=True)),
    "scattered": lambda s, h: torch.zeros_like(h).index_copy(-1, s.perm, h),
    "index_add": lambda s, h: torch.zeros_like(h).index_add(-1, s.perm, h),
    "set in place": lambda s, h: _set(h),
    "by linear": lambda s, h: h @ s.turn,
    "slices in turn": lambda s, h: torch.cat([h[..., 1:], h[..., :1]], -1),
    "strided": lambda s, h: torch.stack([h[..., ::2], h[..., 1::2]], -1).flatten(-2) if h.shape[-1] % 2 == 0 else h,
}  # fmt: skip


def _set(h: Tensor) -> Tensor:
    h = h.clone()
    h[..., 0] = 0.5
    return h


def _moving(width: int) -> Piece:
    """Return what the moves of `width` channels take."""
    turn = torch.linalg.qr(torch.randn(width, width)).Q
    perm, mask = torch.randperm(width), (torch.arange(width) % 3 > 0).float()
    return Piece(lambda s: s, perm=perm, mask=mask, v=gain(width), u=shift(width), turn=nn.Parameter(turn))


def moved(c: Choices, width: int) -> Callable[[Any, Tensor], Tensor]:
    """Return what moves, masks or scales the channels or tokens of a value; mostly nothing does."""
    how = c.pick("moved", MOVES)
    return MOVES[how]
