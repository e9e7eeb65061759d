"""The rules that an ONNX model keeps before any library walks it: one check, right after its protobuf is parsed.

Whatever breaks one is refused with what is wrong: values that nothing makes, attributes of another type than the
operator's schema gives them, tensors without their bytes, data outside the model's folder, functions that grow without
bound once they are inlined.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from math import isfinite, isnan, prod
from pathlib import Path

import onnx
import onnx_ir as ir

from ...errors import Code, LnrewriteError
from ...loading.foreign import astray

OLDEST = 11
STANDARD = ("", "ai.onnx")
MOST_NODES = 120_000
"""A model of more nodes, functions inlined, is refused: larger ones take gigabytes to look at."""

_KINDS = onnx.AttributeProto
_READ = {
    "epsilon": _KINDS.FLOAT, "axis": _KINDS.INT, "stash_type": _KINDS.INT, "K": _KINDS.INT, "N": _KINDS.INT,
    "bits": _KINDS.INT, "block_size": _KINDS.INT, "num_heads": _KINDS.INT,
}  # fmt: skip
"""Attributes that are read of operators without a schema here, ONNX Runtime's own."""
_NEEDED = {"MatMulNBits": ("K", "N")}


class Rules:
    """Hold a model to ONNX's rules before any library walks it; every error names what is wrong."""

    def __init__(self, proto: onnx.ModelProto, path: Path, name: str) -> None:
        self.proto, self.path, self.name = proto, path, name
        self.root = path.resolve().parent
        self.parameters: frozenset[str] = frozenset()
        """The attributes of the function that is checked: its nodes, and no others, may refer to them."""

    def invalid(self, why: str) -> LnrewriteError:
        return LnrewriteError(Code.LN030, f"model {self.name!r}", why, "check it with onnx.checker, or export it again")

    def check(self) -> None:
        """Raise LnrewriteError LN027, LN030, LN031 or LN039 where the model breaks a rule."""
        version = self.versions()
        self.size()
        self.graph(self.proto.graph, frozenset(), version)
        for function in self.proto.functions:
            own = [o.version for o in function.opset_import if o.domain in STANDARD]
            self.parameters = frozenset((*function.attribute, *(a.name for a in function.attribute_proto)))
            self.nodes(function.node, set(function.input), own[0] if own else version)

    def versions(self) -> int:
        """Return the version of the standard operators that the model imports."""
        newest = onnx.defs.onnx_opset_version()
        for held in self.proto.functions:
            self.texts(held.name, held.domain, *held.input, *held.output, *held.attribute)
            self.texts(*(opset.domain for opset in held.opset_import))
        for opset in self.proto.opset_import:
            self.texts(opset.domain)
            if opset.domain in STANDARD and not OLDEST <= opset.version <= newest:
                why = f"it has opset {opset.version}, and {OLDEST} to {newest} can be read"
                raise LnrewriteError(Code.LN027, f"model {self.name!r}", why, "export it again with another opset")
        if self.proto.ir_version > onnx.IR_VERSION:
            why = f"it has IR version {self.proto.ir_version}, and the installed onnx knows {onnx.IR_VERSION}"
            raise LnrewriteError(Code.LN027, f"model {self.name!r}", why, "install a newer onnx")
        versions = [opset.version for opset in self.proto.opset_import if opset.domain in STANDARD]
        if not versions:
            raise self.invalid("it imports no operator set")
        return versions[0]

    def attributes(self, node: onnx.NodeProto, version: int) -> None:
        """Check a node's attributes and how many inputs and outputs it has against its operator's schema."""
        what = f"{node.op_type} {node.name!r}"
        schema = _schema(node.op_type, version, node.domain)
        held = {attribute.name: attribute for attribute in node.attribute}
        if len(held) != len(node.attribute):
            raise self.invalid(f"{what} has an attribute twice")
        for name, attribute in held.items():
            known = schema.attributes.get(name) if schema else None
            wanted = int(known.type.value) if known else _READ.get(name, attribute.type)  # type: ignore[attr-defined]
            if attribute.type != wanted or attribute.type == _KINDS.UNDEFINED:
                kinds = [_KINDS.AttributeType.Name(k) for k in (attribute.type, wanted)]
                raise self.invalid(f"{what}: attribute {name!r} has type {kinds[0]}, not {kinds[1]}")
            if (other := attribute.ref_attr_name) and other not in self.parameters:
                raise self.invalid(f"{what}: attribute {name!r} is that of {other!r}, and no function has it")
            if node.op_type != "Constant" and any(isnan(f) for f in (attribute.f, *attribute.floats)):
                raise self.invalid(f"{what}: attribute {name!r} is not a number")
            if name == "epsilon" and not (isfinite(attribute.f) and attribute.f >= 0):
                raise self.invalid(f"{what}: its epsilon is {attribute.f}, which no norm uses")
        needed = [n for n, a in schema.attributes.items() if a.required] if schema else _NEEDED.get(node.op_type, ())
        if missing := [name for name in needed if name not in held]:
            raise self.invalid(f"{what} lacks the attribute {missing[0]!r}")
        least, most, made = (schema.min_input, schema.max_input, schema.min_output) if schema else (0, 1 << 31, 1)
        given = len(node.input)
        if not least <= given <= most or not all(node.input[:least]) or len(node.output) < made:
            raise self.invalid(f"{what} has {given} inputs and {len(node.output)} outputs, which is not allowed")

    def size(self) -> None:
        """Check how many nodes the model has once its functions are inlined, before they are."""
        bodies = {(f.domain, f.name): [*_nested(f.node)] for f in self.proto.functions}
        calls = {name: Counter(_called(nodes, bodies)) for name, nodes in bodies.items()}
        callers: dict[tuple[str, str], list[tuple[str, str]]] = {name: [] for name in bodies}
        for name, called in calls.items():
            for other in called:
                callers[other].append(name)
        left = {name: len(called) for name, called in calls.items()}
        counted: dict[tuple[str, str], int] = {}
        ready = [name for name, count in left.items() if not count]
        while ready:
            name = ready.pop()
            inner = sum(counted[other] * times for other, times in calls[name].items())
            counted[name] = min(len(bodies[name]) + inner, MOST_NODES + 1)
            for caller in callers[name]:
                left[caller] -= 1
                ready += [] if left[caller] else [caller]
        if circle := [name for name in bodies if name not in counted]:
            raise self.invalid(f"the function {circle[0][1]!r} calls itself")
        nodes = [*_nested(self.proto.graph.node)]
        count = len(nodes) + sum(counted[c] for c in _called(nodes, bodies))
        if count > MOST_NODES:
            why = f"it has more than {MOST_NODES} nodes, once its functions are inlined"
            remedy = "export it without unrolled loops, or in parts"
            raise LnrewriteError(Code.LN039, f"model {self.name!r}", why, remedy)

    def graph(self, graph: onnx.GraphProto, outer: frozenset[str], version: int) -> None:
        """Check a graph whose nodes may read the `outer` names too."""
        given = {v.name for v in graph.input} | {t.name for t in graph.initializer}
        if graph.sparse_initializer:
            raise self.invalid(
                f"it stores {graph.sparse_initializer[0].values.name!r} as a sparse tensor, which is not read"
            )
        made = [o for node in graph.node for o in node.output if o]
        times = Counter([*given, *made])
        if twice := next((o for o in made if times[o] > 1), None):
            raise self.invalid(f"the value {twice!r} is computed twice")
        known = given | set(made) | outer
        self.texts(*given, *(v.name for v in graph.output))
        for value in graph.output:
            if value.name not in known:
                raise self.invalid(f"no node computes the output {value.name!r}")
        declared = {v.name: v for v in (*graph.input, *graph.value_info, *graph.output)}
        for tensor in graph.initializer:
            self.tensor(tensor)
            self.agrees(tensor, declared.get(tensor.name))
        self.nodes(graph.node, known, version)

    def nodes(self, nodes: Iterable[onnx.NodeProto], known: Iterable[str], version: int) -> None:
        nodes = list(nodes)
        known = set(known) | {o for node in nodes for o in node.output}
        for node in nodes:
            self.texts(node.op_type, node.domain, node.name, *node.input, *node.output)
            self.texts(*(attribute.name for attribute in node.attribute))
            if missing := next((i for i in node.input if i and i not in known), None):
                raise self.invalid(f"{node.op_type} {node.name!r} reads {missing!r}, which no node computes")
            self.attributes(node, version)
            for attribute in node.attribute:
                for tensor in (attribute.t, *attribute.tensors):
                    self.tensor(tensor)
                for graph in (attribute.g, *attribute.graphs):
                    self.graph(graph, frozenset(known), version)

    def texts(self, *texts: str | bytes) -> None:
        """Check that names are UTF-8: protobuf gives others as bytes."""
        if broken := [text for text in texts if not isinstance(text, str)]:
            raise self.invalid(f"the name {broken[0]!r} is not UTF-8")

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
            raise self.invalid(f"the tensor {tensor.name!r} has an unknown type") from why
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
        self.texts(*(text for entry in tensor.external_data for text in (entry.key, entry.value)))
        info: Mapping[str, str] = {entry.key: entry.value for entry in tensor.external_data}

        def bad(why: str) -> LnrewriteError:
            remedy = "put the data beside the model, under the name that it gives"
            return LnrewriteError(Code.LN031, f"model {self.name!r}", f"{tensor.name!r}: {why}", remedy)

        location = info.get("location", "")
        if not location or os.path.isabs(location) or "\\" in location or ".." in Path(location).parts:
            raise bad(f"its data are at {location!r}, outside the folder of the model")
        file = self.root / location
        linked = self.path.parent / location
        if self.path.is_symlink() and not astray(linked, [self.root]) and not file.exists():
            file = linked.resolve()  # the hub's cache links a model and its data into one folder, under other names
            location = str(file.relative_to(self.root))
            next(entry for entry in tensor.external_data if entry.key == "location").value = location
        if place := astray(file, [self.root]):
            raise bad(f"{location!r} {place}")
        if not file.is_file():
            raise bad(f"the file {location!r} is missing beside the model")
        if (links := file.stat().st_nlink) > 1:
            raise bad(f"{location!r} has {links} names (hard links), and may be another's: copy it")
        try:
            offset, length = int(info.get("offset", 0)), int(info.get("length", size))
        except ValueError as why:
            raise bad(f"its offset or length is not a number ({why})") from why
        if length != size:
            raise bad(f"it needs {size} bytes and is said to have {length}")
        if offset < 0 or offset + length > file.stat().st_size:
            raise bad(f"{location!r} has {file.stat().st_size} bytes, and it is at {offset} to {offset + length}")


def _typed(tensor: onnx.TensorProto) -> int:
    fields = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data")
    return max(len(getattr(tensor, field)) for field in fields)


@cache
def _schema(name: str, version: int, domain: str) -> onnx.defs.OpSchema | None:
    """Return an operator's schema, None where onnx has none."""
    domain = "" if domain == "ai.onnx" else domain
    if not -(1 << 31) <= version < 1 << 31 or not onnx.defs.has(name, version, domain):
        return None
    return onnx.defs.get_schema(name, version, domain)


def _nested(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes and those of their subgraphs."""
    todo = list(nodes)
    while todo:
        node = todo.pop()
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                todo += graph.node


def _called(nodes: Iterable[onnx.NodeProto], functions: Mapping[tuple[str, str], object]) -> list[tuple[str, str]]:
    """Return the functions that nodes call, each as often as it is called."""
    return [(n.domain, n.op_type) for n in nodes if (n.domain, n.op_type) in functions]
