"""Say how much of a block's attention falls on the first position: the attention sink (arXiv 2309.17453)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor, fx

from ..backends.torch.module import CapturedModule
from ..detect.graph import OpGraph
from ..ir import Block

ATTENTION, SOFTMAX = "scaled_dot_product_attention", "softmax"


class Sinks:
    """Measure the attention of blocks, as their weights are shown, or the queries and keys that make them."""

    def __init__(self, graph: OpGraph, module: CapturedModule | None, blocks: tuple[Block, ...]) -> None:
        nodes = {n.name: n for n in module.graph.nodes} if module else {}
        self.found: dict[str, list[float]] = {}
        self.weights: dict[str, str] = {}
        self.calls: dict[str, tuple[str, fx.Node]] = {}
        self.held: dict[str, Tensor] = {}
        for block in blocks:
            for op in graph.between(block.anchor.state, block.anchor.branch) if block.kind == "attention" else []:
                if op.kind == SOFTMAX and len(op.shape or ()) >= 3:
                    self.weights[op.name] = block.name
                elif op.kind == ATTENTION and op.name in nodes:
                    self.calls[op.name] = block.name, nodes[op.name]
        self.reads = Counter(n.name for _, call in self.calls.values() for n in call.all_input_nodes)
        self.left = Counter(self.reads)

    @property
    def wanted(self) -> list[str]:
        """Return the nodes whose values are to be shown."""
        return [*self.weights, *self.calls, *self.reads]

    def see(self, name: str, value: Tensor) -> None:
        """Take a node's value."""
        if name in self.reads:
            self.held[name] = value
        if name in self.weights:
            self._take(self.weights[name], value)
        elif name in self.calls:
            block, call = self.calls[name]
            self._take(block, attention_weights(call, self.held))
            for node in call.all_input_nodes:  # a mask is read by all layers
                self.left[node.name] -= 1
                if not self.left[node.name]:
                    self.held.pop(node.name, None)

    def end(self) -> None:
        """End a batch: nothing of it is held any longer."""
        self.held.clear()
        self.left = Counter(self.reads)

    def shares(self) -> Mapping[str, float]:
        """Return the first position's share of each block's attention."""
        return {block: sum(found) / len(found) for block, found in self.found.items()}

    def _take(self, block: str, weights: Tensor | None) -> None:
        if weights is not None and min(weights.shape[-2:]) > 1:
            self.found.setdefault(block, []).append(float(weights[..., 1:, 0].double().mean()))


def attention_weights(call: fx.Node, held: Mapping[str, Tensor]) -> Tensor | None:
    """Return softmax(q k^T * scale + mask) [..., queries, keys] of a call of torch's attention; None where unknown."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    if not all(node.name in held for node in call.all_input_nodes):
        return None
    query, key, mask = (
        held[v.name] if isinstance(v := given.get(n), fx.Node) else None for n in ("query", "key", "attn_mask")
    )
    assert query is not None and key is not None
    if given.get("enable_gqa"):
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scale = given.get("scale")
    scores = query.float() @ key.float().mT * (float(scale) if isinstance(scale, float) else query.shape[-1] ** -0.5)
    if given.get("is_causal"):
        scores = scores.masked_fill(
            ~torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(), -torch.inf
        )
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.float()
    return scores.softmax(-1)
