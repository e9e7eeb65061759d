"""Open ONNX models in a process that may die: one a process that asks, started by its first model."""

from __future__ import annotations

import atexit
import itertools
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, cast

import numpy as np

from . import server as onnx_server
from .server import Arrays, receive, send


class Died(Exception):
    """Signal that ONNX Runtime's process died, and of what."""


class Failed(Exception):
    """Signal what ONNX Runtime says against a model, a library or inputs."""


class Server:
    """Talk to one process. Raises OSError or EOFError where none can be started."""

    def __init__(self) -> None:
        command, pipe = [sys.executable, "-P", onnx_server.__file__], subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        self._to, self._source = cast(BinaryIO, self._process.stdin), cast(BinaryIO, self._process.stdout)
        self._turn, self._numbers = threading.Lock(), itertools.count()
        self.died, self.unused = "", list[int]()
        receive(self._source)
        atexit.register(self._end)

    def ask(self, said: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Arrays:
        """Send a message and return the arrays of the answer."""
        with self._turn:
            if self.died:
                raise Died(self.died)
            forget = [self.unused.pop() for _ in range(len(self.unused))]
            try:
                send(self._to, {**said, "forget": forget}, arrays)
                answer, found = receive(self._source)
            except (EOFError, OSError) as error:
                self.died = self._how()
                raise Died(self.died) from error
            except BaseException:  # Ctrl-C, between a question and its answer
                self._process.kill()
                self._how()
                self.died = "it was stopped"
                raise
        if "why" in answer:
            raise Failed(answer["why"])
        return found

    def number(self) -> int:
        """Return a number that no session has."""
        return next(self._numbers)

    def _how(self) -> str:
        code = self._process.wait()
        return signal.strsignal(-code) or f"signal {-code}" if code < 0 else f"exit code {code}"

    def _end(self) -> None:
        with suppress(OSError):
            self._to.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)


class RemoteSession:
    """Run a model in ONNX Runtime on the CPU.

    model: a file's path or content; size: bytes of its weights, which bound its memory; level: one of
    `onnx_server.LEVELS`; library: of operators. Raises Failed where ONNX Runtime refuses it, Died where it dies. Where
    no process can be started it runs in this one.
    """

    def __init__(self, model: str | bytes, size: int, level: str, library: str | None = None) -> None:
        self.level, self._process = level, os.getpid()
        self._server = _server(self._process)
        if self._server is None:
            with _failing():
                self._here = onnx_server.opened(model, level, library)
            return
        self._number = self._server.number()
        said = {"session": self._number, "bytes": size, "level": level, "library": library}
        content = {"model": np.frombuffer(model, np.uint8)} if isinstance(model, bytes) else {}
        self._server.ask({**said, "path": "" if content else model}, content)
        weakref.finalize(self, self._server.unused.append, self._number).atexit = False

    @property
    def gone(self) -> bool:
        """Return whether the process died, or is another one's: then the model is to be opened again."""
        return self._server is not None and (bool(self._server.died) or self._process != os.getpid())

    def __call__(self, feed: Mapping[str, np.ndarray]) -> Arrays:
        """Return the outputs by name. Raises Failed, or Died."""
        if self._server is None:
            with _failing():
                return onnx_server.outputs(self._here, feed)
        return self._server.ask({"session": self._number}, feed)


@contextmanager
def _failing() -> Iterator[None]:
    """Raise Failed for what ONNX Runtime raises: it has no common base class of its errors."""
    try:
        yield
    except Exception as why:
        raise Failed(str(why) or type(why).__name__) from why


_running: dict[int, Server | None] = {}


def _server(process: int) -> Server | None:
    """Return the living server of a process (a fork has one of its own); None where none can be started."""
    held = _running.get(process)
    if process not in _running or (held is not None and held.died):
        _running[process] = None
        with suppress(OSError, EOFError, TypeError, ValueError):
            if not getattr(sys, "frozen", False):  # else the interpreter is an application
                _running[process] = Server()
    return _running[process]
