"""Find the fewest choices of a net that still give the same trouble."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .choices import Choices
from .judging import judge, trouble
from .nets import build


def kinds(row: dict[str, Any]) -> set[tuple[str, str]]:
    """Return the troubles of a row without their figures: the pipeline, and what happened."""
    return {(name, what) for name, what, _ in trouble(row)}


def shrink(seed: int, name: str, what: str, say: Callable[[str], None]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return a net's choices that are not plain, as few as give the same trouble, and the row that they give."""
    _, choices = build(seed)
    fixed: dict[str, str] = {}
    row = judge(seed, fixed, name)

    def still(tried: dict[str, str]) -> dict[str, Any] | None:
        found = judge(seed, tried, name)
        return found if (name, what) in kinds(found) else None

    def plainer(names: list[str]) -> None:
        """Make as many of the choices plain as can be, halving where not all can."""
        nonlocal fixed, row
        if found := still(fixed | {n: choices.plain[n] for n in names}):
            fixed |= {n: choices.plain[n] for n in names}
            row = found
            say(f"{len(fixed)} made plain")
        elif len(names) > 1:
            plainer(names[: len(names) // 2])
            plainer(names[len(names) // 2 :])

    while True:
        _, choices = build(seed, fixed)
        names = [n for n in _strange(choices) if n not in fixed]
        before = len(fixed)
        if names:
            plainer(names)
        if len(fixed) == before:
            return _strange(build(seed, fixed)[1]), row


def _strange(choices: Choices) -> dict[str, str]:
    return {n: v for n, v in choices.strange().items() if n != "strangeness"}
