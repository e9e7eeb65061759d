"""Run an ONNX model as a torch module is run: in ONNX Runtime, or in float64 as the judge of exact rewrites."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import Tensor

from ...errors import Code, LnrewriteError
from ...ir.inputs import Input, plain_content
from ...kernels.library import DOMAIN, find, register
from ...pipeline.protocols import Batch
from ..inputs import check_names, fitted
from ..running import Runnable
from .double import doubled, is_in, widened
from .file import whole, write
from .lift import captured, size
from .remote import Died, Failed, RemoteSession
from .server import AS_IT_IS, LEVELS
from .sizes import bytes_of, check_sizes

TORCH = {
    ir.DataType.FLOAT: torch.float32, ir.DataType.DOUBLE: torch.float64, ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16, ir.DataType.INT64: torch.int64, ir.DataType.INT32: torch.int32,
    ir.DataType.BOOL: torch.bool, ir.DataType.INT8: torch.int8, ir.DataType.UINT8: torch.uint8,
    ir.DataType.INT16: torch.int16,
}  # fmt: skip


def worked_out(model: ir.Model, name: str) -> NDArray[np.float64]:
    """Return the value in float64 of what initializers alone decide, by running what computes it."""
    part = model.clone()
    end = ir.convenience.create_value_mapping(part.graph, include_subgraphs=False)[name]
    needed, todo = set[ir.Node](), [end]
    while todo:
        node = todo.pop().producer()
        if node is not None and node not in needed:
            needed.add(node)
            todo += [value for value in (*node.inputs, *captured(node)) if value is not None]
    part.graph.remove([node for node in part.graph if node not in needed])
    part.graph.inputs.clear()
    part.graph.outputs.clear()
    part.graph.outputs.append(end)
    RemoveUnusedNodesPass()(part)
    return OnnxModule(doubled(part), "float64")()[name].double().numpy()


class OnnxModule(Runnable, torch.nn.Module):
    """Call an ONNX model by its inputs' names (or in their order); returns its outputs by name, tensors on the CPU.

    `precision` says what it computes in: as the model is written, or float64 after `in_float64()`.
    """

    def __init__(self, model: ir.Model, precision: str = "as written") -> None:
        super().__init__()
        self.model, self.precision = model, precision
        self.levels = LEVELS if precision == "as written" else AS_IT_IS
        self._watched: dict[tuple[str, ...], RemoteSession] = {}

    def forward(self, *args: object, **inputs: object) -> dict[str, Tensor]:
        """Run the model. Raises LnrewriteError LN022 for wrong inputs, LN030 where ONNX Runtime refuses the model."""
        return self.watch((), *args, **inputs)

    def watch(self, names: Sequence[str], *args: object, **inputs: object) -> dict[str, Tensor]:
        """Run the model and return the values of these names too."""
        key = tuple(sorted(set(names)))
        if key not in self._watched or self._watched[key].gone:
            self._watched[key] = load(_watching(self.model, key), self.levels)
        held = [str(v.name) for v in self.model.graph.outputs]
        wanted = [*held, *(n for n in key if n not in held)]
        try:
            found = self._watched[key](self.feed(args, inputs))
        except Failed as why:
            raise LnrewriteError(Code.LN022, "ONNX Runtime", _telling(why), "give inputs that the model takes") from why
        except Died as how:
            raise _dead(how) from how
        if len(found) != len(wanted):
            seen = f"{len(wanted)} outputs are declared, of which ONNX Runtime finds {len(found)}"
            raise LnrewriteError(Code.LN030, "the model", seen, "give each output a name of its own")
        return {name: torch.from_numpy(np.array(array)) for name, array in zip(wanted, found.values(), strict=True)}

    def call(self, batch: Batch) -> dict[str, Tensor]:
        """Return the model's outputs for a batch, whose inputs go by their order where they bear other names."""
        if not isinstance(batch, Mapping):
            return self(*batch)
        if len(self.inputs) == len(batch) and set(self.inputs) != set(batch):
            batch = dict(zip(self.inputs, batch.values(), strict=True))
        return self(**batch)

    @property
    def notes(self) -> list[str]:
        """Return what a user should know of how the model ran."""
        if all(session.level == self.levels[0] for session in self._watched.values()):
            return []
        return ["ONNX Runtime dies on it at its highest level of optimization (it ran at the next); a session of the "
                "CPU needs graph_optimization_level = ORT_ENABLE_EXTENDED"]  # fmt: skip

    @cached_property
    def inputs(self) -> dict[str, ir.Value]:
        """Return the inputs that a call gives, by name."""
        return {str(v.name): v for v in self.model.graph.inputs if v.const_value is None}

    def feed(self, args: Sequence[object], inputs: Mapping[str, object]) -> dict[str, np.ndarray]:
        """Return a call's inputs as arrays of the types that the model declares."""
        given: dict[str, object] = {**dict(zip(self.inputs, args, strict=False)), **inputs}
        check_names(tuple(self.inputs), given, "inputs")
        return {name: self.array(value, given[name]) for name, value in self.inputs.items()}

    def array(self, like: ir.Value, given: object) -> np.ndarray:
        """Return one input as an array of the type that the model declares."""
        tensor = torch.as_tensor(given).detach().cpu()
        tensor = fitted(input_of(like, axes=tensor.dim()), tensor, "inputs", kinds=False)
        return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()

    def in_float64(self) -> OnnxModule:
        """Return the model computing in float64; in float32, where an operator of it is not known here."""
        try:
            return OnnxModule(doubled(self.model), "float64").loaded()
        except LnrewriteError:
            return OnnxModule(widened(self.model, ir.DataType.FLOAT), "float32")

    def loaded(self) -> Self:
        """Return this module, loaded. Raises LnrewriteError LN030 where ONNX Runtime refuses the model."""
        self._watched[()] = load(self.model, self.levels)
        return self

    def double(self) -> OnnxModule:
        """Return the model in float64, as `in_float64`: the weights of this one are in ONNX Runtime."""
        return self.in_float64()


def input_of(value: ir.Value, rows: int = 0, axes: int = 0) -> Input:
    """Describe an input of a model: ids where it looks up `rows`, `axes` where it declares none; a dtype of "": any."""
    declared: Sequence[int | ir.SymbolicDim | None] = [None] * axes if value.shape is None else list(value.shape)
    named = (None if d is None else size(d) for d in declared)
    dims = tuple(f"{value.name}.{i}" if d is None else d for i, d in enumerate(named))
    known = TORCH.get(value.dtype) if value.dtype is not None else None
    dtype = str(known).removeprefix("torch.") if known else ""
    shape = tuple(0 if isinstance(d, str) else d for d in dims)
    return Input(str(value.name), dtype, dims, shape, plain_content(dtype or "float32", rows), rows)


def runnable(model: ir.Model) -> OnnxModule:
    """Return the model as the CPU can run it: in float32, on its rounded weights, where kernels lack (bfloat16)."""
    if is_in(model, ir.DataType.BFLOAT16):
        return OnnxModule(widened(model, ir.DataType.FLOAT), "float32")
    return OnnxModule(model)


PLACE = re.compile(r"/onnxruntime_src/\S+:\d+ [^()]*\((?:[^()]|\([^()]*\))*\)(?: const)? ?")
"""Where in ONNX Runtime's own sources an error was raised: a file, a line, a function's signature."""


SENT = 1 << 27
"""Weights of more bytes are written for ONNX Runtime, and not copied into a message to it, twice."""


def _watching(model: ir.Model, names: Sequence[str]) -> ir.Model:
    """Return the model with these values as further outputs."""
    if not names:
        return model
    model = model.clone()
    values = ir.convenience.create_value_mapping(model.graph)
    held = {v.name for v in model.graph.outputs}
    model.graph.outputs.extend(values[n] for n in names if n not in held)
    return model


def load(model: ir.Model, levels: Sequence[str] = LEVELS) -> RemoteSession:
    """Load a model into ONNX Runtime, bfloat16 inputs and outputs as float32, which numpy has.

    levels: how much ONNX Runtime may change of it, each tried where it dies at the one before.

    Raises LnrewriteError LN030 where ONNX Runtime refuses it or dies on it, LN039 where a value of it is declared too
    large to hold.
    """
    check_sizes(model)
    model, library = _plain_ends(model), None
    if any(node.domain == DOMAIN for node in model.graph) and (library := find()) is not None:  # else by definitions
        import onnxruntime

        register(onnxruntime.SessionOptions(), "the model")  # raises where it does not load
    if (size := bytes_of(model)) <= SENT:
        return _opened(ir.to_proto(whole(model)).SerializeToString(), size, library, levels)
    with tempfile.TemporaryDirectory(prefix="lnrewrite-") as folder:
        return _opened(str(write(model, Path(folder) / "model.onnx", most=SENT)[0]), size, library, levels)


def _opened(model: str | bytes, size: int, library: Path | None, levels: Sequence[str]) -> RemoteSession:
    """Open a file's path or content at the first level of optimization that ONNX Runtime survives."""
    died: Died
    for level in levels:
        try:
            return RemoteSession(model, size, level, str(library) if library else None)
        except Failed as why:
            raise LnrewriteError(Code.LN030, "ONNX Runtime", _telling(why), "see `lnrewrite explain LN030`") from why
        except Died as how:
            died = how
    raise _dead(died) from died


def _dead(how: Died) -> LnrewriteError:
    return LnrewriteError(Code.LN030, "ONNX Runtime", f"its process died: {how}", "see `lnrewrite explain LN030`")


def _telling(why: Exception) -> str:
    """Return the line of ONNX Runtime's message that says what is wrong."""
    told = str(why).partition("\n")[0].rpartition("] : ")[2].partition(" : ")[2] or str(why)
    return PLACE.sub("", told)


def _plain_ends(model: ir.Model) -> ir.Model:
    """Return the model taking and giving float32 where it takes and gives bfloat16."""
    if not any(v.dtype is ir.DataType.BFLOAT16 for v in (*model.graph.inputs, *model.graph.outputs)):
        return model
    model = model.clone()
    graph = model.graph
    for value in list(graph.inputs):
        if value.dtype is ir.DataType.BFLOAT16:
            cast = ir.node("Cast", [value], {"to": ir.DataType.BFLOAT16})
            cast.outputs[0].dtype, cast.outputs[0].shape = ir.DataType.BFLOAT16, value.shape
            value.replace_all_uses_with(cast.outputs[0])
            cast.replace_input_with(0, value)
            value.type = ir.TensorType(ir.DataType.FLOAT)
            graph.insert_before(graph[0], cast)
    for index, value in enumerate(list(graph.outputs)):
        if value.dtype is ir.DataType.BFLOAT16:
            cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT})
            cast.outputs[0].dtype, cast.outputs[0].shape = ir.DataType.FLOAT, value.shape
            graph.append(cast)
            graph.outputs[index] = cast.outputs[0]
    return model
