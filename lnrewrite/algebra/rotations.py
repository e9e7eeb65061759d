"""Orthogonal changes of basis: block-diagonal Hadamard matrices with random signs, and random orthogonal blocks.

Source: QuaRot (arXiv 2404.00456), SpinQuant (2405.16406) for their use; Mezzadri (math-ph/0609050) for random ones.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..ir import Rotation

Floats = NDArray[np.float64]


def rotate(rows: Floats, by: Rotation) -> Floats:
    """Return Q r for each row r of [..., channels], with Q on each run of `by.block` channels."""
    runs = rows.reshape(-1, by.block)
    if by.kind == "random":
        matrix = _random(by.block, by.seed)
        turned = runs @ (matrix if by.back else matrix.T)
    else:
        signs = _signs(by.block, by.seed)
        turned = _hadamard(runs) * signs if by.back else _hadamard(runs * signs)
    return turned.reshape(rows.shape)


@lru_cache(4)
def _signs(block: int, seed: int) -> Floats:
    return np.where(np.random.default_rng(seed).integers(0, 2, block) == 1, 1.0, -1.0)


@lru_cache(2)
def _random(block: int, seed: int) -> Floats:
    """Draw an orthogonal matrix uniformly: Q of a normal matrix, with the signs of R's diagonal."""
    q, r = np.linalg.qr(np.random.default_rng(seed).normal(size=(block, block)))
    return np.asarray(q * np.sign(np.diag(r)), dtype=np.float64)


def _hadamard(runs: Floats) -> Floats:
    """Multiply each run of 2^k numbers by the normalized Walsh-Hadamard matrix."""
    size, step = runs.shape[1], 1
    while step < size:
        pairs = runs.reshape(len(runs), -1, 2, step)
        runs = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2).reshape(-1, size)
        step *= 2
    return np.asarray(runs / np.sqrt(size), dtype=np.float64)
