"""What stored numbers do in a norm: the gain and bias of any, and all that a norm by stored statistics does."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..ir import Gain, Kind, Norm, Site, Value, Vectors
from ..pipeline import Context

STORED = (Kind.BATCH, Kind.POWER)


def is_affine(site: Site) -> bool:
    """Return whether a norm is a x + s for stored a and s: batch norm at inference, power norm, RepBN."""
    return site.norm.kind in STORED and bool(site.norm.variance or site.norm.computed) and not site.norm.over


def affine(site: Site, context: Context) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return a and s [channels] of such a norm: a = gamma / sqrt(variance + eps), s = beta - a mean."""
    norm = site.norm
    if norm.computed:
        return context.affine(site.origin[0], site.origin[-1], norm.axis)
    mean = context.values(norm.mean).reshape(-1) if norm.mean else 0.0
    a = context.gain(norm) / np.sqrt(context.values(str(norm.variance)).reshape(-1) + norm.eps)
    return a, (context.values(norm.beta).reshape(-1) if norm.beta else 0.0) - a * mean


def gain_and_bias(norm: Norm, width: int, context: Context, vectors: Vectors) -> tuple[Value | None, Value | None]:
    """Return what stands behind the statistics of a norm: as it is stored, or worked out; None for what does nothing.

    The gain of a norm that divides by one number is over that number. Raises LnrewriteError where that fails.
    """
    if not (norm.computed or norm.fixed):
        stored = Gain(norm.gamma, norm.plus_one) if norm.gamma is not None else None
        return stored, Gain(norm.beta) if norm.beta is not None else None
    gain = np.full(width, context.gain(norm) / (norm.fixed or 1.0)) if norm.gamma or norm.fixed else None
    bias = np.full(width, context.values(norm.beta).reshape(-1) if norm.beta else 0.0)
    return None if gain is None else vectors.add(gain), vectors.add(bias) if bias.any() else None
