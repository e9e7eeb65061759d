"""How far apart two runs are: the one measure by which captures and exact rewrites are judged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

Outputs = list[torch.Tensor]
"""The tensors that one run of a model gives, in order."""


def apart(wanted: Sequence[Outputs], found: Sequence[Outputs]) -> float:
    """Return the largest difference of any output of any run, relative to that output's largest number.

    Infinite where shapes differ, or where they are not NaN, or infinite with the same sign, in the same places.
    """
    worst = 0.0
    for one, two in zip(wanted, found, strict=True):
        if [t.shape for t in one] != [t.shape for t in two]:
            return math.inf
        for x, y in zip(one, two, strict=True):
            error, largest = difference(x, y)
            worst = max(worst, error / max(largest, 1e-30))
    return worst


def real(tensors: Iterable[torch.Tensor]) -> Outputs:
    """Return those tensors that hold numbers with a fraction, complex ones as pairs of real numbers."""
    pairs = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]
    return [t for t in pairs if t.is_floating_point()]


def difference(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """Return the largest |x - y| and the largest |x| among the finite numbers of two tensors of one shape.

    The first is infinite where they are not NaN, or infinite with the same sign, in the same places.
    """
    x, y = (real([t])[0].double() if t.is_complex() else t.double() for t in (x, y))
    finite = x.isfinite() & y.isfinite()
    if not (finite | (x == y) | (x.isnan() & y.isnan())).all():
        return math.inf, 1.0
    x, y = x[finite], y[finite]
    return ((x - y).abs().max().item(), x.abs().max().item()) if x.numel() else (0.0, 0.0)
