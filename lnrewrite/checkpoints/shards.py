"""Read and write single tensors of safetensors files, from several threads at once, so that no file is ever held whole.

The format (huggingface.co/docs/safetensors): eight bytes for the header's length, a JSON header that maps keys to
dtype, shape and place, then the tensors' bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import torch

from ..loading.foreign import safetensors_header

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
PIECE = 1 << 22
"""How many bytes are read at a time: memory that is used again costs no page faults."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """Hold where one tensor is in a file."""

    path: Path
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    def read(self) -> torch.Tensor:
        """Return the tensor, in memory of its own."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start)
            self.fill(tensor, file)
        return tensor

    def rows(self) -> Iterator[torch.Tensor]:
        """Yield the tensor's rows along its last axis, many at a time, all in the same memory."""
        yield from self._pieces(self.shape[-1] if self.shape else 1)

    def values(self) -> Iterator[torch.Tensor]:
        """Yield the tensor's values as they follow each other, [many], all in the same memory."""
        for piece in self._pieces(1):
            yield piece.reshape(-1)

    def _pieces(self, width: int) -> Iterator[torch.Tensor]:
        count = prod(self.shape) // max(width, 1)
        held = torch.empty((max(1, PIECE // max(1, width * self.dtype.itemsize)), width), dtype=self.dtype)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start)
            for start in range(0, count, len(held)):
                piece = held[: count - start]
                self.fill(piece, file)
                yield piece

    def fill(self, tensor: torch.Tensor, file: Any) -> None:
        """Read a contiguous tensor's bytes from where a file stands."""
        view, done = _bytes(tensor), 0
        while done < len(view):
            count = file.readinto(view[done:])
            if not count:
                raise OSError(f"{self.path.name} ends before {self.key} does")
            done += count


def stored_in(path: Path) -> dict[str, Stored]:
    """Return what a file holds, by key. Raises Foreign where its header lies, KeyError for a dtype that torch lacks."""
    rows, start = safetensors_header(path)
    return {
        key: Stored(path, key, DTYPES[row["dtype"]], tuple(row["shape"]), start + row["data_offsets"][0])
        for key, row in rows.items()
    }


class Writer:
    """Write a safetensors file tensor by tensor, in any order; wide dtypes lie first, so that all are aligned."""

    def __init__(self, path: Path, forms: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self.places: dict[str, int] = {}
        end = 0
        for key, (dtype, shape) in sorted(forms.items(), key=lambda form: (-form[1][0].itemsize, form[0])):
            start, end = end, end + prod(shape) * dtype.itemsize
            header[key] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
            self.places[key] = start
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.data, self.size = 8 + len(text), end
        self.file = path.open("wb", buffering=0)
        self.file.write(len(text).to_bytes(8, "little") + text)
        self.file.truncate(self.data + end)

    def write(self, key: str, pieces: Iterable[torch.Tensor]) -> None:
        """Write one tensor at its place, piece by piece as its bytes follow each other."""
        place = self.data + self.places[key]
        for piece in pieces:
            view = _bytes(piece.detach().cpu().contiguous())
            while len(view):
                count = os.pwrite(self.file.fileno(), view, place)
                view, place = view[count:], place + count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.flatten().view(torch.uint8).numpy()) if tensor.numel() else memoryview(b"")  # type: ignore[arg-type]
