"""Describe edits that keep what a model computes from those that do not, by carrying them out and looking."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import Enum
from traceback import extract_tb
from typing import Any, Protocol, Self

from ..errors import Code, Different, LnrewriteError, Refusal, told, words
from ..ir import Edit, Proposal, Stream
from .results import Gap

Edits = Sequence[tuple[Stream, Proposal]]
REMEDY = "please report this model: it shows a fault of lnrewrite"
ROOM = 10.0
"""By how many times the error that asymptotic edits state the outputs may move."""


UP_TO_EPS = "the identity holds up to eps, which some tokens of this model are too small for"


class Scope(Enum):
    """Describe what of a pipeline is proved: nothing, each stretch of exact passes, or every edit by itself."""

    NONE = 0
    AT_ENDS = 1
    OF_EDITS = 2


class Unproved(Different):
    """Report that exact passes made something that computes other numbers than what it was made of."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(Code.LN404, what, why, "please report this model; fewer passes, or blocks=..., may do")


def failing(fault: Exception) -> str:
    """Return what fails with an error, and where it was raised if the error has no words of its own."""
    places = [] if words(fault) else extract_tb(fault.__traceback__)[-1:]
    return f"fails with {told(fault)}" + "".join(f" in {place.name}, at {place.line!r}" for place in places)


class Provable(Protocol):
    """Describe what a program needs so that edits of it can be proved."""

    def evidence(self, seed: int) -> object | None: ...
    def apply(self, edits: Edits, label: str, *, consume: bool = False) -> tuple[Self, int]: ...
    def away(self, evidence: Any) -> Gap: ...


class Witness:
    """Know what a stretch of exact passes is to compute: the program is asked before its first edit, if there is one.

    `each`: prove every edit by itself instead of the whole. `allowed`: how far its edits may move the outputs. `error`:
    how far they did, relative to the largest; None where that was not measured.
    """

    def __init__(self, seed: int, each: bool) -> None:
        self.seed, self.each, self.called = seed, each, False
        self.evidence: object | None = None
        self.allowed = 0.0
        self.error: float | None = None

    def call(self, program: Provable) -> None:
        """Make the program say what it computes, before it is edited."""
        if not self.called:
            self.called, self.evidence = True, program.evidence(self.seed)

    def hear(self, program: Provable, what: str) -> None:
        """Raise Unproved where a program computes something else than the one that was asked."""
        if self.evidence is None:
            return
        try:
            gap = program.away(self.evidence)
        except LnrewriteError:
            raise
        except Exception as fault:  # of ours, or of a library's: what does not run is not proved
            raise Unproved(what, f"running the result {failing(fault)}") from fault
        if gap.unexplained > self.allowed and not self.each:
            raise Unproved(what, f"the result's outputs are {gap.error:.1e} (relative) from the model's")
        self.error = gap.error


def stated(edits: Iterable[Edit]) -> float:
    """Return how far edits may move the outputs."""
    return ROOM * sum(edit.bound for edit in edits)


def sound(
    program: Provable, wanted: Edits, label: str, evidence: object, allowed: float = 0.0
) -> tuple[list[tuple[Stream, Proposal]], tuple[Refusal, ...]]:
    """Return the edits that keep what the evidence holds, and a refusal for each that does not.

    Edits that stand by themselves are told apart by halving; those that only hold together fall together.
    """
    edits = [(index, edit) for index, (_, proposal) in enumerate(wanted) for edit in proposal.edits]

    def with_(chosen: Sequence[tuple[int, Edit]]) -> list[tuple[Stream, Proposal]]:
        rows = [(s, replace(p, edits=tuple(e for i, e in chosen if i == index))) for index, (s, p) in enumerate(wanted)]
        return [(s, p) for s, p in rows if p.edits]

    def why_not(chosen: Sequence[tuple[int, Edit]]) -> str:
        try:
            error = program.apply(with_(chosen), label)[0].away(evidence).unexplained
        except Exception as fault:
            return f"carrying it out {failing(fault)}"
        wrong = error > allowed + stated(e for _, e in chosen)
        return f"with it the outputs are {error:.1e} (relative) from the model's" if wrong else ""

    def halved(kept: list[tuple[int, Edit]], more: list[tuple[int, Edit]]) -> list[tuple[int, Edit]]:
        """Return `kept` and as many of `more` as hold up with it."""
        if not more or not (why := why_not(kept + more)):
            return kept + more
        if len(more) == 1:
            edit = more[0][1]
            refusals.append(Refusal(Code.LN404, edit.target, why, UP_TO_EPS if edit.bound else REMEDY))
            return kept
        middle = len(more) // 2
        return halved(halved(kept, more[:middle]), more[middle:])

    refusals: list[Refusal] = []
    return with_(halved([], edits)), tuple(refusals)
