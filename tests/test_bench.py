"""Timing: sessions are made anew, runs are interleaved, ratios are taken within a round, models get the same inputs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import lnrewrite as lnr
from lnrewrite.cli.tables import timings
from lnrewrite.runtime import benching

A = "g (float[n,4] x) => (float[n,4] y) { y = Relu (x) }"
B = "g (float[n,4] x) => (float[n,4] y) { y = Neg (x) }"
SLOW = (1.0, 8.0, 2.0, 4.0)
FACTOR = (2.0, 3.0, 5.0, 4.0)
Write = Callable[[str, str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(name: str, text: str) -> str:
        model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {text}')
        (tmp_path / f"{name}.onnx").write_bytes(model.SerializeToString())
        return str(tmp_path / f"{name}.onnx")

    return written


@pytest.fixture
def models(write: Write) -> list[str]:
    return [write("a", A), write("b", B)]


class Machine:
    """Replace sessions and clock: in its k-th session A takes SLOW[k] seconds a run, B FACTOR[k] times as long.

    The runs before the WARM-th of a session take a thousand times that.
    """

    def __init__(self, first: str) -> None:
        self.first, self.now = first, 0.0
        self.made: list[str] = []
        self.ran: list[str] = []

    def session(self, model: benching.Timed, *rest: Any) -> Callable[[], None]:
        index = self.made.count(model.name)
        self.made.append(model.name)
        took, runs = SLOW[index] * (1 if model.name == self.first else FACTOR[index]), Counter[str]()

        def run() -> None:
            runs["all"] += 1
            self.ran.append(model.name)
            self.now += took * (1000 if runs["all"] <= benching.WARM else 1)

        return run


def timed(models: list[str], monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> tuple[Machine, dict[str, Any]]:
    machine = Machine(models[0])
    monkeypatch.setattr(benching, "_session", machine.session)
    return machine, lnr.bench(models, rounds=4, runs=3, seed=seed, clock=lambda: machine.now)


def test_ratios_are_taken_within_a_round(models: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the pooled times the medians are 3 and 13 s: a ratio of 4.33, where that of the rounds' ratios is 3.5."""
    first, second = timed(models, monkeypatch)[1]["models"]
    assert first["ratio_to_first"] == {"p10": 1.0, "median": 1.0, "p90": 1.0}
    assert second["ratio_to_first"] == pytest.approx({"p10": 2.3, "median": 3.5, "p90": 4.7})
    assert (first["median_ms"], second["median_ms"]) == (3000.0, 13000.0)
    assert (first["p10_ms"], first["p90_ms"]) == (1000.0, 8000.0), "warm-up is counted, or a round is left out"


def test_sessions_and_runs_are_shuffled_by_the_seed(models: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    machine, _ = timed(models, monkeypatch)
    for log, pairs in ((machine.made, 4), (machine.ran, 4 * (benching.WARM + 3))):
        orders = [tuple(log[i : i + 2]) for i in range(0, len(log), 2)]
        assert len(orders) == pairs and set(orders) == {(models[0], models[1]), (models[1], models[0])}
    again, other = timed(models, monkeypatch)[0], timed(models, monkeypatch, seed=1)[0]
    assert (machine.made, machine.ran) == (again.made, again.ran)
    assert (machine.made, machine.ran) != (other.made, other.ran)


def test_every_round_makes_sessions_whose_threads_stop(models: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int, int, str]] = []
    real = onnxruntime.InferenceSession

    def session(path: Any, options: Any, **how: Any) -> Any:
        if isinstance(path, Path):
            stop = options.get_session_config_entry("session.force_spinning_stop")
            made.append((str(path), options.intra_op_num_threads, options.inter_op_num_threads, stop))
        return real(path, options, **how)

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    lnr.bench(models, threads=2, rounds=3, runs=1)
    assert Counter(made) == {(model, 2, 1, "1"): 3 for model in models}


def test_the_object_of_the_contract(models: list[str]) -> None:
    found = lnr.bench(models, rounds=2, runs=2, inputs={"x": [[1.0, 2.0, 3.0, 4.0]]})
    assert (found["target"], found["threads"]) == ("cpu", 1)
    assert [row["path"] for row in found["models"]] == models
    keys = {"path", "median_ms", "p10_ms", "p90_ms", "ratio_to_first"}
    assert all(row.keys() == keys for row in found["models"])


def test_the_table_fits_a_page_and_states_the_threads(models: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = timed(models, monkeypatch)[1]
    assert timings(found).startswith("cpu, 1 CPU thread; 4 sessions of each model, 3 runs in each")
    many = {**found, "target": "cuda", "threads": 128, "rounds": 1000, "runs": 1000}
    assert "128 CPU threads, spinning within a run" in timings(many)
    assert all(len(line) <= 100 for line in timings(many).splitlines())


def test_models_get_one_input_in_the_types_and_by_the_names_that_they_declare(write: Write) -> None:
    first = write("first", "g (float[n,4] x, float[n,4] mask) => (float[n,4] y) { y = Add (x, mask) }")
    half = write("half", "g (float16[n,4] x) => (float16[n,4] y) { y = Relu (x) }")
    given = {"x": [[1.0, 2.0, 3.0, 4.0]], "mask": [[0.0, 0.0, 0.0, 0.0]]}
    one, other = benching._opened([Path(first), Path(half)], [first, half], given, 0)
    assert one.feed.keys() == {"x", "mask"} and other.feed.keys() == {"x"}
    assert other.feed["x"].dtype == np.float16 and one.feed["x"].dtype == np.float32
    assert (other.feed["x"] == one.feed["x"]).all()
    assert len(lnr.bench([first, half], rounds=1, runs=1)["models"]) == 2


def test_on_cuda_free_sizes_become_those_of_the_inputs(write: Write) -> None:
    """A CUDA graph holds one shape, and what computes with sizes would fall to the CPU: here it folds away."""
    text = "g (float[n,s,4] x) => (float[n,t] y) { a = Shape <start: int = 0, end: int = 1> (x) "
    text += "b = Constant <value_ints: ints = [-1]> () c = Concat <axis: int = 0> (a, b) y = Reshape (x, c) }"
    path = write("m", text)
    (model,) = benching._opened([Path(path)], [path], {"x": np.zeros((2, 3, 4), np.float32)}, 0)
    assert model.sizes == {"n": 2, "s": 3}
    for target, kinds in (("cpu", {"Shape", "Concat", "Reshape"}), ("cuda", {"Reshape"})):
        options = benching._options(model, target, 1)
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "0")  # the CPU stands in for the device
        options.optimized_model_filepath = f"{path}.{target}"
        onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        assert {node.op_type for node in onnx.load(f"{path}.{target}").graph.node} == kinds


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ('g (float[n,4] z) => (float[n,4] y) { y = Relu (z) }', "LN520", "z missing"),
        ('g (float[n,4,1] x) => (float[n,4,1] y) { y = Relu (x) }', "LN520", "expected x float32"),
        ('g (float[n,4] x) => (float[n,5] y) <float[5,5] w = {1.0}> { y = Relu (x) }', "LN030", ""),
        ('g (float[n,4] x) => (float[n,4] y) { y = Nag (x) }', "LN520", "does not run"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_timed_beside_the_first_is_named(
    models: list[str], write: Write, text: str, code: str, says: str
) -> None:
    other = write("other", text)
    with pytest.raises(lnr.LnrewriteError) as error:
        lnr.bench([models[0], other], rounds=1, runs=1)
    assert error.value.code == code and other in error.value.what and says in error.value.why
    assert "\n" not in str(error.value)


def test_targets_and_inputs_that_are_not_there(models: list[str]) -> None:
    with pytest.raises(lnr.LnrewriteError) as error:
        lnr.bench(models, target="tpu")
    assert error.value.code == "LN003"
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        with pytest.raises(lnr.LnrewriteError) as error:
            lnr.bench(models, target="cuda")
        assert error.value.code == "LN520" and "lnrewrite[gpu]" in error.value.remedy
    with pytest.raises(lnr.LnrewriteError) as error:
        lnr.bench(models, inputs={"x": [[1.0, 2.0, 3.0, 4.0]], "extra": [1]})
    assert error.value.code == "LN022"


def test_what_is_no_onnx_file_is_exported_for_the_target(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program stands beside the file that it was exported to: both hold the same fused norms."""
    lnr.load("demo:tinygpt").export(tmp_path / "tiny.onnx", target="cpu")
    held: dict[str, Counter[str]] = {}

    def session(model: benching.Timed, *_: Any) -> Callable[[], None]:
        held[model.name] = Counter(node.op_type for node in onnx.load(model.path).graph.node)
        return lambda: None

    monkeypatch.setattr(benching, "_session", session)
    names = [str(tmp_path / "tiny.onnx"), "demo:tinygpt"]
    assert [row["path"] for row in lnr.bench(names, rounds=1, runs=1)["models"]] == names
    assert held[names[0]] == held[names[1]] and held[names[0]]["LayerNormalization"]
    assert os.listdir(tmp_path) == ["tiny.onnx"]
