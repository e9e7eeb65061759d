"""Name what a residual branch computes, by its operators."""

from __future__ import annotations

from collections import Counter

from .graph import OpGraph

ROUTERS = frozenset({"topk", "one_hot", "histc", "bincount"})


def branch_kind(graph: OpGraph, root: str, branch: str) -> str:
    """Return attention, moe, ssm, conv, mlp or other."""
    ops = graph.between(root, branch)
    kinds = Counter(o.kind for o in ops)
    soft = any(k in kinds for k in ("softmax", "_softmax", "_safe_softmax"))
    products = [o for o in ops if o.kind in {"matmul", "bmm", "einsum"} and len(o.data) > 1]
    data = [o for o in products if all(n not in graph.constant for n in o.data[:2])]
    if "scaled_dot_product_attention" in kinds or (soft and len(data) >= 2):
        return "attention"
    if any(k in kinds for k in ROUTERS):
        return "moe"
    wide = any(o.kind == "conv" and any(k != 1 for k in (graph[o.data[1]].shape or ())[2:]) for o in ops)
    if "cumsum" in kinds or (wide and ("softplus" in kinds or "exp" in kinds)):
        return "ssm"
    if wide:
        return "conv"
    return "mlp" if "linear" in kinds or products or "conv" in kinds else "other"
