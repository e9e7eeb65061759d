"""What a forward chooses by the sizes of its inputs is told, and asserted, where it changes what is computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lnrewrite as lnr
from tiers import rows

Choice = Callable[[int, int], bool]
CHOICES: dict[str, Choice] = {
    "x.shape[1] <= 16": lambda rows, tokens: tokens > 16,
    "x.shape[1] >= 4": lambda rows, tokens: tokens < 4,
    "x.shape[1] != 9": lambda rows, tokens: tokens == 9,
    "x.shape[0] <= 3": lambda rows, tokens: rows > 3,
    "x.shape[1] <= 3*x.shape[0] + 8": lambda rows, tokens: tokens > 3 * rows + 8,
    "x.shape[0]*x.shape[1] <= 64": lambda rows, tokens: rows * tokens > 64,
    "x.shape[1] != 1": lambda rows, tokens: tokens == 1,
    "x.shape[0] != 1": lambda rows, tokens: rows == 1,
}
SIZES = [(2, 5), (2, 9), (2, 17), (2, 33), (4, 6), (1, 6), (3, 1), (2, 3), (5, 40)]


class Choosing(nn.Module):
    """One Pre-LN block, which halves what its norm gives where it chooses so; or does something that is the same."""

    def __init__(self, choice: Choice, by: float) -> None:
        super().__init__()
        self.choice, self.by = choice, by
        self.inp, self.norm, self.up, self.down = (
            nn.Linear(5, 16),
            nn.LayerNorm(16),
            nn.Linear(16, 24),
            nn.Linear(24, 16),
        )

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.choice(x.shape[0], x.shape[1])
        x = self.inp(x)
        h = self.norm(x)
        h = h * self.by if chosen else h
        return x + self.down(torch.tanh(self.up(h)))


@pytest.mark.parametrize("taken", rows(CHOICES, sample=[*CHOICES][::3]))
def test_choices_by_size(taken: str) -> None:
    """The capture is the module at every size, or refuses one as another path; paths that agree are not told."""
    torch.manual_seed(0)
    for by, told in ((0.5, (f"`{taken}`",)), (1.0, ())):
        module = Choosing(CHOICES[taken], by).eval()
        program = lnr.capture(module, args=(torch.randn(2, 6, 5),))
        assert program.fixed_paths == told
        for size in SIZES:
            x = torch.randn(*size, 5)
            try:
                torch.testing.assert_close(program.module()(x), module(x), rtol=1e-4, atol=1e-5)
            except RuntimeError as error:
                assert told and module.choice(*size), error


def test_limits_are_no_choices() -> None:
    """A module that fails beyond a limit, and at no size else does anything else, has one path."""

    class Limited(Choosing):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] > 16:
                raise ValueError("too long")
            return super().forward(x)

    assert not lnr.capture(Limited(lambda rows, tokens: False, 1.0).eval(), args=(torch.randn(2, 6, 5),)).fixed_paths
