"""Run a captured model on data and keep what each block saw and did: tokens by channels, the same tokens everywhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import cast

import numpy as np
import torch
from torch import fx

from ..backends.hiding import Shown
from ..backends.torch.contexts import evaluating, quiet
from ..backends.torch.feeding import flat_inputs
from ..backends.torch.fixed import elsewhere, other_path
from ..backends.torch.module import CapturedModule
from ..detect.arithmetic import Floats
from ..detect.graph import OpGraph
from ..errors import Code, LnrewriteError, words
from ..ir import Block, Network, Stream, Where
from ..pipeline.protocols import Batch, Samples

BYTES = 1 << 29
"""How much memory the samples of one program may take; fewer tokens are kept of a larger model."""


Recorder = Callable[[Batch, Sequence[str]], Mapping[str, torch.Tensor]]
"""Runs a model on one batch and returns the values of some of its nodes."""
See = Callable[[str, torch.Tensor], object]
"""Takes a node's name and its value."""


def collect(network: Network, record: Recorder, batches: Sequence[Batch], seed: int = 0) -> dict[str, Samples]:
    """Return each block's samples on the batches: float64 arrays [tokens, width], at most `BYTES` in all.

    Raises LnrewriteError LN022 where a batch does not fit the model, LN026 where it gives NaN or infinite values.
    """
    names = {b.name: nodes_of(s, b, i) for s in network.streams for i, b in enumerate(s.blocks)}
    axes = {n: axis for nodes in names.values() for n, axis in nodes.values() if n}
    width = max((s.width for s in network.streams), default=0)
    streams = [[n for b in s.blocks for n, _ in names[b.name].values()] for s in network.streams]
    arrays = recorded(axes, width, record, batches, seed, streams)
    return {
        block: Samples(**{k: cast(Floats, arrays.get(n)) for k, (n, _) in nodes.items()})
        for block, nodes in names.items()
    }


def recorded(
    axes: Mapping[str, int],
    width: int,
    record: Recorder,
    batches: Sequence[Batch],
    seed: int = 0,
    groups: Sequence[Collection[str]] | None = None,
) -> dict[str, Floats]:
    """Return values of the graph, by node, on the batches: float64 arrays [tokens, channels], channels from their axis.

    Tokens that a mask hides are left out; `groups` are values of one sequence each, all without them. `width` is the
    most channels that one has, 0 where it is not known. Raises LnrewriteError LN022, LN026.
    """

    def run(batch: Batch) -> dict[str, torch.Tensor]:
        return {n: v.detach().movedim(axes[n], -1) for n, v in record(batch, list(axes)).items()}

    limit = max(64, BYTES // (8 * max(1, width) * max(1, len(axes)) * len(batches)))
    parts: dict[str, list[Floats]] = {n: [] for n in axes}
    shown = Shown.tried(batches, run, groups or [list(axes)])
    for index, batch in enumerate(batches):
        for name, value in run(batch).items():
            counts = shown.rows(name, value, batch)
            rows = value.reshape(-1, value.shape[-1])
            rows = rows if counts is None else rows[counts]
            parts[name].append(rows[rows_of(len(rows), limit, seed + index)].double().cpu().numpy())
    arrays = {n: np.concatenate(p) for n, p in parts.items() if p}
    finite(arrays)
    return arrays


def finite(arrays: Mapping[str, Floats]) -> None:
    """Raise LnrewriteError LN026 where a value holds NaN or infinite numbers."""
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            why = f"the value of {name} is NaN or infinite on this data"
            remedy = "run the model in float32, or check the data and the weights"
            raise LnrewriteError(Code.LN026, "calibration", why, remedy)


def peaks(graph: OpGraph, record: Recorder, batches: Sequence[Batch]) -> dict[str, float]:
    """Return the largest size of a number in each floating point value of a graph, over all batches."""
    names = [op.name for op in graph if "float" in op.dtype and op.name not in graph.constant and op.shape is not None]
    found = dict.fromkeys(names, 0.0)
    for batch in batches:
        for name, value in record(batch, names).items():
            largest = value.abs().max().item() if value.numel() else 0.0
            found[name] = max(found[name], float(largest))
    return found


def observe(module: CapturedModule, batch: Batch, wanted: Collection[str], see: See) -> None:
    """Run a captured module on a batch and show the values of some nodes as they are made; none is kept."""
    interpreter = _Showing(module, frozenset(wanted), see)
    inputs = flat_inputs(module, batch)
    try:
        with evaluating(module), quiet():
            interpreter.run(*inputs, enable_io_processing=False)
    except (RuntimeError, IndexError, ValueError) as error:
        if path := other_path(error):
            raise elsewhere("calibration data", path) from error
        why = f"the model fails on it: {words(error).partition(chr(10))[0]}"
        raise LnrewriteError(Code.LN022, "calibration data", why, "give data that fit the model") from error


class _Showing(fx.Interpreter):
    """Run a graph and show the values of some nodes."""

    def __init__(self, module: CapturedModule, wanted: frozenset[str], see: See) -> None:
        super().__init__(module)
        self.wanted, self.see = wanted, see

    def run_node(self, n: fx.Node) -> object:
        value = super().run_node(n)
        if n.name in self.wanted:  # of an operator with several results, the first
            self.see(n.name, (value[0] if isinstance(value, (tuple, list)) else value).detach())
        return value


def rows_of(count: int, limit: int, seed: int) -> torch.Tensor:
    """Return which rows of a batch are kept: the same choice for every value with as many rows."""
    if count <= limit:
        return torch.arange(count)
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(count, generator=generator)[:limit].sort().values


def nodes_of(stream: Stream, block: Block, index: int) -> dict[str, tuple[str, int]]:
    """Name the nodes that hold a block's samples, and their channels' axis; empty where there is no such value."""
    into, out = block.at(Where.IN), block.at(Where.OUT)
    earlier = [b for b in stream.blocks[:index] if b.anchor.total != block.anchor.total]
    trunk = earlier[-1].at(Where.POST) if earlier else stream.embedding
    axis = block.anchor.axis
    return {
        "state": (block.anchor.state, axis),
        "before": (trunk.origin[0], trunk.norm.axis) if trunk else ("", axis),
        "read": (into.origin[-1], into.norm.axis) if into else (block.anchor.state, axis),
        "written": (out.origin[0], out.norm.axis) if out else (block.anchor.branch, axis),
        "branch": (block.anchor.branch, axis),
        "total": (block.anchor.total, axis),
    }
