"""Give a training run batches, each a function of seed and step alone, so that a run can go on where it stopped."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor

from ..backends.inputs import Tensors
from ..data.batches import Data

LABELS = "labels"
"""The key of targets in a batch, where the model takes no input of that name: [batch, ...], -100 for none."""

HELD_OUT = 0.05
"""The share of the data that nothing is trained on; the end of a text, the last rows of arrays."""

WIDE, LOGITS = 32, 2**28
"""Rows of a batch that is only measured, where the model takes any number, and how many logits a process holds."""

WHOLE = slice(None)
"""All rows of a batch."""

ROWS = 256
"""At most so many rows are held out; of an iterable, its first eight batches."""


def number(*key: int | str) -> int:
    """Return a seed of 32 bits, as many as torch's generator looks at, for a seed and what it is drawn for."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=4).digest())


def inputs_of(batch: Tensors) -> Tensors:
    """Return what of a batch goes into the model: all but labels."""
    return {n: t for n, t in batch.items() if n != LABELS}


def chunks(rows: Tensors, size: int) -> list[Tensors]:
    """Cut rows into batches of one size; a remainder is left out, unless it is all that there is."""
    count = min(len(t) for t in rows.values())
    starts = range(0, max(count - size, 0) + 1, size)
    return [{n: t[i : i + size] for n, t in rows.items()} for i in starts]


class BatchSource(ABC):
    """Give batches of `rows` rows by number, the same ones for the same seed, and rows that are never trained on.

    `end` is the id behind which a document starts that sees none before it, None where windows are one text.
    `notes` say what a user should know.
    """

    held_out: list[Tensors]
    end: int | None = None
    notes: tuple[str, ...] = ()

    @abstractmethod
    def batch(self, index: int, rows: slice = WHOLE) -> Tensors:
        """Return some rows of the batch of that number, and make no others.

        Rising numbers are cheap, an earlier one may read everything again.
        """

    @abstractmethod
    def rows_of(self, index: int) -> int:
        """Return how many rows the batch of that number has in all."""


class Windows(BatchSource):
    """Cut windows out of one long run of tokens int[count], each at a random place."""

    def __init__(self, tokens: Tensor, data: Data, rows: int, wide: int, seed: int) -> None:
        length = data.window
        if len(tokens) < 4 * length:
            why = f"it holds {len(tokens)} tokens, and training needs at least four windows of {length}"
            raise data.bad(why, "give a longer text, or shorter windows (--length)")
        kept = max(length, min(int(len(tokens) * HELD_OUT), ROWS * length)) // length * length
        self.tokens, self.rest = tokens[:-kept], tokens[-kept:]
        self.data, self.rows, self.length, self.seed, self.end = data, rows, length, seed, data.end
        ends = torch.as_tensor(self.rest).long().reshape(-1, length)
        self.held_out = chunks(data.of_ids(ends), wide)

    def rows_of(self, index: int) -> int:
        return self.rows

    def batch(self, index: int, rows: slice = WHOLE) -> Tensors:
        draw = torch.Generator().manual_seed(number(self.seed, index))
        starts = torch.randint(len(self.tokens) - self.length + 1, (self.rows,), generator=draw)[rows].tolist()
        return self.data.of_ids(torch.stack([self.tokens[s : s + self.length].long() for s in starts]))


class ArraySource(BatchSource):
    """Give rows of arrays [count, ...], reshuffled every time that all were seen.

    Arrays may lie on the disk: of a batch alone `fit` makes what the model takes.
    """

    def __init__(
        self, arrays: Tensors, data: Data, rows: int, wide: int, seed: int, fit: Callable[[Tensors], Tensors] = dict
    ) -> None:
        counts = {n: len(t) for n, t in arrays.items()}
        count = min(counts.values())
        if len(set(counts.values())) > 1:
            why = f"the arrays differ in their number of samples: {counts}"
            raise data.bad(why, "give every input the same number")
        kept = min(max(int(count * HELD_OUT), 1), ROWS)
        if count - kept < rows:
            why = f"it holds {count} samples, {kept} are held out and a batch needs {rows}"
            raise data.bad(why, "give more samples, or smaller batches (--batch-size)")
        self.arrays, self.rows, self.seed, self.count = arrays, rows, seed, count - kept
        self.held_out = chunks(fit({n: t[self.count :] for n, t in arrays.items()}), wide)
        self.fit = fit
        self.order = -1, torch.empty(0)

    def rows_of(self, index: int) -> int:
        return self.rows

    def batch(self, index: int, rows: slice = WHOLE) -> Tensors:
        epoch, place = divmod(index, self.count // self.rows)
        if self.order[0] != epoch:
            draw = torch.Generator().manual_seed(number(self.seed, epoch))
            self.order = epoch, torch.randperm(self.count, generator=draw)
        chosen = self.order[1][place * self.rows : (place + 1) * self.rows][rows]
        return self.fit({n: t[chosen] for n, t in self.arrays.items()})


class IterableSource(BatchSource):
    """Pass on the batches of an iterable, from its start again where it ends; the first ones are held out."""

    def __init__(self, source: Callable[[], Iterator[Tensors]], data: Data) -> None:
        self.source, self.data = source, data
        self.next, self.last = 0, Tensors()
        self.held_out = list(islice(source(), 8))
        if not self.held_out:
            raise data.bad("it gives no batches", "give more than eight")

    @cached_property
    def _endless(self) -> Iterator[Tensors]:
        def again() -> Iterator[Tensors]:
            while True:
                empty = True
                for batch in islice(self.source(), len(self.held_out), None):
                    empty = False
                    yield batch
                if empty:
                    raise self.data.bad("no batch is left to train on", "give more than eight batches")

        return again()

    def rows_of(self, index: int) -> int:
        return min(map(len, self.batch(index).values()))

    def batch(self, index: int, rows: slice = WHOLE) -> Tensors:
        if index != self.next - 1:
            if index < self.next:
                del self._endless
                self.next = 0
            self.last = next(islice(self._endless, index - self.next, None))
            self.next = index + 1
        return {n: t[rows] for n, t in self.last.items()}
