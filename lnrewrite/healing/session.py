"""Run a healing: check that teacher, student and data belong together, train, and measure all beside a control."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from ..algebra.placement import switches, usual_norm
from ..backends.inputs import Tensors
from ..backends.torch.capture import evaluating
from ..backends.torch.module import CapturedModule
from ..comparison.verifying import drift
from ..errors import Code, LnrewriteError, UsageError
from ..files.landing import write_text_whole
from ..ir import Where
from ..models.program import Program, capture
from ..pipeline.results import Json
from ..quiet import LOGGER
from .config import TRAINED, HealingConfig
from .distributed import World
from .folding import fold, unfoldable
from .losses import Measured, Mix, Objective, losses_of
from .opening import Reading, held_out_of, open_source, tokenizer_named
from .pairing import Pair, give_back
from .rehearsal import Rehearsed
from .report import HealingReport, picture
from .snapshots import Snapshots, check_run
from .sources import BatchSource, inputs_of
from .tapers import Tapering
from .training import Participant, Phase
from .view import View


@dataclass(frozen=True, eq=False)
class Healed:
    """Hold what a run gave: the healed `program`, and the `report`, which prints itself.

    `module` is the program's trainable module, or the student itself where that was a living module.
    """

    program: Program
    module: nn.Module
    report: HealingReport


@dataclass
class Healing:
    """Hold one healing from its checks to its figures; `heal` says what the fields mean."""

    pair: Pair
    source: BatchSource
    measured: Sequence[Tensors]
    config: HealingConfig
    world: World
    snapshots: Snapshots
    objective: Objective
    mix: Mix

    @cached_property
    def tapering(self) -> Tapering | None:
        """Return the plan of what moves: all norms, from the teacher, or the student's final norm alone."""
        if not (self.config.progressive or self.config.drop_final):
            return None
        wanted = {b.name: frozenset(switches(b)) for b in self.pair.student.network.blocks}
        batches = [inputs_of(self.world.here(self.source.batch(i))) for i in range(8)]
        start = self.pair.teacher if self.config.progressive else self.pair.student
        style = usual_norm(
            x.norm for s in self.pair.student.network.streams for _, x in s.sites() if x.where != Where.INNER
        )
        found = Tapering(start, wanted, batches, style, self.config.stages, self.config.drop_final)
        if self.config.drop_final and (held := [w for s in found.program.network.streams for w in unfoldable(s)]):
            why = f"the final norm cannot be folded away: {', '.join(held)}"
            raise LnrewriteError(Code.LN602, "final norm", why, "keep the final norm (run without --drop-final)")
        return found

    def run(self) -> tuple[Program, HealingReport]:
        """Train what was asked for, and measure it."""
        started, mix = time.perf_counter(), self.mix
        losses = {"teacher": self.measure(self.pair.teacher)}
        if self.pair.teacher is not self.pair.student:
            losses["converted"] = self.measure(self.pair.student)
        tapering = self.tapering
        working = tapering.program if tapering else self.pair.student.apply([], "heal")[0]
        names = self.pair.trained(working, self.config.train)
        of = sum(p.numel() for p in working.module().parameters())
        count = sum(p.numel() for n, p in working.module().named_parameters() if n in names)
        sizes = self.pair.grown(working)
        shared = self.pair.share_untrained(working, names)
        watched = self.pair.teacher.apply([], "heal")[0] if self.world.size > 1 else self.pair.teacher
        teacher = self.side(watched)
        student = self.side(working, tapering)
        if self.config.local_steps:
            student.view.detached = True
            touched = self.pair.trained(working, "touched") & names
            self.phase("local", self.config.local_steps, student, teacher, Mix(hidden=1.0), touched, sizes)
            student.view.detached = False
        self.phase("global", self.config.steps, student, teacher, mix, names, sizes)
        self.world.gather(student.view, working.module())
        for parameter in shared:
            parameter.data = parameter.data.clone()
        healed = fold(tapering, working) if tapering else working
        for parameter in healed.module().parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        losses["healed"] = self.measure(healed)
        if self.controlled:
            losses["control"] = self.measure(self.trained_on())
        seconds = time.perf_counter() - started
        trained = {"which": TRAINED[self.config.train], "tensors": len(names), "parameters": count, "of": of}
        return healed, self.outcome(healed, losses, trained, seconds)

    @property
    def controlled(self) -> bool:
        return self.config.control and self.objective.has_task(self.measured[0])

    def trained_on(self) -> Program:
        """Return the control: the teacher, trained on the same tokens by the same choices on the task alone."""
        control = self.pair.teacher.apply([], "heal")[0]
        side = self.side(control)
        self.phase(
            "control", self.config.steps, side, None, Mix(task=1.0), self.pair.trained(control, self.config.train), {}
        )
        self.world.gather(side.view, control.module())
        return control

    def side(self, program: Program, tapering: Tapering | None = None) -> Participant:
        """Return a program with its view, on this process's device and sharded where there are several."""
        view = View(program, tapering.tapers if tapering else ())
        self.world.shard(view, program.module())
        return Participant(program, view)

    def phase(
        self,
        name: str,
        steps: int,
        student: Participant,
        teacher: Participant | None,
        mix: Mix,
        trained: frozenset[str],
        sizes: Mapping[str, float],
    ) -> None:
        tapers = self.tapering.tapers if self.tapering and name == "global" else ()
        config = self.config
        lr, gain_lr = config.lr, config.gain_lr
        if name == "control":
            lr, gain_lr = config.control_lr or config.lr, 1.0
        phase = Phase(
            name, steps, student, teacher, self.objective, mix, config, trained, sizes, lr, gain_lr, tapers=tapers
        )
        phase.run(self.rehearsed(teacher, mix), self.snapshots, self.world)

    def rehearsed(self, teacher: Participant | None, mix: Mix) -> BatchSource:
        """Return the data, with random tokens among them where a teacher says what they give."""
        limits = self.pair.teacher.id_limits()
        if not (self.config.rehearse and limits and teacher and (mix.kl or mix.hidden)):
            return self.source
        return Rehearsed(self.source, self.config.rehearse, limits, self.objective, self.config.seed)

    def measure(self, program: Program) -> Measured:
        if self.world.first:
            LOGGER.info("measuring the held-out loss")
        return losses_of(program.module(), self.objective, self.measured, self.pair.teacher.module())

    def outcome(self, healed: Program, losses: Mapping[str, Measured], trained: Json, seconds: float) -> HealingReport:
        task = self.objective.has_task(self.measured[0])
        rows = [inputs_of(batch) for batch in self.measured]
        log = self.snapshots.rows()
        notes = self.pair.notes
        if not task:
            notes.append("the data hold no targets, so no control is trained: the losses are distances to the teacher")
        elif not self.config.control:
            notes.append("no control was trained; the gap is against the teacher as it was")
        if "control" in losses and losses["control"].mean > losses["teacher"].mean:
            notes.append("the control ended worse than the teacher as it was, which the healed model is to be held to")
        self.draw(log)
        gap, error = losses["healed"].minus(losses.get("control", losses["teacher"]))
        to_teacher, its_error = losses["healed"].minus(losses["teacher"])
        return HealingReport(
            placement_before=self.pair.teacher.network.placement,
            placement_after=healed.network.placement,
            unit="nats" if task else "relative squared error",
            targets=sum(self.objective.count(b) for b in self.measured),
            losses={name: found.figures() for name, found in losses.items()},
            trained=trained,
            recipe={**asdict(self.config), "losses": asdict(self.mix)},
            tokens=sum(row["tokens"] for row in log if row["phase"] != "control"),
            seconds=seconds,
            drift=drift(self.pair.teacher.module(), healed.module(), rows, True),
            gap=gap,
            gap_standard_error=error,
            gap_to_teacher=to_teacher,
            gap_to_teacher_standard_error=its_error,
            notes=tuple(notes),
        )

    def draw(self, log: Sequence[Json]) -> None:
        """Write the picture of the losses beside the log."""
        if self.world.first:
            page = picture(log, "lnrewrite heal: loss of the training batches")
            write_text_whole(self.snapshots.folder / "loss.html", page)


def heal(
    teacher: Program | nn.Module,
    student: Program | nn.Module,
    data: object,
    config: HealingConfig | None = None,
    *,
    output: str | Path | None = None,
    held_out: str | None = None,
    length: int | None = None,
    tokenizer: object = None,
    field: str = "text",
    kwargs: Mapping[str, object] | None = None,
    run: str | Path | None = None,
    resume: bool = False,
    restart: bool = False,
    force: bool = True,
    device: str = "cpu",
    **choices: Any,
) -> Healed:
    """Train a converted model back to its teacher's quality, and say how near it came to a control.

    teacher, student: programs, or living modules with example inputs in `kwargs`; a living student is trained in place,
    any other stays as it was. data: documents (.txt, .jsonl, .parquet, or an iterable of strings or of mappings with
    `field`), tokens (.bin, .npy [count]), arrays of rows [count, ...], `pkg.module:iterable`, or an iterable of
    batches: dicts of the model's inputs, and `labels` [batch, ...] where there are targets. A part of it is held out,
    or `held_out` names other data. length: tokens of a window cut from a text. tokenizer: its folder, or one of
    transformers; None takes that of the teacher's folder. config, or its fields as
    keywords: steps=1000, progressive=True, lr=1e-4, as `HealingConfig` explains them.

    output: where to write the result (.pt2 or .onnx); `force`: over what stands there. run: the folder of checkpoints,
    log.jsonl and loss.html; None uses a temporary one. resume: go on where that run stopped; the same seed gives the
    same weights. Dropout stays off. Under torchrun the work is shared over all processes (FSDP2).

    Raises LnrewriteError: LN022 data, LN601 the student is no conversion of the teacher, LN602 no exact start, LN604
    NaN, LN605 run folder, LN025 no room; UsageError LN003. Sources: local, then global: arXiv 2410.10254; removal by
    degrees: 2507.02559, 2602.10408; weight decay: 2605.26895.
    """
    plan = replace(config or HealingConfig(), **choices)
    if run:
        check_run(Path(run), resume, restart)
    world = World.join(device, plan.micro_batch)
    with contextlib.ExitStack() as stack:
        stack.callback(world.leave)
        first, second = (seen(model, kwargs, world, stack) for model in (teacher, student))
        (pair := Pair(first, second)).check()
        steps = max(plan.steps, plan.local_steps) * plan.accumulate
        reading = Reading(plan.micro_batch, length, plan.seed, tokenizer_named(tokenizer), field, steps)
        source = open_source(data, first, reading)
        kept = held_out_of(held_out, first, reading) if held_out else source.held_out
        measured = [world.here(batch) for batch in kept]
        asked = {**asdict(plan), "length": length, "held_out": held_out, "processes": world.size}
        asked |= {"data": data if isinstance(data, str) else "given", "student": _digest(second), "field": field}
        folder = run or world.agreed(stack.enter_context(tempfile.TemporaryDirectory(prefix="lnrewrite-")))
        objective = replace(Objective.of(first, measured[0]), end=source.end)
        mix = mix_of(plan, objective.has_task(measured[0]))
        snapshots = Snapshots(Path(folder), world, asked, resume, restart)
        stack.callback(snapshots.leave)
        healed, report = Healing(pair, source, measured, plan, world, snapshots, objective, mix).run()
        module: nn.Module = healed.module()
        if not isinstance(student, Program | CapturedModule):
            module = give_back(student, healed)
        if output and world.first:
            LOGGER.info(f"writing {output}")
            healed.save(output, force=force)
        snapshots.end()
    report = replace(report, run=str(run) if run else None, output=str(output) if output else None)
    return Healed(healed, module, report)


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


def seen(
    model: Program | nn.Module, kwargs: Mapping[str, object] | None, world: World, until: contextlib.ExitStack
) -> Program:
    """Return a model as a program on this process's device, in eval mode `until` an exit stack is left."""
    program = model if isinstance(model, Program) else capture(model, kwargs=kwargs)
    program.module().to(world.device)
    until.enter_context(evaluating(program.module()))
    return program


def _digest(program: Program) -> str:
    return hashlib.sha256(str(program.stream).encode()).hexdigest()[:16]
