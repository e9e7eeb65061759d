"""Options, tiers, profiles and fixtures that all tests share, and the account of what a run cost."""

from __future__ import annotations

import os
import resource
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

if "PYTEST_XDIST_WORKER" in os.environ:  # one worker a core: before torch is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

import tiers

settings.register_profile("sample", deadline=None, derandomize=True, max_examples=50)  # one run, one result
settings.register_profile("exhaustive", deadline=None, derandomize=True, max_examples=500)
settings.register_profile("explore", deadline=None, max_examples=1000)


def pytest_configure(config: pytest.Config) -> None:
    """Choose how many cases hypothesis makes up: fewer where every run makes them."""
    tier = "sample" if "sample" in config.getoption("-m") else "exhaustive"
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", tier))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Put tests of made-up cases into both tiers, and those that cost much into the exhaustive one alone."""
    if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
        item.add_marker(pytest.mark.exhaustive)
        item.add_marker(pytest.mark.sample)
    if item.nodeid in tiers.dear():
        item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "sample"]
        item.add_marker(pytest.mark.exhaustive)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --update-goldens, --update-dear and --slice."""
    parser.addoption("--update-goldens", action="store_true", help="rewrite golden files instead of comparing")
    parser.addoption("--update-dear", metavar="S", type=float, help="note in tests/dear.txt which tests took over S s")
    parser.addoption("--slice", metavar="K/N", help="run the K-th of N parts of what is selected, K from 0")


@pytest.hookimpl(trylast=True)  # when -m has selected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the part of the tests that --slice names, the same for the same names."""
    if wanted := config.getoption("--slice"):
        part, parts = map(int, wanted.split("/"))
        mine = [zlib.crc32(item.nodeid.encode()) % parts == part % parts for item in items]
        config.hook.pytest_deselected(items=[i for i, keep in zip(items, mine, strict=True) if not keep])
        items[:] = [i for i, keep in zip(items, mine, strict=True) if keep]


@pytest.fixture(autouse=True)
def no_lines_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep commands from telling on stderr that they take long: how long depends on the machine."""
    monkeypatch.setattr("lnrewrite.cli.console.EVERY", float("inf"))


@pytest.fixture
def update_goldens(request: pytest.FixtureRequest) -> bool:
    """Return whether golden files are to be written."""
    return bool(request.config.getoption("--update-goldens"))


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what builds the kernels, once for all workers.

    They are compiled for all levels of CPU instructions (`best`), or for one level under the names of all.
    """
    from lnrewrite.kernels import building

    def build(level: str = "best") -> Path:
        target = tmp_path_factory.getbasetemp().parent / f"kernels-{level}.so"
        if not target.exists():
            with pytest.MonkeyPatch.context() as patch:
                if level != "best":
                    patch.setattr(building, "LEVELS", dict.fromkeys(building.LEVELS, building.LEVELS[level]))
                building.build(target, cuda=False, strict=True)
        return target

    return build


@pytest.fixture
def onnx_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert a program to ONNX once for each opset and set of kernels; what is done with the model is not shared."""
    from lnrewrite.models.program import Program

    real = Program.to_onnx

    def to_onnx(self: Program, opset: int | None = None, *, kernels: Any = ()) -> Any:
        made, how = CONVERTED.setdefault(self, {}), (opset, frozenset(kernels))
        if how not in made:
            made[how] = real(self, opset, kernels=kernels)
        return made[how].clone()

    monkeypatch.setattr(Program, "to_onnx", to_onnx)


@pytest.fixture
def demo_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make commands that name demo:tinygpt, and nothing about it, get copies of one capture."""
    import copy
    from dataclasses import replace

    import lnrewrite
    from lnrewrite import api

    real = lnrewrite.load  # asked for before it is replaced: the package keeps what it found

    def load(model: str, **how: Any) -> Any:
        if model != "demo:tinygpt" or any(how.get(k) for k in ("inputs", "factory", "seed")):
            return real(model, **how)
        if not DEMO:
            DEMO.append(real("demo:tinygpt")._capture)
        (capture,) = DEMO
        return lnrewrite.Program(replace(capture, module=copy.deepcopy(capture.module)), format="demo")

    monkeypatch.setattr(api, "load", load)


@pytest.fixture
def fitted_once(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Fit the same model to the same data once for all workers; what is done with the result is not shared."""
    import torch

    from lnrewrite.compat.torch import tensors_in
    from lnrewrite.models.program import Program
    from lnrewrite.pipeline.report import Fitted

    real, folder = Program.fitted, tmp_path_factory.getbasetemp().parent

    def fitted(self: Program, original: Program, blocks: Any, fit: Any, held: Any) -> Any:
        state = self.module().state_dict()
        key = sha256(repr([sorted(blocks), str(self.stream)]).encode())
        for tensor in (*state.values(), *original.module().state_dict().values(), *tensors_in([fit, held])):
            key.update(tensor.contiguous().view(torch.uint8).numpy())
        kept = folder / f"fitted-{key.hexdigest()}.pt"
        if not kept.exists():
            made, rows, notes = real(self, original, blocks, fit, held)
            part = kept.with_suffix(f".{os.getpid()}")
            torch.save((dict(made.module().state_dict()), [asdict(row) for row in rows], notes), part)
            part.replace(kept)
            return made, rows, notes
        values, rows, notes = torch.load(kept, weights_only=True)
        self.module().load_state_dict(values)
        again = Program(self._capture, format=self.format, tokenizer=self.tokenizer)
        return again, tuple(Fitted(**row) for row in rows), notes

    monkeypatch.setattr(Program, "fitted", fitted)


CONVERTED: WeakKeyDictionary[Any, dict[tuple[int | None, frozenset[str]], Any]] = WeakKeyDictionary()
DEMO: list[Any] = []


# ---- what a run cost, in seconds of CPU: wall times on a shared machine say little ----

SPENT = pytest.StashKey[float]()
COSTS: dict[str, float] = {}
WORKERS: list[float] = []


def _spent() -> float:
    """Return the user and system seconds of this process and of those that it ran."""
    own, others = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note what was spent before a test, its fixtures included."""
    item.stash[SPENT] = _spent()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Report what a test cost."""
    report: Any = yield
    if call.when == "teardown":
        report.user_properties = [*report.user_properties, ("cpu", _spent() - item.stash[SPENT])]
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect the costs where the tests are reported."""
    for name, value in report.user_properties:
        if name == "cpu":
            COSTS[report.nodeid] = value


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand a worker's seconds to the process that started it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cpu"] = _spent()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take a worker's seconds."""
    WORKERS.append(getattr(node, "workeroutput", {}).get("cpu", 0.0))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what the run cost, and the tests that cost most."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    total = sum(WORKERS) + own.ru_utime + own.ru_stime if WORKERS else _spent()
    if over := terminalreporter.config.getoption("--update-dear"):
        tiers.note(name for name, seconds in COSTS.items() if seconds > over)
    dear = sorted(COSTS.items(), key=lambda row: -row[1])[:40]
    rows = "".join(f"\n{seconds:8.1f} s  {name}" for name, seconds in dear if seconds > 5)
    terminalreporter.write_line(f"CPU: {total:.0f} s of user and system time in {len(COSTS)} tests{rows}")
