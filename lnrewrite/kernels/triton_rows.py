"""Rows of the boundary in Triton: one program a row, the row in registers. See csrc/boundary.h for what is computed."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def normed(v, gain, bias, k, there, width, eps, layer: tl.constexpr, has_bias: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the norm of a row in float32; its numbers that are not `there` are zero."""
    if layer:
        v = tl.where(there, v - tl.sum(v, 0) / width, 0.0)
    v = v / tl.sqrt(tl.sum(v * v, 0) / width + eps)
    v = v * tl.load(gain + k, mask=there, other=0.0).to(tl.float32)
    if has_bias:
        v += tl.load(bias + k, mask=there, other=0.0).to(tl.float32)
    return v


@triton.jit  # type: ignore[untyped-decorator]
def rows(  # type: ignore[no-untyped-def]
    f, x, g_out, b_out, g_in, b_in, h, z, width, eps_out, eps_in,
    block: tl.constexpr, layer: tl.constexpr, has_b_out: tl.constexpr, has_b_in: tl.constexpr,
):  # fmt: skip
    """Compute the row of this program; `block` is a power of two that holds `width`."""
    start = tl.program_id(0).to(tl.int64) * width
    k = tl.arange(0, block)
    there = k < width
    dtype = h.dtype.element_ty

    v = tl.load(f + start + k, mask=there, other=0.0).to(tl.float32)
    skip = tl.load(x + start + k, mask=there, other=0.0).to(tl.float32)
    v = normed(v, g_out, b_out, k, there, width, eps_out, layer, has_b_out)
    total = (v.to(dtype).to(tl.float32) + skip).to(dtype)
    tl.store(h + start + k, total, mask=there)

    v = tl.where(there, total.to(tl.float32), 0.0)
    v = normed(v, g_in, b_in, k, there, width, eps_in, layer, has_b_in)
    tl.store(z + start + k, v.to(dtype), mask=there)


def launch(
    kernel: Any,
    f: Tensor,
    x: Tensor,
    g_out: Tensor,
    g_in: Tensor,
    b_out: Tensor | None,
    b_in: Tensor | None,
    eps_out: float,
    eps_in: float,
    layernorm: bool,
) -> tuple[Tensor, Tensor]:
    """Run `kernel`, which is `rows` or a wrapping of it, over all rows of f and x [..., width]; return (h, z)."""
    f, x = f.contiguous(), x.contiguous()
    h, z = torch.empty_like(x), torch.empty_like(x)
    width = f.shape[-1]
    block = triton.next_power_of_2(width)
    none = g_out  # stands for a bias that is not read
    kernel[(f.numel() // width,)](
        f, x, g_out.contiguous(), none if b_out is None else b_out.contiguous(),
        g_in.contiguous(), none if b_in is None else b_in.contiguous(), h, z, width, eps_out, eps_in,
        block=block, layer=layernorm, has_b_out=b_out is not None, has_b_in=b_in is not None,
        num_warps=max(1, min(16, block // 512)),
    )  # fmt: skip
    return h, z


@torch.library.triton_op("lnrewrite::norm_add_norm", mutates_args=())
def operator(
    f: Tensor,
    x: Tensor,
    g_out: Tensor,
    g_in: Tensor,
    b_out: Tensor | None,
    b_in: Tensor | None,
    eps_out: float,
    eps_in: float,
    layernorm: bool,
) -> tuple[Tensor, Tensor]:
    """Compute (h, z) on a GPU; `lnrewrite.norm_add_norm` is what checks shapes and chooses."""
    wrapped = torch.library.wrap_triton(rows)
    return launch(wrapped, f, x, g_out, g_in, b_out, b_in, eps_out, eps_in, layernorm)
