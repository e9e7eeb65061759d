"""Attention as ONNX says it where no operator of it is right: products and a softmax that fusions recognize."""

from __future__ import annotations

import torch


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute torch's scaled_dot_product_attention in eval mode as products and a softmax that fusions recognise.

    A masked score is the least finite number, never -inf: a row whose mask hides everything (padding on the left) gives
    a mean, not the NaN that would spread. `unhidden` makes it the zero that torch gives.
    """
    if enable_gqa and (times := query.shape[-3] // key.shape[-3]) > 1:
        key, value = (t.unsqueeze(-3).expand(*t.shape[:-2], times, *t.shape[-2:]).flatten(-4, -3) for t in (key, value))
    if is_causal:
        rows, columns = (torch.arange(t.shape[-2], device=t.device) for t in (query, key))
        attn_mask = rows.unsqueeze(-1) >= columns
    scores = query * (query.shape[-1] ** -0.5 if scale is None else scale) @ key.transpose(-2, -1)
    if attn_mask is not None:
        least = torch.full((), torch.finfo(query.dtype).min, dtype=query.dtype, device=query.device)
        if _boolean(attn_mask):
            scores = scores + torch.where(attn_mask, torch.zeros_like(least), least)
        else:
            scores = scores + torch.maximum(attn_mask, least)
    return torch.softmax(scores, -1) @ value


def sees(mask: torch.Tensor) -> torch.Tensor:
    """Return which rows of a mask [b, h, q, k], True or above -inf where a key is seen, see any: [b, h, q, 1]."""
    return mask.any(-1, keepdim=True) if _boolean(mask) else mask.amax(-1, keepdim=True) > -torch.inf


def unhidden(y: torch.Tensor, seeing: torch.Tensor, turned: bool) -> torch.Tensor:
    """Zero attention's result y where a row sees nothing: [b, h, q, d] or, `turned`, [b, q, h, d] or [b, q, h * d]."""
    seeing = seeing.transpose(1, 2) if turned else seeing
    return torch.where(seeing.squeeze(-1) if turned and y.dim() == 3 else seeing, y, 0)


def _boolean(mask: torch.Tensor) -> bool:
    return mask.dtype is torch.bool
