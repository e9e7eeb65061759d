"""Give a training run batches, each a function of seed and step alone, so that a run can go on where it stopped."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor
from torch.nn import functional as F

from ..backends.inputs import Tensors
from ..backends.torch.fused import IGNORED
from ..data.batches import Data

LABELS, TARGETS = "labels", "the targets"
"""The key of targets in data, where the model takes no input of that name, and in a batch; -100 for none."""

HELD_OUT = 0.05
"""The share of the data that nothing is trained on; the end of a text, the last rows of arrays."""

WIDE, LOGITS = 32, 2**28
"""Rows of a batch that is only measured, where the model takes any number, and how many logits a process holds."""

WHOLE = slice(None)
"""All rows of a batch."""

ROWS, HELD = 256, 8
"""At most so many rows are held out; of an iterable, so many batches, its first ones."""

MEMORY = 1 << 30
"""Bytes of an iterable's batches that are kept in memory, where it gives others whenever it is walked."""

NONE_LEFT = "no batch is left to train on", "give more than eight batches"


def number(*key: int | str) -> int:
    """Return a seed of 32 bits, as many as torch's generator looks at, for a seed and what it is drawn for."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=4).digest())


def inputs_of(batch: Tensors) -> Tensors:
    """Return what of a batch goes into the model: all but labels."""
    return {n: t for n, t in batch.items() if n != TARGETS}


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
    """Pass on the batches of an iterable, from its start again where it ends; the first ones are held out.

    Where another walk gives others (a loader that shuffles), one walk is all that is taken, and what was seen of it is
    kept in memory: of what is held out nothing is trained on, and a batch stays what it was. Many `processes` would
    see different ones: that is refused. So it is where there is only one walk, `once`, of an iterator.
    """

    def __init__(
        self, source: Callable[[], Iterator[Tensors]], data: Data, processes: int = 1, once: bool = False
    ) -> None:
        self.source, self.data, self.once = source, data, once
        self.next, self.last, self.bytes = 0, Tensors(), 0
        before = [] if once else list(islice(source(), HELD))
        self.walk = source()  # after the other: some loaders have one walk at a time
        self.held_out = list(islice(self.walk, HELD))
        if not self.held_out:
            raise data.bad("it gives no batches", "give more than eight")
        self.kept: list[Tensors] | None = [] if once or not all(map(alike, before, self.held_out)) else None
        if self.kept is not None and not once:
            if processes > 1:
                why = "it gives other batches whenever it is walked, so that each process would learn from others"
                raise data.bad(why, "give them in one order (shuffle=False)")
            told = "one walk is kept in memory and gone through again"
            self.notes = (f"the data give other batches whenever they are walked: {told}",)
        elif not once:
            self.walk = iter(())

    @cached_property
    def _endless(self) -> Iterator[Tensors]:
        def again() -> Iterator[Tensors]:
            while True:
                empty = True
                for batch in islice(self.source(), len(self.held_out), None):
                    empty = False
                    yield batch
                if empty:
                    raise self.data.bad(*NONE_LEFT)

        return again()

    def _remembered(self, kept: list[Tensors], index: int) -> Tensors:
        while index >= len(kept) and (batch := next(self.walk, None)) is not None:
            kept.append(batch)
            self.bytes += sum(t.nbytes for t in batch.values())
            if self.bytes > MEMORY:
                what = "it is an iterator" if self.once else "it gives other batches whenever it is walked"
                why = f"{what}, with more batches than are kept in memory (1 GiB)"
                raise self.data.bad(why, "give what walks them in one order: a loader with shuffle=False, a function")
        if not kept:
            raise self.data.bad(*NONE_LEFT)
        return kept[index % len(kept)]

    def rows_of(self, index: int) -> int:
        return min(map(len, self.batch(index).values()))

    def batch(self, index: int, rows: slice = WHOLE) -> Tensors:
        if self.kept is not None:
            return {n: t[rows] for n, t in self._remembered(self.kept, index).items()}
        if index != self.next - 1:
            if index < self.next:
                del self._endless
                self.next = 0
            self.last = next(islice(self._endless, index - self.next, None))
            self.next = index + 1
        return {n: t[rows] for n, t in self.last.items()}


def alike(one: Tensors, two: Tensors) -> bool:
    """Return whether two batches are the same."""
    return one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


class Early(BatchSource):
    """Move labels that stand at their own tokens, as transformers has them, to the token before, which predicts them.

    For causal models: a target is what follows. `lies` says whether labels stand so.
    """

    def __init__(self, source: BatchSource) -> None:
        self.source, self.end = source, source.end
        self.notes = (*source.notes, "labels are the tokens they stand at: each is what the token before it predicts")
        self.held_out = [self.moved(batch) for batch in source.held_out]

    @staticmethod
    def lies(batch: Tensors, ids: str) -> bool:
        """Return whether the labels of a batch are the tokens at their own places, where there are any."""
        if TARGETS not in batch or batch[TARGETS].shape != batch[ids].shape:
            return False
        shown = batch[TARGETS] != IGNORED
        return bool(shown.any()) and torch.equal(batch[TARGETS][shown], batch[ids][shown].to(batch[TARGETS]))

    @staticmethod
    def moved(batch: Tensors) -> Tensors:
        """Return a batch whose labels, where it has any, stand where they are predicted."""
        if TARGETS not in batch:
            return batch
        return batch | {TARGETS: F.pad(batch[TARGETS][:, 1:], (0, 1), value=IGNORED)}

    def rows_of(self, index: int) -> int:
        return self.source.rows_of(index)

    def batch(self, index: int, rows: slice = WHOLE) -> Tensors:
        return self.moved(self.source.batch(index, rows))
