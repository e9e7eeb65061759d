"""Weights that are quantised, or wrapped by an adapter: refused by name, or edited whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lnrewrite as lnr
from zoo.norms import WIDTH, randomise


class Quantised(nn.Module):
    """Hold a linear map as int8 numbers and a scale for each output."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.register_buffer("numbers", torch.randint(-99, 99, (outputs, inputs), dtype=torch.int8))
        self.register_buffer("step", torch.rand(outputs, 1) * 0.01)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.numbers.to(x.dtype) * self.step)


class Adapted(nn.Module):
    """Add a low-rank product to a linear map (LoRA)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(inputs, outputs), nn.Linear(inputs, 4), nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + 2.0 * self.b(self.a(x))
        return found


class Net(nn.Module):
    def __init__(self, linear: type[nn.Module]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.ups = nn.ModuleList(linear(WIDTH, 32) for _ in range(3))
        self.downs = nn.ModuleList(linear(32, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(torch.tanh(up(norm(x))))
        return x


def program(linear: type[nn.Module]) -> lnr.Program:
    torch.manual_seed(0)
    return lnr.capture(randomise(Net(linear)).eval(), kwargs={"x": torch.randn(2, 5, WIDTH)})


def test_a_fold_into_quantised_weights_is_refused() -> None:
    with pytest.raises(lnr.Refused) as refused:
        lnr.Pipeline.parse("fold-affine").run(program(Quantised))
    assert {r["code"] for r in refused.value.refusals} >= {"LN104"}


@pytest.mark.parametrize("linear", [Quantised, Adapted])
@pytest.mark.parametrize("to", ["post", "peri", "none"])
def test_placement_moves_without_touching_quantised_weights(linear: type[nn.Module], to: str) -> None:
    before = program(linear)
    after = lnr.Pipeline.parse(f"place{{to={to}}}").run(before).program
    assert after.network.placement == to
    old, new = dict(before.module().named_buffers()), dict(after.module().named_buffers())
    assert all(torch.equal(new[name], value) for name, value in old.items())


def test_a_fold_reaches_base_and_adapter() -> None:
    before = program(Adapted)
    after = lnr.Pipeline.parse("fold-affine").run(before).program
    assert not any(b["norms"][0]["gamma"] for b in after.inspect()["streams"][0]["blocks"])
    assert lnr.verify(before, after)["max_rel"] < 1e-6
