"""Change a parameter's values: in float64, along one axis, piece by piece, so that the whole is never held twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..algebra.rotations import rotate
from ..ir import Rotation

Floats = NDArray[np.float64]
Change = Callable[[Floats], Floats]
"""Gives new values for rows [..., channels], whatever their number."""

CHUNK = 1 << 18
"""How many numbers of a parameter are held in float64 at a time."""


def centering(width: int, left: float = 0.0) -> Change:
    """Return what takes the mean off each run of `width` channels, but for a part that is left."""
    return lambda rows: _runs(rows, width, lambda r: r - (1 - left) * r.mean(-1, keepdims=True))


def rotating(by: Rotation) -> Change:
    """Return what rotates each run of channels."""
    return lambda rows: rotate(rows, by)


def multiplying(by: Floats) -> Change:
    """Return what multiplies each run of channels by a number, a vector or, from the left, a matrix."""
    if by.ndim > 1 and min(by.shape) > 1:
        return lambda rows: _runs(rows, len(by), lambda r: r @ by.T)
    return lambda rows: _runs(rows, max(by.size, 1), lambda r: r * by.reshape(-1))


def _runs(rows: Floats, width: int, change: Change) -> Floats:
    """Apply a change to each run of `width` channels of [..., channels]; a width of one means all at once."""
    return change(rows) if width == 1 else change(rows.reshape(*rows.shape[:-1], -1, width)).reshape(rows.shape)


def pieces(array: NDArray[Any], axis: int | None) -> Iterator[NDArray[Any]]:
    """Yield views [..., size of axis] of at most about `CHUNK` numbers that make up an array; None: one, flat."""
    if not array.size:
        return
    if axis is None:
        yield array.reshape(-1)
        return
    rows = np.moveaxis(array, axis, -1) if array.ndim > 1 else array.reshape(1, -1)
    step = max(1, CHUNK * len(rows) // max(rows.size, 1))
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def changed(array: NDArray[Any], axis: int | None, change: Change) -> NDArray[Any]:
    """Return change(array) computed in float64 piece by piece, in the array's shape and dtype."""
    result = np.empty(array.shape, array.dtype)
    for source, target in zip(pieces(array, axis), pieces(result, axis), strict=True):
        target[...] = change(source.astype(np.float64)).reshape(target.shape)
    return result
