"""Heal: check that teacher, student and data belong together, run, and give back what was trained."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..backends.inputs import Tensors
from ..backends.torch.contexts import evaluating
from ..data.batches import Data
from ..errors import Code, UsageError
from ..models.program import Program
from ..pipeline.results import Json
from ..quiet import LOGGER
from .budget import Budget, Wanted, divided
from .config import OF_STUDENTS, HealingConfig, check_control
from .distributed import World
from .living import LivingStudent, check_frozen, frozen_in, program_of
from .losses import Mix, Objective
from .opening import Reading, held_out_of, open_source, tokenizer_named
from .outputs import FileOutput, Output, output_named
from .pairing import Pair
from .participant import Participant
from .report import HealingReport
from .running import Healing
from .snapshots import Snapshots, check_run
from .sources import TARGETS, BatchSource, Early, IterableSource


@dataclass(frozen=True, eq=False)
class Healed:
    """Hold what a run gave: the healed `program`, and the `report`, which prints itself.

    `module` is the program's trainable module, or the student itself where that was a living module.
    """

    program: Program
    module: nn.Module
    report: HealingReport


def heal(
    teacher: Program | nn.Module,
    student: Program | nn.Module,
    data: object,
    config: HealingConfig | None = None,
    *,
    output: str | Path | Output | None = None,
    held_out: str | Path | None = None,
    length: int | None = None,
    tokenizer: object = None,
    field: str = "text",
    kwargs: Mapping[str, object] | None = None,
    run: str | Path | None = None,
    control_run: str | Path | None = None,
    resume: bool = False,
    restart: bool = False,
    force: bool = True,
    device: str = "cpu",
    **choices: Any,
) -> Healed:
    """Train a converted model back to its teacher's quality, and say how near it came to a control.

    teacher, student: programs, or modules in Python with example inputs in `kwargs`; such a student is trained in
    place and compared with its graph, any other stays as it was. data: documents (.txt, .jsonl, .parquet, or an
    iterable of strings or of mappings with `field`), tokens (.bin, .npy [count]), arrays of rows [count, ...],
    `pkg.module:iterable`, or an iterable of batches: dicts of the model's inputs, and `labels` [batch, ...] where there
    are targets. A part of it is held out, or `held_out` names other data. length: tokens of a window cut from a text.
    tokenizer: its folder, or one of transformers; None takes that of the teacher's folder. config, or its fields as
    keywords: steps=1000, progressive=True, lr=1e-4, as `HealingConfig` explains them.

    output: where to write the result (.pt2 or .onnx); `force`: over what stands there. run: the folder of checkpoints,
    log.jsonl and loss.html; None uses a temporary one. resume: go on where that run stopped; the same seed gives the
    same weights. restart: drop what a run that did not finish left there. control_run: a folder that keeps the trained
    control, three times the teacher's size; further healings of that teacher on the same data, by the same tokens and
    seed, take it from there. Parameters of a student
    module that take no gradient stay, where others take one. Dropout stays off. Under torchrun work and
    networks are shared over all processes (FSDP2); the programs and modules that a process was given stay with it.

    Raises LnrewriteError: LN022 data, LN601 the student is no conversion of the teacher, LN602 no exact start, LN604
    NaN, LN605 run folder, LN025 no room; UsageError LN003. Sources: local, then global: arXiv 2410.10254; removal by
    degrees: 2507.02559, 2602.10408; weight decay: 2605.26895.
    """
    plan = replace(config or HealingConfig(), **choices)
    data = os.fspath(data) if isinstance(data, os.PathLike) else data
    if run:
        check_run(Path(run), resume, restart)
    check_control(plan, run, control_run)
    target = output_named(output, force)
    apart = os.fspath(held_out) if held_out else None
    given = _Given(plan, data, apart, length, tokenizer, field, run, control_run, resume, restart)
    world = World.join(device, (plan.batch_size or 0) // plan.accumulate)
    with contextlib.ExitStack() as stack:
        stack.callback(world.leave)
        stack.enter_context(torch.random.fork_rng([world.device] if world.device.type == "cuda" else []))
        place = world.device if world.size == 1 else None  # of many, each holds its parts there and no more
        check_frozen(frozen := frozen_in(student), plan)
        programs = [program_of(model, kwargs, place) for model in (teacher, student)]
        for program in programs:
            stack.enter_context(evaluating(program.module()))
        (pair := Pair(*programs)).check()
        if isinstance(target, FileOutput):
            pair.student.check_save(target.path)
        healing = given.healing(pair, world, stack)
        healing.living, healing.frozen = LivingStudent.of((teacher, student), pair, plan), frozen
        healed, program, report = healing.run()
        module = healing.living.take(program, healing.shown) if healing.living else program.module()
        if target:
            if world.first:
                LOGGER.info(f"writing {target}")
            target.write(healed, program, module, healing.shown)
        healing.snapshots.end()
    report = replace(report, run=str(run) if run else None, output=str(target) if target else None)
    return Healed(program, module, report)


@dataclass(frozen=True)
class _Given:
    """Hold what `heal` was given beside its models."""

    plan: HealingConfig
    data: object
    held_out: str | None
    length: int | None
    tokenizer: object
    field: str
    run: str | Path | None
    control_run: str | Path | None
    resume: bool
    restart: bool

    def healing(self, pair: Pair, world: World, stack: contextlib.ExitStack) -> Healing:
        """Return the healing of a pair, its data and its folder opened; `stack` closes what it opens."""
        plan, teacher = self.plan, pair.teacher
        watched = Participant.of(teacher, world, plan.bf16)
        named = self.data if isinstance(self.data, str) else "data"
        data = Data.of(teacher, named, self.length).settled(watched.outputs)
        if data.fixed and not plan.several and world.size == 1:
            plan = replace(plan, batch_size=data.rows * plan.accumulate)
        wanted = Wanted.of(plan, data.window, world.size)
        reads = tokenizer_named(self.tokenizer)
        how = (wanted.micro, data.length, plan.seed, reads, self.field, wanted.batches, world.size)
        reading = Reading(*how, run=watched.outputs, usual=lambda each: Wanted.of(plan, each, world.size).micro)
        source: BatchSource = open_source(self.data, teacher, reading)
        if isinstance(source, IterableSource) and plan.several and (rows := source.rows_of(0)) != wanted.micro:
            source.notes += (f"batches are taken as they are given, of {rows} rows: batch_size is not used",)
        held, kept = divided(source.held_out, all(0 in each.free for each in teacher.spec))
        if self.held_out:
            kept = held_out_of(self.held_out, teacher, reading)
        data.check_run(watched.outputs, kept[0])
        objective = replace(Objective.of(teacher, kept[0], watched.outputs), end=source.end)
        if not objective.ids:
            _check_labels(data, source.batch(0), kept[0])
        if objective.ids and any(Early.lies(batch, objective.ids) for batch in (kept[0], source.batch(0))):
            source, held, kept = Early(source), *([Early.moved(b) for b in each] for each in (held, kept))
        if objective.has_task(kept[0]) and not any(objective.count(batch) for batch in kept):
            raise data.bad("what is held out of it has no targets", "give more of it, or --held-out")
        budget = Budget.of(plan, source.batch(0), held)
        folder = self.run or world.agreed(stack.enter_context(tempfile.TemporaryDirectory(prefix="lnrewrite-")))
        mix = mix_of(plan, objective.has_task(kept[0]))
        asked = self.asked(pair, [*kept, source.batch(0)], world)
        snapshots = controls = Snapshots(Path(folder), world, asked, self.resume, self.restart)
        stack.push(snapshots.leave)
        if self.control_run and objective.has_task(kept[0]):
            of_control = {k: v for k, v in asked.items() if k not in {*OF_STUDENTS, "student", "structure"}}
            controls = Snapshots(Path(self.control_run), world, of_control, resume=False, shared=True)
            stack.push(controls.leave)
        return Healing(pair, watched, source, held, kept, budget, plan, world, snapshots, controls, objective, mix)

    def asked(self, pair: Pair, batches: Sequence[Tensors], world: World) -> Json:
        """Return what has to be the same where a run goes on: the choices, both models, and some of the data."""
        asked = {**asdict(self.plan), "length": self.length, "held_out": self.held_out, "processes": world.size}
        asked |= {"data": _digest(tensor for batch in batches for tensor in batch.values())}
        asked |= {"teacher": _digest(_parts(pair.teacher)), "student": _digest(_parts(pair.student))}
        asked |= {"structure": str(pair.student.stream)}
        named = isinstance(self.tokenizer, str | Path)
        return asked | {"field": self.field, "tokenizer": str(self.tokenizer) if named else self.tokenizer is not None}


def _check_labels(data: Data, trained: Tensors, measured: Tensors) -> None:
    """Raise LnrewriteError LN022 where only one of two batches holds labels."""
    if (TARGETS in trained) != (TARGETS in measured):
        held = "it holds labels, and what is held out none"
        why = held if TARGETS in trained else "what is held out holds labels, and it none"
        raise data.bad(why, "give labels with both or with none")


def mix_of(config: HealingConfig, task: bool) -> Mix:
    """Return the losses asked for, or the usual ones. Raises UsageError LN003 for a `task` without targets."""
    usual = "task=0.5,kl=0.5,hidden=1,spread=0.1" if task else "kl=1,hidden=1,spread=0.1"
    mix = Mix.parse(config.losses or usual)
    if mix.task and not task:
        why = "the model predicts no next token and the data hold no labels"
        raise UsageError(Code.LN003, "loss task", why, "give labels, or losses such as kl=1,hidden=1")
    if not (mix.task or mix.kl or mix.hidden):
        raise UsageError(Code.LN003, "losses", "no loss is left to learn from", "give task, kl or hidden a weight")
    return mix


def _parts(program: Program) -> Iterator[Tensor]:
    """Yield a few rows of each parameter of a program, which may lie on the disk."""
    for name, held in program.module().named_parameters():
        count = len(held) if held.dim() else 1
        yield from (program.rows(name, slice(at, at + 1)) for at in sorted({0, count // 3, 2 * count // 3, count - 1}))


def _digest(tensors: Iterable[Tensor]) -> str:
    """Return a short name for the numbers that tensors hold."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]
