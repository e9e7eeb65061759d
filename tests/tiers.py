"""The tiers of the suite: every run takes a sample of each cross product, `pytest -m exhaustive` takes all of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def rows(values: Iterable[Any], sample: Iterable[Any]) -> list[Any]:
    """Return the parameters of a cross product: all run with `-m exhaustive`, those in `sample` each time."""
    always = list(sample)
    return [_row(v, v in always) for v in values]


def _row(value: Any, always: bool) -> Any:
    marks = [pytest.mark.exhaustive, pytest.mark.sample] if always else [pytest.mark.exhaustive]
    return pytest.param(*value, marks=marks) if isinstance(value, tuple) else pytest.param(value, marks=marks)
