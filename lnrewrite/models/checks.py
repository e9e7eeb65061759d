"""What is checked before a model is taken: that its numbers are finite, and that the packages for ONNX are there."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

import torch
from torch import nn

from ..errors import Code, LnrewriteError


def need_onnx(what: str) -> None:
    """Raise LnrewriteError LN018 where the packages that ONNX takes are not installed."""
    for name in ("onnx", "onnx_ir", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(name) is None:
            remedy = "pip install lnrewrite[cpu] (or lnrewrite[gpu])"
            raise LnrewriteError(Code.LN018, what, f"ONNX needs the package {name}", remedy)


def check_finite(module: nn.Module) -> None:
    """Raise LnrewriteError LN024 where a floating point parameter holds NaN or infinite values."""
    for name, parameter in module.named_parameters():
        if not parameter.is_meta:
            check_values(name, [parameter])


def check_values(name: str, pieces: Iterable[torch.Tensor]) -> None:
    """Raise LnrewriteError LN024 where floating point values of the parameter `name` are NaN or infinite."""
    for piece in pieces:
        if not piece.is_floating_point():
            return
        wide = piece.detach() if piece.itemsize > 1 else piece.detach().float()
        if not torch.isfinite(wide.sum()) and not torch.isfinite(wide).all():  # the sum, which is fast, may overflow
            raise LnrewriteError(
                Code.LN024, name, "it holds NaN or infinite values", "repair or re-download the weights"
            )
