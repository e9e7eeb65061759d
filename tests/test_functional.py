"""Captures trace a graph again only where it writes in place; what is spelled otherwise instead computes the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn import functional as F

import lnrewrite as lnr
from lnrewrite.backends.torch import module as captured_modules
from zoo.blocks import Net
from zoo.branches import Mlp
from zoo.norms import VOCAB, WIDTH

# Maps of x [batch, 6, 8]: spelled as they are or otherwise, and those that have to be traced again.
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "to dtype": lambda x: x.to(torch.float64).float() * 2,
    "to its own dtype": lambda x: x.float().to("cpu") + 1,
    "type as": lambda x: x.double().type_as(x) + 1,
    "contiguous": lambda x: x.transpose(1, 2).contiguous().view(-1, 48),
    "chunks": lambda x: torch.cat(x.chunk(3, dim=-1)[::-1], -1),
    "chunks of uneven size": lambda x: torch.cat(x.chunk(4, 1)[1:], 1),
    "chunks of a size that is not known": lambda x: torch.cat(x.chunk(2)[::-1]),
    "numpy's T": lambda x: x[0].T @ x[1],
    "mT": lambda x: x.mT @ x,
    "swapped axes": lambda x: x.swapaxes(1, 2) @ x.swapdims(-1, 1).mT,
    "dropout": lambda x: F.dropout(x, 0.5, False),
}
AGAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "added in place": lambda x: (x * 2).add_(1),
    "a view written to": lambda x: _written(x * 2),
    "a constant made on the way": lambda x: x + torch.tensor([1.0, 2.0] * 4),
    "narrowed": lambda x: x.narrow(1, 1, 2) * 2,
    "dimensions moved": lambda x: x.movedim(1, 2) * 2,
    "mapped over rows": lambda x: torch.vmap(lambda row: torch.tanh(row @ row.mT))(x),
    "mapped over two axes": lambda x: torch.vmap(torch.vmap(torch.tanh))(x) * 2,
}


def _written(x: Tensor) -> Tensor:
    x[:, 1:3] = 0
    return x


class Mapped(nn.Module):
    """Compute one of the maps behind a linear map."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.up, self.name = nn.Linear(8, 8), name

    def forward(self, x: Tensor) -> Tensor:
        return (PLAIN | AGAIN)[self.name](self.up(x))


@pytest.mark.parametrize("name", [*PLAIN, *AGAIN])
def test_the_numbers_stay_and_nothing_is_traced_twice_without_need(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traced, real = [], ExportedProgram.run_decompositions

    def spied(self: ExportedProgram, *given: object) -> ExportedProgram:
        traced.append(name)
        return real(self, *given)

    monkeypatch.setattr(ExportedProgram, "run_decompositions", spied)
    torch.manual_seed(0)
    module = Mapped(name).eval()
    x, more = torch.randn(2, 6, 8), torch.randn(5, 6, 8)
    program = lnr.capture(module, (x,))
    assert bool(traced) is (name in AGAIN)
    for given in (x, more):
        assert torch.equal(program.module()(given), module(given))


def test_a_program_that_does_not_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken for one that takes no other inputs, as one is that insists on its path."""

    def fails(*given: object) -> None:
        raise RuntimeError("something was lost")

    def broken(program: ExportedProgram) -> ExportedProgram:
        for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
            node.target = fails
        return program

    monkeypatch.setattr(captured_modules, "functional", broken)
    with pytest.raises(lnr.LnrewriteError, match="on its own example inputs it fails: something was lost") as caught:
        lnr.capture(Mapped("mT").eval(), (torch.randn(2, 6, 8),))
    assert caught.value.code == "LN023"


def test_a_mapped_dimension_that_fails_is_closed() -> None:
    """Where tracing fails inside torch.vmap, torch left its dimension open, and all that followed failed too."""

    def numbers(row: Tensor) -> Tensor:
        return row * float(row.sum())

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.vmap(numbers)(x) if torch.compiler.is_exporting() else x

    with pytest.raises(lnr.LnrewriteError, match="LN023"):
        lnr.capture(Failing().eval(), (torch.randn(2, 6, 8),))
    assert torch.equal(torch.vmap(torch.neg)(torch.ones(2)), -torch.ones(2))
    assert lnr.capture(Mapped("mT").eval(), (torch.randn(2, 6, 8),)).module() is not None


def test_parameters_that_nothing_reads_stay_in_place() -> None:
    class Spare(Mapped):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.spare, self.up, self.name = nn.Linear(3, 3), nn.Linear(8, 8), "mT"

    module = Spare().eval()
    captured = lnr.capture(module, (torch.randn(2, 6, 8),)).module()
    assert [n for n, _ in captured.named_parameters()] == [n for n, _ in module.named_parameters()]


SUMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "alpha": lambda x, f, v: torch.add(x, f, alpha=0.5),
    "a sum that begins at 0": lambda x, f, v: sum([x, f]),  # type: ignore[arg-type, return-value]
    "lerp by a number": lambda x, f, v: torch.lerp(x, f, 0.3),
    "lerp by channel": lambda x, f, v: torch.lerp(x, f, v),
    "addcmul": lambda x, f, v: torch.addcmul(x, f, v, value=2.0),
    "addcdiv": lambda x, f, v: torch.addcdiv(x, f, v),
    "addmm": lambda x, f, v: torch.addmm(x.flatten(0, 1), f.flatten(0, 1), torch.diag(v)).view_as(x),
    "baddbmm": lambda x, f, v: torch.baddbmm(x, f, torch.diag(v).expand(len(f), -1, -1), beta=0.9, alpha=1.1),
    "addmm, weighed": lambda x, f, v: torch.addmm(
        x.flatten(0, 1), f.flatten(0, 1), torch.diag(v), beta=0.9, alpha=0.5
    ).view_as(x),
    "a difference": lambda x, f, v: x - f,
    "a difference from the branch": lambda x, f, v: f - x,
    "a weighed difference": lambda x, f, v: torch.sub(x, f, alpha=0.5),
    "stack": lambda x, f, v: torch.stack([x, f], -2).sum(-2),
    "views side by side": lambda x, f, v: torch.cat([x[None], f[None]]).sum(0),
    "mean of a stack": lambda x, f, v: torch.stack([x, f]).mean(0),
}


class Summed(nn.Module):
    """Make a branch's value join its stream in one of the ways."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.branch, self.name = nn.Sequential(nn.LayerNorm(WIDTH), Mlp()), name
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return SUMS[self.name](x, self.branch(x), self.scale)


@pytest.mark.parametrize("name", SUMS)
def test_whatever_adds_to_a_stream_is_seen_as_a_sum(name: str) -> None:
    torch.manual_seed(0)
    net = Net(Summed(name), Summed(name), final=nn.LayerNorm).double().eval()
    ids = torch.randint(VOCAB, (2, 5))
    program = lnr.capture(net, (ids,))
    assert [b.placement for s in program.network.streams for b in s.blocks] == ["pre", "pre"]
    result = lnr.Pipeline.parse("fold-affine,rescale-stream{by=0.5},absorb-scales").run(program, partial=True)
    assert result.report.edits and not [r for r in result.report.refusals if r.code == "LN404"]
    more = [torch.randint(VOCAB, (3, 6))] if len(program.dynamic_axes()["ids"]) == 2 else []  # not behind a baddbmm
    for given in (ids, *more):
        torch.testing.assert_close(result.program.module()(given), net(given), rtol=1e-12, atol=1e-12)


class Picked(nn.Module):
    """Run a branch on some tokens, which a router picks, and add what it gives to those (mixture-of-depths)."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.router = nn.Sequential(nn.LayerNorm(WIDTH), Mlp()), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        weight, place = self.router(x).topk(3, dim=1)
        place = place.expand(-1, -1, WIDTH)
        return x.scatter_add(1, place, self.branch(x.gather(1, place)) * torch.sigmoid(weight))


def test_what_is_added_to_picked_tokens_is_a_sum() -> None:
    torch.manual_seed(0)
    net = Net(Picked(), Picked(), final=nn.LayerNorm).double().eval()
    ids = torch.randint(VOCAB, (2, 5))
    program = lnr.capture(net, (ids,))
    assert [b.placement for s in program.network.streams for b in s.blocks] == ["pre", "pre"]
    result = lnr.Pipeline.parse("fold-affine").run(program)
    assert result.report.edits == 2
    torch.testing.assert_close(result.program.module()(ids), net(ids), rtol=1e-12, atol=1e-12)


COUNTS: dict[str, Callable[[Tensor], Tensor]] = {
    "positions behind padding": lambda ids: (ids.ne(0).cumsum(-1) - 1) * ids.ne(0),
    "distance": lambda ids: -(ids - ids.flip(-1)),
    "counted down": lambda ids: 7 - ids,
    "picked": lambda ids: torch.where(ids > 2, ids - 2, ids),
    "twice off": lambda ids: ids * 3 - ids - 1,
}


class Counting(nn.Module):
    """Count beside a stream from which numbers are taken off."""

    def __init__(self, count: str) -> None:
        super().__init__()
        self.wte, self.norm, self.up, self.count = nn.Embedding(VOCAB, 8), nn.LayerNorm(8), nn.Linear(8, 8), count

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(ids) - 0.5
        return x + self.up(self.norm(x)) - 0.25, COUNTS[self.count](ids)


@pytest.mark.parametrize("count", COUNTS)
def test_counts_stay_counts_and_numbers_are_taken_off(count: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, ids = Counting(count), torch.randint(VOCAB, (2, 5))
    program = lnr.capture(net, (ids,))
    for found, wanted in zip(program.module()(ids), net(ids), strict=True):
        torch.testing.assert_close(found, wanted)
    assert program.export(tmp_path / "counting.onnx", target="cpu").norms
