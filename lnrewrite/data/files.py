"""Read files of tensors; nothing in them is unpickled."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import Code, LnrewriteError
from ..loading.pickles import Damaged, check_built, unsafe_names

REMEDY = "save named tensors, without pickled objects"


def read_tensors(path: Path, code: Code) -> Tensor | dict[str, Tensor] | list[Tensor]:
    """Read an .npz, .npy, .pt or .safetensors file of tensors; nothing in it is unpickled.

    Returns what the file holds: one tensor, named ones, or a list. Raises LnrewriteError `code` where it holds anything
    else or cannot be read.
    """
    import numpy as np

    what = f"file {str(path)!r}"
    try:
        with path.open("rb") as stream:
            start = stream.read(16)
        if path.suffix in (".npz", ".npy"):
            _check_packed(path, what, code)
            held: Any = np.load(path, mmap_mode="c", allow_pickle=False)  # a long .npy stays on the disk
            held = (
                torch.from_numpy(held) if isinstance(held, np.ndarray) else {k: torch.from_numpy(held[k]) for k in held}
            )
        elif path.suffix == ".safetensors" or start[8:9] == b"{":
            from safetensors.torch import load_file

            held = load_file(path)
        else:
            with path.open("rb") as stream:
                if named := unsafe_names(stream):
                    why = f"reading it would run {', '.join(name[:60] for name in named[:4])}"
                    raise LnrewriteError(code, what, why, REMEDY)
                stream.seek(0)
                held = torch.load(stream, map_location="cpu", weights_only=True)  # of a path torch goes by the suffix
            check_built(held)
    except LnrewriteError:
        raise
    except Damaged as error:
        raise LnrewriteError(code, what, str(error), REMEDY) from error
    except OSError as error:
        raise LnrewriteError(code, what, f"it cannot be read: {error}", "check the file") from error
    except Exception as error:  # numpy, torch and safetensors raise various errors for content they do not take
        why = f"it does not hold plain tensors ({type(error).__name__})"
        raise LnrewriteError(code, what, why, REMEDY) from error
    tensors = held.values() if isinstance(held, Mapping) else held if isinstance(held, list | tuple) else [held]
    held_here = [t for t in tensors if isinstance(t, Tensor)]
    if odd := [t for t in held_here if t.is_meta or t.is_quantized or t.layout is not torch.strided]:
        why = f"it holds a tensor without plain numbers ({'meta' if odd[0].is_meta else odd[0].layout}, {odd[0].dtype})"
        raise LnrewriteError(code, what, why, "save dense tensors of plain numbers")
    if not tensors or not all(isinstance(t, Tensor) for t in tensors):
        raise LnrewriteError(
            code, what, f"it holds a {type(held).__name__} of something other than tensors", "save tensors"
        )
    return (
        {str(k): v for k, v in held.items()}
        if isinstance(held, Mapping)
        else held
        if isinstance(held, Tensor)
        else list(held)
    )


PACKED, RATIO = 1 << 28, 200
"""An .npz may unpack to more bytes than this only where that is up to so many times its size."""


def _check_packed(path: Path, what: str, code: Code) -> None:
    """Raise LnrewriteError `code` for an .npz that is small and unpacks to very much."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        total = sum(member.file_size for member in archive.infolist())
    if total > max(PACKED, RATIO * path.stat().st_size):
        why = f"it has {path.stat().st_size} bytes and {total} after decompression"
        raise LnrewriteError(code, what, why, "save it with numpy.savez, which does not compress")
