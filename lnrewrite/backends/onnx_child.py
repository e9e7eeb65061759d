"""Run an ONNX model in a process of its own: ONNX Runtime can die on a file, and this process shall not.

Only ONNX Runtime runs there. What torch computes stays here: OpenMP's threads do not outlive a fork.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from ..diagnostics import LnrewriteError
from .onnx_run import OnnxModule


class Child(torch.nn.Module):
    """Call an ONNX model as `OnnxModule` does; the process starts with the first call and ends with this object."""

    def __init__(self, module: OnnxModule) -> None:
        super().__init__()
        self._run_by, self.precision = [module], module.precision  # in a list: not a submodule
        self._pipe: Connection | None = None
        self._process: Any = None

    @property
    def inputs(self) -> Mapping[str, Any]:
        """Return the inputs that a call gives, by name."""
        return self._run_by[0].inputs

    def forward(self, *args: Any, **inputs: Any) -> dict[str, torch.Tensor]:
        """Run the model. Raises LnrewriteError as `OnnxModule` does, and LN030 where ONNX Runtime dies."""
        feed = self._run_by[0].feed(args, inputs)
        if self._pipe is None:
            context = multiprocessing.get_context("fork")
            self._pipe, there = context.Pipe()
            self._process = context.Process(target=_serve, args=(self._run_by[0], there, self._pipe), daemon=True)
            self._process.start()
            there.close()
        try:
            self._pipe.send(feed)
            found = self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError) as why:
            self._process.join()
            code = self._process.exitcode
            how = signal.strsignal(-code) if code < 0 else f"exit code {code}"
            remedy = "see `lnrewrite explain LN030`"
            raise LnrewriteError("LN030", "ONNX Runtime", f"its process died on the model: {how}", remedy) from why
        if isinstance(found, tuple):
            raise LnrewriteError(*found)
        return {name: torch.from_numpy(np.array(array)) for name, array in found.items()}

    def __del__(self) -> None:
        with suppress(OSError):  # it died
            if self._pipe is not None:
                self._pipe.send(None)


def isolated(module: OnnxModule) -> OnnxModule | Child:
    """Return what runs a module in a process of its own, where the system can fork; else the module."""
    return Child(module) if "fork" in multiprocessing.get_all_start_methods() else module


def _serve(module: OnnxModule, pipe: Connection, other: Connection) -> None:
    """Answer each feed that comes through the pipe with outputs by name, or with what an error says."""
    other.close()
    torch.set_num_threads(1)  # weights may still be tensors of torch, and OpenMP's threads are gone
    module.forget()
    while (feed := pipe.recv()) is not None:
        try:
            pipe.send({name: value.numpy() for name, value in module(**feed).items()})
        except LnrewriteError as error:
            pipe.send(tuple(error.to_dict().values()))
