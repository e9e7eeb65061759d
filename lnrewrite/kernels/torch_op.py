"""The boundary in torch: one Triton kernel on a GPU, for inference; elsewhere the operators that it stands for."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor
from torch.nn import functional as F

TRITON = importlib.util.find_spec("triton") is not None


def norm_add_norm(
    f: Tensor,
    x: Tensor,
    g_out: Tensor,
    g_in: Tensor,
    b_out: Tensor | None = None,
    b_in: Tensor | None = None,
    *,
    eps_out: float = 1e-5,
    eps_in: float = 1e-5,
    layernorm: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return h = x + norm(f) * g_out + b_out and z = norm(h) * g_in + b_in: a boundary of Peri-LN.

    f, x: [..., width] in float32, float16 or bfloat16; gains and biases: [width]. norm: RMSNorm, with `layernorm`
    LayerNorm, statistics in float32. On a GPU, where no gradient is asked for, one Triton kernel computes it
    (torch.ops.lnrewrite.norm_add_norm, visible to torch.compile); anywhere else, and in torch.export, it is two norms
    and an addition, which `export(fuse="custom")` writes as lnrewrite::NormAddNorm. Raises ValueError where shapes
    do not fit.
    """
    width = f.shape[-1:]
    if f.shape != x.shape or any(v is not None and v.shape != width for v in (g_out, g_in, b_out, b_in)):
        raise ValueError("f and x need one shape [..., width], gains and biases the shape [width]")
    given = (f, x, g_out, g_in, b_out, b_in)
    learns = torch.is_grad_enabled() and any(v is not None and v.requires_grad for v in given)
    if f.is_cuda and TRITON and not learns and not torch.compiler.is_exporting():
        from .triton_rows import operator

        h, z = operator(*given, eps_out, eps_in, layernorm)
        return h, z
    h = x + _normed(f, g_out, b_out, eps_out, layernorm)
    return h, _normed(h, g_in, b_in, eps_in, layernorm)


def _normed(v: Tensor, gain: Tensor, bias: Tensor | None, eps: float, layernorm: bool) -> Tensor:
    dtype = v.dtype
    wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    v, gain, bias = v.to(wide), gain.to(wide), bias if bias is None else bias.to(wide)
    if layernorm:
        return F.layer_norm(v, v.shape[-1:], gain, bias, eps).to(dtype)
    v = F.rms_norm(v, v.shape[-1:], gain, eps)
    return (v if bias is None else v + bias).to(dtype)
