"""One command by the processes that torchrun started: they share calibration data, and the first speaks for all."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import Code, UsageError
from ..loading.source import Format, Source
from ..quiet import LOGGER

if TYPE_CHECKING:
    from ..pipeline.driver import Pipeline
    from ..pipeline.shares import Shares


def many() -> int:
    """Return how many processes torchrun started, of which this is one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def number() -> int:
    """Return which of them this is; the first, 0, speaks and writes."""
    return int(os.environ.get("RANK", "0")) if many() > 1 else 0


@contextmanager
def joined(source: Source, pipeline: Pipeline, host: str | None) -> Iterator[Shares]:
    """Yield the processes that share the data of a rewrite. Raises UsageError LN040 for what one alone has to do."""
    from ..pipeline.shares import Shares

    if many() == 1:
        yield Shares()
        return
    looks = [item.name for item in pipeline.passes if item.needs_data and not getattr(item, "shares", False)]
    why = (
        "an ONNX file is calibrated by one" if source.format is Format.ONNX or source.graphs
        else "a stock architecture is written by one" if host
        else f"{looks[0]} looks at all of the data at once" if looks
        else ""
    )  # fmt: skip
    if why:
        raise UsageError(Code.LN040, f"{many()} processes", why, "start it without torchrun")
    from ..backends.torch.processes import Processes

    if number():
        LOGGER.setLevel(logging.ERROR)
    with Processes.joined(source.how.device) as found:
        yield found
