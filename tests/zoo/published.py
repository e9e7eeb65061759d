"""More published designs, whose norms or trunks the zoo's other nets do not have; `ALL` holds every one there is."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .blocks import Image, Net, Residual, stack
from .branches import Attention, Mlp
from .designs import DESIGNS, Design, Standardised, _batch
from .nets import DECOYS, NETS, REFUSED, _pixels, l2
from .norms import HIDDEN, SPELLINGS, TOKENS, VOCAB, WIDTH, Factory, Power, layer, rms

gemma: Factory = SPELLINGS["rms, 1 + weight before the cast"].make
weightless: Factory = SPELLINGS["nn.LayerNorm weightless"].make


class Turned(nn.Module):
    """Batch-norm the channels of tokens; `slope` times the input beside it, outside the transposes (SLAB's RepBN)."""

    def __init__(self, width: int, slope: bool = False) -> None:
        super().__init__()
        self.batch, self.slope = _batch(width), nn.Parameter(torch.full((1,), 0.7)) if slope else None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.batch(x.transpose(1, 2)).transpose(1, 2)
        return y if self.slope is None else y + self.slope * x


class Between(nn.Module):
    """Stand halfway between a layer norm and a RepBN (SLAB in the middle of its training)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = layer(width), Turned(width, slope=True)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = 0.5 * self.one(x) + 0.5 * self.two(x)
        return mixed


class Tapered(nn.Module):
    """Mix an RMSNorm with a number by a stored gate (TaperNorm); at 0 the norm is gone."""

    def __init__(self, width: int, gate: float = 0.0) -> None:
        super().__init__()
        self.weight, self.size = nn.Parameter(torch.rand(width) + 0.5), nn.Parameter(torch.tensor(0.8))
        self.register_buffer("gate", torch.tensor(gate))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.normed(x, torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        mixed: Tensor = self.weight * (normed + (1 - self.gate) * self.size * x)
        return mixed

    def normed(self, x: Tensor, by: Tensor) -> Tensor:
        return self.gate * (x * by)


class GateFirst(Tapered):
    """Multiply by the gate before the norm."""

    def normed(self, x: Tensor, by: Tensor) -> Tensor:
        return self.gate * x * by


class Bounded(nn.Module):
    """Divide a weight by its stored spectral norm (sigma-reparametrisation)."""

    def __init__(self, inp: int, out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(out, inp) / inp**0.5), nn.Parameter(torch.randn(out) * 0.1)
        self.gain = nn.Parameter(torch.full((1,), 1.3))
        self.register_buffer("u", F.normalize(torch.randn(out), dim=0))
        self.register_buffer("v", F.normalize(torch.randn(inp), dim=0))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.gain / torch.einsum("c,cd,d->", self.u, self.weight, self.v) * self.weight, self.bias)


def _bounded() -> nn.Module:
    attention = Attention()
    for name in "qkvo":
        setattr(attention, name, Bounded(WIDTH, WIDTH))
    return attention


class Nodes(nn.Module):
    """Attend over the nodes of one graph, [nodes, channels]."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.o(torch.softmax(self.q(x) @ self.k(x).T / WIDTH**0.5, -1) @ self.v(x))
        return y


class Chain(nn.Module):
    """Map floats to the stream, run layers, map to outputs."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.inp, self.layers, self.head = nn.Linear(5, WIDTH), nn.Sequential(*layers), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layers(self.inp(x)))
        return y


class Activated(nn.Module):
    """Add two convolutions with norms, and an activation behind the sum (ResNet)."""

    def __init__(self, conv: type[nn.Conv2d], norm: Factory) -> None:
        super().__init__()
        self.up, self.down = (conv(WIDTH, WIDTH, 3, padding=1) for _ in range(2))
        self.one, self.two = norm(WIDTH), norm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.two(self.down(F.relu(self.one(self.up(x))))))


class Before(nn.Module):
    """Norm and activate before each convolution (ResNet v2)."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (_batch(WIDTH, nn.BatchNorm2d) for _ in range(2))
        self.up, self.down = (nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.two(self.up(F.relu(self.one(x))))))


class Linearised(nn.Module):
    """Attend linearly, norm what comes out by its length, gate it (TransNormer)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.u, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.norm = l2(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed = (F.silu(self.q(x)) @ F.silu(self.k(x)).transpose(1, 2)).tril() @ self.v(x)
        y: Tensor = self.o(torch.sigmoid(self.u(x)) * self.norm(mixed))
        return y


class Galerkin(nn.Module):
    """Norm keys and values, and multiply without a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.one, self.two = layer(WIDTH), layer(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.one(self.k(x)).transpose(1, 2) @ self.two(self.v(x)) / TOKENS
        y: Tensor = self.o(self.q(x) @ keys)
        return y


class HeadScaled(Attention):
    """Multiply each head's output by a number (NormFormer)."""

    def __init__(self) -> None:
        super().__init__(inner=lambda width: Scaled(width))


class Scaled(nn.Module):
    """Multiply each run of channels by a number."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.rand(heads, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (x.unflatten(-1, (len(self.by), -1)) * self.by).flatten(-2)
        return y


class Read(nn.Module):
    """Multiply what a norm gives by a number (LayerNorm Scaling)."""

    def __init__(self, width: int, by: float) -> None:
        super().__init__()
        self.norm, self.by = rms(width), by

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        return y if self.by == 1 else y * self.by


def _depth_scaled() -> nn.Module:
    def at(depth: int) -> Factory:
        return lambda width: Read(width, 1 / math.sqrt(depth + 1))

    blocks = ((Residual(Attention(), inn=at(i)), Residual(Mlp(), inn=at(i))) for i in range(3))
    return Net(*chain(*blocks), final=rms)


class Exits(nn.Module):
    """Leave behind each layer through one norm and one head (LayerSkip)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(stack(2, inn=rms))
        self.norm, self.head = rms(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        x, found = self.embedding(ids), []
        for i, inner in enumerate(self.layers):
            x = inner(x)
            found += [self.head(self.norm(x))] if i % 2 else []
        return tuple(found)


class Earlier(nn.Module):
    """Take keys and values from a mixture of the norms of all earlier states (LIMe)."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.attention = nn.ModuleList(Attention() for _ in range(layers))
        self.mlp = nn.ModuleList(Mlp() for _ in range(layers))
        self.one, self.two = (nn.ModuleList(rms(WIDTH) for _ in range(layers)) for _ in range(2))
        self.routes = nn.ParameterList(nn.Parameter(torch.rand(i + 1)) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        read: list[Tensor] = []
        for i, route in enumerate(self.routes):
            read.append(self.one[i](x))
            mixed = torch.stack([w * r for w, r in zip(route, read, strict=True)]).sum(0)
            x = x + self.attention[i](read[-1], mixed)
            x = x + self.mlp[i](self.two[i](x))
        return x


class FirstValues(nn.Module):
    """Mix every layer's values with the first layer's (value residual)."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.norms = nn.ModuleList(rms(WIDTH) for _ in range(layers))
        self.q, self.v, self.o = (nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor | None = None
        for norm, q, v, o in zip(self.norms, self.q, self.v, self.o, strict=True):
            read = norm(x)
            value = v(read)
            first = value if first is None else first
            x = x + o(torch.softmax(q(read) @ read.transpose(1, 2), -1) @ (0.5 * value + 0.5 * first))
        return x


class Universal(nn.Module):
    """Norm what chooses alone, apply one layer twice (MoEUT's peri-layernorm)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.one, self.two = Attention(), layer(WIDTH), layer(WIDTH)
        self.router, self.up = nn.Linear(WIDTH, 3), nn.Parameter(torch.randn(3, WIDTH, HIDDEN) * 0.1)
        self.down = nn.Parameter(torch.randn(3, HIDDEN, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.attention(self.one(x), x)
            gate, h = torch.sigmoid(self.router(self.two(x))), torch.einsum("btd,edf->btef", x, self.up)
            x = x + torch.einsum("btef,efd,bte->btd", F.relu(h), self.down, gate)
        return x


class Wide(nn.Module):
    """Share the branches over layers, norms apart (WideNet)."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), Mlp()
        self.one, self.two = (nn.ModuleList(layer(WIDTH) for _ in range(layers)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for one, two in zip(self.one, self.two, strict=True):
            x = x + self.attention(one(x))
            x = x + self.mlp(two(x))
        return x


class Branches(nn.Module):
    """Merge two branches, each behind a norm, by one map (Branchformer)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp, self.one, self.two = Attention(), Mlp(), layer(WIDTH), layer(WIDTH)
        self.merge = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.merge(torch.cat([self.attention(self.one(x)), self.mlp(self.two(x))], -1))
        return x + y


class Latents(nn.Module):
    """Let stored latents attend to the tokens, then to each other (Perceiver)."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.latents, self.tokens = nn.Parameter(torch.randn(TOKENS - 2, WIDTH)), nn.Linear(WIDTH, 12)
        self.q, self.k, self.v, self.o = (nn.Linear(w, WIDTH) for w in (WIDTH, 12, 12, WIDTH))
        self.one, self.two, self.layers = layer(WIDTH), layer(12), nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        first, h = self.latents.expand(len(x), -1, -1), self.two(self.tokens(x))
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (self.q(self.one(first)), self.k(h), self.v(h)))
        y: Tensor = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        z: Tensor = self.layers(first + self.o(y))
        return z


class Linked(nn.Module):
    """Multiply the skip by a learned number and add the embedding times another (nanochat, modded-nanogpt)."""

    def __init__(self, branches: list[nn.Module]) -> None:
        super().__init__()
        self.branches, self.norms = nn.ModuleList(branches), nn.ModuleList(rms(WIDTH) for _ in branches)
        self.skip, self.link = (nn.Parameter(torch.rand(len(branches)) + 0.5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for i, (branch, norm) in enumerate(zip(self.branches, self.norms, strict=True)):
            x = self.skip[i] * x + self.link[i] * first
            x = x + branch(norm(x))
        return x


class Shaped(nn.Module):
    """Add what the first half of the blocks gave to the second half, times learned numbers (modded-nanogpt, U-ViT)."""

    def __init__(self, branches: list[nn.Module]) -> None:
        super().__init__()
        self.branches, self.norms = nn.ModuleList(branches), nn.ModuleList(layer(WIDTH) for _ in branches)
        self.link = nn.Parameter(torch.rand(len(branches)))

    def forward(self, x: Tensor) -> Tensor:
        kept, half = list[Tensor](), len(self.branches) // 2
        for i, (branch, norm) in enumerate(zip(self.branches, self.norms, strict=True)):
            x = x + self.link[i] * kept.pop() if i > half else x
            x = x + branch(norm(x))
            kept += [x] if i < half else []
        return x


class Adapted(nn.Module):
    """End the branch in a small residual net of its own (Houlsby's adapters), beside a skip times a number."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.branch, self.down, self.up = layer(WIDTH), Mlp(), nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.branch(self.norm(x))
        return 1.7 * x + (y + self.up(torch.relu(self.down(y))))


class Gained(nn.Module):
    """Multiply the branch by a learned number that starts at 0 (ReZero)."""

    def __init__(self, branch: nn.Module, by: float) -> None:
        super().__init__()
        self.branch, self.gain = branch, nn.Parameter(torch.tensor(by))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.branch(x)


def _pre(norm: Factory) -> Callable[[], nn.Module]:
    return lambda: Net(*stack(inn=norm), final=norm)


def _normformer() -> nn.Module:
    layers = ((Residual(HeadScaled(), inn=layer, out=layer), Residual(Mlp(inner=layer), inn=layer)) for _ in range(2))
    return Net(*chain(*layers), final=layer)


def _four(make: Callable[[nn.Module], nn.Module], attention: Callable[[], nn.Module] = Attention) -> list[nn.Module]:
    return [make(attention() if i % 2 == 0 else Mlp()) for i in range(4)]


def _nodes() -> nn.Module:
    return Chain(*(Residual(b, post=_batch) for b in (Nodes(), Mlp(), Nodes(), Mlp())))


PUBLISHED: dict[str, Design] = {
    "LayerNorm Scaling": Design(_depth_scaled, "pre*6", norms={"rms": 7}),
    "NormFormer": Design(_normformer, "peri pre peri pre", norms={"layer": 9}),
    "PowerNorm, pre": Design(_pre(Power), "pre*4", norms={"power": 5}),
    "RepBN, the slope outside": Design(_pre(lambda w: Turned(w, True)), "pre*4", norms={"batch": 5}),
    "PRepBN": Design(_pre(Between), None, norms={"layer": 5, "batch": 5}),
    "batch norm on both sides": Design(
        lambda: Net(*stack(inn=Turned, out=Turned), final=Turned), "peri*4", norms={"batch": 9}
    ),
    "batch norm in a graph transformer": Design(_nodes, "post*4", lambda: (torch.randn(9, 5),), norms={"batch": 4}),
    "batch norm behind sums of tokens": Design(lambda: Net(*stack(post=Turned)), "post*4", norms={"batch": 4}),
    "sigma-reparametrisation": Design(
        lambda: Net(*_four(lambda b: Residual(b, inn=rms), _bounded), final=rms), "pre*4", norms={"rms": 5}
    ),
    "sigma-reparametrisation, post": Design(
        lambda: Net(*_four(lambda b: Residual(b, post=layer), _bounded)), "post*4", norms={"layer": 4}
    ),
    "weight standardisation": Design(
        lambda: Image(*(Activated(Standardised, lambda w: nn.GroupNorm(4, w)) for _ in range(2))), "output*2", _pixels,
        norms={"group": 4, "layer": 1, "weight_standardised": 4},
    ),
    "pre-activation ResNet": Design(
        lambda: Image(Before(), Before()), "pre*2", _pixels, norms={"batch": 4, "layer": 1}
    ),
    "TransNormer": Design(
        lambda: Net(*_four(lambda b: Residual(b, inn=l2), Linearised), final=l2), "pre*4", norms={"l2": 7}
    ),
    "TaperNorm at its end": Design(_pre(Tapered), None, norms={"rms": 5}),
    "TaperNorm at its end, the gate first": Design(_pre(GateFirst), "pre*4", norms={"rms": 5}),
    "TaperNorm, the gate first": Design(_pre(lambda w: GateFirst(w, 0.5)), "pre*4", norms={"rms": 5}),
    "LayerSkip": Design(Exits, "pre*4", norms={"rms": 6}),
    "LIMe": Design(lambda: Net(Earlier(), final=rms), "pre*4", norms={"rms": 5}),
    "value residual": Design(lambda: Net(FirstValues(), final=rms), "pre*3", norms={"rms": 4}),
    "Galerkin": Design(
        lambda: Net(*_four(Residual, Galerkin)), "none*4", norms={"layer": 4}
    ),
    "MoEUT": Design(lambda: Net(Universal(), final=layer), "pre*4", norms={"layer": 5}),
    "WideNet": Design(lambda: Net(Wide(), final=layer), "pre*6", norms={"layer": 7}),
    "ReZero": Design(lambda: Net(*_four(lambda b: Gained(b, 0.3))), "none*4"),
    "Branchformer": Design(lambda: Net(Branches(), Branches(), final=layer), "pre*2", norms={"layer": 5}),
    "latents that attend to the tokens (Perceiver)": Design(
        lambda: Net(Latents(stack(inn=layer)), final=layer), "pre*5", norms={"layer": 7}
    ),
    "links to the embedding": Design(
        lambda: Net(Linked([Attention(), Mlp()] * 2), final=rms), "pre*4", norms={"rms": 5}
    ),
    "serial adapters": Design(lambda: Net(*(Adapted() for _ in range(3)), final=layer), "pre*3", norms={"layer": 4}),
    "skips of a U": Design(lambda: Net(Shaped([Attention(), Mlp()] * 3), final=layer), "pre*6", norms={"layer": 7}),
    "1 + w": Design(_pre(gemma), "pre*4", norms={"rms": 5}),
    "weightless norms": Design(_pre(weightless), "pre*4", norms={"layer": 5}),
}  # fmt: skip

PLAIN = (
    "pre", "post", "peri", "output", "mixed (Mix-LN)", "hybrid", "keel", "deepnorm", "layer scale",
    "residual multiplier", "norm in the branch (Sub-LN)", "adaLN", "none", "q and k norms", "hyper-connections",
    "second skip (B2T)", "residual and normed stream (ResiDual)",
)  # fmt: skip
ALL: dict[str, Any] = {name: (NETS | DECOYS | REFUSED)[name] for name in PLAIN} | DESIGNS | PUBLISHED
"""Every published design: plain ones too."""
