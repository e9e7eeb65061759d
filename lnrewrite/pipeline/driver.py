"""Run pipelines of passes: propose, check that nothing was skipped, apply, report.

    canonicalize,place{to=peri norm=auto blocks=0-5;attention}

A pass sees a `Stream` and a `Context` and returns a `Proposal`; what it is applied to is any `Model`. Nothing here
knows torch or ONNX. `spec.py` holds the text form of pipelines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import ClassVar, Generic

from .. import errors
from ..errors import Code, LnrewriteError
from ..ir import Exactness, Network
from ..quiet import LOGGER
from .feed import Feed
from .presets import PRESETS
from .protocols import Batch, M, Proposer
from .report import Report, unknown_norms
from .results import Drift
from .sounding import Scope, Unproved, Witness
from .spec import parse, spell
from .step import Done, Turn


@dataclass(frozen=True)
class Pipeline:
    """Hold passes in order; `Pipeline.parse(text)` makes one, `str()` gives the text back.

    >>> print(Pipeline.parse("canonicalize,fold-affine"))
    canonicalize,fold-affine
    """

    passes: tuple[Proposer, ...]
    PRESETS: ClassVar[Mapping[str, str]] = {name: text for name, (_, text) in PRESETS.items()}
    """The pipelines that have a name, as text."""

    @classmethod
    def parse(cls, text: str) -> Pipeline:
        """Build the pipeline that `text` describes.

        Raises UsageError: LN001 unknown pass, LN002 text (with the column), LN003 option.
        """
        return cls(tuple(parse(text)))

    @classmethod
    def preset(cls, name: str) -> Pipeline:
        """Build the pipeline that a preset stands for. Raises UsageError LN001 for an unknown name."""
        if name not in PRESETS:
            errors.unknown(Code.LN001, "preset", name, PRESETS)
        return cls.parse(PRESETS[name][1])

    def __str__(self) -> str:
        return ",".join(map(spell, self.passes))

    def run(
        self,
        program: M,
        calibrate: Iterable[Batch] | None = None,
        partial: bool = False,
        seed: int = 0,
        *,
        data: str | None = None,
        consume: bool = False,
        verify: bool = True,
    ) -> Result[M]:
        """Run every pass on `program` and return the new program with a report; `program` itself stays as it is.

        What exact passes made is proved: run in float64 against what it was made of, at two batch sizes and lengths.
        Edits that do not hold up are found, left out and refused with LN404, as what cannot be edited is. `verify`:
        false leaves the proof out.

        `calibrate` is an iterable of inputs (dicts of keyword inputs, or tuples); the last eighth, at least one, is
        held out: it measures the drift, and decides between ways to fit the rest; None makes inputs up and says so.
        `data` is what the report calls them. With `partial`, sites that cannot be edited are listed; else the first
        pass that refuses raises `Refused`. `consume` lets exact passes edit `program` itself, which is of no use
        afterwards: its weights are in memory once, not twice; where the proof fails then `Unproved` (LN404) is raised,
        and a run without `consume` tells what it is.
        """
        feed = Feed(program, calibrate, seed, data)
        rounded, before = program.narrow, program.network
        consume = consume and not rounded and all(item.exactness < Exactness.CALIBRATED for item in self.passes)
        scope = Scope.AT_ENDS if verify else Scope.NONE
        try:
            current, done, error = self._steps(program, feed, partial, seed, consume, scope)
        except Unproved:
            if consume:
                raise
            LOGGER.info("the result does not compute what the model does: looking for the edit that is wrong")
            current, done, error = self._steps(program, feed, partial, seed, False, Scope.OF_EDITS)
        exactness = max((d.exactness for d in done if d.step.edits), default=Exactness.STRUCTURAL)
        drift = None
        if exactness >= Exactness.CALIBRATED or (rounded and current is not program):
            LOGGER.info("measuring the drift")
            drift = feed.drift(program, current)
            _finite(drift)
        report = self._report(before, current.network, exactness, done, drift, feed)
        return Result(current, replace(report, exact_error=error))

    def _steps(
        self, program: M, feed: Feed, partial: bool, seed: int, consume: bool, scope: Scope
    ) -> tuple[M, list[Done], float | None]:
        """Run the passes one after the other; prove what each stretch of exact ones, or each single edit, gave.

        Returns the program, what each pass did, and the largest error that the proofs measured.
        """
        current, done, number, errors = program, list[Done](), 0, list[float]()
        for exact, stretch in groupby(self.passes, lambda item: item.exactness < Exactness.CALIBRATED):
            witness = Witness(seed, scope is Scope.OF_EDITS) if exact and scope is not Scope.NONE else None
            for item in stretch:
                LOGGER.info(f"{(number := number + 1)}/{len(self.passes)} {spell(item)}")
                network = current.network if exact or scope is Scope.NONE else current.certified
                used = consume or current is not program
                current, step = Turn(current, network, feed, partial, seed, witness).run(item, used)
                done.append(step)
            if witness:
                witness.hear(current, str(self))
                errors += [] if witness.error is None else [witness.error]
        return current, done, max(errors, default=None)

    def _report(
        self,
        before: Network,
        after: Network,
        exactness: Exactness,
        done: Sequence[Done],
        drift: Drift | None,
        feed: Feed,
    ) -> Report:
        return Report(
            pipeline=str(self),
            exactness=exactness,
            steps=tuple(d.step for d in done),
            placement_before=before.placement,
            placement_after=after.placement,
            measured=drift,
            refusals=tuple(r for d in done for r in d.refusals),
            not_applicable=tuple(row for d in done for row in d.skipped),
            sites=tuple(row for d in done for row in d.expected),
            notes=(
                *feed.program.notes,
                *_blind(before),
                *_unproved(done),
                *_doubted(done),
                *_rounding(exactness, drift),
                *(note for d in done for note in d.notes),
                *feed.notes(drift),
            ),
            fixed_paths=feed.program.fixed_paths,
            fitted=tuple(row for d in done for row in d.fitted),
        )


@dataclass(frozen=True)
class Result(Generic[M]):
    """Hold what a run gave: the rewritten `program`, and the `report` of what was done (it prints itself)."""

    program: M
    report: Report


def _finite(drift: Drift) -> None:
    """Raise LnrewriteError LN405 where a conversion's outputs are no numbers."""
    error = drift.relative_error
    if error is not None and not error < float("inf"):
        why = "the outputs of the result are NaN or infinite on the data it was measured on"
        raise LnrewriteError(Code.LN405, "the result", why, "exclude blocks with blocks=..., and report this model")


def _blind(network: Network) -> tuple[str, ...]:
    """Return the notes of a run that had nothing to work on, and on what works as a norm and is not known."""
    odd = unknown_norms(network.refusals)
    if network.blocks:
        return odd
    return (f"no residual block was found{''.join(f'; {reason}' for reason in network.refusals[-3:])}", *odd)


def _unproved(done: Sequence[Done]) -> tuple[str, ...]:
    """Return the note that exact passes edited a model that could not be run."""
    if not any(d.unproved for d in done):
        return ()
    why = "the model holds no weights or does not run on synthetic inputs"
    return (f"what exact passes made was not run against the model: {why}; compare them with lnrewrite verify",)


def _doubted(done: Sequence[Done]) -> tuple[str, ...]:
    """Return what of the picture did not hold where it was tried, so that a pass took it for a barrier."""
    found = (str(r) for d in done for r in d.network.refusals if r.code == Code.LN208)
    return tuple(dict.fromkeys(found))


def _rounding(exactness: Exactness, drift: Drift | None) -> tuple[str, ...]:
    """Return what the drift of an exact pipeline is: the rounding of what it stored."""
    if drift is None or exactness >= Exactness.CALIBRATED:
        return ()
    return ("the edits are exact; the drift is the rounding of weights that are stored in half precision",)
