"""A folder of ONNX files in, such a folder out: every graph rewritten or exported, all other files carried along."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
from onnx.external_data_helper import uses_external_data

from ..backends.onnx.file import data_names
from ..errors import Code, LnrewriteError
from ..files.output import check_folder
from ..ir import Exactness
from ..kernels.library import find
from ..loading.foreign import Json
from ..loading.source import Source
from ..models.onnx_program import OnnxProgram
from ..pipeline.job import Job, check_paths
from ..pipeline.report import Report
from ..runtime.generating import GENAI, read_json
from ..runtime.sessions import holds_operators
from .writing import carry, check_room, whole

Make = Callable[[OnnxProgram, Path], Report]
"""Writes a graph's successor to a file and reports on it."""


def rewrite_graphs(source: Source, job: Job, output: str | os.PathLike[str], *, force: bool = False) -> Report:
    """Run a pipeline on every graph of a folder and write a folder.

    The proof of each file covers what it gives of its cache: graphs that hand one to each other still fit together.
    Several graphs take exact passes alone, for data would fit each in its own way. Raises as rewriting a file does,
    LnrewriteError LN025, LN034.
    """
    exact = all(item.exactness < Exactness.CALIBRATED and not item.needs_data for item in job.pipeline.passes)
    if len(source.graphs) > 1 and not exact:
        why = f"it holds {len(source.graphs)} graphs, and passes that look at data would fit each in its own way"
        remedy = "convert the checkpoint that they were exported from, and export it; or name one of the files"
        raise LnrewriteError(Code.LN034, f"folder {source.name!r}", why, remedy)

    def make(program: OnnxProgram, path: Path) -> Report:
        check_paths(source.name, program.fixed_paths, job.accept_fixed_paths)
        result = job.run(program, job.batches(program))
        job.check(source.name, result.report)
        result.program.save(path)
        return result.report

    return _written(source, make, output, force)


def export_graphs(source: Source, output: str | os.PathLike[str], *, force: bool = False, **how: Any) -> Report:
    """Export every graph of a folder into a folder; how: as `lnrewrite.export.writer.export` takes it.

    Raises as that, and LnrewriteError LN025.
    """
    return _written(source, lambda program, path: program.export(path, **how), output, force)


def _written(source: Source, make: Make, output: str | os.PathLike[str], force: bool) -> Report:
    """Write a folder with what `make` makes of each graph, and all else that the source holds."""
    target = check_folder(output, source.file, force)
    check_room(target, source.file)
    reports, left = dict[str, Report](), {path for graph in source.graphs for path in files_of(graph)}
    with whole(target, source.file, force) as folder:
        for graph in source.graphs:
            program = OnnxProgram.open(graph, str(graph), source.how.inputs, source.how.seed)
            reports[graph.name] = make(program, folder / graph.name)
        carry(source.file, folder, lambda path: path in left)
        bring_kernels(folder)
    return replace(together(reports), output=str(target))


def files_of(graph: Path) -> list[Path]:
    """Return the files that an ONNX model lies in: its own, and those of its weights."""
    model = onnx.load(graph, load_external_data=False)
    named = {
        e.value
        for t in model.graph.initializer
        if uses_external_data(t)
        for e in t.external_data
        if e.key == "location"
    }
    return [graph, *(graph.parent / name for name in sorted({*named, *data_names(graph)}))]


def bring_kernels(folder: Path) -> None:
    """Copy lnrewrite's kernels beside graphs that hold operators of it, and name them in genai's config."""
    library = find() if any(map(holds_operators, folder.glob("*.onnx"))) else None
    if library is None:
        return
    shutil.copyfile(library, folder / library.name)
    if (folder / GENAI).is_file():
        held: Json = read_json(folder / GENAI)
        decoder = held.get("model", {}).get("decoder", {})
        if isinstance(decoder, dict):
            decoder.setdefault("session_options", {})["custom_ops_library"] = library.name
            write_json(folder / GENAI, held)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object of JSON for people to read."""
    path.write_text(json.dumps(content, indent=2, default=str) + "\n")


def together(reports: Mapping[str, Report], notes: Sequence[str] = ()) -> Report:
    """Return one report of several files: every row and note by its file, the proof that came out worst."""
    if len(reports) == 1 and not notes:
        return next(iter(reports.values()))
    first = next(iter(reports.values()))
    proofs = [report.proved for report in reports.values() if report.proved]
    losses = [report.measured for report in reports.values() if report.measured]
    forms = [replace(row, site=f"{name}: {row.site}") for name, r in reports.items() for row in r.norms or ()]
    steps = [replace(step, text=f"{name}: {step.text}") for name, r in reports.items() for step in r.steps]
    said: dict[str, list[str]] = {}
    for name, report in reports.items():
        for note in report.notes:
            said.setdefault(note, []).append(name)
    return replace(
        first, steps=tuple(steps), placement_before=_one(r.placement_before for r in reports.values()),
        placement_after=_one(r.placement_after for r in reports.values()),
        exactness=max(r.exactness for r in reports.values()),
        refusals=tuple(row.at(f"{name}: {row.site}") for name, r in reports.items() for row in r.refusals),
        not_applicable=tuple(row for r in reports.values() for row in r.not_applicable),
        measured=max(losses, key=lambda loss: loss.relative_error or 0.0, default=None),
        notes=(*notes, *(f"{', '.join(names)}: {note}" for note, names in said.items())),
        fixed_paths=tuple(dict.fromkeys(path for r in reports.values() for path in r.fixed_paths)),
        norms=tuple(forms) if first.norms is not None else None,
        proved=max(proofs, key=lambda each: each.found.max_rel, default=None),
    )  # fmt: skip


def _one(placements: Any) -> str:
    """Return the placement that all have, or that they differ."""
    found = set(placements)
    return found.pop() if len(found) == 1 else "mixed"
