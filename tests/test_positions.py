"""Tables of positions that are interpolated to an image's size are sources of a stream, and move with it."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lnrewrite as lnr

WIDTH = 8
MODES = ("bicubic", "bilinear", "nearest", "nearest-exact", "bilinear antialias", "linear")


class Net(nn.Module):
    """Patches, a table that is interpolated to their number, and two blocks with RMSNorms."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode, self.patches = mode, nn.Conv2d(3, WIDTH, 2, 2)
        self.table = nn.Parameter(torch.randn(1, 9, WIDTH))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, 1e-6) for _ in range(3))
        self.ups, self.downs = (nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def positions(self, rows: int, columns: int) -> Tensor:
        table, (name, *rest) = self.table.mT, self.mode.split()
        if name == "linear":
            return F.interpolate(table, size=rows * columns, mode=name).mT
        table = F.interpolate(table.unflatten(-1, (3, 3)), size=(rows, columns), mode=name, antialias=bool(rest))
        return table.flatten(2).mT

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x)
        x = x.flatten(2).mT + self.positions(*x.shape[2:])
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=False):
            x = x + down(F.gelu(up(norm(x))))
        return self.head(self.norms[2](x))


@pytest.mark.parametrize("mode", MODES)
def test_interpolated_positions_are_rotated_with_the_stream(mode: str) -> None:
    torch.manual_seed(0)
    net, images = Net(mode).double().eval(), torch.randn(2, 3, 8, 10).double()
    program = lnr.capture(net, args=(images,))
    assert {s.param for s in program.network.streams[0].sources} == {"patches.weight", "table"}
    made = lnr.Pipeline.parse("fold-affine{final=true},rotate-stream").run(program)
    assert not torch.equal(dict(made.program.module().named_parameters())["table"], net.table)
    with torch.no_grad():
        torch.testing.assert_close(made.program.module()(images), net(images), rtol=1e-11, atol=1e-11)
