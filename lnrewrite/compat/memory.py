"""What the system's memory needs of the C library."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

MMAP_THRESHOLD = -3
"""What glibc's mallopt calls the size from which each block is a mapping of its own."""
LARGE = 1 << 20


def give_back() -> None:
    """Give freed memory back to the system: glibc keeps what is smaller than 32 MB, in pieces that hardly fit again.

    Nothing is done elsewhere.
    """
    if (call := _of_glibc("malloc_trim")) is not None:
        call(0)


def give_back_at_once() -> None:
    """Have all that this process frees from now on in blocks of a megabyte or more go back at once; as `give_back`."""
    if (call := _of_glibc("mallopt")) is not None:
        call(MMAP_THRESHOLD, LARGE)


def _of_glibc(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
