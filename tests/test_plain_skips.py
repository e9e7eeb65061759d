"""Post- to Pre-LN with skips left alone: on any of the blocks, and with branches fitted to data."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lnrewrite as lnr
from tiers import rows

BLOCKS = 6


class Words(nn.Module):
    """Tokens that branches of mixers and MLPs act on in turn, a norm of gains far from 1 behind each sum."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        width = random.Random(seed).choice([16, 24, 40])
        self.rms = bool(seed % 3 == 2)
        self.table, self.head = nn.Embedding(50, width), nn.Linear(width, 50)
        self.up = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(BLOCKS))
        self.down = nn.ModuleList(nn.Linear(3 * width, width) for _ in range(BLOCKS))
        self.norms = nn.ModuleList(self.norm(width) for _ in range(BLOCKS + 1))
        with torch.no_grad():
            for down in self.down:
                down.weight.mul_(3)

    def norm(self, width: int) -> nn.Module:
        found = nn.RMSNorm(width, eps=1e-6) if self.rms else nn.LayerNorm(width)
        nn.init.uniform_(found.weight, 0.5, 1.5)
        if isinstance(found, nn.LayerNorm):
            nn.init.normal_(found.bias, std=0.1)
        return found

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norms[-1](self.table(ids))
        for index, (up, down, norm) in enumerate(zip(self.up, self.down, self.norms, strict=False)):
            h = up(x)
            if index % 2 == 0:
                h = h.cumsum(1) / torch.arange(1, 13).sqrt()[:, None]
            x = norm(x + down(h.relu()))
        out: Tensor = self.head(x)
        return out


def text(rows: int, seed: int) -> dict[str, Tensor]:
    return {"ids": torch.randint(0, 50, (rows, 12), generator=torch.Generator().manual_seed(seed))}


def made(model: Any, how: str) -> tuple[Any, float]:
    """Return a conversion and its relative error on other data."""
    found = lnr.Pipeline.parse(f"place{{to=pre {how}}}").run(model, [text(16, seed) for seed in range(8)])
    with torch.no_grad():
        one, two = (m.call(text(64, 99)) for m in (model, found.program))
    one, two = (next(iter(out.values())) if isinstance(out, dict) else out for out in (one, two))
    return found, float((one - two).norm() / one.norm())


CASES = [(seed, first, last) for seed in range(6) for first in range(BLOCKS) for last in range(first, BLOCKS)]


@pytest.mark.parametrize(("seed", "first", "last"), rows(CASES, sample=[(0, 0, 0), (1, 1, 2), (2, 0, 3), (3, 2, 5)]))
def test_skips_left_alone_in_some_blocks_are_about_as_near_as_others(seed: int, first: int, last: int) -> None:
    """The trunk norm behind the last of them puts the rest of the model where it was."""
    model = lnr.capture(Words(seed).eval(), kwargs=text(16, 0))
    how = f"blocks={first}-{last} fit=constants"
    (_, usual), (found, plain) = made(model, how), made(model, f"plain-skips {how}")
    assert found.report.edits and plain < 2.5 * usual + 0.02


@pytest.mark.parametrize(
    ("seed", "form"), rows([(s, f) for s in range(6) for f in ("torch", "onnx")], sample=[(0, "torch"), (2, "onnx")])
)
def test_branches_are_fitted_beside_skips_left_alone(seed: int, form: str, tmp_path: Path) -> None:
    """States are compared where the original has them: each channel times what the norms that are gone made of it."""
    model: Any = lnr.capture(Words(seed).eval(), kwargs=text(16, 0))
    if form == "onnx":
        model.export(tmp_path / "m.onnx")
        model = lnr.load(tmp_path / "m.onnx")
    (_, constants), (found, fitted) = made(model, "plain-skips fit=constants"), made(model, "plain-skips")
    assert found.report.fitted and fitted < 0.8 * constants
    assert all(row.before < 0.3 for row in found.report.fitted if row.blocks)  # elsewhere it would be about 1
