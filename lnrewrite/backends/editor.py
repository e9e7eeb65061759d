"""What a rewriter asks of a graph: an `Editor` edits one in place, whatever library holds it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from ..errors import Code, LnrewriteError
from ..ir import Norm
from .values import Change, Floats

Handle = TypeVar("Handle")


@dataclass(frozen=True, slots=True)
class Use(Generic[Handle]):
    """Hold that something reads `operand`: the names under which the view knows the reader, and the slot."""

    operand: Handle
    consumers: tuple[str, ...]
    slot: Any


class Editor(Protocol[Handle]):
    """Edit one graph in place. Values are opaque handles, parameters are named; `label` is stamped on new nodes.

    New parameters take the dtype of `like`.
    """

    label: str

    def value(self, name: str) -> Handle:
        """Return the value that had this name in the graph before the first edit."""

    def readers(self, value: Handle) -> list[Use[Handle]]:
        """Return every use that a value has now; the graph's own output is the consumer `output`."""

    def redirect(self, use: Use[Handle], new: Handle) -> None:
        """Make one reader read `new`. The graph's outputs keep their names and dtypes."""

    def norm(self, name: str, x: Handle, norm: Norm, at: Handle) -> Handle:
        """Return a new norm of `x` over the norm's axis; its gamma and beta name parameters or computed vectors.

        It stands where `at` is known, and with that what a computed gain is computed from.
        """

    def affine(self, x: Handle, scale: str | float | None, shift: str | None) -> Handle:
        """Return a new scale * x + shift, either of which may be left out; parameters broadcast to `x`."""

    def center(self, x: Handle, axis: int) -> Handle:
        """Return a new x minus its mean over an axis, which stands right behind `x`."""

    def size(self, x: Handle, norm: Norm, usual: float) -> Handle:
        """Return what a norm divides `x` by, over `usual`: sqrt(var(x) + eps) or sqrt(mean(x^2) + eps), one a token."""

    def times(self, x: Handle, by: Handle, inverse: bool) -> Handle:
        """Return a new x * by, or x / by, which stands right behind `x`; `by` broadcasts to it and is known there."""

    def untie(self, linear: Handle, param: str, fresh: str) -> None:
        """Make one node read a copy of a parameter, under that name or one like it, in its place."""

    def attach(self, linear: Handle, bias: str) -> Handle:
        """Add a bias to a linear map that has none and return what is its output then, with all readers."""

    def has(self, param: str) -> bool:
        """Return whether there is a parameter of that name."""

    def holds_value(self, param: str) -> bool:
        """Return whether there is a parameter of that name, or stored numbers that nobody trains."""

    def read(self, param: str) -> Floats:
        """Return a parameter's present values."""

    def rows(self, param: str, axis: int) -> Iterator[Floats]:
        """Yield a parameter's present values piece by piece along its other axes: [..., size of axis]."""

    def worked_out(self, name: str) -> Floats:
        """Return the value of a node that parameters alone decide, computed in float64 by running what computes it."""

    def transform(self, param: str, axis: int | None, change: Change) -> None:
        """Replace values by change(values), sooner or later: `change` sees [..., size of axis] or, for None, all flat.

        It may be called for pieces along the other axes, and its result is stored in the parameter's own dtype.
        """

    def create(self, name: str, values: Floats, like: Handle) -> str:
        """Make a parameter, under that name or, where it is taken, one like it; return the name."""

    def parameter(self, param: str, at: Handle) -> Handle:
        """Return the value of a parameter, to be read behind `at`."""

    def finish(self) -> None:
        """Drop what no longer has a use: nodes, and parameters that only they read."""


def fail(label: str, why: str) -> NoReturn:
    """Raise LnrewriteError LN301: an edit, by its label, cannot be carried out."""
    raise LnrewriteError(Code.LN301, label, why, "report this with the model")
