"""Norms that divide by one number are none, and l2 and std norms are what they are: exactly, or by a stated bound."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lnrewrite as lnr
from lnrewrite.ir import Center, FoldReader, Kind, ScaleWriter
from lnrewrite.ir.text import parse
from lnrewrite.pipeline import registry
from lnrewrite.testing.reference import apply, invent
from test_constants import remade
from test_exact_passes import each
from zoo.blocks import Net, stack
from zoo.streams import assert_same, context

PICTURE = """
stream toy width=6
  source @wte.weight:1(table)
  block a mlp {placed}
    {where} {norm}{reads}
    reads  @u.weight:1+@u.bias
    writes @d.weight:0+@d.bias
  final  {norm} -> @head.weight:1+@head.bias
"""
NORMS = {
    "layer(eps=1000000000000.0 gamma=@g beta=@b)": None, "rms(eps=1000000000000.0 gamma=1+@g)": None,
    "centered(eps=0.0 gamma=@g beta=@b factor=0.25)": None, "l2(eps=1e-12 gamma=@g factor=3.0)": Kind.RMS,
    "l2(eps=0.5 gamma=@g factor=3.0 variant=2)": Kind.RMS, "std(eps=0.0 gamma=@g beta=@b)": Kind.LAYER,
    "std(eps=0.0 beta=@b variant=1)": Kind.LAYER, "std(eps=0.5 gamma=@g beta=@b variant=2)": Kind.LAYER,
}  # fmt: skip
"""Norms, and what becomes of each."""


@pytest.mark.parametrize("where", ["in", "out"])
@pytest.mark.parametrize("norm", NORMS)
def test_each_norm_becomes_what_it_is(norm: str, where: str) -> None:
    reads = " -> @u.weight:1+@u.bias" if where == "in" else ""
    placed = {"in": "pre", "out": "output"}[where] if NORMS[norm] else "none"
    machine = invent(parse(PICTURE.format(norm=norm, where=f"{where:<6}", placed=placed, reads=reads)).streams[0], 3)
    proposal = registry.find("settle-norms")().propose(machine.stream, context(machine))
    after = apply(machine, proposal)
    assert not proposal.refusals
    assert_same(machine, after)
    assert {s.norm.kind for _, s in after.stream.sites()} == ({NORMS[norm]} if NORMS[norm] else set())
    if NORMS[norm] is None and "rms" not in norm:
        folds = (FoldReader, ScaleWriter)
        wrong = each(lambda o: None if isinstance(o, folds) and isinstance(o.scale, Center) else o)(proposal)
        with pytest.raises(AssertionError):
            assert_same(machine, apply(machine, wrong))


class Spelled(nn.Module):
    """Norm by a formula of gain and bias."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind, self.gain, self.bias = kind, nn.Parameter(torch.rand(width) + 0.5), nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        scaled = {
            "eps": lambda: F.layer_norm(x, x.shape[-1:], self.gain * 1e6, None, 1e12),
            "fixed": lambda: (x - x.mean(-1, keepdim=True)) / 3.0 * self.gain,
            "length": lambda: F.normalize(x, dim=-1) * x.shape[-1] ** 0.5 * self.gain,
            "root": lambda: x / (x.square().sum(-1, keepdim=True) + 0.1).sqrt() * self.gain,
        }[self.kind]()
        return scaled + self.bias


LEFT = {"eps": "", "fixed": "", "length": "rms", "root": "rms"}


@pytest.mark.parametrize(("kind", "where", "onnx"), [*product(LEFT, ("inn", "out"), (False, True))])
def test_models_are_settled_and_compute_the_same(kind: str, where: str, onnx: bool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    norms = {where: lambda width: Spelled(kind, width)}
    module = Net(*stack(2, **norms), final=norms[where]).double().eval()
    x = torch.randint(0, 7, (2, 5))
    text = "propagate-constants,settle-norms"
    program, result, error = remade(module, x, text, tmp_path / "m.onnx" if onnx else None)
    rounded = 1e-8 if onnx else 1e-11  # attributes of ONNX are float32: eps, and what is meant by it, are 4e-9 apart
    assert error <= rounded
    assert set(result.program.inspect()["norms"]["kinds"]) == ({LEFT[kind]} if LEFT[kind] else set())
    placed = {"inn": "pre", "out": "output"}[where] if LEFT[kind] else "none"
    assert program.network.placement == result.program.network.placement == placed


@pytest.mark.parametrize("norm", ["l2(eps=0.5 variant=1)", "std(eps=0.5 beta=@b)", "l2(eps=0.01)"])
def test_an_eps_beside_the_root_and_a_clamp_above_usual_eps_are_refused(norm: str) -> None:
    machine = invent(parse(PICTURE.format(norm=norm, where="out   ", placed="output", reads="")).streams[0], 0)
    proposal = registry.find("settle-norms")().propose(machine.stream, context(machine))
    assert not proposal.edits and {r.code for r in proposal.refusals} == {"LN129"}


TINY: dict[str, Callable[[Tensor], Tensor]] = {
    "std": lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-30),
    "unbiased": lambda x: (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-3),
    "l2": lambda x: F.normalize(x, dim=-1, eps=1e-24),
    "beside": lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-30),
}


@pytest.mark.parametrize("kind", TINY)
def test_rows_of_zeros_stay_zeros(kind: str) -> None:
    class Tiny(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.rand(width) + 0.5)

        def forward(self, x: Tensor) -> Tensor:
            return TINY[kind](x) * self.gain

    module = nn.Sequential(nn.Linear(5, 16, bias=False), Tiny(16), nn.Linear(16, 3)).eval()
    result = lnr.Pipeline.parse("settle-norms").run(lnr.capture(module, (torch.randn(2, 6, 5),)))
    assert result.report.edits
    for x in (torch.zeros(2, 6, 5), torch.randn(2, 6, 5)):
        torch.testing.assert_close(result.program.module()(x), module(x))


def test_an_l2_norm_converts_once_it_is_settled() -> None:
    torch.manual_seed(0)
    program = lnr.capture(Net(*stack(2, inn=lambda w: Spelled("length", w))).eval(), (torch.randint(0, 7, (2, 5)),))
    refused = lnr.Pipeline.parse("place{to=none}").run(program, partial=True).report
    assert not refused.edits and {r.remedy for r in refused.refusals} == {"run settle-norms first"}
    result = lnr.Pipeline.parse("settle-norms,place{to=none}").run(program)
    assert result.program.network.placement == "none"
