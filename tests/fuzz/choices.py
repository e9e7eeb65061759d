"""Choices: each is drawn from the seed and its own name, so that a net can be changed in one place."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Options = Sequence[str] | Mapping[str, Any]


class Choices:
    """Draw from options, and remember what was drawn; the first option is always the plain one.

    fixed: choices by name that are not drawn. A scope (`at`) puts a word before the names of its choices.
    """

    def __init__(self, seed: int, fixed: Mapping[str, str] | None = None) -> None:
        self.seed, self.fixed, self.scope = seed, dict(fixed or {}), ""
        self.made: dict[str, str] = {}
        self.plain: dict[str, str] = {}
        self.strangeness = float(self.any("strangeness", ("0.01", "0.03", "0.06", "0.12")))

    def at(self, word: str) -> Choices:
        """Return the same choices under a scope."""
        inner = object.__new__(Choices)
        inner.__dict__ = self.__dict__ | {"scope": f"{self.scope}{word}."}
        return inner

    def any(self, name: str, options: Options) -> str:
        """Return one of the options, each as likely as the others."""
        return self._made(name, options, lambda draw: draw.choice(list(options)))

    def pick(self, name: str, options: Options, likely: float = 1.0) -> str:
        """Return the first option, or another one now and then: `likely` times as often as strange nets have it."""
        first, *others = options
        strange = self.strangeness * likely
        return self._made(name, options, lambda draw: draw.choice(others) if draw.random() < strange else first)

    def _made(self, name: str, options: Options, draw: Callable[[random.Random], str]) -> str:
        name = self.scope + name
        if name not in self.made:
            drawn = draw(random.Random(f"{self.seed}/{name}"))
            wanted = self.fixed.get(name, drawn)
            self.made[name] = wanted if wanted in options else drawn
            self.plain[name] = next(iter(options))
        return self.made[name]

    def strange(self) -> dict[str, str]:
        """Return the choices that are not the plain ones."""
        return {name: made for name, made in self.made.items() if made != self.plain[name]}


class Lean(nn.Module):
    """Know which of its tensors and modules were asked for, so that the others can go."""

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        self.__dict__.setdefault("asked", set()).add(name)
        return found

    def lean(self) -> None:
        """Drop what nothing has asked for."""
        for held in (self._parameters, self._buffers, self._modules):
            for name in set(held) - self.__dict__.get("asked", set()):
                del held[name]


class Piece(Lean):
    """Run a function of itself, which sees as attributes the tensors and modules that it was given."""

    def __init__(self, run: Callable[..., Any], **held: Any) -> None:
        super().__init__()
        self.run = run
        for name, value in held.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *given: Any) -> Any:
        return self.run(self, *given)


def matrix(*shape: int) -> nn.Parameter:
    """Return random weights [..., out, in] that keep the size of what they read."""
    return nn.Parameter(torch.randn(shape) * shape[-1] ** -0.5)


def gain(*shape: int, mean: float = 1.0) -> nn.Parameter:
    """Return random gains around a mean."""
    return nn.Parameter(mean + 0.3 * torch.randn(shape))


def shift(*shape: int) -> nn.Parameter:
    """Return random biases."""
    return nn.Parameter(0.3 * torch.randn(shape))
