"""Find the fewest choices of a net that still give the same trouble."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .choices import Choices
from .judging import PIPELINES, judge, trouble
from .nets import build


def kinds(row: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """Return the kinds of trouble of a row, what happened and in which pass, and the shortest pipeline that has it."""
    found: dict[tuple[str, str], str] = {}
    for name, what, why in sorted(trouble(row), key=lambda t: len(PIPELINES.get(t[0], ""))):
        found.setdefault((what, why.partition(" ")[0].partition("{")[0] if what == "caught" else ""), name)
    return found


def shrink(
    seed: int, kind: tuple[str, str], name: str, say: Callable[[str], None]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the choices of a net that are not plain, as few as give a pipeline the same trouble, and its row then."""
    _, choices = build(seed)
    fixed: dict[str, str] = {}
    row = judge(seed, fixed, name)

    def still(tried: dict[str, str]) -> dict[str, Any] | None:
        found = judge(seed, tried, name)
        return found if kind in kinds(found) else None

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
