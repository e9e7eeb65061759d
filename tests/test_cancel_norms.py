"""A norm goes where all that its readers compute is normed again, and stays where something sees a token's size."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lnrewrite as lnr
from test_constants import out, saved
from zoo.blocks import Net, Residual
from zoo.branches import Mlp
from zoo.norms import WIDTH, Factory, randomise

HEADS = 2


class Normed(nn.Module):
    """Attend with norms of q, k and v: of each head, or of all channels; `bias` and `seen` are what sees the size."""

    def __init__(self, norm: Factory, whole: bool, bias: bool = False, seen: bool = False, values: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=bias and i == 1) for i in range(3))
        self.whole, self.seen, size = whole, seen, WIDTH if whole else WIDTH // HEADS
        self.norms = nn.ModuleList([norm(size), norm(size), norm(size) if values else nn.Identity()])
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made = [one(x) for one in (self.q, self.k, self.v)]
        gate = torch.sigmoid(made[2]) if self.seen else 1.0

        def split(y: Tensor, norm: nn.Module) -> Tensor:
            heads: Tensor = norm(y).unflatten(-1, (HEADS, -1)) if self.whole else norm(y.unflatten(-1, (HEADS, -1)))
            return heads.transpose(1, 2)

        q, k, v = (split(y, n) for y, n in zip(made, self.norms, strict=True))
        y: Tensor = self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2) * gate)
        return y


def net(norm: Factory, **how: bool) -> nn.Module:
    torch.manual_seed(0)
    blocks = (Residual(b, inn=norm) for b in (Normed(norm, **how), Mlp(), Normed(norm, **how), Mlp()))
    return randomise(Net(*blocks, final=norm)).double().eval()


def normed(kind: str, eps: float) -> Factory:
    made = nn.RMSNorm if kind == "rms" else lambda width, eps: nn.LayerNorm(width, eps, bias=False)
    return lambda width: made(width, eps=eps)


def worst(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / a.abs().max()).item()


@pytest.mark.parametrize(("kind", "whole", "onnx"), [*product(("rms", "layer"), (True, False), (True, False))])
def test_norms_before_norms_go_up_to_eps(kind: str, whole: bool, onnx: bool, tmp_path: Path) -> None:
    errors = []
    for eps in (1e-5, 1e-7):
        module, x = net(normed(kind, eps), whole=whole), torch.randint(0, 17, (2, 5))
        path = tmp_path / f"{eps}.onnx"
        program = lnr.load(saved(module, x, path, True), inputs=[x]) if onnx else lnr.capture(module, (x,))
        (name,) = program.example_inputs()
        result = lnr.Pipeline.parse("cancel-norms").run(program)
        assert (result.report.edits, str(result.report.exactness)) == (2, "asymptotic")
        left = result.program.inspect()["norms"]["total"]
        assert program.inspect()["norms"]["total"] - left == 2
        want, got = (out(p.in_float64().call({name: x})) for p in (program, result.program))
        errors.append(worst(want, got))
        assert errors[-1] < 100 * eps
    assert errors[1] < errors[0] / 20  # it goes to 0 with eps


@pytest.mark.parametrize("how", [{"bias": True}, {"seen": True}, {"values": False}])
def test_what_sees_the_size_keeps_the_norm(how: dict[str, bool]) -> None:
    module = net(normed("rms", 1e-6), whole=False, **how)
    result = lnr.Pipeline.parse("cancel-norms").run(lnr.capture(module, (torch.randint(0, 17, (2, 5)),)), partial=True)
    assert result.report.edits == 0
    assert {r.code for r in result.report.refusals} == {"LN131"}


def test_tokens_that_are_small_beside_eps_keep_their_norm() -> None:
    """The error that is stated holds for values of size one; where the outputs move by more, nothing is done."""
    module = net(normed("rms", 1e-3), whole=False)
    module.embedding.weight.data *= 1e-3
    module.position.data *= 1e-3
    result = lnr.Pipeline.parse("cancel-norms").run(lnr.capture(module, (torch.randint(0, 17, (2, 5)),)), partial=True)
    assert {r.code for r in result.report.refusals} == {"LN404"}
    assert all("up to eps" in r.remedy for r in result.report.refusals)
