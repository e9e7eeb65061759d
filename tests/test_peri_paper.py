"""examples/peri_paper.py: its measures are as worked out by hand, its claims tell yes from no, it goes on."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import lnrewrite as lnr
from lnrewrite import demo

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
sys.path.append(str(EXAMPLES))  # its files import one another, as they do when one of them is run

import peri_claims  # noqa: E402
import peri_figures  # noqa: E402
import peri_paper  # noqa: E402
from peri_claims import ARMS, Runs, exponential, failed, halves, massive, spread, straightness  # noqa: E402

DEPTH = 8


# ---- measures ----


class Adds(nn.Module):
    """Add a vector to every state."""

    def __init__(self, vector: Tensor) -> None:
        super().__init__()
        self.vector = vector

    def forward(self, x: Tensor) -> Tensor:
        return x + self.vector


class Scales(nn.Module):
    """Multiply every state by a number, as a matrix."""

    def __init__(self, factor: float, width: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(factor * torch.eye(width))
        self.gain = nn.Parameter(torch.ones(width))  # which no placement shares: not of the matrices

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * (x @ self.matrix)


def hadamard() -> Tensor:
    """Return rows of 1 and -1 that are orthogonal to one another and, but for the first, have mean 0: [16, 16]."""
    rows = torch.ones(1, 1)
    for _ in range(4):
        rows = torch.cat([torch.cat([rows, rows], 1), torch.cat([rows, -rows], 1)])
    return rows


def through(layers: nn.ModuleList, x: Tensor) -> list[Tensor]:
    with peri_paper.states(layers) as found:
        for layer in layers:
            x = layer(x)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
    return found


def test_variance_grows_by_one_where_each_layer_adds_its_own_direction() -> None:
    rows = hadamard()
    layers = nn.ModuleList(Adds(rows[i + 2]) for i in range(DEPTH))
    found = peri_paper.variances(through(layers, rows[1].expand(2, 3, 16)))
    assert found == pytest.approx([1.0 + i for i in range(DEPTH + 1)], rel=1e-6)
    assert halves(found) == pytest.approx(1) and straightness(found) == pytest.approx(1)
    assert exponential(found) < 0


def test_variance_is_a_power_where_each_layer_doubles_the_state() -> None:
    layers = nn.ModuleList(Scales(2.0, 16) for _ in range(DEPTH))
    found = peri_paper.variances(through(layers, hadamard()[1:].unsqueeze(0)))
    assert found == pytest.approx([4.0**i for i in range(DEPTH + 1)], rel=1e-6)
    assert halves(found) == pytest.approx(4.0 ** (DEPTH / 2)) and exponential(found) > 0.3
    assert spread(found) == pytest.approx(4.0**DEPTH)


def test_identity_layers_change_nothing() -> None:
    x = torch.randn(2, 5, 16)
    found = peri_paper.variances(through(nn.ModuleList(nn.Identity() for _ in range(DEPTH)), x))
    wanted = x.double().var(-1, unbiased=False).mean().item()
    assert found == pytest.approx([wanted] * (DEPTH + 1))
    assert spread(found) == 1 and math.isnan(halves(found))


@pytest.mark.parametrize("factors", [[2.0] * DEPTH, [0.5, 4.0, 1.0, 2.0]])
def test_gradients_are_the_product_of_the_other_layers(factors: list[float]) -> None:
    """Of half the squared length of W_L .. W_1 x, the gradient of W_l is the outer square of x times P**2 / c_l."""
    x = torch.randn(1, 1, 16, dtype=torch.float64)
    layers = nn.ModuleList(Scales(f, 16) for f in factors).double()
    through(layers, x)
    y = x
    for layer in layers:
        y = layer(y)
    (y.square().sum() / 2).backward()
    wanted = [math.prod(factors) ** 2 / f * x.square().sum().item() for f in factors]
    assert peri_paper.gradients(layers) == pytest.approx(wanted)


def test_the_model_of_a_placement_is_of_that_placement() -> None:
    seen = {}
    for placement in peri_paper.PLACEMENTS:
        torch.manual_seed(0)
        model = peri_paper.Placed(placement, 2, 16)
        network = lnr.capture(model, kwargs=demo.calibration(1, length=peri_paper.CONTEXT)[0]).network
        assert [str(block.placement) for block in network.blocks] == [placement] * 4
        seen[placement] = [p for p in model.parameters() if p.dim() > 1]
    assert all(torch.equal(a, b) for other in seen.values() for a, b in zip(seen["pre"], other, strict=True))


def test_fresh_states_are_what_the_norms_make_them() -> None:
    """Behind a Post-LN layer the mean square is 1; a Peri-LN layer adds branches of mean square 1."""
    torch.manual_seed(0)
    ids = peri_paper.watched()
    post, peri = (peri_paper.picture(peri_paper.Placed(p), ids) for p in ("post", "peri"))
    assert post["variance"] == pytest.approx([1.0] * 9, abs=0.06)  # less the square of the mean
    assert halves(peri["variance"]) == pytest.approx(1, abs=0.3) and peri["variance"][-1] == pytest.approx(17, rel=0.25)


# ---- claims ----


def row(arm: str, part: str, rate: float, seed: int, **how: Any) -> dict[str, Any]:
    """Return what a run of a world would be in which all that is claimed is so."""
    kind = {"peri from pre": "peri"}.get(arm, arm)
    depth = range(DEPTH + 1)
    variance = {"post": [1.0] * 9, "pre": [4.0**i for i in depth]}.get(kind, [1.0 + i for i in depth])
    gradient = {"post": [2.0**i for i in range(8)], "pre": [2.0**-i for i in range(8)]}.get(kind, [1.0] * 8)
    big = {"post": 4.0, "pre": 2000.0}.get(kind, 20.0) + seed
    end = {"variance": variance, "gradient": gradient, "largest": [big] * 9, "median": [1.0] * 9}
    loss = {"post": 2.2, "pre": 2.1, "peri": 2.0, "output": 2.05, "peri from pre": 1.9}[arm] + rate
    loss = 9.0 if rate > {"post": 1e-3, "pre": 1e-2}.get(kind, 1.0) else loss
    made = {"arm": arm, "part": part, "lr": rate, "seed": seed, "curve": [3.0, loss], "start": end, "end": end}
    return made | {"loss": loss, "choosing": loss} | how


def world() -> list[dict[str, Any]]:
    rates = (1e-3, 1e-2, 1e-1)
    halves = [row("pre", "first", 3e-3, s, converted={"loss": 2.2}) for s in range(2)]
    return [row(arm, part, rate, s) for arm, part in ARMS for rate in rates for s in range(2)] + halves


def test_where_all_is_as_claimed_all_answers_are_yes() -> None:
    runs = Runs(world(), 3.0)
    found = peri_claims.claims(runs)
    assert [c.text for c in found if c.answer != "yes"] == []
    assert all(c.holding == 2 for c in found) and runs.best(("pre", "whole")) == 1e-3
    assert runs.edge(("post", "whole")) == [1, 1] and runs.edge(("peri", "whole")) == [3, 3]
    text = peri_claims.tables(runs)
    assert text.count("| yes |") == len(found) and "9.000 (9.000, 9.000), 2 fail" in text


ALONE = {
    "post": {"post is flat behind the layers", "post falls toward the input"},
    "pre": {"pre grows faster than linearly", "pre grows exponentially", "pre rises toward the input"}
    | {"pre has massive ones"},
    "peri": {"peri grows about linearly", "peri is even", "variance grows about linearly"},
}
"""What is so where every model is as those of one placement."""


@pytest.mark.parametrize("kind", ALONE)
def test_where_all_placements_are_alike_none_is_ahead(kind: str) -> None:
    rows = [r | {k: v for k, v in row(kind, *_keys(r)[1:]).items() if k != "arm"} for r in world()]
    found = {c.text for c in peri_claims.claims(Runs(rows, 3.0)) if c.answer == "yes"}
    assert found == ALONE[kind] | {"fails no earlier than peri throughout"}


def _keys(r: dict[str, Any]) -> tuple[str, str, float, int]:
    return r["arm"], r["part"], r["lr"], r["seed"]


def test_one_seed_that_differs_makes_a_no() -> None:
    rows = world()
    for r in rows:
        if (r["arm"], r["part"], r["seed"]) == ("peri", "whole", 1):
            r["loss"] = 2.5
    (claim,) = (c for c in peri_claims.claims(Runs(rows, 3.0)) if c.text == "peri is better than pre")
    assert (claim.holding, claim.answer) == (1, "no")


def test_the_page_answers_what_is_asked() -> None:
    lines = (ROOT / "docs" / "results" / "peri_paper.md").read_text().splitlines()
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if re.search(r"\d of \d+ \|", line)
    ]
    assert [(c[0], c[1]) for c in cells] == [(c.about, c.text) for c in peri_claims.claims(Runs(world(), 3.0))]
    for *_, holding, answer in cells:
        assert answer == ("yes" if len(set(holding.split(" of "))) == 1 else "no")


@pytest.mark.parametrize(
    ("curve", "loss", "fails"),
    [
        ([3.0, 2.0], 2.0, False),
        ([3.0, 2.0, 2.2], 2.2, False),
        ([3.0, 2.0, 2.3], 2.3, True),
        ([3.0, 2.9], 2.9, True),
        ([3.0, math.nan], 2.0, True),
        ([3.0, 2.0], math.inf, True),
    ],
)
def test_what_failing_is(curve: list[float], loss: float, fails: bool) -> None:
    assert failed({"curve": curve, "loss": loss}, 3.0) is fails


def test_a_massive_activation_is_above_100_and_1000_times_the_median() -> None:
    sizes = {"largest": [50.0, 500.0, 90.0], "median": [0.01, 0.2, 0.001]}
    assert massive({"end": sizes}) == 2500


# ---- the script ----


def test_quick_runs_goes_on_where_it_stopped_and_draws(tmp_path: Path) -> None:
    def run() -> tuple[list[dict[str, Any]], str]:
        done = CliRunner().invoke(peri_paper.main, ["--out", str(tmp_path), "--quick", "--processes", "0"])
        assert done.exit_code == 0, done.output
        return [json.loads(line) for line in kept.read_text().splitlines()], done.stderr

    kept = tmp_path / "runs.jsonl"
    rows, told = run()
    assert len(rows) == 16 and told.count(" nats per byte") == 16
    assert all(math.isfinite(r["loss"]) and len(r["end"]["variance"]) == 4 for r in rows)
    lines = kept.read_text().splitlines(keepends=True)
    kept.write_text("".join(lines[:-2]) + lines[-2][:100])  # as a kill leaves it
    again, told = run()
    assert told.count(" nats per byte") == 2
    assert again[:14] == rows[:14] and all(a["loss"] == r["loss"] for a, r in zip(again, rows, strict=True))
    assert "| answer |" in (tmp_path / "table.md").read_text()
    for name in ("variance", "gradient", "rates"):
        text = (tmp_path / f"{name}.svg").read_text()
        said = {e.text for e in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}text")}
        assert {peri_claims.label(arm) for arm in ARMS} <= said
        assert "currentColor" in text and peri_figures.INK not in text and "#000000" not in text


@pytest.mark.exhaustive
def test_a_killed_run_leaves_no_process_and_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "peri_paper.py", "--out", tmp_path, "--quick"]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while " first " not in process.stderr.readline():
        pass
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    for _ in range(600):  # a minute for those that it started
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.1)
    else:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail("a process is left")
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 16
