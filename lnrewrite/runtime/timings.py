"""What a benchmark measured: a spread of times for each model, and of their ratios to the first; `to_dict` is JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from ..pipeline.results import Json


@dataclass(frozen=True, slots=True)
class Spread:
    """Hold the 10th percentile, the median and the 90th percentile of some numbers."""

    p10: float
    median: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Return the spread of some numbers."""
        return cls(*(float(value) for value in np.percentile(np.asarray(values), (10, 50, 90))))


@dataclass(frozen=True, slots=True)
class Timing:
    """Hold the times of one model in ms, and their ratio to the first model's, taken round by round."""

    path: str
    times: Spread
    ratio: Spread

    def to_dict(self) -> Json:
        """Return the row of a model as `bench --json` shows it."""
        ratio = {"p10": self.ratio.p10, "median": self.ratio.median, "p90": self.ratio.p90}
        times = {"median_ms": self.times.median, "p10_ms": self.times.p10, "p90_ms": self.times.p90}
        return {"path": self.path, **times, "ratio_to_first": ratio}


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Hold what was measured: `rounds` sessions of each model on a target, `runs` runs in each, `threads` of the CPU.

    notes: what was fixed when the models were captured.
    """

    target: str
    threads: int
    rounds: int
    runs: int
    models: tuple[Timing, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> Json:
        """Return the JSON object of `bench --json`."""
        return {
            "target": self.target,
            "threads": self.threads,
            "rounds": self.rounds,
            "runs": self.runs,
            "models": [model.to_dict() for model in self.models],
            "notes": list(self.notes),
        }
