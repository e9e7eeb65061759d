"""What healing chooses by itself, and how sure its figures are."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

import lnrewrite as lnr
import zoo
from commands import started
from lnrewrite import demo
from lnrewrite.healing import budget, rates
from lnrewrite.healing.budget import divided
from lnrewrite.healing.config import HealingConfig
from lnrewrite.healing.distributed import World, local
from lnrewrite.healing.losses import Measured, Mix, Objective, losses_of
from lnrewrite.healing.participant import Participant
from lnrewrite.healing.rates import FACTOR, GAIN_RATE, NUDGE, SHARE, cautious, nudged, usual, usual_of_gains
from lnrewrite.healing.snapshots import Snapshots
from lnrewrite.healing.sources import TARGETS
from lnrewrite.healing.view import View
from lnrewrite.models.program import Program
from tiers import rows

SMALL = {"batch_size": 4, "length": 32, "steps": 4}


@pytest.fixture(scope="module")
def pair() -> tuple[Program, Program]:
    """Return two layers of demo:tinygpt and what calibration makes of them as peri."""
    data = demo.calibration(batches=4)
    teacher = lnr.capture(zoo.short_gpt(), kwargs=data[0])
    return teacher, lnr.Pipeline.parse("place{to=peri fit=constants}").run(teacher, data).program


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "t.txt"
    path.write_bytes(demo.training_text()[:40_000])
    return str(path)


# ---- gaps and their errors ----


@pytest.mark.parametrize("seed", range(3))
def test_the_error_of_a_gap_is_over_windows_and_not_over_targets(seed: int) -> None:
    """Targets of a window go together: the gaps of many draws spread as the error of each says."""
    draw = np.random.default_rng(seed)
    windows = np.repeat(np.arange(30), draw.integers(5, 20, size=30))
    gaps, errors = [], []
    for _ in range(400):
        shared = draw.normal(0, 1, 30)[windows]  # as one window, so its targets
        ours = Measured(3 + shared + draw.normal(0, 0.1, len(windows)), windows)
        gap, error = ours.minus(Measured(np.full(len(windows), 2.5), windows))
        gaps.append(gap)
        errors.append(error or 0.0)
    assert np.mean(gaps) == pytest.approx(0.5, abs=0.05)
    assert np.mean(errors) == pytest.approx(np.std(gaps), rel=0.15)
    assert np.std(gaps) > 3 * 1 / np.sqrt(len(windows))  # what counting targets would give


def test_one_window_has_no_error() -> None:
    one = Measured(np.arange(4.0), np.zeros(4, dtype=np.int64))
    assert one.minus(one) == (0.0, None)


def test_targets_are_counted_to_their_windows(pair: Any) -> None:
    """Ignored targets leave a window with fewer; one without any is not there."""
    ids = torch.randint(256, (5, 16), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(torch.arange(16) < torch.tensor([[4], [16], [0], [15], [8]]), -100)
    batches = [{"input_ids": ids[i : i + 2], TARGETS: labels[i : i + 2]} for i in (0, 2, 4)]
    one = Participant.of(pair[0], World(0, 1, torch.device("cpu")))
    [found], _ = losses_of([one], Objective("", {}, True), batches, one)
    assert np.bincount(found.windows).tolist() == [12, 0, 16, 1, 8]
    [alone], _ = losses_of([one], Objective("", {}, True), [{"input_ids": ids[4:], TARGETS: labels[4:]}], one)
    assert np.allclose(found.values[-8:], alone.values, atol=1e-5)


@pytest.mark.parametrize("ids", ["input_ids", ""], ids=["task", "no task"])
def test_sides_have_the_losses_that_each_has_alone(ids: str, pair: Any) -> None:
    """The teacher's stand first where it is a side, and what drifts is the last."""
    rows = torch.randint(256, (5, 16), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": each} for each in rows.split(2)]
    world, objective = World(0, 1, torch.device("cpu")), Objective(ids, {}, True)
    teacher, student = sides = [Participant.of(program, world) for program in pair]
    both, drift = losses_of(sides, objective, batches, teacher, drifts=True)
    for found, side in zip(both, sides, strict=True):
        [alone], _ = losses_of([side], objective, batches, teacher)
        assert np.array_equal(found.values, alone.values) and np.array_equal(found.windows, alone.windows)
    assert not np.array_equal(both[0].values, both[1].values)
    assert drift is not None and drift == losses_of([student], objective, batches, teacher, drifts=True)[1]
    assert drift.relative_error > 1e-4


def test_the_report_tells_both_gaps_with_their_errors(pair: Any, text: str) -> None:
    report = lnr.heal(*pair, text, **SMALL).report
    told = report.to_dict()
    losses = {name: row["mean"] for name, row in told["losses"].items()}
    assert told["gap"] == losses["healed"] - losses["control"]
    assert told["gap_to_teacher"] == losses["healed"] - losses["teacher"]
    assert 0 < told["gap_standard_error"] < 0.1 and 0 < told["gap_to_teacher_standard_error"] < 0.1
    text = str(report)
    assert f"{told['gap']:+.4f} ± {told['gap_standard_error']:.4f}" in text and "the teacher as it was" in text
    assert json.dumps(told, allow_nan=False)


# ---- rates ----


CURVES = {
    "good": (lambda x: (x - 0.3) ** 2, 0),
    "too low": (lambda x: (x - 1.2) ** 2, 0),
    "little better below": (lambda x: 0.04 * x, 0),
    "much better below": (lambda x: (x + 2) ** 2, -2),
    "diverges": (lambda x: math.inf if x > -1.5 else 0.0, -2),
    "endless": (lambda x: x, -3),  # as far as it looks
    "nowhere": (lambda x: math.inf, -3),
}


@pytest.mark.parametrize("name", CURVES)
def test_a_rate_is_halved_where_that_is_worth_it(name: str) -> None:
    curve, best = CURVES[name]
    looked: list[float] = []

    def loss_at(rate: float) -> float:
        looked.append(rate)
        return curve(math.log(rate / 1e-3) / math.log(FACTOR))

    found = math.log(cautious(loss_at, 1e-3, 0.05) / 1e-3) / math.log(FACTOR)
    assert len(looked) == len(set(looked)) <= 4
    assert found == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize("gains", [False, True])
def test_a_nudge_moves_every_matrix_or_gain_and_is_taken_back(pair: Any, gains: bool) -> None:
    view = View(pair[0].apply([], "test")[0])
    before = {n: p.detach().clone() for n, p in view.named_parameters()}
    with nudged(view, 3, gains):
        for name, p in view.named_parameters():
            moved = (p.detach() - before[name]).abs()
            assert torch.allclose(moved, torch.full_like(p, NUDGE * ((p.dim() < 2) == gains)), atol=1e-6), name
        ups = [(p > before[n]).flatten() for n, p in view.named_parameters() if (p.dim() < 2) == gains]
    assert all(0.4 < up.double().mean() < 0.6 for up in ups)
    least = min(map(len, ups))
    assert len({tuple(up[:least].tolist()) for up in ups}) == len(ups)  # each its own draw
    assert all(torch.equal(p, before[n]) for n, p in view.named_parameters())


@pytest.mark.parametrize("gains", [False, True])
def test_a_nudge_of_a_shard_is_the_shard_of_the_nudge(pair: Any, gains: bool) -> None:
    """So that the rate that follows from it is the same on one process and on many."""
    program = pair[0]
    whole = Participant.of(program, World(0, 1, torch.device("cpu"))).view
    before = {n: p.detach().clone() for n, p in whole.named_parameters()}
    with nudged(whole, 3, gains):
        moved = {n: p.detach() - before[n] for n, p in whole.named_parameters()}
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        world = World(1, 2, torch.device("cpu"))
        one = Participant.bare(program, world)
        view = one.view
        with torch.no_grad():
            for name, p in one.named.items():
                local(p).copy_(program.rows(name, world.piece(len(p))))
        held = {n: (local(p).detach(), local(p).detach().clone()) for n, p in view.named_parameters()}
        with nudged(view, 3, gains):
            for name, (now, was) in held.items():
                assert torch.allclose(now - was, moved[name].chunk(2)[1], atol=1e-9), name
        assert all(torch.equal(now, was) for now, was in held.values())
    finally:
        torch.distributed.destroy_process_group()


def test_gains_that_are_stiff_learn_slowly(pair: Any, text: str) -> None:
    """The same function, its gains and biases a thousandth of what they were, their readers' weights as much more."""
    teacher, student = pair
    small, change = 1e-3, 1e3
    gains, readers = dict[str, float](), dict[str, float]()
    for _, site in (each for stream in student.network.streams for each in stream.sites()):
        if site.readers and site.norm.gamma and site.norm.beta and not any(r.shared for r in site.readers):
            gains |= {site.norm.gamma: small, site.norm.beta: small}
            readers |= {r.param: change for r in site.readers}
    assert len(gains) >= 4
    stiff = student.remade(lambda name, t: t * (gains | readers).get(name, 1.0))
    rates = [
        (found := lnr.heal(teacher, each, text, **SMALL, control=False).report.recipe)["lr"] * found["gain_lr"]
        for each in (student, stiff)
    ]
    assert 0 < rates[1] < 0.1 * rates[0]


def test_a_student_that_is_near_is_left_there() -> None:
    """Without targets new data ask for nothing that a teacher does not say: a healing has the gap to close, or none."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(16) for _ in range(3))
            self.maps = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for norm, linear in zip(self.norms, self.maps, strict=True):
                x = x + linear(norm(x).relu())
            return x

    torch.manual_seed(0)
    data = [{"x": torch.randn(4, 10, 16)} for _ in range(40)]
    teacher = lnr.capture(Net(), kwargs=data[0])
    near = teacher.remade(lambda _, t: t * (1 + 1e-4 * torch.randn_like(t)))
    losses = lnr.heal(teacher, near, data, steps=100).report.losses
    assert losses["healed"]["mean"] < 1.5 * losses["converted"]["mean"]


def test_the_usual_rate_grows_with_the_gap_and_falls_with_the_stiffness() -> None:
    assert usual(0.1, 0.02) > 2 * usual(0.02, 0.02) > 4 * usual(0.002, 0.02) > 0
    assert usual(0.1, 0.02) == pytest.approx(2 * usual(0.1, 0.08))
    # twice the harm that a nudge does is done by a step that is the root of two times as large
    assert usual(2.0, 1.0) == pytest.approx(SHARE * NUDGE * math.sqrt(2))
    assert usual_of_gains(2.0, 1.0) == pytest.approx(NUDGE * math.sqrt(2))
    assert usual_of_gains(2.0, 0.0) == GAIN_RATE  # a network without gains, too


def test_the_teacher_leads_where_the_way_is_far_and_the_steps_are_few() -> None:
    far, near, long = Mix.usual(0.3, 500), Mix.usual(0.01, 500), Mix.usual(0.3, 5000)
    assert far.hidden == 25 and far.kl == 1 and near.hidden < 3 and long.hidden < 6
    assert far.task == near.task == long.task and Mix.usual(0.0, 10).hidden == 1
    assert Mix.usual(0.01, 500, taught=True).task == 0  # the teacher's outputs hold what the targets say


def test_what_is_asked_for_is_what_is_used(pair: Any, text: str) -> None:
    """Rates and losses that are given stay; those that are not follow from the gap, also where tapers start at 0."""
    given = {"losses": "task=1,kl=2", "lr": 3e-4, "gain_lr": 5.0, "control_lr": 1e-5, "rehearse": 0.0}
    recipe = lnr.heal(*pair, text, **SMALL, **given).report.recipe
    assert recipe["losses"] == {"task": 1.0, "kl": 2.0, "hidden": 0.0, "spread": 0.0}
    assert {key: recipe[key] for key in given if key != "losses"} == {k: v for k, v in given.items() if k != "losses"}
    plain, tapered = (lnr.heal(*pair, text, **SMALL, control=False, progressive=p).report.recipe for p in (False, True))
    assert plain["losses"]["hidden"] > 5 and plain["lr"] == pytest.approx(tapered["lr"], rel=1e-3)
    assert plain["losses"]["hidden"] == pytest.approx(tapered["losses"]["hidden"], rel=1e-3)


@pytest.fixture
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run of few steps have trials."""
    monkeypatch.setattr(budget, "SHORTEST", 2)


TRIED: dict[str, Any] = {"tokens": 50 * 4 * 32, "batch_size": 4, "length": 32, "save_steps": 3}


def test_the_budget_holds_the_trials_and_the_report_tells_them(
    pair: Any, text: str, tmp_path: Path, short_trials: None
) -> None:
    before = [p.detach().clone() for program in pair for p in program.module().parameters()]
    report = lnr.heal(*pair, text, **TRIED, run=tmp_path / "run").report
    student, control = report.rates["student"], report.rates["control"]
    assert student["trials"] in (2, 3, 4) and student["tokens"] == student["trials"] * 2 * 4 * 32
    assert report.recipe["steps"] == 50 - 2 * student["trials"] and report.tokens == TRIED["tokens"]
    assert (report.recipe["lr"], report.recipe["control_lr"]) == (student["lr"], control["lr"])
    assert control["gain_lr"] == 1
    logged = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert len([row for row in logged if row["phase"] == "global"]) == report.recipe["steps"]
    assert len([row for row in logged if row["phase"] == "control"]) == 50 - 2 * control["trials"]
    kept = [row for row in logged if row["phase"] == "global rates"]
    assert [row["step"] for row in kept] == [*range(1, student["trials"] + 1), 0]
    assert f"from {student['trials']} trials" in str(report)
    assert "rates" not in (tmp_path / "run" / "loss.html").read_text()
    after = [p for program in pair for p in program.module().parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("diverges", [False, True])
def test_trials_leave_the_run_as_if_the_rate_had_been_given(
    diverges: bool, pair: Any, text: str, monkeypatch: pytest.MonkeyPatch, short_trials: None
) -> None:
    """Also one whose loss was not finite, and that ended with gradients."""
    if diverges:
        monkeypatch.setattr(rates, "cautious", lambda loss_at, start, _: start if math.isinf(loss_at(1e15)) else 0.0)
    found = lnr.heal(*pair, text, **TRIED, control=False)
    given = {key: found.report.recipe[key] for key in ("steps", "lr", "gain_lr")}
    again = lnr.heal(*pair, text, **TRIED | given | {"tokens": None}, control=False)
    assert again.report.rates["student"]["trials"] == 0 < found.report.rates["student"]["trials"]
    ours, theirs = (dict(each.program.module().named_parameters()) for each in (found, again))
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


AT = [(f"{phase} rates", step) for phase in ("global", "control") for step in (1, 2, 0)] + [("global", 4)]


@pytest.mark.parametrize(("phase", "step"), rows(AT, sample=[("global rates", 2), ("control rates", 0)]))
def test_a_run_that_is_killed_in_its_trials_goes_on(
    phase: str, step: int, pair: Any, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_trials: None
) -> None:
    whole = lnr.heal(*pair, text, **TRIED)
    log, seen = Snapshots.log, list[tuple[str, int]]()

    def end(self: Snapshots, row: Any) -> None:
        if (row["phase"], row["step"]) == (phase, step):
            raise KeyboardInterrupt
        log(self, row)

    def noted(self: Snapshots, row: Any) -> None:
        seen.append((row["phase"], row["step"]))
        log(self, row)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Snapshots, "log", end)
        lnr.heal(*pair, text, **TRIED, run=tmp_path / "run")
    monkeypatch.setattr(Snapshots, "log", noted)
    again = lnr.heal(*pair, text, **TRIED, run=tmp_path / "run", resume=True)
    assert again.report.losses == whole.report.losses and again.report.rates == whole.report.rates
    assert again.report.tokens == whole.report.tokens
    assert len(seen) == len(set(seen)) and seen[0] == (phase, step)


@pytest.mark.exhaustive
def test_two_processes_choose_the_rates_of_one(pair: Any, text: str, tmp_path: Path) -> None:
    pair[1].save(tmp_path / "peri.pt2")
    alone = lnr.heal(*pair, text, **SMALL).report
    both = [started(chosen, rank, text, tmp_path) for rank in range(2)]
    for process in both:
        process.join(300)
    assert [process.exitcode for process in both] == [0, 0]
    report = json.loads((tmp_path / "report.json").read_text())
    for name in ("lr", "gain_lr", "control_lr"):
        assert report["recipe"][name] == pytest.approx(alone.recipe[name], rel=1e-4), name


def chosen(rank: int, text: str, folder: Path) -> None:
    """Run in each of two processes: heal with no rate given, and let the first write the report."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(28700 + os.getppid() % 400), "WORLD_SIZE": "2"}
    os.environ.update(place, RANK=str(rank), LOCAL_RANK="0")
    found = lnr.heal(lnr.load("zoo:short_gpt"), lnr.load(str(folder / "peri.pt2")), text, **SMALL, run=folder / "run")
    if rank == 0:
        (folder / "report.json").write_text(json.dumps(found.report.to_dict()))


# ---- budgets ----


def test_two_of_tokens_steps_and_rows_make_the_third(pair: Any, text: str) -> None:
    rows = {"tokens": 8 * 4 * 32, "steps": 8}, {"tokens": 8 * 4 * 32, "batch_size": 4}, {"steps": 8, "batch_size": 4}
    for how in rows:
        report = lnr.heal(*pair, text, **how, length=32, control=False).report
        assert (report.recipe["steps"], report.recipe["batch_size"], report.tokens) == (8, 4, 8 * 4 * 32)
    report = lnr.heal(*pair, text, **rows[2], length=32, local_steps=2, control=False).report
    assert (report.recipe["steps"], report.tokens) == (8, 10 * 4 * 32)  # what was asked for is all of the global phase
    with pytest.raises(lnr.UsageError, match="LN003 tokens"):
        HealingConfig(tokens=100, steps=1, batch_size=2)


@pytest.mark.parametrize("sizes", [[32] * 8, [8] * 8, [40], [7], [5, 5], [100, 3], [1] * 40])
@pytest.mark.parametrize("free", [True, False])
def test_rows_to_choose_rates_on_are_a_quarter_and_never_reported(sizes: list[int], free: bool) -> None:
    every = torch.arange(sum(sizes))
    batches = [{"x": part} for part in every.split(sizes)]
    chosen, rest = divided(batches, free)
    assert torch.equal(torch.cat([b["x"] for b in [*chosen, *rest]]), every)
    count = sum(len(b["x"]) for b in chosen)
    wanted = min(64, sum(sizes) // 4)
    assert count <= wanted and all(len(b["x"]) for b in [*chosen, *rest])
    if wanted < 8:
        assert not chosen
    elif free:
        assert count == wanted
    else:
        assert {len(b["x"]) for b in [*chosen, *rest]} <= set(sizes)


@pytest.mark.parametrize(
    ("count", "length", "rows"),
    [(1000, 16, 16), (1000, 60, 4), (1000, 100, 3), (1000, 128, 2), (200, 16, 12), (20, 16, 2)],
)
def test_a_step_has_more_rows_of_short_ones(pair: Any, tmp_path: Path, count: int, length: int, rows: int) -> None:
    """A step of two rows of 16 tokens is all noise; but of few rows there are still some steps before all were seen."""
    ids = torch.randint(256, (count, length), generator=torch.Generator().manual_seed(0))
    torch.save({pair[0].spec.names[0]: ids}, tmp_path / "rows.pt")
    how = {"tokens": 4 * rows * length, "control": False}
    report = lnr.heal(*pair, str(tmp_path / "rows.pt"), **how).report
    assert (report.recipe["batch_size"], report.recipe["steps"]) == (rows, 4)
    asked = lnr.heal(*pair, str(tmp_path / "rows.pt"), tokens=3 * length, batch_size=3, control=False).report
    assert (asked.recipe["batch_size"], asked.recipe["steps"]) == (3, 1)
