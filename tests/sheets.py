"""Write small ONNX graphs line by line, and run them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
from onnx_ir.passes.common import NameFixPass

WIDTH = 12
HALF, SINGLE = ir.DataType.FLOAT16, ir.DataType.FLOAT
SIZES = {"batch": 3, "length": 5, "more": 2}


class Sheet:
    """Write a graph line by line: `sheet("Add", x, y)` returns the node's output; numbers become constants."""

    def __init__(self, dtype: ir.DataType) -> None:
        self.nodes: list[ir.Node] = []
        self.held: list[ir.Value] = []
        self.dtype = dtype
        self.now = dtype

    def __call__(self, op: str, *inputs: object, **attributes: object) -> ir.Value:
        node = ir.node(op, [self.value(i) for i in inputs], attributes)
        self.nodes.append(node)
        return node.outputs[0]

    def value(self, item: object) -> ir.Value | None:
        if item is None or isinstance(item, ir.Value):
            return item
        array = np.asarray(item)
        if array.dtype.kind == "f":
            array = array.astype(self.now.numpy())
        tensor = ir.tensor(array, name=f"c{len(self.held)}")
        value = ir.Value(name=tensor.name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        self.held.append(value)
        return value

    def up(self, x: ir.Value) -> ir.Value:
        """Go to float32 for the statistics, as models in half precision do."""
        self.now = SINGLE
        return x if self.dtype is SINGLE else self("Cast", x, to=SINGLE)

    def down(self, x: ir.Value) -> ir.Value:
        self.now = self.dtype
        return x if self.dtype is SINGLE else self("Cast", x, to=self.dtype)


def named(rank: int, width: int = WIDTH) -> ir.Shape:
    """Return the shape [batch, length, more, width], cut to a rank."""
    return ir.Shape([*["batch", "length", "more"][: rank - 1], width])


def given(name: str, shape: ir.Shape, dtype: ir.DataType) -> ir.Value:
    return ir.Value(name=name, shape=shape, type=ir.TensorType(dtype))


def finished(s: Sheet, inputs: list[ir.Value], outputs: list[ir.Value], opset: int) -> ir.Model:
    """Make a model of a sheet; `outputs` have their types and shapes."""
    graph = ir.Graph(inputs, outputs, nodes=s.nodes, initializers=s.held, opset_imports={"": opset}, name="g")
    model = ir.Model(graph, ir_version=10)
    NameFixPass()(model)
    return model


def run(model: ir.Model, scale: float, optimised: bool = True) -> list[np.ndarray]:
    """Run a model on normal inputs of a scale, at SIZES; return float64 outputs."""
    rng = np.random.default_rng(0)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    feed = {}
    for item in session.get_inputs():
        sizes = [d if isinstance(d, int) else SIZES[d] for d in item.shape]
        feed[item.name] = (rng.normal(size=sizes) * scale + 0.3).astype("float16" if "16" in item.type else "float32")
    return [np.asarray(y, dtype=np.float64) for y in session.run(None, feed)]
