"""What a model is called with: names, types, sizes that are fixed or free, and how many ids it has rows for."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod


class Content(StrEnum):
    """Name what the numbers of an input are, which says what may be made up for it."""

    VALUES = "values"
    IDS = "ids"
    MASK = "mask"
    TYPE = "type"
    POSITION = "position"


def content_of(name: str, dtype: str) -> Content:
    """Return what the name and the type of an input say of its numbers: values or ids where the name says nothing."""
    if "mask" in name or dtype == "bool":
        return Content.MASK
    if "float" in dtype or "complex" in dtype:
        return Content.VALUES
    if "type" in name or "segment" in name:
        return Content.TYPE
    return Content.POSITION if "position" in name else Content.IDS


def plain_content(dtype: str, rows: int) -> Content:
    """Return what the type and the table of an input say of its numbers, whatever its name is."""
    if "float" in dtype or "complex" in dtype:
        return Content.VALUES
    return Content.IDS if rows and dtype != "bool" else Content.MASK


@dataclass(frozen=True, slots=True)
class Input:
    """Describe one tensor that a model is called with.

    dims: its sizes, a number where one is fixed, a name where it is free. shape: the sizes of an example, 0 where none
    is known. content: what its numbers are. rows: how many rows the table has that its ids look up; 0: none is known.
    """

    name: str
    dtype: str
    dims: tuple[int | str, ...]
    shape: tuple[int, ...]
    content: Content
    rows: int = 0

    @property
    def free(self) -> dict[int, str]:
        """Return the axes whose size may differ from the example's, with its name."""
        return {axis: dim for axis, dim in enumerate(self.dims) if isinstance(dim, str)}

    def misfit(self, shape: Sequence[int]) -> str:
        """Return why a tensor of another shape is not taken; empty where it is."""
        if len(shape) != len(self.dims):
            return f"the model takes {len(self.dims)} axes, of which the first counts samples"
        fixed = ((axis, dim) for axis, dim in enumerate(self.dims) if not isinstance(dim, str))
        return next((f"axis {axis} is fixed" for axis, dim in fixed if shape[axis] != dim), "")

    def __str__(self) -> str:
        sizes = (size or dim for size, dim in zip(self.shape, self.dims, strict=True))
        return f"{self.name} {self.dtype}[{', '.join(map(str, sizes))}]"


@dataclass(frozen=True, slots=True)
class InputSpec:
    """Describe all tensors that a model is called with, in their order."""

    inputs: tuple[Input, ...]

    def __iter__(self) -> Iterator[Input]:
        return iter(self.inputs)

    def __getitem__(self, name: str) -> Input:
        return next(each for each in self.inputs if each.name == name)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the inputs."""
        return tuple(each.name for each in self.inputs)

    @property
    def axes(self) -> dict[str, dict[int, str]]:
        """Return, for each input, its free axes and the names of their sizes."""
        return {each.name: each.free for each in self.inputs}

    @property
    def rows(self) -> dict[str, int]:
        """Return how many rows the table has that each input of ids looks up, where one is known."""
        return {each.name: each.rows for each in self.inputs if each.rows}

    @property
    def vocabularies(self) -> dict[str, int]:
        """Return `rows` of the inputs of tokens: positions and segments are looked up beside them, and are none."""
        return {n: rows for n, rows in self.rows.items() if self[n].content is Content.IDS} or self.rows

    @property
    def sizes(self) -> dict[str, int]:
        """Return the example's size of each free dimension."""
        pairs = ((dim, each.shape[axis]) for each in self.inputs for axis, dim in each.free.items())
        return dict(pairs)

    def of_samples(self) -> InputSpec:
        """Return what arrays of many samples look like: the first axis is free."""
        many = (replace(each, dims=("samples", *each.dims[1:])) if each.dims else each for each in self.inputs)
        return InputSpec(tuple(many))

    def at(self, sizes: Mapping[str, int]) -> InputSpec:
        """Return the same inputs with an example of these sizes."""
        return InputSpec(
            tuple(
                replace(each, shape=tuple(sizes[dim] if isinstance(dim, str) else dim for dim in each.dims))
                for each in self.inputs
            )
        )

    def fewer(self) -> InputSpec:
        """Return an example of a second size: a row more, of all else one less where there are more than two."""
        rows = {each.dims[0] for each in self.inputs if each.dims}
        return self.at({dim: n + 1 if dim in rows or n <= 2 else n - 1 for dim, n in self.sizes.items()})

    def more(self) -> Iterator[InputSpec]:
        """Yield examples of further sizes: one more of each, then of some; what is the sum of two sizes stays it."""
        sizes = self.sizes
        pairs = list(itertools.combinations(sizes, 2))
        sums = {s: p for s, n in sizes.items() for p in pairs if s not in p and sizes[p[0]] + sizes[p[1]] == n}
        alone = [s for s in sizes if s not in sums]
        for count in range(len(alone), 0, -1):
            for chosen in itertools.combinations(alone, count):
                new = {s: n + (s in chosen) for s, n in sizes.items()}
                yield self.at({s: sum(new[p] for p in sums[s]) if s in sums else n for s, n in new.items()})

    def __str__(self) -> str:
        return ", ".join(map(str, self.inputs)) or "nothing"


def too_large(inputs: Iterable[Input], most: int) -> Input | None:
    """Return the first input with a negative size, or of more numbers than `most`."""
    return next((each for each in inputs if min(each.shape, default=0) < 0 or prod(each.shape) > most), None)
