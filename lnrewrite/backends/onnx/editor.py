"""Edit an ONNX graph: weights change when they are read or saved, one at a time; new norms are semantic operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from ...detect.graph import OpGraph
from ...ir import Kind, Norm
from ..editor import Use
from ..values import Change, Floats, changed, pieces
from .file import release
from .norms import Attributes, cast, constant, dtype_of, resemble, write_norm
from .session import worked_out

BIASED = {"Gemm", "Conv", "ConvTranspose"}
"""Linear maps that take a bias as their third input."""
MOVES = {"Transpose", "Cast", "Reshape", "Identity", "Squeeze", "Unsqueeze"}
"""Operators that hand a parameter on as it is."""


class OnnxEditor:
    """Edit the main graph of a model in place; see `backends.editor.Editor`. `view` is what the graph was lifted to.

    Parameters are initializers; an initializer that is a graph input too becomes a plain one, as no caller could give
    it its edited value. Subgraphs that read a value of the main graph are readers like any other.
    """

    def __init__(self, model: ir.Model, view: OpGraph) -> None:
        self.model, self.graph, self.label = model, model.graph, ""
        self.values = ir.convenience.create_value_mapping(self.graph, include_subgraphs=False)
        self.taken = set(ir.convenience.create_value_mapping(self.graph))
        self.known = _known(self.graph, view)
        for value in [v for v in self.graph.inputs if v.is_initializer()]:
            self.graph.inputs.remove(value)
            model.ir_version = max(model.ir_version, 4)  # before that, every initializer had to be an input

    def value(self, name: str) -> ir.Value:
        """Return the value that had this name before the first edit."""
        return self.values[name]

    def readers(self, value: ir.Value) -> list[Use[ir.Value]]:
        """Return a use for each input of a node, in subgraphs too, and each graph output that is `value`."""
        uses = [Use(value, self.known.get(u.node, ()), (u.node, u.idx)) for u in value.uses()]
        outputs = [(None, i) for i, output in enumerate(self.graph.outputs) if output is value]
        return uses + [Use(value, ("output",), slot) for slot in outputs]

    def redirect(self, use: Use[ir.Value], new: ir.Value) -> None:
        """Make one reader read `new`, cast where that has another dtype; a graph output keeps its name and sizes."""
        (node, index), old = use.slot, use.operand
        if old.dtype is not None and new.dtype != old.dtype:
            new = cast(self.node, new, old.dtype)
            if (made := new.producer()) is not None:
                self.known[made] = use.consumers
        if node is not None:
            node.replace_input_with(index, new)
            return
        if new.producer() is None or new.is_graph_output():
            new = self.node("Identity", [new], new, f"{old.name}.copy")
        name = old.name
        old.name = self.unique(f"{name}.before")
        self.graph.outputs[index] = new
        new.name, new.shape = name, new.shape if old.shape is None else ir.Shape(list(old.shape))

    def norm(self, name: str, x: ir.Value, norm: Norm, at: ir.Value) -> ir.Value:
        """Return a new norm of `x` over its channels in its semantic form, which takes the last axis."""
        if norm.over:
            x = self.norm(f"{name}.over", x, norm.over, at)
        if norm.axis != -1:
            turned = self.turned(x, norm.axis, f"{name}.last")
            result = self.norm(name, turned, replace(norm, axis=-1, over=None), at)
            return self.turned(result, norm.axis, f"{name}.back")
        return write_norm(self.graph, self.node, norm, x, self.vector, name)

    def affine(self, x: ir.Value, scale: str | float | None, shift: str | None) -> ir.Value:
        """Return a new scale * x + shift, either of which may be left out."""
        result = x
        if isinstance(scale, float):
            by = constant(self.graph, self.unique(f"{x.name}.by"), np.array(scale, dtype_of(x).numpy()))
            result, scale = self.node("Mul", [x, by], x, f"{x.name}.times"), None
        for operator, param in (("Mul", scale), ("Add", shift)):
            if param is not None:
                inputs = [result, self.graph.initializers[param]]
                result = self.node(operator, inputs, x, f"{param}.{operator.lower()}")
        return result

    def turned(self, x: ir.Value, axis: int, name: str) -> ir.Value:
        """Return a value of known rank whose axis, counted from the end, has changed places with the last."""
        if x.shape is None:
            raise LookupError(f"{x.name} has no known rank, which a norm over its axis {axis} needs")
        order = list(range(x.shape.rank()))
        order[axis], order[-1] = order[-1], order[axis]
        result = self.node("Transpose", [x], x, name, {"perm": order})
        result.shape = ir.Shape([x.shape[i] for i in order])
        return result

    def center(self, x: ir.Value, axis: int) -> ir.Value:
        """Return a new x - mean(x) over an axis."""
        return self.node("Sub", [x, self.mean(x, axis)], x, f"{x.name}.centred")

    def mean(self, x: ir.Value, axis: int) -> ir.Value:
        """Return the mean over an axis, which stays as one."""
        if self.graph.opset_imports.get("", 1) < 18:
            mean = self.node("ReduceMean", [x], x, f"{x.name}.mean", {"axes": [axis], "keepdims": 1})
        else:
            axes = constant(self.graph, f"lnrewrite.axis{axis}", np.array([axis], np.int64))
            mean = self.node("ReduceMean", [x, axes], x, f"{x.name}.mean", {"keepdims": 1})
        shape = None if x.shape is None else [*x.shape]
        if shape is not None:
            shape[axis] = 1
        mean.shape = None if shape is None else ir.Shape(shape)
        return mean

    def size(self, x: ir.Value, norm: Norm, usual: float) -> ir.Value:
        """Return what a norm divides `x` by, over `usual`; in float32 where `x` is narrower."""
        narrow = dtype_of(x).itemsize < ir.DataType.FLOAT.itemsize
        value = cast(self.node, x, ir.DataType.FLOAT) if narrow else x
        value = self.center(value, norm.axis) if norm.kind is Kind.LAYER else value
        mean = self.mean(self.node("Mul", [value, value], value, f"{x.name}.square"), norm.axis)
        like = dtype_of(value).numpy()
        eps = constant(self.graph, self.unique(f"{x.name}.eps"), np.array(norm.eps, like))
        root = self.node("Sqrt", [self.node("Add", [mean, eps], mean, f"{x.name}.variance")], mean, f"{x.name}.root")
        if usual != 1:
            by = constant(self.graph, self.unique(f"{x.name}.usual"), np.array(usual, like))
            root = self.node("Div", [root, by], root, f"{x.name}.size")
        return cast(self.node, root, dtype_of(x)) if narrow else root

    def times(self, x: ir.Value, by: ir.Value, inverse: bool) -> ir.Value:
        """Return a new x * by, or x / by."""
        return self.node("Div" if inverse else "Mul", [x, by], x, f"{x.name}.{'sized' if inverse else 'resized'}")

    def untie(self, linear: ir.Value, param: str, fresh: str) -> None:
        """Make one node read its own copy of an initializer."""
        old, tensor, node = self.graph.initializers[param], self.tensor(param), linear.producer()
        if node is None:
            raise LookupError(f"{linear.name} is an input of the model")
        name, dtype, shape = self.unique(fresh), tensor.dtype, ir.Shape(tensor.shape.numpy())
        lazy = ir.LazyTensor(lambda: ir.Tensor(tensor.numpy(), dtype=dtype, name=name), dtype, shape, name=name)
        copy = ir.Value(name=name, shape=old.shape, type=old.type, const_value=lazy)
        self.graph.register_initializer(copy)
        for index, value in enumerate(node.inputs):
            if (new := self.rebuilt(value, old, copy)) is not None:
                node.replace_input_with(index, new)
                return
        raise LookupError(f"{linear.name} does not read {param}")

    def rebuilt(self, value: ir.Value | None, old: ir.Value, new: ir.Value) -> ir.Value | None:
        """Return what a value that is `old`, or is `old` moved about, is when made of `new`; None for other values."""
        if value is old or value is None:
            return None if value is None else new
        node = value.producer()
        if node is None or node.op_type not in MOVES:
            return None
        first = self.rebuilt(node.inputs[0], old, new)
        if first is None:
            return None
        inputs = [first, *filter(None, node.inputs[1:])]
        return self.node(node.op_type, inputs, value, f"{value.name}.untied", dict(node.attributes))

    def attach(self, linear: ir.Value, bias: str) -> ir.Value:
        """Give a linear map its bias: as the third input where it takes one, added behind it elsewhere."""
        node, term = linear.producer(), self.graph.initializers[bias]
        if node is not None and node.op_type in BIASED:
            node.resize_inputs(3)
            node.replace_input_with(2, term)
            node.attributes.pop("beta", None)
            return linear
        uses = self.readers(linear)
        total = self.node("Add", [linear, term], linear, f"{bias}.add")
        for use in uses:
            self.redirect(use, total)
        return total

    def has(self, param: str) -> bool:
        """Return whether there is an initializer of that name."""
        return param in self.graph.initializers

    def holds_value(self, param: str) -> bool:
        """Return what `has` does."""
        return self.has(param)

    def parameter(self, param: str, at: ir.Value) -> ir.Value:
        """Return an initializer's value."""
        return self.graph.initializers[param]

    def read(self, param: str) -> Floats:
        """Return an initializer's present values."""
        return self.tensor(param).numpy().astype(np.float64)

    def rows(self, param: str, axis: int) -> Iterator[Floats]:
        """Yield an initializer's present values [..., size of axis], piece by piece."""
        tensor = self.tensor(param)
        for piece in pieces(tensor.numpy(), axis):
            yield piece.astype(np.float64)
        del piece
        release(tensor)

    def worked_out(self, name: str) -> Floats:
        """Return the value of a node that initializers alone decide."""
        return worked_out(self.model, name)

    def transform(self, param: str, axis: int | None, change: Change) -> None:
        """Replace an initializer's values when they are next read: nothing is loaded now, nothing kept then."""
        tensor = self.tensor(param)

        def evaluate() -> ir.TensorProtocol:
            array = changed(tensor.numpy(), axis, change)
            release(tensor)
            return ir.Tensor(array, dtype=tensor.dtype, name=param)

        lazy = ir.LazyTensor(evaluate, tensor.dtype, ir.Shape(tensor.shape.numpy()), name=param)
        self.graph.initializers[param].const_value = lazy

    def create(self, name: str, values: Floats, like: ir.Value) -> str:
        """Make an initializer under that name, or one like it, in the dtype of `like`."""
        name = self.unique(name)
        constant(self.graph, name, values.astype(dtype_of(like).numpy()))
        return name

    def finish(self) -> None:
        """Drop nodes and initializers that nothing reads; put new nodes right before what reads them."""
        RemoveUnusedNodesPass()(self.model)
        self.graph.sort()

    # ---- nodes ----

    def tensor(self, param: str) -> ir.TensorProtocol:
        tensor = self.graph.initializers[param].const_value
        if tensor is None:
            raise LookupError(f"{param} holds no values")
        return tensor

    def unique(self, name: str) -> str:
        """Return a name that no value has, and take it."""
        names = (name if i == 1 else f"{name}_{i}" for i in count(1))
        found = next(n for n in names if n not in self.taken)
        self.taken.add(found)
        return found

    def vector(self, name: str) -> ir.Value:
        """Return the value of a gain or bias: an initializer's, or one that the graph computes."""
        return self.graph.initializers[name] if self.has(name) else self.values[name]

    def node(
        self,
        operator: str,
        inputs: Sequence[ir.Value],
        like: ir.Value,
        name: str,
        held: Attributes | None = None,
    ) -> ir.Value:
        """Add a node and return its output, of the type and shape of `like`."""
        name = self.unique(name)
        node = ir.node(operator, inputs, held, name=name, metadata_props={"lnrewrite": self.label})
        output = node.outputs[0]
        output.name = name
        resemble(output, like)
        self.graph.append(node)
        return output


def _known(graph: ir.Graph, view: OpGraph) -> dict[ir.Node, tuple[str, ...]]:
    """Map each node to the names under which the view has it: its outputs, or those of the nodes that it went into.

    A node inside a subgraph goes by the names of the node that holds the subgraph.
    """
    found: dict[ir.Node, tuple[str, ...]] = {}
    for node in graph:
        names = tuple(o.name for o in node.outputs if o.name in view.ops or o.name in view.alias)
        users = (o.name for user in node.successors() for o in user.outputs)
        found[node] = names or tuple(n for n in users if n in view.ops)
        for inner in _inside(node):
            found[inner] = found[node]
    return found


def _inside(node: ir.Node) -> Iterator[ir.Node]:
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield from ir.traversal.RecursiveGraphIterator(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            for graph in attribute.as_graphs():
                yield from ir.traversal.RecursiveGraphIterator(graph)
