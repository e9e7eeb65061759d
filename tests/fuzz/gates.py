"""Spell a gated sum, x + g f or (1 - g) x + g f, in as many ways as there are, and in others made at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .choices import Piece

Gate = Callable[[Piece, Tensor, dict[str, Any]], Any]
Form = Callable[[Tensor, Tensor, Any], Tensor]

STORED: dict[str, Gate] = {
    "a number": lambda s, x, more: torch.tensor(0.3).to(x),
    "learned": lambda s, x, more: s.b,
    "per channel": lambda s, x, more: s.v,
    "negative": lambda s, x, more: -s.v,
    "one less": lambda s, x, more: 1 - s.b,
    "sigmoid": lambda s, x, more: torch.sigmoid(s.b),
    "sigmoid per channel": lambda s, x, more: torch.sigmoid(s.v),
    "of two": lambda s, x, more: torch.softmax(s.lambdas[:2], 0)[0],
    "spread": lambda s, x, more: s.v.expand_as(x),
    "a mask": lambda s, x, more: (s.mask > 0).to(x),
}
COMPUTED: dict[str, Gate] = {
    "by the stream": lambda s, x, more: torch.sigmoid(F.linear(x, s.g)),
    "by the stream, one number": lambda s, x, more: torch.sigmoid(F.linear(x, s.g[:1])),
    "by the condition": lambda s, x, more: torch.tanh(F.linear(more["condition"], s.c))[:, None],
}
GATES = STORED | COMPUTED
"""The gates, for values whose last axis is the channels."""

ADDED: dict[str, Form] = {
    "x + g f": lambda x, f, g: x + g * f,
    "f g + x": lambda x, f, g: f * g + x,
    "lerp(x, x + f, g)": lambda x, f, g: torch.lerp(x, x + f, g),
    "lerp(x + f, x, 1 - g)": lambda x, f, g: torch.lerp(x + f, x, 1 - g),
    "(1 - g) x + g (x + f)": lambda x, f, g: (1 - g) * x + g * (x + f),
    "(x + f) g + x (1 - g)": lambda x, f, g: (x + f) * g + x * (1 - g),
    "addcmul(x, f, g)": lambda x, f, g: torch.addcmul(x, f, g),
    "x + (g (x + f) - g x)": lambda x, f, g: x + (g * (x + f) - g * x),
    "x - (-g) f": lambda x, f, g: x - (-g) * f,
    "x + f - (1 - g) f": lambda x, f, g: x + f - (1 - g) * f,
    "stack": lambda x, f, g: torch.stack([x, g * f]).sum(0),
}
MIXED: dict[str, Form] = {
    "(1 - g) x + g f": lambda x, f, g: (1 - g) * x + g * f,
    "lerp(x, f, g)": lambda x, f, g: torch.lerp(x, f, g),
    "lerp(f, x, 1 - g)": lambda x, f, g: torch.lerp(f, x, 1 - g),
    "x + g (f - x)": lambda x, f, g: x + g * (f - x),
    "x - g (x - f)": lambda x, f, g: x - g * (x - f),
    "f + (1 - g) (x - f)": lambda x, f, g: f + (1 - g) * (x - f),
    "addcmul(x, g, f - x)": lambda x, f, g: torch.addcmul(x, g, f - x),
    "x - g x + g f": lambda x, f, g: x - g * x + g * f,
}
"""What comes to x + g f, and to (1 - g) x + g f."""


def gated(gate: str, form: str) -> Callable[[Piece, Tensor, Tensor, dict[str, Any]], Tensor]:
    """Return a way in which a branch's value joins the stream, as `sums.joins` has them."""
    return lambda s, x, f, more: FORMS[form](x, f, GATES[gate](s, x, more))


def drawn(seed: int) -> Form:
    """Return a spelling of x + g f that nobody would write, drawn from a seed."""
    return lambda x, f, g: _spelled(random.Random(seed), x, f, g, 2)


def _spelled(draw: random.Random, x: Tensor, f: Tensor, g: Any, depth: int) -> Tensor:
    def again(x: Tensor, f: Tensor, g: Any) -> Tensor:
        return _spelled(draw, x, f, g, depth - 1)

    part = draw.choice((0.25, 0.5, -0.75, 2.0))
    ways: list[Callable[[], Tensor]] = [partial(form, x, f, g) for form in ADDED.values()]
    if depth:
        ways += 2 * [
            lambda: part * again(x, f, g) + (1 - part) * again(x, f, g),
            lambda: torch.lerp(again(x, f, g), again(x, f, g), part),
            lambda: again(x, f, g - part) + part * f,
            lambda: again(x, f, 2 * g) / 2 + x / 2,
            lambda: torch.where(torch.arange(x.shape[-1]) % 2 > 0, again(x, f, g), x + g * f),
            lambda: -again(-x, -f, g),
        ]
    return draw.choice(ways)()


FORMS = ADDED | MIXED | {f"at random {seed}": drawn(seed) for seed in range(40)}
