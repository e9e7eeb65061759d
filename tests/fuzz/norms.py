"""Norms, by kind, spelling, gain and bias: each over one axis, the last or the second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .choices import Choices, Piece, gain, shift

Run = Callable[..., Tensor]

LAYER: dict[str, Callable[[Tensor, int, Any], Tensor]] = {
    "var": lambda x, d, e: (x - x.mean(d, keepdim=True)) / torch.sqrt(x.var(d, keepdim=True, unbiased=False) + e),
    "square": lambda x, d, e: (c := x - x.mean(d, keepdim=True)) / (c.square().mean(d, keepdim=True) + e).sqrt(),
    "rsqrt": lambda x, d, e: (c := x - x.mean(d, keepdim=True)) * torch.rsqrt(c.pow(2).mean(d, keepdim=True) + e),
    "var_mean": lambda x, d, e: _by_var_mean(x, d, e),
    "moments": lambda x, d, e: (x - (m := x.mean(d, True))) * ((x * x).mean(d, True) - m * m + e) ** -0.5,
    "sums": lambda x, d, e: (c := x - x.sum(d, True) / x.shape[d]) / ((c * c).sum(d, True) / x.shape[d] + e).sqrt(),
}
RMS: dict[str, Callable[[Tensor, int, Any], Tensor]] = {
    "rsqrt": lambda x, d, e: x * torch.rsqrt(x.pow(2).mean(d, keepdim=True) + e),
    "sqrt": lambda x, d, e: x / torch.sqrt((x * x).mean(d, keepdim=True) + e),
    "power": lambda x, d, e: x * (x.square().mean(d, True) + e) ** -0.5,
    "eps outside": lambda x, d, e: x / (x.square().mean(d, True).sqrt() + e),
    "by norm": lambda x, d, e: x / (x.norm(dim=d, keepdim=True) * x.shape[d] ** -0.5 + e),
    "normalize": lambda x, d, e: F.normalize(x, dim=d, eps=1e-6) * x.shape[d] ** 0.5,
    "vector norm": lambda x, d, e: x * torch.rsqrt(torch.linalg.vector_norm(x, dim=d, keepdim=True) ** 2 / x.shape[d] + e),
    "reciprocal": lambda x, d, e: x * torch.sqrt(x.pow(2).mean(d, True) + e).reciprocal(),
    "clamped": lambda x, d, e: x * torch.rsqrt(x.pow(2).mean(d, True).clamp_min(1e-6)),
    "einsum": lambda x, d, e: x * torch.rsqrt((x * x).mean(d, True).add(e)),
}  # fmt: skip
OTHER: dict[str, Callable[[Tensor, int, Any], Tensor]] = {
    "l2": lambda x, d, e: F.normalize(x, dim=d),
    "l2 written": lambda x, d, e: x / (x.square().sum(d, True) + e).sqrt(),
    "std": lambda x, d, e: (x - x.mean(d, True)) / (x.std(d, keepdim=True) + e),
    "l1": lambda x, d, e: x / (x.abs().mean(d, True) + e),
    "max": lambda x, d, e: x / (x.abs().amax(d, True) + e),
    "softmax": lambda x, d, e: torch.softmax(x, d) * x.shape[d],
    "centred": lambda x, d, e: x - x.mean(d, True),
    "tanh": lambda x, d, e: torch.tanh(0.7 * x),
    "half": lambda x, d, e: x * torch.rsqrt(x.narrow(d, 0, x.shape[d] // 2).square().mean(d, True) + e),
    "detached": lambda x, d, e: x * torch.rsqrt(x.detach().square().mean(d, True) + e),
    "tokens": lambda x, d, e: x * torch.rsqrt(x.square().mean((1, 2), True) + e),
}


def _by_var_mean(x: Tensor, d: int, e: Any) -> Tensor:
    var, mean = torch.var_mean(x, d, correction=0, keepdim=True)
    return (x - mean) * (var + e).rsqrt()


EPS = ("1e-5", "1e-6", "1e-12", "0.1", "tensor")


def norm(c: Choices, width: int, axis: int = -1) -> nn.Module:
    """Return a norm over `axis` of `width` channels, of the kind and in the spelling that `c` says."""
    kinds = ("layer", "rms") * 5 + ("batch", "group", "other", "mixed")
    kind = c.any("kind", kinds)
    if kind == "mixed":
        first, second = norm(c.at("one"), width, axis), norm(c.at("two"), width, axis)
        return Piece(lambda s, x: s.second(s.first(x)), first=first, second=second)
    if kind in ("layer", "rms"):
        return _plain(c, kind, width, axis)
    if kind == "batch":
        return _batch(c, width, axis)
    if kind == "group":
        return _group(c, width, axis)
    how = c.any("other", OTHER)
    affine, held = _affine(c, width, axis)
    run, eps = OTHER[how], _eps(c)
    if how == "tokens" and axis != -1:
        run = RMS["rsqrt"]
    return Piece(lambda s, x: affine(s, run(x, axis, eps(s))), **held)


def _eps(c: Choices) -> Callable[[Piece], Any]:
    """Return what gives a norm's eps: a number, or a tensor that the norm holds."""
    eps = c.pick("eps", EPS, 2)
    return (lambda s: s.eps) if eps == "tensor" else lambda s: float(eps)


def _plain(c: Choices, kind: str, width: int, axis: int) -> nn.Module:
    spellings = LAYER if kind == "layer" else RMS
    how = c.any("spelling", ("module", "module", "functional", "functional", *spellings))
    eps = _eps(c)
    if how == "module":
        affine = c.pick("affine", ("yes", "no")) == "yes"
        made = nn.LayerNorm(width, 1e-5, affine) if kind == "layer" else nn.RMSNorm(width, 1e-6, affine)
        return _over(axis, made)
    if how == "functional":
        (weight, bias), held = _fused(c, width, kind)
        if kind == "layer":
            run: Run = lambda s, x: F.layer_norm(x, (width,), weight(s), bias(s), 1e-5)  # noqa: E731
        else:
            run = lambda s, x: F.rms_norm(x, (width,), weight(s), 1e-6)  # noqa: E731
        return _over(axis, Piece(run, **held))
    affine, held = _affine(c, width, axis)
    upcast = c.pick("cast", ("no", "float")) == "float"

    def spelled(s: Piece, x: Tensor) -> Tensor:
        found = spellings[how](x.float() if upcast else x, axis, eps(s))
        return affine(s, found.type_as(x) if upcast else found)

    return Piece(spelled, **held)


def _over(axis: int, made: nn.Module) -> nn.Module:
    """Return a norm over the last axis as one over `axis`."""
    if axis == -1:
        return made
    return Piece(lambda s, x: s.norm(x.movedim(axis, -1)).movedim(-1, axis), norm=made)


# ---- gains and biases ----

Tensors = Callable[[Piece], Any]
GAINS: dict[str, Tensors] = {
    "stored": lambda s: s.g,
    "none": lambda s: None,
    "one plus": lambda s: 1 + s.g,
    "computed": lambda s: s.g * 1.5,
    "sliced": lambda s: s.gg[s.g.shape[0] :],
    "row": lambda s: s.rows[1],
    "exp": lambda s: torch.exp(s.g),
    "product": lambda s: s.g * s.rows[0],
    "number": lambda s: torch.full_like(s.g, 0.5),
    "scalar": lambda s: s.a.expand_as(s.g),
    "buffer": lambda s: s.fixed,
    "permuted": lambda s: s.g.flip(0),
}
BIASES: dict[str, Tensors] = {
    "stored": lambda s: s.b,
    "none": lambda s: None,
    "computed": lambda s: s.b * 0.5,
    "sum": lambda s: s.b + s.rows[0],
    "sliced": lambda s: s.gg[: s.b.shape[0]],
    "row": lambda s: s.rows[2],
    "gain again": lambda s: s.g,
    "buffer": lambda s: s.fixed,
}


def _fused(c: Choices, width: int, kind: str) -> tuple[tuple[Tensors, Tensors], dict[str, Any]]:
    weight = GAINS[c.pick("gain", GAINS, 2)]
    bias = BIASES[c.pick("bias", BIASES, 2)] if kind == "layer" else BIASES["none"]
    return (weight, bias), _held(width)


def _held(width: int) -> dict[str, Any]:
    """Return the parameters that gains and biases are made of."""
    return {
        "g": gain(width), "b": shift(width), "gg": gain(2 * width), "rows": gain(3, width), "a": gain(1),
        "fixed": 1 + 0.3 * torch.randn(width), "eps": torch.tensor(1e-4),
    }  # fmt: skip


JOINED = ("gain and bias", "gain", "bias", "addcmul", "gain on the left", "bias in two steps", "none")


def _affine(c: Choices, width: int, axis: int) -> tuple[Run, dict[str, Any]]:
    """Return what is done to a normalised value, and the parameters that it takes."""
    (weight, bias), held = _fused(c, width, "layer")
    how = c.pick("affine", JOINED, 3)

    def placed(t: Any, x: Tensor) -> Any:
        return t if t is None or axis == -1 else t.reshape(-1, *[1] * (x.dim() - 2))

    def run(s: Piece, n: Tensor) -> Tensor:
        g, b = placed(weight(s), n), placed(bias(s), n)
        g, b = None if how in ("bias", "none") else g, None if how in ("gain", "none") else b
        if how == "addcmul" and g is not None and b is not None:
            return torch.addcmul(b, n, g)
        n = n if g is None else (g * n if how == "gain on the left" else n * g)
        if b is not None and how == "bias in two steps":
            return n + 0.5 * b + 0.5 * b
        return n if b is None else n + b

    return run, held


# ---- norms of other kinds ----


def _batch(c: Choices, width: int, axis: int) -> nn.Module:
    how = c.any("batch", ("functional", "module", "written"))
    held = _held(width) | {"mean": torch.randn(width), "var": 0.5 + torch.rand(width)}
    if how == "module":
        made = nn.BatchNorm1d(width, affine=c.pick("affine", ("yes", "no")) == "yes")
        return Piece(
            lambda s, x: s.norm(x.movedim(axis, 1).flatten(2)).reshape(x.movedim(axis, 1).shape).movedim(1, axis),
            norm=made,
        )
    weight, bias = GAINS[c.pick("gain", GAINS)], BIASES[c.pick("bias", BIASES)]
    if how == "functional":
        return Piece(
            lambda s, x: F.batch_norm(x.movedim(axis, 1), s.mean, s.var, weight(s), bias(s)).movedim(1, axis), **held
        )
    return Piece(
        lambda s, x: ((x.movedim(axis, -1) - s.mean) * (s.var + 1e-5).rsqrt() * s.g + s.b).movedim(-1, axis), **held
    )


def _group(c: Choices, width: int, axis: int) -> nn.Module:
    how = c.any("group", ("functional", "heads", "rms heads", "one group"))
    held = _held(width)
    if how in ("functional", "one group"):
        groups = 1 if how == "one group" else 2
        if axis == -1:  # of each token by itself
            return Piece(lambda s, x: F.group_norm(x.flatten(0, -2), groups, s.g, s.b).reshape(x.shape), **held)
        return Piece(lambda s, x: F.group_norm(x, groups, s.g, s.b), **held)
    inner = LAYER["rsqrt"] if how == "heads" else RMS["rsqrt"]
    return _over(axis, Piece(lambda s, x: inner(x.unflatten(-1, (2, -1)), -1, 1e-5).flatten(-2) * s.g + s.b, **held))
