"""What the editor inserted into a graph, recorded on the node where it ends: the live route builds it as a module.

The record is of no `custom` key: it stays with the copies of a graph, and neither tracing nor a file takes it along.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from torch import fx

from ...ir import Norm

KEY = "lnrewrite_piece"

Entry = str | float | tuple[int, ...]
"""One argument of a piece's constructor in `recipe.runtime`."""
Params = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Hold one insertion: the module that computes it, as `recipe.runtime.build` takes it, and where it stands.

    name: what the module asks to be called. entry: the node that takes the value, as its first argument. params: the
    module's parameters by their leaves, each the node that gets it.
    """

    name: str
    spec: tuple[tuple[str, Entry], ...]
    entry: str
    params: Params = ()

    @classmethod
    def norm(cls, name: str, norm: Norm, width: int, entry: fx.Node, params: Mapping[str, fx.Node | None]) -> Self:
        """Return the record of a norm over channels; `params` are its weight and bias."""
        spec: dict[str, Entry] = {"is": "norm", "kind": norm.kind.value, "width": width, "eps": norm.eps}
        spec |= {leaf: node is not None for leaf, node in params.items()}
        spec["plus_one"] = norm.plus_one and params["weight"] is not None
        return cls(name, (*spec.items(), *_axis(norm.axis)), entry.name, _names(params))

    @classmethod
    def affine(cls, leaf: str, param: fx.Node, entry: fx.Node) -> Self:
        """Return the record of a factor (`scale`) or a term (`shift`)."""
        path, _, last = str(param.target).rpartition(".")
        name = path if last in ("scale", "shift") else f"{path}_shift"
        shape = tuple(param.meta["val"].shape)
        return cls(name, (("is", "affine"), (leaf, shape)), entry.name, _names({leaf: param}))

    @classmethod
    def times(cls, by: float, x: fx.Node, entry: fx.Node) -> Self:
        """Return the record of a factor that is one fixed number."""
        return cls(f"{x.name}_times", (("is", "affine"), ("scale", by)), entry.name)

    @classmethod
    def center(cls, x: fx.Node, axis: int, entry: fx.Node) -> Self:
        """Return the record of a subtracted mean."""
        return cls(f"{x.name}_center", (("is", "center"), *_axis(axis)), entry.name)

    def record(self, end: fx.Node) -> None:
        """Note on the node that gives the result what was inserted."""
        end.meta[KEY] = self

    @staticmethod
    def of(end: fx.Node) -> Piece | None:
        """Return what was inserted and ends at a node, if anything."""
        found = end.meta.get(KEY)
        return found if isinstance(found, Piece) else None

    def then(self, other: Piece) -> Piece | None:
        """Return this piece and the one behind it as one: a factor and a term are an affine map. None for others."""
        if [key for key, _ in (*self.spec, *other.spec)] != ["is", "scale", "is", "shift"]:
            return None
        return replace(self, spec=(*self.spec, *other.spec[1:]), params=(*self.params, *other.params))


def _axis(axis: int) -> tuple[tuple[str, Entry], ...]:
    """Return the argument for an axis, which is left out for the last."""
    return () if axis == -1 else (("axis", axis),)


def _names(params: Mapping[str, fx.Node | None]) -> Params:
    return tuple((leaf, node.name) for leaf, node in params.items() if node is not None)
