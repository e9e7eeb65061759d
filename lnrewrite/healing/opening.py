"""Open DATA for a training: documents, tokens and arrays that stay on the disk, or batches as somebody makes them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from ..backends.inputs import Tensors, as_tensor, check_numbers
from ..backends.torch.fused import IGNORED
from ..comparison.verifying import logits
from ..data.batches import ARRAYS, Data
from ..data.calibration import read_batches
from ..data.corpus import FORMS, Corpus, Ready, Run
from ..data.documents import is_document, pieces_in
from ..errors import Code, LnrewriteError
from ..ir.inputs import Content
from ..loading.transformers import Tokenizer, tokenizer_in
from ..models.program import Program
from .sources import LABELS, LOGITS, ROWS, TARGETS, WIDE, ArraySource, BatchSource, IterableSource, Windows, chunks

LEAST = 16
"""The batches that all rows make at least, where no number of rows was asked for."""


Items = Callable[[], Iterator[object]]
"""Walks a user's items."""


@dataclass(frozen=True)
class Reading:
    """Say how DATA are read.

    rows: of a batch. length: tokens of a window cut from a text, None the model's. tokenizer: in place of the model's
    own. field: what holds the text of a document, in .jsonl, .parquet and mappings. batches: how many are asked for;
    of documents at most twice their tokens are read. processes: how many share what is measured. run: what runs the
    model, else its module. usual: the rows of a batch where each has so many tokens, else always `rows`.
    """

    rows: int
    length: int | None
    seed: int
    tokenizer: Tokenizer | Ready | None = None
    field: str = "text"
    batches: int = 0
    processes: int = 1
    run: Callable[[Tensors], object] | None = None
    usual: Callable[[int], int] | None = None

    def rows_for(self, arrays: Tensors, program: Program) -> int:
        """Return the rows of a batch of arrays: more of short ones, unless all together are few."""
        ids = [t for n, t in arrays.items() if n in program.spec.vocabularies and t.dim() == 2]
        if not ids or not self.usual:
            return self.rows
        most = len(ids[0]) // LEAST // self.processes * self.processes
        return min(self.usual(ids[0].shape[1]), max(most, self.rows))

    def wide(self, program: Program, data: Data) -> int:
        """Return the rows of a batch that is only measured: of many logits, no more than a process can hold."""
        if not all(0 in each.free for each in program.spec):
            return self.rows
        held = max(1, LOGITS // (data.window * max(program.spec.vocabularies.values(), default=1)))
        return min(max(self.rows, WIDE), held * self.processes)

    def apart(self, program: Program, data: Data, end: int | None) -> Data:
        """Return DATA whose documents do not see each other in a window, where the model can be made so."""
        run = self.run or (lambda batch: _run(program, batch))
        return replace(data, end=end if apart(program, data, end, run) else None)

    def corpus(self, program: Program, name: str) -> Corpus:
        """Return DATA as a program's tokens."""
        data = Data.of(program, name, self.length)
        if self.tokenizer:
            data = replace(data, tokenizer=self.tokenizer, byte_level=False)
        return Corpus(data, (2 * self.batches * self.rows + ROWS) * data.window)


def tokenizer_named(given: object) -> Tokenizer | Ready | None:
    """Return a tokenizer by its folder, or one of transformers as it is. Raises LnrewriteError LN022."""
    if given is None or isinstance(given, Tokenizer | Ready):
        return given
    if not isinstance(given, str | os.PathLike):
        if callable(given):
            return Ready(given)
        why, remedy = f"a {type(given).__name__} is not a tokenizer", "give one of transformers, or its folder"
        raise LnrewriteError(Code.LN022, "tokenizer", why, remedy)
    found = tokenizer_in(folder, False) if (folder := Path(given)).is_dir() else None
    if found is None:
        why = "it holds no tokenizer" if folder.is_dir() else "no such folder"
        remedy = "name the folder that a tokenizer of transformers was saved to"
        raise LnrewriteError(Code.LN022, f"tokenizer {str(given)!r}", why, remedy)
    return found


def open_source(given: object, program: Program, how: Reading) -> BatchSource:
    """Open DATA: documents, tokens, arrays of rows, `pkg.module:iterable`, or an iterable of batches or documents.

    Documents are packed into windows; where the model can be made not to see from one into another, it does not
    (`apart`). Raises LnrewriteError LN022 where the data do not fit the model: inputs, shapes, vocabulary, too short.
    """
    corpus = how.corpus(program, given if isinstance(given, str) else "data")
    data, spec = corpus.data, program.spec
    wide = how.wide(program, data)

    fitted = fitting(data, program)
    if not isinstance(given, str) or data.importable:
        items = _again(given) if not isinstance(given, str) else data.imported
        first, walk, once = _peeked(items, given)
        if not is_document(first, how.field):
            return IterableSource(lambda: map(fitted, walk()), data, how.processes, once)
        found: Run | Tensor | Tensors | list[Tensor] = corpus.documents(pieces_in(walk(), how.field, data.bad))
    else:
        found = corpus.read(how.field)
    if isinstance(found, Run):
        data = how.apart(program, data, found.end)
        windows = Windows(found.tokens, data, how.rows, wide, how.seed)
        if found.end is not None and not str(given).endswith(".txt"):  # which is one
            other = "see each other: the model takes no positions that part them"
            windows.notes = (f"documents of a window {'do not see each other' if data.end is not None else other}",)
        return windows
    alone = len(spec.inputs) == 1
    # what lies on the disk stays there
    if isinstance(found, Tensor) and found.dim() and (alone or data.tokens(found)):
        name = spec.names[0] if alone else next(iter(spec.vocabularies))
        if alone:
            check_numbers(spec, {name: found}, f"data {data.name!r}")
        else:
            corpus.check(found)
        rows = how.rows_for({name: found}, program)
        return ArraySource({name: found}, data, rows, wide, how.seed, lambda batch: data.fitted(batch[name]))
    arrays = fitted(found)
    return ArraySource(arrays, data, how.rows_for(arrays, program), wide, how.seed)


def fitting(data: Data, program: Program) -> Callable[[object], Tensors]:
    """Return what makes a batch of what files and iterables hold: inputs as the model takes them, and labels."""
    spec, labeled = program.spec, list[bool]()

    def fitted(batch: object) -> Tensors:
        held = dict(batch) if isinstance(batch, Mapping) else batch
        if isinstance(held, tuple | list) and len(held) == len(spec.names) + 1 and LABELS not in spec.names:
            held = dict(zip((*spec.names, LABELS), held, strict=True))  # (inputs, labels), as loaders give them
        extra = {}
        has = isinstance(held, dict) and LABELS in held and LABELS not in spec.names
        labeled.extend([has] if not labeled else [])
        if labeled[0] != has:
            raise data.bad("some of its batches hold labels, and others none", "give labels with all or with none")
        if isinstance(held, dict) and has:
            extra = {TARGETS: labels_of(held.pop(LABELS), data)}
        return data.fitted(held) | extra

    return fitted


def labels_of(given: object, data: Data) -> Tensor:
    """Return labels as whole numbers. Raises LnrewriteError LN022 for others, and for negative ones but -100."""
    found = as_tensor(given, data.name)
    if found.is_floating_point() or found.is_complex() or found.dtype is torch.bool:
        raise data.bad(f"its labels are of {found.dtype}", "give whole numbers: classes, and -100 for none")
    if not found.dim():
        raise data.bad("its labels are one number", "give one for each sample")
    found = found.long()  # torch compares no uint16
    if bool(((found < 0) & (found != IGNORED)).any()):
        raise data.bad(f"its labels hold {int(found.min())}", "give classes from 0 up, and -100 for none")
    return found


def held_out_of(name: str, program: Program, how: Reading) -> list[Tensors]:
    """Read other DATA to measure on: at most 1024 rows of a file, 256 windows of documents, eight batches of others."""
    corpus = how.corpus(program, name)
    data = corpus.data
    if data.importable:
        first, walk, _ = _peeked(data.imported, None)
        if not is_document(first, how.field):
            return open_source(name, program, replace(how, rows=8)).held_out
        pieces = pieces_in(walk(), how.field, data.bad)
        return _held_out(replace(corpus, need=ROWS * data.window).documents(pieces), data, program, how)
    whole = data.file(FORMS).suffix in ARRAYS
    if data.byte_level and not whole:
        return read_batches(data, how.seed, 1024 // 8, field=how.field)
    found = replace(corpus, need=ROWS * data.window).read(how.field)
    if whole and not isinstance(found, Run):
        return data.cut(fitting(data, program)(found), 1)[: 1024 // 8]
    assert isinstance(found, Run | dict)
    return _held_out(found, data, program, how)


def _held_out(found: Run | Tensors, data: Data, program: Program, how: Reading) -> list[Tensors]:
    """Return the first windows of documents that were read."""
    if not isinstance(found, Run):
        return chunks({n: t[:ROWS] for n, t in found.items()}, how.wide(program, data))
    data = how.apart(program, data, found.end)
    return chunks(data.of_ids(data.windows(found.tokens)[:ROWS].long()), how.wide(program, data))


def apart(program: Program, data: Data, end: int | None, run: Callable[[Tensors], object] | None = None) -> bool:
    """Return whether documents of one window do not see each other where positions start again behind `end`.

    That is tried: other tokens before an `end` must leave every logit behind it as it is. transformers' decoders are
    built so where they are called with position_ids and without an attention_mask.
    """
    content = [each.content for each in data.spec]
    if end is None or content.count(Content.POSITION) != 1 or content.count(Content.IDS) != 1 or len(content) != 2:
        return False
    ids = next(each for each in data.spec if each.content is Content.IDS)
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(ids.rows, (ids.shape[0], data.window), generator=draw)
    half = data.window // 2
    rows[rows == end] = (end + 1) % ids.rows
    rows[:, half - 1] = end
    other = rows.clone()
    other[:, : half - 1] = (other[:, : half - 1] + 1) % ids.rows
    try:
        with torch.no_grad():
            call = run or (lambda batch: _run(program, batch))
            runs = [logits(call(replace(data, end=end).of_ids(each))) for each in (rows, other)]
    except (RuntimeError, IndexError, ValueError, AssertionError):  # it takes no other positions
        return False
    one, two = runs
    if one is None or two is None:
        return False
    same = torch.allclose(one[:, half:], two[:, half:], rtol=1e-4, atol=1e-5 * float(one.abs().max()))
    return same and not torch.equal(one[:, : half - 1], two[:, : half - 1])


def _run(program: Program, batch: Tensors) -> object:
    module = program.module()
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    return module(**{name: tensor.to(device) for name, tensor in batch.items()})


def _again(data: object) -> Callable[[], Iterator[object]]:
    """Return what walks a user's items from the start."""
    if isinstance(data, Mapping) or not (callable(data) or isinstance(data, Iterable)):
        why = f"a {type(data).__name__} is not an iterable of batches"
        raise LnrewriteError(Code.LN022, "data", why, "give a list of dicts, of texts, or the name of a file")
    return lambda: iter(data() if callable(data) else data)


def _peeked(items: Items, given: object) -> tuple[object, Items, bool]:
    """Return the first of some items, None without any, what walks them all, and whether it can do so only once."""
    walk = items()
    once = isinstance(given, Iterator) or (callable(given) and items() is walk and isinstance(given(), Iterator))
    first = next(walk, None)
    if not once:
        return first, items, False
    rest = chain([] if first is None else [first], walk)
    return first, lambda: rest, True
