"""What is asked of a model: a pipeline and how it is run, one value from the door to the passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import Code, LnrewriteError
from .driver import Pipeline, Result
from .protocols import Batch, M
from .report import Report
from .shares import Shares, shared

BatchReader = Callable[[Any], Iterable[Batch] | None]
"""What reads calibration batches for a program."""


@dataclass(frozen=True)
class Job:
    """Hold a pipeline and how it is run: see `Pipeline.run`. `data` is what the report calls what `read` gives.

    `lenient`, of presets: edit what can be edited; to edit nothing, for refusals, is an error. `shares`: the processes
    that hold a part of the data each; all run the job, and the first alone writes.
    """

    pipeline: Pipeline
    partial: bool = False
    lenient: bool = False
    verify: bool = True
    accept_fixed_paths: bool = False
    seed: int = 0
    read: BatchReader | None = None
    data: str | None = None
    shares: Shares = Shares()

    def batches(self, program: M) -> Iterable[Batch] | None:
        """Return the calibration batches, which may be given only once; None makes inputs up."""
        return self.read(program) if self.read else None

    def run(self, program: M, batches: Iterable[Batch] | None, *, consume: bool = False) -> Result[M]:
        """Run the pipeline on a program. Raises Refused, Unproved, and what `Pipeline.run` raises."""
        partial = self.partial or self.lenient
        with shared(self.shares):
            return self.pipeline.run(
                program, batches, partial, self.seed, data=self.data, verify=self.verify, consume=consume
            )

    def check(self, model: str, report: Report) -> None:
        """Raise LnrewriteError where a result is not to be written: LN033, or a preset that could edit nothing."""
        check_paths(model, report.fixed_paths, self.accept_fixed_paths)
        if self.lenient and report.refusals and not report.edits:
            first, *more = report.refusals
            why = f"nothing could be edited: {first.why}" + f" (and {len(more)} more)" * bool(more)
            raise LnrewriteError(first.code, first.site, why, first.remedy or f"see `lnrewrite explain {first.code}`")


def check_paths(model: str, fixed: Sequence[str], accept: bool) -> None:
    """Raise LN033 where a capture fixed what the model chooses by its data, and nobody said that this will do."""
    if fixed and not accept:
        why = f"it chooses its path by its data, and the capture follows only one: {fixed[0]}"
        remedy = "use torch.where in the model, or give --accept-fixed-paths if inputs never take another path"
        raise LnrewriteError(Code.LN033, f"model {model!r}", why, remedy)
