"""Fit gains on samples: weighted least squares per channel, with outlying tokens left out.

Tokens may be shared by several processes: sums over them go through `total`, and what orders them, one number of each,
through `of_all`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..ir import Kind
from ..pipeline.shares import everyone, total

Floats = NDArray[np.float64]

ROUNDING = 1e-12
"""What of a square is rounding."""
OUTLIER = 20.0
"""A token whose size is this many times the median (attention sinks, padding) takes no part in a fit."""


def size(x: Floats) -> Floats:
    """Return the root mean square of each row of x [tokens, width]: [tokens]."""
    return np.asarray(np.sqrt((x * x).mean(-1)))


def spread(kind: Kind, x: Floats) -> Floats:
    """Return what a norm of this kind divides each row by, eps left out: the standard deviation, or the RMS."""
    return size(x - x.mean(-1, keepdims=True)) if kind is Kind.LAYER else size(x)


def unit(kind: Kind, x: Floats, eps: float) -> Floats:
    """Return layer or rms norm of rows x [tokens, width] with unit gain: x / sqrt(mean(x^2) + eps)."""
    if kind is Kind.LAYER:
        x = x - x.mean(-1, keepdims=True)
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps))


def of_all(numbers: Floats) -> Floats:
    """Return the numbers of all processes' tokens, one for each: [tokens]."""
    return np.concatenate(everyone(numbers))


def ordinary(sizes: Floats) -> float:
    """Return the median of the sizes above 0 of all tokens; those of none (padding, a closed gate) do not tell it."""
    every = of_all(sizes)
    return float(np.median(every[every > 0])) if every.any() else 0.0


def usual(x: Floats) -> Floats:
    """Return 1.0 for tokens of ordinary size, 0.0 for outliers: [tokens]."""
    r = size(x)
    return np.asarray((r <= OUTLIER * ordinary(r)).astype(np.float64))


def _shares(weight: Floats) -> Floats:
    """Return weights that add up to one over all tokens."""
    return weight / max(total(float(weight.sum())), 1e-300)


@dataclass(frozen=True)
class Fit:
    """Hold target ~ scale * base + shift, per channel, and its relative squared error."""

    scale: Floats
    shift: Floats | None
    error: float
    value: Floats


def fit(base: Floats, target: Floats, weight: Floats, shift: bool = False) -> Fit:
    """Fit scale (and shift) [width] so that scale * base + shift comes closest to target [tokens, width].

    Weighted least squares: scale = E[w t b] / E[w b^2], with a shift Cov / Var (normalization reference E.2). The error
    is E[w |t - fit|^2] / E[w |t|^2] over the tokens that weigh anything.
    """
    w = _shares(weight)
    b, t, offset = base, target, None
    if shift:
        mean_b, mean_t = total(w @ base), total(w @ target)
        b, t = base - mean_b, target - mean_t
    power = _weighed(b, b, w)
    scale = np.where(power > 0, _weighed(b, t, w) / np.where(power > 0, power, 1.0), 1.0)
    value = scale * base
    if shift:
        offset = mean_t - scale * mean_b
        value += offset
    whole, rest = float(_weighed(target, target, w).sum()), target - value
    return Fit(scale, offset, float(_weighed(rest, rest, w).sum()) / whole if whole else 0.0, value)


def _weighed(x: Floats, y: Floats, weight: Floats) -> Floats:
    """Return E[w x y] per channel; no more than one array of their size is made."""
    product = x * y
    return total(np.asarray(weight @ product))


def mix(base: Floats, target: Floats, weight: Floats, shift: bool = False) -> Fit | None:
    """Fit target ~ scale @ base + shift with a full matrix scale [width, width], or None where that does not pay.

    Ridge regression, judged on a quarter of the tokens that it was not fitted on against the diagonal `fit`: with few
    tokens, or where size and direction of base have nothing to do with each other, a matrix only fits noise.
    """
    last = np.arange(len(base)) % 4 == 3
    if total(int((~last).sum())) < 2 * base.shape[1]:
        return None
    matrix, offset = _regress(base[~last], target[~last], weight[~last], shift)
    plain = fit(base[~last], target[~last], weight[~last], shift)
    w = weight[last][:, None]
    here, there = base[last], target[last]
    dense = total(float((w * (there - here @ matrix.T - offset) ** 2).sum()))
    constant = 0.0 if plain.shift is None else plain.shift
    if dense >= 0.95 * total(float((w * (there - here * plain.scale - constant) ** 2).sum())):
        return None
    matrix, offset = _regress(base, target, weight, shift)
    whole = max(total(float((w * there**2).sum())), 1e-300)
    return Fit(matrix, offset if shift else None, dense / whole, base @ matrix.T + offset)


def _regress(base: Floats, target: Floats, weight: Floats, shift: bool) -> tuple[Floats, Floats]:
    w = _shares(weight)[:, None]
    mean_b, mean_t = (total((w * x).sum(0)) if shift else np.zeros(x.shape[1]) for x in (base, target))
    b, t = base - mean_b, target - mean_t
    gram = total((w * b).T @ b)
    if not gram.any():
        return gram, mean_t
    gram += np.eye(len(gram)) * np.trace(gram) / len(gram) * 1e-3
    matrix: Floats = np.linalg.solve(gram, total((w * b).T @ t)).T.astype(np.float64)
    return matrix, mean_t - matrix @ mean_b


def metric(f: Floats, weight: Floats, steps: int = 200) -> Floats:
    """Choose a [width] > 0 so that the size of a * f varies least over the tokens of f [tokens, width].

    A norm put behind f divides by the size of f; behind a * f, with a gain of c / a, it divides by another size of the
    same f, and the less that varies, the less the norm changes. Minimises E[w |f|^2 (sum_j q_j f_j^2 / d - m)^2] over
    q = a^2, m the mean square, pulled to q = 1 by a ridge as strong as the mean eigenvalue: projected gradient steps.
    Where the size of f is constant, a = 1.
    """
    power = (f * f).mean(-1)
    w = _shares(weight * power)
    z = f * f
    z /= max(total(float((w * power).sum())) * f.shape[1], 1e-300)
    weighed = z * w[:, None]
    gram, goal = total(weighed.T @ z), total(weighed.sum(0))
    del z, weighed
    ridge = float(np.trace(gram)) / len(gram)
    q = np.ones(len(gram))
    top = np.ones(len(gram))
    for _ in range(30):
        top = gram @ top
        top /= max(float(np.linalg.norm(top)), 1e-300)
    rate = 1 / max(1.05 * float(top @ gram @ top) + ridge, 1e-300)
    for _ in range(steps):
        q = np.maximum(q - rate * (gram @ q - goal + ridge * (q - 1)), 0.05)
    return np.asarray(np.sqrt(q))


def offset(f: Floats, weight: Floats, factor: float) -> Floats | None:
    """Return a constant c [width] so that a layer norm behind f + c, f of [tokens, width], is nearly linear in f.

    The norm divides by the size of f + c without its mean over channels: with |c| = `factor` times the size of f and c
    in place of f's mean over tokens, N(f + c) ~ N(c) + (f - c (c f) / |c|^2) / size(c), and the norm's bias takes N(c)
    off again. What f has along c is lost, so c lies where f varies least; the rest of the error is of the order
    1 / factor^2. With b bits of mantissa the offset costs factor / 2^b. None where f is the same for all tokens.
    """
    w = _shares(weight * f.any(-1))[:, None]  # where the state is 0 too, a token weighs more than all others
    f = f - f.mean(-1, keepdims=True)
    mean = total((w * f).sum(0))
    x = f - mean
    gram = total((w * x).T @ x)
    if np.trace(gram) <= ROUNDING * total(float((w * f * f).sum())):
        return None
    gram += (np.eye(len(gram)) * 1e-6 + 1.0) * np.trace(gram) / len(gram)  # none along the mean over channels
    inverse = np.linalg.inv(gram)
    across = np.where(np.arange(len(gram)) % 2, -1.0, 1.0)
    for _ in range(30):
        across = inverse @ across
        across /= np.linalg.norm(across)
    lean = total(float((w[:, 0] * (x * x).sum(-1)) @ (x @ across)))  # large tokens are to lie against c
    size_of_f = np.sqrt(total(float((w * f * f).sum())))
    return np.asarray(-np.sign(lean or 1.0) * factor * size_of_f * across - mean)


def careful_eps(eps: float, branch: Floats) -> float:
    """Return `eps`, or the power of ten at most a thousandth of the smallest branch's mean square (reference E.2)."""
    floor = float(np.quantile(of_all((branch * branch).mean(-1)), 0.001)) * 1e-3
    return eps if eps <= floor or floor <= 0 else float(f"1e{int(np.floor(np.log10(floor)))}")
