"""Read and write ONNX files: nothing outside a model's folder is read, nothing is written but whole."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError
from onnx_ir.passes.common import InlinePass, TopologicalSortPass

from ...errors import Code, LnrewriteError
from .head_norms import stand_apart
from .rules import Rules
from .sizes import bytes_of, check_constants, initializers
from .whole import APART, attend_apart, attend_whole

logging.getLogger("onnx_ir").addHandler(logging.NullHandler())  # what it thinks of a file is for who asks to hear it

FLOATS = {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
ONE_FILE = 3 << 29
"""Weights of more bytes than this go into a file of their own: a protobuf ends at 2 GiB."""
OPERATORS = "lnrewrite.operators"
"""The key under which a file names the operators of lnrewrite that it holds."""


def read(path: Path, name: str, inline: bool = True) -> ir.Model:
    """Read an ONNX file, external data mapped and not loaded, functions inlined, nodes in topological order.

    Norms that attention computes on CUDA alone stand before it, and so do its products.

    `name` is what the user calls it. inline: False keeps functions, for whose operators there may be kernels. Raises
    LnrewriteError LN015 (cut off), LN027 (opset), LN030 (breaks ONNX's rules), LN031 (external data missing, too short,
    or outside the model's folder), LN039 (too many nodes, or too much that is made of constants).
    """
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except DecodeError as why:
        text = f"its protobuf cannot be read: {why}"
        raise LnrewriteError(Code.LN015, f"model {name!r}", text, "fetch it again") from why
    rules = Rules(proto, path, name)
    rules.check()
    try:
        model = ir.serde.deserialize_model(proto)
        for graph in (model.graph, *(function.graph for function in model.functions.values())):
            ir.external_data.set_base_dir(graph, rules.root)
        if model.functions and inline:
            InlinePass()(model)
            model.metadata_props.pop(OPERATORS, None)
        _unwrap(model.graph)
        TopologicalSortPass()(model)
        stand_apart(model)
        attend_apart(model)
        _unknown_sizes(model)
    except Exception as why:  # whatever a file that breaks a rule leads the library to
        raise rules.invalid(f"{type(why).__name__}: {why}") from why
    check_constants(model, f"model {name!r}")
    return model


def _unwrap(graph: ir.Graph) -> None:
    """Let what reads a stored value through Identity read it itself."""
    for node in [n for n in graph if n.op_type == "Identity" and n.domain in ("", "ai.onnx")]:
        value, same = node.inputs[0], node.outputs[0]
        if value is not None and value.is_initializer() and not value.is_graph_input() and not same.is_graph_output():
            ir.convenience.replace_all_uses_with(same, value)
            graph.remove(node, safe=True)


def _unknown_sizes(model: ir.Model) -> None:
    """Read a negative size, as some exporters write one that is free, as a size that is not known."""
    for graph in model.graphs():
        for value in (*graph.inputs, *(v for node in graph for v in node.outputs)):
            if value.shape is not None and any(isinstance(d, int) and d < 0 for d in value.shape):
                value.shape = ir.Shape([None if isinstance(d, int) and d < 0 else d for d in value.shape])


def stamp(model: ir.Model, **provenance: str) -> None:
    """Write into the model's metadata where it comes from: under `lnrewrite.<key>`."""
    model.metadata_props.update({f"lnrewrite.{key}": value for key, value in provenance.items()})


def write(model: ir.Model, target: Path, data: str | None = None, most: int | None = None) -> list[Path]:
    """Write a model, weights tensor by tensor; return its files, the model first.

    Up to `most` bytes of weights (default: `ONE_FILE`) are written into the model, more beside it as `data` (default:
    `<name>.data`). The caller moves the files into place: an interrupted call leaves some of them.
    """
    if any(APART in node.metadata_props for node in model.graph):
        attend_whole(model := model.clone(), marked=True)
    if bytes_of(model) <= (ONE_FILE if most is None else most):
        ir.save(whole(model), target)
        return [target]
    beside = target.with_name(data or data_names(target)[0])
    ir.save(model, target, external_data=beside.name, size_threshold_bytes=1024)
    return [target, beside]


def data_names(target: Path) -> tuple[str, str]:
    """Return the two names that the weights beside a model may have: the new ones take that which the old do not."""
    return f"{target.name}.data", f"{target.name}.1.data"


def whole(model: ir.Model) -> ir.Model:
    """Return a model that refers to no file, a copy where it did: for models of up to `ONE_FILE` bytes of weights."""
    held = [v.const_value for v in initializers(model)]
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        held += [a.value for a in node.attributes.values() if a.type == ir.AttributeType.TENSOR]
    if not any(isinstance(tensor, ir.ExternalTensor) for tensor in held):
        return model
    model = model.clone()
    for value in initializers(model):
        if isinstance(tensor := value.const_value, ir.ExternalTensor):
            value.const_value = ir.Tensor(tensor.numpy().copy(), dtype=tensor.dtype, name=tensor.name)
            release(tensor)
    return model


def release(tensor: ir.TensorProtocol) -> None:
    """Give the memory of a mapped file back, unless somebody still looks at it, as the traceback of an error does."""
    if isinstance(tensor, ir.ExternalTensor):
        with suppress(BufferError):
            tensor.release()


LINEAR = {"MatMul", "Gemm", "Conv", "ConvTranspose"}
PIECE = 1 << 22


def check_finite(model: ir.Model, name: str) -> None:
    """Raise LnrewriteError LN024 for a NaN in a tensor of weights, or an infinity in one that a linear map takes.

    Infinities elsewhere are meant: in masks.
    """
    for value in initializers(model):
        tensor = value.const_value
        if tensor is None or tensor.dtype not in FLOATS or tensor.size < 2:
            continue
        flat = tensor.numpy().reshape(-1)
        weight = any(node.op_type in LINEAR for node, _ in value.uses())
        wrong = (lambda x: ~np.isfinite(x)) if weight else np.isnan
        if any(wrong(flat[i : i + PIECE]).any() for i in range(0, len(flat), PIECE)):
            why = "it holds NaN or infinite values"
            raise LnrewriteError(Code.LN024, f"model {name!r}: {value.name}", why, "repair or re-download the weights")
