"""Group norms as exporters write them, instance norms of channels reshaped into groups and back, are group norms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lnrewrite as lnr
import lnrewrite.ir as ir
from tiers import rows

AXES = {"fixed": {}, "any batch": {0: "batch"}, "any size": {0: "batch", 2: "high", 3: "wide"}}
MADE = [(w, g, axes) for w in ("dynamo", "script") for g in (1, 4, 16) for axes in AXES]
SAMPLE = [("dynamo", 4, "any batch"), ("script", 4, "fixed")]


class Block(nn.Module):
    """Add a convolution of a group norm, whose gains are not ones, to a map."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(groups, 16), nn.Conv2d(16, 16, 3, padding=1)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(self.norm(x))


def blocks(path: Path) -> list[ir.Block]:
    return [block for stream in lnr.load(path).network.streams for block in stream.blocks]


@pytest.mark.parametrize("writer, groups, axes", rows(MADE, sample=SAMPLE))
def test_the_norm_ahead_of_a_branch(writer: str, groups: int, axes: str, tmp_path: Path) -> None:
    net, x, free = nn.Sequential(Block(groups), Block(groups)), torch.randn(3, 16, 8, 8), AXES[axes]
    how: dict[str, Any] = {"dynamic_shapes": (free,)} if writer == "dynamo" else {"dynamic_axes": {"x": free}}
    path = tmp_path / "net.onnx"
    torch.onnx.export(net, (x,), path, input_names=["x"], dynamo=writer == "dynamo", verbose=False, **how)
    found = blocks(path)
    assert len(found) == 2
    for block in found:
        assert block.placement is ir.Placement.PRE
        (site,) = block.sites
        assert (site.norm.kind, site.norm.axis) == (ir.Kind.INSTANCE if groups == 16 else ir.Kind.GROUP, -3)


class Half(Block):
    """Norm one half of the channels in groups."""

    def forward(self, x: Tensor) -> Tensor:
        low, high = x.chunk(2, 1)
        return x + self.conv(torch.cat([nn.functional.group_norm(low, 2), high], 1))


def test_one_that_is_read_inside_is_none(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    torch.onnx.export(nn.Sequential(Half(4)), (torch.randn(3, 16, 8, 8),), path, dynamo=True, verbose=False)
    (block,) = blocks(path)
    assert block.placement is ir.Placement.NONE
    assert [(site.where, site.norm.kind) for site in block.sites] == [(ir.Where.INNER, ir.Kind.GROUP)]
