"""Find which tokens count: masks among the inputs, and the values whose tokens they hide.

A mask [rows, tokens] is of a sequence, and a model may have several of equal length (an encoder's and a decoder's);
some hide where they are 0, as transformers' do, some where they are 1 (torch.nn.MultiheadAttention's). Both are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ..errors import LnrewriteError
from ..pipeline.feed import padded
from ..pipeline.protocols import Batch

STAYS = 1e-5
"""By how much of a value's largest number it may differ and count as what it was."""
ELSEWHERE: Final = -1
"""What is told of a mask that is of other tokens than a value's."""
Run = Callable[[Any], Mapping[str, Tensor]]
"""Computes some values [rows, tokens, ...] of a model from a batch, by name."""


@torch.no_grad()
def hides(mask: str, batch: Mapping[str, Any], run: Run) -> dict[str, int | None]:
    """Return, for each value with as many rows and tokens, the number by which a mask hides a token of it: 0 or 1.

    A change at the first place moves other places where the mask shows it, and only its own where the mask hides it.
    `ELSEWHERE` where it then moves nothing, for the value is of another sequence; None where neither is seen. A mask of
    other numbers tells nothing.
    """
    held = {n: v for n, v in batch.items() if not isinstance(v, np.ndarray) or v.dtype.kind in "biuf"}
    inputs = {n: torch.as_tensor(v) for n, v in held.items() if isinstance(v, (Tensor, np.ndarray))}
    of = inputs[mask].shape
    if not bool(((inputs[mask] == 0) | (inputs[mask] == 1)).all()):
        return {}
    found: dict[str, int | None] = {n: None for n, v in run(batch).items() if v.shape[:2] == of}
    alike = [n for n, v in inputs.items() if n != mask and "mask" not in n and v.shape[:2] == of]
    changes = {n: changed for n in alike if not torch.equal(changed := _changed(inputs[n]), inputs[n])}
    for number in (0, 1):
        shows = torch.full_like(inputs[mask], 1 - number)
        hidden = shows.clone()
        hidden[:, 0] = number
        try:
            before = [run({**batch, mask: how}) for how in (shows, hidden)]
            after = [
                [run({**batch, mask: how, name: value}) for how in (shows, hidden)] for name, value in changes.items()
            ]
        except (LnrewriteError, RuntimeError, ValueError, IndexError):  # a model may take no such mask
            continue
        for pair in after:
            for at in [n for n, told in found.items() if told in (None, ELSEWHERE)]:
                shown, where = (_moved(x[at], y[at]) for x, y in zip(before, pair, strict=True))
                if shown[1:].any() and not where[1:].any():
                    found[at] = number if where[0] else ELSEWHERE
        if number in found.values():
            break
    return found


def _changed(value: Tensor) -> Tensor:
    """Return an input whose first token is another: its last one."""
    value = value.clone()
    value[:, 0] = value[:, -1]
    return value


def _moved(before: Tensor, after: Tensor) -> Tensor:
    """Return at which tokens a value differs, bool[tokens]; what is infinite alike (classes never chosen) does not.

    What is NaN does: it is what a softmax over nothing gives, at a token that is hidden from itself.
    """
    moved = (after - before).abs() > STAYS * before.nan_to_num(0, 0, 0).abs().max()
    moved |= before.isnan() | after.isnan()
    return moved.flatten(2).any(-1).any(0) if moved.dim() > 2 else moved.any(0)


def counted(hiding: Mapping[str, int], batch: Any, value: Tensor) -> Tensor | None:
    """Return which tokens of a value [rows, tokens, ...] no mask hides: bool[rows, tokens]; None without such masks.

    hiding: the number by which each mask hides a token.
    """
    told = [torch.as_tensor(batch[mask]).to(value.device) != number for mask, number in hiding.items()]
    told = [each for each in told if each.shape == value.shape[:2]]
    return torch.stack(told).all(0) if told else None


@dataclass(frozen=True)
class Shown:
    """Tell which tokens of some values count: `groups` hold the masks of values, and the number by which they hide."""

    groups: Mapping[frozenset[str], Mapping[str, int]] = field(default_factory=dict)

    @classmethod
    def tried(cls, batches: Sequence[Batch], run: Run, groups: Sequence[Collection[str]] = ()) -> Shown:
        """Try the masks that tell tokens apart, on the first batch with any.

        groups: values of one sequence each, of which some may be run; without them each value is told of alone.
        """
        batch = next((b for b in batches if isinstance(b, Mapping) and padded(b)), None)
        if batch is None:
            return cls()
        known = {mask: hides(mask, batch, run) for mask in padded(batch)}
        found: dict[frozenset[str], dict[str, int]] = {}
        for group in map(frozenset, groups or [{n} for n in sorted({n for told in known.values() for n in told})]):
            row = found[group] = dict[str, int]()
            for mask, told in known.items():
                numbers = {number for n, number in told.items() if n in group and number in (0, 1)}
                if len(numbers) == 1:
                    row[mask] = numbers.pop()
        return cls(found)

    def rows(self, name: str, value: Tensor, batch: Any) -> Tensor | None:
        """Return which tokens of a value [rows, tokens, ...] count, bool[rows * tokens]; None where all do."""
        found = next((row for group, row in self.groups.items() if name in group), {})
        counts = counted(found, batch, value)
        return None if counts is None or counts.all() or not counts.any() else counts.flatten()

    def cut(self, name: str, value: Tensor, batch: Any) -> Tensor:
        """Return a value as it is or, where tokens of it are hidden, those that count: [counted, ...]."""
        counts = self.rows(name, value, batch)
        return value if counts is None else value.flatten(0, 1)[counts]
