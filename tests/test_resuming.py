"""Healing runs that are killed in any phase: what is resumed ends with the same weights, bit for bit."""

from __future__ import annotations

import json
import multiprocessing.connection
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lnrewrite as lnr
import zoo
from commands import as_process, started
from lnrewrite import demo
from lnrewrite.healing import budget, snapshots, training
from lnrewrite.healing.session import Healed
from lnrewrite.healing.snapshots import Snapshots
from lnrewrite.models.program import Program
from tiers import rows

STEPS = {"local": 4, "global": 5, "control": 5}
HOW: dict[str, Any] = {"batch_size": 2, "length": 16, "steps": STEPS["global"], "save_steps": 2, "warmup": 0}


@pytest.fixture(scope="module")
def pair() -> tuple[Program, Program]:
    """Return two layers of demo:tinygpt and what calibration makes of them as none."""
    data = demo.calibration(batches=2)
    teacher = lnr.capture(zoo.short_gpt(), kwargs=data[0])
    return teacher, lnr.Pipeline.parse("place{to=none fit=constants}").run(teacher, data).program


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "t.txt"
    path.write_bytes(demo.training_text()[:8_000])
    return str(path)


class Killed(BaseException):
    """Represent the end of a process: nothing below catches it."""


def killed_at(monkeypatch: pytest.MonkeyPatch, phase: str, step: int) -> None:
    """Make runs end when they have taken a step, before anything is kept of it."""
    log = Snapshots.log

    def end(self: Snapshots, row: Any) -> None:
        if (row["phase"], row["step"]) == (phase, step):
            raise Killed
        log(self, row)

    monkeypatch.setattr(Snapshots, "log", end)


def same(one: Healed, two: Healed) -> bool:
    pairs = zip(one.program.module().parameters(), two.program.module().parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs) and one.report.losses == two.report.losses


KINDS = {
    "local": {"local_steps": STEPS["local"]},
    "drop_final": {"drop_final": True},
    "progressive": {"progressive": True, "stages": ("mlp", "attention")},
    "hidden": {"losses": "hidden=1", "local_steps": STEPS["local"]},  # the head gets no gradient at all
    "norms": {"train": "norms", "accumulate": 2},
}
AT = [(kind, phase, step) for kind in KINDS for phase in STEPS for step in (1, 3, STEPS[phase])]
SAMPLE = [("local", "local", 3), ("hidden", "global", 1), ("local", "control", 3), ("progressive", "global", 3)]


@pytest.mark.parametrize(("kind", "phase", "step"), rows(AT, sample=SAMPLE))
def test_a_run_goes_on_in_every_phase(
    kind: str, phase: str, step: int, pair: Any, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how: dict[str, Any] = HOW | KINDS[kind]
    if phase == "local" and not how.get("local_steps"):
        pytest.skip("it has no such phase")
    whole = lnr.heal(*pair, text, **how)
    with monkeypatch.context() as patched, pytest.raises(Killed):
        killed_at(patched, phase, step)
        lnr.heal(*pair, text, **how, run=tmp_path / "run")
    assert same(whole, lnr.heal(*pair, text, **how, run=tmp_path / "run", resume=True))


@pytest.mark.parametrize("phase", STEPS)
def test_ctrl_c_in_the_last_step_of_a_phase(
    phase: str, pair: Any, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the run, which goes on with the next phase; behind the last one there is nothing left to stop."""
    how: dict[str, Any] = HOW | KINDS["local"]
    whole, taken = lnr.heal(*pair, text, **how), list[tuple[str, int]]()

    @contextmanager
    def until_stopped() -> Iterator[Callable[[], bool]]:
        yield lambda: taken[-1] == (phase, STEPS[phase])

    def logged(self: Snapshots, row: Any, log: Any = Snapshots.log) -> None:
        taken.append((row["phase"], row["step"]))
        log(self, row)

    with monkeypatch.context() as patched:
        patched.setattr(Snapshots, "log", logged)
        patched.setattr(training, "until_stopped", until_stopped)
        if phase == "global":
            assert same(whole, lnr.heal(*pair, text, **how))
            return
        with pytest.raises(training.Stopped, match=f"{phase} was stopped and saved at step {STEPS[phase]}"):
            lnr.heal(*pair, text, **how, run=tmp_path / "run")
    assert same(whole, lnr.heal(*pair, text, **how, run=tmp_path / "run", resume=True))


def test_a_run_that_was_left_is_told_before_a_model_is_looked_at(
    pair: Any, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patched, pytest.raises(Killed):
        killed_at(patched, "global", 3)
        lnr.heal(*pair, text, **HOW, control=False, run=run)

    class Untouchable(nn.Module):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"the model was looked at: {name}")

    with pytest.raises(lnr.LnrewriteError, match=r"LN605.*did not finish.*--force"):
        lnr.heal(Untouchable.__new__(Untouchable), pair[1], text, **HOW, run=run)
    assert [p.name for p in run.glob("global-*")] == ["global-000002"]
    again = lnr.heal(*pair, text, **HOW | {"steps": 2}, control=False, run=run, restart=True)  # other options, too
    assert again.report.tokens == 2 * 2 * 16 and not list(run.glob("global-*"))


def test_a_line_that_a_stop_cut_takes_no_other_line_with_it(
    pair: Any, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even that of the first step after it: the log still reads when the run has ended."""
    how, run = HOW | {"save_steps": 1}, tmp_path / "run"
    whole = lnr.heal(*pair, text, **how, control=False)
    with monkeypatch.context() as patched, pytest.raises(Killed):
        killed_at(patched, "global", 4)
        lnr.heal(*pair, text, **how, control=False, run=run)
    log = run / "log.jsonl"
    log.write_bytes(log.read_bytes()[:-9])
    assert same(whole, lnr.heal(*pair, text, **how, control=False, run=run, resume=True))
    held = [json.loads(line)["step"] for line in log.read_text().splitlines() if line.endswith("}")]
    assert held == [0, 1, 2, 4, 5]  # of step 3, a part


# ---- kill -9, of one process and of two ----

PHASES = ("local", "global rates", "global", "control rates", "control")
KILLED = [
    (world, phase, moment, step, apart)
    for world in (1, 2)
    for phase in PHASES
    for moment, step in (("logging", 1), ("logging", 2), ("keeping", 2), ("keeping", 4))
    for apart in ((False, True) if "control" in phase else (False,))
    if moment == "logging" or "rates" not in phase  # trials have no checkpoints
]


def healing(
    rank: int,
    world: int,
    folder: Path,
    name: str,
    at: tuple[str, str, int] | None,
    resume: bool,
    apart: bool = False,
) -> None:
    """Run in each of `world` processes: heal, write the weights; process `step % world` ends where `at` says.

    Only the first process puts a checkpoint into its place, at even steps. apart: the control has a folder of its own.
    """
    torch.set_num_threads(1)
    budget.TRIAL, budget.SHORTEST = 2, 2
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(28300 + os.getppid() % 400), "WORLD_SIZE": str(world)}
    os.environ.update(place, RANK=str(rank), LOCAL_RANK="0")
    if at:
        moment, phase, step = at
        log, replace = Snapshots.log, os.replace

        def end() -> None:
            if rank == step % world:
                os.kill(os.getpid(), signal.SIGKILL)

        def logged(self: Snapshots, row: Any) -> None:
            if moment == "logging" and (row["phase"], row["step"]) == (phase, step):
                end()
            log(self, row)

        def replaced(source: Any, target: Any) -> None:
            if moment == "keeping" and Path(target).name == f"{phase}-{step:06d}":
                end()
            replace(source, target)

        Snapshots.log, snapshots.os.replace = logged, replaced  # type: ignore[method-assign, attr-defined]
    how = {"batch_size": 4, "length": 16, "steps": 5, "local_steps": 5, "save_steps": 2, "warmup": 0}
    pair = lnr.load("zoo:short_gpt"), lnr.load(str(folder / "none.pt2"))
    places = {"run": folder / name, "control_run": folder / f"{name}-control" if apart else None}
    found = lnr.heal(*pair, str(folder / "t.txt"), **how, **places, resume=resume)
    if rank == 0:
        weights = {n: p.detach() for n, p in found.program.module().named_parameters()}
        torch.save((weights, found.report.losses), folder / f"{name}.pt")


def processes(world: int, *how: Any) -> list[int]:
    """Run `healing`; when one process is killed the others are, as torchrun does. Return how each ended."""
    every = [started(healing, rank, world, *how) for rank in range(world)]
    left = list(every)
    while left:
        multiprocessing.connection.wait([p.sentinel for p in left])
        if any(p.exitcode for p in left):
            for process in left:
                process.kill()
        for process in [p for p in left if p.exitcode is not None]:
            process.join()
            left.remove(process)
    return [p.exitcode for p in every]


@pytest.fixture(scope="module")
def folder(pair: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that holds a student and a text, long enough for rates to be tried."""
    found = tmp_path_factory.mktemp("killed")
    pair[1].save(str(found / "none.pt2"))
    (found / "t.txt").write_bytes(demo.training_text(20_000))
    return found


@pytest.mark.parametrize(("world", "phase", "moment", "step", "apart"), rows(KILLED, sample=[]))
def test_a_run_that_was_killed_goes_on(
    world: int, phase: str, moment: str, step: int, apart: bool, folder: Path
) -> None:
    """Before a step or a trial is told, and before a checkpoint takes its place: bit for bit as if it ran through."""
    whole = folder / f"whole{world}.pt"
    if not whole.exists():
        assert processes(world, folder, whole.stem, None, False) == [0] * world
    name = f"{phase.replace(' ', '_')}-{moment}-{step}-{world}-{apart}"
    ended = processes(world, folder, name, (moment, phase, step), False, apart)
    assert -signal.SIGKILL in ended and not (folder / f"{name}.pt").exists(), ended
    assert processes(world, folder, name, None, True, apart) == [0] * world
    (theirs, told), (ours, lost) = (torch.load(p, weights_only=True) for p in (whole, folder / f"{name}.pt"))
    assert lost == told and theirs.keys() == ours.keys()
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)


# ---- a command that is killed, and what a run leaves ----

LONG = 40
SMALL = {"batch_size": 4, "length": 32, "steps": 6, "save_steps": 2}


def command(folder: Path, out: Path, *more: str) -> list[str]:
    how = ["--steps", str(LONG), "--batch-size", "4", "--length", "32", "--save-steps", "3"]
    how += ["--no-control", "--force", "-q"]
    return [
        "heal",
        "zoo:short_gpt",
        str(folder / "none.pt2"),
        "--data",
        str(folder / "t.txt"),
        "-o",
        str(out),
        *how,
        *more,
    ]


@pytest.mark.parametrize("kills", rows(["KILL INT", "KILL INT KILL"], sample=[]))
def test_a_killed_run_goes_on_to_the_same_weights(kills: str, folder: Path, tmp_path: Path) -> None:
    """Kills (INT is Ctrl-C) at random steps; the weights are those of a run that was left alone."""
    whole = started(as_process, command(folder, tmp_path / "whole.pt2"), tmp_path / "whole.txt")
    whole.join(300)
    run, more, signals = tmp_path / "cut.pt2.run", list[str](), kills.split()
    at = sorted(random.Random(0).sample(range(4, LONG - 4), len(signals)))
    for step, name in zip(at, signals, strict=True):
        how, said = getattr(signal, f"SIG{name}"), tmp_path / "said.txt"
        process = started(as_process, command(folder, tmp_path / "cut.pt2", *more), said)
        end = time.monotonic() + 300
        while process.is_alive() and _steps(run) < step and time.monotonic() < end:
            time.sleep(0.005)
        os.kill(process.pid, how)
        process.join(60)
        assert process.exitcode == (-signal.SIGKILL if how is signal.SIGKILL else 130), said.read_text()
        assert how is signal.SIGKILL or "--resume" in said.read_text()
        more = ["--resume"]
    rest = started(as_process, command(folder, tmp_path / "cut.pt2", "--resume"), tmp_path / "cut.txt")
    rest.join(300)
    one, two = (torch.export.load(tmp_path / f"{n}.pt2").state_dict for n in ("whole", "cut"))
    assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


def _steps(folder: Path) -> int:
    path = folder / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def test_a_full_disk_keeps_the_checkpoint_before(pair: Any, text: str, tmp_path: Path, monkeypatch: Any) -> None:
    whole = lnr.heal(*pair, text, **SMALL, control=False)
    writes, real = [], snapshots.save

    def full(state: Any, **how: Any) -> Any:
        writes.append(how)
        if len(writes) == 2:
            raise OSError(28, "No space left on device")
        return real(state, **how)

    monkeypatch.setattr(snapshots, "save", full)
    with pytest.raises(lnr.LnrewriteError, match="LN025.*No space left.*--resume"):
        lnr.heal(*pair, text, **SMALL, control=False, run=tmp_path / "run")
    assert [p.name for p in (tmp_path / "run").glob("global-*")] == ["global-000002"]
    found = lnr.heal(*pair, text, **SMALL, control=False, run=tmp_path / "run", resume=True)
    assert same(whole, found)


def test_a_new_run_starts_afresh_and_touches_nothing_of_others(pair: Any, text: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "global-000006").mkdir()  # left by a run that was killed as it ended
    (tmp_path / "log.jsonl").write_text('{"phase": "global", "step": 99, "tokens": 1}\n')
    found = lnr.heal(*pair, text, **SMALL, control=False, run=tmp_path)
    assert found.report.tokens == 6 * 4 * 32
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.jsonl", "loss.html", "mine"]


def test_a_run_folder_is_not_mixed_up(pair: Any, text: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(snapshots, "save", lambda *a, **k: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(lnr.LnrewriteError, match="LN025"):
        lnr.heal(*pair, text, **SMALL, run=tmp_path / "run")
    monkeypatch.undo()
    with pytest.raises(lnr.LnrewriteError, match="LN605.*did not finish"):
        lnr.heal(*pair, text, **SMALL, run=tmp_path / "run")
    with pytest.raises(lnr.LnrewriteError, match=r"LN605.*\(lr, steps\)"):
        lnr.heal(*pair, text, **SMALL | {"steps": 7, "lr": 1e-4}, run=tmp_path / "run", resume=True)
