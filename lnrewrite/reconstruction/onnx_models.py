"""Fit the branches of an ONNX model: both models as torch runs them, after a comparison with ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir
import torch
from torch import Tensor

from ..backends.onnx.double import widened
from ..backends.onnx.mirror import Mirror, mirror
from ..backends.onnx.session import OnnxModule, runnable
from ..backends.torch.walk import Walk
from ..ir import Network, sums
from ..pipeline.protocols import Bases
from ..pipeline.report import Fitted
from .reconstruct import Side, fitted

CLOSE = 1e-4
"""How far a state may be from ONNX Runtime's: the size of the error over the state's, root mean square over tokens."""
Named = Mapping[str, Tensor]
"""A batch: every input by name, of the type that the model declares."""


@dataclass(frozen=True)
class OnnxSide:
    """Hold one of the two models and its picture; tables, scores: as a `Side`'s, by the names in the model."""

    model: ir.Model
    network: Network
    tables: Mapping[str, int]
    scores: str

    def mirror(self) -> Mirror:
        """Return the model as torch runs it, up to its last sum and its logits."""
        anchors = [b.anchor for s in self.network.streams for b in s.blocks]
        return mirror(self.model, {n for a in anchors for n in (a.state, a.total)} | {self.scores} - {""})


def fitted_onnx(
    original: OnnxSide, made: OnnxSide, blocks: Bases, fit: Sequence[Named], held: Sequence[Named]
) -> tuple[tuple[Fitted, ...], tuple[str, ...], dict[str, Tensor]]:
    """Fit the branches of some blocks of `made`; return what was done, notes, and the new values of initializers."""
    both = original, made
    mirrors = [side.mirror() for side in both]
    known = [_known(side.network, found) for side, found in zip(both, mirrors, strict=True)]
    counts = [min(pair) for pair in zip(*known, strict=False)]
    sides = [
        Side(m.module, _renamed(s.network, m, counts), {m.names[n]: rows for n, rows in s.tables.items()})
        for s, m in zip(both, mirrors, strict=True)
    ]
    reached = {b.name for b in sides[1].network.blocks}
    missing = dict.fromkeys(n for m in mirrors for n in m.missing)
    notes: tuple[str, ...] = ()
    if left := [b for b in blocks if b not in reached]:
        why = f"behind what has no gradients here: {', '.join(missing) or 'states that are constants'}"
        notes = (f"{len(left)} of {len(blocks)} branches were not fitted to the data, as they stand {why}",)
    if len(left) == len(blocks):
        return (), notes, {}
    for side, told, found in zip(sides, both, mirrors, strict=True):
        axes = {b.anchor.total: b.anchor.axis for b in side.network.blocks}
        if why := _differs(side, told, found, fit[0], axes):
            return (), (f"its branches were not fitted to the data: {why}",), {}
    if all(told.scores in found.names for told, found in zip(both, mirrors, strict=True)):
        scored = [replace(s, scores=m.names[told.scores]) for s, told, m in zip(sides, both, mirrors, strict=True)]
        every = zip(scored, both, mirrors, strict=True)
        if not any(_differs(side, told, found, fit[0], {side.scores: -1}) for side, told, found in every):
            sides = scored
    rows, more = fitted(sides[0], sides[1], {b: by for b, by in blocks.items() if b in reached}, fit, held)
    weights, parameters = mirrors[1].weights, dict(sides[1].module.named_parameters())
    values = {weights[n]: parameters[n].detach() for row in rows for n in row.weights}
    rows = tuple(replace(row, weights={weights[n]: moved for n, moved in row.weights.items()}) for row in rows)
    return rows, (*notes, *more), values


def _known(network: Network, found: Mirror) -> list[int]:
    """Return how many sums of each stream, from the first on, torch can run."""
    counts = []
    for stream in network.streams:
        known = [{g[0].anchor.state, g[0].anchor.total} <= found.names.keys() for g in sums(stream)]
        counts.append(known.index(False) if False in known else len(known))
    return counts


def _renamed(network: Network, found: Mirror, counts: Sequence[int]) -> Network:
    """Return a picture up to a sum of each stream, by the names of the nodes that torch runs."""
    streams = []
    for stream, many in zip(network.streams, counts, strict=False):
        blocks = [b for group in sums(stream)[:many] for b in group]
        anchors = [
            replace(b.anchor, state=found.names[b.anchor.state], total=found.names[b.anchor.total]) for b in blocks
        ]
        blocks = [replace(b, anchor=a) for b, a in zip(blocks, anchors, strict=True)]
        streams.append(replace(stream, blocks=tuple(blocks)))
    return replace(network, streams=tuple(streams))


def _differs(side: Side, told: OnnxSide, found: Mirror, batch: Named, axes: Mapping[str, int]) -> str:
    """Return where torch computes other values than ONNX Runtime on a batch, or fails; nothing where they agree.

    axes: the nodes of the values, each with its axis of channels.
    """
    names = {node: value for value, node in found.names.items() if node in axes}
    walk = Walk(side.module, list(axes), [batch])
    judge = OnnxModule(widened(told.model, ir.DataType.FLOAT)) if walk.to else runnable(told.model)
    wanted = judge.watch(list(names.values()), **batch)
    while not walk.over:
        end = walk.end
        try:
            states = walk.go()
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as fault:
            return f"torch does not run it: {str(fault).partition(chr(10))[0]}"
        if end:
            there = wanted[names[end]].movedim(axes[end], -1).float()
            here = states[0].movedim(axes[end], -1).float()
            if here.shape != there.shape or not _error(here, there) <= CLOSE:
                return f"torch computes {names[end]} otherwise than ONNX Runtime"
    return ""


def _error(here: Tensor, there: Tensor) -> float:
    sizes = there.norm(dim=-1).clamp_min(torch.finfo(there.dtype).tiny)
    return float(((here - there).norm(dim=-1) / sizes).square().mean().sqrt())
