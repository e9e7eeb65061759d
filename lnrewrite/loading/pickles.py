"""Read what a pickle would import, without running it.

A pickle is a program: its GLOBAL operations import names and its REDUCE operations call them. Reading the operations
runs nothing. `torch.load(weights_only=True)` allows a short list of names that only build tensors
(torch/_weights_only_unpickler.py `_get_allowed_globals`); every other name is reported, so that a user knows what
--trust-pickle would run. Reported too are sparse and nested tensors, which tell where in memory to read: torch checks
the former only from 2.14 on (torch/serialization.py `_load`), and 2.15 allows the latter no more; and bytearrays, which
take as much memory as a number says.
"""

from __future__ import annotations

import io
import pickletools
import re
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import deque
from typing import IO

from .zips import Damaged as Damaged
from .zips import Members

LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
LEGACY_PICKLES = 5  # magic, protocol, system, object, storage keys; raw storages follow
PLAIN = re.compile(r"[\w .#:/*-]*")
"""A name that torch may write into code: it ends no string and calls nothing."""

_STRINGS = {"STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
_SAVED = re.compile(r"data\.pkl|version|byteorder|\.format_version|\.storage_alignment|\.data/\w+|data/\d+")
_UNCHECKED = re.compile(r"torch\._utils\._rebuild_(sparse|nested)_tensor|torch\.sparse\..+|builtins\.bytearray")
_SMALL, _REPEATED = 1 << 24, 64  # bytes that any tensor may stand for; how often a larger one may repeat its storage
_OPERATIONS = 10_000_000  # of one pickle; weights and an optimizer's state take some ten for each tensor
_PICKLE_LIMIT = 64 * 2**20  # bytes
_UNREADABLE = "a name computed at run time"


def pickled_names(stream: IO[bytes], texts: set[str] | None = None) -> set[str]:
    """Collect every `module.name` that the pickle at `stream`'s position imports; leave `stream` behind its end.

    A name that is not written out literally is reported as such. All strings are added to `texts`. Raises Damaged when
    the pickle is cut off.
    """
    texts = set() if texts is None else texts
    names: set[str] = set()
    memo: dict[int, str | None] = {}
    pushed: deque[str | None] = deque([None, None], 2)  # what the last two pushed, None where it is no string
    try:
        for done, (op, arg, _) in enumerate(pickletools.genops(stream)):
            if done > _OPERATIONS:
                raise ValueError(f"it has more than {_OPERATIONS} operations")
            if op.name in ("GLOBAL", "INST"):
                names.add(_modern(*str(arg).split(" ", 1)))
            elif op.name == "STACK_GLOBAL":
                module, name = pushed
                names.add(_modern(module, name) if module and name else _UNREADABLE)
            elif op.name.startswith("EXT"):
                names.add(f"copyreg extension {arg}")
            if op.name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
                memo[len(memo) if op.name == "MEMOIZE" else int(str(arg))] = pushed[-1]
            elif op.name in _STRINGS:
                texts.add(text := arg.decode("latin-1") if isinstance(arg, bytes) else str(arg))
                pushed.append(text)
            elif op.name in ("GET", "BINGET", "LONG_BINGET"):
                pushed.append(memo.get(int(str(arg))))
            elif op.name not in ("PROTO", "FRAME"):
                pushed.append(None)
    except Exception as error:  # pickletools raises whatever the malformed bytes lead to
        raise Damaged(f"its pickle cannot be read: {error}") from error
    return names


def unsafe_names(stream: IO[bytes], plain: bool = False) -> tuple[str, ...]:
    """List, sorted, what a torch.save file (zip or legacy) or a plain pickle imports beyond what builds tensors.

    Empty means that `torch.load(weights_only=True)` imports nothing that it does not allow. `plain` lists also what
    could put quotes into code: strings that are no plain words, and encoding, which makes bytes of plain words. Raises
    Damaged.
    """
    start = stream.read(len(LEGACY_MAGIC))
    stream.seek(0)
    names: set[str] = set()
    texts: set[str] = set()
    if start.startswith(b"PK"):
        members = Members(stream)
        if strange := [name for name in members.names() if not _SAVED.fullmatch(name)]:
            raise Damaged(f"it holds {strange[0][:80]!r}, which torch.save does not write")
        if "data.pkl" not in members.names():
            raise Damaged("it holds no data.pkl")
        names |= pickled_names(io.BytesIO(members.read("data.pkl", _PICKLE_LIMIT)), texts)
    else:
        for _ in range(LEGACY_PICKLES):  # a plain pickle is one; torch knows the number by value, however it is pickled
            names |= pickled_names(stream, texts)
            if not stream.read(1):
                break
            stream.seek(-1, io.SEEK_CUR)
    unsafe = names - _allowed()
    if plain:
        unsafe |= {f"the text {text[:60]!r}" for text in texts if not PLAIN.fullmatch(text)}
        unsafe |= names & {"_codecs.encode"}
    return tuple(sorted(unsafe))


def check_built(held: object) -> None:
    """Raise Damaged where a tensor in `held` stands for far more numbers than are stored (a stride of 0)."""
    import torch

    from ..compat.torch import tensors_in

    for tensor in tensors_in(held):
        if tensor.layout is torch.strided and not tensor.is_meta:
            size, there = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
            if size > max(_SMALL, _REPEATED * there):
                raise Damaged(f"a tensor of {list(tensor.shape)} is made of {there} bytes")


def _modern(module: str, name: str) -> str:
    """Write an imported name as Python 3 knows it (torch pickles `set` as `__builtin__ set`)."""
    module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
    return f"{module}.{name}"


def _allowed() -> frozenset[str]:
    """Return the names that `torch.load(weights_only=True)` allows by default, and that are safe in every release."""
    from ..compat.torch import allowed_globals

    return frozenset(name for name in allowed_globals() if not _UNCHECKED.fullmatch(name))
