"""Calibration data as a run uses them: read once, most to fit on, an eighth to measure with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn

from ..errors import Code, LnrewriteError
from .protocols import Batch, M, Model
from .results import Drift
from .shares import agreed, mine, processes

LARGE = 0.2
"""The relative error from which a report advises healing."""


@dataclass
class Feed:
    """Hold the calibration data, read when first asked for, in two parts: one to fit on, one to measure with."""

    program: Model
    given: Iterable[Batch] | Callable[[], Iterable[Batch]] | None
    seed: int
    name: str | None

    @cached_property
    def batches(self) -> list[Batch]:
        """Read the data once, and refuse what cannot be inputs."""
        if self.given is None:
            return list(self.program.synthetic(self.seed))
        if isinstance(self.given, Mapping):
            self._refuse("this is one batch, not an iterable of batches")
        given = self.given() if callable(self.given) else self.given
        if not isinstance(given, Iterable):
            self._refuse(f"this is a {type(given).__name__}, not an iterable of batches")
        batches = agreed(list(given))  # what is random in an iterable is not the same in every process
        if not batches:
            self._refuse("it is empty")
        for batch in batches:
            if not isinstance(batch, (Mapping, tuple, list)):
                self._refuse(f"a batch is a {type(batch).__name__}")
        return [self.program.placed(batch) for batch in batches]

    def _refuse(self, why: str) -> NoReturn:
        what = f"calibration data {self.name}" if self.name else "calibration data"
        raise LnrewriteError(Code.LN022, what, why, "give a list of dicts of keyword inputs, or of tuples")

    @property
    def _many(self) -> int:
        """Return how many batches all processes fit on: all but those held out, or the only one."""
        count = len(self.batches)
        return max(1, count - max(1, count // (4 if self.given is None else 8)))

    @property
    def fit(self) -> list[Batch]:
        """Return the batches that this process fits on. Raises LnrewriteError LN040 where they cannot be shared."""
        if self._many < processes():
            why, remedy = f"{self._many} batches to fit on are fewer than the processes", "start fewer, or give more"
            raise LnrewriteError(Code.LN040, "calibration data", why, remedy)
        if processes() > 1 and self.program.fixed_paths:
            why = "the model chooses its path by its data, on which processes may not agree"
            raise LnrewriteError(Code.LN040, "calibration data", why, "start it without torchrun")
        return mine(self.batches[: self._many])

    @property
    def held(self) -> list[Batch]:
        """Return this process's of what nothing is fitted on: the last eighth (of made-up ones, a quarter), or one."""
        return mine(self.batches[self._many :])

    @property
    def holds_out(self) -> bool:
        """Return whether there are batches that nothing is fitted on."""
        return len(self.batches) > self._many

    @property
    def fits_weights(self) -> bool:
        """Return whether weights may be fitted: to data that a user gave, with some to judge the fit by."""
        return self.given is not None and self.holds_out

    def drift(self, before: M, after: M) -> Drift:
        """Measure how far the outputs moved, on batches that nothing was fitted on where there are such."""
        batches = self.held if self.holds_out else mine(self.batches)
        name = "synthetic" if self.given is None else self.name or "given"
        return replace(before.drift(after, batches, self.holds_out), data=name)

    def notes(self, drift: Drift | None) -> tuple[str, ...]:
        """Return what the figures of this run rest on."""
        notes = []
        if self.given is None and "batches" in vars(self):
            chosen = ", of which those that take the captured path," if self.program.fixed_paths else ""
            notes.append(
                f"no calibration data were given, so gains and drift rest on synthetic inputs{chosen} and may be far "
                "from what real inputs give; give real ones with --calibrate DATA (calibrate=...)"
            )
        if self.given is not None and "batches" in vars(self) and any(map(padded, self.batches)):
            notes.append(
                "tokens that a mask hides count neither in the fit nor in the drift where it was seen that no others "
                "depend on them, and as all others do where not"
            )
        if drift and (drift.relative_error or 0) > LARGE:
            notes.append(
                f"the outputs moved by {drift.relative_error:.0%}: constants stand where the model has one scalar "
                "for each token; heal the result by a short training on real data before use"
            )
        if drift and drift.off_path:
            notes.append(
                f"on {drift.off_path} more batches the result takes another path than was captured, and fails; "
                "they are not in the drift"
            )
        if drift and not drift.held_out:
            notes.append(
                "there was one batch only, so the drift was measured on the data of the fit, and weights stay; "
                "give two or more"
            )
        return tuple(notes)


def masks(batch: Batch) -> dict[str, Any]:
    """Return the inputs of a batch that are masks [rows, tokens], by name and rank."""
    named = batch.items() if isinstance(batch, Mapping) else ()
    return {name: value for name, value in named if "mask" in name and getattr(value, "ndim", 0) == 2}


def padded(batch: Batch) -> list[str]:
    """Return which masks of a batch tell tokens apart."""
    return [name for name, mask in masks(batch).items() if bool((mask == 0).any() and (mask != 0).any())]
