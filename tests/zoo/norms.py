"""Norms in every spelling, what only looks like them, and random gains and biases for any module.

`SPELLINGS` holds norms with what they compute, `WRONG` look-alikes that are none. `randomise` gives any module random
gains and biases: default-initialised weights hide every fold bug.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HIDDEN, TOKENS, VOCAB = 24, 40, 6, 17
Factory = Callable[[int], nn.Module]


def randomise(module: nn.Module, seed: int = 0) -> nn.Module:
    """Give norms gains of about 1 + 0.3 N and biases of 0.2 N, linears weights of a live scale and biases too.

    A parameter of a norm is added to: so 1 + w stays centred on one. Works for transformers' models as well.
    """
    g = torch.Generator().manual_seed(seed)
    done: set[int] = set()

    def noise(p: Tensor, scale: float) -> Tensor:
        return (torch.randn(p.shape, generator=g) * scale).to(p.dtype)

    with torch.no_grad():
        for inner in module.modules():
            norm = "norm" in type(inner).__name__.lower() and not list(inner.children())
            for name, p in inner.named_parameters(recurse=False):
                if id(p) in done or not p.is_floating_point():
                    continue
                if norm:
                    p.add_(noise(p, 0.2 if "bias" in name else 0.3))
                elif name == "bias" and p.dim() == 1:
                    p.add_(noise(p, 0.1))
                elif isinstance(inner, nn.Linear):
                    p.copy_(noise(p, 0.7 / math.sqrt(p.shape[1])))
                else:
                    continue
                done.add(id(p))
    return module


# ---- norms: every spelling of the same few functions ----


class Norm(nn.Module):
    """Hold a gain and, if asked, a bias; `spell` says how the norm is written."""

    def __init__(self, width: int, eps: float = 1e-5, gain: bool = True, bias: bool = False, zero: bool = False) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.zeros(width) if zero else torch.ones(width)) if gain else None
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def spelled(write: Callable[[Norm, Tensor], Tensor], name: str = "", **options: Any) -> Factory:
    """Make a norm class out of the formula that it computes."""
    kind = type("SpelledNorm" + name, (Norm,), {"forward": write})
    return lambda width: kind(width, **options)


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def _ln_written(n: Norm, x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    var = (x - mean).pow(2).mean(-1, keepdim=True)
    return n.weight * ((x - mean) / torch.sqrt(var + n.eps)) + n.bias


def _ln_var(n: Norm, x: Tensor) -> Tensor:
    return _centred(x) / (x.var(-1, unbiased=False, keepdim=True) + n.eps).sqrt() * n.weight + n.bias


def _ln_var_mean(n: Norm, x: Tensor) -> Tensor:
    var, mean = torch.var_mean(x, -1, unbiased=False, keepdim=True)
    return (x - mean) * torch.rsqrt(var + n.eps) * n.weight + n.bias


def _ln_moments(n: Norm, x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    var = (x * x).mean(-1, keepdim=True) - mean * mean
    return (x - mean) * torch.rsqrt(var + n.eps) * n.weight + n.bias


def _ln_fp32(n: Norm, x: Tensor) -> Tensor:
    return F.layer_norm(x.float(), (n.width,), None, None, n.eps).to(x.dtype) * n.weight + n.bias


def _rms_llama(n: Norm, x: Tensor) -> Tensor:
    y = x.to(torch.float32)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + n.eps)
    return n.weight * y.to(x.dtype)


def _rms_gemma(n: Norm, x: Tensor) -> Tensor:
    y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + n.eps)
    return (y * (1.0 + n.weight.float())).type_as(x)


def _rms_gain(gain: Callable[[Tensor], Tensor]) -> Callable[[Norm, Tensor], Tensor]:
    return lambda n, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + n.eps) * gain(n.weight)


def _std_unbiased(n: Norm, x: Tensor) -> Tensor:
    return n.weight * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + n.eps) + n.bias


def _std_mean(n: Norm, x: Tensor) -> Tensor:
    deviation, mean = torch.std_mean(x, -1, keepdim=True)
    return n.weight * (x - mean) / (deviation + n.eps) + n.bias


@dataclass(frozen=True)
class Spelling:
    """Hold how a norm is written and what it is."""

    make: Factory
    kind: str
    eps: float
    gamma: bool = True
    beta: bool = False
    plus_one: bool = False
    computed: bool = False


SPELLINGS: dict[str, Spelling] = {
    "nn.LayerNorm": Spelling(lambda w: nn.LayerNorm(w, 1e-6), "layer", 1e-6, beta=True),
    "nn.LayerNorm without bias": Spelling(lambda w: nn.LayerNorm(w, bias=False), "layer", 1e-5),
    "nn.LayerNorm weightless": Spelling(lambda w: nn.LayerNorm(w, elementwise_affine=False), "layer", 1e-5, False),
    "F.layer_norm, then gain and bias": Spelling(
        spelled(lambda n, x: F.layer_norm(x, (n.width,), eps=n.eps) * n.weight + n.bias, bias=True), "layer", 1e-5, beta=True),
    "layer norm of float32, cast back, gain": Spelling(spelled(_ln_fp32, bias=True), "layer", 1e-5, beta=True),
    "mean and variance written out": Spelling(spelled(_ln_written, bias=True, eps=1e-12), "layer", 1e-12, beta=True),
    "var(unbiased=False), recomputed difference": Spelling(spelled(_ln_var, bias=True), "layer", 1e-5, beta=True),
    "var_mean": Spelling(spelled(_ln_var_mean, bias=True), "layer", 1e-5, beta=True),
    "mean of squares less square of mean": Spelling(spelled(_ln_moments, bias=True), "layer", 1e-5, beta=True),
    "nn.RMSNorm": Spelling(lambda w: nn.RMSNorm(w, 1e-6), "rms", 1e-6),
    "nn.RMSNorm without eps": Spelling(lambda w: nn.RMSNorm(w), "rms", 2**-23),
    "rms of float32, gain after the cast": Spelling(spelled(_rms_llama, eps=1e-6), "rms", 1e-6),
    "rms, 1 + weight before the cast": Spelling(spelled(_rms_gemma, eps=1e-6, zero=True), "rms", 1e-6, plus_one=True),
    "rms, weight + 1": Spelling(spelled(_rms_gain(lambda w: w + 1), zero=True), "rms", 1e-5, plus_one=True),
    "rms weightless": Spelling(
        spelled(lambda n, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + n.eps), gain=False), "rms", 1e-5, False),
    "rms, x*x summed over the width": Spelling(
        spelled(lambda n, x: x / torch.sqrt((x * x).sum(-1, keepdim=True) / n.width + n.eps) * n.weight), "rms", 1e-5),
    "rms, pow(-0.5)": Spelling(
        spelled(lambda n, x: n.weight * (x * torch.pow(x.pow(2).mean(-1, keepdim=True) + n.eps, -0.5))), "rms", 1e-5),
    "rms, square, sqrt, reciprocal": Spelling(
        spelled(lambda n, x: x * (x.square().mean(-1, keepdim=True) + n.eps).sqrt().reciprocal() * n.weight), "rms", 1e-5),
    "rms, 1 / sqrt": Spelling(
        spelled(lambda n, x: x * (1 / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + n.eps)) * n.weight), "rms", 1e-5),
    "rms, gain first": Spelling(
        spelled(lambda n, x: n.weight * x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + n.eps)), "rms", 1e-5),
    "rms, sigmoid gain": Spelling(spelled(_rms_gain(torch.sigmoid)), "rms", 1e-5, computed=True),
    "rms, exponential gain": Spelling(spelled(_rms_gain(torch.exp), zero=True), "rms", 1e-5, computed=True),
    "rms, F.normalize times sqrt(width)": Spelling(
        spelled(lambda n, x: F.normalize(x, dim=-1) * n.width**0.5 * n.weight), "l2", 1e-12),
    "l2, vector norm": Spelling(
        spelled(lambda n, x: x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + n.eps) * n.weight), "l2", 1e-5),
    "l2, x.norm()": Spelling(
        spelled(lambda n, x: n.weight * (x / x.norm(dim=-1, keepdim=True).clamp_min(n.eps))), "l2", 1e-5),
    "rms, squares by einsum": Spelling(
        spelled(lambda n, x: x * torch.rsqrt(torch.einsum("...d,...d->...", x, x)[..., None] / n.width + n.eps) * n.weight),
        "rms", 1e-5),
    "rms, vecdot": Spelling(
        spelled(lambda n, x: x * torch.rsqrt(torch.linalg.vecdot(x, x)[..., None] / n.width + n.eps) * n.weight), "rms", 1e-5),
    "rms, times itself": Spelling(
        spelled(lambda n, x: x / torch.sqrt((x[..., None, :] @ x[..., None])[..., 0] / n.width + n.eps) * n.weight), "rms", 1e-5),
    "rms, by logarithms": Spelling(
        spelled(lambda n, x: x * torch.exp(-0.5 * torch.log(x.pow(2).mean(-1, True) + n.eps)) * n.weight), "rms", 1e-5),
    "rms, mean square clamped": Spelling(
        spelled(lambda n, x: x * torch.rsqrt(x.pow(2).mean(-1, True).clamp_min(n.eps)) * n.weight), "l2", (WIDTH * 1e-5) ** 0.5),
    "std_mean": Spelling(spelled(_std_mean, bias=True, eps=1e-6), "std", 1e-6, beta=True),
    "std + eps, unbiased": Spelling(spelled(_std_unbiased, bias=True, eps=1e-6), "std", 1e-6, beta=True),
    "std + eps, biased": Spelling(
        spelled(lambda n, x: n.weight * _centred(x) / (x.std(-1, unbiased=False, keepdim=True) + n.eps) + n.bias, bias=True),
        "std", 1e-5, beta=True),
}  # fmt: skip

# Looks like a norm and is not one of layer and rms: read by nobody as either.
WRONG: dict[str, Factory] = {
    "rms clamped from above": spelled(
        lambda n, x: n.weight * x / (x.pow(2).mean(-1, keepdim=True) + n.eps).sqrt().clamp(max=50)),
    "rms of what is clamped": spelled(
        lambda n, x: n.weight * x * torch.rsqrt(x.clamp(-30, 30).pow(2).mean(-1, keepdim=True) + n.eps)),
    "layer norm clamped from above": spelled(
        lambda n, x: n.weight * _centred(x) / (_centred(x).pow(2).mean(-1, keepdim=True) + n.eps).sqrt().clamp(max=40)),
    "inverse root clamped from above": spelled(
        lambda n, x: n.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)).clamp(max=1e3)),
    "floor in a parameter": spelled(
        lambda n, x: (n.weight * x) / torch.maximum(x.pow(2).mean(-1, keepdim=True).sqrt(), n.bias[:1].abs() * 0 + 0.05), bias=True),
    "floor in a parameter, gain behind": spelled(
        lambda n, x: x / torch.maximum(x.pow(2).mean(-1, keepdim=True).sqrt(), n.bias[:1]) * n.weight, bias=True),
    "rms over the tokens": spelled(lambda n, x: n.weight * x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + n.eps)),
    "rms over tokens and channels": spelled(
        lambda n, x: n.weight * x * torch.rsqrt(x.pow(2).mean((1, 2), keepdim=True) + n.eps)),
    "rms with eps outside the root": spelled(
        lambda n, x: n.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + n.eps), eps=1e-3),
    "rms by the mean of |x|": spelled(
        lambda n, x: n.weight * x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + n.eps)),
    "rms with a cube root": spelled(
        lambda n, x: n.weight * x * torch.pow(x.pow(2).mean(-1, keepdim=True) + n.eps, -1 / 3)),
    "rms of another value": spelled(
        lambda n, x: n.weight * x * torch.rsqrt(x.tanh().pow(2).mean(-1, keepdim=True) + n.eps)),
    "rms by the sum": spelled(lambda n, x: n.weight * x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + n.eps)),
    "layer with the unbiased variance": spelled(
        lambda n, x: n.weight * _centred(x) * torch.rsqrt(x.var(-1, keepdim=True) + n.eps) + n.bias, bias=True),
    "layer without the centering above": spelled(
        lambda n, x: n.weight * x * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + n.eps)),
    "layer centred over the tokens": spelled(
        lambda n, x: n.weight * (x - x.mean(1, keepdim=True)) * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + n.eps)),
    "layer over half of the width": spelled(
        lambda n, x: n.weight * x * torch.rsqrt(x[..., : n.width // 2].pow(2).mean(-1, keepdim=True) + n.eps)),
}  # fmt: skip

layer: Factory = lambda width: nn.LayerNorm(width)  # noqa: E731
rms: Factory = SPELLINGS["rms of float32, gain after the cast"].make


class Power(nn.Module):
    """Divide by the root of stored second moments (PowerNorm)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running_phi", torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / torch.sqrt(self.running_phi + 1e-4) + self.bias


class WrittenBatch(nn.Module):
    """Write out a batch norm by its stored statistics."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.randn(width))
        self.register_buffer("var", torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) * torch.rsqrt(self.var + 1e-3) * self.weight + self.bias
