"""What edits must do on a captured torch graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

import lnrewrite as lnr
from lnrewrite.ir import Affine, Edit, Gain, Proposal, ScaleWriter, SetNorm, Stream, Vectors, Where
from numpy_nets import EPS, TOKENS, WIDTH, B, G, need
from zoo import nets


@pytest.mark.parametrize("name", ["norm in the branch (Sub-LN)", "norm in the branch alone", "convnext block"])
def test_inner_norms_are_folded_in_torch(name: str) -> None:
    module, args = nets.NETS[name].build()
    program = lnr.capture(module, args)
    result = lnr.Pipeline.parse("fold-affine").run(program, partial=True)
    assert result.report.edits > 0
    a, b = program.module()(*args), result.program.module()(*args)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


class Products(torch.nn.Module):
    """Two branches whose maps are products without a bias, of parameters at the top; gains are sigmoids or plain."""

    def __init__(self, computed: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.other = (torch.nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(3))
        self.gain, self.gain2 = (torch.nn.Parameter(torch.randn(WIDTH)) for _ in range(2))
        self.zero = torch.nn.Parameter(torch.zeros(WIDTH))
        self.computed = computed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2.0
        gain = torch.sigmoid(self.gain) if self.computed else self.gain
        x = x + torch.tanh((torch.rms_norm(x, (WIDTH,), eps=EPS) * gain + self.zero) @ self.up) @ self.down
        return x + torch.tanh(torch.rms_norm(x, (WIDTH,), self.gain2, EPS) @ self.other)


def edited(
    module: torch.nn.Module, x: torch.Tensor, edits: Callable[[Stream, Vectors], Sequence[Edit]]
) -> torch.nn.Module:
    """Return a captured module with edits."""
    program = lnr.capture(module.eval(), (x,))
    (stream,) = program.network.streams
    vectors = Vectors()
    after, _ = program.apply([(stream, Proposal(tuple(edits(stream, vectors)), vectors=vectors))], "test")
    return after.module()


def torch_in() -> torch.Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))


def test_a_bias_behind_a_product_is_made_once_in_torch() -> None:
    torch.manual_seed(0)
    module, x = Products(), torch_in()
    module.other.data.zero_()

    def twice(stream: Stream, v: Vectors) -> list[Edit]:
        block = stream.blocks[0]
        (w,), g, b = block.writers, v.add(G), v.add(B)
        return [Edit(block.name, (ScaleWriter(w, g, b), ScaleWriter(w, g, g), Affine(Where.OUT, v.add(B + 2))))]

    after = edited(module, x, twice)
    g, b = torch.from_numpy(G), torch.from_numpy(B)
    with torch.no_grad():
        branch = module(x) - 2 * x
        wanted = 2 * x + (b + 2) * (g * (g * branch + b) + g)
        torch.testing.assert_close(after(x), wanted.float(), rtol=1e-4, atol=1e-4)
    assert "down_bias" in dict(after.named_parameters())


def test_gains_are_swapped_in_torch() -> None:
    torch.manual_seed(0)
    module, x = Products(), torch_in()

    def swap(stream: Stream, v: Vectors) -> list[Edit]:
        a, b = ((block.name, need(block.at(Where.IN)).norm) for block in stream.blocks)
        set_a = SetNorm(Where.IN, a[1], Gain(str(b[1].gamma)), v.add(B))
        return [Edit(a[0], (set_a,)), Edit(b[0], (SetNorm(Where.IN, b[1], Gain(str(a[1].gamma))),))]

    after = edited(module, x, swap)
    module.gain, module.gain2 = module.gain2, module.gain
    module.zero.data += torch.from_numpy(B)
    with torch.no_grad():
        torch.testing.assert_close(after(x), module(x))


def test_a_computed_gain_is_kept_in_torch() -> None:
    torch.manual_seed(0)
    module, x = Products(computed=True), torch_in()
    program = lnr.capture(module.eval(), (x,))
    result = lnr.Pipeline.parse("canonicalize").run(program)
    assert need(program.network.blocks[0].at(Where.IN)).norm.computed and result.report.edits == 1
    assert "zero" not in dict(result.program.module().named_parameters())
    with torch.no_grad():
        torch.testing.assert_close(result.program.module()(x), module(x))
