"""Factors as people write them: gates, rows of a stacked LayerScale, multipliers of branch, skip and trunk."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lnrewrite as lnr
from zoo.norms import randomise

WIDTH = 8


class Scaled(nn.Module):
    """Add four branches, each with factors of its own sort."""

    def __init__(self, alpha: float = 1.0, trunk: float = 1.0) -> None:
        super().__init__()
        self.alpha, self.trunk = alpha, trunk
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(5))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 12) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(12, WIDTH) for _ in range(4))
        self.layer_scale = nn.Parameter(torch.randn(4, WIDTH))
        self.gate = nn.Parameter(torch.randn(1))
        self.out, self.head = nn.RMSNorm(WIDTH, eps=1e-3), nn.Linear(WIDTH, 3)

    def branch(self, i: int, x: Tensor) -> Tensor:
        return self.down[i](torch.tanh(self.up[i](self.norms[i](x))))

    def forward(self, x: Tensor) -> Tensor:
        x = self.alpha * x + self.branch(0, x) * self.layer_scale[0]
        x = (self.alpha * x + self.branch(1, x) * torch.tanh(self.gate)) * self.trunk
        x = (self.alpha * x + self.out(self.branch(2, x) / -4) * self.layer_scale[2]) * self.trunk
        x = self.alpha * x + self.branch(3, x) * 0.22
        return self.head(self.norms[4](x))


@pytest.mark.parametrize(("alpha", "trunk"), [(1.0, 1.0), (1.7, 1.0), (1.0, 0.4), (1.5, 0.3)])
def test_every_factor_goes_and_the_outputs_stay(alpha: float, trunk: float) -> None:
    torch.manual_seed(0)
    model, x = randomise(Scaled(alpha, trunk), 0).double().eval(), torch.randn(2, 5, WIDTH, dtype=torch.float64)
    program = lnr.capture(model, (x,))
    result = lnr.Pipeline.parse("absorb-scales").run(program)
    (stream,) = result.program.network.streams
    assert [(b.scale, b.scales) for b in stream.blocks] == [(1.0, ())] * 4
    wanted, found = model(x), result.program.module()(x)
    assert (wanted - found).abs().max() <= 1e-12 * wanted.abs().max()


def test_factors_ahead_of_what_reads_the_stream_bare_go_into_it() -> None:
    class Ahead(Scaled):
        def branch(self, i: int, x: Tensor) -> Tensor:
            return self.down[i](torch.tanh(self.up[i](self.layer_scale[i] * (self.gate * x))))

    torch.manual_seed(0)
    model, x = randomise(Ahead(1.5, 0.3), 0).double().eval(), torch.randn(2, 5, WIDTH, dtype=torch.float64)
    program = lnr.capture(model, (x,))
    assert [len(b.scaled("read")) for b in program.network.streams[0].blocks] == [2] * 4
    wanted = model(x)
    for text in ("rotate-stream", "layernorm-to-rmsnorm", "rescale-stream{by=0.5}", "absorb-scales"):
        found = lnr.Pipeline.parse(text).run(program, partial=True).program
        assert (wanted - found.module()(x)).abs().max() <= 1e-12 * wanted.abs().max()
    (stream,) = found.network.streams
    assert [(b.scale, b.scales, b.barriers) for b in stream.blocks] == [(1.0, (), ())] * 4


def test_a_stream_that_would_shrink_away_keeps_its_factors() -> None:
    model, x = Scaled(trunk=0.01).eval(), torch.randn(2, 5, WIDTH)
    result = lnr.Pipeline.parse("absorb-scales").run(lnr.capture(model, (x,)), partial=True)
    assert {r.code for r in result.report.refusals} == {"LN126"}
    assert result.report.edits == 4  # the branches' own factors go all the same


def test_what_reads_a_branch_s_norm_beside_the_branch_keeps_the_stream_as_it_is() -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
            self.last, self.head, self.beside = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            n = self.norm(x)
            x = x + self.down(torch.tanh(self.up(n)))
            return self.head(self.last(x)), self.beside(n)

    torch.manual_seed(0)
    model, x = randomise(Beside(), 0).double().eval(), torch.randn(2, 5, WIDTH, dtype=torch.float64)
    program = lnr.capture(model, (x,))
    for text in ("fold-affine{final=true},rotate-stream", "rescale-stream{by=0.5}", "absorb-scales"):
        result = lnr.Pipeline.parse(text).run(program, partial=True)
        for wanted, found in zip(model(x), result.program.module()(x), strict=True):
            assert (wanted - found).abs().max() <= 1e-12 * wanted.abs().max(), text
