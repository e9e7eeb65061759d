"""Read the DATA that a conversion is fitted to, or that a model is looked at on: at most so many batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from ..backends.inputs import Tensors
from ..pipeline import protocols
from ..pipeline.job import BatchReader
from ..quiet import LOGGER
from .batches import ARRAYS, LIMIT, Data, HasSpec, check_file
from .corpus import FORMS, Corpus, Run

FIELD = "text"
"""What holds the text of a document, in a .jsonl and a .parquet."""

BATCHES, EIGHTHS = 64, 8
"""Of a calibration: its batches at most, and at least where there are the samples: an eighth is held out of a fit."""


def reader_of(
    calibrate: str | Iterable[protocols.Batch] | None, seed: int = 0
) -> tuple[BatchReader | None, str | None]:
    """Return what gives calibration batches for a program, and the name of DATA. Raises LN022 where that is missing."""
    if calibrate is None:
        return None, None
    if not isinstance(calibrate, str):
        batches = list(calibrate)
        return lambda program: batches, None
    check_data(calibrate)

    def read(program: HasSpec) -> list[Tensors]:
        LOGGER.info(f"reading {calibrate}")
        return calibration_for(program, calibrate, seed)

    return read, calibrate


def check_data(data: str) -> None:
    """Raise LN022 where DATA is plainly missing: told before a model is captured."""
    if ":" not in data:
        check_file(data)


def calibration_for(program: HasSpec, name: str, seed: int = 0) -> list[Tensors]:
    """Read DATA for a program, which runs on the first batch. Raises LnrewriteError LN022 where it fails on that.

    A text is cut into windows that the program takes: its context may be shorter than the usual one (`Data.settled`).
    """
    data = Data.of(program, name).settled(program.call)
    batches = read_batches(data, seed, BATCHES, least=EIGHTHS)
    data.check_run(program.call, batches[0])
    return batches


def read_batches(data: Data, seed: int, limit: int = LIMIT, least: int = 1, field: str = FIELD) -> list[Tensors]:
    """Read at most `limit` batches, and `least` where there are samples for as many: see `Data.batches`.

    Text and tokens are read as a training reads them: no more documents than are needed, windows from all over a .bin
    or a text of bytes, in an order that `seed` draws. Each window starts as a text does: with what the tokenizer puts
    before one, where a model may have massive activations (2402.17762). field: what holds the text of a document.
    Raises LnrewriteError LN022.
    """
    if not data.spec.inputs:
        raise data.bad("the model takes no tensors", "run without data")
    if data.importable or data.file(FORMS).suffix in ARRAYS:
        return data.batches(limit, least)
    rows = limit * data.rows
    found = Corpus(data, rows * data.window).read(field)
    assert isinstance(found, Run | dict)
    if isinstance(found, Run):
        first = torch.tensor(found.before[: data.window - 1], dtype=torch.int64)
        tokens = found.tokens[len(first) if found.tokens[: len(first)].tolist() == first.tolist() else 0 :]
        windows = replace(data, length=data.window - len(first)).windows(tokens)
        windows = windows[_order(len(windows), seed)[:rows]].long()
        held = data.of_ids(torch.cat([first.expand(len(windows), -1), windows], 1))
    else:
        held = {name: each[_order(len(each), seed)[:rows]] for name, each in found.items()}
    return data.cut(data.fitted(held), least)[:limit]


def _order(many: int, seed: int) -> Tensor:
    return torch.randperm(many, generator=torch.Generator().manual_seed(seed))
