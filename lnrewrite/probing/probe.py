"""Probe a model: run it on data once, and say what its streams hold by depth."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..api import load
from ..data.batches import Data
from ..data.calibration import check_data, read_batches
from ..detect.misses import none_found
from ..errors import LnrewriteError
from ..ir import Block, Stream, sums
from ..ir.summary import describe
from ..models.program import Program
from ..pipeline.feed import Feed
from ..pipeline.protocols import Batch
from ..quiet import LOGGER
from .attention import ATTENTION, Sinks
from .figures import BlockFigures, Gain, Headroom, Probe, StreamFigures
from .gradients import gradient_norms
from .measuring import Meter
from .outliers import Reads
from .predicting import expected, growth

if TYPE_CHECKING:
    from ..models.onnx_program import OnnxProgram

FP16 = 65504.0
PRODUCTS = {"linear", "matmul", "mm", "bmm", "baddbmm", "addmm", "conv", "conv_transpose", "einsum", ATTENTION}
"""What multiplies in half precision: the numbers that these read and write are to fit into it."""
MASK = 1e30
"""A number of this size or more, or an infinity, hides a position: it is no activation."""
MADE_UP = (
    "no data were given, so the figures rest on made-up inputs and may be far from what real ones give; "
    "give real ones with --data DATA (data=...)"
)


def probe(
    model: str | os.PathLike[str] | Program | OnnxProgram,
    data: str | Iterable[Batch] | None = None,
    *,
    seed: int = 0,
    gradients: bool = True,
    name: str | None = None,
    **how: Any,
) -> Probe:
    """Run a model on data and return the figures of its streams by depth: see `Probe`.

    model: anything that `load` opens, or a program. data: DATA of the command line, or batches; None makes inputs up.
    gradients: whether to differentiate the model too, where that can be (torch, up to 268 million parameters). how: as
    `load` takes it. Raises LnrewriteError LN201 where no residual block was found, LN022 for data that do not fit,
    LN026 for states that are NaN or infinite.
    """
    if isinstance(model, (str, os.PathLike)):
        name = name or os.fspath(model)
        model = load(model, seed=seed, **how)
    if not model.network.blocks:
        raise none_found(name or "model", model.certified.refusals)
    return Prober(model, batches_of(model, data, seed)).run(name or "model", data, gradients)


def batches_of(model: Program | OnnxProgram, data: str | Iterable[Batch] | None, seed: int) -> Sequence[Batch]:
    """Return the batches of DATA as a model reads it, or those that are given; None makes some up."""
    if not isinstance(data, str):
        return Feed(model, data, seed, None).batches
    check_data(data)
    LOGGER.info(f"reading {data}")
    return read_batches(Data.of(model, data).settled(model.call), seed)


class Prober:
    """Run a model on batches, in memory that a batch's states bound, and gather the figures."""

    def __init__(self, model: Program | OnnxProgram, batches: Sequence[Batch]) -> None:
        self.model, self.batches = model, batches
        self.meters = [Meter(s) for s in model.network.streams if s.blocks]
        self.reads = [Reads(meter.stream) for meter in self.meters]
        module = model.module() if isinstance(model, Program) else None
        self.sinks = Sinks(model.graph, module, model.network.blocks)
        self.peaks: dict[str, float] = {}
        self.products = self._products()

    def _products(self) -> dict[str, None]:
        """Return the nodes of numbers that linear maps and streams read and write, stored ones left out."""
        graph, found = self.model.graph, dict[str, None]()
        for op in graph:
            if op.kind in PRODUCTS:
                read = op.data[:3] if op.kind == ATTENTION else op.data
                found.update(dict.fromkeys((*read, op.name)))
        for meter in self.meters:
            found.update(dict.fromkeys(meter.wanted))
        return {n: None for n in found if n not in graph.constant and "float" in graph[n].dtype}

    def see(self, name: str, value: Tensor) -> None:
        """Take a node's value."""
        for meter, reads in zip(self.meters, self.reads, strict=True):
            meter.see(name, value)
            reads.see(name, value)
        self.sinks.see(name, value)
        if name in self.products:
            self.peaks[name] = max(self.peaks.get(name, 0.0), largest(value))

    def run(self, name: str, data: object, gradients: bool) -> Probe:
        """Run all batches and return the figures."""
        wanted = {*self.products, *self.sinks.wanted, *(n for m in self.meters for n in m.wanted)}
        wanted.update(*(r.places for r in self.reads))
        with torch.no_grad():
            for index, batch in enumerate(self.batches, 1):
                self.model.observe(batch, wanted, self.see)
                for meter in self.meters:
                    meter.end()
                self.sinks.end()
                LOGGER.info(f"batch {index}/{len(self.batches)}")
        norms: dict[str, float] = {}
        what, notes = None, [] if data is not None else [MADE_UP]
        if gradients and isinstance(self.model, Program):
            LOGGER.info("taking gradients")
            norms, said = gradient_norms(self.model, self.batches)
            what, notes = (said, notes) if norms else (None, [*notes, said])
        shares, model = self.sinks.shares(), self.model
        streams = tuple(self._stream(m, norms, shares) for m in self.meters)
        at = max(self.peaks, key=self.peaks.__getitem__)
        top = self.peaks[at]
        return Probe(
            model=name,
            format=self.model.format,
            placement=self.model.network.placement,
            data=data_name(data),
            tokens=max(len(m.states[0].tokens) for m in self.meters),
            streams=streams,
            massive=tuple(massive for m in self.meters for massive in m.massive.values()),
            fp16=Headroom(top, FP16 / top if top else None, at),
            outliers=tuple(figure for r in self.reads for figure in r.figures()),
            differentiated=what,
            notes=(*self.model.notes, *notes),
            picture=describe(model.network, model.format, model.is_ones, model.is_zeros, model.notes),
        )

    def _stream(self, meter: Meter, norms: Mapping[str, float], shares: Mapping[str, float]) -> StreamFigures:
        stream = meter.stream
        grown = growth(meter)
        blocks = [self._block(meter, i, b, norms, shares, grown) for i, group in enumerate(sums(stream)) for b in group]
        width = stream.width or int(meter.channels[0].numel() if meter.channels[0] is not None else 0)
        distances, gains = meter.distances(), tuple(self._gains(stream))
        return StreamFigures(stream.name, width, meter.figures(), tuple(blocks), distances, gains)

    def _block(
        self,
        meter: Meter,
        index: int,
        block: Block,
        norms: Mapping[str, float],
        shares: Mapping[str, float],
        grown: Sequence[Tensor | None],
    ) -> BlockFigures:
        branch, before = meter.values[block.anchor.branch][0].whole, meter.states[index].whole
        cosine = meter.cosine(index, index + 1)
        return BlockFigures(
            block.name,
            block.kind,
            str(block.placement),
            branch_ratio=branch / before if before else 0.0,
            influence=None if cosine is None else 1 - cosine,
            gradient_norm=norms.get(block.name),
            sink=shares.get(block.name),
            expected_error=expected(meter, index, block, grown[index]),
        )

    def _gains(self, stream: Stream) -> Iterable[Gain]:
        for name, _, site in stream.located():
            norm = site.norm
            try:
                gain = self.model.values(norm.gamma) + norm.plus_one if norm.gamma else None
                bias = self.model.values(norm.beta) if norm.beta else None
            except LnrewriteError:  # computed from what is not stored
                continue
            sizes = (1.0, 1.0) if gain is None else (float((gain**2).mean() ** 0.5), float(abs(gain).max()))
            yield Gain(name, str(norm.kind), norm.eps, *sizes, 0.0 if bias is None else float((bias**2).mean() ** 0.5))


def data_name(data: object) -> str:
    """Return what figures call the data they were taken on: its file's name where it has one."""
    return "synthetic" if data is None else data if isinstance(data, str) else "given"


def largest(value: Tensor) -> float:
    """Return the size of a value's largest number, masks left out; 0 of none."""
    if not value.numel():
        return 0.0
    top = max(abs(float(end)) for end in value.aminmax())  # of logits, a copy would be the largest value of all
    if top < MASK:
        return top
    sizes = value.abs()
    return float(torch.where(sizes < MASK, sizes, 0).max())
