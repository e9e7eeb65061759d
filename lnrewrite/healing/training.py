"""Train a view: one phase of a healing run, the same whether it ran through or was stopped and went on."""

from __future__ import annotations

import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..backends.inputs import Tensors
from ..errors import Code, Exit, LnrewriteError, UsageError
from ..layout import clock
from ..quiet import LOGGER
from .budget import tokens_of
from .config import HealingConfig
from .distributed import World, local
from .losses import Mix, Objective
from .participant import Participant
from .snapshots import Snapshots
from .sources import BatchSource, number
from .tapers import Taper

SAY = 0.5
"""Seconds between two lines of progress."""


class Stopped(LnrewriteError):
    """Report a Ctrl-C in training: what was done is kept."""

    exit_code = Exit.INTERRUPTED

    def __init__(self, phase: str, step: int) -> None:
        super().__init__(
            Code.INTERRUPTED, "Ctrl-C", f"{phase} was stopped and saved at step {step}", "continue with --resume"
        )


@dataclass
class Phase:
    """Train `student` for so many steps on a mix of losses; `tapers` are what moves, till the stage `last`.

    With `detached` parts learn alone.

    `sizes` says how many times larger a matrix is than the teacher's: its steps are as many times longer, so that a
    matrix which took in the scale of a norm learns as it did before.
    """

    name: str
    steps: int
    student: Participant
    teacher: Participant | None
    objective: Objective
    mix: Mix
    config: HealingConfig
    trained: frozenset[str]
    sizes: Mapping[str, float]
    lr: float
    gain_lr: float = 1.0
    tapers: Sequence[Taper] = ()
    last: int = 0
    detached: bool = False

    def run(self, source: BatchSource, snapshots: Snapshots, world: World) -> None:
        """Train from the last checkpoint, or from the start, to the end.

        Raises LnrewriteError LN604 where a loss or gradient is NaN or infinite, Stopped on Ctrl-C.
        """
        view, config = self.student.view, self.config
        view.recompute = config.gradient_checkpointing
        optimizer = self.optimizer()
        step = start = snapshots.load(self.name, view, optimizer)
        clock = _Clock(self.steps - start)
        with until_stopped() as stopped:
            while step < self.steps:
                self.taper(step)
                row = self.step(step, optimizer, source, world)
                step += 1
                snapshots.land(wait=False)
                speed = clock.tick(int(row["tokens"]))
                snapshots.log({"phase": self.name, "step": step, **row, **speed})
                if clock.due() and world.first:
                    LOGGER.info(f"{self.name} {step}/{self.steps}  loss {row['loss']:.4f}  {_spell(**speed)}")
                halted = world.any(stopped())
                last = halted or step == self.steps
                if last or step % config.save_steps == 0:
                    snapshots.save(self.name, step, view, optimizer, last)
                if halted and (step < self.steps or self.name != "global"):
                    raise Stopped(self.name, step)
        self.taper(self.steps)

    def check(self, source: BatchSource, world: World) -> None:
        """Raise UsageError LN003 where no loss depends on what is trained: the norms, where norms are gone."""
        self.marked()
        terms = self.terms(world.here(source.batch(0, world.rows)), 1.0)
        if not self.total(terms).requires_grad:
            why = f"none of the losses of the {self.name} phase ({', '.join(terms)}) depends on what it trains"
            raise UsageError(Code.LN003, f"train={self.config.train}", why, "train more (all), or give other losses")

    def marked(self) -> list[tuple[str, nn.Parameter]]:
        """Return what is trained, by its name in the model; the rest takes no gradient."""
        self.student.view.detached = self.detached
        return self.student.train(self.trained)

    def optimizer(self) -> torch.optim.AdamW:
        """Return AdamW over what is trained: matrices decay alike, gains and biases do not."""
        groups: dict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)
        for name, parameter in self.marked():
            if parameter.dim() < 2:
                groups[self.lr * self.gain_lr, 0.0].append(parameter)
            else:
                size = self.sizes.get(name, 1.0)
                groups[self.lr * size, self.config.weight_decay / size].append(parameter)
        rows = [{"params": p, "initial_lr": lr, "weight_decay": decay} for (lr, decay), p in groups.items()]
        return torch.optim.AdamW(rows, betas=(0.9, 0.95), fused=True)

    def taper(self, step: int) -> None:
        """Set every taper's powers for a step: stage by stage, linear, from the teacher to the end at `ramp`."""
        if self.tapers:
            done = step / (self.config.ramp * self.steps) * (self.last + 1)
            self.student.view.move([t.powers(done, self.last) for t in self.tapers])

    def step(self, step: int, optimizer: torch.optim.Optimizer, source: BatchSource, world: World) -> dict[str, float]:
        """Take one optimizer step and return its losses."""
        config = self.config
        share = config.share(step, self.steps)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * share
        torch.manual_seed(number(config.seed, step, world.rank))
        seen, tokens = list[Tensor](), 0
        for micro in range(config.accumulate):
            batch = source.batch(step * config.accumulate + micro, world.rows)
            tokens += world.total(tokens_of(batch))
            targets = world.total(self.objective.count(batch)) / world.size
            self.student.view.sync(micro == config.accumulate - 1)
            terms = self.terms(world.here(batch), targets)
            total = self.total(terms)
            (total / config.accumulate).backward()
            seen.append(torch.stack([total, *terms.values()]).detach())
        norm = nn.utils.clip_grad_norm_(self.student.view.parameters(), config.max_grad_norm)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        told = torch.cat([world.mean(torch.stack(seen)).flatten(), norm.flatten()]).cpu()  # the only wait in a step
        losses = told[:-1].view(config.accumulate, -1)
        if not torch.isfinite(told).all():
            bad = next((i for i, loss in enumerate(losses[:, 0]) if not torch.isfinite(loss)), None)
            batch = source.batch(step * config.accumulate + (bad or 0), world.rows)
            self.fail(step, world.here(batch), "the gradient" if bad is None else "the loss")
        optimizer.step()
        optimizer.zero_grad()
        if self.tapers:
            self.student.view.follow(world.mean(self.student.view.seen))
        named = zip(("loss", *terms), losses.mean(0).tolist(), strict=True)
        return {**dict(named), "lr": self.lr * share, "tokens": tokens}

    def terms(self, batch: Tensors, targets: float) -> dict[str, Tensor]:
        """Return the terms of the loss on this process's rows of a batch with so many targets for each process."""
        seen = None
        if self.teacher and (self.mix.kl or self.mix.hidden):
            with torch.no_grad():
                seen = self.teacher.run(batch)
        return self.objective.terms(self.mix, batch, self.student.run(batch), seen, targets)

    def total(self, terms: Mapping[str, Tensor]) -> Tensor:
        """Return the sum of the terms as the mix weighs them."""
        return torch.stack([getattr(self.mix, name) * value for name, value in terms.items()]).sum()

    def fail(self, step: int, batch: Tensors, what: str) -> None:
        """Raise LN604 with the first block whose state is not finite, or the first parameter whose gradient is not."""
        with torch.no_grad():
            states: Mapping[str, Tensor] = self.student.run(batch).states
        bad = next((n for n, s in states.items() if not torch.isfinite(s).all()), None)
        if bad is None:
            gradients = {n: local(p.grad) for n, p in self.student.named.items() if p.grad is not None}
            bad = next((n for n, g in gradients.items() if not torch.isfinite(g).all()), "the outputs")
        why = f"{what} is NaN or infinite, first in {bad}; the last checkpoint is kept"
        raise LnrewriteError(
            Code.LN604, f"{self.name} step {step + 1}", why, "lower --lr, check the data, or run without --bf16"
        )


class _Clock:
    """Measure how fast a phase goes."""

    def __init__(self, steps: int) -> None:
        self.started = self.said = time.perf_counter()
        self.left, self.tokens, self.done = steps, 0, 0

    def tick(self, tokens: int) -> dict[str, float]:
        self.tokens += tokens
        self.done += 1
        seconds = time.perf_counter() - self.started
        rest = seconds / self.done * (self.left - self.done)
        return {"tokens_per_second": round(self.tokens / seconds, 1), "seconds_left": round(rest, 1)}

    def due(self) -> bool:
        now = time.perf_counter()
        if now - self.said < SAY and self.done < self.left:
            return False
        self.said = now
        return True


def _spell(tokens_per_second: float, seconds_left: float) -> str:
    return f"{tokens_per_second:,.0f} tokens/s  {clock(seconds_left)} left"


@contextmanager
def until_stopped() -> Iterator[Callable[[], bool]]:
    """Make Ctrl-C end a step before it ends the run; a second one ends the run at once."""
    flag = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield flag.is_set
        return
    before = signal.getsignal(signal.SIGINT)

    def asked(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, before)
        flag.set()

    signal.signal(signal.SIGINT, asked)
    try:
        yield flag.is_set
    finally:
        signal.signal(signal.SIGINT, before)
