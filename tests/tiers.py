"""The tiers of the suite: every run takes a sample of each cross product, `pytest -m exhaustive` takes all of it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

DEAR = Path(__file__).parent / "dear.txt"
"""Tests that cost too much for every run, one on a line; behind `= ` stands what every run takes all the same."""


def rows(values: Iterable[Any], sample: Iterable[Any]) -> list[Any]:
    """Return the parameters of a cross product: all run with `-m exhaustive`, those in `sample` each time."""
    always = list(sample)
    return [_row(v, v in always) for v in values]


@cache
def dear() -> frozenset[str]:
    """Return the tests that only the exhaustive tier runs, for they cost much."""
    return frozenset(line for line in DEAR.read_text().splitlines() if not line.startswith("= "))


def note(tests: Iterable[str]) -> None:
    """Add tests to those that cost much, but for what every run takes all the same."""
    kept = {line for line in DEAR.read_text().splitlines() if line.startswith("= ")}
    found = dear().union(tests) - {line.removeprefix("= ") for line in kept}
    DEAR.write_text("".join(f"{line}\n" for line in (*sorted(kept), *sorted(found))))


def _row(value: Any, always: bool) -> Any:
    marks = [pytest.mark.exhaustive, pytest.mark.sample] if always else [pytest.mark.exhaustive]
    return pytest.param(*value, marks=marks) if isinstance(value, tuple) else pytest.param(value, marks=marks)
