"""Constant factors in a branch: what is made of a model is what is made of the same one with them in its weights."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lnrewrite as lnr
import zoo
from test_tapers import END, START, ends
from tiers import rows

WIDTH = 16
TO = {(1, 0): ("none", "peri", "output", "post"), (1, 1): ("pre", "none", "output"), (0, 1): ("pre", "peri", "none")}


class Factors(nn.Module):
    """Two branches with norms before and behind them as `norms` says, and factors behind the writer and the norm."""

    def __init__(self, seed: int, norms: tuple[int, int]) -> None:
        super().__init__()
        torch.manual_seed(seed)
        draw = random.Random(seed)
        self.inside, self.head, self.final = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 5), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Factors.block(draw, norms) for _ in range(2))

    @staticmethod
    def block(draw: random.Random, norms: tuple[int, int]) -> nn.Module:
        block = nn.Module()
        for name, on in zip(("before", "behind"), norms, strict=True):
            norm = nn.LayerNorm(WIDTH) if on else nn.Identity()
            for parameter in norm.parameters():
                nn.init.normal_(parameter, mean=1.0, std=0.3)
            block.add_module(name, norm)
        block.up, block.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        for name in ("written", "branch"):
            kind = draw.choice(["none", "number", "vector"])
            by = torch.tensor(draw.uniform(0.05, 3)) * (0.5 + torch.rand(WIDTH if kind == "vector" else 1))
            setattr(block, name, nn.Parameter(by) if kind == "vector" else 1.0 if kind == "none" else by.item())
        return block

    def absorb(self) -> Factors:
        """Put the factors into the weights before them."""
        for block in self.blocks:
            for name in ("written", "branch"):
                by: Any = getattr(block, name)
                before = block.behind if name == "branch" and list(block.behind.parameters()) else block.down
                for parameter in before.parameters():
                    rows = by[:, None] if isinstance(by, Tensor) and parameter.dim() == 2 else by
                    parameter.data = parameter.data * rows
                delattr(block, name)
                setattr(block, name, 1.0)
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x)
        for block in self.blocks:
            added = block.down(nn.functional.gelu(block.up(block.before(x))))
            added = added if isinstance(block.written, float) and block.written == 1 else added * block.written
            added = block.behind(added)
            x = x + (added if isinstance(block.branch, float) and block.branch == 1 else block.branch * added)
        out: Tensor = self.head(self.final(x))
        return out


CASES = [(seed, norms, to) for norms, targets in TO.items() for to in targets for seed in range(8)]


@pytest.mark.parametrize(("seed", "norms", "to"), rows(CASES, sample=CASES[::8]))
def test_closed_forms_are_those_of_the_weights(seed: int, norms: tuple[int, int], to: str) -> None:
    draw, made = torch.Generator().manual_seed(seed), []
    batches = [{"x": torch.randn(64, 8, generator=draw)} for _ in range(8)]
    for net in (Factors(seed, norms), Factors(seed, norms).absorb()):
        program = lnr.capture(net.eval(), (batches[0]["x"],))
        assert program.network.blocks
        made.append(lnr.Pipeline.parse(f"place{{to={to} fit=constants}}").run(program, batches).program)
    with torch.no_grad():
        one, two = (program.module()(batches[0]["x"]) for program in made)
    assert (one - two).norm() < 1e-4 * two.norm()


@pytest.mark.parametrize(("seed", "norms", "to"), rows(CASES, sample=CASES[4::8]))
def test_tapers_end_exactly(seed: int, norms: tuple[int, int], to: str) -> None:
    with zoo.float64():
        net = Factors(seed, norms).double().eval()
        inputs = {"x": torch.randn(6, 8, dtype=torch.float64)}
        try:
            folded, start, end = ends(lnr.capture(net, kwargs=inputs), inputs, to)
        except lnr.LnrewriteError as error:  # some have no exact start
            assert error.code.value == "LN602"
            return
    assert start < START and end < END and folded.network.placement == to
