"""The gain and bias of norms that are spelled out fold too: what norms stays as it is written."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lnrewrite as lnr
from test_constants import remade
from tiers import rows
from zoo.blocks import Net, stack

NORMED = {
    "std": lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-3),
    "std of all": lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, correction=0, keepdim=True) + 1e-3),
    "length": lambda x: F.normalize(x, dim=-1),
    "length and eps": lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-3),
    "length, its factor": lambda x: F.normalize(x, dim=-1) * x.shape[-1] ** 0.5,
}
AFFINE = {
    "gain and bias": lambda u, g, b: u * g + b,
    "gain": lambda u, g, b: g * u,
    "one plus": lambda u, g, b: (1 + g) * u + b,
    "bias": lambda u, g, b: b + u,
    "computed": lambda u, g, b: u * torch.exp(g),
}


class Spelled(nn.Module):
    """Norm by a formula, and by another one of gain and bias."""

    def __init__(self, normed: str, affine: str, width: int) -> None:
        super().__init__()
        self.normed, self.affine = NORMED[normed], AFFINE[affine]
        self.gain, self.bias = nn.Parameter(torch.rand(width) + 0.5), nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.affine(self.normed(x), self.gain, self.bias)
        return found


CASES = list(product(NORMED, AFFINE, (False, True)))


@pytest.mark.parametrize(("normed", "affine", "onnx"), rows(CASES, sample=CASES[::9]))
def test_what_reads_a_norm_takes_its_gain_and_bias(normed: str, affine: str, onnx: bool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    module = Net(*stack(2, inn=(norm := lambda w: Spelled(normed, affine, w))), final=norm).double().eval()
    x = torch.randint(0, 7, (2, 5))
    program, result, error = remade(module, x, "fold-affine{final=true}", tmp_path / "m.onnx" if onnx else None)
    assert error <= 1e-12
    before, after = ([s.norm for _, s in p.network.streams[0].sites()] for p in (program, result.program))
    assert [n.kind for n in before] == [n.kind for n in after] and result.report.edits == len(before)
    assert not any(n.gamma or n.beta for n in after)
    assert not lnr.Pipeline.parse("fold-affine{final=true}").run(result.program).report.edits
