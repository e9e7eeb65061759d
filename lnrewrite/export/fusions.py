"""Make libraries fuse the rest of a graph, one group of rules at a time, and keep what is right and undoes no norm.

The rules are onnxscript's for ONNX Runtime. A group that raises, gives other numbers, or takes a norm's form apart is
dropped for that model, and the notes say so. Nothing here is timed: a GPU may not be at hand.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    InlinePass,
    RemoveUnusedFunctionsPass,
    RemoveUnusedNodesPass,
    RemoveUnusedOpsetsPass,
)
from onnxscript.optimizer import fold_constants
from onnxscript.rewriter import pattern
from onnxscript.rewriter.ort_fusions.bias_gelu import fuse_bias_gelu
from onnxscript.rewriter.ort_fusions.cos_sin_cache import fuse_cos_sin_cache
from onnxscript.rewriter.ort_fusions.erfgelu import fuse_erfgelu
from onnxscript.rewriter.ort_fusions.gelu import fuse_gelu
from onnxscript.rewriter.ort_fusions.gqa import fuse_gqa
from onnxscript.rewriter.ort_fusions.gqa_packed_qkv import fuse_qkv_gqa
from onnxscript.rewriter.ort_fusions.mha import fuse_mha1, fuse_mha2
from onnxscript.rewriter.ort_fusions.mha_bias import fuse_mha_bias
from onnxscript.rewriter.ort_fusions.mha_scale import fuse_mha_scale
from onnxscript.rewriter.ort_fusions.rotary_embedding import fuse_partial_rotary_embedding, fuse_rotary_embedding
from onnxscript.rewriter.ort_fusions.sdpa import fuse_sdpa
from onnxscript.rewriter.ort_fusions.sdpa_via_mha import replace_sdpa_by_mha

from ..backends.onnx.norms import CONTRIB, LAYER, RMS, SKIP, STANDARD_RMS
from ..backends.onnx.shapes import infer_shapes


class _GeluOfTanh(pattern.RewriteRuleClassBase):  # type: ignore[misc]
    """Match GPT-2's spelling of it, 0.5 x (1 + tanh(..)), which onnxscript's rule does not."""

    def pattern(self, op: Any, x: Any) -> Any:
        """Return the graph that is matched."""
        inner = op.Mul(op.Add(x, op.Mul(op.Pow(x, 3.0), 0.044715)), math.sqrt(2 / math.pi))
        return op.Mul(op.Mul(x, 0.5), op.Add(op.Tanh(inner), 1.0))

    def rewrite(self, op: Any, x: Any) -> Any:
        """Return what takes its place."""
        return op.FastGelu(x, _domain=CONTRIB)


Group = Callable[[ir.Model], object]
NORMS = (LAYER, RMS, *SKIP.values(), STANDARD_RMS)


def _gelu(model: ir.Model) -> None:
    _GeluOfTanh.rule().apply_to_model(model)
    for fuse in (fuse_erfgelu, fuse_gelu, fuse_bias_gelu):
        fuse(model)


def _rotary(model: ir.Model) -> None:
    fuse_rotary_embedding(model)
    fuse_cos_sin_cache(model)
    CommonSubexpressionEliminationPass()(model)
    fuse_partial_rotary_embedding(model)


def _attention(model: ir.Model) -> None:
    fuse_sdpa(model, apply_shape_inference=True)
    fuse_gqa(model)
    fuse_qkv_gqa(model)
    if fuse_mha1(model) + fuse_mha2(model):
        fuse_mha_scale(model)
        fuse_mha_bias(model)
    else:
        replace_sdpa_by_mha(model)


def _cleaned(model: ir.Model) -> None:
    """Inline what a group left half done and fold constants, but no weight: its name would be lost."""
    fold_constants(model, should_fold=lambda node: False if node.op_type == "Transpose" else None)
    for clean in (
        InlinePass(), RemoveUnusedNodesPass(), RemoveUnusedFunctionsPass(), RemoveUnusedOpsetsPass(),
    ):  # fmt: skip
        clean(model)
    infer_shapes(model)


GROUPS: dict[str, Group] = {"gelu": _gelu, "rotary": _rotary, "attention": _attention}


FOR = {"cuda": tuple(GROUPS), "cpu": ("gelu",)}
"""The groups that a target gains by; attention in one operator is slower on the CPU than its parts."""


def fuse_groups(model: ir.Model, target: str, wrong: Callable[[ir.Model], str]) -> tuple[ir.Model, list[str]]:
    """Return the model with the groups of fusions that hold for it, and what each did or why it was dropped.

    wrong: says why a model is not what it should be, or nothing.
    """
    notes = []
    for name in FOR.get(target, ()):
        group, tried = GROUPS[name], model.clone()
        try:
            infer_shapes(tried)
            group(tried)
            _cleaned(tried)
            why = _undone(model, tried) or (wrong(tried) if (made := _made(model, tried)) else "")
        except Exception as error:  # a library's rule may raise anything; the model is the clone's source
            why = f"{type(error).__name__}: {error}"
        if why:
            notes.append(f"{name} fusions were left out: {' '.join(why.split())[:160]}")
        elif made:
            model = tried
            notes.append(f"{name} fusions: {made}")
    return model, notes


def _count(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def _undone(before: ir.Model, after: ir.Model) -> str:
    """Return which norm forms a group took apart."""
    one, two = _count(before), _count(after)
    lost = [f"{one[n] - two[n]} {n}" for n in NORMS if two[n] < one[n]]
    return f"they take {', '.join(lost)} apart" if lost else ""


def _made(before: ir.Model, after: ir.Model) -> str:
    """Name the operators of ONNX Runtime that a group made."""
    one, two = ({(n.domain, n.op_type) for n in m.graph} for m in (before, after))
    fresh = sorted(name for domain, name in two - one if domain)
    counts = _count(after)
    return ", ".join(f"{counts[name]} {name}" for name in fresh)
