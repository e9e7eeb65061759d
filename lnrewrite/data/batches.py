"""Turn DATA into batches that fit a model: arrays, an importable iterable, windows of tokens, or random stand-ins.

A batch is a dict of keyword tensors like the model's example inputs. Everything is checked against that example first,
so that a wrong name or shape is reported here, in the user's words, and not deep inside a forward.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..backends.inputs import DTYPES, Tensors, as_tensor, check, check_numbers, draw_one, spec_of
from ..backends.torch.fixed import elsewhere, other_path
from ..errors import Code, LnrewriteError, code_of_others, words
from ..files.output import named_path
from ..ir.inputs import Content, InputSpec, content_of
from ..loading.open import import_object
from ..loading.transformers import Tokenizer
from ..pipeline import protocols
from .files import read_tensors

BATCH = 8  # samples of a batch, where the model leaves their number free
LENGTH = 128  # tokens of a text sample, where the model leaves their number free
LIMIT = 1024  # batches; an endless iterable ends here
ARRAYS = (".npz", ".npy", ".pt", ".safetensors")
"""The files whose arrays are batches; `data.corpus` reads text and tokens."""


class Loads(Protocol):
    """Describe what gives a tokenizer of transformers when it is asked to."""

    def load(self) -> Any: ...


class HasSpec(Protocol):
    """Describe what a program says of the data that it reads."""

    @property
    def spec(self) -> InputSpec: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    def call(self, batch: protocols.Batch) -> object: ...


@dataclass(frozen=True)
class Data:
    """Hold what DATA names, and what the model that reads it is called with.

    name: a file, or `pkg.module:iterable`. tokenizer: cuts text into tokens, or the folder that holds one; without it
    `byte_level` says that text is read byte by byte. length: tokens of a window cut from a text; None takes the
    example's where that is fixed, else 128. end: the id behind which another document starts, and positions count from
    0 again; None where they do not.
    """

    name: str
    spec: InputSpec
    tokenizer: Loads | str | None = None
    byte_level: bool = False
    length: int | None = None
    end: int | None = None

    @classmethod
    def of(cls, program: HasSpec, name: str, length: int | None = None) -> Data:
        """Return DATA as a program reads it: bytes, where its one input of ids has 256 rows and it has no tokenizer."""
        spec = program.spec
        byte_level = list(spec.vocabularies.values()) == [256] and not program.tokenizer
        return cls(name, spec, program.tokenizer, byte_level, length)

    def bad(self, why: str, remedy: str) -> LnrewriteError:
        """Return the error for data that cannot be read, or do not fit."""
        return LnrewriteError(Code.LN022, f"data {self.name!r}", why, remedy)

    @property
    def importable(self) -> bool:
        """Return whether DATA names a Python object rather than a file."""
        return ":" in self.name and not os.path.exists(named_path(self.name))

    def file(self, suffixes: Sequence[str]) -> Path:
        """Return the file that DATA names. Raises LnrewriteError LN022 where there is none, or of none of the forms."""
        path = named_path(self.name)
        check_file(self.name)
        if path.suffix not in suffixes:
            known = ", ".join(suffixes)
            raise self.bad(f"{path.suffix or 'no suffix'} is not a known form of data", f"give one of {known}")
        return path

    def batches(self, limit: int = LIMIT, least: int = 1) -> list[Tensors]:
        """Read at most `limit` batches of arrays, and `least` where there are samples for as many and their number is
        free; or those of an iterable. Raises LnrewriteError LN022.
        """
        if self.importable:
            return [self.fitted(item) for item in self.imported(limit)]
        held = read_tensors(self.file(ARRAYS), Code.LN022)
        if isinstance(held, Tensor) and held.dim() == 1 and self.tokens(held):  # it may be long, and is on the disk
            held = held[: limit * self.rows * self.window]
        return self.cut(self.fitted(held), least)[:limit]

    def fitted(self, held: object) -> Tensors:
        """Return what a file or an item of an iterable holds as the model takes it; the first axis counts samples."""
        what = f"data {self.name!r}"
        if self.tokens(held):
            held = self.of_ids(self.windows(as_tensor(held, what)))
        found = check(self.spec.of_samples(), held if isinstance(held, Mapping | tuple | list) else [held], what)
        check_numbers(self.spec, found, what)
        return found

    def check_run(self, run: Callable[[Tensors], object], batch: Tensors) -> None:
        """Raise LnrewriteError LN022 where `run` fails on a batch, LN033 where that takes another path."""
        try:
            run(batch)
        except (RuntimeError, IndexError, ValueError, AssertionError) as error:
            if path := other_path(error):
                raise elsewhere(f"data {self.name!r}", path) from error
            shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in batch.items())
            why = f"the model fails on {shapes}: {words(error).partition(chr(10))[0]}"
            remedy = "give inputs that the model takes, no longer than its context (heal: --length)"
            raise self.bad(why, remedy) from error

    def settled(self, run: Callable[[Tensors], object]) -> Data:
        """Return DATA with the longest window of `lengths` that `run` takes, or as it is: that is tried on id 0."""
        if len(self.lengths) == 1 or not self.spec.vocabularies:  # there is none to choose
            return self
        for length in self.lengths:
            try:
                run(self.of_ids(torch.zeros(self.rows, length, dtype=torch.int64)))
            except (RuntimeError, IndexError, ValueError, AssertionError) as error:
                if other_path(error):
                    break
            except LnrewriteError:  # an input that does not follow from ids
                break
            else:
                return self if length == self.window else replace(self, length=length)
        return self

    def tokens(self, held: object) -> bool:
        """Return whether an array is one of tokens that are to be cut, or from which other inputs follow."""
        if len(self.spec.vocabularies) != 1 or not isinstance(held, Tensor | np.ndarray):
            return False
        (name,) = self.spec.vocabularies
        cut = held.ndim == 1 < len(self.spec[name].dims)
        return (cut or len(self.spec.inputs) > 1) and not as_tensor(held, self.name).is_floating_point()

    def windows(self, tokens: Tensor) -> Tensor:
        """Return tokens as rows; a long run int[count] is cut."""
        if tokens.dim() > 1:
            return tokens
        if len(tokens) < self.window:
            raise self.bad(f"it is shorter than one window of {self.window} tokens", "give more tokens")
        return tokens[: len(tokens) // self.window * self.window].reshape(-1, self.window)

    @property
    def fixed(self) -> bool:
        """Return whether the model takes batches of one size alone."""
        return any(each.dims and 0 not in each.free for each in self.spec)

    @property
    def rows(self) -> int:
        """Return how many samples a batch has where there are enough of them."""
        fixed = [each.shape[0] for each in self.spec if each.dims and 0 not in each.free]
        return min(fixed) if fixed else max([BATCH, *(each.shape[0] for each in self.spec if each.dims)])

    def cut(self, arrays: Tensors, least: int) -> list[Tensors]:
        """Split arrays along axis 0; a remainder that a fixed batch size cannot hold is left out."""
        counts = {name: len(t) if t.dim() else 1 for name, t in arrays.items()}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{name} {count}" for name, count in counts.items())
            why = f"the arrays differ in their number of samples: {listed}"
            raise self.bad(why, "give every input the same number")
        fixed, total = self.fixed, next(iter(counts.values()))
        size = self.rows if fixed else max(1, min(self.rows, -(-total // least)))
        if fixed and total < size:
            raise self.bad(f"it holds {total} samples and the model takes batches of {size}", "give more samples")
        starts = range(0, total - size + 1 if fixed else total, size)
        return [{name: t[s : s + size] for name, t in arrays.items()} for s in starts]

    def imported(self, limit: int | None = None) -> Iterator[object]:
        """Yield what `pkg.module:name` gives: an iterable, or a callable that returns one."""
        source = import_object(self.name, Code.LN022)
        with code_of_others(lambda why: self.bad(f"it gives no batches: {why}", "name an iterable of batches")):
            items: Iterable[object] = source() if callable(source) and not isinstance(source, Iterable) else source
            iterator = iter(items)
        count = 0
        while limit is None or count < limit:
            with code_of_others(self._raised(count)):
                item = next(iterator, END)
            if item is END:
                break
            yield item
            count += 1
        if not count:
            raise self.bad("it gives no batches", "name a list or a function: an iterator can be read only once")

    def _raised(self, number: int) -> Callable[[str], LnrewriteError]:
        return lambda why: self.bad(f"batch {number} raised {why}", "check the iterable")

    @property
    def window(self) -> int:
        """Return how many tokens a sample of a text has: `length`, else the example's where it is fixed, else 128."""
        return self.lengths[0]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return how many tokens a sample of a text may have, the best first: see `settled`."""
        ids = next((each for each in self.spec if "float" not in each.dtype and len(each.dims) == 2), None)
        if ids is None or 1 in ids.free:
            return (self.length,) if self.length else tuple(LENGTH >> halved for halved in range(5))
        return (self.length or ids.shape[1],)

    def of_ids(self, rows: Tensor) -> Tensors:
        """Return all inputs for windows of ids: full attention, a single segment, positions that count up."""
        return {name: rows if len(self.spec.inputs) == 1 else self._input(name, rows) for name in self.spec.names}

    def _input(self, name: str, rows: Tensor) -> Tensor:
        content, wanted = content_of(name, "int64"), self.spec[name]
        if wanted.content is Content.VALUES and "past" in name and wanted.free.keys() - {0}:  # a cache begins empty
            sizes = [0 if axis in wanted.free else size for axis, size in enumerate(wanted.shape)]
            return torch.zeros(len(rows), *sizes[1:], dtype=DTYPES[wanted.dtype])
        if content is Content.MASK:
            return torch.ones_like(rows)
        if content is Content.TYPE:
            return torch.zeros_like(rows)
        if content is Content.POSITION:
            return _positions(rows, self.end)
        if name.endswith(("ids", "tokens")):
            return rows
        raise self.bad(f"tokens give no values for the input {name}", "give all inputs, as .npz or .pt")


def _positions(rows: Tensor, end: int | None) -> Tensor:
    """Return positions that count up in each row of ids [rows, length], from 0 again behind every `end`."""
    places = torch.arange(rows.shape[1]).expand_as(rows)
    if end is None:
        return places
    starts = torch.zeros_like(places)
    starts[:, 1:] = torch.where(rows[:, :-1] == end, places[:, 1:], 0)
    return places - starts.cummax(1).values


END = object()
"""Nothing is left of an iterable."""


def check_file(name: str) -> None:
    """Raise LnrewriteError LN022 where DATA names no file."""
    if not os.path.isfile(path := named_path(name)):
        why = "it is a folder" if os.path.isdir(path) else "no such file"
        raise LnrewriteError(Code.LN022, f"data {name!r}", why, "give the path of a file, or name pkg.module:iterable")


def synthetic(
    example: Mapping[str, object],
    vocabulary: Mapping[str, int] | None = None,
    batches: int = 8,
    seed: int = 0,
    keep: bool = False,
) -> list[Tensors]:
    """Draw `batches` random batches shaped like `example`, the same ones for the same seed.

    Floats are normal; integers are uniform below `vocabulary[name]`, by default up to the largest id of the example;
    masks, token types and positions are the example's own, and with `keep` all integers without a vocabulary. What is
    not a tensor is left out.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: value for name, value in example.items() if isinstance(value, Tensor)}
    spec = spec_of(tensors, {}, vocabulary)

    def drawn(name: str, tensor: Tensor) -> Tensor:
        like = spec[name]
        number = tensor.is_floating_point() or tensor.is_complex()
        own = not number and (like.content is not Content.IDS or (keep and not like.rows))
        if own or not tensor.numel():
            return tensor.clone()
        rows = 0 if number else like.rows or int(tensor.max()) + 1
        return draw_one(replace(like, rows=rows), generator).to(tensor.device)

    return [{name: drawn(name, tensor) for name, tensor in tensors.items()} for _ in range(batches)]
