"""Spell what adds to a value, or norms it, in the words that detection knows, as `backends.torch.sums` and `.sized` do.

(g x) s          =  g (x s)            where s is a size of x alone, and g is computed from data
x with f added   =  x + (0 with f added)   to some of its elements, where weights compute f from x
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from ...detect.factors import Expression
from ...detect.gathered import gathered
from ...detect.graph import OpGraph
from .lift import lift
from .norms import constant
from .shapes import infer_shapes

PRODUCTS = {"MatMul", "Gemm", "Conv", "Einsum", "FusedMatMul"}
SIZE = {
    "Sqrt", "Reciprocal", "Add", "ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL2", "Pow", "Mul", "Cast", "Div",
}  # fmt: skip


def respell(model: ir.Model) -> OpGraph:
    """Replace such nodes of a model, and then its sums by what they come to; return its neutral view."""
    if any(node.op_type in SPELLINGS for node in model.graph):
        infer_shapes(model)
        place = {value: i for i, node in enumerate(model.graph) for value in node.outputs}
        for node in list(model.graph):
            if node.domain in ("", "ai.onnx") and (spelled := SPELLINGS.get(node.op_type)):
                old = node.outputs[0]
                if (new := spelled(model.graph, node, place)) is not None:
                    place[new] = place[old]
    view = lift(model)
    return lift(model) if gather(model, view) else view


Places = dict[ir.Value, int]
"""Which node of the graph gives a value, by its number."""


def gather(model: ir.Model, view: OpGraph) -> bool:
    """Write the sums of a model whose terms stand in several places, or are subtracted, as what they come to."""
    found = list(gathered(view))
    values = dict(ir.convenience.create_value_mapping(model.graph)) if found else {}
    for one in found:
        node = values[one.total].producer()
        assert node is not None
        values[one.total] = _stand(model.graph, node, *_Written(model.graph, node, values).nodes(one.comes_to))
    return bool(found)


class _Written:
    """Hold what writing one expression needs: the node that it comes to stand for, and the values by name."""

    def __init__(self, graph: ir.Graph, node: ir.Node, values: Mapping[str, ir.Value]) -> None:
        self.graph, self.old, self.values = graph, node.outputs[0], values
        self.made: list[ir.Node] = []

    def nodes(self, expression: Expression) -> list[ir.Node]:
        """Return the nodes of an expression, the last one last."""
        self.value(expression)
        return self.made

    def value(self, expression: Expression) -> ir.Value:
        """Write an expression; of what stands in it alone, shapes are inferred."""
        if isinstance(expression, str):
            return self.values[expression]
        kind = self.old.dtype
        assert kind is not None
        if isinstance(expression, float):
            name = f"lnrewrite.number.{kind.name.lower()}.{expression!r}"
            return constant(self.graph, name, np.array(expression, kind.numpy()))
        operator, *operands = expression
        inputs = [self.value(operand) for operand in operands]
        made = ir.node(WRITTEN[str(operator)], inputs, {"to": kind} if operator == "mask" else None)
        made.name = made.outputs[0].name = f"{self.old.name}.{len(self.made)}"
        made.outputs[0].type = ir.TensorType(kind)
        self.made.append(made)
        return made.outputs[0]


def _added(graph: ir.Graph, node: ir.Node, place: Places) -> ir.Value | None:
    if len(node.inputs) < 3 or node.inputs[2] is None or not _alike(x := node.inputs[2], node.outputs[0]):
        return None
    if not _computed(x) or x.dtype is None:
        return None
    held = {name: a for name, a in node.attributes.items() if name != "beta"}
    if (beta := node.attributes.get_float("beta", 1.0)) != 1:
        name = f"{node.outputs[0].name}.beta"
        scaled = ir.node("Mul", [x, constant(graph, name, np.array(beta, x.dtype.numpy()))], name=f"{name}.times")
        scaled.outputs[0].shape, scaled.outputs[0].type, scaled.outputs[0].name = x.shape, x.type, f"{name}.x"
        graph.insert_before(node, scaled)
        x = scaled.outputs[0]
    return _replace(graph, node, ir.node("Gemm", node.inputs[:2], held), node.outputs[0], "Add", x)


def _scattered(graph: ir.Graph, node: ir.Node, place: Places) -> ir.Value | None:
    x, at, f = node.inputs
    if node.attributes.get_string("reduction", "none") != "add" or x is None or f is None or x.dtype is None:
        return None
    if x.is_graph_output() or not _alike(x, node.outputs[0]) or not _weighed(x, f, place):
        return None
    zero = ir.tensor(np.zeros(1, x.dtype.numpy()), x.dtype)
    shape = ir.node("Shape", [x], name=f"{node.outputs[0].name}.shape")
    zeros = ir.node("ConstantOfShape", shape.outputs, {"value": zero}, name=f"{node.outputs[0].name}.zeros")
    for made, kind in ((shape, ir.DataType.INT64), (zeros, x.dtype)):
        made.outputs[0].name, made.outputs[0].type = made.name, ir.TensorType(kind)
        graph.insert_before(node, made)
    zeros.outputs[0].shape = x.shape
    scattered = ir.node("ScatterElements", [zeros.outputs[0], at, f], node.attributes)
    return _replace(graph, node, scattered, x, "Add", x)


def _stacked(graph: ir.Graph, node: ir.Node, place: Places) -> ir.Value | None:
    stack = node.inputs[0].producer() if node.inputs[0] is not None else None
    old = node.outputs[0]
    if stack is None or stack.op_type != "Concat" or len(stack.inputs) != 2 or len(stack.outputs[0].uses()) != 1:
        return None
    if node.attributes.get_int("keepdims", 1) or old.shape is None or _axes(node) != [stack.attributes.get_int("axis")]:
        return None
    made = [value.producer() if value is not None else None for value in stack.inputs]
    if any(n is None or n.op_type != "Unsqueeze" or not _alike(n.inputs[0], old) for n in made):  # type: ignore[arg-type]
        return None
    x, f = (n.inputs[0] for n in made if n is not None)
    return _stand(graph, node, ir.node("Add", [x, f], name=f"{node.outputs[0].name}.last"))


def _axes(node: ir.Node) -> list[int]:
    """Return the axes of a reduction, counted as the node counts them."""
    given = node.inputs[1] if len(node.inputs) > 1 else None
    tensor = ir.convenience.get_const_tensor(given) if given is not None else None
    return [int(a) for a in tensor.numpy().reshape(-1)] if tensor is not None else []


def _sized(graph: ir.Graph, node: ir.Node, place: Places) -> ir.Value | None:
    if len(node.inputs) != 2:
        return None
    one, two = node.inputs
    for value, size in [(one, two)] + [(two, one)] * (node.op_type == "Mul"):
        for gain, x in _factors(value):
            if size is not None and _alike(gain, x, node.outputs[0]) and _of(size, x):
                return _replace(graph, node, ir.node(node.op_type, [x, size]), x, "Mul", gain)
    return None


def _replace(
    graph: ir.Graph, node: ir.Node, first: ir.Node, like: ir.Value, operator: str, other: ir.Value
) -> ir.Value:
    """Let `other` and what a new node gives, by an operator, stand for what a node gives."""
    old, made = node.outputs[0], first.outputs[0]
    first.name = made.name = f"{old.name}.first"
    made.shape, made.type = like.shape, like.type
    graph.insert_before(node, first)
    return _stand(graph, node, ir.node(operator, [other, made], name=f"{node.outputs[0].name}.last"))


def _stand(graph: ir.Graph, node: ir.Node, *made: ir.Node) -> ir.Value:
    """Let what the last of new nodes gives stand for what another gives."""
    old, result = node.outputs[0], made[-1].outputs[0]
    result.shape, result.type, name = old.shape, old.type, old.name
    graph.insert_before(node, made)
    ir.convenience.replace_all_uses_with(old, result, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    result.name = name
    return result


def _weighed(state: ir.Value, value: ir.Value, place: Places) -> bool:
    """Return whether a value is computed from a state, and weights have a part in it."""
    todo, seen, found, weights = [value], {value}, False, False
    while todo:
        made = todo.pop().producer()
        for name in made.inputs if made is not None else ():
            found = found or name is state
            weights = weights or (made is not None and made.op_type in PRODUCTS)
            if name is not None and name not in seen and place.get(name, -1) >= place.get(state, -1):
                seen.add(name)
                todo.append(name)
    return found and weights


def _factors(value: ir.Value | None) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Yield the two orders of a product of two computed values that nothing else reads."""
    made = value.producer() if value is not None else None
    if value is None or made is None or made.op_type != "Mul" or len(value.uses()) != 1 or value.is_graph_output():
        return
    one, two = made.inputs
    if one is not None and two is not None and one is not two and _computed(one) and _computed(two):
        yield one, two
        yield two, one


def _computed(value: ir.Value) -> bool:
    """Return whether data decide a value: an input, or what a node gives other than a constant."""
    made = value.producer()
    return value.is_graph_input() and not value.is_initializer() if made is None else made.op_type != "Constant"


def _of(size: ir.Value, x: ir.Value) -> bool:
    """Return whether a value, one number a token, is a size of x."""
    if size.shape is None or len(size.shape) < 2 or size.shape[-1] != 1:
        return False
    for _ in range(12):
        made = size.producer()
        held = {v for v in made.inputs if v is not None and _computed(v)} if made is not None else set()
        if size is x or made is None or len(held) != 1 or made.op_type not in SIZE:
            return size is x
        size = held.pop()
    return False


def _alike(first: ir.Value, *others: ir.Value) -> bool:
    """Return whether values are of one shape of two axes or more, as far as sizes are known."""
    if first.shape is None or len(first.shape) < 2:
        return False
    for other in others:
        if other.shape is None or len(other.shape) != len(first.shape):
            return False
        pairs = [(a, b) for a, b in zip(first.shape, other.shape, strict=True) if int in (type(a), type(b))]
        if any(a != b for a, b in pairs):
            return False
    return True


WRITTEN = {"add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "mask": "Cast"}
SPELLINGS = {
    "Gemm": _added, "ReduceSum": _stacked, "Mul": _sized, "Div": _sized, "ScatterElements": _scattered,
}  # fmt: skip
