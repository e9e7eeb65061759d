"""Tables of positions that are interpolated to an image's size are sources of a stream, and move with it."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lnrewrite as lnr

WIDTH, WIDE = 8, 12
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


class Between(nn.Module):
    """Positions added between blocks. What enters the stream has one size in every token, in channels of its own.

    So a token's size behind a sum is a number, and moving norms to the trunk is exact but for eps.
    """

    def __init__(self, cut: bool, shared: bool, post: bool) -> None:
        super().__init__()
        self.cut, self.post = cut, post
        self.embedding = nn.Parameter(self.signs(9, 0))
        tables = [nn.Parameter(3 * self.signs(7, part)) for part in (1, 2)]
        self.tables = nn.ParameterList([tables[0], tables[0] if shared else tables[1]])
        self.norms = nn.ModuleList(nn.RMSNorm(WIDE, 1e-14) for _ in range(3))
        self.ups = nn.ModuleList(nn.Linear(WIDE, WIDE, bias=False) for _ in range(3))
        self.downs = nn.ParameterList(self.signs(WIDE, part) for part in (3, 4, 5))
        self.head = nn.Linear(WIDE, 3)

    def signs(self, rows: int, part: int) -> Tensor:
        table = torch.zeros(rows, WIDE)
        table[:, 2 * part : 2 * part + 2] = 2.0 * torch.randint(2, (rows, 2)) - 1
        return table

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding[ids]
        for i, down in enumerate(self.downs):
            seen = x if self.post else self.norms[i](x)
            x = x + F.one_hot(self.ups[i](seen).argmax(-1), WIDE).to(x.dtype) @ down
            if i < 2:
                table = self.tables[i]
                x = x + (torch.cat((table[:1], table[1:])) if self.cut else table)[: ids.shape[1]]
            x = self.norms[i](x) if self.post else x
        return self.head(x if self.post else self.norms[2](x))


@pytest.mark.parametrize("to", ["post", "peri", "pre"])
@pytest.mark.parametrize("cut", [False, True])
def test_positions_between_blocks_follow_the_size_of_the_trunk(to: str, cut: bool) -> None:
    torch.manual_seed(0)
    net, ids = Between(cut, shared=False, post=to == "pre").double().eval(), torch.randint(9, (4, 7))
    program = lnr.capture(net, args=(ids,))
    made = lnr.Pipeline.parse(f"place{{to={to} fit=constants}}").run(program, [{"ids": ids}])
    assert not made.report.refusals and made.program.network.placement == to
    with torch.no_grad():
        torch.testing.assert_close(made.program.module()(ids), net(ids), rtol=1e-9, atol=1e-9)


def test_a_table_that_two_sums_share_keeps_norms_off_the_trunk() -> None:
    torch.manual_seed(0)
    net, ids = Between(False, shared=True, post=False).double().eval(), torch.randint(9, (4, 7))
    program = lnr.capture(net, args=(ids,))
    with pytest.raises(lnr.Refused, match="LN114"):
        lnr.Pipeline.parse("place{to=post}").run(program, [{"ids": ids}])
    lnr.Pipeline.parse("place{to=peri}").run(program, [{"ids": ids}])
