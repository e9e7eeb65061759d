"""Differentiate a captured model and say how large the gradient of each block's own parameters is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import fmean

import torch
from torch import Tensor

from ..backends.torch.contexts import evaluating, quiet
from ..compat.torch import tensors_in
from ..detect.graph import OpGraph
from ..errors import LnrewriteError
from ..healing.losses import Objective
from ..ir import Block, Where
from ..models.program import Program
from ..pipeline.protocols import Batch

LARGEST = 1 << 28
"""Of a model of more parameters no gradients are taken: what a backward pass keeps is several times the model."""
BATCHES = 4
"""Gradients are means over so many batches."""


def gradient_norms(program: Program, batches: Sequence[Batch]) -> tuple[dict[str, float], str]:
    """Return the L2 norm of each block's gradient, mean over the first batches, and what was differentiated.

    That is the cross-entropy of the next tokens (or of labels in the data) in nats or, without any, half the mean
    square of the first output. Nothing, and why, where it cannot be.
    """
    module = program.module()
    if (count := sum(p.numel() for p in module.parameters())) > LARGEST:
        return {}, f"no gradients were taken of {count:,} parameters, more than {LARGEST:,}"
    held = {b.name: own_parameters(program.graph, b) for b in program.network.blocks}
    norms: dict[str, list[float]] = {name: [] for name in held}
    known, what = dict(module.named_parameters(remove_duplicate=False)), ""
    asked = {n: (p.requires_grad, p.grad) for n, p in known.items()}
    try:
        for parameter in known.values():
            parameter.grad = None
        for batch in batches[:BATCHES]:
            squares, what = _squares(program, batch, known)
            for name, own in held.items():
                norms[name].append(sqrt(sum(squares.get(id(known[n]), 0.0) for n in own if n in known)))
    except (RuntimeError, NotImplementedError, StopIteration, LnrewriteError) as fault:
        return {}, f"no gradients were taken: {str(fault).partition(chr(10))[0]}"
    finally:
        for name, parameter in known.items():
            asks, parameter.grad = asked[name]
            parameter.requires_grad_(asks)
    return {name: fmean(found) for name, found in norms.items() if held[name]}, what


def _squares(program: Program, batch: Batch, known: Mapping[str, Tensor]) -> tuple[dict[int, float], str]:
    """Return the squared norm of each parameter's gradient, by its id, and what was differentiated."""
    module, found = program.module(), dict[int, float]()

    def take(parameter: Tensor) -> None:
        assert parameter.grad is not None
        found[id(parameter)] = float(parameter.grad.double().square().sum())
        parameter.grad = None  # no more than one is held

    hooks = []
    for parameter in {id(p): p for p in known.values() if p.is_floating_point()}.values():
        parameter.requires_grad_(True)
        hooks.append(parameter.register_post_accumulate_grad_hook(take))
    try:
        with evaluating(module):
            given = batch if isinstance(batch, Mapping) else dict(zip(program.spec.names, batch, strict=False))
            tensors = {n: t for n, t in given.items() if isinstance(t, Tensor)}
            objective = Objective.of(program, tensors)
            with quiet(), torch.enable_grad():
                outputs = module(**batch) if isinstance(batch, Mapping) else module(*batch)
                loss, what = loss_of(objective, outputs, tensors)
                loss.backward()
            return found, what
    finally:
        for hook in hooks:
            hook.remove()


def loss_of(objective: Objective, outputs: object, batch: dict[str, Tensor]) -> tuple[Tensor, str]:
    """Return what is differentiated, and its name."""
    if objective.has_task(batch):
        what = "the cross-entropy of the next tokens" if objective.ids else "the cross-entropy of the labels"
        return objective.rows(outputs, batch).mean(), what
    first = next(t for t in tensors_in(outputs) if t.is_floating_point())
    return first.float().square().mean() / 2, "half the mean square of the first output"


def own_parameters(graph: OpGraph, block: Block) -> list[str]:
    """Return the parameters that a block's branch, or a norm behind its sum, is computed with."""
    trunk = block.at(Where.POST)
    path = graph.between(block.anchor.state, block.anchor.branch)
    path += graph.between(trunk.origin[0], trunk.origin[-1]) if trunk else []
    found: dict[str, None] = {}
    todo = [name for op in path for name in op.data if name in graph.constant]
    seen = set(todo)
    while todo:
        op = graph[todo.pop()]
        if op.kind == "param":
            found[str(op.attrs["param"])] = None
        todo += [name for name in op.data if name not in seen]
        seen.update(op.data)
    return list(found)
