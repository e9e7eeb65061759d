"""Hold ONNX Runtime's sessions for another process: ONNX Runtime can die on a file, and its user shall not.

This file is run as a script too; it needs numpy and onnxruntime alone. A message is a line of JSON, which names arrays
with their types and shapes, and behind it their bytes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from typing import Any, BinaryIO

import numpy as np

Arrays = dict[str, np.ndarray]
LEVELS = ("ORT_ENABLE_ALL", "ORT_ENABLE_EXTENDED")
"""How much a session may change of a model, the most first."""
AS_IT_IS = ("ORT_DISABLE_ALL",)
"""Of a session that is to say what a model computes: a fused norm takes 1e-5 for an eps that is stored in float64."""
SPARE, PER_BYTE, PER_INPUT = 1 << 30, 16, 256
"""Bytes that a model may take: half of what is free, or so many, and more for each byte of its weights and inputs."""


def send(to: BinaryIO, said: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Write a message."""
    held = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    rows = [[name, array.dtype.str, array.shape] for name, array in held.items()]
    to.write(json.dumps({**said, "arrays": rows}).encode() + b"\n")
    for array in held.values():
        to.write(array.reshape(-1).view(np.uint8))  # type: ignore[call-overload]  # a buffer
    to.flush()


def receive(source: BinaryIO) -> tuple[dict[str, Any], Arrays]:
    """Read a message. Raises EOFError where the other side has gone."""
    if not (line := source.readline()):
        raise EOFError
    said, arrays = json.loads(line), {}
    for name, dtype, shape in said.pop("arrays"):
        content = source.read(size := prod(shape) * np.dtype(dtype).itemsize)
        if len(content) < size:
            raise EOFError
        arrays[name] = np.frombuffer(content, dtype).reshape(shape)
    return said, arrays


def opened(model: str | bytes, level: str, library: str | None) -> Any:
    """Return a session on the CPU of a file's path or content, `library` of operators. Raises what its maker does."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    if library:
        options.register_custom_ops_library(library)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def outputs(session: Any, feed: Mapping[str, np.ndarray]) -> Arrays:
    """Run a session and return what it gives, by name. Raises TypeError for what is not an array of numbers."""
    names, found = [value.name for value in session.get_outputs()], {}
    for name, value in zip(names, session.run(None, dict(feed)), strict=True):
        if not isinstance(value, np.ndarray | np.generic) or value.dtype.hasobject:
            raise TypeError(f"output {name} is not a tensor of numbers")
        found[name] = np.asarray(value)
    return found


def bounded(more: int) -> None:
    """Make this process take half of the free memory, or so many more bytes, where the system counts them (Linux)."""
    with suppress(ImportError, OSError, StopIteration, ValueError):
        import resource

        used, free = counted("/proc/self/status", "VmData:"), counted("/proc/meminfo", "MemAvailable:")
        more = max(more, free // 2)
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        wanted = used + more if hard == resource.RLIM_INFINITY else min(used + more, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))


def counted(path: str, name: str) -> int:
    """Return the bytes that a line of the system's tells. Raises StopIteration where there is none."""
    with open(path) as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))


Held = dict[int, tuple[Any, int]]
"""Sessions by number, each with the bytes of its weights."""


def serve(source: BinaryIO, to: BinaryIO) -> None:
    """Open, run and forget sessions as messages say, until there are none; answer with outputs or with what failed."""
    sessions: Held = {}
    send(to, {}, {})  # ready
    with suppress(EOFError):
        while True:
            send(to, *answer(sessions, *receive(source)))


def answer(sessions: Held, said: Mapping[str, Any], arrays: Arrays) -> tuple[dict[str, str], Arrays]:
    """Do what a message says. Return why it failed, or the outputs."""
    for number in said["forget"]:
        sessions.pop(number, None)
    try:
        if "level" in said:
            bounded(SPARE + PER_BYTE * said["bytes"])
            model = said["path"] or arrays.pop("model").tobytes()
            sessions[said["session"]] = opened(model, said["level"], said["library"]), said["bytes"]
            return {}, {}
        session, size = sessions[said["session"]]
        bounded(SPARE + PER_BYTE * size + PER_INPUT * sum(array.nbytes for array in arrays.values()))
        return {}, outputs(session, arrays)
    except Exception as why:  # ONNX Runtime has no common base class of its errors
        return {"why": str(why) or type(why).__name__}, {}


def main() -> None:
    """Serve on stdin and stdout; what is printed here goes to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    to = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    import onnxruntime  # noqa: F401  # what fails to load does so before there is an answer

    serve(sys.stdin.buffer, to)


if __name__ == "__main__":
    main()
