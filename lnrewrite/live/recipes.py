"""The recipe of a rewritten module, as it is written down: `recipe.runtime.apply` carries it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..backends.torch.pieces import Piece
from .ports import Spot, has_path, submodule

Change = dict[str, Any]
"""One row of a recipe, as JSON holds it."""


class Recipe:
    """Hold the changes of a module, and where parameters get their values.

    values: the graph's name of what a parameter with a new name holds. neutral: the number that a parameter is filled
    with which no longer does anything. shifted: what is added to the values of a parameter, where its module adds one
    to it and the graph no longer does.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.changes: list[Change] = []
        self.values: dict[str, str] = {}
        self.neutral: dict[str, float] = {}
        self.shifted: dict[str, float] = {}
        self.placed: dict[Piece, str] = {}
        self.edits: dict[str, tuple[str, dict[int, Change]]] = {}

    def before(self, path: str, at: Sequence[tuple[str, int]], pieces: Sequence[Piece]) -> None:
        """Put pieces before a child, where some of its inputs enter."""
        self.changes.append({"by": self.put(pieces, path), "before": path, "at": [list(place) for place in at]})

    def after(self, path: str, at: Sequence[int | str | None], pieces: Sequence[Piece]) -> None:
        """Put pieces behind a child, where some of its outputs leave."""
        self.changes.append({"by": self.put(pieces, path), "after": path, "at": list(at)})

    def replace(self, path: str, pieces: Sequence[Piece]) -> None:
        """Put pieces in place of a child, or nothing."""
        self.changes.append({"module": path, "as": [dict(p.spec) for p in pieces]})
        for i, piece in enumerate(pieces):
            at = path if len(pieces) == 1 else f"{path}.{i}"
            self.values |= {f"{at}.{leaf}": source for leaf, source in piece.params}

    def bias(self, name: str, size: int) -> None:
        """Give a linear map the bias of that name."""
        self.changes.append({"bias": name.rpartition(".")[0], "size": size})
        self.values[name] = name

    def edit(self, spot: Spot, through: Mapping[str, Sequence[Piece]], keep: str | None = None) -> None:
        """Send what an operation of a forward takes (`left`, `right`) or makes (`result`) through pieces.

        keep: the operand that stands for the whole. Pieces are named from the module on.
        """
        _, rows = self.edits.setdefault(spot.path, (spot.digest, {}))
        prefix = f"{spot.path}." if spot.path else ""
        row = rows.setdefault(spot.index, {"spot": spot.index, "text": spot.text})
        row |= {} if keep is None else {"keep": keep}
        row |= {at: [p.removeprefix(prefix) for p in self.put(tail, spot.path)] for at, tail in through.items()}

    def finish(self) -> None:
        """Write the edits of forwards, which may use what all other changes put there."""
        for path, (digest, rows) in self.edits.items():
            self.changes.append({"source": path, "digest": digest, "edits": [rows[i] for i in sorted(rows)]})

    def put(self, pieces: Sequence[Piece], under: str) -> list[str]:
        """Place pieces in the module, under their own names where that is below `under`; return the paths."""
        return [self.placed.get(p) or self.put_one(p, under) for p in pieces]

    def put_one(self, piece: Piece, under: str) -> str:
        name = piece.name.replace("@", "_")
        if under and not name.startswith(f"{under}."):
            name = f"{under}.{name.rpartition('.')[2]}"
        self.placed[piece] = path = self.free(name)
        self.replace(path, [piece])
        return path

    def free(self, path: str) -> str:
        """Return a path that nothing has, outside of containers that would run what is put into them."""
        parent, _, leaf = path.rpartition(".")
        while parent and isinstance(submodule(self.module, parent), (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            parent, _, last = parent.rpartition(".")
            leaf = f"{last}_{leaf}"
        whole, count = f"{parent}.{leaf}" if parent else leaf, 1
        taken = {*self.placed.values()}
        path = whole
        while path in taken or has_path(self.module, path):
            count += 1
            path = f"{whole}_{count}"
        return path
