"""What can be written as ONNX: a model that runs, with its picture."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from ..backends.running import Runnable
from ..ir import Network

if TYPE_CHECKING:
    import onnx_ir


class Exportable(Runnable):
    """Run a model that has a picture and an ONNX form."""

    @property
    @abstractmethod
    def fixed_paths(self) -> tuple[str, ...]:
        """Return what a capture fixed that the model itself chooses by its data: the line, its place, what it read."""

    @property
    @abstractmethod
    def network(self) -> Network:
        """Return the picture of the model."""

    @abstractmethod
    def to_onnx(self, opset: int | None = None, *, kernels: Collection[str] = ()) -> onnx_ir.Model:
        """Return the model in ONNX, each norm one operator, in memory of its own.

        opset: None takes a usual one. kernels: the operators of ONNX Runtime that may stand for attention.
        """

    def tried(self, candidate: Runnable, bound: float) -> Sequence[str]:
        """Run what was written as it is used, beyond single calls; return notes. Raise LnrewriteError where it fails.

        bound: the largest error, relative to the largest output, that it may show.
        """
        return ()
