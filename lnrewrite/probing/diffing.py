"""Two models side by side: what they are made of, what their streams hold on the same data, how far they are apart."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..api import load
from ..comparison.verifying import drift
from ..errors import LnrewriteError, visible
from ..ir.folding import shortened
from ..layout import aligned, wrapped
from ..models.program import Program
from ..pipeline.protocols import Batch
from ..pipeline.results import Drift, Json
from ..quiet import LOGGER
from .figures import BlockFigures, Probe, State
from .probe import MADE_UP, batches_of, data_name, probe

if TYPE_CHECKING:
    from ..models.onnx_program import OnnxProgram

T = TypeVar("T")
Row = tuple[BlockFigures | None, BlockFigures | None]
HEADER = ("block", "placement", "norms", "branch", "influence", "largest behind")
_NAME = 26


@dataclass(frozen=True)
class Difference:
    """Hold two models' figures on the same data, in the order in which they were given.

    norms: each block's norms by its name, as `inspect` tells them. parameters: how many numbers each stores. drift: how
    far the second's outputs are from the first's; None, and `why`, where they cannot be compared. hosts: the stock
    architectures that could hold each, where they were looked for; None of a model that is no checkpoint folder.
    """

    probes: tuple[Probe, Probe]
    norms: tuple[dict[str, str], dict[str, str]]
    parameters: tuple[int, int]
    drift: Drift | None
    why: str = ""
    hosts: tuple[Sequence[str] | None, Sequence[str] | None] | None = None

    def rows(self) -> Iterator[Row]:
        """Yield the blocks of both, beside each other: in their order where they are as many, else by name."""
        for one, two in zip_longest(*(p.streams for p in self.probes)):
            a, b = (() if s is None else s.blocks for s in (one, two))
            if len(a) == len(b):
                yield from zip(a, b, strict=True)
                continue
            names = {block.name: block for block in b}
            yield from ((block, names.pop(block.name, None)) for block in a)
            yield from ((None, block) for block in names.values())

    def to_dict(self) -> Json:
        """Return the JSON object of `diff --json`."""
        blocks = [
            {
                "name": [None if b is None else b.name for b in pair],
                "placement": [None if b is None else b.placement for b in pair],
                "norms": [
                    None if b is None else held.get(b.name, "") for b, held in zip(pair, self.norms, strict=True)
                ],
            }
            for pair in self.rows()
        ]
        return {
            "models": [p.model for p in self.probes],
            "placement": [p.placement for p in self.probes],
            "parameters": list(self.parameters),
            **({} if self.hosts is None else {"hosts": [None if h is None else list(h) for h in self.hosts]}),
            "blocks": blocks,
            "drift": None if self.drift is None else self.drift.to_dict(),
            **({"why": self.why} if self.why else {}),
            "probes": [p.to_dict() for p in self.probes],
        }

    def to_html(self, names: tuple[str, str] = ("A", "B")) -> str:
        """Return a page with both models' charts in one. Raises LnrewriteError LN018 where matplotlib is missing."""
        from ..pictures.page import report

        one, two = self.probes
        said = f"outputs of {names[1]} beside {names[0]}: {self.drift or self.why}"
        title = f"{one.model} and {two.model}" if one.model != two.model else one.model
        return report([(names[0], one), (names[1], replace(two, notes=(said, *two.notes)))], title)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(visible(str(self)))}</pre>"

    def __str__(self) -> str:
        return told(self)


def diff(
    a: str | os.PathLike[str] | Program | OnnxProgram,
    b: str | os.PathLike[str] | Program | OnnxProgram,
    data: str | Iterable[Batch] | None = None,
    *,
    seed: int = 0,
    names: tuple[str, str] | None = None,
    **how: Any,
) -> Difference:
    """Probe two models on the same data, in any two formats, and return them side by side: see `Difference`.

    a, b: anything that `load` opens, or programs. data: as `probe` takes it, read as the first model reads it; None
    makes inputs up for the first. names: what reports call the two. how: as `load` takes it. Raises as `probe`, and
    LnrewriteError LN022 where the second takes other inputs.
    """
    held = [load(m, seed=seed, **how) if isinstance(m, (str, os.PathLike)) else m for m in (a, b)]
    given = [
        os.fspath(m) if isinstance(m, (str, os.PathLike)) else n
        for m, n in zip((a, b), ("first", "second"), strict=True)
    ]
    called = names or (given[0], given[1])
    batches = batches_of(held[0], data, seed)
    on, unsure = data_name(data), () if data is not None else (MADE_UP,)
    figures = []
    for program, name in zip(held, called, strict=True):
        LOGGER.info(f"probing {name}")
        figures.append(replace(found := probe(program, batches, name=name), data=on, notes=(*found.notes, *unsure)))
    apart, why = _drift(held, batches, on)
    counts = [_count(program) for program in held]
    norms = [_norms(program) for program in held]
    return Difference((figures[0], figures[1]), (norms[0], norms[1]), (counts[0], counts[1]), apart, why)


def _drift(held: Sequence[Program | OnnxProgram], batches: Sequence[Batch], data: str) -> tuple[Drift | None, str]:
    try:
        with torch.no_grad():
            found = drift(held[0].module(), held[1].module(), batches, True)
            return replace(found, held_out=None, data=data), ""
    except (LnrewriteError, ValueError, RuntimeError) as fault:
        return None, f"their outputs cannot be compared: {str(fault).partition(chr(10))[0]}"


def _count(program: Program | OnnxProgram) -> int:
    """Return how many numbers a model stores as parameters, those that are tied once.

    Of an ONNX file: vectors of floating point, and all of more axes; numbers and lists of sizes are none.
    """
    if isinstance(program, Program):
        return sum(p.numel() for p in program.module().parameters())
    stored = (v.const_value for v in program.model.graph.initializers.values())
    return sum(t.size for t in stored if t is not None and len(t.shape) > (not t.dtype.is_floating_point()))


def _norms(program: Program | OnnxProgram) -> dict[str, str]:
    """Return each block's norms in a few words, by its name: `in layer 1e-05, out rms 1e-06`."""
    found: dict[str, str] = {}
    for block in program.network.blocks:
        words = (f"{s.where} {s.norm.kind} {s.norm.eps:g}" for s in block.sites)
        found[block.name] = ", ".join(words)
    return found


def told(found: Difference) -> str:
    """Return the table that `lnrewrite diff` prints, in at most 100 columns."""
    lines = [
        f"{sign} {p.model} ({p.format}, {p.placement}), {count:,} parameters"
        for sign, p, count in zip("AB", found.probes, found.parameters, strict=True)
    ]
    for sign, hosts in zip("AB", found.hosts or (), strict=False):
        lines.append(f"{sign} fits in: {'no checkpoint folder' if hosts is None else ', '.join(hosts) or 'no host'}")
    first = found.probes[0]
    lines += ["", f"on {first.data} data, {first.tokens:,} tokens:", f"outputs: {found.drift or found.why}", ""]
    cells = list(_cells(found))
    shown = [i for i, title in enumerate(HEADER) if title != "norms" or any(row[i] for row in cells)]
    lines += aligned([HEADER[i] for i in shown], [[row[i] for i in shown] for row in cells], HEADER[:3])
    tops = [p.fp16.max_abs for p in found.probes]
    lines += ["", f"the largest number (fp16 ends at 65504): {tops[0]:.4g} -> {tops[1]:.4g}"]
    counts = [len(p.massive) for p in found.probes]
    lines += [f"massive activations: {counts[0]} -> {counts[1]}"] if any(counts) else []
    notes = dict.fromkeys(note for p in found.probes for note in p.notes)
    return "\n".join(wrapped([*lines, *(f"note: {note}" for note in notes)]))


def _each(pair: Row, of: Callable[[BlockFigures, int], T]) -> list[T | None]:
    """Return something of both blocks of a row; `of` takes a block and which of the two models it is of."""
    return [None if block is None else of(block, side) for side, block in enumerate(pair)]


def _cells(found: Difference) -> Iterator[tuple[str, ...]]:
    """Yield a row for each block; norms are told where the placement alone does not tell how they differ."""
    behind = [_behind(p) for p in found.probes]
    for pair in found.rows():
        name = next(b.name for b in pair if b)
        placements = _each(pair, lambda b, _: b.placement)
        norms = _each(pair, lambda b, side: found.norms[side][b.name] or "none")
        differ = len(set(placements)) == 1 and len(set(norms)) > 1
        yield (
            shortened(name, _NAME),
            _words(placements),
            _words(norms) if differ else "",
            _pair(_each(pair, lambda b, _: b.branch_ratio)),
            _pair(_each(pair, lambda b, _: b.influence)),
            _pair(_each(pair, lambda b, side: behind[side][b.name].max_abs)),
        )


def _behind(found: Probe) -> dict[str, State]:
    """Return the state behind each block by its name: that of its sum."""
    return {b.name: state for stream in found.streams for state, blocks in stream.steps() for b in blocks}


def _words(pair: Sequence[str | None]) -> str:
    one, two = ("-" if value is None else value for value in pair)
    return one if one == two else f"{one} -> {two}"


def _pair(pair: Sequence[float | None]) -> str:
    return _words([None if value is None else f"{value:.3g}" for value in pair])
