"""Log as a library does: progress and warnings to one logger, silent until somebody listens.

What other libraries log and warn about is kept off the terminal, unless that logger is at DEBUG (-v).
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator

LOGGER = logging.getLogger("lnrewrite")
LOGGER.addHandler(logging.NullHandler())
TRACE = "TORCH_DTRACE"


@contextlib.contextmanager
def quiet(*libraries: str) -> Iterator[None]:
    """Drop the logs of these libraries (top names such as "torch"), and all warnings, for a while."""
    if LOGGER.isEnabledFor(logging.DEBUG):
        yield
        return
    known = [*libraries, *logging.root.manager.loggerDict]  # torch gives some of its parts handlers of their own
    names = {name for name in known if name.split(".", 1)[0] in libraries}
    loggers = [logging.getLogger(name) for name in sorted(names)]
    handlers = [handler for logger in loggers for handler in logger.handlers]
    before = [logger.propagate for logger in loggers]
    nothing = logging.NullHandler()  # without any handler, logging prints itself
    try:
        for handler in handlers:
            handler.addFilter(_drop)
        for logger in loggers:
            logger.addHandler(nothing)
            logger.propagate = False
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(_drop)
        for logger, propagate in zip(loggers, before, strict=True):
            logger.propagate = propagate
            logger.removeHandler(nothing)


@contextlib.contextmanager
def mute() -> Iterator[None]:
    """Drop what anybody logs below an error, and the handlers that a library gives the root logger meanwhile."""
    disabled, level, handlers = logging.root.manager.disable, logging.root.level, list(logging.root.handlers)
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(disabled)
        logging.root.setLevel(level)
        logging.root.handlers[:] = handlers


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Make draft_export write its trace into a folder that goes at the end, unless TORCH_DTRACE names another."""
    if os.environ.get(TRACE):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="lnrewrite-") as folder:
        os.environ[TRACE] = folder
        try:
            yield
        finally:
            os.environ.pop(TRACE, None)


def _drop(record: logging.LogRecord) -> bool:
    return False
