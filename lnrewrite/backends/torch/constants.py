"""Bound what a captured program makes of constants alone: its operators are run on sizes, not on numbers."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import fx

from ...compat.torch import FakeTensorMode, tensors_in
from ..holding import Step, check_held
from .module import CapturedModule


def check_constants(module: CapturedModule) -> None:
    """Raise LnrewriteError LN039 where a program makes too much of its constants alone, whatever sizes it declares."""
    made: dict[fx.Node, Any] = {}
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        run = fx.Interpreter(module, garbage_collect_values=False)
        run.env = made
        for node in module.graph.nodes:
            if node.op not in ("placeholder", "output") and made.keys() >= set(node.all_input_nodes):
                with suppress(Exception):  # what numbers decide, or asks for more than sizes
                    made[node] = run.run_node(node)
    steps = [
        Step(
            tuple(read.name for read in node.all_input_nodes),
            ((node.name, sum(map(_count, tensors_in(made.get(node)))) if node.op == "call_function" else 0),),
        )
        for node in module.graph.nodes
    ]
    size = sum(t.untyped_storage().nbytes() for t in (*module.parameters(), *module.buffers()))
    check_held(steps, size, "the program")


def _count(tensor: torch.Tensor) -> int:
    """Return how many numbers lie between a tensor's first and its last, which repeat where a stride is 0."""
    spans = (step * (size - 1) for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return 1 + sum(spans) if tensor.numel() else 0
