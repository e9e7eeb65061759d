"""The list of tests that cost much names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tiers

HERE = Path(__file__).parent


def test_what_costs_much_is_there() -> None:
    """Else a test that was renamed would silently be run each time again, and its old name stay."""
    for line in tiers.DEAR.read_text().splitlines():
        file, name = re.sub(r"\[.*", "", line.removeprefix("= ")).removeprefix("tests/").split("::")
        assert f"def {name}(" in (HERE / file).read_text(), line


def test_what_every_run_takes_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "DEAR", tmp_path / "dear.txt")
    tiers.DEAR.write_text("= tests/a.py::kept\ntests/a.py::old\n")
    tiers.dear.cache_clear()
    tiers.note(["tests/a.py::kept", "tests/b.py::new[1]"])
    tiers.dear.cache_clear()
    assert tiers.DEAR.read_text() == "= tests/a.py::kept\ntests/a.py::old\ntests/b.py::new[1]\n"
