"""Branches of the nets made by hand: they attend, mix, route, or give the same whatever they read."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .norms import HIDDEN, TOKENS, WIDTH, Factory


class Attention(nn.Module):
    """Attend, optionally to another sequence, with norms of q and k, a norm before the output, a score bias."""

    def __init__(
        self,
        width: int = WIDTH,
        heads: int = 2,
        qk: Factory | None = None,
        inner: Factory | None = None,
        bias: bool = True,
        score: bool = False,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=bias) for _ in range(4))
        self.q_norm, self.k_norm = (qk(width // heads), qk(width // heads)) if qk else (None, None)
        self.inner = inner(width) if inner else None
        self.score = nn.Parameter(torch.randn(1, heads, TOKENS, TOKENS)) if score else None

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        other = x if other is None else other

        def split(y: Tensor) -> Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        q, k, v = split(self.q(x)), split(self.k(other)), split(self.v(other))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.score is not None:
            scores = q @ k.transpose(-1, -2) / (q.shape[-1] ** 0.5 * 0.7) + self.score
            y = torch.softmax(scores, -1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        y = y.transpose(1, 2).flatten(2)
        return self.o(self.inner(y) if self.inner is not None else y)


class Mlp(nn.Module):
    """Compute down(act(up(x))), optionally gated, with a norm before `down`, or GELU written out."""

    def __init__(
        self,
        width: int = WIDTH,
        hidden: int = HIDDEN,
        inner: Factory | None = None,
        gate: bool = False,
        bias: bool = True,
        written: bool = False,
    ) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=bias), nn.Linear(hidden, width, bias=bias)
        self.gate = nn.Linear(width, hidden, bias=bias) if gate else None
        self.inner = inner(hidden) if inner else None
        self.written = written

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.written:
            h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h.pow(3))))
        else:
            h = F.gelu(h)
        if self.gate is not None:
            h = h * F.silu(self.gate(x))
        return self.down(self.inner(h) if self.inner is not None else h)


class Constant(nn.Module):
    """Write vectors of mean zero and one RMS for every token, so that an output norm changes nothing but the gain.

    how: `angles` (cosines and sines, so that gradients flow) or `sign`. written: an orthogonal map that keeps the
    mean ends the branch, so that it has a writer; else the branch ends in the function itself.
    """

    def __init__(self, how: str = "angles", written: bool = True, scale: float = 0.5, width: int = WIDTH) -> None:
        super().__init__()
        self.how, self.scale = how, scale
        self.inp = nn.Linear(width, width // (4 if how == "angles" else 2))
        self.out = nn.Parameter(keeping_the_mean(width)) if written else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        half = torch.cat([h.cos(), h.sin()], -1) * 2**0.5 if self.how == "angles" else torch.sign(h + 1e-9)
        y = torch.cat([half, -half], -1) * self.scale
        return y if self.out is None else F.linear(y, self.out)


def keeping_the_mean(width: int) -> Tensor:
    """Return a random orthogonal matrix that maps vectors of mean zero to vectors of mean zero."""
    g = torch.Generator().manual_seed(width)
    start = torch.randn(width, width, generator=g, dtype=torch.float64)
    start[:, 0] = 1
    basis = torch.linalg.qr(start)[0]
    turn = torch.eye(width, dtype=torch.float64)
    turn[1:, 1:] = torch.linalg.qr(torch.randn(width - 1, width - 1, generator=g, dtype=torch.float64))[0]
    return (basis @ turn @ basis.T).float()


class Scan(nn.Module):
    """Mix tokens by a decaying sum with a skip D inside the branch, as Mamba does."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.inp, self.gate, self.out = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.D = nn.Parameter(torch.ones(width) * 0.7)

    def forward(self, x: Tensor) -> Tensor:
        u = F.silu(self.inp(x))
        y = torch.cumsum(u * torch.exp(-F.softplus(u)), 1) + u * self.D
        return self.out(y * F.silu(self.gate(x)))


class Route(nn.Module):
    """Send tokens to two of four experts, with a shared expert beside them."""

    def __init__(self, width: int = WIDTH, hidden: int = 16, experts: int = 4, shared: bool = True) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / hidden**0.5)
        self.shared = Mlp(width, hidden, gate=True) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        weight, pick = torch.topk(torch.softmax(self.router(x), -1), 2, -1)
        h = torch.einsum("btd,btkdh->btkh", x, self.up[pick])
        y = (torch.einsum("btkh,btkhd->btkd", F.silu(h), self.down[pick]) * weight[..., None]).sum(2)
        return y if self.shared is None else y + self.shared(x)


class MixTokens(nn.Module):
    """Mix tokens with one matrix for all channels (MLP-Mixer)."""

    def __init__(self, tokens: int = TOKENS, hidden: int = 10) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(tokens, hidden), nn.Linear(hidden, tokens)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x.transpose(1, 2)))).transpose(1, 2)
