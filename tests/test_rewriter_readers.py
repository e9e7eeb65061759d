"""What edits of an ONNX graph must not touch: what else reads a value, and which values are loaded."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from lnrewrite.backends.onnx.editor import OnnxEditor
from lnrewrite.backends.onnx.lift import lift
from lnrewrite.backends.rewriter import Rewriter
from lnrewrite.backends.values import CHUNK, changed
from lnrewrite.detect.detection import detect
from lnrewrite.errors import LnrewriteError
from lnrewrite.ir import Affine, Edit, FoldReader, Kind, Norm, Operation, SetNorm, Stream, Vectors, Where
from numpy_nets import (
    EPS,
    Floats,
    G,
    Net,
    Sheet,
    assert_same,
    expected,
    fold,
    need,
    normal,
    norms_of,
    operate,
    run,
    seen,
    tokens,
)

# ---- what else reads a value ----


def test_copies_of_a_value_are_looked_through() -> None:
    """One Identity of the state serves branch and sum; one stands between norm and reader, and behind the branch."""
    net = Net(norms="in")
    model = Sheet(net).model()
    copies: dict[ir.Value, ir.Node] = {}
    for node in list(model.graph):
        values = [v for v in node.inputs if v is not None]
        if not any(v.is_initializer() for v in values) or node.op_type != "Add":
            for index, value in enumerate(values):
                if not value.is_initializer() and value.name != "x":
                    if value not in copies:
                        copies[value] = ir.node("Identity", [value])
                        model.graph.insert_before(node, copies[value])
                    node.replace_input_with(index, copies[value].outputs[0])

    def all_three(s: Stream, v: Vectors) -> list[tuple[str, list[Operation]]]:
        by = v.add(G)
        return [(b.name, [Affine(w, by) for w in (Where.IN, Where.OUT, Where.POST)]) for b in s.blocks]

    after, _ = operate(model, all_three)
    hooks = {f"h.{i}.{w}": (lambda u: G * u) for i in (0, 1) for w in ("in", "out", "skip")}
    assert_same(after, net, hooks)


def choice(model: ir.Model, ops: Sequence[str], *inputs: ir.Value) -> ir.Value:
    """Return what an If makes that reads values of the main graph in its subgraphs and takes the first operator."""
    if "flag" not in model.graph.initializers:
        model.graph.register_initializer(
            ir.Value(name="flag", shape=ir.Shape([]), type=ir.TensorType(ir.DataType.BOOL),
                     const_value=ir.tensor(np.array(True), name="flag"))
        )  # fmt: skip

    def branch(op: str) -> ir.Graph:
        node = ir.node(op, inputs, name=op)
        node.outputs[0].name, node.outputs[0].type = f"inner.{op}", inputs[0].type
        return ir.Graph([], node.outputs, nodes=[node], name=op)

    graphs = {"then_branch": branch(ops[0]), "else_branch": branch(ops[1])}
    node = ir.node("If", [model.graph.initializers["flag"]], graphs)
    node.outputs[0].name, node.outputs[0].type = "chosen", inputs[0].type
    model.graph.append(node)
    return node.outputs[0]


def test_a_subgraph_reads_the_new_value() -> None:
    net = Net()
    model = Sheet(net).model()
    lift(model)
    state = model.graph.outputs[0].producer().inputs[0]  # type: ignore[union-attr]
    assert state is not None
    model.graph.outputs.append(choice(model, ["Neg", "Exp"], state))
    norm = Norm(Kind.RMS, EPS)
    after, _ = operate(model, lambda s, v: [(s.blocks[1].name, [SetNorm(Where.POST, norm, v.add(G))])])
    x = tokens(net)
    want = expected(net, x, {"h.1.post": lambda u: normal(u, Kind.RMS, G)})
    np.testing.assert_allclose(run(after, x)["chosen"], -want["state.1"])


def test_a_subgraph_of_a_branch_is_among_its_readers() -> None:
    net = Net()
    model = Sheet(net).model()
    (reader,) = [n for n in model.graph if any(v is not None and v.name == "h.0.up.weight" for v in n.inputs)]
    lift(model)
    hidden, (tanh,) = reader.outputs[0], reader.outputs[0].consumers()
    x, weight = reader.inputs
    assert x is not None and weight is not None
    found = choice(model, ["MatMul", "Gemm"], x, weight)
    found.shape = hidden.shape
    tanh.replace_input_with(0, found)
    model.graph.sort()
    after, _ = operate(model, lambda s, v: [(s.blocks[0].name, [Affine(Where.IN, v.add(G))])])
    assert_same(after, net, {"h.0.in": lambda u: u * G})


def test_what_reads_the_state_beside_the_norm_keeps_reading_it() -> None:
    net = Net()
    model = Sheet(net).model()
    (reader,) = [n for n in model.graph if any(v is not None and v.name == "h.0.up.weight" for v in n.inputs)]
    (tanh,), norm = reader.outputs[0].consumers(), reader.inputs[0] and reader.inputs[0].producer()
    assert norm is not None
    raw = ir.node("ReduceMean", [norm.inputs[0], None], {"keepdims": 1, "noop_with_empty_axes": 0})
    total = ir.node("Add", [reader.outputs[0], raw.outputs[0]])
    model.graph.insert_before(tanh, [raw, total])
    tanh.replace_input_with(0, total.outputs[0])
    after, _ = operate(model, lambda s, v: [(s.blocks[0].name, [SetNorm(Where.IN, None), Affine(Where.IN, v.add(G))])])
    p, x = net.values(), tokens(net)
    state = x @ p["embed.weight"]
    branch = np.tanh(G * state @ p["h.0.up.weight"] + state.mean()) @ p["h.0.down.weight"]
    want = expected(net, x, {"h.0.out": lambda _: branch})["logits"]
    np.testing.assert_allclose(run(after, x)["logits"], want)


def test_an_initializer_that_is_an_input_too_becomes_a_plain_one() -> None:
    net = Net()
    model = Sheet(net).model()
    model.ir_version = 3
    model.graph.inputs.extend(model.graph.initializers.values())
    after, _ = operate(model, lambda s, v: [(s.blocks[0].name, fold(need(s.blocks[0].at(Where.IN))))])
    assert [v.name for v in after.graph.inputs] == ["x"] and after.ir_version >= 4
    assert_same(after, net)
    assert len(model.graph.inputs) > 1


def test_new_names_are_unique_and_say_where_they_belong() -> None:
    net = Net(norms="")
    model = Sheet(net).model()
    name = f"{seen(model).blocks[0].name}.norm_in.weight"
    model.graph.inputs[0].name = name
    norm = Norm(Kind.RMS, EPS)
    after, _ = operate(model, lambda s, v: [(s.blocks[0].name, [SetNorm(Where.IN, norm, v.add(G))])])
    assert f"{name}_2" in after.graph.initializers
    names = [v.name for n in after.graph for v in n.outputs] + [*after.graph.initializers, after.graph.inputs[0].name]
    assert len(names) == len(set(names)) and None not in names


def test_what_does_not_fit_is_refused() -> None:
    model = Sheet(Net()).model()
    for where in (Where.OUT, Where.POST):
        with pytest.raises(LnrewriteError, match="LN301.*no .* norm to remove"):
            operate(model, lambda s, v, w=where: [(s.blocks[0].name, [SetNorm(w, None)])])  # type: ignore[misc]
    with pytest.raises(LnrewriteError, match="LN301.*batch norm cannot be written"):
        operate(model, lambda s, v: [(s.blocks[0].name, [SetNorm(Where.IN, Norm(Kind.BATCH, EPS))])])
    with pytest.raises(LnrewriteError, match="LN301.*unknown block"):
        operate(model, lambda s, v: [("nothing", [Affine(Where.IN, v.add(G))])])
    view = lift(model)
    (stream,) = detect(view).network.streams
    lost = replace(stream.blocks[0], anchor=replace(stream.blocks[0].anchor, add="nothing"))
    rewriter = Rewriter(OnnxEditor(model, view), view, vectors := Vectors())
    with pytest.raises(LnrewriteError, match="LN301 test:.*nothing in the plan reads"):
        rewriter.apply(replace(stream, blocks=(lost,)), Edit(lost.name, (Affine(Where.OUT, vectors.add(G)),)), "test")


# ---- stored precision, and memory ----


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT])
def test_weights_keep_their_dtype_and_are_rounded_once(dtype: ir.DataType) -> None:
    net = Net("MatMul +", "in", dtype=dtype)
    after, stream = operate(Sheet(net).model(), lambda s, v: [(b.name, fold(need(b.at(Where.IN)))) for b in s.blocks])
    assert {v.dtype for v in after.graph.initializers.values()} == {dtype}
    p = {k: v.astype(dtype.numpy()).astype(np.float64) for k, v in net.values().items()}
    weight, held = p["h.0.up.weight"], after.graph.initializers["h.0.up.weight"].const_value
    bias = after.graph.initializers["h.0.up.bias"].const_value
    assert held is not None and bias is not None and held.numpy().dtype == dtype.numpy()
    np.testing.assert_array_equal(held.numpy(), (weight * p["h.0.in.weight"][:, None]).astype(dtype.numpy()))
    wanted = p["h.0.up.bias"] + p["h.0.in.bias"] @ weight
    np.testing.assert_allclose(bias.numpy().astype(float), wanted.astype(dtype.numpy()).astype(float), rtol=1e-2)


def test_new_norms_take_the_dtype_of_what_they_normalise() -> None:
    net = Net(norms="", dtype=ir.DataType.FLOAT16)
    norm = Norm(Kind.LAYER, EPS)
    after, _ = operate(Sheet(net).model(), lambda s, v: [(b.name, [SetNorm(Where.OUT, norm)]) for b in s.blocks])
    assert {v.dtype for n in norms_of(after) for v in (*n.inputs, *n.outputs) if v} == {ir.DataType.FLOAT16}
    assert len({id(n.inputs[1]) for n in norms_of(after)}) == 1  # one vector of ones serves all
    assert_same(after, net, {f"h.{i}.out": lambda f: normal(f, Kind.LAYER) for i in (0, 1)}, rtol=2e-2)


def test_a_norm_that_widened_its_input_still_gives_what_it_gave() -> None:
    """Removing a norm between half and single precision leaves a cast."""
    net = Net(norms="", dtype=ir.DataType.FLOAT)
    model = Sheet(net).model()
    lift(model)
    (head,) = [n for n in model.graph if n.outputs[0].name == "logits"]
    half = ir.node("Cast", [head.inputs[0]], {"to": ir.DataType.FLOAT16})
    wide = ir.node("Cast", half.outputs, {"to": ir.DataType.FLOAT})
    half.outputs[0].type, wide.outputs[0].type = ir.TensorType(ir.DataType.FLOAT16), ir.TensorType(ir.DataType.FLOAT)
    model.graph.insert_before(head, [half, wide])
    head.replace_input_with(0, wide.outputs[0])
    editor = OnnxEditor(model, lift(model))
    editor.label = "test"
    (edge,) = editor.readers(wide.outputs[0])
    editor.redirect(edge, half.outputs[0])
    assert [e.consumers for e in editor.readers(half.outputs[0])][1:] == [edge.consumers] == [("logits",)]
    editor.finish()
    assert head.inputs[0] is not None and head.inputs[0].dtype is ir.DataType.FLOAT
    run(model, tokens(net))


def test_no_weight_is_loaded_before_it_is_saved_nor_kept_afterwards(tmp_path: Path) -> None:
    net = Net(norms="in", dtype=ir.DataType.FLOAT)
    ir.save(Sheet(net).model(), tmp_path / "a.onnx", external_data="a.data", size_threshold_bytes=0)
    model = ir.load(tmp_path / "a.onnx")
    before = {k: v.const_value for k, v in model.graph.initializers.items()}
    after, _ = operate(model, lambda s, v: [(b.name, [FoldReader(r, v.add(G)) for r in b.readers]) for b in s.blocks])
    held = {k: v.const_value for k, v in after.graph.initializers.items()}
    weights = [k for k in before if "up.weight" in k]
    assert all(isinstance(before[k], ir.ExternalTensor) and before[k].raw is None for k in weights)
    assert all(isinstance(held[k], ir.LazyTensor) for k in weights)
    lazy = held[weights[0]]
    assert isinstance(lazy, ir.LazyTensor)
    array = weakref.ref(lazy.numpy())
    assert array() is None
    assert before[weights[0]].raw is None
    ir.save(after, tmp_path / "b.onnx", external_data="b.data", size_threshold_bytes=0)
    onnx.checker.check_model(str(tmp_path / "b.onnx"))
    whole = ir.external_data.load_to_model(ir.load(tmp_path / "b.onnx"))
    assert_same(whole, net, {f"h.{i}.in": lambda u: u * G for i in (0, 1)}, rtol=1e-4)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, None])
def test_large_weights_change_piece_by_piece(axis: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lnrewrite.backends.values.CHUNK", 16)
    array = np.random.default_rng(0).normal(size=(5, 4, 3)).astype(np.float32)
    sizes = []

    def change(rows: Floats) -> Floats:
        sizes.append(rows.size)
        assert rows.dtype == np.float64
        return rows * np.arange(1, rows.shape[-1] + 1)

    result = changed(array, axis, change)
    shape = [1, 1, 1]
    if axis is None:
        want = (array.reshape(-1) * np.arange(1.0, 61)).reshape(array.shape)
    else:
        shape[axis] = -1
        want = array * np.arange(1.0, array.shape[axis] + 1).reshape(shape)
        assert max(sizes) <= 20 and len(sizes) > 1
    np.testing.assert_array_equal(result, want.astype(np.float32))
    assert CHUNK > 1000
