"""A captured model with its picture: load or capture it, look at it, run a pipeline on it, save it."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from ..backends.inputs import resized, spec_of
from ..backends.rewriter import Rewriter
from ..backends.torch.archived import check_archivable, check_written, with_plain_outputs
from ..backends.torch.capture import Capture, capture_module, export_again
from ..backends.torch.contexts import quiet
from ..backends.torch.editor import FxEditor
from ..backends.torch.fixed import fixed_paths
from ..backends.torch.lift import lift
from ..backends.torch.module import (
    Called,
    CapturedModule,
    brought,
    home,
    move,
    output_at,
    signature_of,
    stored,
)
from ..backends.torch.widened import is_narrow, worked_out
from ..comparison.proving import Evidence, away, evidence
from ..comparison.verifying import scores_of
from ..compat.torch import sizes_of
from ..detect.arithmetic import Floats
from ..detect.graph import OpGraph
from ..errors import Code, LnrewriteError
from ..files.landing import poured, write_whole
from ..files.output import check_output
from ..ir import Proposal, Stream
from ..ir.inputs import InputSpec
from ..pipeline.protocols import Bases, Batch, Samples
from ..pipeline.report import Fitted, Report
from ..pipeline.results import Gap
from . import calibration
from .base import Example, GraphModel
from .checks import check_finite, need_onnx
from .sampling import Sampled

if TYPE_CHECKING:
    import onnx_ir as ir

    from ..loading.transformers import Tokenizer

TRIED = 32
"""How many batches are made up where some take another path than the captured one."""


class Program(GraphModel[torch.Tensor]):
    """Hold a captured model: its graph with parameters, example inputs, and the picture that detection makes of it.

    Made by `lnrewrite.load` and `lnrewrite.capture`; passes never change it, they give a new one.
    """

    def __init__(self, capture: Capture, *, format: str = "module", tokenizer: Tokenizer | None = None) -> None:
        self._capture, self.told = capture, capture.notes
        self.format, self.tokenizer = format, tokenizer

    @property
    def fixed_paths(self) -> tuple[str, ...]:
        """Return what the capture fixed that the module itself chooses by its data; the graph asserts each."""
        return fixed_paths(self._capture.module.graph)

    @property
    def calls(self) -> tuple[Called, ...]:
        """Return what entered and left the submodules that the capture was told to watch."""
        found: tuple[Called, ...] = self._capture.module.meta["calls"]
        return found

    def _lift(self) -> OpGraph:
        return lift(self._capture.module)

    def module(self) -> CapturedModule:
        """Return the model as a trainable nn.Module, the same object at each call, called as the original was."""
        return self._capture.module

    def example_inputs(self) -> Example:
        """Return the inputs that the model was captured with, by name."""
        s = signature_of(self._capture.module)
        return {**dict(zip(s.positional, self._capture.args, strict=True)), **self._capture.kwargs}

    @cached_property
    def spec(self) -> InputSpec:
        """Return what the model is called with."""
        return spec_of(self.example_inputs(), self.dynamic_axes(), self.id_limits())

    def dynamic_axes(self) -> dict[str, dict[int, str]]:
        """Return, for each input, its dynamic axes and the names of their sizes."""
        nodes = [n for n in self._capture.module.graph.nodes if n.op == "placeholder"]
        shapes = [sizes_of(n.meta["val"]) for n in nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        axes = [{i: s for i, s in enumerate(shape) if isinstance(s, str) and not s.isdigit()} for shape in shapes]
        return dict(zip(self.example_inputs(), axes, strict=False))

    def is_ones(self, param: str) -> bool:
        """Return whether every value of a parameter is one (unknown values are not)."""
        return self._all(param, 1.0)

    def is_zeros(self, param: str) -> bool:
        """Return whether every value of a parameter is zero (unknown values are not)."""
        return self._all(param, 0.0)

    def _all(self, param: str, number: float) -> bool:
        tensor = self._held(param)
        return tensor is not None and not tensor.is_meta and bool((tensor == number).all())

    def _held(self, param: str) -> torch.Tensor | None:
        return stored(self._capture.module, param)

    @property
    def empty(self) -> bool:
        """Return whether the module holds no numbers: its parameters are on the meta device."""
        return any(p.is_meta for p in self._capture.module.parameters())

    def dtype(self, param: str) -> torch.dtype:
        """Return the dtype in which a parameter is stored."""
        return self._known(param).dtype

    def rows(self, param: str, which: slice) -> torch.Tensor:
        """Return some of a parameter's rows, or all of one that has no axes."""
        held = self._known(param).detach()
        return held[which] if held.dim() else held

    def remade(self, change: Callable[[str, torch.Tensor], torch.Tensor], onto: torch.device | None = None) -> Program:
        """Return this model with other parameters, by name and what they were; it shares all else, and ties stay.

        onto: where what the graph makes of nothing is made from then on.
        """
        mine = self._capture.module
        made = {id(b): b for b in mine.buffers()}
        for name, parameter in mine.named_parameters():
            made[id(parameter)] = nn.Parameter(change(name, parameter), parameter.is_floating_point())
        with quiet():
            module = copy.deepcopy(mine, made)
        if onto is not None:
            move(module, onto)
        return Program(replace(self._capture, module=module), format=self.format, tokenizer=self.tokenizer)

    def on(self, device: torch.device) -> Program:
        """Return this model on a device: itself where it is there, holds no numbers, or lies on many."""
        if self.empty or home(self._capture.module) in (device, None):
            return self
        made = self.remade(lambda _, parameter: parameter.detach().to(device), device)
        made.module().to(device)
        c = made._capture
        args, kwargs = brought((c.args, c.kwargs), c.module)
        return Program(replace(c, args=args, kwargs=kwargs), format=self.format, tokenizer=self.tokenizer)

    def placed(self, batch: Batch) -> Batch:
        """Return a batch on the device of the model."""
        found: Batch = brought(super().placed(batch), self._capture.module)
        return found

    def shape(self, param: str) -> tuple[int, ...]:
        """Return a parameter's shape."""
        return tuple(self._known(param).shape)

    def _array(self, held: torch.Tensor) -> Floats:
        return held.detach().double().cpu().numpy()

    def _worked_out(self, name: str) -> Floats:
        return self._array(worked_out(self._capture.module, name))

    def observe(self, batch: Batch, wanted: Collection[str], see: calibration.See) -> None:
        """Run the model on one batch and show the values of some of its nodes, each as it is made."""
        calibration.observe(self._capture.module, batch, wanted, see)

    def samples(self, batches: Sequence[Batch]) -> Mapping[str, Samples]:
        """Return what each block sees and does on the batches, [tokens, width] each; they are run when it is asked."""
        return Sampled(self.network, self._capture.module, batches)

    def synthetic(self, seed: int) -> Sequence[Batch]:
        """Make up eight batches of inputs like the example inputs."""
        from ..data.batches import synthetic

        if self.empty:
            why = "the model is on the meta device and holds no numbers"
            raise LnrewriteError(Code.LN026, "calibration", why, "load its weights first")
        example = {k: v for k, v in self.example_inputs().items() if isinstance(v, torch.Tensor)}
        limits = self.id_limits()
        if self.fixed_paths:
            return self._on_path(synthetic(example, limits, batches=TRIED, seed=seed))
        found = list(synthetic(example, limits, batches=8, seed=seed))
        if any(not v.is_floating_point() and n not in limits for n, v in example.items()):
            try:
                self._record(found[0], ())
            except LnrewriteError:  # integers that mean something, such as boxes: those of the example do
                return list(synthetic(example, limits, batches=8, seed=seed, keep=True))
        return found

    def _on_path(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return the first eight batches that take the captured path. Raises LnrewriteError LN033 where none does."""
        found: list[Batch] = []
        for batch in batches:
            if not (other := self._elsewhere(batch)):
                found.append(batch)
            if len(found) == 8:
                break
        if not found:
            assert other
            raise LnrewriteError(Code.LN033, "synthetic inputs", f"in {len(batches)} draws {other.why}", other.remedy)
        return found

    def _elsewhere(self, batch: Batch) -> LnrewriteError | None:
        """Return the error of a batch that takes another path than the captured one."""
        try:
            self._record(batch, ())
        except LnrewriteError as error:
            if error.code != Code.LN033:
                raise
            return error
        return None

    def at_other_sizes(self, seed: int) -> Sequence[Batch]:
        """Make up a batch with one row more and one token less, where the model takes that; else none."""
        batch = dict(self.synthetic(seed)[-1])
        return [{each.name: resized(batch[each.name], each.shape) for each in self.spec.fewer()}]

    def id_limits(self) -> dict[str, int]:
        """Return how many rows the table has that each integer input looks up."""
        limits: dict[str, int] = {}
        for op in self.graph:
            if op.kind == "embedding" and len(op.data) > 1 and self.graph[op.data[1]].kind == "input":
                limits[op.data[1]] = self.graph.width(op.data[0], 0)
        return limits

    def _evidence(self, seed: int) -> Evidence | None:
        if self.empty:
            return None
        return evidence(self.module(), self.trials(seed)) or evidence(self.module(), [self.example_inputs()])

    def away(self, evidence: Evidence) -> Gap:
        """Return how far this program's outputs are from another's evidence."""
        return away(self.module(), evidence)

    @property
    def narrow(self) -> bool:
        """Return whether parameters are stored in fewer than 32 bits, so that edits are rounded."""
        return is_narrow(self._capture.module)

    def apply(self, edits: Sequence[tuple[Stream, Proposal]], label: str, *, consume: bool = False) -> tuple[Self, int]:
        """Carry edits out on a copy and return it with their number; `consume` uses this program up instead."""
        module = self._capture.module
        if not consume:
            with quiet():
                module = copy.deepcopy(module)
        vectors = {k: v for _, p in edits for k, v in p.vectors.items()}
        count = Rewriter(FxEditor(module), self.graph, vectors).carry_out(edits, label)
        capture = replace(self._capture, module=module)
        return type(self)(capture, format=self.format, tokenizer=self.tokenizer), count

    def fitted(
        self, original: Program, blocks: Bases, fit: Sequence[Batch], held: Sequence[Batch]
    ) -> tuple[Self, tuple[Fitted, ...], tuple[str, ...]]:
        """Return the model with some blocks' branches fitted to what `original` does on data; this one is used up."""
        from ..reconstruction.reconstruct import Side, fitted

        at = scores_of(original.call(original.example_inputs()), original.network)
        sides = [Side(p.module(), p.network, p.id_limits(), output_at(p.module(), at)) for p in (original, self)]
        held = [b for b in held if not (original.fixed_paths and original._elsewhere(b))]
        rows, notes = fitted(sides[0], sides[1], blocks, fit, held)
        return type(self)(self._capture, format=self.format, tokenizer=self.tokenizer), rows, notes

    def to_onnx(self, opset: int | None = None, *, kernels: Collection[str] = ()) -> ir.Model:
        """Return the model as ONNX, every recognised norm one operator, parameters under their own names.

        Raises LnrewriteError LN501 where torch.onnx has no translation, LN503 for an opset that cannot be written.
        """
        from ..backends.onnx.caching import attend_with
        from ..backends.onnx.export import OPSET, to_onnx
        from ..backends.onnx.norms import EXPERTS, PACKED
        from ..backends.onnx.tidying import tidy

        c, found = self._capture, self.detection
        able = kernels if PACKED in kernels else {EXPERTS}.intersection(kernels)
        prepare = partial(attend_with, kernels=able, unread=False)
        model = to_onnx(c.module, c.args, c.kwargs, found.norms, found.names, opset or OPSET, prepare)
        if PACKED in kernels:
            tidy(model, whole=True)
        return model

    def export(self, path: str | os.PathLike[str], **how: Any) -> Report:
        """Write the model as ONNX with the best norm forms of a target; see `lnrewrite.export.writer.export`."""
        need_onnx(str(path))
        from ..export.writer import export

        return export(self.on(torch.device("cpu")), path, **how)

    def save(self, path: str | os.PathLike[str], *, force: bool = True) -> None:
        """Write the model: a torch.export archive that loads with torch alone or, named .onnx, a generic ONNX model.

        Whole or not at all. Library output classes become plain dicts of the same keys, named tuples plain ones. Raises
        LnrewriteError LN025 where it cannot be written or read again, or exists and `force` is false.
        """
        if os.fspath(path).endswith(".onnx"):
            self.export(path, force=force)
            return
        target = check_output(path, force)
        mine = self._capture.module
        self.check_save(target)
        tensors = {id(t): t for t in (*mine.parameters(), *mine.buffers())}
        with quiet():
            module = with_plain_outputs(copy.deepcopy(mine, tensors).eval())  # a copy that shares the weights
        program = export_again(module, self._capture.args, self._capture.kwargs)
        for graph in (m.graph for m in program.graph_module.modules() if hasattr(m, "graph")):
            for node in graph.nodes:
                node.meta.pop("from_node", None)  # holds ids of this process: the same model shall give the same bytes
        pour = poured(lambda stream: torch.export.save(program, stream))

        def write(made: str) -> None:
            pour(made)
            with quiet():
                check_written(made, mine, str(target))

        write_whole(target, write, force=force)

    def check_save(self, target: os.PathLike[str]) -> None:
        """Raise LnrewriteError LN025 where `save` could not write such a model to a .pt2 that is read again."""
        if not os.fspath(target).endswith(".onnx"):
            check_archivable(self._capture.module, os.fspath(target))


def capture(
    module: nn.Module,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    dynamic_shapes: Mapping[str, object] | Sequence[object] | None = None,
) -> Program:
    """Capture a live module, or an earlier `program.module()`, with example inputs.

    dynamic_shapes as torch.export takes it; None: batch and sequence stay dynamic where a run at a second size agrees.
    A module that chooses its path by its data is captured on the path of these inputs, which the program asserts: see
    `Program.fixed_paths`. What was captured is compared with the module on other inputs.
    Raises LnrewriteError LN020 where its forward does not take these inputs, LN023 where the module cannot be
    exported, LN024 where a parameter is NaN or infinite.
    """
    if not isinstance(module, nn.Module):
        why = f"a {type(module).__name__} was given"
        raise LnrewriteError(Code.LN011, "capture", why, "give a torch.nn.Module; use lnrewrite.load for files")
    check_finite(module)
    return Program(capture_module(module, args, kwargs, dynamic_shapes))
