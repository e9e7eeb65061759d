"""Read the DATA that a conversion is fitted to, or that a model is looked at on: at most so many batches."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from ..backends.inputs import Tensors
from ..errors import Code, LnrewriteError
from ..files.output import named_path
from ..pipeline import protocols
from ..pipeline.job import BatchReader
from ..quiet import LOGGER
from .batches import LIMIT, Data, HasSpec
from .corpus import FORMS, Corpus, Run

FIELD = "text"
"""What holds the text of a document, in a .jsonl and a .parquet."""

LONG = (".jsonl", ".parquet", ".bin")
"""The files that are read as a training reads them."""

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
    if ":" not in data and not os.path.isfile(named_path(data)):
        remedy = "check the path, or name pkg.module:iterable"
        raise LnrewriteError(Code.LN022, f"data {data!r}", "no such file", remedy)


def calibration_for(program: HasSpec, name: str, seed: int = 0) -> list[Tensors]:
    """Read DATA for a program and run its module on the first batch. Raises LnrewriteError LN022 where that fails."""
    data = Data.of(program, name)
    batches = read_batches(data, seed, BATCHES, least=EIGHTHS)
    data.check_run(program.call, batches[0])
    return batches


def read_batches(data: Data, seed: int, limit: int = LIMIT, least: int = 1) -> list[Tensors]:
    """Read at most `limit` batches, and `least` where there are samples for as many: see `Data.batches`.

    Documents and tokens in files (`LONG`) are read as a training reads them: no more documents than are needed, windows
    of tokens from all over a .bin, in an order that `seed` draws. Raises LnrewriteError LN022.
    """
    if data.importable or not data.spec.inputs or data.file(FORMS).suffix not in LONG:
        return data.batches(seed, limit, least)
    rows = limit * data.rows
    found = Corpus(data, rows * data.window).read(FIELD)
    assert isinstance(found, Run | dict)
    windows = data.windows(found.tokens) if isinstance(found, Run) else next(iter(found.values()))
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))[:rows]
    if isinstance(found, Run):
        held = data.of_ids(windows[order].long())
    else:
        held = {name: each[order] for name, each in found.items()}
    return data.cut(data.fitted(held), least)[:limit]
