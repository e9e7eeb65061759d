"""Read and write ONNX files: nothing outside a model's folder is read, nothing is written but whole."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError
from onnx_ir.passes.common import InlinePass, TopologicalSortPass

from ..diagnostics import LnrewriteError

OLDEST = 11
ONE_FILE = 3 << 29
"""Weights of more bytes than this go into a file of their own: a protobuf ends at 2 GiB."""
OPERATORS = "lnrewrite.operators"
"""The key under which a file names the operators of lnrewrite that it holds."""


def read(path: Path, name: str, inline: bool = True) -> ir.Model:
    """Read an ONNX file, external data mapped and not loaded, functions inlined, nodes in topological order.

    `name` is what the user calls it. inline: False keeps functions, for whose operators there may be kernels. Raises
    LnrewriteError LN015 (cut off), LN027 (opset), LN030 (breaks ONNX's rules), LN031 (external data missing, too short,
    or outside the model's folder).
    """
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except DecodeError as why:
        text = f"its protobuf cannot be read: {why}"
        raise LnrewriteError("LN015", f"model {name!r}", text, "fetch it again") from why
    check = _Check(proto, path, name)
    check.versions()
    check.graph(proto.graph, frozenset())
    for function in proto.functions:
        check.nodes(function.node, set(function.input))
    try:
        model = ir.serde.deserialize_model(proto)
        ir.external_data.set_base_dir(model.graph, path.resolve().parent)
        if model.functions and inline:
            InlinePass()(model)
            model.metadata_props.pop(OPERATORS, None)
        TopologicalSortPass()(model)
        _unknown_sizes(model)
    except Exception as why:  # whatever a file that breaks a rule leads the library to
        raise check.invalid(f"{type(why).__name__}: {why}") from why
    return model


def _unknown_sizes(model: ir.Model) -> None:
    """Read a negative size, as some exporters write one that is free, as a size that is not known."""
    for graph in model.graphs():
        for value in (*graph.inputs, *(v for node in graph for v in node.outputs)):
            if value.shape is not None and any(isinstance(d, int) and d < 0 for d in value.shape):
                value.shape = ir.Shape([None if isinstance(d, int) and d < 0 else d for d in value.shape])


class _Check:
    """Hold a model to ONNX's rules before any library walks it; every error names what is wrong."""

    def __init__(self, proto: onnx.ModelProto, path: Path, name: str) -> None:
        self.proto, self.path, self.name = proto, path, name
        self.root = path.resolve().parent

    def invalid(self, why: str) -> LnrewriteError:
        return LnrewriteError("LN030", f"model {self.name!r}", why, "check it with onnx.checker, or export it again")

    def versions(self) -> None:
        newest = onnx.defs.onnx_opset_version()
        for opset in self.proto.opset_import:
            if opset.domain in ("", "ai.onnx") and not OLDEST <= opset.version <= newest:
                why = f"it is of opset {opset.version}; {OLDEST} to {newest} are read"
                raise LnrewriteError("LN027", f"model {self.name!r}", why, "export it again with another opset")
        if self.proto.ir_version > onnx.IR_VERSION:
            why = f"it is of IR version {self.proto.ir_version}, the installed onnx knows {onnx.IR_VERSION}"
            raise LnrewriteError("LN027", f"model {self.name!r}", why, "install a newer onnx")
        if not any(opset.domain in ("", "ai.onnx") for opset in self.proto.opset_import):
            raise self.invalid("it imports no operator set")

    def graph(self, graph: onnx.GraphProto, outer: frozenset[str]) -> None:
        """Check a graph whose nodes may read the `outer` names too."""
        given = {v.name for v in graph.input} | {t.name for t in graph.initializer}
        given |= {t.values.name for t in graph.sparse_initializer}
        made = [o for node in graph.node for o in node.output if o]
        times = Counter([*given, *made])
        if twice := next((o for o in made if times[o] > 1), None):
            raise self.invalid(f"the value {twice!r} is made twice")
        known = given | set(made) | outer
        for value in graph.output:
            if value.name not in known:
                raise self.invalid(f"nothing makes the output {value.name!r}")
        declared = {v.name: v for v in (*graph.input, *graph.value_info, *graph.output)}
        for tensor in graph.initializer:
            self.tensor(tensor)
            self.agrees(tensor, declared.get(tensor.name))
        for sparse in graph.sparse_initializer:
            self.tensor(sparse.values)
            self.tensor(sparse.indices)
        self.nodes(graph.node, known)

    def nodes(self, nodes: object, known: set[str] | frozenset[str]) -> None:
        known = set(known) | {o for node in nodes for o in node.output}  # type: ignore[attr-defined]
        for node in nodes:  # type: ignore[attr-defined]
            if missing := next((i for i in node.input if i and i not in known), None):
                raise self.invalid(f"{node.op_type} {node.name!r} reads {missing!r}, which nothing makes")
            for attribute in node.attribute:
                for tensor in (attribute.t, *attribute.tensors):
                    self.tensor(tensor)
                for graph in (attribute.g, *attribute.graphs):
                    self.graph(graph, frozenset(known))

    def agrees(self, tensor: onnx.TensorProto, declared: onnx.ValueInfoProto | None) -> None:
        """Check a tensor against the shape that the model declares for it."""
        if declared is None or not declared.type.tensor_type.HasField("shape"):
            return
        sizes = [d.dim_value if d.HasField("dim_value") else None for d in declared.type.tensor_type.shape.dim]
        if len(sizes) != len(tensor.dims) or any(a not in (None, b) for a, b in zip(sizes, tensor.dims, strict=True)):
            raise self.invalid(f"{tensor.name!r} is declared {sizes} and has {list(tensor.dims)}")

    def tensor(self, tensor: onnx.TensorProto) -> None:
        """Check that a tensor holds as many bytes as its shape says, here or in a file beside the model."""
        if tensor.data_type == onnx.TensorProto.UNDEFINED:
            if tensor.dims or tensor.raw_data:
                raise self.invalid(f"the tensor {tensor.name!r} has no type")
            return
        if tensor.data_type == onnx.TensorProto.STRING:
            return
        if any(d < 0 for d in tensor.dims):
            raise self.invalid(f"the tensor {tensor.name!r} has the shape {list(tensor.dims)}")
        try:
            bits = round(ir.DataType(tensor.data_type).itemsize * 8)
        except (ValueError, TypeError) as why:
            raise self.invalid(f"the tensor {tensor.name!r} has a type that is not known") from why
        size = -(-prod(tensor.dims) * bits // 8)
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            self.external(tensor, size)
        elif tensor.HasField("raw_data"):
            if len(tensor.raw_data) != size:
                raise self.invalid(f"the tensor {tensor.name!r} needs {size} bytes and has {len(tensor.raw_data)}")
        elif (held := _typed(tensor)) != prod(tensor.dims) and not (bits < 8 or 14 <= tensor.data_type <= 15):
            raise self.invalid(f"the tensor {tensor.name!r} needs {prod(tensor.dims)} numbers and has {held}")

    def external(self, tensor: onnx.TensorProto, size: int) -> None:
        """Check where a tensor's data are said to be, and that they are there."""
        info: Mapping[str, str] = {entry.key: entry.value for entry in tensor.external_data}

        def bad(why: str) -> LnrewriteError:
            remedy = "put the data beside the model, under the name that it gives"
            return LnrewriteError("LN031", f"model {self.name!r}", f"{tensor.name!r}: {why}", remedy)

        location = info.get("location", "")
        if not location or os.path.isabs(location) or "\\" in location or ".." in Path(location).parts:
            raise bad(f"its data are at {location!r}, which is no place in the model's folder")
        file = self.root / location
        if not file.resolve().is_relative_to(self.root):
            raise bad(f"{location!r} leads to {file.resolve()}, outside the model's folder")
        if not file.is_file():
            raise bad(f"there is no file {location!r} beside the model")
        try:
            offset, length = int(info.get("offset", 0)), int(info.get("length", size))
        except ValueError as why:
            raise bad(f"its offset or length is no number ({why})") from why
        if length != size:
            raise bad(f"it needs {size} bytes and is said to have {length}")
        if offset < 0 or offset + length > file.stat().st_size:
            raise bad(f"{location!r} has {file.stat().st_size} bytes, and it is at {offset} to {offset + length}")


def _typed(tensor: onnx.TensorProto) -> int:
    fields = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data")
    return max(len(getattr(tensor, field)) for field in fields)


def stamp(model: ir.Model, **provenance: str) -> None:
    """Say in the model's metadata where it comes from: under `lnrewrite.<key>`."""
    model.metadata_props.update({f"lnrewrite.{key}": value for key, value in provenance.items()})


def write(model: ir.Model, target: Path) -> list[Path]:
    """Write a model, weights tensor by tensor; return its files, the model first.

    Up to `ONE_FILE` bytes of weights are written into the model, more beside it as `<name>.data`. The caller moves the
    files into place: an interrupted call leaves some of them.
    """
    if bytes_of(model) <= ONE_FILE:
        ir.save(whole(model), target)
        return [target]
    data = target.with_name(f"{target.name}.data")
    ir.save(model, target, external_data=data.name, size_threshold_bytes=1024)
    return [target, data]


def bytes_of(model: ir.Model) -> int:
    """Return how many bytes a model's weights take."""
    return sum(v.const_value.nbytes for v in _initializers(model) if v.const_value is not None)


def whole(model: ir.Model) -> ir.Model:
    """Return a copy of a model that refers to no file: for models of up to `ONE_FILE` bytes of weights."""
    model = model.clone()
    return ir.external_data.load_to_model(model)


def _initializers(model: ir.Model) -> Iterator[ir.Value]:
    for graph in model.graphs():
        yield from graph.initializers.values()
