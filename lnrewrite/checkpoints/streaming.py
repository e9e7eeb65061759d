"""Run a model whose weights stay on disk, part by part: captured without them, each is read when something asks."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from ..backends.inputs import draw, spec_of
from ..backends.rewriter import Rewriter
from ..backends.running import Runnable
from ..backends.torch.capture import Capture
from ..backends.torch.contexts import evaluating, quiet
from ..backends.torch.lift import parameter_names
from ..backends.torch.module import stored
from ..backends.torch.walk import Walk
from ..backends.torch.widened import worked_out
from ..comparison.proving import Evidence, away, evidence
from ..comparison.verifying import measured, shown_by
from ..detect.arithmetic import Floats
from ..ir import Proposal, Stream
from ..ir.inputs import InputSpec, plain_content
from ..models.calibration import See
from ..models.program import Program
from ..models.sampling import Sampled
from ..pipeline.protocols import Batch, Samples
from ..pipeline.results import Drift, Gap
from .stored import Store, StoredEditor


class StoredProgram(Program):
    """Hold a model that was captured without its weights: they are read from the folder when something asks."""

    def __init__(self, capture: Capture, store: Store, **how: Any) -> None:
        super().__init__(capture, **how)
        self.store, self.names = store, parameter_names(capture.module)

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
        return measured(mine, others, batches, held_out, shown_by(self, batches))

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
