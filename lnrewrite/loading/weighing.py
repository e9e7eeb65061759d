"""Weigh what a config asks for against the weights that are there, before a network is built and while it is.

A config is a few numbers that anyone can raise: a million layers take hours to build, a table of 10^12 rows all memory.
"""

from __future__ import annotations

import contextlib
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import Code, LnrewriteError
from .foreign import Foreign, safetensors_header

if TYPE_CHECKING:
    import torch

MOST = 50_000
"""The largest number of layers, heads, experts or labels that a config may ask for."""
PER_TENSOR, SPARE_TENSORS = 8, 1000
"""A network has up to so many tensors for each that its checkpoint holds (fused weights), and so many buffers."""
PER_BYTE, SPARE_NUMBERS = 4, 1 << 26
"""It has up to so many numbers for each byte (weights in four bits, tied tables), and so many more (masks)."""

_NO_COUNTS = re.compile("size|(^|_)eps")
"""What else such entries are: widths, and what norms are kept from dividing by zero with."""
_COUNTS = re.compile(r"(^|_)(layers?|blocks?|labels|stages|depths?|heads?|experts|groups|quantizers|codebooks)(_|$)")


def check_counts(name: str, content: Mapping[str, object]) -> None:
    """Raise LnrewriteError LN016 where a config, or one of a part in it, asks for more layers than any network has.

    The config's own class may make a list of them, so this comes before transformers reads it.
    """
    todo: list[tuple[str, object]] = list(content.items())
    while todo:
        key, value = todo.pop()
        if isinstance(value, Mapping):
            todo += value.items()
        elif isinstance(value, list):
            todo += [(key, part) for part in value]
        elif isinstance(value, int | float) and _COUNTS.search(key) and not _NO_COUNTS.search(key) and value > MOST:
            raise _misfit(name, f"its config asks for {key} = {value}, and no network has more than {MOST}")


def weight_of(folder: Path) -> tuple[int, int]:
    """Return how many tensors a folder's weights hold at most, and how many bytes they have."""
    tensors = size = 0
    for path in (*folder.glob("*.safetensors"), *folder.glob("*.bin")):
        length = path.stat().st_size
        size += length
        with contextlib.suppress(Foreign, zipfile.BadZipFile):
            if path.suffix == ".safetensors":
                tensors += len(safetensors_header(path)[0])
            elif zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as archive:
                    tensors += len(archive.namelist())
            else:
                tensors += length >> 6
    return tensors, size


@contextlib.contextmanager
def weighed(name: str, folder: Path) -> Iterator[None]:
    """Raise LnrewriteError LN016 where a network that is built meanwhile outgrows the folder's weights by far.

    Networks are built on the meta device, where a tensor takes no memory, and what they register is counted.
    """
    from torch.nn.modules import module

    tensors, size = weight_of(folder)
    most, numbers = PER_TENSOR * tensors + SPARE_TENSORS, PER_BYTE * size + SPARE_NUMBERS
    count = total = 0

    def weigh(owner: torch.nn.Module, key: str, tensor: torch.Tensor | None) -> None:
        nonlocal count, total
        count, total = count + (tensor is not None), total + (0 if tensor is None else tensor.numel())
        if count > most:
            raise _misfit(name, f"its config asks for more than {most} tensors, and its weights hold {tensors}")
        if total > numbers:
            raise _misfit(name, f"its config asks for more than {numbers} numbers, and its weights have {size} bytes")

    hooks = (
        module.register_module_parameter_registration_hook(weigh),
        module.register_module_buffer_registration_hook(weigh),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _misfit(name: str, why: str) -> LnrewriteError:
    return LnrewriteError(Code.LN016, f"model {name!r}", why, "check config.json against the weights")
