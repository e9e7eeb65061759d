"""Rehearse what the data lack: rows with random tokens, on which the student only copies the teacher.

A healing sees few tokens, and what they do not hold drifts. On demo:tinygpt two of 686 held-out windows, tables of
letters that the training windows hardly hold, were most of the gap that was left. Random inputs with the teacher's own
answers keep it in place: pseudorehearsal (Robins, Connection Science 7, 1995).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch.nn import functional as F

from ..backends.inputs import Tensors
from .fused import IGNORED
from .losses import Objective
from .sources import LABELS, WHOLE, BatchSource, number


class Rehearsed(BatchSource):
    """Put random tokens into the last rows of a batch of `source`, `share` of all rows of a run; no task counts them.

    How many of a row's tokens are random is random too, from few among the data's own to nearly all. limits: the size
    of the table behind each input of integers; only inputs with the largest one, the vocabulary, are changed. A batch
    keeps one row as it is at least.
    """

    def __init__(
        self, source: BatchSource, share: float, limits: Mapping[str, int], objective: Objective, seed: int
    ) -> None:
        self.source, self.share, self.objective, self.seed = source, share, objective, seed
        self.held_out = source.held_out
        self.size = max(limits.values())
        self.ids = [name for name, limit in limits.items() if limit == self.size]

    def rows_of(self, index: int) -> int:
        return self.source.rows_of(index)

    def batch(self, index: int, rows: slice = WHOLE) -> Tensors:
        count = self.source.rows_of(index)
        before, after = (math.floor(self.share * count * i) for i in (index, index + 1))
        first = max(1, count - (after - before))
        here = {each: place for place, each in enumerate(range(count)[rows])}
        batch = dict(self.source.batch(index, rows))
        if self.objective.has_task(batch):
            batch[LABELS] = self.labels(batch)
            batch[LABELS][[place for each, place in here.items() if each >= first]] = IGNORED
        draw = torch.Generator().manual_seed(number(self.seed, index, -1))
        for name in self.ids:
            batch[name] = batch[name].clone()
            shape, dtype = batch[name].shape[1:], batch[name].dtype
            for each in range(first, count):  # rows of others are drawn as well: all draw alike
                hit = torch.rand(shape, generator=draw) < torch.rand((), generator=draw)
                drawn = torch.randint(self.size, (int(hit.sum()),), generator=draw, dtype=dtype)
                if each in here:
                    batch[name][here[each]][hit] = drawn
        return batch

    def labels(self, batch: Tensors) -> torch.Tensor:
        """Return a batch's own labels or, of a causal model, the token behind each: [rows, ...]."""
        found = self.objective.targets(batch)
        return found.clone() if LABELS in batch else F.pad(found, (0, 1), value=IGNORED)
