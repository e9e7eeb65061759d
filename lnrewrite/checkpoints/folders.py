"""A transformers folder in, a transformers folder out: weights shard by shard, all other files carried along."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ..backends.torch.capture import capture_module
from ..backends.torch.contexts import quiet
from ..backends.torch.feeding import flat_inputs
from ..backends.torch.lift import parameter_names
from ..backends.torch.module import CapturedModule, signature_of
from ..backends.torch.widened import HALVES, Read, Widened
from ..compat.torch import tensors_in
from ..data.infer import given_inputs, infer_inputs
from ..errors import Code, LnrewriteError
from ..files.output import check_folder
from ..ir import Exactness, Kind, Where
from ..live.recipes import Recipe
from ..live.rewriting import EXACT, ROUNDED, difference, restructure, rewrite
from ..live.undoing import RECORD
from ..loading.checkpoint import empty_model
from ..loading.identify import identify
from ..loading.open import open_module
from ..loading.source import Source
from ..models.program import Program
from ..pipeline.base import Pass
from ..pipeline.driver import Pipeline
from ..pipeline.job import Job
from ..pipeline.protocols import Proposer
from ..pipeline.report import Report
from ..pipeline.shares import shared
from ..quiet import LOGGER
from .kept import is_large, on_disk
from .stored import Store
from .streaming import drawn
from .writing import Done, Weights, check_room, write_checked

UNFITTED = (
    "the folder is large, so that constants alone were fitted to the data; with --fit reconstruct the weights of its "
    "branches are, in memory: some eighty passes over the data, and several times the folder's size"
)


def rewrite_folder(source: Source, job: Job, output: str | os.PathLike[str], *, force: bool = False) -> Report:
    """Run a pipeline on a transformers checkpoint folder and write a folder: shards, config, tokenizer, all of it.

    Where the passes look at no activations, or the folder is large, the weights are streamed: those of one part of the
    model are in memory at a time. Else the model is loaded and rewritten in place (see `rewrite`), and what was written
    is loaded again and compared. Weights of branches are fitted in memory alone: of large folders where that is asked
    for (fit=reconstruct). A result that is not an architecture of transformers' own gets a modeling file: it needs
    `trust_remote_code=True` to load, and not lnrewrite. Written whole or not at all.
    Raises Refused, LnrewriteError LN025, LN033, LN310, LN313, and what opening the folder raises.
    """
    target = check_folder(output, source.file, force)
    check_room(target, source.file)
    exact = all(item.exactness < Exactness.CALIBRATED and not item.needs_data for item in job.pipeline.passes)
    found, plain = None, job
    if not exact and is_large(source):
        plain = replace(job, pipeline=Pipeline(tuple(map(frugal, job.pipeline.passes))))
    if exact or is_large(source) and not any(map(fits, plain.pipeline.passes)):
        found = _streamed(source, plain, exact)
    if found is None:
        LOGGER.info(f"loading {source.name}")
        found = _loaded(source, plain)
    report, done = found
    if job.read and plain.pipeline != job.pipeline:
        report = replace(report, notes=(*report.notes, UNFITTED))
    job.check(source.name, report)
    if job.shares.first:
        write_checked(target, source.file, done, str(job.pipeline), force)
    return replace(report, output=str(target))


def fits(item: Proposer) -> bool:
    """Return whether a pass has weights of branches fitted to data."""
    return isinstance(item, Pass) and item.plainer is not None


def frugal(item: Proposer) -> Proposer:
    """Return a pass with constants alone, unless it says itself that more is to be fitted."""
    plainer = item.plainer if isinstance(item, Pass) else None
    return plainer if plainer is not None and getattr(item, "fit", "auto") == "auto" else item


def _streamed(source: Source, job: Job, exact: bool) -> tuple[Report, Done] | None:
    """Rewrite a model without its weights; None where the folder does not hold them as the network names them.

    Also where it chooses its path by its data, and is to be run on such.
    """
    fixed: dict[str, object] = {}  # no axis needs to be dynamic where nothing is run
    found = on_disk(source, fixed if exact else None)
    if found is None or not exact and found[1].fixed_paths:
        return None
    held, program = found
    module, inputs = held.module, program.example_inputs()
    result = job.run(program, None if exact else job.batches(program))
    note = "the weights were streamed; lnrewrite verify compares the two folders"
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
        shift = recipe.shifted.get(name, 0.0)
        return (piece + shift if shift else piece for piece in after.store.pieces(known(name)))

    def check(folder: Path) -> None:
        """Open the folder without its weights; where anything changed, run it and the plan, weights from disk."""
        again = empty_model(identify(str(folder), source.how), held.dtype)
        written = Weights.read(folder, again)
        if written is None:
            raise not_as_planned(source, "the written folder lacks weights that the network has")
        if after is not program:
            check_ties(source, module, again)
            now = Store({n: written.files[key] for n, key in written.keys.items()}, dict(again.named_buffers()))
            captured = capture_module(again.to("meta"), (), inputs, fixed).module
            given = drawn(inputs, program.id_limits(), job.seed)
            names = parameter_names(captured)
            plan = from_disk(after.module(), after.read, given)
            compared(source, plan, from_disk(captured, lambda name: now.read(names[name]), given))

    def form(name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        return after.store.form(known(name))

    flags = {} if recipe.changes or after is program else weightless(after)
    if flags:
        report = replace(report, notes=(*report.notes, f"config.json says {', '.join(flags)}: gains are folded away"))
    return report, Done(module, recipe.changes, held.weights, read, form, check, flags)


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
    with shared(job.shares):
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


def from_disk(module: CapturedModule, read: Read, inputs: Mapping[str, object]) -> object:
    """Run a captured module whose weights are on disk: each is read when it is used, and dropped."""
    given = {k: v for k, v in inputs.items() if k not in signature_of(module).constants}
    with torch.no_grad(), quiet():
        flat = flat_inputs(module, given)
        return Widened(module, wide=False, read=read).run(*flat, enable_io_processing=False)
