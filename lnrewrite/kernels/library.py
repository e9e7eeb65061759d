"""Find the library of operators and register it with a session; say what to do where a model needs it and it lacks."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from ..errors import Code, LnrewriteError
from .building import place

DOMAIN = "lnrewrite"
"""The domain of the operators."""
VARIABLE = "LNREWRITE_KERNELS"


def find() -> Path | None:
    """Return the library: the file that LNREWRITE_KERNELS names, or the one that was built of these sources, if any.

    Raises LnrewriteError LN530 where the variable names no file.
    """
    if named := os.environ.get(VARIABLE):
        if not Path(named).is_file():
            raise LnrewriteError(
                Code.LN530, VARIABLE, f"the file {named} does not exist", "name the library, or unset it"
            )
        return Path(named).resolve()  # a bare name would be looked for where the system keeps libraries
    built = place()
    return built if built.is_file() else None


def register(options: Any, needed_by: str, cuda: bool = False) -> None:
    """Give an onnxruntime.SessionOptions the operators that a model needs.

    needed_by: that model, for errors; cuda: it runs on CUDA. Raises LnrewriteError LN530 where there is no library, or
    none with CUDA kernels, and where the library does not load.
    """
    library = find()
    if library is None:
        why = "it holds operators of lnrewrite, whose kernels are not built here"
        raise LnrewriteError(Code.LN530, f"model {needed_by!r}", why, "lnrewrite kernels build")
    try:
        options.register_custom_ops_library(str(library))
        lacks = cuda and not ctypes.CDLL(str(library)).lnrewrite_has_cuda()
    except Exception as error:  # ONNX Runtime has no common base class of its errors
        text = f"it does not load: {' '.join(str(error).split())[:200]}"
        raise LnrewriteError(Code.LN530, str(library), text, "lnrewrite kernels build") from error
    if lacks:
        why = f"{library} was built without CUDA: its operators would run on the CPU"
        raise LnrewriteError(Code.LN530, f"model {needed_by!r}", why, "lnrewrite kernels build --cuda")
