"""Run a healing from its checks to its figures: a control, which teaches then, and phases in their order."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import torch

from ..algebra.placement import switches, usual_norm
from ..backends.inputs import Tensors
from ..errors import Code, LnrewriteError
from ..files.landing import write_text_whole
from ..ir import Where
from ..models.program import Program
from ..pipeline.results import Drift, Json
from ..quiet import LOGGER
from .budget import Budget
from .config import TRAINED, HealingConfig
from .distributed import World, local
from .folding import fold, unfoldable
from .living import LivingStudent, device_of
from .losses import Measured, Mix, Objective, losses_of
from .pairing import Pair, grown, trained
from .participant import Participant
from .rates import LEAST, NONE, Harm, Rates, RateTest, settled, usual, usual_of_gains
from .rehearsal import Rehearsed, known
from .report import HealingReport, picture
from .snapshots import Snapshots
from .sources import BatchSource, inputs_of
from .tapers import Tapering
from .training import Phase


@dataclass
class Healing:
    """Hold one healing from its checks to its figures.

    teacher: the first of the pair as it takes part. source: what is trained on. held: rows to choose rates on, may be
    empty. measured: rows to report. snapshots: the folder of the run. controls: that of its control, often the same.
    objective, mix: what is learned. living: the student where that is a module in Python. frozen: its parameters that
    stay. gap: how far the student is from its teacher before the training, in nats.
    """

    pair: Pair
    teacher: Participant
    source: BatchSource
    held: Sequence[Tensors]
    measured: Sequence[Tensors]
    budget: Budget
    config: HealingConfig
    world: World
    snapshots: Snapshots
    controls: Snapshots
    objective: Objective
    mix: Mix
    living: LivingStudent | None = None
    frozen: Sequence[str] = ()
    gap: float = 0.0

    @cached_property
    def tapering(self) -> Tapering | None:
        """Return the plan of what moves: all norms, from the teacher, or the student's final norm alone."""
        if not (self.config.progressive or self.config.drop_final):
            return None
        wanted = {b.name: frozenset(switches(b)) for b in self.pair.student.network.blocks}
        start = self.pair.teacher if self.config.progressive else self.pair.student
        place = device_of(start)
        batches = [{n: t.to(place) for n, t in inputs_of(self.source.batch(i)).items()} for i in range(8)]
        style = usual_norm(
            x.norm for s in self.pair.student.network.streams for _, x in s.sites() if x.where != Where.INNER
        )
        found = Tapering(start, wanted, batches, style, self.config.stages, self.config.drop_final)
        if self.config.drop_final and (held := [w for s in found.program.network.streams for w in unfoldable(s)]):
            why = f"the final norm cannot be folded away: {', '.join(held)}"
            raise LnrewriteError(Code.LN602, "final norm", why, "keep the final norm (run without --drop-final)")
        return found

    def run(self) -> tuple[Participant, Program, HealingReport]:
        """Train what was asked for, and measure it."""
        started = time.perf_counter()
        before, student = dict[str, Measured](), self.side(self.pair.student)
        if self.pair.teacher is not self.pair.student:
            [before["converted"]], _ = self.measure(student)
        if self.tapering:
            student = self.side(self.tapering.program, self.tapering)
        if self.living:
            planned = fold(self.tapering, self.tapering.program) if self.tapering else self.pair.student
            self.living.check(planned, self.shown[:1])
        names = trained(student, self.teacher, self.config.train) - {student.view.first(name) for name in self.frozen}
        held = student.named
        counted = {"which": TRAINED[self.config.train], "tensors": len(names)}
        counted |= {"parameters": sum(held[n].numel() for n in names)}
        counted |= {"frozen": len(self.frozen)} if self.frozen else {}
        counted |= {"of": sum(p.numel() for p in student.program.module().parameters())}
        steps, rates, control = self.learned(student, names)
        healed, program = self.finished(student)
        [its, mine], drift = self.measure(self.teacher, healed, drifts=True)
        assert drift is not None
        losses = {"teacher": its, **before, "healed": mine}
        if control:
            losses["control"] = control
        seconds = time.perf_counter() - started
        return healed, program, self.outcome(program, losses, drift, counted, steps, rates, seconds)

    def learned(self, student: Participant, names: frozenset[str]) -> tuple[int, dict[str, Rates], Measured | None]:
        """Train a student; return its steps, the rates, and the losses of the control where there is one.

        The control is trained first, in the teacher's place, and teaches then: what the data say of the task the
        student learns from its outputs, which are no noisy targets, and starts with what they changed in the weights.
        Behind that the teacher is again what it was.
        """
        sizes, touched = grown(student, self.teacher), trained(student, self.teacher, "touched") & names
        phases, rates, control = self.phases(student, names, touched, sizes), dict[str, Rates](), None
        for phase in phases:
            phase.check(self.rehearsed(phase), self.world)
        if self.controlled:
            rates["control"] = self.control()
            [control], _ = self.measure(self.teacher)
            self.follow(student, names, sizes)
            phases = self.phases(student, names, touched, sizes)
        *before, last = phases
        for phase in before:
            self.train(phase, self.config.local_steps)
        rates = {"student": self.chosen(last), **rates}
        steps = self.budget.steps(self.config.local_steps * self.budget.step + rates["student"].tokens)
        self.train(rates["student"].on(last), steps)
        if self.controlled:
            self.teacher.fill()
        return steps, rates, control

    def finished(self, student: Participant) -> tuple[Participant, Program]:
        """Return what was trained as it is from now on, tapers folded away: to be run, and as a program."""
        student.settle()
        program = student.made()
        if self.tapering:
            program = fold(self.tapering, program, student.view.sizes)
            student = self.side(program)
        for parameter in program.module().parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        return student, program

    @cached_property
    def odds(self) -> torch.Tensor:
        """Return how often each token is drawn for a rehearsal, by the teacher as it is before anything is trained."""
        return known(self.teacher, self.source, max(self.pair.teacher.spec.vocabularies.values()))

    @property
    def harm(self) -> Harm:
        return Harm(self.objective, self.source, self.world)

    @property
    def shown(self) -> list[Tensors]:
        """Return the held-out inputs, without labels."""
        return [inputs_of(batch) for batch in self.measured]

    @property
    def controlled(self) -> bool:
        return self.config.control and self.objective.has_task(self.measured[0])

    def phases(
        self, student: Participant, names: frozenset[str], touched: frozenset[str], sizes: Mapping[str, float]
    ) -> list[Phase]:
        """Return the phases of a student, a local one where that has steps; what they learn follows from its gap."""
        converted = self.side(self.pair.student) if self.tapering else student  # tapers let it start at the teacher
        self.gap = self.harm.between(self.teacher, converted)
        if not self.config.losses and self.objective.has_task(self.measured[0]):
            taught = self.controlled and not self.tapering  # there, at first only the task has anything to teach
            self.mix = Mix.usual(self.gap, self.budget.steps(0), taught)
        last = self.phase("global", student, self.teacher, self.mix, names, sizes)
        first = replace(last, name="local", mix=Mix(hidden=1.0), trained=touched, tapers=(), detached=True)
        return [first, last] if self.config.local_steps else [last]

    def control(self) -> Rates:
        """Train the teacher on the same tokens, on the task alone; return the rates for it.

        One that another healing has trained is taken, and others may take this one as soon as it is trained.
        """
        names = trained(self.teacher, self.teacher, self.config.train)
        phase = self.phase("control", self.teacher, None, Mix(task=1.0), names, {})
        rates = self.chosen(phase)
        self.train(rates.on(phase), self.budget.steps(rates.tokens))
        if self.controls is not self.snapshots:
            self.controls.leave()
        return rates

    def kept(self, phase: Phase) -> Snapshots:
        """Return where a phase is kept."""
        return self.snapshots if phase.teacher else self.controls

    def follow(self, student: Participant, names: frozenset[str], sizes: Mapping[str, float]) -> None:
        """Give a student what training changed in its teacher, where that brings it nearer."""
        before = self.harm.between(self.teacher, student)
        with torch.no_grad():
            for name, parameter in student.named.items():
                theirs = self.teacher.find(name)
                if name in names and theirs is not None and theirs.shape == parameter.shape:
                    local(parameter).add_(self.teacher.moved(name), alpha=sizes.get(name, 1.0))
        if not self.harm.between(self.teacher, student) < before:
            student.fill()

    def side(self, program: Program, tapering: Tapering | None = None) -> Participant:
        """Return a program as it takes part."""
        return Participant.of(program, self.world, self.config.bf16, tapering.tapers if tapering else ())

    def phase(
        self,
        name: str,
        student: Participant,
        teacher: Participant | None,
        mix: Mix,
        trained: frozenset[str],
        sizes: Mapping[str, float],
    ) -> Phase:
        """Return a phase that has no steps yet, at the rates that were asked for or are usual."""
        config = self.config
        lr = config.lr if teacher else config.control_lr
        share = settled(max(self.budget.steps(0), config.local_steps))
        lr = lr or share * self.usual_rate(student, teacher)
        gain_lr = (config.gain_lr or share * self.usual_gain_rate(student) / lr) if teacher else 1.0
        found = Phase(name, 0, student, teacher, self.objective, mix, config, trained, sizes, lr, gain_lr)
        if self.tapering and name == "global":
            found = replace(found, tapers=self.tapering.tapers, last=self.tapering.last)
        return found

    def usual_rate(self, student: Participant, teacher: Participant | None) -> float:
        """Return the rate that is usual for a student or, without a teacher, for a control."""
        return usual(self.way(teacher), self.harm.nudged(teacher or student, self.config.seed))

    def usual_gain_rate(self, student: Participant) -> float:
        """Return the rate that is usual for the gains and biases of a student."""
        stiffness = self.harm.nudged(student, self.config.seed, gains=True)
        return usual_of_gains(self.way(self.teacher), stiffness)

    def way(self, teacher: Participant | None) -> float:
        """Return how far a student, or without a teacher a control, has to go: to it, and for what the data ask."""
        least = LEAST if self.objective.has_task(self.measured[0]) else NONE
        return least + (self.gap if teacher else 0.0)

    def chosen(self, phase: Phase) -> Rates:
        """Return the rates for a phase, and keep them in the log: a run that goes on has them from there."""
        name, kept = f"{phase.name} rates", self.kept(phase)
        if row := kept.before.get((name, 0)):
            return Rates(**row["rates"])
        found = self.tried(phase)
        kept.log({"phase": name, "step": 0, "tokens": 0, "rates": found.to_dict()})
        return found

    def tried(self, phase: Phase) -> Rates:
        """Return a phase's rates: what was asked for, or is usual; trials may lower that where tokens allow any."""
        asked = self.config.lr if phase.teacher else self.config.control_lr
        if asked or not self.budget.trial:
            return Rates(phase.lr, phase.gain_lr)
        follow = not phase.teacher or self.config.gain_lr is not None
        test = RateTest(self.rehearsed(phase), self.held, self.budget.trial, self.kept(phase), self.world)
        return test.choose(phase, follow, self.way(phase.teacher))

    def train(self, phase: Phase, steps: int) -> None:
        """Run a phase for so many steps."""
        replace(phase, steps=steps).run(self.rehearsed(phase), self.kept(phase), self.world)

    def rehearsed(self, phase: Phase) -> BatchSource:
        """Return the data, with random tokens among them where a teacher says what they give."""
        limits, mix = self.pair.teacher.spec.vocabularies, phase.mix
        if not (self.config.rehearse and limits and phase.teacher and (mix.kl or mix.hidden)):
            return self.source
        return Rehearsed(self.source, self.config.rehearse, limits, self.objective, self.odds, self.config.seed)

    def measure(self, *sides: Participant, drifts: bool = False) -> tuple[list[Measured], Drift | None]:
        if self.world.first:
            LOGGER.info("measuring the held-out loss")
        return losses_of(sides, self.objective, self.measured, self.teacher, drifts)

    def outcome(
        self,
        healed: Program,
        losses: Mapping[str, Measured],
        drift: Drift,
        trained: Json,
        steps: int,
        rates: Mapping[str, Rates],
        seconds: float,
    ) -> HealingReport:
        task = self.objective.has_task(self.measured[0])
        log = [row for kept in dict.fromkeys((self.controls, self.snapshots)) for row in kept.rows()]
        notes = [*self.pair.notes, *self.source.notes]
        if not task:
            notes.append("the data hold no targets, so no control is trained: the losses are distances to the teacher")
        elif not self.config.control:
            notes.append("no control was trained; the gap is against the teacher as it was")
        if any(phase == "control" for phase, _ in self.controls.before) and self.controls is not self.snapshots:
            notes.append(f"the control is of {self.controls.folder}, trained before")
        worse, doubt = losses["healed"].minus(losses.get("converted", losses["healed"]))
        if worse > 2 * (doubt or 0.0):
            notes.append("the healed model is worse on what is held out than before it was healed")
        if "control" in losses and losses["control"].mean > losses["teacher"].mean:
            notes.append("the control ended worse than the teacher as it was, which the healed model is to be held to")
        self.draw([row for row in log if "loss" in row])
        resolved: Json = {"tokens": self.budget.tokens, "steps": steps, "batch_size": self.budget.rows}
        resolved |= {"lr": rates["student"].lr, "gain_lr": rates["student"].gain_lr}
        if "control" in rates:
            resolved |= {"control_lr": rates["control"].lr}
        gap, error = losses["healed"].minus(losses.get("control", losses["teacher"]))
        to_teacher, its_error = losses["healed"].minus(losses["teacher"])
        return HealingReport(
            placement_before=self.pair.teacher.network.placement,
            placement_after=healed.network.placement,
            unit="nats" if task else "relative squared error",
            targets=len(losses["healed"].values),
            losses={name: found.figures() for name, found in losses.items()},
            trained=trained,
            recipe={**asdict(self.config), "losses": asdict(self.mix), **resolved},
            rates={name: each.to_dict() for name, each in rates.items()},
            tokens=sum(row["tokens"] for row in log if not row["phase"].startswith("control")),
            seconds=seconds,
            drift=drift,
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
