"""Published designs with odd norms and odd trunks, written from their papers, each with its truth.

A design's truth is the placement of each block, the norms by kind, and how many values are normalised by no norm that
is known here: those are to be noted. `blocks` is None where no picture of blocks does the paper justice: then a refusal
or any picture will do, and nothing that is done to the net may be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .blocks import Image, Net, stack
from .branches import Attention, Mlp
from .nets import Case, _conditioned, _ids, _pixels, spell_out
from .norms import TOKENS, VOCAB, WIDTH, Factory, Power, layer, rms

Rule = Callable[[Any, Tensor], Tensor]


class RuleNorm(nn.Module):
    """Norm by a formula of a gain, a bias, a vector to project on, a slope and a shift."""

    def __init__(self, rule: Rule, width: int) -> None:
        super().__init__()
        self.rule, self.width = rule, width
        self.gain, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.vector = nn.Parameter(torch.randn(width) / width)
        self.slope, self.shift = nn.Parameter(torch.full((1,), 0.5)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.rule(self, x)


def ruled(rule: Rule) -> Factory:
    """Return a maker of norms by a formula."""
    return lambda width: RuleNorm(rule, width)


def root(x: Tensor, *dims: int) -> Tensor:
    """Return 1 / sqrt(mean x^2 + eps)."""
    return torch.rsqrt(x.pow(2).mean(dims or -1, keepdim=True) + 1e-6)


def _seed_gain(n: Any, x: Tensor) -> Tensor:
    gain: Tensor = torch.tanh(x @ n.vector)[..., None] * n.bias + n.gain
    return gain


def _by_group(n: Any, x: Tensor) -> Tensor:
    groups = x.unflatten(-1, (4, -1))
    return (groups * root(groups)).flatten(-2)


def _grouped_power(width: int) -> nn.Module:
    return nn.Sequential(RuleNorm(_by_group, width), Power(width))


def _crms(n: Any, x: Tensor) -> Tensor:
    return x * torch.rsqrt((x.square().sum(-1, True) + x.sum(-1, True).square()) / (n.width + 1) + 1e-5)


def _batch(width: int, kind: type[nn.Module] = nn.BatchNorm1d) -> Any:
    norm: Any = kind(width)
    with torch.no_grad():
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    return norm


class RepNorm(nn.Module):
    """Add the input, times a number, to its batch norm (SLAB's RepBN)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.batch, self.slope = _batch(width), nn.Parameter(torch.full((1,), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(1, 2)
        return (self.batch(y) + self.slope * y).transpose(1, 2)


TOKEN_NORMS: dict[str, tuple[Factory, str, bool]] = {
    "Derf": (ruled(lambda n, x: torch.erf(n.slope * x + n.shift) * n.gain + n.bias), "dynamic_erf", False),
    "DyT": (ruled(lambda n, x: torch.tanh(n.slope * x) * n.gain + n.bias), "dynamic_tanh", False),
    "SeeDNorm": (ruled(lambda n, x: _seed_gain(n, x) * (x * root(x))), "rms", False),
    "SeeDNorm, the gain first": (ruled(lambda n, x: _seed_gain(n, x) * x * root(x)), "rms", False),
    "CRMSNorm": (ruled(_crms), "crms", False),
    "LayerNorm of a fixed deviation": (
        ruled(lambda n, x: (x - x.mean(-1, True)) / 1.7 * n.gain + n.bias), "centered", False
    ),
    "LayerNorm of a huge eps": (lambda width: nn.LayerNorm(width, eps=1e12), "layer", False),
    "SimpleRMSNorm": (ruled(lambda n, x: F.normalize(x, dim=-1) * math.sqrt(n.width)), "l2", False),
    "Unified Normalization": (Power, "power", False),
    "RepBN": (RepNorm, "batch", False),
    "TaperNorm": (ruled(lambda n, x: n.gain * (0.5 * x * root(x) + 0.5 * n.slope * x)), "", True),
}  # fmt: skip
"""Norms of tokens, each with its kind, or with whether it is none that is known."""
NONE = [TOKEN_NORMS[name][0] for name in ("LayerNorm of a fixed deviation", "LayerNorm of a huge eps")]
"""What is written as a norm and is none."""


class Maps(nn.Module):
    """Convolve twice behind a norm each (a pre-activation block)."""

    def __init__(self, norm: Factory, conv: type[nn.Conv2d] = nn.Conv2d) -> None:
        super().__init__()
        self.one, self.two = norm(WIDTH), norm(WIDTH)
        self.up, self.down = (conv(WIDTH, WIDTH, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.two(self.up(F.relu(self.one(x))))))


def _evo(n: Any, x: Tensor, size: Tensor, value: Tensor) -> Tensor:
    gain, bias = n.gain[:, None, None], n.bias[:, None, None]
    return value / size * gain + bias


def _evo_s0(n: Any, x: Tensor) -> Tensor:
    groups = x.unflatten(1, (4, -1))
    size = (groups.var((2, 3, 4), unbiased=False, keepdim=True) + 1e-5).sqrt().expand_as(groups).flatten(1, 2)
    return _evo(n, x, size, x * torch.sigmoid(n.vector[:, None, None] * x))


def _evo_b0(n: Any, x: Tensor) -> Tensor:
    size = (x.var((2, 3), unbiased=False, keepdim=True) + 1e-5).sqrt()
    return _evo(n, x, torch.maximum((n.shift.abs() + 1).sqrt(), n.vector[:, None, None] * x + size), x)


def _region(n: Any, x: Tensor) -> Tensor:
    mask = (x.mean(1, keepdim=True) > 0).to(x.dtype)  # an inpainting net gets it from outside

    def part(m: Tensor) -> Tensor:
        count = m.sum((2, 3), keepdim=True).clamp(min=1)
        centred = x - (x * m).sum((2, 3), keepdim=True) / count
        return centred / ((centred * m).square().sum((2, 3), keepdim=True) / count + 1e-5).sqrt() * m

    return (part(mask) + part(1 - mask)) * n.gain[:, None, None] + n.bias[:, None, None]


def _response(n: Any, x: Tensor) -> Tensor:
    size = x.norm(dim=(2, 3), keepdim=True)
    return x * (size / (size.mean(1, keepdim=True) + 1e-6)) * n.gain[:, None, None] + n.bias[:, None, None] + x


class Standardised(nn.Conv2d):
    """Convolve with weights scaled to one variance (NFNet)."""

    def forward(self, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(self.weight, (1, 2, 3), keepdim=True)
        weight = (self.weight - mean) * torch.rsqrt(torch.clamp(var * self.weight[0].numel(), min=1e-4))
        return F.conv2d(x, weight, self.bias, padding=1)


class Passed(nn.Module):
    """Scale the state after each sum by what its own gradient does not see (GPAS)."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.norm, self.branch, self.slope = rms(WIDTH), branch, nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.branch(self.norm(x))
        return x - F.silu(self.slope) * x.detach()


class Weighed(nn.Module):
    """Multiply the skip by a learned factor, a number (NormFormer) or a vector (Admin)."""

    def __init__(self, branch: nn.Module, size: int, out: Factory | None = None, post: Factory | None = None) -> None:
        super().__init__()
        self.branch, self.factor = branch, nn.Parameter(torch.rand(size) + 0.6)
        self.inn, self.out, self.post = (f(WIDTH) if f else nn.Identity() for f in (None if post else layer, out, post))

    def forward(self, x: Tensor) -> Tensor:
        return self.post(self.factor * x + self.out(self.branch(self.inn(x))))


class Sums(nn.Module):
    """Read a mixture of all earlier states, by weights that `mix` makes: of parameters, or of the state."""

    def __init__(self, mix: Callable[[Any, int, list[Tensor]], list[Tensor]], blocks: list[nn.Module]) -> None:
        super().__init__()
        self.mix, self.blocks = mix, nn.ModuleList(blocks)
        self.weights = nn.ParameterList(nn.Parameter(torch.rand(i + 2) + 0.5) for i in range(len(self.blocks)))
        self.router, self.norm = nn.Linear(WIDTH, len(self.blocks) + 1), rms(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        states = [x]
        for i, block in enumerate(self.blocks):
            states.append(block(x))
            x = torch.stack([w * s for w, s in zip(self.mix(self, i, states), states, strict=False)]).sum(0)
        return x


def _stored(n: Any, i: int, states: list[Tensor]) -> list[Tensor]:
    return list(n.weights[i])


def _shares(n: Any, i: int, states: list[Tensor]) -> list[Tensor]:
    return list(torch.softmax(n.weights[i], 0))


class Stacked(nn.Module):
    """Carry on a mixture of all states, put side by side, by stored weights or by weights that the state gives."""

    def __init__(self, blocks: list[nn.Module], routed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.weights = nn.ParameterList(nn.Parameter(torch.rand(i + 2) + 0.5) for i in range(len(blocks)))
        self.routers = nn.ModuleList(nn.Linear(WIDTH, i + 2) for i in range(len(blocks))) if routed else None

    def forward(self, x: Tensor) -> Tensor:
        states = [x]
        for i, block in enumerate(self.blocks):
            states.append(block(x))
            if self.routers:
                x = torch.einsum("btl,lbtd->btd", self.routers[i](states[-1]), torch.stack(states))
            else:
                x = torch.tensordot(self.weights[i], torch.stack(states), 1)
        return x


class Shares(nn.Module):
    """Read a mixture of the outputs of all earlier layers, each normed, by stored shares (ELC-BERT)."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.attentions, self.mlps = (nn.ModuleList(make() for _ in range(layers)) for make in (Attention, Mlp))
        self.norms = nn.ModuleList(layer(WIDTH) for _ in range(2 * layers))
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(i + 1)) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        states = [x]
        for i, weights in enumerate(self.weights):
            shares = torch.softmax(weights, 0)
            x = sum(share * state for share, state in zip(shares, states, strict=True))  # type: ignore[assignment]
            x = x + self.norms[2 * i](self.attentions[i](x))
            states.append(self.norms[2 * i + 1](self.mlps[i](x)))
        return states[-1]


def _routed(n: Any, i: int, states: list[Tensor]) -> list[Tensor]:
    weights: Tensor = n.router(n.norm(states[-1]))
    return list(weights.split(1, -1))


class Copies(nn.Module):
    """Keep copies of the stream that parameters mix (static hyper-connections)."""

    def __init__(self, branches: list[nn.Module], copies: int = 3) -> None:
        super().__init__()
        self.branches, self.norms = nn.ModuleList(branches), nn.ModuleList(rms(WIDTH) for _ in branches)
        self.copies = copies
        shapes = ((copies,), (copies, copies), (copies, 1))
        self.mixes = nn.ParameterList(nn.Parameter(torch.rand(s)) for _ in branches for s in shapes)

    def forward(self, x: Tensor) -> Tensor:
        held = x.unsqueeze(2).repeat(1, 1, self.copies, 1)
        for i, (branch, norm) in enumerate(zip(self.branches, self.norms, strict=True)):
            read, carry, write = self.mixes[3 * i : 3 * i + 3]
            value = branch(norm(torch.einsum("n,btnd->btd", read, held)))
            held = torch.einsum("mn,btnd->btmd", carry, held) + write * value.unsqueeze(2)
        return held.sum(2)


class Attended(nn.Module):
    """Read earlier outputs by a softmax over them (attention residuals)."""

    def __init__(self, branches: list[nn.Module]) -> None:
        super().__init__()
        self.branches, self.norm = nn.ModuleList(branches), rms(WIDTH)
        self.queries = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(len(branches) + 1))

    def forward(self, x: Tensor) -> Tensor:
        states = [x]
        for query, branch in zip(self.queries, [*self.branches, None], strict=True):
            held = torch.stack(states, 2)
            mixed = (torch.softmax(self.norm(held) @ query, -1).unsqueeze(-1) * held).sum(2)
            if branch is None:
                return mixed
            states.append(branch(mixed))
        raise AssertionError


class Spherical(nn.Module):
    """Step on the sphere towards the branch's direction (nGPT)."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch, self.step = branch, nn.Parameter(torch.full((WIDTH,), 0.2))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x + self.step * (F.normalize(self.branch(x), dim=-1) - x), dim=-1)


class Gated(nn.Module):
    """Mix the state and the branch by a gate that both give (GTrXL)."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.norm, self.branch, self.gate = layer(WIDTH), branch, nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.branch(self.norm(x)))
        gate = torch.sigmoid(self.gate(torch.cat([x, y], -1)))
        return (1 - gate) * x + gate * y


class Recurrent(nn.Module):
    """Norm what enters each step of a recurrent net (layer normalisation as it was published)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.inp, self.state, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), layer(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x, state = self.embedding(ids), torch.zeros(1)
        for token in range(TOKENS):
            state = torch.tanh(self.norm(self.inp(x[:, token]) + (self.state(state) if token else 0)))
        return self.head(state)


class Timed(nn.Module):
    """Mix two stored gains and two stored biases by the time (DiMR's TD-LN)."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch, self.time = branch, nn.Parameter(torch.rand(2))
        self.held = nn.ParameterList(nn.Parameter(torch.rand(WIDTH)) for _ in range(4))

    def forward(self, x: Tensor, when: Tensor) -> Tensor:
        part = torch.sigmoid(self.time[0] * when.mean(-1) + self.time[1])[:, None, None]
        gain, other, bias, last = self.held
        normed = F.layer_norm(x, (WIDTH,)) * (part * gain + (1 - part) * other)
        return x + self.branch(normed + part * bias + (1 - part) * last)


class Conditioned(nn.Module):
    """Run layers that read a condition too."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.inp, self.layers, self.head = nn.Linear(5, WIDTH), nn.ModuleList(layers), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        x = self.inp(x)
        for inner in self.layers:
            x = inner(x, condition)
        return self.head(x)


# ---- the designs ----


@dataclass(frozen=True)
class Design(Case):
    """Hold a net with its truth: norms by kind, and `noted` values that no known norm normalises."""

    blocks: str | None = None  # type: ignore[assignment]
    norms: dict[str, int] = field(default_factory=dict)
    noted: int = 0

    @property
    def truth(self) -> list[str]:
        """Return the placements in execution order."""
        return spell_out(self.blocks or "")


def _branches() -> list[nn.Module]:
    return [Attention(), Mlp(), Attention(), Mlp()]


def _token(norm: Factory, kind: str, noted: bool) -> Design:
    net, placed = lambda: Net(*stack(inn=norm), final=norm), "none*4" if norm in NONE else "pre*4"
    return Design(net, placed, norms={} if noted else {kind: 5}, noted=5 * noted)


def _maps(rule: Rule, noted: int) -> Design:
    norms = {"layer": 1}
    return Design(lambda: Image(Maps(ruled(rule)), Maps(ruled(rule))), "pre*2", _pixels, norms=norms, noted=noted)


def _image(norm: Factory, conv: type[nn.Conv2d] = nn.Conv2d) -> Callable[[], nn.Module]:
    return lambda: Image(Maps(norm, conv), Maps(norm, conv))


def _channel_norms(width: int) -> nn.Module:
    batch = nn.BatchNorm2d(width)
    with torch.no_grad():
        batch.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    return nn.Sequential(batch, nn.GroupNorm(4, width))


def _mixtures(mix: Any) -> Callable[[], nn.Module]:
    return lambda: Net(Sums(mix, stack(1, inn=rms)), final=rms)


DESIGNS: dict[str, Design] = {name: _token(*row) for name, row in TOKEN_NORMS.items()} | {
    "PowerNorm": Design(lambda: Net(*stack(post=Power)), "post*4", norms={"power": 4}),
    "PowerNorm with group scaling": Design(
        lambda: Net(*stack(post=_grouped_power)), "post*4", norms={"power": 4, "rms": 4}
    ),
    "EvoNorm-B0": _maps(_evo_b0, 4),
    "EvoNorm-S0": _maps(_evo_s0, 4),
    "Region Norm": _maps(_region, 8),
    "Global Response Norm": _maps(_response, 4),
    "batch-channel norm": Design(
        _image(_channel_norms, Standardised), None, _pixels,
        norms={"batch": 4, "group": 4, "layer": 1, "weight_standardised": 4},
    ),
    "NFNet": Design(_image(nn.Identity, Standardised), "none*2", _pixels, norms={"layer": 1, "weight_standardised": 4}),
    "GPAS": Design(lambda: Net(*(Passed(b) for b in _branches()), final=rms), "pre*4", norms={"rms": 5}),
    "Admin": Design(lambda: Net(*(Weighed(b, WIDTH, post=layer) for b in _branches())), "post*4", norms={"layer": 4}),
    "NormFormer with ResScale": Design(
        lambda: Net(
            Weighed(Attention(), WIDTH, out=layer), Weighed(Mlp(inner=layer), WIDTH),
            Weighed(Attention(), WIDTH, out=layer), Weighed(Mlp(inner=layer), WIDTH), final=layer,
        ),
        "peri pre peri pre", norms={"layer": 9},
    ),
    "lambdas on the skips": Design(
        lambda: Net(*(Weighed(b, 1) for b in _branches()), final=layer), "pre*4", norms={"layer": 5}
    ),
    "DenseFormer": Design(_mixtures(_stored), "pre*2", norms={"rms": 3}),
    "ELC-BERT": Design(_mixtures(_shares), "pre*2", norms={"rms": 3}),
    "ELC-BERT, normed at its ends": Design(lambda: Net(Shares()), "", norms={"layer": 6}),
    "DenseFormer over a stack": Design(lambda: Net(Stacked(stack(2, inn=rms), False), final=rms), "", norms={"rms": 5}),
    "MUDDFormer": Design(_mixtures(_routed), "", norms={"rms": 5}),
    "MUDDFormer over a stack": Design(lambda: Net(Stacked(stack(2, inn=rms), True), final=rms), "", norms={"rms": 5}),
    "static hyper-connections": Design(lambda: Net(Copies(_branches()), final=rms), "", norms={"rms": 5}),
    "attention residuals": Design(lambda: Net(Attended(_branches()), final=rms), "", norms={"rms": 6}),
    "nGPT": Design(lambda: Net(*(Spherical(b) for b in _branches())), None, norms={"l2": 8}),
    "GTrXL": Design(lambda: Net(*(Gated(b) for b in _branches())), "", norms={"layer": 4}),
    "recurrent net": Design(Recurrent, "", _ids, norms={"layer": TOKENS}),
    "TD-LN": Design(lambda: Conditioned(*(Timed(b) for b in _branches())), "pre*4", _conditioned, norms={"layer": 4}),
}  # fmt: skip
