"""Write the boundary between two sublayers, norm, add and norm, as the one operator that lnrewrite's kernels compute.

    f -> norm -> p          h, z = lnrewrite::NormAddNorm(f, x, g_out, g_in[, b_out, b_in])
    p + x -> h              h    = lnrewrite::NormAdd(f, x, g_out[, b_out])        where no norm reads h
    h -> norm -> z

Peri-LN has this boundary after every sublayer, output-only placement its first half; f, x, h and z move once each, as
many bytes as a Skip* operator moves in Pre-LN. A model brings the operators' definitions along as ONNX functions: a
session without the kernels runs those, one that registers the library runs the kernels. A definition is of one kind of
norm, so that a model which mixes kinds has the boundaries of its commoner kind fused; it has biases or none, so that
where some norms have one the others get zeros (ONNX Runtime crashes on a function's input that is left out).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import TopologicalSortPass

from ..backends.onnx.lift import dtype as type_of
from ..backends.onnx.norms import LAYER, SITE, NormNode, resemble, site, take_place, zeros
from ..kernels.library import DOMAIN
from ..pipeline.report import Form

BOTH, HALF = "NormAddNorm", "NormAdd"
DTYPES = {"float32", "float16", "bfloat16"}
WHY = "the norm before the add, the add and the norm behind it in one kernel of lnrewrite"


@dataclass(frozen=True, slots=True)
class Boundary:
    """Hold the nodes of one boundary; `after` is None where no norm of the same kind reads the sum."""

    before: ir.Node
    add: ir.Node
    after: ir.Node | None

    @property
    def norms(self) -> list[ir.Node]:
        """Return the norms, in order."""
        return [self.before] if self.after is None else [self.before, self.after]


def fuse_norm_add_norm(model: ir.Model) -> tuple[list[Form], list[str]]:
    """Write every boundary of a semantic model as one operator; return a row for each norm in it, and what was left."""
    found = boundaries(model.graph)
    if not found:
        return [], ["no norm stands right before a residual add, so no operator of lnrewrite was written"]
    (kind, _), *_ = Counter(b.before.op_type for b in found).most_common()
    chosen = [b for b in found if b.before.op_type == kind]
    biased = any(norm.bias is not None for b in chosen for norm in map(_read, b.norms))
    rows, used = [], set()
    for boundary in chosen:
        made = _fused(model.graph, boundary, biased)
        used.add(made.op_type)
        rows += [Form(site(norm), made.op_type, WHY) for norm in boundary.norms]
    for name in sorted(used):
        function = _definition(name, kind, biased, model.graph.opset_imports[""])
        model.functions[function.identifier()] = function
    model.graph.opset_imports[DOMAIN] = 1
    TopologicalSortPass()(model)
    left = len(found) - len(chosen)
    return rows, [f"{left} boundaries stay as they are: their norms are not {kind}"] if left else []


def boundaries(graph: ir.Graph) -> list[Boundary]:
    """Find the boundaries: norms that only an add reads, whose other operand has the same shape and is computed.

    No node is part of two.
    """
    found: list[Boundary] = []
    taken: set[ir.Node] = set()
    for before in graph:
        p = before.outputs[0]
        readers = list(p.uses())
        if not _is_norm(before) or len(readers) != 1 or p.is_graph_output():
            continue
        add = readers[0].node
        if add.domain or add.op_type != "Add" or not all(v is not None and _plain(v, p) for v in add.inputs):
            continue
        if taken & {before, add}:
            continue
        after = (u.node for u in add.outputs[0].uses() if u.idx == 0 and _is_norm(u.node))
        same = (n for n in after if n.op_type == before.op_type and n not in taken)
        found.append(Boundary(before, add, next(same, None)))
        taken |= {add, *found[-1].norms}
    return found


def _is_norm(node: ir.Node) -> bool:
    """Return whether a node is a norm that the kernels have: one type throughout, gain and bias one vector each."""
    norm = NormNode.read(node)
    if norm is None or not norm.semantic:
        return False
    vectors = [v for v in (norm.gain, norm.bias) if v is not None]
    plain = all(v.shape is not None and len(v.shape) == 1 and v.dtype == norm.x.dtype for v in vectors)
    return plain and type_of(norm.x) in DTYPES


def _read(node: ir.Node) -> NormNode:
    """Return what a norm's node computes."""
    norm = NormNode.read(node)
    assert norm is not None
    return norm


def _plain(value: ir.Value, like: ir.Value) -> bool:
    return value.const_value is None and value.shape is not None and value.shape == like.shape


def _fused(graph: ir.Graph, boundary: Boundary, biased: bool) -> ir.Node:
    """Put the operator in the place of a boundary's nodes."""
    before, add, behind = boundary.before, boundary.add, boundary.norms[1:]
    norms = [_read(node) for node in boundary.norms]
    (x,) = (v for v in add.inputs if v is not before.outputs[0])
    inputs = [norms[0].x, x, *(norm.gain for norm in norms)]
    if biased:
        inputs += [norm.bias or zeros(graph, norm.gain) for norm in norms]
    held: dict[str, float | int] = {name: norm.eps for name, norm in zip(("eps_out", "eps_in"), norms, strict=False)}
    held["layernorm"] = int(norms[0].operator == LAYER)
    made = ir.node(HALF if boundary.after is None else BOTH, inputs, held, domain=DOMAIN, num_outputs=len(norms))
    made.metadata_props[SITE] = site(before)
    graph.insert_before(add, made)
    for node, new in zip((add, *behind), made.outputs, strict=True):
        resemble(new, node.outputs[0])
        take_place(node.outputs[0], new)
    graph.remove([*behind, add, before], safe=True)
    return made


def _definition(name: str, kind: str, biased: bool, opset: int) -> ir.Function:
    """Return what an operator computes, in the operators that it stands for."""
    ends = ("out",) if name == HALF else ("out", "in")
    held = {v: ir.Value(name=v) for v in ("f", "x", *(f"{g}_{e}" for g in ("gb" if biased else "g") for e in ends))}

    def normalised(x: ir.Value, end: str) -> ir.Node:
        node = NormNode(kind, x, held[f"g_{end}"], held.get(f"b_{end}"), 0.0).build()
        node.attributes["epsilon"] = ir.RefAttr("epsilon", f"eps_{end}", ir.AttributeType.FLOAT)
        return node

    nodes = [first := normalised(held["f"], "out")]
    nodes.append(add := ir.node("Add", [first.outputs[0], held["x"]]))
    outputs = [add.outputs[0]]
    if name == BOTH:
        nodes.append(last := normalised(outputs[0], "in"))
        outputs.append(last.outputs[0])
    for label, value in zip("phz", (first.outputs[0], *outputs), strict=False):
        value.name = label
    graph = ir.Graph(list(held.values()), outputs, nodes=nodes, opset_imports={"": opset})
    given = [ir.Attr(f"eps_{end}", ir.AttributeType.FLOAT, None) for end in ends]
    return ir.Function(DOMAIN, name, graph=graph, attributes=[*given, ir.Attr("layernorm", ir.AttributeType.INT, None)])
