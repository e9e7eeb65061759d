"""Let a branch read, or end in, scale * x + shift: in its linear maps where that is whole, else as an operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..errors import LnrewriteError
from ..ir import Affine, Block, FoldReader, Linear, Operation, ScaleWriter, Side, Site, Value, Vector, Vectors, Where
from ..pipeline.protocols import factor_of
from .fitting import Floats


@dataclass(frozen=True)
class Ends:
    """Make operations for branches whose constant factors stay: a shift in a linear map goes through them.

    values: a parameter's values, as `Context.values` gives them. vectors: takes what the operations point to.
    """

    vectors: Vectors
    values: Callable[[str], Floats]

    def reading(self, block: Block, site: Site | None, scale: Value | None, shift: Floats | None) -> list[Operation]:
        """Return what lets a branch see scale * u + shift, where its norm stands or stood."""
        if not self.reads(block, site, shift is not None):
            return [Affine(Where.IN, scale, self.vector(shift))] if scale or shift is not None else []
        inside = None if shift is None else self.vector(shift * self.factor(block, "read"))
        return [FoldReader(r, scale, inside) for r in (site.readers if site else block.readers)]

    def writing(
        self, block: Block, scale: Value | None, shift: Floats | None, at_norm: bool = False
    ) -> list[Operation]:
        """Return what lets a branch end in scale * f + shift, f what it adds.

        at_norm: f and shift are what stands where its out norm stood, before factors of the `branch`.
        """
        if scale and self.writes(block, shift is not None, at_norm):
            behind = 1.0 if shift is None else self.factor(block, *_behind(at_norm))
            return [
                ScaleWriter(w, scale, None if shift is None else self.vector(shift / behind)) for w in block.writers
            ]
        if shift is not None and at_norm:
            shift = shift * factor_of(block.scaled("branch"), self.values)
        return [Affine(Where.OUT, scale, self.vector(shift))]

    def reads(self, block: Block, site: Site | None, shift: bool) -> bool:
        """Return whether all that reads the branch's entrance are linear maps of its own that take these."""
        readers = site.readers if site else block.readers
        whole = not (site.taps if site else block.barrier(Side.READ)) and _free(readers, shift)
        return whole and not (shift and np.isnan(self.factor(block, "read")).any())

    def writes(self, block: Block, shift: bool, at_norm: bool = False) -> bool:
        """Return whether all that the branch ends in are linear maps of its own that take a scale (one a shift)."""
        whole = not (block.barrier(Side.WRITTEN) or (shift and len(block.writers) != 1)) and _free(block.writers, shift)
        behind = self.factor(block, *_behind(at_norm)) if whole and shift else 1.0
        return whole and bool(np.all(behind != 0) and not np.isnan(behind).any())

    def factor(self, block: Block, *at: str) -> Floats | float:
        """Return the product of a block's constant factors at these places, NaN where it is not known."""
        try:
            return factor_of(block.scaled(*at), self.values)
        except LnrewriteError:
            return np.nan

    def vector(self, values: Floats | None) -> Vector | None:
        """Return what points to values [channels]."""
        return None if values is None else self.vectors.add(np.ascontiguousarray(values))


def _behind(at_norm: bool) -> tuple[str, ...]:
    return ("written",) if at_norm else ("written", "branch")


def _free(linears: tuple[Linear, ...], shift: bool) -> bool:
    """Return whether an edit of these linears touches nothing else and can take a shift where there is one."""
    return bool(linears) and not any(w.shared for w in linears) and (not shift or all(w.exact for w in linears))
