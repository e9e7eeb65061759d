"""Rehearse what the data lack: rows of random tokens, on which the student only copies the teacher.

A healing sees few tokens, and what they do not hold drifts. On demo:tinygpt two of 686 held-out windows, tables of
letters that the training windows hardly hold, were most of the gap that was left. Random inputs with the teacher's own
answers keep it in place: pseudorehearsal (Robins, Connection Science 7, 1995).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from .feed import LABELS, Feed, Rows, number
from .losses import IGNORED, Objective

DISTINCT = 32
"""A row holds fewer distinct tokens than this, drawn from the whole vocabulary: they recur, as tokens of a text do."""


class Rehearsed(Feed):
    """Replace the last rows of each batch of `feed`, `share` of them, by random tokens that no task counts.

    limits: the size of the table behind each input of integers; only inputs with the largest one, the vocabulary, are
    replaced. A batch keeps one row of data at least.
    """

    def __init__(self, feed: Feed, share: float, limits: Mapping[str, int], objective: Objective, seed: int) -> None:
        self.feed, self.share, self.objective, self.seed = feed, share, objective, seed
        self.held_out = feed.held_out
        self.size = max(limits.values())
        self.ids = [name for name, limit in limits.items() if limit == self.size]

    def batch(self, index: int) -> Rows:
        batch = dict(self.feed.batch(index))
        rows = len(batch[self.ids[0]])
        first = rows - min(math.ceil(self.share * rows), rows - 1)
        if self.objective.has_task(batch):
            batch[LABELS] = self.labels(batch)
            batch[LABELS][first:] = IGNORED
        draw = torch.Generator().manual_seed(number(self.seed, index, -1))
        for name in self.ids:
            batch[name] = batch[name].clone()
            for row in batch[name][first:]:
                distinct = int(torch.randint(2, DISTINCT, (), generator=draw))
                tokens = torch.randint(self.size, (distinct,), generator=draw)
                row.copy_(tokens[torch.randint(distinct, row.shape, generator=draw)])
        return batch

    def labels(self, batch: Rows) -> torch.Tensor:
        """Return a batch's own labels or, of a causal model, the token behind each: [rows, ...]."""
        if LABELS in batch:
            return batch[LABELS].clone()
        found = torch.full_like(batch[self.objective.ids], IGNORED, dtype=torch.long)
        found[:, :-1] = self.objective.targets(batch)
        return found
