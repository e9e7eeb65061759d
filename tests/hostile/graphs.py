"""Hostile ONNX files."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from . import zips
from .place import SECRET, Case, Place, inspecting

SHOWN = {
    "axis 99", "an unknown attribute", "stash type 99", "2^40", "2^62", "IR version 0", "weights of text", "weights twice",
    "weights in segments",
}  # fmt: skip
"""What ONNX Runtime refuses and has a picture all the same, with a note that tells why it was not tried."""


def onnx(name: str, change: Callable[[Any, Place], Any], exits: tuple[int, ...] = (1,), args: tuple[str, ...] = ("inspect", "m.onnx"), writes: tuple[str, ...] = ()) -> Case:
    """Return the case of a good model that was changed in place, or of what `change` returns."""

    def make(place: Place) -> None:
        model = copy.deepcopy(place.goods.onnx)
        made = change(model, place)
        model = model if made is None else made
        place.write("m.onnx", model if isinstance(model, bytes) else model.SerializeToString())

    return Case(f"onnx: {name}", args, make, exits, writes)


LOCATIONS = {
    "dots": "../outside/secret.bin", "dots inside": "a/../../outside/secret.bin", "absolute": "{outside}/secret.bin", "a link": "link.bin",
    "a linked folder": "linked/secret.bin", "a hard link": "hard.bin", "nothing": "no.bin", "a folder": "folder", "a device": "/dev/zero", "a pipe": "pipe",
    "NUL": "w.bin\0x", "empty": "", "5000 letters": "x" * 5000, "escape bytes": "\x1b[31mred\x07", "itself": "m.onnx", "a home": "~/secret.bin",
    "a URL": "file:///etc/passwd", "backslashes": "..\\outside\\secret.bin", "right to left": "\u202ebin.w", "dots encoded": "%2e%2e/outside/secret.bin", "proc": "/proc/self/environ",
}  # fmt: skip


def _external(tensor: Any, **told: Any) -> None:
    tensor.data_location = 1
    tensor.ClearField("raw_data")
    for key, value in told.items():
        tensor.external_data.add(key=key, value=str(value))


def external_cases() -> Iterator[Case]:
    """Weights that are kept elsewhere."""
    for name, location in LOCATIONS.items():
        for command in (("inspect", "m.onnx"), ("opt", "m.onnx", "--preset", "exact", "-o", "o.onnx")):

            def point(model: Any, place: Place, location: str = location) -> None:
                os.symlink(place.outside / "secret.bin", place.here / "link.bin")
                os.symlink(place.outside, place.here / "linked")
                os.link(place.outside / "secret.bin", place.here / "hard.bin")
                os.mkfifo(place.here / "pipe")
                (place.here / "folder").mkdir()
                tensor = next(t for t in model.graph.initializer if t.name == "first.weight")
                _external(tensor, location=location.replace("{outside}", str(place.outside)), offset=0, length=1024)

            exits = (0, 1) if name == "itself" else (1,)
            yield onnx(f"weights in {name}, {command[0]}", point, exits, command, ("o.onnx", "o.onnx.data"))
    numbers = {"offset beyond": (1 << 40, 1024), "offset negative": (-8, 1024), "length beyond": (0, 1 << 40), "length negative": (0, -1), "offset text": ("x", 1024),
               "length text": (0, "\x1b[31m"), "length too short": (0, 10), "offset of 2^70": (1 << 70, 1024), "length of 10^6 digits": (0, "9" * 1_000_000)}  # fmt: skip
    for name, (offset, length) in numbers.items():

        def lie(model: Any, place: Place, offset: Any = offset, length: Any = length) -> None:
            place.write("w.bin", SECRET)
            _external(model.graph.initializer[0], location="w.bin", offset=offset, length=length)

        yield onnx(f"external data, {name}", lie)

    def twice(model: Any, place: Place) -> None:
        place.write("w.bin", SECRET)
        _external(model.graph.initializer[0], location="w.bin")
        model.graph.initializer[0].external_data.add(key="location", value="../outside/secret.bin")

    yield onnx("external data, two locations", twice)


def _each(model: Any, kind: str) -> Any:
    return next(n for n in model.graph.node if n.op_type == kind)


def _insert(model: Any, before: Any, nodes: list[Any]) -> None:
    at = list(model.graph.node).index(before)
    nodes = [*list(model.graph.node)[:at], *nodes, *list(model.graph.node)[at:]]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _attribute(kind: str, **values: Any) -> Callable[[Any, Place], None]:
    def change(model: Any, place: Place) -> None:
        from onnx import helper

        node = _each(model, kind)
        kept = [a for a in node.attribute if a.name not in values]
        del node.attribute[:]
        node.attribute.extend(kept + [helper.make_attribute(k, v) for k, v in values.items()])

    return change


def _input(**shape: Any) -> Callable[[Any, Place], None]:
    def change(model: Any, place: Place) -> None:
        from onnx import helper

        model.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", shape.get("dtype", 1), shape.get("dims")))

    return change


def node_cases() -> Iterator[Case]:
    """Graphs that are none, and numbers out of range."""
    attributes: dict[str, tuple[str, dict[str, Any]]] = {
        "epsilon NaN": ("LayerNormalization", {"epsilon": float("nan")}), "epsilon negative": ("LayerNormalization", {"epsilon": -1.0}),
        "epsilon infinite": ("LayerNormalization", {"epsilon": float("inf")}), "epsilon a text": ("LayerNormalization", {"epsilon": "x"}),
        "axis a text": ("LayerNormalization", {"axis": "\x1b[31m"}), "axis 99": ("LayerNormalization", {"axis": 99}), "axis -2^62": ("LayerNormalization", {"axis": -(1 << 62)}),
        "axis a list": ("LayerNormalization", {"axis": [1, 2]}), "an unknown attribute": ("Relu", {"x": 1}), "stash type 99": ("LayerNormalization", {"stash_type": 99}),
    }  # fmt: skip
    for name, (kind, values) in attributes.items():
        yield onnx(name, _attribute(kind, **values), (0, 1) if name in SHOWN else (1,))
    for name, shape in {"2^40": [1 << 40] * 2 + [16], "negative": [-1, -5, 16], "2^62": [1 << 62, 4, 16], "a name of escape bytes": ["\x1b[31m", "s", 16], "none": None, "no dimensions": [],
                        "a name of 5000 letters": ["x" * 5000, "s", 16], "zero": [0, 0, 16], "a number as a name": ["4", "s", 16], "a name with NUL": ["b\0", "s", 16], "thousand dimensions": [1] * 1000}.items():  # fmt: skip
        loose = name in SHOWN or name in ("zero", "none", "a number as a name", "a name of escape bytes", "a name of 5000 letters", "a name with NUL", "negative")
        yield onnx(f"input dimensions: {name}", _input(dims=shape), (0, 1) if loose else (1,))
    for dtype in (0, 8, 99, 17, 22):
        yield onnx(f"input of dtype {dtype}", _input(dims=["b", "s", 16], dtype=dtype), (0, 1))
    fields: dict[str, Callable[[Any, Place], Any]] = {
        "a cycle": lambda m, p: m.graph.node[0].input.__setitem__(0, m.graph.node[-1].output[0]), "a value that nothing makes": lambda m, p: m.graph.node[0].input.__setitem__(0, "none"),
        "a value made twice": lambda m, p: m.graph.node[1].output.__setitem__(0, m.graph.node[0].output[0]), "an unknown operator": lambda m, p: setattr(m.graph.node[0], "op_type", "Evil"),
        "an unknown domain": lambda m, p: setattr(m.graph.node[0], "domain", "com.evil"), "an operator of escape bytes": lambda m, p: setattr(m.graph.node[0], "op_type", "\x1b[31m"),
        "a PyOp": lambda m, p: (setattr(m.graph.node[0], "op_type", "PyOp"), setattr(m.graph.node[0], "domain", "ai.onnx.contrib"), None)[-1],
        "opset 0": lambda m, p: setattr(m.opset_import[0], "version", 0), "opset 2^40": lambda m, p: setattr(m.opset_import[0], "version", 1 << 40), "opset negative": lambda m, p: setattr(m.opset_import[0], "version", -1),
        "no opset": lambda m, p: m.ClearField("opset_import"), "IR version 2^40": lambda m, p: setattr(m, "ir_version", 1 << 40), "IR version 0": lambda m, p: setattr(m, "ir_version", 0),
        "no graph": lambda m, p: m.ClearField("graph"), "no nodes": lambda m, p: m.graph.ClearField("node"), "no outputs": lambda m, p: m.graph.ClearField("output"), "no inputs": lambda m, p: m.graph.ClearField("input"),
        "weights that are short": lambda m, p: setattr(m.graph.initializer[0], "raw_data", b"\0" * 8), "weights that are long": lambda m, p: setattr(m.graph.initializer[0], "raw_data", b"\0" * 8192),
        "weights of dtype 99": lambda m, p: setattr(m.graph.initializer[0], "data_type", 99), "weights of negative size": lambda m, p: m.graph.initializer[0].dims.__setitem__(0, -16),
        "weights of 2^40": lambda m, p: m.graph.initializer[0].dims.__setitem__(0, 1 << 40), "weights of other size": lambda m, p: m.graph.initializer[0].dims.__setitem__(0, 8),
        "weights of text": lambda m, p: setattr(m.graph.initializer[0], "data_type", 8), "weights twice": lambda m, p: m.graph.initializer.add().CopyFrom(m.graph.initializer[0]), "no weights": lambda m, p: m.graph.ClearField("initializer"),
        "weights of NaN": lambda m, p: setattr(m.graph.initializer[0], "raw_data", b"\xff" * 1024), "weights in segments": lambda m, p: setattr(m.graph.initializer[0].segment, "end", 1 << 40),
        "a node without outputs": lambda m, p: m.graph.node[0].ClearField("output"), "a node without inputs": lambda m, p: m.graph.node[0].ClearField("input"),
    }  # fmt: skip
    for name, change in fields.items():
        yield onnx(name, change, (0, 1) if name in SHOWN else (1,))
    for name, change in {"names of escape bytes": lambda m, p: [setattr(n, "name", "\x1b[31m") for n in m.graph.node] and None, "a producer of escape bytes": lambda m, p: setattr(m, "producer_name", "\x1b]0;x\x07"),
                         "documents of 1 MB": lambda m, p: setattr(m, "doc_string", "x" * 1_000_000), "metadata with NUL": lambda m, p: m.metadata_props.add(key="a\0", value="\x1b") and None}.items():  # fmt: skip
        yield onnx(name, change, (0, 1))
    for name in ("sparse", "training", "quantization"):
        yield onnx(f"a part of {name}", _part(name), (0, 1))
    yield onnx("good", lambda m, p: None, (0,))


def _part(name: str) -> Callable[[Any, Place], None]:
    def change(model: Any, place: Place) -> None:
        if name == "sparse":
            model.graph.sparse_initializer.add().dims.extend([1 << 40])
        elif name == "training":
            model.training_info.add().algorithm.node.add(op_type="Evil")
        else:
            model.graph.quantization_annotation.add(tensor_name="none")

    return change


def bomb_cases() -> Iterator[Case]:
    """Small files of much work."""

    def functions(model: Any, place: Place, count: int = 26) -> None:
        from onnx import helper

        opset = [helper.make_opsetid("", 18), helper.make_opsetid("f", 1)]
        model.opset_import.append(opset[1])
        for i in range(count):
            kind, domain = ("Relu", "") if not i else (f"F{i - 1}", "f")
            nodes = [helper.make_node(kind, ["x"], ["m"], domain=domain), helper.make_node(kind, ["m"], ["y"], domain=domain)]
            model.functions.append(helper.make_function("f", f"F{i}", ["x"], ["y"], nodes, opset))
        node = _each(model, "Relu")
        node.op_type, node.domain = f"F{count - 1}", "f"

    def itself(model: Any, place: Place) -> None:
        functions(model, place, 1)
        model.functions[0].node[0].op_type, model.functions[0].node[0].domain = "F0", "f"

    def long(model: Any, place: Place, kind: str = "Identity", count: int = 100_000) -> None:
        from onnx import helper

        relu = _each(model, "Relu")
        held = relu.input[0]
        chain = [helper.make_node(kind, [held if not i else f"i{i - 1}"], [f"i{i}"]) for i in range(count)]
        relu.input[0] = f"i{count - 1}"
        _insert(model, relu, chain)

    def constant(model: Any, place: Place, sizes: list[int], kind: str = "ConstantOfShape", count: int = 1, declared: Any = None) -> None:
        import numpy as np
        from onnx import helper, numpy_helper

        floats = {"one": [1.0], "begin": 0.0, "step": 1.0, "end": float(np.prod(sizes))}
        stored = {"big": np.array(sizes, dtype=np.int64), **{name: np.array(value, dtype=np.float32) for name, value in floats.items()}}
        model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in stored.items())
        reads = {"Expand": ["one", "big"], "Tile": ["one", "big"], "Range": ["begin", "end", "step"], "RandomNormal": []}.get(kind, ["big"])
        how = {"shape": sizes} if kind == "RandomNormal" else {}
        relu = _each(model, "Relu")
        nodes = [helper.make_node(kind, reads, [f"zeros{i}"], **how) for i in range(count)]
        for i in range(count):
            nodes.append(helper.make_node("ReduceSum", [f"zeros{i}"], [f"zero{i}"], keepdims=0))
            nodes.append(helper.make_node("Add", [relu.input[0], f"zero{i}"], [f"moved{i}"]))
            relu.input[0] = f"moved{i}"
            if declared:
                model.graph.value_info.append(helper.make_tensor_value_info(f"zeros{i}", 1, declared))
        _insert(model, relu, nodes)

    def nested(model: Any, place: Place, depth: int) -> bytes:
        part = b"\x0a\x00"
        for _ in range(depth):  # GraphProto.node, NodeProto.attribute, AttributeProto.g
            for tag in (0x32, 0x2A, 0x0A):
                part = bytes([tag]) + _varint(len(part)) + part
        return bytes(model.SerializeToString()) + b"\x3a" + _varint(len(part)) + part

    yield onnx("26 functions of two calls each", functions)
    yield onnx("a function that calls itself", itself)
    yield onnx("10^5 identities in a row", long, (0, 1))
    yield onnx("10^5 products in a row", lambda m, p: long(m, p, "Relu"), (0, 1))
    for power in (29, 31, 33, 40):
        yield onnx(f"a constant of 2^{power} numbers", partial(constant, sizes=[1 << power]))
    yield onnx("a constant that is declared small", partial(constant, sizes=[1 << 31], declared=[4]))
    yield onnx("a constant in three axes", partial(constant, sizes=[1 << 11] * 3))
    for kind in ("Expand", "Tile", "Range", "RandomNormal"):
        yield onnx(f"a constant made by {kind}", partial(constant, sizes=[1 << 31], kind=kind))
    yield onnx("a constant of 2^26 numbers twelve times", partial(constant, sizes=[1 << 26], count=12))
    yield onnx("a constant of negative size", partial(constant, sizes=[-4]))
    for depth in (30, 100, 1000):
        yield onnx(f"graphs {depth} deep", lambda m, p, d=depth: nested(m, p, d), (0, 1) if depth == 30 else (1,))  # type: ignore[misc]
    yield onnx("a field longer than the file", lambda m, p: m.SerializeToString() + b"\x3a\xff\xff\xff\xff\x07x")
    yield onnx("a number of eleven bytes", lambda m, p: m.SerializeToString() + b"\x3a" + b"\xff" * 11)
    yield onnx("groups", lambda m, p: m.SerializeToString() + b"\x3b" * 10_000)
    for i in range(1, 6):
        yield inspecting(f"onnx: cut at {i}/6", "m.onnx", lambda place, i=i: zips.cuts(place.goods.onnx.SerializeToString())[f"cut at {i}/6"])  # type: ignore[misc]


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])
