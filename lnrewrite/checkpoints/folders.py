"""A transformers folder in, a transformers folder out: weights shard by shard, all other files carried along."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from ..backends.inputs import draw, spec_of
from ..backends.rewriter import Rewriter
from ..backends.torch.capture import Capture, capture_module, quiet
from ..backends.torch.feeding import flat_inputs
from ..backends.torch.lift import parameter_names
from ..backends.torch.module import CapturedModule, stored
from ..backends.torch.widened import HALVES, Read, Widened, worked_out
from ..comparison.proving import Evidence, away, evidence
from ..compat.torch import tensors_in
from ..data.infer import given_inputs, infer_inputs
from ..detect.arithmetic import Floats
from ..errors import Code, LnrewriteError
from ..files.output import check_folder
from ..ir import Exactness, Kind, Proposal, Stream, Where
from ..ir.inputs import InputSpec, plain_content
from ..live.ports import children
from ..live.recipes import Recipe
from ..live.rewriting import EXACT, ROUNDED, difference, restructure, rewrite
from ..live.undoing import RECORD
from ..loading.checkpoint import empty_model
from ..loading.identify import identify
from ..loading.open import open_module
from ..loading.source import Source
from ..models.program import Program, check_values
from ..pipeline.job import Job
from ..pipeline.report import Report
from ..pipeline.results import Gap
from ..quiet import LOGGER
from .shards import Stored
from .stored import Store, StoredEditor
from .writing import Done, Weights, check_room, held_by, write_checked


class StoredProgram(Program):
    """Hold a model that was captured without its weights: they are read from the folder when something asks."""

    def __init__(self, capture: Capture, store: Store, **how: Any) -> None:
        super().__init__(capture, **how)
        self.store, self.names = store, parameter_names(capture.module)

    def _held(self, param: str) -> torch.Tensor | None:
        return None if stored(self._capture.module, param) is None else self.read(param)

    def _evidence(self, seed: int) -> Evidence | None:
        given = _drawn(self.example_inputs(), self.id_limits(), seed)
        return evidence(self.module(), [given], self.read)

    def away(self, evidence: Evidence) -> Gap:
        """Return how far this program's outputs are from another's evidence."""
        return away(self.module(), evidence, self.read)

    def _worked_out(self, name: str) -> Floats:
        return self._array(worked_out(self.module(), name, self.read))

    def read(self, param: str) -> torch.Tensor:
        """Return a parameter's values from where they are stored."""
        return self.store.read(self.names[param])

    def dtype(self, param: str) -> torch.dtype:
        """Return the dtype in which a parameter is stored."""
        return self.store.form(self.names[param])[0]

    def rows(self, param: str, which: slice) -> torch.Tensor:
        """Return some of a parameter's rows from where they are stored."""
        return self.store.rows(self.names[param], which)

    @property
    def narrow(self) -> bool:
        """Return False: nothing is run on the weights, so that no drift is measured."""
        return False

    def apply(self, edits: Sequence[tuple[Stream, Proposal]], label: str, *, consume: bool = False) -> tuple[Self, int]:
        """Carry the structure's edits out on a copy, and note those of the weights."""
        module, store = copy.deepcopy(self._capture.module), self.store.fork()
        vectors = {k: v for _, p in edits for k, v in p.vectors.items()}
        count = Rewriter(StoredEditor(module, store), self.graph, vectors).carry_out(edits, label)
        capture = replace(self._capture, module=module)
        return type(self)(capture, store, format=self.format, tokenizer=self.tokenizer), count


def rewrite_folder(source: Source, job: Job, output: str | os.PathLike[str], *, force: bool = False) -> Report:
    """Run a pipeline on a transformers checkpoint folder and write a folder: shards, config, tokenizer, all of it.

    Where the passes look at no activations, the weights are streamed: one shard's changed tensors are in memory at a
    time. Else the model is loaded and rewritten in place (see `rewrite`), and what was written is loaded again and
    compared. A result that is not an architecture of transformers' own gets a modeling file: it needs
    `trust_remote_code=True` to load, and not lnrewrite. Written whole or not at all.
    Raises Refused, LnrewriteError LN025, LN033, LN310, LN313, and what opening the folder raises.
    """
    target = check_folder(output, source.file, force)
    check_room(target, source.file)
    found = None
    if all(item.exactness < Exactness.CALIBRATED and not item.needs_data for item in job.pipeline.passes):
        found = _streamed(source, job)
    if found is None:
        LOGGER.info(f"loading {source.name}")
        found = _loaded(source, job)
    report, done = found
    job.check(source.name, report)
    write_checked(target, source.file, done, str(job.pipeline), force)
    return replace(report, output=str(target))


def _streamed(source: Source, job: Job) -> tuple[Report, Done] | None:
    """Rewrite a model without its weights; None where the folder does not hold them as the network names them."""
    paths = sorted(source.file.glob("*.safetensors"))
    if not paths:
        return None
    dtype = _dtype(held_by(paths[0]))
    module = empty_model(source, dtype)
    weights = Weights.read(source.file, module)
    if weights is None:
        return None
    LOGGER.info("checking the weights")
    for name, key in weights.keys.items():
        check_values(name, weights.files[key].rows())
    buffers = {n: b.clone() for n, b in module.named_buffers()}
    module.to("meta")
    empty = _inputs(module, source)
    fixed: dict[str, object] = {}  # no axis needs to be dynamic where nothing is run
    taken = capture_module(module, (), empty, fixed, lambda a, k: children(module, a, k))
    store = Store({n: weights.files[key] for n, key in weights.keys.items()}, buffers)
    program = StoredProgram(taken, store, format=source.format)
    result = job.run(program, None)  # no pass looks at data, and nothing is run
    note = "the weights were streamed: lnrewrite verify compares the two folders with both in memory"
    report = replace(result.report, notes=(*result.report.notes, note))
    recipe = difference(module, program, result.program) if result.program is not program else Recipe(module)
    restructure(module, recipe)
    after = result.program

    def known(name: str) -> str:
        origin = recipe.values.get(name, name)
        return after.names.get(origin, origin)

    def read(name: str) -> Iterable[torch.Tensor]:
        if name in recipe.neutral:
            dtype, shape = after.store.form(name)
            return [torch.full(shape, recipe.neutral[name], dtype=dtype)]
        return after.store.pieces(known(name))

    def check(folder: Path) -> None:
        """Open the folder without its weights; where its structure is new, run it and the plan, weights from disk."""
        again = empty_model(identify(str(folder), source.how), dtype)
        written = Weights.read(folder, again)
        if written is None:
            raise not_as_planned(source, "the written folder lacks weights that the network has")
        if recipe.changes:
            check_ties(source, module, again)
            now = Store({n: written.files[key] for n, key in written.keys.items()}, dict(again.named_buffers()))
            captured = capture_module(again.to("meta"), (), empty, fixed).module
            given = _drawn(empty, program.id_limits(), job.seed)
            names = parameter_names(captured)
            plan = from_disk(after.module(), after.read, given)
            compared(source, plan, from_disk(captured, lambda name: now.read(names[name]), given))

    def form(name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        return after.store.form(known(name))

    flags = {} if recipe.changes or after is program else weightless(after)
    if flags:
        report = replace(report, notes=(*report.notes, f"config.json says {', '.join(flags)}: gains are folded away"))
    return report, Done(module, recipe.changes, weights, read, form, check, flags)


def weightless(program: Program) -> dict[str, object]:
    """Return the config's flags that tell servers of norms without gains (FlashNorm, arXiv 2407.09577).

    `flash_norm` where those that blocks read through have none (GeeeekExplorer/nano-vllm#220), `flashnorm_folded` where
    the final one has none either (vllm-project/vllm#41431). Empty for networks whose blocks have other norms.
    """
    sites = [site for s in program.network.streams for _, site in s.sites() if site.where is not Where.INNER]
    inner = [site.norm for site in sites if site.where is Where.IN]
    final = [site.norm for site in sites if site.where is Where.FINAL]
    plain = all(norm.kind is Kind.RMS and not norm.plus_one for norm in (*inner, *final))
    if not plain or not inner or len(sites) != len(inner) + len(final):
        return {}
    bare = [all(not n.gamma or program.is_ones(n.gamma) for n in norms) for norms in (inner, final)]
    return {"flash_norm": True, **({"flashnorm_folded": True} if bare[1] else {})} if bare[0] else {}


def _dtype(files: Mapping[str, Stored]) -> torch.dtype:
    """Return the dtype of the largest tensor of floating point numbers."""
    floats = [where for where in files.values() if where.dtype.is_floating_point]
    return max(floats, key=lambda where: prod(where.shape)).dtype if floats else torch.float32


def _inputs(module: nn.Module, source: Source) -> dict[str, object]:
    """Return keyword inputs: as specified, else inferred."""
    return dict((given_inputs(module, source.how) or infer_inputs(module, source.how.seed)).kwargs)


def _loaded(source: Source, job: Job) -> tuple[Report, Done]:
    """Rewrite a model in memory, in place."""
    opened = open_module(source)
    module = opened.module
    assert module is not None
    given = _inputs(module, source)
    weights = Weights.read(source.file, module)
    batches = None
    if job.read:
        taken = capture_module(module, (), given)
        batches = job.read(Program(taken, format=opened.kind, tokenizer=opened.tokenizer))
    report = rewrite(
        module,
        job.pipeline,
        kwargs=given,
        calibrate=batches,
        partial=job.partial or job.lenient,
        seed=job.seed,
        undo=False,
        data=job.data,
        verify=job.verify,
    )
    records = vars(module).get(RECORD, [])

    def check(folder: Path) -> None:
        """Load what was written and compare."""
        again = open_module(identify(str(folder), source.how)).module
        assert again is not None
        check_ties(source, module, again)
        with torch.no_grad():
            compared(source, module(**given), again(**given))

    changes = records[-1].recipe if records else []
    return report, Done.in_memory(module, changes, weights, check)


def compared(source: Source, planned: object, found: object, *, elsewhere: bool = False) -> None:
    """Raise LnrewriteError LN313 where two models' outputs differ by more than their dtype rounds.

    elsewhere: one was computed on another device, or in another precision.
    """
    leaves = [tensors_in(tree) for tree in (planned, found)]
    pairs = [(a.double(), b.double()) for a, b in zip(*leaves, strict=True) if a.is_floating_point() and a.numel()]
    worst = max(((a - b).abs().max() / a.abs().max().clamp_min(1e-30)).item() for a, b in pairs)
    narrow = elsewhere or any(t.dtype in HALVES for t in leaves[0])
    if not worst <= (ROUNDED if narrow else EXACT):
        why = f"loaded again, its outputs are {worst:.1e} (relative) from what was planned"
        raise not_as_planned(source, why)


def check_ties(source: Source, module: nn.Module, again: nn.Module) -> None:
    """Raise LnrewriteError LN313 where a class ties again what was untied."""
    ours, theirs = parameter_names(module), parameter_names(again)
    if tied := next((n for n, first in theirs.items() if n != first and ours.get(n) == n), None):
        raise not_as_planned(source, f"{type(again).__name__} ties {tied} to {theirs[tied]} whatever its config says")


def not_as_planned(source: Source, why: str) -> LnrewriteError:
    remedy = "use -o OUT.pt2, or rewrite the loaded module (lnr.rewrite)"
    return LnrewriteError(Code.LN313, f"model {source.name!r}", why, remedy)


def _drawn(inputs: Mapping[str, object], rows: Mapping[str, int], seed: int) -> dict[str, object]:
    """Return inputs with values for inputs without: ids below a table's rows, ones, or normal numbers."""
    spec = spec_of(inputs, {}, rows)
    plain = (replace(each, content=plain_content(each.dtype, each.rows)) for each in spec)
    return {**inputs, **draw(InputSpec(tuple(plain)), seed)}


def from_disk(module: CapturedModule, read: Read, inputs: Mapping[str, object]) -> object:
    """Run a captured module whose weights are on disk: each is read when it is used, and dropped."""
    given = {k: v for k, v in inputs.items() if k not in module.signature.constants}
    with torch.no_grad(), quiet():
        flat = flat_inputs(module, given)
        return Widened(module, wide=False, read=read).run(*flat, enable_io_processing=False)
