"""Calibration data as strangers have them: padding of zeros, closed gates, few rows, all alike, tuples."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lnrewrite as lnr
from lnrewrite.algebra.fitting import usual
from lnrewrite.reconstruction.followed import tamed
from lnrewrite.reconstruction.goals import size
from tiers import rows

WIDTH = 16


class Net(nn.Module):
    """Three branches without biases, so that zeros stay zeros, some of them closed by a gate for most tokens."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        draw = random.Random(seed)
        self.inside, self.head = nn.Linear(8, WIDTH, bias=False), nn.Linear(WIDTH, 40)
        norm = draw.choice([nn.LayerNorm, nn.RMSNorm])
        self.norms = nn.ModuleList(norm(WIDTH) for _ in range(4))
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(3))
        self.downs = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))
        self.gated = [draw.random() < 0.3 for _ in range(3)]
        self.head.weight.data *= draw.choice([1, 1, 300])

    def forward(self, x: Tensor) -> Tensor:
        opened, x = x[..., :1] > 0.8, self.inside(x)
        for norm, up, down, gated in zip(self.norms, self.ups, self.downs, self.gated, strict=False):
            added = down(nn.functional.gelu(up(norm(x))))
            x = x + (added * opened if gated else added)
        out: Tensor = self.head(self.norms[3](x))
        return out


def batches(seed: int) -> list[Tensor]:
    """Return batches of one kind of odd data."""
    draw, chosen = torch.Generator().manual_seed(seed), random.Random(seed)
    kind = chosen.choice(["padded", "padded", "mostly padded", "few", "alike", "empty", "plain"])
    many = 1 if kind == "few" else 8
    found = [torch.randn(many, 10, 8, generator=draw) for _ in range(2 if kind == "few" else 6)]
    for batch in found:
        batch[:, {"padded": 9, "mostly padded": 4}.get(kind, 10) :] = 0.0
    if kind == "empty":
        found[0] = found[0][:0]
    return [found[0]] * 6 if kind == "alike" else found


@pytest.mark.parametrize("seed", rows(range(120), sample=range(10)))
def test_odd_data_are_fitted_or_left_to_the_closed_forms(seed: int) -> None:
    given, to = batches(seed), random.Random(seed).choice(["peri", "post", "output", "none"])
    program = lnr.capture(Net(seed).eval(), (torch.randn(4, 10, 8),))
    try:
        closed, fitted = (
            lnr.Pipeline.parse(f"place{{to={to} {how}}}").run(program, [{"x": x} for x in given]).report
            for how in ("fit=constants", "fit=reconstruct")
        )
    except lnr.LnrewriteError as error:
        assert error.code.value == "LN112"  # a gate is closed for all
        return
    assert closed.measured and fitted.measured and closed.edits == fitted.edits > 0
    for report in (closed, fitted):
        json.dumps(report.to_dict(), allow_nan=False)
    assert (fitted.measured.relative_error or 0) <= 1.001 * (closed.measured.relative_error or 0)


@pytest.mark.parametrize("padded", [0, 1, 6])
def test_a_few_tokens_of_nothing_do_not_stop_the_fit(padded: int) -> None:
    draw, program = torch.Generator().manual_seed(1), lnr.capture(Net(1).eval(), (torch.randn(4, 10, 8),))
    given = [torch.randn(16, 10, 8, generator=draw) for _ in range(8)]
    for batch in given:
        batch[:, 10 - padded :] = 0.0
    fitted = lnr.Pipeline.parse("place{to=peri}").run(program, [{"x": x} for x in given]).report.fitted
    assert len(fitted) == 4 and all(row.after < row.before for row in fitted)


@pytest.mark.parametrize("kind", ["torch", "onnx"])
def test_tuples_are_what_their_names_make_of_them(kind: str, tmp_path: Path) -> None:
    program = lnr.capture(Net(3).eval(), (torch.randn(8, 10, 8),))
    if kind == "onnx":
        program.export(tmp_path / "net.onnx", target="generic")
    model = lnr.load(tmp_path / "net.onnx") if kind == "onnx" else program
    given = [torch.randn(8, 10, 8) for _ in range(4)]
    ways = [{"x": x} for x in given], [(x, torch.zeros(8)) for x in given]
    one, two = (lnr.Pipeline.parse("place{to=peri}").run(model, each).report.measured for each in ways)
    assert one == two


def test_tokens_of_no_size_tell_nothing_of_what_is_ordinary() -> None:
    sizes = np.array([0.0] * 7 + [1.0, 1.1, 0.9, 50.0])
    assert usual(sizes[:, None]).tolist() == [1] * 10 + [0]
    assert size(torch.from_numpy(sizes[:, None]))[[0, 8], 0].tolist() == pytest.approx([0.105, 1.1], rel=0.1)
    errors = torch.tensor([0.0] * 7 + [1.0, 1.0, 1.0], requires_grad=True)
    tamed(errors).backward()  # type: ignore[no-untyped-call]
    assert errors.grad is not None and bool(errors.grad.isfinite().all()) and bool((errors.grad > 0).all())


class Two(nn.Module):
    """Two streams, whose branches are computed one after the other or both before any sum."""

    def __init__(self, together: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.together, self.norms = together, nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(6))
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def branch(self, at: int, x: Tensor) -> Tensor:
        found: Tensor = nn.functional.gelu(self.maps[at](self.norms[at](x))) @ self.maps[at].weight
        return found

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, y = x.tanh(), x.sin()
        for at in (0, 2):
            if self.together:
                one, other = self.branch(at, x), self.branch(at + 1, y)
                x, y = x + one, y + other
            else:
                x = x + self.branch(at, x)
                y = y + self.branch(at + 1, y)
        return self.norms[4](x), self.norms[5](y)


def test_branches_are_fitted_wherever_they_are_computed() -> None:
    draw = torch.Generator().manual_seed(0)
    given = [{"x": torch.randn(32, WIDTH, generator=draw)} for _ in range(6)]
    reports = []
    for together in (False, True):
        program = lnr.capture(Two(together).eval(), (given[0]["x"],))
        reports.append(lnr.Pipeline.parse("place{to=peri}").run(program, given).report)
    one, two = reports
    assert len(one.fitted) == 5 and all(row.weights and not row.why for row in one.fitted[:4])
    assert [row.after for row in one.fitted] == pytest.approx([row.after for row in two.fitted], rel=1e-3)
