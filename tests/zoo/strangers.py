"""Residual nets in spellings that nobody planned for: what exact passes make of them computes the same, or is refused.

Each is one way in which a picture can be wrong about a net: a term of a sum that no writer is known of, a value that
somebody else reads, a bias that is computed, an operator that moves channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

W, H, IDS = 16, 24, 11
Branch = Callable[["Strange", int, Tensor], Tensor]


class Strange(nn.Module):
    """Add `write(i, h)` of h = act(read(i, norm(i, x))) to x, four times, behind an embedding, before a norm and a head.

    Every step may be given in another spelling; `extra` holds parameters that spellings ask for, by shape.
    """

    def __init__(
        self, norm: type[nn.Module] = nn.LayerNorm, extra: dict[str, tuple[int, ...]] | None = None, **how: Any
    ) -> None:
        super().__init__()
        self.embed, self.final, self.head = nn.Embedding(IDS, W), norm(W), nn.Linear(W, 5)
        self.norms = nn.ModuleList(norm(W) for _ in range(4))
        self.up, self.down = (nn.ModuleList(nn.Linear(a, b) for _ in range(4)) for a, b in ((W, H), (H, W)))
        for name, shape in (extra or {}).items():
            setattr(self, name, nn.Parameter(torch.empty(shape)))
        self.register_buffer("shift", torch.linspace(-1, 1, W))
        self.register_buffer("perm", torch.randperm(W, generator=torch.Generator().manual_seed(0)))
        self.how: dict[str, Callable[..., Any]] = how

    def step(self, name: str, default: Callable[..., Any], *given: Any) -> Any:
        return self.how[name](self, *given) if name in self.how else default(*given)

    def forward(self, ids: Tensor) -> Any:
        x, taps = self.step("embed", self.embed, ids), []
        for i in range(4):
            h = self.step("normed", lambda i, x: self.norms[i](x), i, x)
            h = self.step("read", lambda i, h: self.up[i](h), i, h)
            h = self.step("write", lambda i, h: self.down[i](h), i, torch.tanh(h))
            taps.append(h)
            x = self.step("add", lambda i, x, h, ids: x + h, i, x, h, ids)
        return self.step("end", lambda x, taps: self.head(self.final(x)), x, taps)


def written(norm: Any, x: Tensor) -> Tensor:
    """Return a LayerNorm written out."""
    d = x - x.mean(-1, keepdim=True)
    return d * torch.rsqrt(d.square().mean(-1, keepdim=True) + norm.eps) * norm.weight + norm.bias


def per_head(net: Any, x: Tensor) -> Tensor:
    """Return heads of four channels, each normalised by itself, all with one gain."""
    return F.rms_norm(x.unflatten(-1, (-1, 4)), (4,), net.gain, 1e-5)


def standardized(x: Tensor) -> Tensor:
    """Return a LayerNorm over axis 1 without gain, written out."""
    d = x - x.mean(1, keepdim=True)
    return d / torch.sqrt(d.square().mean(1, keepdim=True) + 1e-6)


class ChannelsFirst(nn.Module):
    """Norm the channels of an image, axis 1, as wide as the image; 1 x 1 convolutions read and write."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.stem, self.size = nn.Conv2d(3, W, 3, padding=1), size
        self.gains, self.shifts = (nn.ParameterList(torch.empty(W) for _ in range(3)) for _ in range(2))
        self.up, self.down = (nn.ModuleList(nn.Conv2d(a, b, 1) for _ in range(3)) for a, b in ((W, H), (H, W)))
        self.final, self.head = nn.Parameter(torch.empty(W)), nn.Conv2d(W, 5, 1)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.stem(pixels)
        for gain, shift, up, down in zip(self.gains, self.shifts, self.up, self.down, strict=True):
            x = x + down(torch.tanh(up(gain[:, None, None] * standardized(x) + shift[:, None, None])))
        return self.head(standardized(x) * self.final[:, None, None])


class Bare(nn.Module):
    """Let each branch be one linear, which reads the state and writes it; the one norm is before the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.final, self.head = nn.Embedding(IDS, W), nn.LayerNorm(W), nn.Linear(W, IDS)
        self.linears = nn.ModuleList(nn.Linear(W, W) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for linear in self.linears:
            x = (x + linear(x)) * 0.5**0.5
        return self.head(self.final(x))


class Padded(nn.Module):
    """Pad between a convolution and its batch norm, with zeros or ones, or turn the channels around."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.convs, self.norms = (nn.ModuleList(m for _ in range(3)) for m in (nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)))
        self.stem, self.between = nn.Conv2d(3, 8, 1), between
        for norm in self.norms:
            norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.stem(pixels)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + norm(self.between(conv(x)))[..., : x.shape[-2], : x.shape[-1]]
        return x


def _ids() -> Tensor:
    return torch.randint(IDS, (2, 6), generator=torch.Generator().manual_seed(1))


def _pixels(size: int = 8) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


def _net(**how: Any) -> Callable[[], tuple[nn.Module, Tensor]]:
    return lambda: (Strange(**how), _ids())


STRANGERS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "positions at each layer": _net(extra={"pos": (64, W)}, add=lambda n, i, x, h, ids: x + h + n.pos[: ids.shape[1]]),
    "a table at both ends of two stages": _net(
        extra={"e": (1, 1, W), "m": (W, W)}, embed=lambda n, ids: n.embed(ids) + n.e.expand(*ids.shape, -1),
        add=lambda n, i, x, h, ids: F.linear(x + h, n.m) + n.e.expand_as(x) if i == 1 else x + h),
    "a table at each layer": _net(extra={"table": (IDS, W)}, add=lambda n, i, x, h, ids: x + h + F.embedding(ids, n.table)),
    "a bias in the sum": _net(extra={"b": (4, W)}, add=lambda n, i, x, h, ids: x + h + n.b[i]),
    "an input of its own": _net(extra={"p": (IDS, W)}, add=lambda n, i, x, h, ids: (x + F.one_hot(ids, IDS).to(x) @ n.p) + h),
    "out norm written out": _net(add=lambda n, i, x, h, ids: x + written(n.norms[i], h)),
    "a branch is an output": _net(end=lambda n, x, taps: (n.head(n.final(x)), taps[1])),
    "a state is an output": _net(end=lambda n, x, taps: (n.head(n.final(x)), x)),
    "a branch feeds a loss": _net(end=lambda n, x, taps: (n.head(n.final(x)), taps[2].square().mean())),
    "norm bias computed": _net(
        extra={"g": (4, W), "b": (4, W)}, normed=lambda n, i, x: F.layer_norm(x, (W,), n.g[i], n.b[i] * 0.5)),
    "norm gain computed": _net(
        extra={"g": (4, W), "b": (4, W)}, normed=lambda n, i, x: F.layer_norm(x, (W,), n.g[i] * 1.5, n.b[i] + 1)),
    "writer bias halved": _net(write=lambda n, i, h: F.linear(h, n.down[i].weight, n.down[i].bias * 0.5)),
    "writer bias sliced": _net(extra={"c": (2 * W,)}, write=lambda n, i, h: F.linear(h, n.down[i].weight, n.c[W:])),
    "one bias of all layers, added": _net(
        read=lambda n, i, h: h @ n.up[i].weight.T + n.up[0].bias, write=lambda n, i, h: h @ n.down[i].weight.T + n.down[0].bias),
    "one writer, four biases": _net(extra={"c": (4, W)}, write=lambda n, i, h: F.linear(h, n.down[0].weight, n.c[i])),
    "frozen scales on a writer": _net(write=lambda n, i, h: F.linear(h, n.down[i].weight * 0.2, n.down[i].bias * 2)),
    "addmm of the skip": _net(add=lambda n, i, x, h, ids: torch.baddbmm(x, torch.tanh(n.up[i](x)), n.down[i].weight.T.expand(x.shape[0], -1, -1))),
    "addmm alpha and beta": _net(
        read=lambda n, i, h: torch.addmm(n.up[i].bias, h.flatten(0, 1), n.up[i].weight.T, alpha=0.5, beta=2.0).unflatten(0, h.shape[:2])),
    "embedding read raw": _net(embed=lambda n, ids: n.norms[0](n.embed(ids)) + 0.1 * n.embed(ids).sum(-1, keepdim=True)),
    "channels permuted before a linear": _net(read=lambda n, i, h: n.up[i](h.index_select(-1, n.perm))),
    "channels rolled behind a writer": _net(write=lambda n, i, h: n.down[i](h).roll(1, -1)),
    "channels flipped on the trunk": _net(add=lambda n, i, x, h, ids: x.flip(-1) + h),
    "channels padded and cut": _net(read=lambda n, i, h: n.up[i](F.pad(h, (1, -1)))),
    "tokens padded with ones": _net(write=lambda n, i, h: F.pad(n.down[i](h), (0, 0, 1, 0), value=1.0)[:, :-1]),
    "tokens repeated": _net(read=lambda n, i, h: n.up[i](h.repeat_interleave(2, dim=1)[:, ::2])),
    "channels repeated": _net(read=lambda n, i, h: F.linear(h.repeat_interleave(2, dim=-1), torch.cat([n.up[i].weight] * 2, -1))),
    "division rounded": _net(write=lambda n, i, h: torch.div(n.down[i](h), 0.37, rounding_mode="floor")),
    "slices of one weight": _net(extra={"w": (4 * H, W)}, read=lambda n, i, h: F.linear(h, n.w[i * H : (i + 1) * H])),
    "gain of one number": _net(
        extra={"a": (1,)}, normed=lambda n, i, x: x * torch.rsqrt(x.square().mean(-1, True) + 1e-5) * n.a.expand(W)),
    "norm bias in a buffer": _net(normed=lambda n, i, x: F.layer_norm(x, (W,), n.norms[i].weight, n.shift)),
    "experts by bmm": _net(
        extra={"e": (3, H, W)}, read=lambda n, i, h: torch.bmm(h.flatten(0, 1).expand(3, -1, -1), n.e.mT).sum(0).view(*h.shape[:2], H)),
    "a term of two sizes": _net(extra={"c": (W, W)}, add=lambda n, i, x, h, ids: x + h + F.linear(F.one_hot(ids[:, 0], W).to(x), n.c)[:, None]),
    "the state twice": _net(add=lambda n, i, x, h, ids: x + h + x),
    "two streams in one sum": _net(end=lambda n, x, taps: n.head(n.final(x + (taps[0] + n.down[1](torch.tanh(n.up[1](n.norms[1](taps[0])))))))),
    "learned skip": _net(extra={"s": (4,)}, add=lambda n, i, x, h, ids: n.s[i] * x + h),
    "channel scales on the skip": _net(extra={"s": (4, W)}, add=lambda n, i, x, h, ids: n.s[i] * x + h),
    "alpha in add": _net(add=lambda n, i, x, h, ids: torch.add(x, h, alpha=0.3)),
    "lerp": _net(add=lambda n, i, x, h, ids: torch.lerp(x, h, 0.25)),
    "subtraction": _net(add=lambda n, i, x, h, ids: x - h),
    "gathered tokens": _net(add=lambda n, i, x, h, ids: x + h.gather(1, ids[..., None].expand_as(h) % h.shape[1])),
    "each branch one linear": lambda: (Bare(), torch.randint(IDS, (2, 7))),
    "channels first": lambda: (ChannelsFirst(8), _pixels(8)),
    "channels first, as wide as the image": lambda: (ChannelsFirst(W), _pixels(W)),
    "padded before batch norm": lambda: (Padded(lambda x: F.pad(x, (1, 1, 1, 1))), _pixels()),
    "padded with ones before batch norm": lambda: (Padded(lambda x: F.pad(x, (1, 1, 1, 1), value=1.0)), _pixels()),
    "flipped before batch norm": lambda: (Padded(lambda x: x.flip(1)), _pixels()),
    "one norm for all heads at the end": _net(extra={"gain": (4,)}, end=lambda n, x, taps: n.head(per_head(n, x).flatten(-2))),
    "one norm for all heads on the trunk": _net(
        extra={"gain": (4,)}, normed=lambda n, i, x: x, add=lambda n, i, x, h, ids: per_head(n, x + h).flatten(-2)),
    "one norm for all heads in a branch": _net(
        extra={"gain": (4,)}, normed=lambda n, i, x: per_head(n, x).flatten(-2), write=lambda n, i, h: per_head(n, n.down[i](h)).flatten(-2)),
    "heads apart on the trunk, one norm for all at the end": _net(
        extra={"gain": (4,)}, embed=lambda n, ids: n.embed(ids).unflatten(-1, (4, 4)),
        normed=lambda n, i, x: F.rms_norm(x, (4,), n.gain).flatten(-2), write=lambda n, i, h: n.down[i](h).unflatten(-1, (4, 4)),
        end=lambda n, x, taps: n.head(n.final(x.flatten(-2)))),
}  # fmt: skip


def build(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a stranger with random weights, gains and biases, in eval mode, and its inputs."""
    torch.manual_seed(0)
    module, given = STRANGERS[name]()
    with torch.no_grad():
        for key, p in module.named_parameters():
            gain = "gain" in key or ("norm" in key or "final" in key) and "weight" in key
            p.normal_(float(gain), 0.3 if p.dim() < 2 else p.shape[-1] ** -0.5)
    return module.eval().to(dtype), (given.to(dtype) if given.is_floating_point() else given,)
