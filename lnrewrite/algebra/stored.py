"""Norms by stored statistics are affine maps, one factor and one shift per channel."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..ir import Kind, Site
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
