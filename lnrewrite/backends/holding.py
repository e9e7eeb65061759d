"""Bound what a program makes of constants alone: a file of 200 bytes can ask for 10^12 zeros.

What is made of inputs is as large as they are, and they are seen; nobody sees what is made of nothing until the memory
is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import Code, LnrewriteError

SPARE, PER_BYTE = 1 << 28, 16
"""Numbers that a program may hold: so many, and more for each byte of its weights."""


@dataclass(frozen=True)
class Step:
    """Name the values that one step of a program reads, and those it makes, each with its count of numbers."""

    reads: tuple[str, ...]
    makes: tuple[tuple[str, int], ...]


def allowed(size: int) -> int:
    """Return how many numbers a program with so many bytes of weights may hold besides its inputs."""
    return SPARE + PER_BYTE * size


def check_held(steps: Sequence[Step], size: int, what: str) -> None:
    """Walk the steps of a program, each value held until its last reader has run.

    size: bytes of the weights; what: the program, in errors. Raises LnrewriteError LN039 where more is held than that
    allows.
    """
    most, held, counts = allowed(size), 0, dict[str, int]()
    last = {name: place for place, step in enumerate(steps) for name in (*(n for n, _ in step.makes), *step.reads)}
    for place, step in enumerate(steps):
        counts.update(step.makes)
        held += sum(count for _, count in step.makes)
        if held > most:
            largest = max(step.makes, key=lambda made: made[1])[0]
            why = f"where it makes {largest}, it holds {held} numbers made of constants; its weights allow {most}"
            raise LnrewriteError(Code.LN039, what, why, "export it with smaller constants, or have them made of inputs")
        held -= sum(counts.pop(name, 0) for name in {*step.reads, *(n for n, _ in step.makes)} if last[name] == place)
