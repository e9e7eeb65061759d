"""Captures trace a graph again only where it writes in place; what is spelled otherwise instead computes the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn import functional as F

import lnrewrite as lnr

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


def test_parameters_that_nothing_reads_stay_in_place() -> None:
    class Spare(Mapped):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.spare, self.up, self.name = nn.Linear(3, 3), nn.Linear(8, 8), "mT"

    module = Spare().eval()
    captured = lnr.capture(module, (torch.randn(2, 6, 8),)).module()
    assert [n for n, _ in captured.named_parameters()] == [n for n, _ in module.named_parameters()]
