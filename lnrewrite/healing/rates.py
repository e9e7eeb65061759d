"""Choose learning rates: the usual one, which short trials may lower, on rows that neither train nor report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch

from ..backends.inputs import Tensors
from ..errors import Code, LnrewriteError
from ..pipeline.results import Json
from ..quiet import LOGGER
from .distributed import World, local, part_of
from .losses import Mix, Objective
from .participant import Participant
from .snapshots import Snapshots
from .sources import BatchSource, number
from .training import Phase, Stopped, until_stopped
from .view import View, ViewOutput

GAIN_RATE = 0.012
"""The learning rate of gains and biases at most: moved norms have to find new sizes, and a gain is about one."""

SHARE = 0.03
"""The usual rate, as a share of the random step of every weight that harms as much as the conversion did."""

LEAST, NONE = 0.002, 1e-9
"""The harm that a model is taken to have suffered at least, in nats: what new data ask for, all of a control's; and
where they ask for nothing, as they hold no targets, so that a model that is near its teacher is left there."""

NUDGE = 0.003
"""The random step that is measured: small enough that harm grows with its square, large enough to be seen."""

LOOKS = 4
"""Batches on which harm is measured."""

SETTLING = 64
"""Steps in which what the rate stirs up settles again; a run of fewer gets as much lower rates."""

FACTOR = 2.0
"""The ratio of two rates that are tried one after the other."""

WORTH = 0.25
"""The share of the harm that a lower rate has to win back in a trial."""

MOST = 4
"""At most so many trials choose a rate."""


def cautious(loss_at: Callable[[float], float], start: float, worth: float) -> float:
    """Return the rate `start`, halved as long as a trial at half of it is better by more than `worth`.

    It looks `MOST` times at most. A loss may be infinite. Short schedules prefer lower rates than long ones, which
    settle what the rate stirs up: the best of short trials is half of the best rate or less (demo:tinygpt).
    """
    rate, loss = start, loss_at(start)
    for _ in range(MOST - 1):
        lower = loss_at(rate / FACTOR)
        if math.isfinite(loss) and not lower < loss - worth:
            break
        rate, loss = rate / FACTOR, lower
    return rate


@dataclass(frozen=True)
class Rates:
    """Hold the rates of a phase, and how many trials on how many tokens chose them: none where they are the usual."""

    lr: float
    gain_lr: float
    trials: int = 0
    tokens: int = 0

    def on(self, phase: Phase) -> Phase:
        """Return a phase with these rates."""
        return replace(phase, lr=self.lr, gain_lr=self.gain_lr)

    def to_dict(self) -> Json:
        """Return them as the JSON of a report has them."""
        return asdict(self)


@dataclass(frozen=True)
class Harm:
    """Measure in nats how far outputs are from others: the divergence of the logits or, without any, of the outputs."""

    objective: Objective
    source: BatchSource
    world: World

    def between(self, teacher: Participant, student: Participant) -> float:
        """Return how far a student is from its teacher."""
        return self._mean(lambda batch, _: (teacher.run(batch), student.run(batch)))

    def nudged(self, one: Participant, seed: int, gains: bool = False) -> float:
        """Return how far a network is from itself with every weight of its matrices, or gains, `NUDGE` up or down."""

        def both(batch: Tensors, index: int) -> tuple[ViewOutput, ViewOutput]:
            before = one.run(batch)
            with nudged(one.view, number(seed, -2, index), gains):
                return before, one.run(batch)

        return self._mean(both)

    def _mean(self, outputs: Callable[[Tensors, int], tuple[ViewOutput, ViewOutput]]) -> float:
        total = torch.zeros((), device=self.world.device)
        with torch.no_grad():
            for index in range(LOOKS):
                batch = self.world.here(self.source.batch(index, self.world.rows))
                theirs, mine = outputs(batch, index)
                total += self.objective.divergence(mine.outputs, theirs.outputs, batch)
        return float(self.world.mean(total)) / LOOKS


@contextmanager
def nudged(view: View, seed: int, gains: bool = False) -> Iterator[None]:
    """Move every weight of a view's matrices by `NUDGE`, of a random sign, and back; the same where it is sharded.

    gains: every gain and bias, in place of the matrices.
    """
    chosen = {view.origin(n): p for n, p in view.named_parameters() if (p.dim() < 2) == gains}
    here = {name: local(p).detach() for name, p in chosen.items()}
    was = [tensor.clone() for tensor in here.values()]
    try:
        for name, tensor in here.items():
            draw = torch.Generator(tensor.device).manual_seed(number(seed, name))
            shape = chosen[name].shape
            up = torch.randint(2, shape, generator=draw, dtype=torch.int8, device=tensor.device)
            tensor.add_(part_of(up, chosen[name]).to(tensor.dtype).mul_(2).sub_(1), alpha=NUDGE)
        yield
    finally:
        for tensor, value in zip(here.values(), was, strict=True):
            tensor.copy_(value)


def harmful(gap: float, stiffness: float) -> float:
    """Return how large a random step harms as much as the conversion did: harm grows with its square.

    gap: how far the student is from where it is to be (`Harm.between`, and `LEAST`). stiffness: how far a network is
    from itself nudged.
    """
    return NUDGE * math.sqrt(gap / max(stiffness, 1e-9))


def usual(gap: float, stiffness: float) -> float:
    """Return the rate at which a network usually learns best: in proportion to how far it has to go.

    stiffness: of the teacher. On demo:tinygpt and another model this is within a factor of 1.7 of the best of a grid,
    for each placement.
    """
    return SHARE * harmful(gap, stiffness)


def usual_of_gains(gap: float, stiffness: float) -> float:
    """Return the rate of gains and biases: `GAIN_RATE`, or a step that harms as much as the conversion did.

    stiffness: of the student's gains. They belong to no matrix whose size theirs follows, and may be hundreds of times
    as stiff in one model as in another: all-MiniLM-L6-v2 as Pre-LN was made worse at `GAIN_RATE`.
    """
    return min(GAIN_RATE, harmful(gap, stiffness))


def settled(steps: int) -> float:
    """Return the share of the usual rates that a run of so many steps can take."""
    return min(1.0, steps / SETTLING)


@dataclass
class RateTest:
    """Try rates for a phase in `steps` steps each, from its start and with its first batches.

    What is measured is the loss of the task on `held`, or without targets the mix itself. A trial that ended is in the
    run's log, and a run that goes on does not repeat it.
    """

    source: BatchSource
    held: Sequence[Tensors]
    steps: int
    snapshots: Snapshots
    world: World

    def choose(self, phase: Phase, follow: bool, gap: float) -> Rates:
        """Return rates for a phase whose rate is the one to start from; gains `follow` it, or keep their own rate.

        A lower rate has to win back a part of the harm. Raises Stopped on Ctrl-C.
        """
        rows = list[Json]()

        def at(lr: float) -> Phase:
            gain_lr = phase.gain_lr if follow else phase.gain_lr * phase.lr / lr
            return replace(phase, name=f"{phase.name} rates", steps=self.steps, lr=lr, gain_lr=gain_lr)

        def loss_at(lr: float) -> float:
            each = at(lr)
            number = len(rows) + 1
            rows.append(self.snapshots.before.get((each.name, number)) or self.trial(each, number))
            return math.inf if rows[-1]["held_out"] is None else float(rows[-1]["held_out"])

        found = at(cautious(loss_at, phase.lr, WORTH * gap))
        if self.world.first:
            LOGGER.info(f"{phase.name}: learning rate {found.lr:.2e}, from {len(rows)} trials of {self.steps} steps")
        return Rates(found.lr, found.gain_lr, len(rows), sum(row["tokens"] for row in rows))

    def trial(self, phase: Phase, number: int) -> Json:
        """Train for one trial, put the weights back, and return what is logged of it."""
        if self.world.first:
            LOGGER.info(f"{phase.name}: trying {phase.lr:.2e}")
        optimizer, tokens, loss = phase.optimizer(), 0, None
        try:
            with kept(phase), until_stopped() as stopped:
                for step in range(phase.steps):
                    phase.taper(step)
                    tokens += int(phase.step(step, optimizer, self.source, self.world)["tokens"])
                    if self.world.any(stopped()):
                        raise Stopped(phase.name, number)
                phase.taper(phase.steps)
                loss = self.loss(phase)
        except LnrewriteError as error:
            if error.code is not Code.LN604:
                raise
        row = {"phase": phase.name, "step": number, "lr": phase.lr, "gain_lr": phase.gain_lr}
        row |= {"held_out": loss, "tokens": tokens}
        self.snapshots.log(row)
        return row

    def loss(self, phase: Phase) -> float:
        """Return the mean loss of a phase's student on the held rows."""
        if phase.objective.has_task(self.held[0]):
            phase = replace(phase, mix=Mix(task=1.0))
        sums = torch.zeros(2, device=self.world.device)
        with torch.no_grad():
            for batch in self.held:
                rows, counts = self.world.spread(batch)
                count = phase.objective.count(rows)
                loss = phase.total(phase.terms(rows, count))
                sums += torch.stack([loss * count, torch.full_like(loss, count)]) * counts
        total, number = self.world.sum(sums).tolist()
        return float(total) / max(1, number)


@contextmanager
def kept(phase: Phase) -> Iterator[None]:
    """Put what a phase trains back to what it was, and what its tapers follow."""
    view = phase.student.view
    tapers = view.tapers.clone()
    was = [(p, p.detach().clone()) for n, p in view.named_parameters() if view.origin(n) in phase.trained]
    try:
        yield
    finally:
        view.tapers.copy_(tapers)
        with torch.no_grad():
            for parameter, value in was:
                parameter.grad = None
                parameter.copy_(value)
