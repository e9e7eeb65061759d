"""Statistics that one operator computes together are read one by one: such a norm is no tap of its stream."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn

import lnrewrite as lnr
from test_constants import remade
from tiers import rows
from zoo.blocks import Net, stack

TOGETHER = {
    "var_mean": lambda x: torch.var_mean(x, -1, correction=0, keepdim=True),
    "var_mean, biased": lambda x: torch.var_mean(x, (-1,), False, True),
    "std_mean": lambda x: [
        s * s if i == 0 else s for i, s in enumerate(torch.std_mean(x, -1, correction=0, keepdim=True))
    ],
}
ROTATED = "fold-affine{final=true},layernorm-to-rmsnorm,rotate-stream"
PASSES = ["fold-affine", "layernorm-to-rmsnorm", ROTATED, "rescale-stream{by=0.5}"]


class Spelled(nn.Module):
    """Norm by a variance and a mean that are computed together."""

    def __init__(self, statistics: str, width: int) -> None:
        super().__init__()
        self.statistics = TOGETHER[statistics]
        self.gain, self.bias = nn.Parameter(torch.rand(width) + 0.5), nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = self.statistics(x)
        return (x - mean) * torch.rsqrt(variance + 1e-5) * self.gain + self.bias


CASES = list(product(TOGETHER, PASSES))
SAMPLE = [("var_mean", "layernorm-to-rmsnorm"), ("var_mean, biased", ROTATED), ("var_mean", PASSES[-1])]


@pytest.mark.parametrize(("statistics", "text"), rows(CASES, sample=SAMPLE))
def test_passes_see_no_tap(statistics: str, text: str) -> None:
    torch.manual_seed(1)
    module = Net(*stack(2, inn=(norm := lambda w: Spelled(statistics, w))), final=norm).double().eval()
    program, result, error = remade(module, torch.randint(0, 7, (2, 5)), text)
    assert not program.network.streams[0].taps and result.report.edits and not result.report.refusals
    assert error <= 1e-9


def test_a_statistic_that_something_else_reads_is_a_tap() -> None:
    """What is left of the stream for others to read still closes it."""

    class Told(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.up = nn.Linear(8, 8), nn.Linear(8, 8)
            self.norm = Spelled("var_mean", 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.net(x)
            _, mean = torch.var_mean(x, -1, keepdim=True)
            return x + self.up(self.norm(x)), mean

    program = lnr.capture(Told().eval(), (torch.randn(3, 8),))
    assert program.network.streams[0].taps
