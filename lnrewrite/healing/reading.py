"""Read a checkpoint of torch.distributed.checkpoint without running what it names.

torch unpickles its index (`FileSystemReader.read_metadata`) and its plain values (`DefaultLoadPlanner.load_bytes`)
without restriction. Here the index may name torch's own descriptions of tensors and nothing else, its files must lie in
the checkpoint's folder, and values are read with `weights_only`.
"""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path, PurePath

import torch
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import ReadItem

from ..compat.torch import get_layout, storage_info

INDEX_LIMIT = 256 * 2**20
"""Bytes of an index."""
_INDEX = ".metadata"
_FILE = re.compile(r"__\d+_\d+\.distcp")
_DESCRIPTIONS = {
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
}
_STORAGE_INFO = storage_info()
_OTHERS = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _STORAGE_INFO,
    ("torch.serialization", "_get_layout"): get_layout,
    ("torch", "Size"): torch.Size,
    ("pathlib", "PosixPath"): PurePath,  # where it was written, which nothing reads
    ("pathlib", "WindowsPath"): PurePath,
    ("pathlib._local", "PosixPath"): PurePath,
    ("pathlib._local", "WindowsPath"): PurePath,
}


class _Descriptions(pickle.Unpickler):
    """Unpickle torch's descriptions of tensors; every other name is an error."""

    def find_class(self, module: str, name: str) -> object:
        if module == described.__name__ and name in _DESCRIPTIONS:
            return getattr(described, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in _OTHERS:
            return _OTHERS[module, name]
        raise pickle.UnpicklingError(f"its index would run {module}.{name}")


class Reader(FileSystemReader):
    """Read the files of one checkpoint folder, whose index is read when this is made: torch would log what it raises.

    Raises OSError, and pickle.UnpicklingError or what else unpickling raises where the index is none of torch's.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.index = self._read()

    def read_metadata(self, *args: object, **kwargs: object) -> described.Metadata:
        """Return the index."""
        self.index.storage_meta = described.StorageMeta(load_id=self.load_id)
        return self.index

    def _read(self) -> described.Metadata:
        path = Path(self.path) / _INDEX
        if path.stat().st_size > INDEX_LIMIT:
            raise pickle.UnpicklingError(f"its index has more than {INDEX_LIMIT} bytes")
        found = _Descriptions(io.BytesIO(path.read_bytes())).load()
        if not isinstance(found, described.Metadata) or not isinstance(found.storage_data, dict):
            raise pickle.UnpicklingError("its index is none")
        for info in found.storage_data.values():
            if not isinstance(info, _STORAGE_INFO) or not _FILE.fullmatch(str(info.relative_path)):
                raise pickle.UnpicklingError("its index names files that are not of a checkpoint")
        return found


class Planner(DefaultLoadPlanner):
    """Put what was read into place."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Read a plain value; only the types that weights are made of."""
        plain = torch.load(value, weights_only=True)
        again = io.BytesIO()  # torch unpickles what it puts into place: it gets what was just read
        torch.save(plain, again)
        again.seek(0)
        super().load_bytes(read_item, again)
