"""Edit a model whose weights stay on disk: what edits ask of a parameter is done when it is read, one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import fx, nn

from ..backends.torch.editor import FxEditor, numpy_of, pieces_of
from ..backends.torch.lift import parameter_names
from ..backends.torch.module import CapturedModule, register
from ..backends.torch.widened import worked_out
from ..backends.values import Change, Floats
from ..errors import Code, LnrewriteError
from .shards import Stored

Edits = tuple[tuple[int | None, Change], ...]


class Store:
    """Hold where parameters lie on disk, and the changes that they have yet to go through.

    files: where each parameter is, by its first name. held: tensors that are in no file; what is in one is as it is
    there, whatever a network without weights made of a buffer.
    """

    def __init__(self, files: Mapping[str, Stored], held: Mapping[str, torch.Tensor]) -> None:
        self.files, self.held = dict(files), {name: value for name, value in held.items() if name not in files}
        self.edits: dict[str, Edits] = {}

    def fork(self) -> Store:
        """Return a store of its own with the same changes pending."""
        other = Store(self.files, self.held)
        other.edits = dict(self.edits)
        return other

    def form(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return a parameter's dtype and shape."""
        found = self.held.get(name)
        where = self.files[name] if found is None else found
        return where.dtype, tuple(where.shape)

    def read(self, name: str) -> torch.Tensor:
        """Return a parameter with its pending changes done, in the dtype in which it is stored.

        Raises LnrewriteError LN024 where a changed value is NaN or too large for that dtype.
        """
        tensor = self.held[name].clone() if name in self.held else self.files[name].read()
        for axis, change in self.edits.get(name, ()):
            for piece in pieces_of(tensor, axis):
                self.change(name, piece, change)
        return tensor

    def rows(self, name: str, which: slice) -> torch.Tensor:
        """Return some of a parameter's rows as `read` does, or all of one that has no axes."""
        if name in self.files and not self.edits.get(name):
            return self.files[name].part(which)
        whole = self.read(name)
        return whole[which] if whole.dim() else whole

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Yield what `read` returns in pieces whose bytes follow each other: rows, where changes go along rows."""
        edits, where = self.edits.get(name, ()), self.files.get(name)
        if name in self.held or where is None or any(axis != len(where.shape) - 1 for axis, _ in edits):
            yield self.read(name)
            return
        for rows in where.rows():
            for _, change in edits:
                for piece in pieces_of(rows, -1):
                    self.change(name, piece, change)
            yield rows

    def change(self, name: str, piece: torch.Tensor, change: Change) -> None:
        new = change(numpy_of(piece))
        if new.size and not max(new.max(), -new.min()) <= torch.finfo(piece.dtype).max:
            remedy = "repair or re-download the weights, or store them in a wider dtype"
            raise LnrewriteError(Code.LN024, name, f"changed, it does not fit {piece.dtype}", remedy)
        piece.copy_(torch.from_numpy(new.reshape(piece.shape)))

    def edit(self, name: str, axis: int | None, change: Change) -> None:
        """Ask for a change of a parameter."""
        self.edits[name] = (*self.edits.get(name, ()), (axis, change))

    def copy(self, name: str, source: str) -> None:
        """Make a name stand for a copy of a parameter as it is now."""
        self.edits[name] = self.edits.get(source, ())
        if source in self.held:
            self.held[name] = self.held[source]
        else:
            self.files[name] = self.files[source]


class StoredEditor(FxEditor):
    """Edit a captured module on the meta device; its values are in a store."""

    def __init__(self, module: CapturedModule, store: Store) -> None:
        super().__init__(module)
        self.store = store
        self.names = parameter_names(module)

    def read(self, param: str) -> Floats:
        """Return a parameter's present values."""
        return numpy_of(self.store.read(self.names[param]))

    def rows(self, param: str, axis: int) -> Iterator[Floats]:
        """Yield a parameter's present values [..., size of axis]."""
        return map(numpy_of, pieces_of(self.store.read(self.names[param]), axis))

    def worked_out(self, name: str) -> Floats:
        """Return the value of a node that parameters alone decide."""
        return numpy_of(worked_out(self.module, name, lambda param: self.store.read(self.names[param])))

    def transform(self, param: str, axis: int | None, change: Change) -> None:
        """Ask for a change of a parameter's values."""
        self.store.edit(self.names[param], axis, change)

    def create(self, name: str, values: Floats, like: fx.Node) -> str:
        """Register a new parameter, whose values are in the store."""
        name = self.fresh(name)
        self.store.held[name] = torch.from_numpy(values).to(like.meta["val"].dtype, copy=True)
        register(self.module, name, nn.Parameter(self.store.held[name].to("meta")))
        self.names[name] = name
        return name

    def untie(self, linear: fx.Node, param: str, fresh: str) -> None:
        """Make one node read its own copy of a parameter."""
        before = self.names[param]
        super().untie(linear, param, fresh)
        names = parameter_names(self.module)
        for name in [n for n, first in names.items() if n == first != self.names.get(n)]:
            self.store.copy(name, before)
        self.names = names
