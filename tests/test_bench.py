"""Timing: sessions are made anew, runs are interleaved, ratios are taken within a round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

import lnrewrite as lnr
from lnrewrite import benching
from lnrewrite.tables import timings


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    paths = []
    for name, op in (("a", "Relu"), ("b", "Neg")):
        text = f'<ir_version: 8, opset_import: ["" : 18]> g (float[n,4] x) => (float[n,4] y) {{ y = {op} (x) }}'
        (tmp_path / f"{name}.onnx").write_bytes(onnx.parser.parse_model(text).SerializeToString())
        paths.append(str(tmp_path / f"{name}.onnx"))
    return paths


def test_every_round_makes_new_sessions_and_ratios_are_paired(models: list[str], monkeypatch: Any) -> None:
    """The second model takes three times as long in every round, while the machine gets slower from round to round."""
    made: list[str] = []
    now, slow = [0.0], [1.0]

    def session(path: Path, name: str, *rest: Any) -> Any:
        if made.count(name) == len(made) - made.count(name):
            slow[0] *= 2
        made.append(name)

        def run() -> None:
            now[0] += slow[0] * (3 if name == models[1] else 1)

        return run

    monkeypatch.setattr(benching, "_session", session)
    found = lnr.bench(models, rounds=4, runs=3, clock=lambda: now[0])
    assert {made.count(m) for m in models} == {4}
    assert len({tuple(made[i : i + 2]) for i in range(0, 8, 2)}) == 2, "the order of sessions is never shuffled"
    first, second = found["models"]
    assert first["ratio_to_first"] == {"p10": 1.0, "median": 1.0, "p90": 1.0}
    assert second["ratio_to_first"] == {"p10": 3.0, "median": 3.0, "p90": 3.0}
    assert first["p10_ms"] < first["median_ms"] < first["p90_ms"]
    assert all(len(line) <= 100 for line in timings(found).splitlines())


def test_the_object_of_the_contract(models: list[str]) -> None:
    found = lnr.bench(models, rounds=2, runs=2, inputs={"x": [[1.0, 2.0, 3.0, 4.0]]})
    assert (found["target"], found["threads"]) == ("cpu", 1)
    assert [row["path"] for row in found["models"]] == models
    keys = {"path", "median_ms", "p10_ms", "p90_ms", "ratio_to_first"}
    assert all(row.keys() == keys for row in found["models"])


def test_what_cannot_be_timed_is_said(models: list[str], tmp_path: Path) -> None:
    for how, code in (({"target": "tpu"}, "LN003"), ({"target": "cuda"}, "LN520")):
        with pytest.raises(lnr.LnrewriteError) as error:
            lnr.bench(models, **how)
        assert error.value.code == code
    broken = Path(models[1]).read_bytes().replace(b"Neg", b"Nag")
    (tmp_path / "b.onnx").write_bytes(broken)
    with pytest.raises(lnr.LnrewriteError) as error:
        lnr.bench(models)
    assert error.value.code == "LN520" and "\n" not in str(error.value)
