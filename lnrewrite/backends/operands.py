"""The numbers that edits speak of: of vectors that a plan carries, and of parameters as they were."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields

import numpy as np

from ..ir import Array, Center, Edit, Gain, Normalize, Number, Rotation, Value
from .editor import Editor, Handle, fail
from .values import Change, Floats, centering, multiplying, rotating


class Operands:
    """Give the numbers that edits' values stand for; a gain or bias is the one from before the first edit."""

    def __init__(self, editor: Editor[Handle], vectors: Mapping[str, Array]) -> None:
        self.editor, self.vectors = editor, vectors
        self.gains: dict[str, Floats] = {}

    def remember(self, edits: Iterable[Edit]) -> None:
        """Read the gains and biases that edits speak of: they mean those from before the first edit.

        They are vectors [channels] however they are stored: [channels, 1, 1] beside channels that come first.
        """
        for operation in (o for edit in edits for o in edit.operations):
            values = [getattr(operation, field.name) for field in fields(operation)]
            names = [value.param for value in values if isinstance(value, Gain)]
            if isinstance(operation, Normalize):
                names += [name for name in (operation.norm.gamma, operation.norm.beta) if name]
            new = [name for name in names if name not in self.gains and self.editor.holds_value(name)]
            self.gains |= {name: self.editor.read(name).reshape(-1) for name in new}

    def array(self, value: Value) -> Floats:
        """Return a vector or a matrix in float64; a parameter's is the one from before the first edit."""
        match value:
            case Gain(param, plus_one):
                return self.gains[param] + float(plus_one)
            case Number(number):
                return np.asarray(number)
            case Center() | Rotation():
                fail(self.editor.label, f"{value} has no vector")
            case _:
                return np.asarray(self.vectors[value.digest], dtype=np.float64)

    def spread(self, value: Value, channels: int) -> Floats:
        """Return a vector for so many channels, which are runs of as many as it has, one at least."""
        vector = self.array(value).reshape(-1)
        return np.tile(vector, channels // vector.size)

    def change(self, value: Value, transposed: bool = False) -> Change:
        """Return what multiplies each row [..., channels] by a value's matrix, or by its transpose."""
        match value:
            case Center(width, left):
                return centering(width, left)
            case Rotation():
                return rotating(value.transposed if transposed else value)
            case _:
                matrix = self.array(value)
                return multiplying(matrix.T if transposed and matrix.ndim > 1 else matrix)
