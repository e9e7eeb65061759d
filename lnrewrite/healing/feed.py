"""Feed a training run: every batch is a function of seed and step alone, so that a run can go on where it stopped."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ..data.batches import (
    bad,
    batches_for,
    check_ids,
    file_of,
    fitted,
    importable,
    imported,
    named,
    reads_bytes,
    text_input,
    text_rows,
    window_of,
)
from ..data.files import read_tensors
from ..errors import Code, LnrewriteError
from ..models.program import Program

Rows = dict[str, Tensor]

LABELS = "labels"
"""The key of targets in a batch, where the model takes no input of that name: [batch, ...], -100 for none."""

HELD_OUT = 0.05
"""The share of the data that nothing is trained on; the end of a text, the last rows of arrays."""

WIDE = 32
"""Rows of a batch that is only measured, where the model takes any number."""

ROWS = 256
"""At most so many rows are held out; of an iterable, its first eight batches."""


def number(*key: int) -> int:
    """Return a seed of 32 bits, as many as torch's generator looks at, for a seed and what it is drawn for."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=4).digest())


def inputs_of(batch: Rows) -> Rows:
    """Return what of a batch goes into the model: all but labels."""
    return {n: t for n, t in batch.items() if n != LABELS}


def chunks(rows: Rows, size: int) -> list[Rows]:
    """Cut rows into batches of one size; a remainder is left out, unless it is all that there is."""
    count = min(len(t) for t in rows.values())
    starts = range(0, max(count - size, 0) + 1, size)
    return [{n: t[i : i + size] for n, t in rows.items()} for i in starts]


class Feed(ABC):
    """Give batches of `rows` rows by number, the same ones for the same seed, and rows that are never trained on."""

    held_out: list[Rows]

    @abstractmethod
    def batch(self, index: int) -> Rows:
        """Return the batch of that number; numbers are asked for in rising order."""


class Windows(Feed):
    """Cut windows of `length` tokens out of one long run of tokens int[count], each at a random place."""

    def __init__(
        self, tokens: Tensor, wanted: Mapping[str, Tensor], rows: int, wide: int, length: int, seed: int, name: str
    ) -> None:
        if len(tokens) < 4 * length:
            why = f"it holds {len(tokens)} tokens, and training takes at least four windows of {length}"
            raise bad(name, why, "give a longer text, or shorter windows (--length)")
        kept = max(length, min(int(len(tokens) * HELD_OUT), ROWS * length)) // length * length
        self.tokens, self.rest = tokens[:-kept], tokens[-kept:]
        self.wanted, self.rows, self.length, self.seed, self.name = wanted, rows, length, seed, name
        ends = torch.as_tensor(self.rest).long().reshape(-1, length)
        self.held_out = chunks(self._inputs(ends), wide)

    def batch(self, index: int) -> Rows:
        draw = torch.Generator().manual_seed(number(self.seed, index))
        starts = torch.randint(len(self.tokens) - self.length + 1, (self.rows,), generator=draw).tolist()
        return self._inputs(torch.stack([self.tokens[s : s + self.length].long() for s in starts]))

    def _inputs(self, ids: Tensor) -> Rows:
        many = len(self.wanted) > 1
        return {n: text_input(self.name, n, ids) if many else ids for n in self.wanted}


class Arrays(Feed):
    """Give rows of arrays [count, ...], reshuffled every time that all were seen."""

    def __init__(self, arrays: Rows, rows: int, wide: int, seed: int, name: str) -> None:
        counts = {n: len(t) for n, t in arrays.items()}
        count = min(counts.values())
        if len(set(counts.values())) > 1:
            why = f"the arrays differ in their number of samples: {counts}"
            raise bad(name, why, "give every input the same number")
        kept = min(max(int(count * HELD_OUT), 1), ROWS)
        if count - kept < rows:
            why = f"it holds {count} samples, {kept} are held out and a batch takes {rows}"
            raise bad(name, why, "give more samples, or smaller batches (--batch-size)")
        self.arrays, self.rows, self.seed, self.count = arrays, rows, seed, count - kept
        self.held_out = chunks({n: t[self.count :] for n, t in arrays.items()}, wide)
        self.order = -1, torch.empty(0)

    def batch(self, index: int) -> Rows:
        epoch, place = divmod(index, self.count // self.rows)
        if self.order[0] != epoch:
            draw = torch.Generator().manual_seed(number(self.seed, epoch))
            self.order = epoch, torch.randperm(self.count, generator=draw)
        chosen = self.order[1][place * self.rows : (place + 1) * self.rows]
        return {n: t[chosen] for n, t in self.arrays.items()}


class Stream(Feed):
    """Pass on the batches of an iterable, from its start again where it ends; the first ones are held out."""

    def __init__(self, source: Callable[[], Iterator[Rows]], name: str) -> None:
        self.source, self.name = source, name
        self.next = 0
        self.held_out = list(islice(source(), 8))
        if not self.held_out:
            raise bad(name, "it gives no batches", "give more than eight")

    @cached_property
    def _endless(self) -> Iterator[Rows]:
        def again() -> Iterator[Rows]:
            while True:
                empty = True
                for batch in islice(self.source(), len(self.held_out), None):
                    empty = False
                    yield batch
                if empty:
                    raise bad(self.name, "no batch is left to train on", "give more than eight batches")

        return again()

    def batch(self, index: int) -> Rows:
        if index < self.next:
            del self._endless
            self.next = 0
        found = next(islice(self._endless, index - self.next, None))
        self.next = index + 1
        return found


def open_feed(data: Any, program: Program, rows: int, length: int | None, seed: int) -> Feed:
    """Make a feed of DATA: text, token arrays, arrays of rows, `pkg.module:iterable`, or an iterable of batches.

    Raises LnrewriteError LN022 where the data do not fit the model: inputs, shapes, vocabulary, too short a text.
    """
    wanted = {n: t for n, t in program.example_inputs().items() if isinstance(t, Tensor)}
    free, limits = program.dynamic_axes(), program.id_limits()
    wide = max(rows, WIDE) if all(0 in free.get(n, {}) for n in wanted) else rows
    name = data if isinstance(data, str) else "data"

    def checked(batch: Any) -> Rows:
        held = dict(batch) if isinstance(batch, Mapping) else batch
        extra = {LABELS: held.pop(LABELS)} if isinstance(held, dict) and LABELS in held and LABELS not in wanted else {}
        whole = named(name, held, wanted)
        found = {n: fitted(name, n, whole[n], wanted[n], free) for n in wanted} | extra
        check_ids(name, limits, found)
        return found

    if not isinstance(data, str):
        return Stream(_walk(data, checked), name)
    if importable(data):
        return Stream(lambda: map(checked, imported(data)), name)
    path, width = file_of(data), window_of(wanted, free, length)
    if path.suffix == ".txt":
        if reads_bytes(program):
            return Windows(
                torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8), wanted, rows, wide, width, seed, name
            )
        return Arrays(checked(text_rows(name, path, wanted, program.tokenizer, False, width)), rows, wide, seed, name)
    held = read_tensors(path, Code.LN022)
    if isinstance(held, dict) and len(held) == 1:
        held = next(iter(held.values()))
    if isinstance(held, Tensor) and held.dim() == 1 and not held.is_floating_point() and len(limits) == 1:
        check_ids(name, limits, dict.fromkeys(limits, held))
        return Windows(held, wanted, rows, wide, width, seed, name)
    return Arrays(checked(held), rows, wide, seed, name)


def held_out_of(data: str, program: Program, length: int | None, seed: int) -> list[Rows]:
    """Read other DATA to measure on: at most 1024 rows of a file, or the first batches of an iterable."""
    if importable(data):
        return open_feed(data, program, 8, length, seed).held_out
    return batches_for(program, data, seed, length=length, limit=1024 // 8)


def _walk(data: Any, checked: Callable[[Any], Rows]) -> Callable[[], Iterator[Rows]]:
    """Return what walks a user's batches from the start."""
    if isinstance(data, Mapping) or not (callable(data) or isinstance(data, Iterable)):
        raise LnrewriteError(
            Code.LN022, "data", f"a {type(data).__name__} is no iterable of batches", "give a list of dicts"
        )
    if isinstance(data, Iterator):
        data = list(data)
    return lambda: map(checked, data() if callable(data) else data)
