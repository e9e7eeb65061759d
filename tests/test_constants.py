"""What parameters alone decide is worked out whatever computes it, and gates that are 0 or 1 are none; FX and ONNX."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lnrewrite as lnr
from lnrewrite.ir import Bypass, Freeze

WIDTH, HIDDEN, TOKENS = 6, 8, 5
Compute = Callable[[Tensor, Tensor], Tensor]
VECTORS: dict[str, Compute] = {
    "softmax": lambda a, b: torch.softmax(a, 0) + b,
    "einsum": lambda a, b: torch.einsum("i,j->i", a, b) / 3,
    "silu": lambda a, b: F.silu(a) * b.sigmoid(),
    "cumsum": lambda a, b: torch.cumsum(a, 0) - b.flip(0),
    "sorted": lambda a, b: torch.sort(a).values + b[0],
    "unit": lambda a, b: F.normalize(a, dim=0) + torch.linalg.norm(b),
    "mixed": lambda a, b: torch.where(a > 0, a, b) + 1.5,
}
"""Gains and factors from two stored vectors."""


class Wired(nn.Module):
    """Map, norm and scale a branch by what is computed from stored vectors; a gate stands between norm and number."""

    def __init__(self, vectors: list[Compute], gate: float) -> None:
        super().__init__()
        self.vectors = vectors
        self.a, self.b, self.size = (nn.Parameter(torch.rand(WIDTH) + 0.5) for _ in range(3))
        self.weight, self.down = nn.Parameter(torch.randn(HIDDEN, WIDTH)), nn.Linear(HIDDEN, WIDTH)
        self.register_buffer("gate", torch.tensor(gate))
        self.final, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        gain, factor, by = (each(self.a, self.b) for each in self.vectors)
        normed = F.layer_norm(x, (WIDTH,)) * gain
        read = self.gate * normed + (1 - self.gate) * self.size.exp() * x
        weight = torch.einsum("hc,c->hc", self.weight, by) / self.weight.square().sum().sqrt()
        y: Tensor = self.head(self.final(x + factor * self.down(F.relu(F.linear(read, weight)))))
        return y


def wired(seed: int, gate: float) -> tuple[Wired, Tensor]:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    module = Wired(draw.choices(list(VECTORS.values()), k=3), gate)
    return module.double().eval(), torch.randn(2, TOKENS, WIDTH).double()


def saved(module: nn.Module, x: Tensor, path: Path, optimize: bool = False) -> str:
    """Write a model as ONNX; constants are computed in it, unless an optimizer has folded them."""
    written = torch.onnx.export(module, (x,), dynamo=True, optimize=optimize)
    assert written is not None
    written.save(path)
    return str(path)


@pytest.mark.parametrize("gate", [0.0, 1.0, 0.3])
@pytest.mark.parametrize("seed", range(5))
def test_whatever_computes_it_is_stored_and_idle_gates_go(seed: int, gate: float, tmp_path: Path) -> None:
    module, x = wired(seed, gate)
    for program in (lnr.capture(module, (x,)), lnr.load(saved(module, x, tmp_path / "m.onnx"))):
        (name,) = program.example_inputs()
        want = module(x)
        done = lnr.Pipeline.parse("propagate-constants").run(program).program
        assert (out(done.module()(**{name: x})) - want).abs().max() <= 1e-12 * want.abs().max()
        assert done.network.computed == ()
        assert len(done.detection.norms) == (1 if gate == 0 else 2)
        folded = lnr.Pipeline.preset("inference").run(program, partial=True).program
        assert (out(folded.module()(**{name: x})) - want).abs().max() <= 1e-10 * want.abs().max()


def out(value: object) -> Tensor:
    """Return the one tensor that a model gives."""
    value = next(iter(value.values())) if isinstance(value, dict) else value
    assert isinstance(value, Tensor)
    return value


def remade(module: nn.Module, x: Tensor, text: str, path: Path | None = None) -> tuple[Any, Any, float]:
    """Run passes on a model, from a file where a path is given; return both, and how far apart they are, relative."""
    program = lnr.load(saved(module, x, path, True), inputs=[x]) if path else lnr.capture(module, (x,))
    result = lnr.Pipeline.parse(text).run(program)
    (name,) = program.example_inputs()
    want, got = (out(each.in_float64().call({name: x})) for each in (program, result.program))
    return program, result, ((got - want).abs().max() / want.abs().max()).item()


class Sized(nn.Module):
    """Multiply by what depends on more than parameters: the length, stored integers, chance."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.table = kind, nn.Parameter(torch.randn(9))
        self.scale, self.up = nn.Parameter(torch.rand(WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codes", torch.arange(WIDTH, dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        by = {
            "length": lambda: self.table[: x.shape[1]].sum(),
            "codes": lambda: self.codes.to(x.dtype) * self.scale,
            "chance": lambda: torch.rand_like(self.scale) + self.scale,
        }[self.kind]()
        return x + self.up(F.layer_norm(x, (WIDTH,)) * by)


@pytest.mark.parametrize("kind", ["length", "codes", "chance"])
def test_what_more_than_parameters_decides_is_left(kind: str) -> None:
    program = lnr.capture(Sized(kind).eval(), (torch.randn(2, TOKENS, WIDTH),))
    assert not program.network.computed
    result = lnr.Pipeline.parse("propagate-constants").run(program)
    assert result.report.edits == 0


def test_what_is_not_finite_is_not_stored() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Parameter(torch.tensor([0.0] * 3 + [1.0] * 3)), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.up(torch.softmax(x + self.gate.log(), -1))

    program = lnr.capture(Masked().eval(), (torch.randn(2, TOKENS, WIDTH),))
    assert program.network.computed
    assert lnr.Pipeline.parse("propagate-constants").run(program).report.edits == 0


def test_a_gate_of_several_values_stays() -> None:
    """A vector gate shuts a term only where all of it is 0; one entry of another value keeps it."""
    module, x = wired(0, 0.0)
    for values in (np.zeros(WIDTH), np.eye(WIDTH)[2]):
        module.gate = torch.from_numpy(values)
        program = lnr.capture(module, (x,))
        proposals = lnr.Pipeline.parse("propagate-constants").passes[0].propose(program.network.rest, context(program))
        operations = [type(o) for e in proposals.edits for o in e.operations]
        assert Freeze in operations and (Bypass in operations) is not bool(values.any())


def context(program: lnr.Program) -> lnr.pipeline.Context:
    return lnr.pipeline.Context(
        network=program.network, samples=dict, is_ones=program.is_ones, is_zeros=program.is_zeros, values=program.values
    )
