"""Sums that take an earlier state up again: the blocks beside them are seen, and what is exact there stays exact."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lnrewrite as lnr
import zoo
from lnrewrite import Pipeline
from lnrewrite.ir import RECALL, Side
from tiers import rows
from zoo.branches import Attention, Mlp
from zoo.norms import VOCAB, WIDTH, layer, rms

SEEDS = range(60)
EXACT = (
    "canonicalize,fold-affine,untie,rotate-stream",
    "rescale-stream{by=0.25}",
    "absorb-scales",
    "layernorm-to-rmsnorm",
)
FACTORS = ("number", "learned", "stored", "channels")


class Drawn(nn.Module):
    """Make a Pre-LN net of drawn norms; ahead of each block and at the end it may take earlier states up again."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        norm = draw.choice([layer, rms])
        self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.places = nn.Embedding(32, WIDTH) if draw.random() < 0.4 else None
        self.first = draw.choice([nn.RMSNorm(WIDTH, elementwise_affine=False), norm(WIDTH)]) if seed % 3 == 0 else None
        self.branches = nn.ModuleList(draw.choice([Attention, Mlp])() for _ in range(draw.randint(3, 6)))
        self.norms, self.final = nn.ModuleList(norm(WIDTH) for _ in self.branches), norm(WIDTH)
        sums = range(len(self.branches) + 1)
        self.kinds = [draw.choice(FACTORS) for _ in sums]
        self.back = [draw.sample(range(i + 1), min(i + 1, draw.choice([0, 1, 1, 2]))) for i in sums]
        kept = torch.tensor([draw.choice([0.5, 1.0, 2.0]) for _ in sums])
        self.keep = nn.Parameter(kept) if draw.random() < 0.6 else None
        self.learned = nn.Parameter(torch.rand(len(sums)))
        self.channels = nn.Parameter(torch.rand(len(sums), WIDTH))
        self.register_buffer("stored", torch.rand(len(sums)))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + self.places(torch.arange(ids.shape[1], device=ids.device)) if self.places else x
        states = [self.first(x) if self.first else x]
        for i, (branch, norm) in enumerate(zip(self.branches, self.norms, strict=True)):
            x = self.recalled(i, states)
            states.append(x + branch(norm(x)))
        return self.head(self.final(self.recalled(len(self.branches), states)))

    def recalled(self, i: int, states: list[Tensor]) -> Tensor:
        if not self.back[i]:
            return states[-1]
        x = states[-1] if self.keep is None else self.keep[i] * states[-1]
        for back in self.back[i]:
            x = x + self.factor(i) * states[back]
        return x

    def factor(self, i: int) -> Any:
        if self.kinds[i] == "number":
            return 0.3
        return {"learned": self.learned, "stored": self.stored, "channels": self.channels}[self.kinds[i]][i]

    @property
    def plain(self) -> bool:
        """Return whether no earlier state is taken up again channel by channel."""
        return all(not b or k != "channels" for b, k in zip(self.back, self.kinds, strict=True))


@pytest.mark.parametrize("seed", rows(SEEDS, sample=(0, 5, 13, 49)))
def test_drawn_nets_are_seen_and_stay_exact(seed: int) -> None:
    torch.manual_seed(seed)
    ids = torch.randint(0, VOCAB, (2, 8))
    other = torch.randint(0, VOCAB, (3, 5))
    with zoo.float64():
        net = Drawn(seed).double().eval()
        program = lnr.capture(net, (ids,))
        assert [b.placement for b in program.network.blocks] == ["pre"] * len(net.branches)
        assert not program.network.refusals
        for text in EXACT:
            result = Pipeline.parse(text).run(program, partial=True)
            for given in (ids, other):
                want, got = net(given), result.program.module()(given)
                assert (want - got).abs().max() <= 1e-9 * want.abs().max(), text
            codes = {r.code for r in result.report.refusals}
            assert "LN404" not in codes  # what was proposed held
            if net.plain and net.first is None and text == "rescale-stream{by=0.25}":
                assert result.report.edits and not codes


def test_what_is_taken_up_again_is_told() -> None:
    torch.manual_seed(0)
    net = next(net for net in map(Drawn, SEEDS) if net.plain and any(net.back[2:]))
    program = lnr.capture(net.eval(), (torch.randint(0, VOCAB, (2, 8)),))
    told = [b.barrier(Side.CARRIED) for b in program.network.blocks]
    assert any(b and b.op == RECALL for b in told)
