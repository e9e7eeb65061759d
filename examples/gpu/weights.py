"""Carry graphs without weights to the machine that times them, where one file of random numbers stands for all."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto
from onnx.external_data_helper import set_external_data

LARGE = 4096
"""Weights of more numbers than this are left out."""
TYPES = {TensorProto.FLOAT16: torch.float16, TensorProto.FLOAT: torch.float32}
SPREAD, PIECE = 0.02, 1 << 24


def hollow(source: Path, target: Path) -> None:
    """Write a model whose large weights name one file for each type that is drawn later, each from its beginning."""
    model = onnx.load(source)
    for tensor in model.graph.initializer:
        if np.prod(tensor.dims) > LARGE and tensor.data_type in TYPES:
            length = int(np.prod(tensor.dims)) * TYPES[tensor.data_type].itemsize
            for field in ("raw_data", "float_data", "int32_data", "external_data", "data_location"):
                tensor.ClearField(field)
            tensor.raw_data = b""
            set_external_data(tensor, f"{tensor.data_type}.data", offset=0, length=length)
    target.write_bytes(model.SerializeToString())


def left_out(path: Path) -> dict[str, tuple[str, int]]:
    """Return, of each weight that a model has elsewhere, the file and how many bytes of it."""
    found = {}
    for tensor in onnx.load(path, load_external_data=False).graph.initializer:
        if tensor.external_data:
            held = {entry.key: entry.value for entry in tensor.external_data}
            found[tensor.name] = held["location"], int(held["length"])
    return found


def draw(models: Iterable[Path], folder: Path) -> None:
    """Draw the weights that models name: a file for each type, as large as the largest."""
    sizes: dict[str, int] = {}
    for path in models:
        for name, size in left_out(path).values():
            sizes[name] = max(sizes.get(name, 0), size)
    for name, size in sizes.items():
        kind = TYPES[int(name.split(".")[0])]
        left, generator = size // kind.itemsize, torch.Generator().manual_seed(0)
        with (folder / name).open("wb") as file:
            while left > 0:
                values = SPREAD * torch.randn(min(left, PIECE), generator=generator)
                file.write(values.to(kind).numpy().tobytes())
                left -= values.numel()
