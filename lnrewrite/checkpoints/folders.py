"""A transformers folder in, a transformers folder out: weights shard by shard, all other files carried along."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..backends.surgery import Surgery
from ..backends.torch.capture import Capture, capture_module, quiet
from ..backends.torch.feeding import flat_inputs
from ..backends.torch.lift import parameter_names
from ..backends.torch.module import CapturedModule, stored
from ..backends.torch.widened import Read, Widened
from ..comparison.proving import Evidence, away, evidence
from ..data.infer import infer_inputs, vocabulary_of
from ..data.inputs import parse_inputs
from ..errors import Code, LnrewriteError
from ..files.output import check_folder
from ..ir import Exactness, Proposal, Stream
from ..live.difference import Recipe
from ..live.ports import children
from ..live.rewriting import EXACT, ROUNDED, difference, restructure, rewrite
from ..live.saving import RECORD
from ..loading.checkpoint import empty_model
from ..loading.identify import Form, identify
from ..loading.open import Opened, open_module
from ..models.program import Program, check_values
from ..pipeline.driver import Pipeline
from ..pipeline.protocols import Batch
from ..pipeline.report import Report
from .shards import Stored
from .stored import Store, StoredEditor
from .writing import Done, Source, check_room, held_by, whole, write_folder


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

    def away(self, evidence: Evidence) -> float:
        """Return how far this program's outputs are from another's evidence, relative; 0 where rounding explains it."""
        return away(self.module(), evidence, self.read)

    def read(self, param: str) -> torch.Tensor:
        """Return a parameter's values from where they are stored."""
        return self.store.read(self.names[param])

    @property
    def narrow(self) -> bool:
        """Return False: nothing is run on the weights, so that no drift is measured."""
        return False

    def apply(self, edits: Sequence[tuple[Stream, Proposal]], label: str, *, consume: bool = False) -> tuple[Self, int]:
        """Carry the structure's edits out on a copy, and note those of the weights."""
        module, store = copy.deepcopy(self._capture.module), self.store.fork()
        vectors = {k: v for _, p in edits for k, v in p.vectors.items()}
        count = Surgery(StoredEditor(module, store), self.graph, vectors).carry_out(edits, label)
        capture = replace(self._capture, module=module)
        return type(self)(capture, store, format=self.format, tokenizer=self.tokenizer), count


def rewrite_folder(
    model: str,
    pipeline: Pipeline,
    output: str | os.PathLike[str],
    *,
    calibrate: Callable[[Program], Iterable[Batch] | None] | None = None,
    data: str | None = None,
    partial: bool = False,
    seed: int = 0,
    force: bool = False,
    trust_pickle: bool = False,
    trust_remote_code: bool = False,
    inputs: Sequence[str] = (),
    progress: Callable[[str], None] | None = None,
    verify: bool = True,
    check: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Run a pipeline on a transformers checkpoint folder and write a folder: shards, config, tokenizer, all of it.

    Where the passes look at no activations, the weights are streamed: one shard's changed tensors are in memory at a
    time. Else the model is loaded and rewritten in place (see `rewrite`), and what was written is loaded again and
    compared. A result that is no architecture of transformers' own gets a modeling file: it needs
    `trust_remote_code=True` to load, and not lnrewrite. `calibrate` gives batches for the captured program, `inputs`
    are `--input` specifications; `verify`: false leaves out the proof of exact passes; `check` may raise, looking
    at the report, before anything is written. Written whole or not at all.
    Raises Refused, LnrewriteError LN025, LN310, LN313, and what opening the folder raises.
    """
    form, say = identify(model), progress or (lambda message: None)
    assert form.path is not None
    target = check_folder(output, form.path, force)
    check_room(target, form.path)
    done = None
    if all(item.exactness < Exactness.CALIBRATED and not item.needs_data for item in pipeline.passes):
        done = _streamed(form, pipeline, partial, seed, inputs, say, trust_remote_code, verify)
    if done is None:
        say(f"loading {model}")
        load = functools.partial(open_module, trust_pickle=trust_pickle, trust_remote_code=trust_remote_code)
        done = _loaded(form, load, pipeline, calibrate, data, partial, seed, inputs, say, verify)
    check(done.report)
    with whole(target, form.path, force) as folder:
        write_folder(folder, form.path, done, str(pipeline), say)
        say("checking what was written")
        done.check(folder)
    return replace(done.report, output=str(target))


def _streamed(
    form: Form,
    pipeline: Pipeline,
    partial: bool,
    seed: int,
    inputs: Sequence[str],
    say: Callable[[str], None],
    trust_remote_code: bool,
    verify: bool,
) -> Done | None:
    """Rewrite a model without its weights; None where the folder does not hold them as the network names them."""
    assert form.path is not None
    paths = sorted(form.path.glob("*.safetensors"))
    if not paths:
        return None
    dtype = _dtype(held_by(paths[0]))
    module = empty_model(form, dtype, trust_remote_code=trust_remote_code)
    source = Source.read(form.path, module)
    if source is None:
        return None
    say("checking the weights")
    for name, key in source.keys.items():
        check_values(name, source.files[key].values())
    buffers = {n: b.clone() for n, b in module.named_buffers()}
    module.to("meta")
    empty = _inputs(module, inputs, seed)
    fixed: dict[str, Any] = {}  # no axis needs to be dynamic where nothing is run
    taken = capture_module(module, (), empty, fixed, lambda a, k: children(module, a, k))
    store = Store({n: source.files[key] for n, key in source.keys.items()}, buffers)
    program = StoredProgram(taken, store, format=form.format)
    result = pipeline.run(program, None, partial, seed, progress=say, verify=verify)
    note = "the weights were streamed: lnrewrite verify compares the two folders with both in memory"
    report = replace(result.report, notes=(*result.report.notes, note))
    recipe = difference(module, program, result.program) if result.program is not program else Recipe()
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
        again = empty_model(identify(str(folder)), dtype, trust_remote_code=trust_remote_code)
        written = Source.read(folder, again)
        if written is None:
            raise _not_as_planned(form, "what was written lacks weights that the network has")
        if recipe.changes:
            _check_ties(form, module, again)
            now = Store({n: written.files[key] for n, key in written.keys.items()}, dict(again.named_buffers()))
            captured = capture_module(again.to("meta"), (), empty, fixed).module
            given = _drawn(empty, program.id_limits(), seed)
            names = parameter_names(captured)
            plan = _run(after.module(), after.read, given)
            _compare(form, plan, _run(captured, lambda name: now.read(names[name]), given))

    return Done(report, module, recipe.changes, source, read, lambda name: after.store.form(known(name)), check)


def _dtype(files: Mapping[str, Stored]) -> torch.dtype:
    """Return the dtype of the largest tensor of floating point numbers."""
    floats = [where for where in files.values() if where.dtype.is_floating_point]
    return max(floats, key=lambda where: prod(where.shape)).dtype if floats else torch.float32


def _inputs(module: nn.Module, specs: Sequence[str], seed: int) -> dict[str, Any]:
    """Return keyword inputs: as specified, else inferred."""
    if specs:
        return dict(parse_inputs(list(specs), seed=seed, vocabulary=vocabulary_of(module)).kwargs)
    return dict(infer_inputs(module, seed).kwargs)


def _loaded(
    form: Form,
    load: Callable[[str], Opened],
    pipeline: Pipeline,
    calibrate: Callable[[Program], Iterable[Batch] | None] | None,
    data: str | None,
    partial: bool,
    seed: int,
    inputs: Sequence[str],
    say: Callable[[str], None],
    verify: bool,
) -> Done:
    """Rewrite a model in memory, in place; `load` opens it, and what was written of it."""
    opened = load(form.name)
    module = opened.module
    assert module is not None and form.path is not None
    given = _inputs(module, inputs, seed)
    source = Source.read(form.path, module)
    batches = None
    if calibrate is not None:
        say("reading the calibration data")
        batches = calibrate(Program(capture_module(module, (), given), format=opened.kind, tokenizer=opened.tokenizer))
    report = rewrite(
        module,
        pipeline,
        kwargs=given,
        calibrate=batches,
        partial=partial,
        seed=seed,
        undo=False,
        data=data,
        progress=say,
        verify=verify,
    )
    records = vars(module).get(RECORD, [])

    def check(folder: Path) -> None:
        """Load what was written and compare."""
        again = load(str(folder)).module
        assert again is not None
        _check_ties(form, module, again)
        with torch.no_grad():
            _compare(form, module(**given), again(**given))

    state = module.state_dict()
    changes = records[-1].recipe if records else []

    def shape(name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        return state[name].dtype, tuple(state[name].shape)

    return Done(report, module, changes, source, lambda name: [state[name]], shape, check)


def _compare(form: Form, planned: Any, found: Any) -> None:
    """Raise LnrewriteError LN313 where two models' outputs differ by more than their dtype rounds."""
    leaves = [[t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)] for tree in (planned, found)]
    pairs = [(a.double(), b.double()) for a, b in zip(*leaves, strict=True) if a.is_floating_point() and a.numel()]
    worst = max(((a - b).abs().max() / a.abs().max().clamp_min(1e-30)).item() for a, b in pairs)
    narrow = any(t.dtype in (torch.float16, torch.bfloat16) for t in leaves[0])
    if not worst <= (ROUNDED if narrow else EXACT):
        why = f"loaded again, its outputs are {worst:.1e} (relative) from what was planned"
        raise _not_as_planned(form, why)


def _check_ties(form: Form, module: nn.Module, again: nn.Module) -> None:
    """Raise LnrewriteError LN313 where a class ties again what was untied."""
    ours, theirs = parameter_names(module), parameter_names(again)
    if tied := next((n for n, first in theirs.items() if n != first and ours.get(n) == n), None):
        raise _not_as_planned(form, f"{type(again).__name__} ties {tied} to {theirs[tied]} whatever its config says")


def _not_as_planned(form: Form, why: str) -> LnrewriteError:
    remedy = "take -o OUT.pt2, or rewrite the loaded module (lnr.rewrite)"
    return LnrewriteError(Code.LN313, f"model {form.name!r}", why, remedy)


def _drawn(inputs: Mapping[str, Any], rows: Mapping[str, int], seed: int) -> dict[str, Any]:
    """Return inputs with values for inputs without: ids below a table's rows, ones, or normal numbers."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, like: Any) -> Any:
        if not isinstance(like, torch.Tensor):
            return like
        if like.is_floating_point():
            return torch.randn(like.shape, generator=generator).to(like.dtype)
        ids = torch.randint(rows[name], like.shape, generator=generator) if name in rows else torch.ones(like.shape)
        return ids.to(like.dtype)

    return {name: draw(name, like) for name, like in inputs.items()}


def _run(module: CapturedModule, read: Read, inputs: Mapping[str, Any]) -> Any:
    """Run a captured module whose weights are on disk: each is read when it is used, and dropped."""
    given = {k: v for k, v in inputs.items() if k not in module.signature.constants}
    with torch.no_grad(), quiet():
        flat = flat_inputs(module, given)
        return Widened(module, wide=False, read=read).run(*flat, enable_io_processing=False)
