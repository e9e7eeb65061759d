"""A folder of ONNX files in, such a folder out: every graph rewritten or exported, all other files carried along."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx
from onnx.external_data_helper import uses_external_data

from ..backends.onnx.branches import chosen, taken_apart
from ..backends.onnx.file import data_names, read
from ..backends.torch.crossed import FIRST, LATER
from ..errors import Code, LnrewriteError
from ..files.output import check_folder
from ..ir import Exactness
from ..kernels.library import find
from ..loading.foreign import Json
from ..loading.open import tokenizer_of
from ..loading.source import Source
from ..models.onnx_program import OnnxProgram
from ..models.twins import Follower, Leader, Tape
from ..pipeline.driver import Result
from ..pipeline.job import Job, check_paths
from ..pipeline.protocols import Batch
from ..pipeline.report import Report
from ..runtime.generating import GENAI, names_cuda, read_json, session_options
from ..runtime.sessions import holds_operators
from .writing import carry, check_room, whole

Make = Callable[[OnnxProgram, Path], Report]
"""Writes a graph's successor to a file and reports on it."""


def rewrite_graphs(source: Source, job: Job, output: str | os.PathLike[str], *, force: bool = False) -> Report:
    """Run a pipeline on every graph of a folder and write a folder.

    The proof of each file covers what it gives of its cache: graphs that hand one to each other still fit together.
    Of several graphs the one with the fewest inputs is run on data, and the others take over what it was told. Raises
    as rewriting a file does, LnrewriteError LN025, and LN034 where data meet graphs that are not of one network.
    """
    exact = all(item.exactness < Exactness.CALIBRATED and not item.needs_data for item in job.pipeline.passes)
    graphs = _graphs(source)
    together = _Together(job) if len(graphs) > 1 and not exact else None

    def make(program: OnnxProgram, path: Path) -> Report:
        check_paths(source.name, program.fixed_paths, job.accept_fixed_paths)
        result = together.run(program) if together else job.run(program, job.batches(program))
        job.check(source.name, result.report)
        result.program.save(path)
        return result.report

    return _written(source, _ordered(graphs) if together else graphs, make, output, force)


@dataclass
class _Together:
    """Run a job on graphs of one network: on data with the first, and on what that was told with the others.

    before, after: the first graph, as it was and as it became.
    """

    job: Job
    before: Tape | None = None
    after: Tape | None = None
    batches: list[Batch] | None = None

    def run(self, program: OnnxProgram) -> Result[OnnxProgram]:
        """Rewrite the next graph. Raises LnrewriteError LN034 where it did not change as the first did."""
        result = self.job.run(self.twin(program), self.batches)
        self.after = self.after.again(result.program) if self.after else Tape.of(result.program)
        return result

    def twin(self, program: OnnxProgram) -> OnnxProgram:
        """Return the next graph as one that is measured, or as one that follows."""
        if self.before:
            return Follower.on(program, self.before.again(program))
        data = self.job.batches(program)
        self.batches = None if data is None else list(data)
        self.before = Tape.of(program)
        return Leader.on(program, self.before)


Graphs = dict[str, Callable[[], OnnxProgram]]
"""What opens each graph, by the name of the file that is written of it."""


def _graphs(source: Source) -> Graphs:
    """Return the graphs of a folder; a decoder that was merged is two, unless they lie there besides.

    Raises as reading a file does.
    """
    made, parts = Graphs(), Graphs()
    for path in source.graphs:
        if chosen(read(path, str(path))):
            if parts:
                why = "it holds two files with two graphs each"
                raise LnrewriteError(Code.LN034, f"folder {source.name!r}", why, "keep one of them in it")
            parts |= {f"{name}.onnx": partial(_part, source, path, i) for i, name in enumerate((FIRST, LATER))}
        else:
            made[path.name] = partial(_opened, source, path)
    return parts | made


def _opened(source: Source, path: Path) -> OnnxProgram:
    return OnnxProgram.open(path, str(path), source.how.inputs, source.how.seed, tokenizer_of(source))


def _part(source: Source, path: Path, index: int) -> OnnxProgram:
    part = taken_apart(read(path, str(path)))[index]
    return OnnxProgram.of(part, str(path), source.how.inputs, source.how.seed, tokenizer_of(source))


def _ordered(graphs: Graphs) -> Graphs:
    """Return graphs of one network, the one with the fewest inputs first. Raises LnrewriteError LN034 for others."""
    programs = {name: opened() for name, opened in graphs.items()}
    order = sorted(graphs, key=lambda name: len(programs[name].model.graph.inputs))
    first = Tape.of(programs[order[0]])
    for name in order[1:]:
        first.again(programs[name])
    return {name: graphs[name] for name in order}


def export_graphs(source: Source, output: str | os.PathLike[str], *, force: bool = False, **how: Any) -> Report:
    """Export every graph of a folder into a folder; how: as `lnrewrite.export.writer.export` takes it.

    Raises as that, and LnrewriteError LN025.
    """
    graphs = _graphs(source)
    return _written(source, graphs, lambda program, path: program.export(path, **how), output, force, how.get("target"))


def _written(
    source: Source,
    graphs: Graphs,
    make: Make,
    output: str | os.PathLike[str],
    force: bool,
    target: str | None = None,
) -> Report:
    """Write a folder with what `make` makes of each graph, and all else that the source holds."""
    place = check_folder(output, source.file, force)
    check_room(place, source.file)
    reports, left = dict[str, Report](), {path for graph in source.graphs for path in files_of(graph)}
    with whole(place, source.file, force) as folder:
        for name, opened in graphs.items():
            reports[name] = make(opened(), folder / name)
        carry(source.file, folder, lambda path: path in left)
        tell_genai(folder, target)
    return replace(together(reports), output=str(place))


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


def tell_genai(folder: Path, target: str | None = None) -> None:
    """Copy lnrewrite's kernels beside graphs that hold operators of it; let genai's config name them and the provider.

    target: what the graphs were exported for; a config that names another provider than CUDA keeps it.
    """
    library = find() if any(map(holds_operators, folder.glob("*.onnx"))) else None
    if library is not None:
        shutil.copyfile(library, folder / library.name)
    if (library is None and target is None) or not (folder / GENAI).is_file():
        return
    held: Json = read_json(folder / GENAI)
    options = session_options(held)
    if library is not None:
        options["custom_ops_library"] = library.name
    if target == "cuda" and not options.get("provider_options"):
        options["provider_options"] = [{"cuda": {"enable_cuda_graph": "0"}}]
    if target == "cpu" and names_cuda(options):
        options["provider_options"] = []
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
