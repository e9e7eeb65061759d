"""Calibration by several processes: each holds some batches, and all come to what one process comes to."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import lnrewrite as lnr
import zoo
from commands import ok
from lnrewrite.algebra import fitting
from lnrewrite.backends.torch.processes import Processes
from lnrewrite.checkpoints import kept
from lnrewrite.cli import main
from lnrewrite.cli.processes import joined
from lnrewrite.errors import Code, LnrewriteError, UsageError
from lnrewrite.ir import Exactness, Proposal
from lnrewrite.loading.identify import identify
from lnrewrite.loading.source import Format, OpenOptions
from lnrewrite.pipeline.base import Pass
from lnrewrite.pipeline.driver import Pipeline
from lnrewrite.pipeline.feed import Feed
from lnrewrite.pipeline.shares import Shares, agreed, anywhere, everyone, number, processes, shared, total
from lnrewrite.reconstruction.fitting import Fitting
from lnrewrite.reconstruction.goals import Measure, goals_of
from test_sharded import all_of
from tiers import rows

FIRST = (40, 24, 12)
"""The tokens of each process, times four: what is held out of a fit is every fourth."""


def tokens(width: int = 6) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return states, what is to be made of them, and weights; the sizes of tokens vary, and one stands out."""
    draw = np.random.default_rng(0)
    base = draw.normal(size=(4 * sum(FIRST), width)) * draw.lognormal(sigma=0.5, size=(4 * sum(FIRST), 1))
    base[50] *= 1000
    return base, base @ draw.normal(size=(width, width)) + 0.3, draw.uniform(0.5, 2, len(base))


CLOSED: dict[str, Callable[..., Any]] = {
    "usual": lambda x, y, w: total(fitting.usual(x).sum()),
    "fit": lambda x, y, w: _numbers(fitting.fit(x, y, w)),
    "fit with a shift": lambda x, y, w: _numbers(fitting.fit(x, y, w, shift=True)),
    "mix": lambda x, y, w: _numbers(fitting.mix(x, y, w)),
    "mix with a shift": lambda x, y, w: _numbers(fitting.mix(x, y, w, shift=True)),
    "metric": lambda x, y, w: fitting.metric(x, w * fitting.usual(x)),
    "offset": lambda x, y, w: fitting.offset(x, w, 8.0),
    "careful eps": lambda x, y, w: fitting.careful_eps(1.0, x),
    "slopes": lambda x, y, w: _slopes(*map(torch.from_numpy, (x, y))),
    "goals": lambda x, y, w: _goals(torch.from_numpy(x), torch.from_numpy(y)),
}


def _numbers(found: fitting.Fit | None) -> list[Any]:
    assert found is not None
    return [found.scale, found.error, *([] if found.shift is None else [found.shift])]


def _slopes(x: Tensor, y: Tensor) -> list[Any]:
    """Return the loss of a fit of weights and its gradient, away from the start."""
    start = {"w": torch.eye(x.shape[1], dtype=torch.float64), "b": torch.zeros(x.shape[1], dtype=torch.float64)}
    task = Fitting(lambda _, held: x @ held["w"] + held["b"] - y, 1, start, 3.0)
    value, slopes = task.loss({name: held + 0.1 for name, held in start.items()})
    return [value, *slopes.values()]


PICKS: list[Callable[[Tensor, Tensor], Any]] = [lambda x, y: y, lambda x, y: x, lambda x, y: (x, 1.1 * x)]
"""The states behind a sum, before it, and of both models behind the sum before."""


def _goals(x: Tensor, y: Tensor) -> list[Any]:
    """Return what depends on the tokens of all in goals for these; the last process has no batch of its own."""
    none = number() + 1 == processes() > 1
    held = [] if none else [(x, y)]
    ends, starts, before = ([pick(*pair) for pair in held] for pick in PICKS)
    found = goals_of([Measure(-1, False, False)] * len(ends), ends, starts, before, (Measure(-1, False, False), x))
    return [total(float(sum(g.residual(x).square().sum() for g in found)))]


def closed_forms(sizes: tuple[int, ...], out: Path) -> None:
    """Compute them all on this process's tokens, and write what comes of it."""
    with Processes.joined("cpu") as found, shared(found):
        end = 4 * sum(sizes[: number() + 1])
        part = [a[end - 4 * sizes[number()] : end] for a in tokens()]
        told = {name: form(*part) for name, form in CLOSED.items()}
        told["verbs"] = [everyone(number()), agreed(number()), anywhere(number() == 1), total(number()), total(0.5)]
    torch.save(told, f"{out}.{os.environ['RANK']}.pt")


@pytest.mark.parametrize("size", rows([2, 3], sample=[2]))
def test_sums_of_many_are_the_sums_of_one(size: int, tmp_path: Path) -> None:
    ended(all_of(size, closed_forms, FIRST[:size], tmp_path / "found"))
    whole = [a[: 4 * sum(FIRST[:size])] for a in tokens()]
    held = [torch.load(tmp_path / f"found.{rank}.pt", weights_only=False) for rank in range(size)]
    for found in held:
        assert found.pop("verbs") == [list(range(size)), 0, True, sum(range(size)), size / 2]
    for name, form in CLOSED.items():
        if name == "goals":
            whole = [a[: 4 * sum(FIRST[: size - 1])] for a in tokens()]
        for part, one, *others in zip(listed(form(*whole)), *(listed(f[name]) for f in held), strict=True):
            np.testing.assert_allclose(one, part, rtol=1e-9, atol=1e-9 * np.abs(part).max(), err_msg=name)
            assert all(np.array_equal(one, other) for other in others), name


def listed(found: Any) -> list[np.ndarray]:
    return [np.asarray(value) for value in (found if isinstance(found, list) else [found])]


def ended(started: list[Any], *codes: int) -> None:
    for process in started:
        process.join(300)
    assert [p.exitcode for p in started] == list(codes or [0] * len(started))


# ---- conversions ----


def folder(name: str, room: Path) -> None:
    model, _ = zoo.build(name, head=True)
    model.save_pretrained(room / "model")
    np.savez(room / "data.npz", input_ids=np.random.default_rng(0).integers(0, 32, (33, 12)))


def command(room: Path, out: Path, *words: str, large: bool) -> None:
    """Run a command in this process, one of several or the only one, and keep what it prints."""
    torch.set_num_threads(1)
    kept.LARGE = 0 if large else kept.LARGE
    for stream, kind in enumerate(("answer", "progress"), 1):
        os.dup2(os.open(f"{out}.{os.environ['RANK']}.{kind}", os.O_WRONLY | os.O_CREAT), stream)
    try:
        main(["convert", str(room / "model"), "--calibrate", str(room / "data.npz"), "-o", str(out), *words])
    except SystemExit as end:
        if end.code:
            os._exit(int(end.code))


@pytest.mark.parametrize(
    ("name", "to", "size"),
    rows([*product(("llama", "gpt2", "opt"), ("peri", "post", "none"), (2,)), ("llama", "post", 3)], sample=[]),
)
def test_a_large_folder_becomes_what_one_process_makes_of_it(
    name: str, to: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same weights but for rounding, by one process that writes and prints."""
    folder(name, tmp_path)
    ended(all_of(size, command, tmp_path, tmp_path / "many", "--to", to, large=True))
    monkeypatch.setattr(kept, "LARGE", 0)
    said = ok("convert", tmp_path / "model", "--calibrate", tmp_path / "data.npz", "-o", tmp_path / "one", "--to", to)
    one, many = (weights(tmp_path / way) for way in ("one", "many"))
    assert one.keys() == many.keys()
    for key, value in one.items():
        assert (value - many[key]).abs().max() <= 1e-5 * value.abs().max(), key
    first, *others = ((tmp_path / f"many.{rank}.answer").read_text() for rank in range(size))
    others += [(tmp_path / f"many.{rank}.progress").read_text() for rank in range(1, size)]
    assert first.startswith("pipeline   place") and not any(others)
    assert without_numbers(first) == without_numbers(said.stdout).replace("/one", "/many")


def without_numbers(text: str) -> str:
    return re.sub(r"\d\S*", "", text)


def weights(at: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {key: value for path in sorted(at.glob("*.safetensors")) for key, value in load_file(path).items()}


def program(out: Path, text: str) -> dict[str, Any]:
    """Convert a program in memory, in one of several processes or the only one, and keep its weights."""
    torch.set_num_threads(1)
    data = lnr.demo.calibration(batches=9, batch_size=2, length=32)
    with Processes.joined("cpu") as found, shared(found):
        given = lnr.capture(zoo.short_gpt(), kwargs=data[0])
        result = Pipeline.parse(text).run(given, data)
    held = {name: value.detach() for name, value in result.program.module().named_parameters()}
    torch.save(held, f"{out}.{os.environ['RANK']}.pt")
    return result.report.to_dict()


TEXTS = [
    ("place{to=peri fit=constants}", 2), ("place{to=peri}", 2), ("place{to=none}", 2), ("place{to=peri}", 3),
    ("norm-writers", 2), ("fix-norms", 2),
]  # fmt: skip


@pytest.mark.parametrize(("text", "size"), rows(TEXTS, sample=TEXTS[:1]))
def test_fitted_weights_are_the_same_in_all_processes_and_as_good_as_those_of_one(
    text: str, size: int, tmp_path: Path
) -> None:
    """Branch by branch and together; one batch is held out, so that others than the first hold none.

    The steps of a fit multiply rounding, and its random probes are other ones, so weights and drift are not one's.
    """
    reports = []
    for many in (1, size):
        ended(all_of(many, of_program, text, tmp_path / str(many)))
        reports.append(json.loads((tmp_path / f"{many}.json").read_text()))
    held = [torch.load(tmp_path / f"{size}.{rank}.pt") for rank in range(size)]
    for name, value in held[0].items():
        assert all(torch.equal(value, other[name]) for other in held[1:]), name
    drifts = [report["drift"] for report in reports]
    assert drifts[0]["samples"] == drifts[1]["samples"] == 1
    assert drifts[1]["relative_error"] <= 1.05 * drifts[0]["relative_error"]
    assert len(reports[0]["fitted"]) == len(reports[1]["fitted"])


def of_program(text: str, out: Path) -> dict[str, Any]:
    return program(out, text)


# ---- what each holds ----


@pytest.mark.parametrize("count", [4, 9, 17, 64])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_every_batch_is_one_process_s(count: int, size: int) -> None:
    def of(rank: int) -> tuple[list[int], list[int]]:
        with shared(share(rank, size)):
            feed = Feed(Unfixed(), [(k,) for k in range(count)], 0, None)
            return [b[0] for b in feed.fit], [b[0] for b in feed.held]

    if size > count - max(1, count // 8):
        with pytest.raises(LnrewriteError, match="fewer than the processes"):
            of(0)
        return
    parts = [of(rank) for rank in range(size)]
    with shared(Shares()):
        whole = Feed(Unfixed(), [(k,) for k in range(count)], 0, None)
    assert sorted(k for fit, _ in parts for k in fit) == [b[0] for b in whole.fit]
    assert sorted(k for _, held in parts for k in held) == [b[0] for b in whole.held]
    assert {len(fit) for fit, _ in parts} <= {len(whole.fit) // size, -(-len(whole.fit) // size)}


class Unfixed:
    """Stand for a program without paths that its data choose."""

    fixed_paths = ()

    def placed(self, batch: object) -> object:
        return batch


def share(rank: int, size: int) -> Shares:
    found = Shares()
    found.rank, found.size = rank, size
    return found


# ---- what cannot be shared ----


@dataclass(frozen=True)
class Median(Pass):
    """Look at all of the data at once."""

    name: ClassVar[str] = "median"
    exactness: ClassVar[Exactness] = Exactness.CALIBRATED
    needs_data: ClassVar[bool] = True

    def plan(self, stream: Any, context: Any) -> Proposal:
        return Proposal(otherwise="nothing")


@pytest.mark.parametrize("case", ["looks at all", "stock architecture", "ONNX file"])
def test_what_one_process_has_to_do_is_refused_before_work(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    source = identify("demo:tinygpt", OpenOptions(None, False, False, None, "cpu", 0))
    source = replace(source, format=Format.ONNX) if case == "ONNX file" else source
    pipeline = Pipeline((Median(),)) if case == "looks at all" else Pipeline.parse("place{to=peri}")
    host = "auto" if case == "stock architecture" else None
    with pytest.raises(UsageError, match=case) as told, joined(source, pipeline, host):
        raise AssertionError("it began")
    assert told.value.code == Code.LN040


def test_paths_that_data_choose_are_not_shared() -> None:
    program = Unfixed()
    program.fixed_paths = ("x",)
    with shared(share(0, 2)), pytest.raises(LnrewriteError, match="LN040.*path"):
        assert Feed(program, [(k,) for k in range(9)], 0, None).fit


def failing(room: Path, out: Path, name: str) -> None:
    """Convert a folder, of whose data the second process finds no file."""
    command(room if os.environ["RANK"] == "0" else room / "gone", out, "--to", "peri", large=name == "large")


@pytest.mark.parametrize("name", rows(["large", "small"], sample=[]))
def test_an_error_of_one_process_ends_all(name: str, tmp_path: Path) -> None:
    folder("llama", tmp_path)
    folder("llama", tmp_path / "gone")
    (tmp_path / "gone" / "data.npz").unlink()
    for process in (both := all_of(2, failing, tmp_path, tmp_path / "out", name)):
        process.join(100)
    assert both[1].exitcode == 1 and both[0].exitcode == 1
    said = [(tmp_path / f"out.{rank}.progress").read_text() for rank in (0, 1)]
    assert said[1].startswith("process 1: error: LN022 ") and len(said[1].splitlines()) == 1
    assert said[0].startswith("error: LN") and "another process" in said[0] and len(said[0].splitlines()) == 1
    assert not (tmp_path / "out").exists()
