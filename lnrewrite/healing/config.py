"""Describe how a model is healed: every choice in one place, checked before anything runs."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from ..errors import Code, UsageError, did_you_mean
from ..reconstruction.schedule import share

TRAINED = {
    "all": "everything",
    "norms": "gains and biases of norms",
    "touched": "what the conversion changed, and the norms",
}
"""What `train` may be, in words."""

OF_STUDENTS = ("losses", "progressive", "stages", "ramp", "drop_final", "rehearse", "lr", "gain_lr", "save_steps")
"""The choices that change nothing of a control."""

LEAST = {"tokens": 1, "steps": 1, "local_steps": 0, "batch_size": 1, "accumulate": 1, "save_steps": 1, "warmup": 0}
MOST = 10**12
"""The least and the most that each count may be."""


@dataclass(frozen=True)
class HealingConfig:
    """Hold every choice of a healing run but for its models and data.

    tokens: what the student learns from in all, local phase and trials of rates included; None is 6,400 rows.
    steps: optimizer steps of the global phase, and of the control; None is what the tokens make.
    local_steps: before it, train each block alone, from the teacher's normalised state behind it, and only what the
    conversion changed. losses: the terms of `Mix` with their weights; None is `Mix.usual` where there are targets, else
    kl=1,hidden=1,spread=0.1.
    train: all, norms, or touched (what the conversion changed).

    progressive: start at the teacher exactly and move norms by degrees within `ramp` of the steps (`Tapering`); the
    student then says only where norms shall sit. stages: block selections, or places (in, out, post, final, or values:
    what makes an attention's values), that move one after the other. drop_final: take the final norm away by degrees
    too; it anchors the logits, so it stays by default. control: train the teacher on the same tokens,
    on the task alone and before the student, which learns from it then.

    batch_size: rows of a step over all processes, in `accumulate` micro-batches; None is a few (`Wanted`).
    rehearse: this share of all rows holds random tokens that the teacher expects at times, and there the student
    only copies it, so that what the data lack does not drift (`Rehearsed`); a model that reads no tokens has none.
    lr: the peak learning rate of AdamW, after `warmup` steps, then evenly down to nothing; a matrix that the
    conversion scaled learns at its rate times that scale, in proportion to its size as before; None takes the usual
    one, which short trials may lower where the tokens allow any (`RateTest`). gain_lr: the student's gains and
    biases learn so many times faster (moved norms have to find new sizes); None takes the usual rate of theirs
    (`usual_of_gains`). control_lr: the rate of the control; None as for lr. weight_decay: of matrices; gains and
    biases never decay (it harms output-norm gains: arXiv 2605.26895). max_grad_norm: longer gradients are scaled
    down to it. bf16: run under autocast and, where many processes train, gather and reduce in bfloat16.
    gradient_checkpointing: keep no activations inside a block. save_steps: steps between checkpoints. seed: of the
    data's order and of what is random.
    """

    tokens: int | None = None
    steps: int | None = None
    local_steps: int = 0
    losses: str | None = None
    train: str = "all"
    progressive: bool = False
    stages: tuple[str, ...] = ()
    ramp: float = 0.6
    drop_final: bool = False
    control: bool = True
    batch_size: int | None = None
    accumulate: int = 1
    rehearse: float = 0.0078125
    lr: float | None = None
    gain_lr: float | None = None
    control_lr: float | None = None
    warmup: int = 20
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    bf16: bool = False
    gradient_checkpointing: bool = False
    save_steps: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        if self.train not in TRAINED:
            _wrong("train", self.train, did_you_mean(self.train, TRAINED))
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= MOST:
                _wrong(name, value, f"give {least} to {MOST}")
        if self.tokens and self.steps and self.batch_size:
            _wrong("tokens", self.tokens, "omit tokens, steps or batch_size: two of them make the third")
        if self.batch_size and self.batch_size % self.accumulate:
            _wrong("batch_size", self.batch_size, f"give a multiple of accumulate, {self.accumulate}")
        if not 0 < self.ramp <= 1:
            _wrong("ramp", self.ramp, "give a share of the steps, above 0 and up to 1")
        if not 0 <= self.rehearse < 1:
            _wrong("rehearse", self.rehearse, "give a share of the rows, from 0 to below 1")
        if self.stages and not (self.progressive or self.drop_final):
            _wrong("stages", ",".join(self.stages), "add progressive: only there norms move in stages")
        if self.local_steps and self.progressive:
            _wrong("local_steps", self.local_steps, "omit it: progressive starts at the teacher, block by block")
        for name in ("lr", "gain_lr", "max_grad_norm", "control_lr"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                _wrong(name, value, "give a positive number")
        if not 0 <= self.weight_decay < math.inf:
            _wrong("weight_decay", self.weight_decay, "give a number that is not negative")

    @property
    def several(self) -> bool:
        """Return whether the rows of a step are asked for, or follow from what is."""
        return bool(self.batch_size or (self.tokens and self.steps))

    def share(self, step: int, steps: int) -> float:
        """Return the share of the learning rate at a step of `steps`, counted from 0."""
        return share(step, steps, min(self.warmup, max(1, steps // 10)))


def check_control(config: HealingConfig, run: str | Path | None, control_run: str | Path | None) -> None:
    """Raise UsageError LN003 where a control cannot be kept in a folder: none is trained, or the run is there."""
    if control_run and not config.control:
        remedy = "omit it, or train a control (without --no-control)"
        raise UsageError(Code.LN003, f"control_run={control_run}", "no control is trained", remedy)
    if control_run and run and os.path.realpath(control_run) == os.path.realpath(run):
        why = "the run itself is kept there"
        raise UsageError(Code.LN003, f"control_run={control_run}", why, "name another folder")


def _wrong(name: str, value: object, remedy: str) -> None:
    raise UsageError(Code.LN003, f"{name}={value}", "healing does not accept this value", remedy)
