"""What a captured model and an ONNX model have in common: a graph, the picture of it, and questions to its values."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ..backends.inputs import check_ids
from ..backends.running import Runnable, as_runnable
from ..comparison.proving import Evidence
from ..comparison.verifying import drift
from ..detect.arithmetic import Floats, Unknown, affine
from ..detect.detection import Detection, detect
from ..detect.graph import OpGraph
from ..errors import Code, LnrewriteError
from ..export.exportable import Exportable
from ..ir import Network, text
from ..ir.inputs import InputSpec
from ..ir.summary import Picture, describe
from ..pipeline.certifying import certify
from ..pipeline.protocols import Bases, Batch, Samples
from ..pipeline.report import Fitted
from ..pipeline.results import Drift, Gap, Json
from ..pipeline.sounding import Edits
from . import calibration

UNTRIED = "what was detected was not checked numerically: {}"


Example = dict[str, Any]
"""One call's inputs by name: tensors, and of a torch model what else its forward takes."""


StoredT = TypeVar("StoredT")
"""A parameter as a model stores it."""


class GraphModel(Exportable, Generic[StoredT]):
    """See a model as a graph; a subclass says what the graph is, what its parameters hold, and how it runs."""

    format: str
    told: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what a user should know about how the model was opened and captured."""
        return (*self.told, *(f"captured on one path, that of the example inputs: {path}" for path in self.fixed_paths))

    @abstractmethod
    def module(self) -> nn.Module:
        """Return the model as what runs it, the same object at each call."""

    @property
    def traced(self) -> bool:
        """Return whether this is a graph of torch, whose constants were computed when it was captured."""
        return as_runnable(self.module()).traced

    def check_save(self, target: os.PathLike[str]) -> None:
        """Raise LnrewriteError LN025 where it can be said beforehand that `save` will fail."""

    def call(self, batch: Batch) -> object:
        """Return what the model gives for a batch: its tree of outputs, without gradients."""
        return as_runnable(self.module()).call(batch)

    def in_float64(self) -> Runnable:
        """Return a copy of what runs the model, in float64."""
        return as_runnable(self.module()).in_float64()

    @property
    def in_half(self) -> bool:
        """Return whether the model computes in half precision."""
        return any(op.dtype in {"float16", "bfloat16"} for op in self.graph)

    @abstractmethod
    def fitted(
        self, original: Self, blocks: Bases, fit: Sequence[Batch], held: Sequence[Batch]
    ) -> tuple[Self, tuple[Fitted, ...], tuple[str, ...]]:
        """Return the model with some blocks' branches fitted to what `original` does on data; this one is used up."""

    def drift(self, other: Self, batches: Sequence[Batch], held_out: bool) -> Drift:
        """Compare another program's outputs with this one's on the batches."""
        return drift(self.module(), other.module(), batches, held_out)

    @abstractmethod
    def _lift(self) -> OpGraph: ...
    @abstractmethod
    def _held(self, param: str) -> StoredT | None:
        """Return a parameter as the model stores it, or None where there is none of that name."""

    @abstractmethod
    def _array(self, held: StoredT) -> Floats:
        """Return what `_held` gave as a float64 numpy array."""

    @abstractmethod
    def _worked_out(self, name: str) -> Floats:
        """Return the value of a node that stored numbers alone decide, computed in float64."""

    @abstractmethod
    def observe(self, batch: Batch, wanted: Collection[str], see: calibration.See) -> None:
        """Run the model on one batch and show the values of some of its nodes, by name, in the order of the graph."""

    def _record(self, batch: Batch, wanted: Sequence[str]) -> Mapping[str, Tensor]:
        """Run the model on one batch and return the values of some of its nodes."""
        kept: dict[str, Tensor] = {}
        self.observe(batch, wanted, kept.__setitem__)
        return kept

    @abstractmethod
    def is_ones(self, param: str) -> bool: ...
    @abstractmethod
    def is_zeros(self, param: str) -> bool: ...

    @cached_property
    def graph(self) -> OpGraph:
        """Return the neutral view of the model's graph."""
        return self._lift()

    @cached_property
    def detection(self) -> Detection:
        """Return what is found in the graph: the network, the norms and their names."""
        return detect(self.graph)

    @property
    def network(self) -> Network:
        """Return what detection sees in the model."""
        return self.detection.network

    @cached_property
    def certified(self) -> Network:
        """Return what detection sees, tried on the model: with a barrier where it does not hold (LN208)."""
        found = certify(self)
        if found is None:
            self.told = (*self.told, UNTRIED.format(self._silent))
        return found or self.network

    @property
    @abstractmethod
    def narrow(self) -> bool:
        """Return whether weights are stored in so few bits that edits are rounded."""

    def evidence(self, seed: int) -> Evidence | None:
        """Return what this program computes in float64 on made-up inputs, of two sizes where it takes two; once.

        None where it holds no weights, or takes none of those inputs.
        """
        if seed not in self._heard:
            try:
                self._heard[seed] = self._evidence(seed)
            except LnrewriteError as error:  # no inputs can be made up, or it does not run at all
                self._heard[seed], self._silent = None, error.why
        return self._heard[seed]

    _silent = "it holds none, does not run on synthetic inputs, or has too many nodes"
    """Why it has no evidence."""

    @cached_property
    def _heard(self) -> dict[int, Evidence | None]:
        return {}

    @abstractmethod
    def _evidence(self, seed: int) -> Evidence | None: ...
    @abstractmethod
    def apply(self, edits: Edits, label: str, *, consume: bool = False) -> tuple[Self, int]:
        """Carry edits out on a copy and return it with their number; `consume` may use this program up instead."""

    @abstractmethod
    def away(self, evidence: Evidence) -> Gap:
        """Return how far this program's outputs are from another's evidence."""

    @property
    def stream(self) -> Picture:
        """Return the text form of the picture; a notebook shows it as a table."""
        return Picture(text.render(self.certified))

    def inspect(self) -> Json:
        """Return the object of `lnrewrite inspect --json`: streams, blocks, placements, norms, refusals."""
        return describe(self.certified, self.format, self.is_ones, self.is_zeros, self.notes)

    def values(self, param: str) -> Floats:
        """Return the values of a parameter, or of a node computed from parameters, as a float64 numpy array.

        Raises LnrewriteError LN105 where a node computes them in a way that cannot be followed.
        """
        if self._held(param) is None and param in self.graph.constant:
            if param not in self.graph.fixed:
                why = "it depends on the sizes of inputs, or on stored integers"
                raise LnrewriteError(Code.LN105, param, why, "store it as a parameter")
            return self._worked_out(param)
        return self._array(self._known(param))

    @abstractmethod
    def shape(self, param: str) -> tuple[int, ...]:
        """Return a parameter's shape."""

    def affine(self, start: str, end: str, axis: int) -> tuple[Floats, Floats]:
        """Return (a, s), one number per channel each, of a piece of graph that computes a x + s along an axis."""
        try:
            return affine(self.graph, start, end, axis, self.values)
        except Unknown as why:
            raise LnrewriteError(
                Code.LN105, end, f"lnrewrite cannot evaluate {why}", "store its gain and bias as parameters"
            ) from why

    @abstractmethod
    def synthetic(self, seed: int) -> Sequence[Batch]:
        """Make up batches of inputs that the model accepts. Raises LN033 where none takes the captured path."""

    @abstractmethod
    def at_other_sizes(self, seed: int) -> Sequence[Batch]:
        """Make up batches of other sizes than the example inputs, where the model takes such."""

    @property
    @abstractmethod
    def spec(self) -> InputSpec:
        """Return what the model is called with: names, types, sizes, and the rows of tables that ids look up."""

    @abstractmethod
    def example_inputs(self) -> Example:
        """Return inputs that the model accepts, by name."""

    def placed(self, batch: Batch) -> Batch:
        """Return a batch where the model runs, without labels that it does not take.

        Raises LnrewriteError LN022 for ids that a table has no row for.
        """
        names = self.spec.names
        if not isinstance(batch, Mapping):
            if len(batch) < len(names) or not all(isinstance(v, Tensor | np.ndarray) for v in batch):
                return batch
            batch = dict(zip(names, batch, strict=False))
        if "labels" not in names:
            batch = {name: value for name, value in batch.items() if name != "labels"}
        for name, rows in self.spec.rows.items():
            if name in batch:
                check_ids(name, rows, torch.as_tensor(batch[name]), "calibration data")
        return batch

    def trials(self, seed: int) -> Sequence[Batch]:
        """Return inputs to compare by: made up, of two sizes; the example inputs where those take another path."""
        try:
            return [next(iter(self.synthetic(seed))), *self.at_other_sizes(seed)]
        except LnrewriteError as error:
            if error.code != Code.LN033:
                raise
            return [self.example_inputs()]

    def samples(self, batches: Sequence[Batch]) -> Mapping[str, Samples]:
        """Run the model on the batches and return what each block saw and did, [tokens, width] each."""
        return calibration.collect(self.network, self._record, batches)

    def recorded(self, batches: Sequence[Batch], axes: Mapping[str, int]) -> Mapping[str, Floats]:
        """Run the model on the batches and return values of its graph, [tokens, channels at the axis of each]."""
        width = max((self.graph.width(name, axis) for name, axis in axes.items()), default=0)
        return calibration.recorded(axes, width, self._record, batches)

    def peaks(self, batches: Sequence[Batch]) -> Mapping[str, float]:
        """Run the model on the batches and return the size of the largest number in each value of its graph."""
        return calibration.peaks(self.graph, self._record, batches)

    def _known(self, param: str) -> StoredT:
        held = self._held(param)
        if held is None:
            raise LnrewriteError(
                Code.LN301, param, "the model has no parameter of this name", "report this with the model"
            )
        return held
