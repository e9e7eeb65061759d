"""What the system's memory needs of the C library."""

from __future__ import annotations

import ctypes
import sys


def give_back() -> None:
    """Give freed memory back to the system: glibc keeps what is smaller than 32 MB, in pieces that hardly fit again.

    Nothing is done elsewhere.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
