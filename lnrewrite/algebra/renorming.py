"""A norm whose input changes its size: eps goes along, and factors behind it go into its gain and bias.

by (g N_eps(x) + b)  =  (by sign(s) g) N_{eps / s^2}(x / s) + by b
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..errors import Code
from ..ir import Block, Kind, Operation, SetNorm, Site, Stream, Vectors, site_name
from ..pipeline import Context
from .basis import Closed

Factor = NDArray[np.float64] | float
"""One number, or one for each channel."""


def renormed(
    stream: Stream, context: Context, vectors: Vectors, block: Block | None, site: Site, size: Factor, by: Factor
) -> list[Operation]:
    """Make a norm read 1 / size of what it read and give `by` times what it gave: eps / size^2, gain and bias."""
    norm, who = site.norm, site_name(block, site) if block else f"the {site.where} norm"
    plain = is_one(by)
    if is_one(size) and plain:
        return []
    if isinstance(size, np.ndarray):
        raise Closed(Code.LN126, f"{who} would read channels of different sizes")
    if norm.kind not in (Kind.LAYER, Kind.RMS) or norm.over:
        what = "a norm of a norm" if norm.over else f"a {norm.kind} norm"
        raise Closed(Code.LN111, f"{who} is {what}", "run merge-norms first" if norm.over else "")
    if norm.computed and not (plain and size > 0):
        raise Closed(Code.LN105, f"the gain of {who} is computed", "store the gain as a parameter")
    gamma = beta = None
    if not plain or size < 0:
        gain = context.gain(norm) * np.ones(stream.width)
        gamma = vectors.add(gain * by * np.sign(size))
        beta = vectors.add(context.values(norm.beta).reshape(-1) * by) if norm.beta else None
    index = block.index(site) if block else 0
    return [SetNorm(site.where, replace(norm, eps=norm.eps / size**2), gamma, beta, index)]


def is_one(factor: Factor) -> bool:
    """Return whether a factor is the number one."""
    return not np.ndim(factor) and bool(factor == 1)
