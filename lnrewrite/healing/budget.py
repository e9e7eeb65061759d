"""Spend a budget of tokens: how many rows a step has, how many steps there are, and what goes into trials."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from ..backends.inputs import Tensors
from .config import HealingConfig

WINDOWS = 6_400
"""Rows of a run for which nobody gave a number of tokens or steps."""

FEWEST, ROWS, ENOUGH = 2, 4, 1000
"""Rows of a step: few enough for that many steps, within these bounds. Many small steps heal better than few large ones
(demo:tinygpt, a per cent of its tokens: two rows better than four, and better than one)."""

LONG = 128
"""The tokens that such a row has at least; of shorter ones, a step has as many more."""

TRIAL = 25
"""A trial takes one of so many parts of the budget."""

SHORTEST = 64
"""Steps of a trial at least: shorter ones prefer too low rates. A run of less than `TRIAL` times as many has none."""

CHOOSING = 64
"""Rows at most on which trials are measured, and an eighth of it at least."""


@dataclass(frozen=True)
class Wanted:
    """Hold what is asked of the data: the rows of a micro-batch over all processes, and about how many of them."""

    micro: int
    batches: int

    @classmethod
    def of(cls, config: HealingConfig, window: int, processes: int) -> Self:
        """Return it for rows of about `window` tokens, shared by so many processes."""
        unit = config.accumulate * processes
        every = config.tokens / window if config.tokens else WINDOWS
        more = max(1.0, LONG / window)
        usual = more * min(ROWS, max(FEWEST, every / more / ENOUGH))
        several = every / config.steps if config.tokens and config.steps else usual
        rows = config.batch_size or max(1, round(several / unit)) * unit
        steps = max(config.steps or math.ceil(every / rows), config.local_steps)
        return cls(rows // config.accumulate, steps * config.accumulate)


def tokens_of(batch: Tensors) -> int:
    """Return how many tokens a batch holds; of inputs without tokens, places. A mask of pairs does not count."""
    pairs = {name for name, t in batch.items() if t.dim() > 2 and not t.is_floating_point()}
    held = [t for name, t in batch.items() if name not in pairs or len(pairs) == len(batch)]
    return max(t[..., 0].numel() if t.is_floating_point() and t.dim() else t.numel() for t in held)


@dataclass(frozen=True)
class Budget:
    """Hold what a run may use.

    rows, step: the rows and tokens of a step. tokens: in all. asked: the steps that were asked for. trial: the steps of
    a trial; none are made where it is 0.
    """

    rows: int
    step: int
    tokens: int
    asked: int | None
    trial: int

    @classmethod
    def of(cls, config: HealingConfig, batch: Tensors, held: Sequence[Tensors]) -> Self:
        """Return the budget of a run with such micro-batches, and these rows to choose rates on."""
        step = tokens_of(batch) * config.accumulate
        rows = len(next(iter(batch.values()))) * config.accumulate
        tokens = config.steps * step if config.steps else config.tokens or WINDOWS * step // rows
        trial = tokens // step // TRIAL
        return cls(rows, step, tokens, config.steps, trial if held and trial >= SHORTEST else 0)

    def steps(self, spent: int) -> int:
        """Return the steps that are left of the budget when so many tokens are spent, or what was asked for."""
        return self.asked or max(1, (self.tokens - spent) // self.step)


def divided(batches: Sequence[Tensors], free: bool) -> tuple[list[Tensors], list[Tensors]]:
    """Return rows to choose rates on, and the others to report: a quarter, or none where that would be too few.

    free: whether a batch may have any number of rows.
    """
    wanted = min(CHOOSING, sum(map(_rows, batches)) // 4)
    if wanted < CHOOSING // 8:
        return [], list(batches)
    chosen, rest = list[Tensors](), list(batches)
    while rest and wanted >= _rows(rest[0]):
        wanted -= _rows(rest[0])
        chosen.append(rest.pop(0))
    if free and wanted:
        chosen.append({n: t[:wanted] for n, t in rest[0].items()})
        rest[0] = {n: t[wanted:] for n, t in rest[0].items()}
    return chosen, rest


def _rows(batch: Tensors) -> int:
    return len(next(iter(batch.values())))
