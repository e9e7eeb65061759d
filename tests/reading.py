"""Read DATA for a model that is known by an example of its inputs alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lnrewrite.backends.inputs import FreeAxes, Tensors, spec_of
from lnrewrite.data.batches import LIMIT, Data, Loads
from lnrewrite.data.calibration import read_batches


def load_data(
    data: str,
    example: Mapping[str, object],
    tokenizer: Loads | str | None = None,
    seed: int = 0,
    *,
    dynamic: FreeAxes | None = None,
    byte_level: bool = False,
    length: int | None = None,
    limit: int = LIMIT,
    least: int = 1,
) -> list[Tensors]:
    """Read at most `limit` batches of keyword tensors named and shaped like `example`.

    dynamic: the axes of each input whose size is free; None: every batch axis and every axis of whole numbers is, and
    a window of a text is as long as the example.
    """
    found = Data(data, spec_of(example, dynamic), tokenizer, byte_level, length)
    if dynamic is None:
        found = replace(found, length=replace(found, spec=spec_of(example, {})).window)
    return read_batches(found, seed, limit, least)
