"""Rehearse what the data lack: rows with random tokens, on which the student only copies the teacher.

A healing sees few tokens, and what they do not hold drifts. On demo:tinygpt two of 686 held-out windows, tables of
letters that the training windows hardly hold, were most of the gap that was left. Random inputs with the teacher's own
answers keep it in place: pseudorehearsal (Robins, Connection Science 7, 1995). Tokens that the teacher never learned
have no answer worth copying, and rows of them cost more than they keep: those come that it expects itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from ..backends.inputs import Tensors
from ..backends.torch.fused import IGNORED
from ..comparison.verifying import logits
from .losses import Objective
from .participant import Participant
from .sources import TARGETS, WHOLE, BatchSource, number

LOOKS, ROWS = 16, 2
"""Batches, and rows of each, on which it is seen what a teacher expects."""

EVEN = 0.5
"""The power of the chance of a token that it is drawn with: rare ones come more often than in the data."""


def known(teacher: Participant, source: BatchSource, size: int) -> Tensor:
    """Return how often each of the tokens [size] is drawn: what a teacher expects on the average, evened out.

    All alike where it scores no tokens; NaN, as behind padding, tells nothing. Every process looks at the same rows.
    """
    total = torch.zeros(size)
    for index in range(LOOKS):
        scores = logits(teacher.outputs(source.batch(index, slice(ROWS))))
        if scores is None or scores.shape[-1] < size:
            return torch.ones(size)
        total += scores.float().flatten(0, -2).softmax(-1).nan_to_num().mean(0)[:size].cpu()
    return total**EVEN if total.any() else torch.ones(size)


class Rehearsed(BatchSource):
    """Put random tokens into the last rows of a batch of `source`, `share` of all rows of a run; no task counts them.

    How many of a row's tokens are random is random too, from few among the data's own to nearly all. limits: the size
    of the table behind each input of integers; only inputs with the largest one, the vocabulary, are changed. odds:
    how often each token is drawn: [size]. A batch keeps one row as it is at least.
    """

    def __init__(
        self,
        source: BatchSource,
        share: float,
        limits: Mapping[str, int],
        objective: Objective,
        odds: Tensor,
        seed: int,
    ) -> None:
        self.source, self.share, self.objective, self.odds, self.seed = source, share, objective, odds, seed
        self.held_out = source.held_out
        self.ids = [name for name, limit in limits.items() if limit == len(odds)]

    def rows_of(self, index: int) -> int:
        return self.source.rows_of(index)

    def batch(self, index: int, rows: slice = WHOLE) -> Tensors:
        count = self.source.rows_of(index)
        before, after = (math.floor(self.share * count * i) for i in (index, index + 1))
        first = max(1, count - (after - before))
        here = {each: place for place, each in enumerate(range(count)[rows])}
        batch = dict(self.source.batch(index, rows))
        if self.objective.has_task(batch):
            batch[TARGETS] = self.labels(batch)
            batch[TARGETS][[place for each, place in here.items() if each >= first]] = IGNORED
        draw = torch.Generator().manual_seed(number(self.seed, index, -1))
        for name in self.ids:
            batch[name] = batch[name].clone()
            shape, dtype = batch[name].shape[1:], batch[name].dtype
            for each in range(first, count):  # rows of others are drawn as well: all draw alike
                hit = torch.rand(shape, generator=draw) < torch.rand((), generator=draw)
                drawn = torch.multinomial(self.odds, shape.numel(), True, generator=draw).view(shape)
                if each in here:
                    batch[name][here[each]][hit] = drawn[hit].to(dtype)
        return batch

    def labels(self, batch: Tensors) -> Tensor:
        """Return a batch's own labels or, of a causal model, the token behind each: [rows, ...]."""
        found = self.objective.targets(batch)
        return found.clone() if TARGETS in batch else F.pad(found, (0, 1), value=IGNORED)
