"""What a student is trained on: the task, the teacher's outputs, the teacher's states; and how well it does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from ..algebra.fitting import Floats
from ..backends.hiding import ELSEWHERE, counted, hides
from ..backends.inputs import Tensors
from ..backends.torch.fused import IGNORED, apart, compared
from ..comparison.verifying import distances, drift_of, logits
from ..compat.torch import tensors_in
from ..errors import Code, LnrewriteError, UsageError, did_you_mean
from ..ir import Kind
from ..models.program import Program
from ..pipeline.feed import masks
from ..pipeline.results import Drift
from .participant import Participant
from .sources import TARGETS, inputs_of
from .view import ViewOutput

FAR = 0.15
"""The divergence of a student from its teacher, in nats, from which on the teacher's states lead entirely."""

FEW = 1000
"""The steps up to which they do."""


@dataclass(frozen=True)
class Mix:
    """Weigh the terms of a loss; `parse("task=0.5,kl=0.5")` reads one, what is not named weighs nothing.

    task: cross-entropy, of the next token where the model is causal, else of the batch's `labels`. kl: KL(teacher ||
    student) of the logits, in nats for each row; of a model without logits the squared error of its output over the
    teacher's size. hidden: squared distance of the normalised states behind every sum. spread: E[log(s / rho)^2] where
    norms go, which keeps the sizes that a constant will stand for alike (std-uniformity, arXiv 2507.02559) and at a
    fixed target (TaperNorm, 2602.10408).
    """

    task: float = 0.0
    kl: float = 0.0
    hidden: float = 0.0
    spread: float = 0.0

    @classmethod
    def usual(cls, gap: float, steps: int, taught: bool = False) -> Self:
        """Return the mix for a student that starts at such a divergence from its teacher in nats.

        The teacher's states lead where the way is far and the steps are few, the task where it is near or they are many
        (demo:tinygpt and a second model, at one and ten per cent of their tokens). taught: whether the teacher learned
        the task from the same data, so that its outputs say all that targets do, and without their noise.
        """
        share = min(1.0, gap / FAR) * min(1.0, FEW / steps)
        task, kl = (0.0, 1.0) if taught else (0.5, 0.5 + 0.5 * share)
        return cls(task=task, kl=kl, hidden=1 + 24 * share, spread=0.1)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `name=weight,...`. Raises UsageError LN003 for an unknown name or a weight that is no number."""
        found: dict[str, float] = {}
        known = [f.name for f in fields(cls)]
        for term in text.split(","):
            name, _, weight = term.strip().partition("=")
            if name not in known:
                raise UsageError(Code.LN003, f"loss {name!r}", "unknown loss", did_you_mean(name, known))
            if name in found:
                raise UsageError(Code.LN003, f"loss {name!r}", "it is given twice", "give one weight for each")
            try:
                found[name] = float(weight)
            except ValueError:
                why = f"the weight {weight!r} is not a number"
                raise UsageError(Code.LN003, f"loss {name!r}", why, f"write {name}=0.5") from None
            if not 0 <= found[name] < float("inf"):
                raise UsageError(Code.LN003, f"loss {name!r}", "a weight must be finite and not negative", "write 0.5")
        return cls(**found)


@dataclass(frozen=True)
class Objective:
    """Compare a student with targets and teacher.

    `ids` names the tokens whose successors a causal model predicts, or is empty; `masks` the inputs that say which
    tokens count, with the number that hides one; `centered` whether states are compared without their mean, as layer
    norms see them. `end`: the id whose successor is no target, for it is of another document; None where there is none.
    `classes`: how many labels there may be, 0 where the data hold none. `like`: an input with a place for each token of
    the output, or empty.
    """

    ids: str
    masks: Mapping[str, int]
    centered: bool
    end: int | None = None
    classes: int = 0
    like: str = ""

    @classmethod
    def of(cls, program: Program, example: Tensors, run: Callable[[Tensors], object] | None = None) -> Self:
        """Look at a model, and run it, to tell what it is trained on; `run` is what runs it, else its module."""
        for name in program.spec.vocabularies:
            if name in example and example[name].dim() == 2 and example[name].shape[1] < 2:
                why = "its sequences have only one token"
                raise LnrewriteError(Code.LN022, f"data: {name}", why, "give longer sequences (--length)")
        kinds = [site.norm.kind for s in program.network.streams for _, site in s.sites()]
        run = run or (lambda batch: program.module()(**inputs_of(batch)))
        centered = 2 * kinds.count(Kind.LAYER) > len(kinds)
        with torch.no_grad():
            out = run(example)
        like = [n for n, t in inputs_of(example).items() if t.shape[:2] == _first(out).shape[:2]]
        hiding = _hiding(example, run)
        found = cls(_causal(program.spec.vocabularies, example, run), hiding, centered, like=like[-1] if like else "")
        return found if TARGETS not in example else replace(found, classes=found.scores(out, example).shape[-1])

    def has_task(self, batch: Tensors) -> bool:
        """Return whether there are targets: the next tokens of a causal model, or labels in the data."""
        return bool(self.ids) or TARGETS in batch

    def terms(
        self, mix: Mix, batch: Tensors, student: ViewOutput, teacher: ViewOutput | None, targets: float
    ) -> dict[str, Tensor]:
        """Return each term that weighs anything, unweighted; `targets`: how many a process has, on the average."""
        found: dict[str, Tensor] = {}
        copied = teacher if mix.kl else None
        if self.has_task(batch) and (mix.task or copied):
            its = self.scores(copied.outputs, batch) if copied else None
            wanted = self._aligned(batch) if mix.task else None
            entropy, divergence = compared(self.scores(student.outputs, batch), its, wanted)
            if mix.task:
                found["task"] = entropy.sum() / max(1, targets)
            if copied:
                found["kl"] = self._mean(divergence, batch)
        elif copied:
            found["kl"] = self.divergence(student.outputs, copied.outputs, batch)
        if mix.hidden and teacher:
            pairs = [(s, teacher.states[n]) for n, s in student.states.items() if n in teacher.states]
            found["hidden"] = torch.stack([self._mean(apart(s, t, self.centered), batch) for s, t in pairs]).mean()
        if mix.spread and student.spread is not None:
            found["spread"] = student.spread
        return found

    def rows(self, outputs: object, batch: Tensors) -> Tensor:
        """Return the cross-entropy of every target in nats: [targets]."""
        targets = self._aligned(batch)
        return compared(self.scores(outputs, batch), None, targets)[0][targets != IGNORED]

    def scores(self, outputs: object, batch: Tensors) -> Tensor:
        """Return the logits [..., classes], which an output has on its last axis or, of pictures, on its second.

        Raises LnrewriteError LN022 where no output has labels' shape, or both axes of a picture may be meant.
        """
        leaves = [t for t in tensors_in(outputs) if t.is_floating_point()]
        named = logits(outputs)
        if TARGETS not in batch:
            assert named is not None
            return named
        wanted = batch[TARGETS].shape
        found = [t for t in (named, *leaves) if t is not None]
        moved = [t.movedim(1, -1) for t in found if t.dim() > 2]
        fitting = [t for t in (*found, *moved) if t.shape[:-1] == wanted]
        if fitting and len(wanted) > 2 and len(set(fitting[0].shape[1:])) == 1:
            why = f"of outputs of shape {list(fitting[0].shape)}, the second or the last axis may be the classes"
            raise LnrewriteError(Code.LN022, "labels", why, "give pictures of another size")
        if not fitting:
            why = f"they have shape {list(wanted)}, and the outputs {', '.join(str(list(t.shape)) for t in leaves)}"
            remedy = "give labels of the logits' shape without its axis of classes, or a model with a head"
            raise LnrewriteError(Code.LN022, "labels", why, remedy)
        return fitting[0]

    def targets(self, batch: Tensors) -> Tensor:
        """Return the labels of a batch, or the tokens that follow, masked ones ignored."""
        if TARGETS in batch:
            found = batch[TARGETS].long()
            if found.device.type == "cpu" and found.numel() and (most := int(found.max())) >= self.classes > 0:
                remedy = "give classes from 0 up, and -100 for none"
                raise LnrewriteError(Code.LN022, "labels", f"they hold {most} of {self.classes} classes", remedy)
            return found
        targets = batch[self.ids][:, 1:].long()
        if (shown := counted(self.masks, batch, batch[self.ids])) is not None:
            targets = targets.masked_fill(~shown[:, 1:], IGNORED)
        return targets if self.end is None else targets.masked_fill(batch[self.ids][:, :-1] == self.end, IGNORED)

    def count(self, batch: Tensors) -> int:
        """Return how many targets, or tokens that count, a batch holds."""
        if self.has_task(batch):
            return int((self.targets(batch) != IGNORED).sum())
        like = batch[self.like or next(iter(batch))]
        return like.shape[:2].numel() if (shown := counted(self.masks, batch, like)) is None else int(shown.sum())

    def divergence(self, student: object, teacher: object, batch: Tensors) -> Tensor:
        """Return KL(teacher || student) of the logits or, without any, the relative squared error of the output."""
        if self.has_task(batch):
            _, rows = compared(self.scores(student, batch), self.scores(teacher, batch), None)
            return self._mean(rows, batch)
        mine, its = _first(student), _first(teacher)
        return self._mean((mine - its).square().mean(-1), batch) / self._mean(its.square().mean(-1), batch)

    def _aligned(self, batch: Tensors) -> Tensor:
        """Return the target of every place that has logits: of a causal model the last place has none."""
        found = self.targets(batch)
        return found if TARGETS in batch else F.pad(found, (0, 1), value=IGNORED)

    def _mean(self, rows: Tensor, batch: Tensors) -> Tensor:
        """Return the mean over the tokens that count."""
        if (shown := counted(self.masks, batch, rows)) is None:
            return rows.mean()
        weight = shown.to(rows.dtype)
        return (rows * weight).sum() / weight.sum().clamp(min=1)

    def cut(self, batch: Tensors, _: str, value: Tensor) -> Tensor:
        """Return the tokens of an output that count."""
        return value if (shown := counted(self.masks, batch, value)) is None else value[shown]


def _first(outputs: object) -> Tensor:
    found = next(t for t in tensors_in(outputs) if t.is_floating_point()).float()
    return found if found.dim() > 1 else found.reshape(-1, 1)


def _hiding(example: Tensors, run: Callable[[Tensors], object]) -> dict[str, int]:
    """Return the masks of the output's tokens, and the number by which each hides one.

    Where that can be told of none, as of a mask that is for the loss alone, any of as many tokens, and 0.
    """
    inputs = inputs_of(example)
    found = {n: hides(n, inputs, lambda batch: {"": _first(run(batch))}).get("", ELSEWHERE) for n in masks(inputs)}
    seen = {n: number for n, number in found.items() if number in (0, 1)}
    return seen or {n: 0 for n, number in found.items() if number is None}


def _causal(limits: Mapping[str, int], example: Tensors, run: Callable[[Tensors], object]) -> str:
    """Name the input whose next tokens the logits predict: no logit changes with tokens behind it; empty for none."""
    names = [n for n, t in example.items() if n in limits and t.dim() == 2 and t.shape[1] > 1]
    if len(names) != 1:
        return ""
    (name,) = names
    length, moved = example[name].shape[1], False
    with torch.no_grad():
        one = logits(run(example))
        if one is None or one.shape[:2] != example[name].shape or one.shape[-1] < limits[name]:
            return ""
        for place in {1, length // 2, length - 1} - {0}:  # the last ones may be padding
            other = dict(example) | {name: example[name].clone()}
            other[name][:, place:] = (other[name][:, place:] + 1) % limits[name]
            two = logits(run(other))
            assert two is not None
            if not torch.allclose(one[:, :place], two[:, :place], atol=1e-4, equal_nan=True):
                return ""
            moved |= not torch.equal(one, two)
    return name if moved else ""


@dataclass(frozen=True)
class Measured:
    """Hold held-out losses: `values` float64[targets], and which window each target stands in: `windows` int[targets].

    In nats or, without targets, each token's squared error of the output over the teacher's mean square.
    """

    values: Floats
    windows: npt.NDArray[np.int64]

    @property
    def mean(self) -> float:
        """Return the mean over targets."""
        return float(self.values.mean())

    def figures(self) -> Mapping[str, float]:
        """Return mean, median and p99.9 over targets."""
        return {
            "mean": self.mean,
            "median": float(np.median(self.values)),
            "p999": float(np.quantile(self.values, 0.999)),
        }

    def minus(self, other: Measured) -> tuple[float, float | None]:
        """Return the difference of two means on the same targets, and its standard error over windows (None of one).

        The targets of a window depend on each other, so windows are what was drawn: the error is that of a ratio.
        """
        gap = self.mean - other.mean
        rest = np.bincount(self.windows, self.values - other.values - gap)
        count = int(len(np.unique(self.windows)))
        if count < 2:
            return gap, None
        return gap, float(np.sqrt(np.square(rest).sum() * count / (count - 1)) / len(self.values))


def losses_of(
    sides: Sequence[Participant],
    objective: Objective,
    batches: Sequence[Tensors],
    teacher: Participant,
    drifts: bool = False,
) -> tuple[list[Measured], Drift | None]:
    """Return the losses of each side on all held-out targets; with `drifts`, how far the last is from the teacher.

    Each process runs its rows of every batch. A teacher that is a side itself runs once.
    """
    values, windows = list[Floats](), list[npt.NDArray[np.int64]]()
    world, first, task = teacher.world, 0, objective.has_task(batches[0])
    apart = torch.zeros(7, dtype=torch.float64)
    for batch in batches:
        rows, counts = world.spread(batch)
        its = teacher.outputs(rows) if drifts or not task or any(one is teacher for one in sides) else None
        outs = [its if one is teacher else one.outputs(rows) for one in sides]
        if task:
            found, count = [objective.rows(out, rows) for out in outs], objective.targets(rows) != IGNORED
        else:
            other = _first(its)
            sums = torch.stack([other.double().square().sum(), torch.tensor(float(other.numel())).to(other)]) * counts
            square, number = world.sum(sums)
            errors = [(_first(out) - other).square().mean(-1) / (square / number) for out in outs]
            mask = counted(objective.masks, rows, errors[0])
            count = torch.ones_like(errors[0], dtype=torch.bool) if mask is None else mask
            found = [each[count] for each in errors]
        if counts:
            values.append(torch.stack([each.double() for each in found]).cpu().numpy())
            windows.append(first + world.rank + world.size * count.nonzero()[:, 0].cpu().numpy())
            apart += distances(its, outs[-1], partial(objective.cut, rows)) if drifts else 0
        first += min(map(len, batch.values()))
    every = world.gathered((values, windows))
    at = np.concatenate([each for _, held in every for each in held])
    order = np.argsort(at, kind="stable")
    ordered = np.concatenate([each for held, _ in every for each in held], 1)[:, order]
    total = world.sum(apart)
    return [Measured(each, at[order]) for each in ordered], drift_of(total, True, len(batches)) if drifts else None
