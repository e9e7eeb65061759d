"""Edit a model whose weights stay on disk: what edits ask of a parameter is done when it is read, one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import fx, nn

from .captured import CapturedModule, register
from .fx_editor import FxEditor, numpy_of, pieces_of
from .lift import parameter_names
from .values import Change, Floats

Edits = tuple[tuple[int | None, Change], ...]


class Store:
    """Hold where parameters lie on disk, and the changes that they have yet to go through.

    files: the file and the key of each parameter, by its first name. held: tensors that are in no file.
    """

    def __init__(self, files: Mapping[str, tuple[Path, str]], held: Mapping[str, torch.Tensor]) -> None:
        self.files, self.held = dict(files), dict(held)
        self.edits: dict[str, Edits] = {}
        self.opened: tuple[Path, Any] | None = None

    def fork(self) -> Store:
        """Return a store of its own with the same changes pending."""
        other = Store(self.files, self.held)
        other.edits = dict(self.edits)
        return other

    def raw(self, name: str) -> torch.Tensor:
        """Return a parameter as it is stored; the file stays open for the next."""
        if name in self.held:
            return self.held[name]
        path, key = self.files[name]
        if self.opened is None or self.opened[0] != path:
            self.opened = path, safe_open(path, framework="pt")
        tensor: torch.Tensor = self.opened[1].get_tensor(key)
        return tensor

    def read(self, name: str) -> torch.Tensor:
        """Return a parameter with its pending changes done, in the dtype in which it is stored."""
        edits = self.edits.get(name, ())
        tensor = self.raw(name)
        if not edits:
            return tensor
        tensor = tensor.clone()
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for axis, change in edits:
                list(pool.map(lambda piece, change=change: _change(piece, change), pieces_of(tensor, axis)))
        return tensor

    def edit(self, name: str, axis: int | None, change: Change) -> None:
        """Ask for a change of a parameter."""
        self.edits[name] = (*self.edits.get(name, ()), (axis, change))

    def copy(self, name: str, source: str) -> None:
        """Let a name stand for a copy of a parameter as it is now."""
        self.edits[name] = self.edits.get(source, ())
        if source in self.held:
            self.held[name] = self.held[source]
        else:
            self.files[name] = self.files[source]


def _change(piece: torch.Tensor, change: Change) -> None:
    piece.copy_(torch.from_numpy(change(numpy_of(piece)).reshape(piece.shape)))


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
        """Let one node read its own copy of a parameter."""
        before = self.names[param]
        super().untie(linear, param, fresh)
        names = parameter_names(self.module)
        for name in [n for n, first in names.items() if n == first != self.names.get(n)]:
            self.store.copy(name, before)
        self.names = names


def on_disk(files: Sequence[Path]) -> dict[str, Path]:
    """Return in which safetensors file each key is."""
    found: dict[str, Path] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found
