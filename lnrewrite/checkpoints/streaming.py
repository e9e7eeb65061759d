"""Hold a folder's model whose weights stay on disk: captured from its config, run part by part."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Self

import torch
from torch import nn

from ..backends.inputs import draw, spec_of
from ..backends.rewriter import Rewriter
from ..backends.running import Runnable
from ..backends.torch.capture import Capture, capture_module, evaluating, quiet
from ..backends.torch.dynamic import Shapes
from ..backends.torch.lift import parameter_names
from ..backends.torch.module import stored
from ..backends.torch.walk import Walk
from ..backends.torch.widened import worked_out
from ..comparison.proving import Evidence, away, evidence
from ..comparison.verifying import measured
from ..data.infer import given_inputs, infer_inputs
from ..detect.arithmetic import Floats
from ..errors import Code, LnrewriteError
from ..ir import Proposal, Stream
from ..ir.inputs import InputSpec, plain_content
from ..live.ports import children
from ..loading.checkpoint import empty_model
from ..loading.open import tokenizer_of
from ..loading.source import Format, Source
from ..models.calibration import See
from ..models.program import Program, check_values
from ..models.sampling import Sampled
from ..pipeline.protocols import Batch, Samples
from ..pipeline.results import Drift, Gap
from ..quiet import LOGGER
from .shards import Stored
from .stored import Store, StoredEditor
from .writing import Weights, held_by

LARGE = 1 << 30
"""Of a folder with more bytes of weights these are read part by part, also where a model is run on data."""


def is_large(source: Source) -> bool:
    """Return whether a folder's weights stay on disk when its model is run."""
    return sum(path.stat().st_size for path in source.file.glob("*.safetensors")) > LARGE


@dataclass(frozen=True)
class OnDisk:
    """Hold a folder's network without its weights, where these are, and the program captured from it.

    inputs: what it was captured with, on the meta device.
    """

    module: nn.Module
    weights: Weights
    program: StoredProgram
    dtype: torch.dtype
    inputs: Mapping[str, object]


def on_disk(source: Source, shapes: Shapes) -> OnDisk | None:
    """Capture a folder's model without its weights; None where the folder does not hold them as the network names them.

    Also where the model makes constants as it runs, which are lost without a device that holds numbers.
    shapes: what is dynamic, as `capture_module` takes it; None finds out, and gives None where the model cannot be
    captured without its weights. Raises LnrewriteError LN024 where a weight is NaN or infinite, and what capturing
    raises.
    """
    paths = sorted(source.file.glob("*.safetensors"))
    if not paths:
        return None
    dtype = _dtype(held_by(paths[0]))
    module = empty_model(source, dtype)
    weights = Weights.read(source.file, module)
    if weights is None:
        return None
    LOGGER.info("checking the weights")
    for name, key in weights.keys.items():
        check_values(name, weights.files[key].rows())
    buffers = {n: b.clone() for n, b in module.named_buffers()}
    module.to("meta")
    try:
        inputs = dict((given_inputs(module, source.how) or infer_inputs(module, source.how.seed)).kwargs)
        taken = capture_module(module, (), inputs, shapes, lambda a, k: children(module, a, k))
    except LnrewriteError as error:
        if shapes is None and error.code in (Code.LN020, Code.LN023):  # with its weights it may run, and be captured
            return None
        raise
    store = Store({n: weights.files[key] for n, key in weights.keys.items()}, buffers)
    program = StoredProgram(taken, store, format=source.format, tokenizer=tokenizer_of(source))
    return OnDisk(module, weights, program, dtype, inputs) if program.whole else None


def _dtype(files: Mapping[str, Stored]) -> torch.dtype:
    """Return the dtype of the largest tensor of floating point numbers."""
    floats = [where for where in files.values() if where.dtype.is_floating_point]
    return max(floats, key=lambda where: prod(where.shape)).dtype if floats else torch.float32


def stored_program(source: Source) -> StoredProgram | None:
    """Capture a large folder's model with its weights on disk; None for all else, and for what runs in memory alone.

    That is what chooses its path by its data. Raises as `on_disk`.
    """
    how = source.how
    if source.format is not Format.TRANSFORMERS or how.factory or how.device != "cpu" or not is_large(source):
        return None
    held = on_disk(source, None)
    return None if held is None or held.program.fixed_paths else held.program


class StoredProgram(Program):
    """Hold a model that was captured without its weights: they are read from the folder when something asks."""

    def __init__(self, capture: Capture, store: Store, **how: Any) -> None:
        super().__init__(capture, **how)
        self.store, self.names = store, parameter_names(capture.module)

    @property
    def whole(self) -> bool:
        """Return whether all numbers that the graph reads are here or on disk."""
        module = self._capture.module
        read = {str(n.target) for n in module.graph.find_nodes(op="get_attr")}
        lost = {n for n in read if (held := stored(module, n)) is not None and held.is_meta}
        return all(self.names[n] in self.store.files or self.names[n] in self.store.held for n in lost)

    def _held(self, param: str) -> torch.Tensor | None:
        return None if stored(self._capture.module, param) is None else self.read(param)

    def _evidence(self, seed: int) -> Evidence | None:
        given = drawn(self.example_inputs(), self.id_limits(), seed)
        return evidence(self.module(), [given], self.read)

    def away(self, evidence: Evidence) -> Gap:
        """Return how far this program's outputs are from another's evidence."""
        return away(self.module(), evidence, self.read)

    def _worked_out(self, name: str) -> Floats:
        return self._array(worked_out(self.module(), name, self.read))

    def read(self, param: str) -> torch.Tensor:
        """Return a parameter's values from where they are stored."""
        return self.store.read(self.names[param])

    def dtype(self, param: str) -> torch.dtype:
        """Return the dtype in which a parameter is stored."""
        return self.store.form(self.names[param])[0]

    def rows(self, param: str, which: slice) -> torch.Tensor:
        """Return some of a parameter's rows from where they are stored."""
        return self.store.rows(self.names[param], which)

    @property
    def narrow(self) -> bool:
        """Return False: what exact passes do to the weights is not run on them, so that no drift is measured."""
        return False

    def walk(self, batches: Sequence[Batch], to: torch.dtype | None = None) -> Walk:
        """Return a walk through the model whose parts end in its sums."""
        ends = dict.fromkeys(b.anchor.total for b in self.network.blocks)
        return Walk(self.module(), list(ends), batches, self.read, to)

    def outputs(self, batches: Sequence[Batch], to: torch.dtype | None = None) -> list[object]:
        """Return what the model gives for some batches; each weight is read once for all of them."""
        with evaluating(self.module()), quiet():
            return self.walk(batches, to).results()

    def call(self, batch: Batch) -> object:
        """Return what the model gives for a batch."""
        return self.outputs([batch])[0]

    def in_float64(self) -> Runnable:
        """Return the model as it runs in float64, part by part."""
        return InFloat64(self)

    def observe(self, batch: Batch, wanted: Collection[str], see: See) -> None:
        """Run the model on one batch and show the values of some of its nodes, each as it is made."""
        with evaluating(self.module()), quiet():
            walk = self.walk([batch])
            while not walk.over:
                walk.go(lambda name, _, value: see(name, value) if name in wanted else None)

    def samples(self, batches: Sequence[Batch]) -> Mapping[str, Samples]:
        """Return what each block sees and does on the batches; the walk goes as far as somebody asks."""
        return Sampled(self.network, self.module(), batches, self.read)

    def drift(self, other: Self, batches: Sequence[Batch], held_out: bool) -> Drift:
        """Compare another program's outputs with this one's on the batches, each run through both once."""
        mine, others = (Said(each.outputs(batches)) for each in (self, other))
        return measured(mine, others, batches, held_out)

    def synthetic(self, seed: int) -> Sequence[Batch]:
        """Make up eight batches of inputs like the example inputs."""
        return [drawn(self.example_inputs(), self.id_limits(), 8 * seed + k) for k in range(8)]

    def apply(self, edits: Sequence[tuple[Stream, Proposal]], label: str, *, consume: bool = False) -> tuple[Self, int]:
        """Carry the structure's edits out on a copy, and note those of the weights."""
        module, store = copy.deepcopy(self._capture.module), self.store.fork()
        vectors = {k: v for _, p in edits for k, v in p.vectors.items()}
        count = Rewriter(StoredEditor(module, store), self.graph, vectors).carry_out(edits, label)
        capture = replace(self._capture, module=module)
        return type(self)(capture, store, format=self.format, tokenizer=self.tokenizer), count


@dataclass(frozen=True, eq=False)
class InFloat64(Runnable):
    """Run a stored program in float64."""

    program: StoredProgram

    def call(self, batch: Batch) -> object:
        """Return what the model gives for a batch."""
        return self.program.outputs([batch], torch.float64)[0]

    @property
    def traced(self) -> bool:
        """Return True: it is a graph of torch."""
        return True

    def in_float64(self) -> Runnable:
        """Return this."""
        return self


@dataclass(frozen=True, eq=False)
class Said(Runnable):
    """Repeat what a model has given for some batches, in their order."""

    outputs: list[object]

    def call(self, batch: Batch) -> object:
        """Return the next of the outputs."""
        return self.outputs.pop(0)

    def in_float64(self) -> Runnable:
        """Return this."""
        return self


def drawn(inputs: Mapping[str, object], rows: Mapping[str, int], seed: int) -> dict[str, object]:
    """Return inputs with values for inputs without: ids below a table's rows, ones, or normal numbers."""
    spec = spec_of(inputs, {}, rows)
    plain = (replace(each, content=plain_content(each.dtype, each.rows)) for each in spec)
    return {**inputs, **draw(InputSpec(tuple(plain)), seed)}
