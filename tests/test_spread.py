"""A forward that takes `*args` is captured with a name for each, and called as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lnrewrite as lnr


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.last, self.head = nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        nn.init.uniform_(self.norm.weight, 0.5, 2)

    def go(self, x: Tensor) -> Tensor:
        return self.head(self.last(x + self.up(self.norm(x))))


class Rest(Base):
    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        return self.go(x + rest[0] - 2 * rest[1])


class Every(Base):
    def forward(self, *given: Tensor) -> Tensor:
        return self.go(given[0] + given[1] - 2 * given[2])


class Switched(Base):
    def forward(self, x: Tensor, sign: int = 1, *rest: Tensor, half: bool = False, **more: Tensor) -> Tensor:
        return self.go((0.5 if half else 1) * (x + sign * rest[0] + more["rest_0"]))


def tensors(rows: int, length: int, count: int = 3) -> list[Tensor]:
    return [torch.randn(rows, length, 8) for _ in range(count)]


@pytest.mark.parametrize("kind", [Rest, Every, Switched])
def test_they_are_called_edited_rewritten_and_written(kind: type[Base], tmp_path: Path) -> None:
    """The program could not be called, its sizes were fixed, and torch's own errors came out."""
    torch.manual_seed(0)
    net, odd = kind().eval(), kind is Switched

    def call(rows: int, length: int) -> tuple[tuple[object, ...], dict[str, Tensor]]:
        a, b, c = tensors(rows, length)
        return ((a, -1, b), {"rest_0": c}) if odd else ((a, b, c), {})

    args, kwargs = call(2, 5)
    program = lnr.capture(net, args, kwargs)
    assert not program.notes
    result = lnr.Pipeline.parse("fold-affine").run(program)
    assert result.report.edits == 1
    for rows, length in ((2, 5), (3, 7)):
        args, kwargs = call(rows, length)
        torch.testing.assert_close(result.program.module()(*args, **kwargs), net(*args, **kwargs), rtol=1e-4, atol=1e-5)
    assert lnr.convert(net, "peri", args=args, kwargs=kwargs)(*args, **kwargs).shape == (3, 7, 3)
    result.program.save(tmp_path / "a.pt2")
    assert lnr.load(str(tmp_path / "a.pt2")).network.streams
    want = net(*args, **kwargs)
    assert lnr.rewrite(net, "fold-affine", args=args, kwargs=kwargs).edits == 1
    torch.testing.assert_close(net(*args, **kwargs), want, rtol=1e-4, atol=1e-5)
