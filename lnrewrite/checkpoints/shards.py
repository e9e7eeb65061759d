"""Read and write single tensors of safetensors files, from several threads at once, so that no file is ever held whole.

The library reads slices; it writes whole files only, so that the writer is our own. The format
(huggingface.co/docs/safetensors): eight bytes for the header's length, a JSON header that maps keys to dtype, shape and
place, then the tensors' bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open

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
"""How many bytes are read at a time."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """Hold where one tensor is: in which file, under which key. Reading raises OSError."""

    path: Path
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        """Return the tensor, in memory of its own."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        if tensor.numel():
            rows = tensor.view(-1, self.shape[-1] if self.shape else 1)
            start = 0
            for piece in self.rows():
                rows[start : (start := start + len(piece))] = piece
        return tensor

    def rows(self) -> Iterator[torch.Tensor]:
        """Yield the tensor's rows along its last axis, [many, width], as they follow each other.

        The file is opened anew for each piece: what one opening has touched stays in memory for as long as it is open.
        """
        if 0 in self.shape:
            return
        width, count = (self.shape[-1], self.shape[0]) if self.shape else (1, 1)
        step = max(1, PIECE * count // (prod(self.shape) * self.dtype.itemsize))
        for start in range(0, count, step):
            yield self.part(slice(start, start + step)).reshape(-1, width)

    def part(self, which: slice) -> torch.Tensor:
        """Return some rows along the first axis, or all of a tensor that has no axes."""
        try:
            with safe_open(self.path, "pt") as file:
                return file.get_slice(self.key)[which] if self.shape else file.get_tensor(self.key)
        except SafetensorError as error:  # it was whole when it was looked at
            raise OSError(f"{self.path.name} cannot be read any more: {error}") from error


def stored_in(path: Path) -> dict[str, Stored]:
    """Return what a file holds, by key. Raises Foreign where its header lies, KeyError for a dtype that torch lacks."""
    rows, _ = safetensors_header(path)
    return {key: Stored(path, key, DTYPES[row["dtype"]], tuple(row["shape"])) for key, row in rows.items()}


class Writer:
    """Write a safetensors file tensor by tensor, in any order; wide dtypes lie first, so that all are aligned."""

    def __init__(self, path: Path, forms: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
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
