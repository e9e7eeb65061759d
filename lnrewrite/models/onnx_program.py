"""An ONNX model with its picture: the counterpart of `Program` for graphs that come from a file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, Self, TypeVar

import onnx_ir as ir
import torch
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from .._version import __version__
from ..backends.onnx.branches import chosen
from ..backends.onnx.double import jittered
from ..backends.onnx.editor import OnnxEditor
from ..backends.onnx.file import ONE_FILE, check_finite, read, stamp
from ..backends.onnx.inputs import drawn, example_inputs, spec_of_model
from ..backends.onnx.judging import WAYS, Judge, agrees, in_torch
from ..backends.onnx.norms import RMS
from ..backends.onnx.session import OnnxModule, load, runnable, worked_out
from ..backends.onnx.shapes import infer_shapes
from ..backends.onnx.sizes import bytes_of
from ..backends.onnx.spelled import respell
from ..backends.outputs import apart
from ..backends.rewriter import Rewriter
from ..comparison.proving import FLOOR, NARROW, Evidence, gathered, judged
from ..comparison.verifying import scores_of
from ..data.inputs import parse_inputs
from ..detect.arithmetic import Floats
from ..detect.detection import Detection
from ..detect.graph import OpGraph
from ..errors import Code, LnrewriteError
from ..export.lowering import lower, split
from ..export.targets import TARGETS
from ..files.output import check_output
from ..ir import Proposal, Stream
from ..ir.inputs import InputSpec
from ..kernels.library import DOMAIN, find
from ..loading.identify import listed
from ..loading.transformers import Tokenizer
from ..pipeline.protocols import Bases, Batch
from ..pipeline.report import Fitted, Report
from ..pipeline.results import Gap
from .base import Example, GraphModel
from .calibration import See

TRIED = 20_000
"""A model of more nodes is not tried on numbers: each trial copies it, and a copy of so many takes seconds."""


Given = Mapping[str, object] | Sequence[object] | None
"""Inputs that a user gives: by name, in their order, as `--input` specifications, or none."""


class OnnxProgram(GraphModel[ir.TensorProtocol]):
    """Hold an ONNX model and the picture that detection makes of it; `lnrewrite.load` makes it of a file.

    It offers what `Program` does, except training: its `module()` runs the model in ONNX Runtime. `style` is the target
    whose forms the file's norms have, so that a rewritten model is saved in the same: Skip* operators are held as the
    add and the norm that they compute. `done` are the passes that were applied.
    """

    format = "onnx"
    tokenizer: Tokenizer | None = None

    def __init__(
        self,
        model: ir.Model,
        *,
        style: str = "generic",
        given: Example | None = None,
        done: tuple[str, ...] = (),
        file: tuple[Path, str] | None = None,
    ) -> None:
        self.model, self.style, self.done = model, style, done
        self._given, self._file = given, file

    @classmethod
    def open(
        cls, path: Path, name: str, inputs: Given = None, seed: int = 0, tokenizer: Tokenizer | None = None
    ) -> Self:
        """Read a file, `name` in errors. inputs: as `lnrewrite.load` takes them; None makes them up when needed.

        Raises LnrewriteError LN024 for weights that are NaN or infinite, LN034 for two models in one, and what reading
        the file raises.
        """
        model = read(path, name)
        if chosen(model):
            why = "its network stands in both branches of an If, which an input chooses"
            remedy = "give its folder to `opt`, `convert` or `export`, with a folder as OUT: it becomes two files there"
            raise LnrewriteError(Code.LN034, f"model {name!r}", why, remedy)
        made = cls.of(model, name, inputs, seed, tokenizer)
        made._file = path, name
        return made

    @classmethod
    def of(
        cls, model: ir.Model, name: str, inputs: Given = None, seed: int = 0, tokenizer: Tokenizer | None = None
    ) -> Self:
        """Take a model over that was read from a file, or is a part of one: see `open`."""
        check_finite(model, name)
        LiftConstantsToInitializersPass(lift_all_constants=False, size_limit=2)(model)
        plain = any(n.op_type == RMS for n in model.graph)
        style = "cuda" if split(model) else "as it is" if plain else "generic"
        made = cls(model, style=style, given=_named(model, inputs, seed))
        made.tokenizer = tokenizer
        with made._valid():
            infer_shapes(model)  # what is too large is told before it is run
        return made

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what `Program.notes` does, and which weights are inputs too: before IR 4 all had to be."""
        given = [repr(v.name) for v in self.model.graph.inputs if v.const_value is not None]
        if not given or self.model.ir_version < 4:
            return super().notes
        return (*super().notes, f"weights that are inputs too, {listed(given)}, are taken as stored: callers give none")

    @property
    def fixed_paths(self) -> tuple[str, ...]:
        """Return what was fixed in the torch model that this one was exported from."""
        return tuple(json.loads(self.model.metadata_props.get("lnrewrite.fixed_paths", "[]")))

    @cached_property
    def kernels(self) -> OnnxModule | None:
        """Return the file run by lnrewrite's kernels; None where it holds no operators of it, or none are built."""
        if self._file is None or DOMAIN not in self.model.graph.opset_imports or find() is None:
            return None
        return OnnxModule(read(*self._file, inline=False))

    def _lift(self) -> OpGraph:
        with self._valid():
            return respell(self.model)

    @cached_property
    def detection(self) -> Detection:
        """Return what is found in the graph: the network, the norms and their names."""
        with self._valid():
            return super().detection

    @contextmanager
    def _valid(self) -> Iterator[None]:
        """Raise LN030 for an error that comes of a model which ONNX Runtime does not take either."""
        try:
            yield
        except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError):
            load(self.model)
            raise

    @cached_property
    def _module(self) -> OnnxModule:
        return runnable(self.model)

    def module(self) -> OnnxModule:
        """Return the model as a module that runs in ONNX Runtime: called by input names, gives a dict of tensors."""
        return self._module

    @cached_property
    def _inputs(self) -> Example:
        if self._given is not None:
            return dict(self._given)
        return example_inputs(self.model, lambda inputs: self.module()(**inputs))

    def example_inputs(self) -> Example:
        """Return inputs that the model accepts, by name."""
        return dict(self._inputs)

    @cached_property
    def _declared(self) -> InputSpec:
        return spec_of_model(self.model)

    @cached_property
    def spec(self) -> InputSpec:
        """Return what the model is called with."""
        shapes = {name: value.shape for name, value in self._inputs.items()}
        return self._declared.at({d: shapes[i.name][axis] for i in self._declared for axis, d in i.free.items()})

    def dynamic_axes(self) -> dict[str, dict[int, str]]:
        """Return, for each input, its dynamic axes and the names of their sizes."""
        return self._declared.axes

    def id_limits(self) -> dict[str, int]:
        """Return how many rows the table has that each integer input looks up."""
        return self._declared.rows

    def is_ones(self, param: str) -> bool:
        """Return whether every value of an initializer is one."""
        return bool((self.values(param) == 1).all())

    def is_zeros(self, param: str) -> bool:
        """Return whether every value of an initializer is zero."""
        return bool((self.values(param) == 0).all())

    def _held(self, param: str) -> ir.TensorProtocol | None:
        found = self.model.graph.initializers.get(param)
        return None if found is None else found.const_value

    def shape(self, param: str) -> tuple[int, ...]:
        """Return an initializer's shape."""
        return tuple(int(str(size)) for size in self._known(param).shape)

    def _array(self, held: ir.TensorProtocol) -> Floats:
        return held.numpy().astype("float64")

    def _worked_out(self, name: str) -> Floats:
        return worked_out(self.model, name)

    def observe(self, batch: Batch, wanted: Collection[str], see: See) -> None:
        """Run the model on one batch and show the values of some of its nodes, in the order of the graph."""
        found = self.module().watch(list(wanted), **self._by_name(batch))
        for name in sorted(wanted, key=self.graph.index.__getitem__):
            see(name, found.pop(name))

    def synthetic(self, seed: int) -> Sequence[Batch]:
        """Make up eight batches of inputs that the model accepts."""
        from ..data.batches import synthetic

        return list(synthetic(self.example_inputs(), self.id_limits(), batches=8, seed=seed))

    def at_other_sizes(self, seed: int) -> Sequence[Batch]:
        """Make up one batch at each of a few other sizes of the dynamic dimensions."""
        return [drawn(each, seed) for each in islice(self.spec.more(), 6)]

    def _evidence(self, seed: int) -> Evidence | None:
        if self.model.graph.num_nodes() > TRIED:
            return None
        batches = self.trials(seed)
        large = bytes_of(self.model) > ONE_FILE  # it is run as it is, for memory
        for way, (judge, wide) in enumerate(WAYS):
            if (large and wide) or not (found := _heard(judge, self.model, batches, wide)):
                continue
            if judge is not in_torch or agrees(self.model, found.batches[0], found.outputs[0]):
                return replace(found, way=way)
        return None

    def away(self, evidence: Evidence) -> Gap:
        """Return how far this program's outputs are from another's evidence."""
        judge, wide = WAYS[evidence.way]
        try:
            run = judge(self.model)
            found = [run(batch) for batch in evidence.batches] if run else []
        except (LnrewriteError, RuntimeError):  # what does not run computes nothing
            run = None
        if run is None:
            return Gap(math.inf)
        error = apart(evidence.outputs, found)
        if error <= (FLOOR if wide else NARROW):
            return Gap(error, rounding=True)
        try:
            again = judge(jittered(self.model))
            noise = apart(found[-1:], [again(evidence.batches[-1])]) if again else math.inf
        except (LnrewriteError, RuntimeError):  # what rounding does to a model that does not bear it is not known
            noise = math.inf
        return judged(error, noise)

    @property
    def narrow(self) -> bool:
        """Return whether initializers are stored in float16, where edits are rounded (CPUs do not run bfloat16)."""
        return any(v.dtype == ir.DataType.FLOAT16 for v in self.model.graph.initializers.values())

    def apply(self, edits: Sequence[tuple[Stream, Proposal]], label: str, *, consume: bool = False) -> tuple[Self, int]:
        """Carry edits out on a copy, weights lazily, and return it with their number; a copy costs nothing to save."""
        model = self.model.clone()
        vectors = {k: v for _, p in edits for k, v in p.vectors.items()}
        count = Rewriter(OnnxEditor(model, self.graph), self.graph, vectors).carry_out(edits, label)
        return self._as(model, (*self.done, label)), count

    def fitted(
        self, original: OnnxProgram, blocks: Bases, fit: Sequence[Batch], held: Sequence[Batch]
    ) -> tuple[Self, tuple[Fitted, ...], tuple[str, ...]]:
        """Return the model with some blocks' branches fitted to what `original` does on data; this one is used up."""
        from ..reconstruction.onnx_models import OnnxSide, fitted_onnx

        at = scores_of(original.call(original.example_inputs()), original.network)
        scores = "" if at is None else str(original.model.graph.outputs[at].name)
        sides = [OnnxSide(p.model, p.network, p.id_limits(), scores) for p in (original, self)]
        given = [[original.tensors(b) for b in half] for half in (fit, held)]
        rows, notes, values = fitted_onnx(sides[0], sides[1], blocks, *given)
        for name, value in values.items():
            self.model.graph.initializers[name].const_value = ir.tensor(value, name=name)
        return self._as(self.model, self.done), rows, notes

    def become(self, kind: type[OnnxT]) -> OnnxT:
        """Return this program as one of a subclass."""
        made = kind(self.model, style=self.style, given=self._given, done=self.done, file=self._file)
        made.tokenizer = self.tokenizer
        return made

    def _as(self, model: ir.Model, done: tuple[str, ...]) -> Self:
        """Return a model made of this one, with all that is told of it."""
        made = type(self)(model, style=self.style, given=self._given, done=done)
        made.tokenizer = self.tokenizer
        return made

    def tensors(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Return a batch's inputs by name, of the types that the model declares."""
        return {n: torch.from_numpy(a) for n, a in self.module().feed((), self._by_name(batch)).items()}

    def _by_name(self, batch: Batch) -> Mapping[str, object]:
        return batch if isinstance(batch, Mapping) else dict(zip(self.example_inputs(), batch, strict=True))

    def to_onnx(self, opset: int | None = None, *, kernels: Collection[str] = ()) -> ir.Model:
        """Return a copy of the model. Raises LnrewriteError LN503 where another opset is asked for."""
        held = self.model.opset_imports.get("", 0)
        if opset not in (None, held):
            why = f"the file is of opset {held}"
            raise LnrewriteError(Code.LN503, f"opset {opset}", why, "omit --opset, or export the PyTorch model again")
        return self.model.clone()

    def save(self, path: str | os.PathLike[str], *, force: bool = True) -> None:
        """Write the model as ONNX, proved against this program; whole or not at all.

        Raises LnrewriteError LN025 where it cannot be written, LN032 for a .pt2, LN403 where the proof fails.
        """
        from ..export.writer import TOLERANCE, put

        if Path(path).suffix == ".pt2":
            raise LnrewriteError(Code.LN032, str(path), "the model came from an ONNX file", "name an .onnx file")
        model = self.model.clone()
        if self.style in TARGETS:
            lower(model, TARGETS[self.style], version("onnxruntime"))
        stamp(model, version=__version__, pipeline=",".join(self.done))
        bound = TOLERANCE["fp16" if self.in_half else "fp32"]
        put(model, check_output(path, force), self, bound, force=force)

    def export(self, path: str | os.PathLike[str], **how: Any) -> Report:
        """Write the model as ONNX with the best norm forms of a target; see `lnrewrite.export.writer.export`."""
        from ..export.writer import export

        return export(self, path, **how)


OnnxT = TypeVar("OnnxT", bound=OnnxProgram)


def _heard(judge: Judge, model: ir.Model, batches: Sequence[Batch], wide: bool) -> Evidence | None:
    """Return what a judge says that a model gives; None where it does not run it."""
    try:
        run = judge(model)
    except LnrewriteError:
        return None
    return None if run is None else gathered(run, batches, wide)


def _named(model: ir.Model, inputs: Given, seed: int) -> Example | None:
    """Return inputs by name: those given, or drawn as `--input` specifications say."""
    if inputs is None or isinstance(inputs, Mapping):
        return None if inputs is None else dict(inputs)
    names = [v.name or "" for v in model.graph.inputs]
    specs = [i for i in inputs if isinstance(i, str)]
    if len(specs) < len(inputs):
        return dict(zip(names, inputs, strict=True))
    drawn = parse_inputs(specs, seed=seed, vocabulary=min(spec_of_model(model).rows.values(), default=2))
    return {**dict(zip(names, drawn.args, strict=False)), **drawn.kwargs}
