"""What edits must do on an ONNX graph, each against the same net written in numpy, and on what they must not touch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray

import lnrewrite as lnr
from lnrewrite.backends.onnx.editor import OnnxEditor
from lnrewrite.backends.onnx.lift import lift
from lnrewrite.backends.rewriter import Rewriter
from lnrewrite.backends.values import CHUNK, changed
from lnrewrite.detect.detection import detect
from lnrewrite.errors import LnrewriteError
from lnrewrite.ir import (
    Affine,
    Edit,
    FoldReader,
    Gain,
    Kind,
    Norm,
    Operation,
    Proposal,
    ScaleWriter,
    SetNorm,
    Site,
    Stream,
    Vectors,
    Where,
)
from zoo import nets

Floats = NDArray[np.float64]
Hook = Callable[[Floats], Floats]
WIDTH, HIDDEN, TOKENS, EPS = 8, 12, 5, 1e-3


@dataclass(frozen=True)
class Net:
    """Describe how a net of two blocks is spelled: reader, norms, dtype, and which values are outputs too."""

    reader: str = "MatMul"
    norms: str = "in"
    kind: Kind = Kind.LAYER
    dtype: ir.DataType = ir.DataType.DOUBLE
    states: bool = False

    def values(self) -> dict[str, Floats]:
        """Return parameters: none of them the identity."""
        random = np.random.default_rng(0)
        found = {"embed.weight": random.normal(size=(WIDTH, WIDTH)), "head.weight": random.normal(size=(WIDTH, 3))}
        for where in ("embedding", "final", *(f"h.{i}.{w}" for i in (0, 1) for w in ("in", "out", "post"))):
            found[f"{where}.weight"] = 1 + 0.3 * random.normal(size=WIDTH)
            found[f"{where}.bias"] = random.normal(size=WIDTH)
        for i in (0, 1):
            found[f"h.{i}.up.weight"] = random.normal(size=(WIDTH, HIDDEN))
            found[f"h.{i}.up.bias"] = random.normal(size=HIDDEN)
            found[f"h.{i}.down.weight"] = random.normal(size=(HIDDEN, WIDTH))
            found[f"h.{i}.down.bias"] = random.normal(size=WIDTH)
        return found


class Sheet:
    """Write a net node by node, holding its parameters under their names."""

    def __init__(self, net: Net) -> None:
        self.net, self.values, self.tape = net, net.values(), ir.tape.Tape()
        self.held: dict[str, ir.Value] = {}

    def param(self, name: str, change: Hook = lambda v: v) -> ir.Value:
        if name not in self.held:
            array = np.ascontiguousarray(change(self.values[name])).astype(self.net.dtype.numpy())
            self.held[name] = self.tape.initializer(ir.tensor(array, name=name))
        return self.held[name]

    def __call__(self, op: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        return self.tape.op(op, inputs, attributes)

    def norm(self, x: ir.Value, where: str) -> ir.Value:
        if where.rpartition(".")[2] not in self.net.norms.split():
            return x
        layer = self.net.kind is Kind.LAYER
        inputs = [x, self.param(f"{where}.weight"), *([self.param(f"{where}.bias")] if layer else [])]
        op = "LayerNormalization" if layer else "SimplifiedLayerNormalization"
        return self(op, *inputs, axis=-1, epsilon=EPS, stash_type=1)

    def read(self, x: ir.Value, i: int) -> ir.Value:
        name, bias = f"h.{i}.up.weight", f"h.{i}.up.bias"
        match self.net.reader.split():
            case ["MatMul", *rest]:
                y = self("MatMul", x, self.param(name))
                return self("Add", self.param(bias), y) if rest else y
            case ["Transpose"]:
                return self("MatMul", x, self("Transpose", self.param(name, np.transpose), perm=[1, 0]))
            case ["Gemm", turned, *rest]:
                weight = self.param(name, np.transpose) if turned == "1" else self.param(name)
                extra = [self.param(bias)] if rest == ["C"] else []
                beta = {"beta": 0.5} if rest == ["beta"] else {}
                return self("Gemm", x, weight, *extra, transB=int(turned), **beta)
            case ["Conv"]:
                weight = self.param(name, lambda v: v.T[:, :, None])
                turned = self("Transpose", x, perm=[0, 2, 1])
                return self("Transpose", self("Conv", turned, weight, kernel_shape=[1]), perm=[0, 2, 1])
        raise AssertionError(self.net.reader)

    def model(self) -> ir.Model:
        batch = ["batch"] if self.net.reader == "Conv" else []
        kind = ir.TensorType(self.net.dtype)
        x = ir.Value(name="x", shape=ir.Shape([*batch, "tokens", WIDTH]), type=kind)
        state = self.norm(self("MatMul", x, self.param("embed.weight")), "embedding")
        states = []
        for i in (0, 1):
            u = self.read(self.norm(state, f"h.{i}.in"), i)
            written = self("MatMul", self("Tanh", u), self.param(f"h.{i}.down.weight"))
            written = self("Add", written, self.param(f"h.{i}.down.bias")) if i else written
            state = self.norm(self("Add", state, self.norm(written, f"h.{i}.out")), f"h.{i}.post")
            states.append(state)
        logits = self("MatMul", self.norm(state, "final"), self.param("head.weight"))
        outputs = [logits, *(states if self.net.states else ())]
        for value, name in zip(outputs, ("logits", "state.0", "state.1"), strict=False):
            value.name, value.type = name, kind
        graph = ir.Graph(
            [x], outputs, nodes=self.tape.nodes, initializers=self.tape.initializers, opset_imports={"": 18}, name="net"
        )
        return ir.Model(graph, ir_version=9)


def expected(net: Net, x: Floats, hooks: dict[str, Hook] | None = None) -> dict[str, Floats]:
    """Run a net in numpy; a hook changes what flows at `source`, `last`, or a block's `in`, `out`, `post`, `skip`."""
    p, found = net.values(), {}

    def hook(name: str, u: Floats) -> Floats:
        return (hooks or {}).get(name, lambda v: v)(u)

    def norm(u: Floats, where: str) -> Floats:
        if where.rpartition(".")[2] not in net.norms.split():
            return u
        return normal(u, net.kind, p[f"{where}.weight"], p[f"{where}.bias"] if net.kind is Kind.LAYER else 0)

    state = hook("source", norm(x @ p["embed.weight"], "embedding"))
    for i in (0, 1):
        u = hook(f"h.{i}.in", norm(state, f"h.{i}.in")) @ p[f"h.{i}.up.weight"]
        u = u + p[f"h.{i}.up.bias"] if net.reader.endswith(("+", "C")) else u
        f = np.tanh(u) @ p[f"h.{i}.down.weight"] + (p[f"h.{i}.down.bias"] if i else 0)
        f = hook(f"h.{i}.out", norm(f, f"h.{i}.out"))
        state = hook(f"h.{i}.post", norm(hook(f"h.{i}.skip", state) + f, f"h.{i}.post"))
        found[f"state.{i}"] = state
    found["logits"] = hook("last", norm(hook("end", state), "final")) @ p["head.weight"]
    return found


def normal(u: Floats, kind: Kind, gamma: Any = 1, beta: Any = 0, eps: float = EPS) -> Floats:
    """Normalise the last axis."""
    mean = u.mean(-1, keepdims=True) if kind is Kind.LAYER else 0
    result: Floats = (u - mean) / np.sqrt(((u - mean) ** 2).mean(-1, keepdims=True) + eps) * gamma + beta
    return result


def tokens(net: Net, count: int = TOKENS) -> Floats:
    shape = (2, count, WIDTH) if net.reader == "Conv" else (count, WIDTH)
    return np.random.default_rng(1).normal(size=shape)


def run(model: ir.Model, x: Floats) -> dict[str, Floats]:
    """Check a model and run it in ONNX Runtime."""
    proto = ir.to_proto(model)
    known = {v.name for v in (*proto.graph.input, *proto.graph.initializer)}
    for node in proto.graph.node:  # ONNX Runtime sorts where it must; the standard asks for sorted nodes
        assert node.domain == "" and known.issuperset(node.input)
        known.update(node.output)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    dtype = model.graph.inputs[0].dtype
    assert dtype is not None
    results = session.run(names, {"x": x.astype(dtype.numpy())})
    return dict(zip(names, (np.asarray(r, np.float64) for r in results), strict=True))


def seen(model: ir.Model) -> Stream:
    """Return the one stream that detection sees in a model."""
    (stream,) = detect(lift(model)).network.streams
    return stream


def operate(
    model: ir.Model, edits: Callable[[Stream, Vectors], Sequence[tuple[str, Sequence[Operation]]]]
) -> tuple[ir.Model, Stream]:
    """Return a copy of the model with edits, (target, operations) each, and what was seen in it before."""
    view = lift(model)
    (stream,) = detect(view).network.streams
    vectors = Vectors()
    wanted = [Edit(target, tuple(operations)) for target, operations in edits(stream, vectors)]
    copy = model.clone()
    rewriter = Rewriter(OnnxEditor(copy, view), view, vectors)
    rewriter.carry_out([(stream, Proposal(tuple(wanted)))], "test")
    return copy, stream


def assert_same(model: ir.Model, net: Net, hooks: dict[str, Hook] | None = None, rtol: float = 1e-9) -> None:
    """Check a model's outputs, at two lengths, against numpy's, to `rtol` of each output's largest value."""
    for count in (TOKENS, 3):
        x = tokens(net, count)
        want, got = expected(net, x, hooks), run(model, x)
        assert set(got) == ({"logits", "state.0", "state.1"} if net.states else {"logits"})
        for name, value in got.items():
            np.testing.assert_allclose(value, want[name], rtol=rtol, atol=rtol * np.abs(want[name]).max())


def norms_of(model: ir.Model) -> list[ir.Node]:
    return [n for n in model.graph if n.op_type.endswith("LayerNormalization")]


def fold(site: Site) -> list[Operation]:
    norm = site.norm
    scale = Gain(norm.gamma, norm.plus_one) if norm.gamma else None
    shift = Gain(norm.beta) if norm.beta else None
    bare = replace(norm, gamma=None, beta=None, plus_one=False)
    return [*(FoldReader(r, scale, shift) for r in site.readers), SetNorm(site.where, bare)]


def need(site: Site | None) -> Site:
    assert site is not None
    return site


READERS = ("MatMul", "MatMul +", "Transpose", "Gemm 0", "Gemm 1", "Gemm 0 C", "Gemm 1 C", "Gemm 1 beta", "Conv")
G, B = np.linspace(0.5, 2, WIDTH), np.linspace(-1, 1, WIDTH)


# ---- the nets themselves ----


@pytest.mark.parametrize("reader", READERS)
def test_the_nets_are_what_numpy_says(reader: str) -> None:
    net = Net(reader, "embedding in out post final", dtype=ir.DataType.FLOAT, states=True)
    assert_same(Sheet(net).model(), net, rtol=1e-4)


# ---- weights ----


@pytest.mark.parametrize("kind", [Kind.LAYER, Kind.RMS])
@pytest.mark.parametrize("reader", READERS)
def test_a_fold_is_exact_in_every_spelling_of_the_reader(reader: str, kind: Kind) -> None:
    double = reader != "Conv"  # ONNX Runtime's is float32
    net = Net(reader, "in final", kind, dtype=ir.DataType.DOUBLE if double else ir.DataType.FLOAT)
    model = Sheet(net).model()
    after, stream = operate(
        model,
        lambda s, _: [*((b.name, fold(need(b.at(Where.IN)))) for b in s.blocks), ("s.final", fold(need(s.final)))],
    )
    assert len(stream.blocks) == 2 and all(len(b.readers) == 1 for b in stream.blocks)
    assert_same(after, net, rtol=1e-9 if double else 1e-5)
    found = seen(after)
    assert [site.norm for _, site in found.sites()] == [Norm(kind, n.norm.eps) for _, n in stream.sites()]
    assert all(b.readers[0].bias for b in found.blocks) or kind is Kind.RMS
    assert not [n for n in after.graph.initializers if n.endswith(("in.weight", "in.bias", "final.weight"))]
    assert_same(model, net, rtol=1e-4)  # the original is as it was


def test_a_dense_fold_multiplies_by_the_matrix_from_the_right_side() -> None:
    net = Net("Gemm 1", "in")
    matrix = np.random.default_rng(3).normal(size=(WIDTH, WIDTH))
    after, _ = operate(
        Sheet(net).model(),
        lambda s, v: [(s.blocks[0].name, [FoldReader(r, v.add(matrix), v.add(B)) for r in s.blocks[0].readers])],
    )
    assert_same(after, net, {"h.0.in": lambda u: u @ matrix.T + B})


@pytest.mark.parametrize("block", [0, 1], ids=["no bias", "bias"])
@pytest.mark.parametrize("shift", [False, True])
def test_writers_are_scaled(block: int, shift: bool) -> None:
    net = Net(norms="in")
    after, stream = operate(
        Sheet(net).model(),
        lambda s, v: [
            (s.name, [ScaleWriter(w, v.add(G), v.add(B) if shift else None) for w in s.blocks[block].writers])
        ],
    )
    assert [w.bias is not None for w in stream.blocks[block].writers] == [bool(block)]
    assert_same(after, net, {f"h.{block}.out": lambda f: G * f + B * shift})


def test_what_is_edited_twice_is_edited_twice() -> None:
    """A bias that the first edit made takes the second one's shift and scale, and an insertion stands behind it."""
    net = Net(norms="in")

    def twice(s: Stream, v: Vectors) -> list[tuple[str, list[Operation]]]:
        (w,), name = s.blocks[0].writers, s.blocks[0].name
        writes: list[Operation] = [ScaleWriter(w, v.add(G), v.add(B)), ScaleWriter(w, v.add(B + 2), v.add(G))]
        return [(name, writes), (name, [Affine(Where.OUT, v.add(G))])]

    after, _ = operate(Sheet(net).model(), twice)
    assert_same(after, net, {"h.0.out": lambda f: G * ((B + 2) * (G * f + B) + G)})
    assert [n.op_type for n in after.graph].count("Add") == 2 + 1 + 1  # sums, the other block's bias, the new one


def test_an_insertion_stands_behind_the_bias_that_an_edit_made() -> None:
    net = Net(norms="out")

    def three(s: Stream, v: Vectors) -> list[tuple[str, list[Operation]]]:
        (w,), by = s.blocks[0].writers, v.add(G)
        return [(s.blocks[0].name, [SetNorm(Where.OUT, None), ScaleWriter(w, by, v.add(B)), Affine(Where.OUT, by)])]

    after, _ = operate(Sheet(net).model(), three)
    p, x = net.values(), tokens(net)
    state = x @ p["embed.weight"]
    branch = np.tanh(state @ p["h.0.up.weight"]) @ p["h.0.down.weight"]
    want = expected(net, x, {"h.0.out": lambda _: G * (G * branch + B)})["logits"]
    np.testing.assert_allclose(run(after, x)["logits"], want)


def test_a_gain_that_two_norms_share_is_set_for_one() -> None:
    net = Net(norms="in", kind=Kind.RMS)
    model = Sheet(net).model()
    first, second = norms_of(model)
    second.replace_input_with(1, first.inputs[1])

    def one(s: Stream, v: Vectors) -> list[tuple[str, list[Operation]]]:
        return [(s.blocks[1].name, [SetNorm(Where.IN, need(s.blocks[1].at(Where.IN)).norm, v.add(G))])]

    after, _ = operate(model, one)
    assert_same(after, net, {"h.1.in": lambda u: u * G / net.values()["h.1.in.weight"]})


def test_a_value_is_the_one_from_before_the_first_edit() -> None:
    net = Net(norms="in", kind=Kind.RMS)

    def swap(s: Stream, v: Vectors) -> list[tuple[str, list[Operation]]]:
        a, b = (need(block.at(Where.IN)) for block in s.blocks)
        set_a = SetNorm(Where.IN, a.norm, Gain(str(b.norm.gamma)))
        set_b = SetNorm(Where.IN, b.norm, Gain(str(a.norm.gamma)))
        return [(s.blocks[0].name, [set_a]), (s.blocks[1].name, [set_b])]

    after, stream = operate(Sheet(net).model(), swap)
    p = net.values()
    ratio = p["h.1.in.weight"] / p["h.0.in.weight"]
    assert_same(after, net, {"h.0.in": lambda u: u * ratio, "h.1.in": lambda u: u / ratio})
    assert [s.norm for _, s in seen(after).sites()] == [s.norm for _, s in stream.sites()]


# ---- insertions ----


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("parts", ["scale", "shift", "scale shift"])
@pytest.mark.parametrize(("where", "hook"), [(Where.IN, "in"), (Where.OUT, "out"), (Where.POST, "skip")])
@pytest.mark.parametrize("norms", ["in", "out", "post", "final"])
def test_affines(norms: str, where: Where, hook: str, parts: str, states: bool) -> None:
    net = Net("MatMul +", norms, states=states)
    g, b = (G if "scale" in parts else 1), (B if "shift" in parts else 0)
    after, _ = operate(
        Sheet(net).model(),
        lambda s, v: [
            (
                block.name,
                [Affine(where, v.add(G) if "scale" in parts else None, v.add(B) if "shift" in parts else None)],
            )
            for block in s.blocks
        ],
    )
    assert_same(after, net, {f"h.{i}.{hook}": lambda u: u * g + b for i in (0, 1)})


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("kind", [Kind.LAYER, Kind.RMS])
@pytest.mark.parametrize(
    ("where", "hook"),
    [(Where.IN, "h.0.in"), (Where.OUT, "h.0.out"), (Where.POST, "h.0.post"), (Where.POST, "h.1.post"),
     (Where.EMBEDDING, "source"), (Where.FINAL, "last")],
)  # fmt: skip
def test_norms_are_put_in(where: Where, hook: str, kind: Kind, states: bool) -> None:
    net = Net("Gemm 1 C", "", states=states)
    index = int(hook[2]) if hook[0] == "h" else 0

    def put(s: Stream, v: Vectors) -> list[tuple[str, list[Operation]]]:
        target = s.blocks[index].name if hook[0] == "h" else f"{s.name}.{where}"
        return [(target, [SetNorm(where, Norm(kind, EPS), v.add(G), v.add(B) if kind is Kind.LAYER else None)])]

    after, _ = operate(Sheet(net).model(), put)
    bias = B if kind is Kind.LAYER else 0
    hooks: dict[str, Hook] = {hook: lambda u: normal(u, kind, G, bias)}
    if where is Where.FINAL:  # it stands for the last state, which is an output under its own name
        hooks = {"h.1.post": hooks["last"]}
    assert_same(after, net, hooks)
    (made,) = norms_of(after)
    assert made.op_type == ("LayerNormalization" if kind is Kind.LAYER else "SimplifiedLayerNormalization")
    assert made.metadata_props["lnrewrite"].startswith("test:")
    x, y = made.inputs[0], made.outputs[0]
    assert x and y.shape == x.shape and y.dtype == x.dtype
    assert str(made.inputs[1] and made.inputs[1].name).endswith(f".norm_{where}.weight")


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("kind", [Kind.LAYER, Kind.RMS])
@pytest.mark.parametrize("where", [Where.IN, Where.OUT, Where.POST, Where.EMBEDDING, Where.FINAL])
def test_norms_are_taken_out(where: Where, kind: Kind, states: bool) -> None:
    net = Net(norms=f"in {where}" if where is not Where.IN else "in final", kind=kind, states=states)

    def take(s: Stream, v: Vectors) -> list[tuple[str, list[Operation]]]:
        ends = where in (Where.EMBEDDING, Where.FINAL)
        return [(t, [SetNorm(where, None)]) for t in ([f"{s.name}.{where}"] if ends else [b.name for b in s.blocks])]

    after, _ = operate(Sheet(net).model(), take)
    left = " ".join(n for n in net.norms.split() if n != where)
    assert_same(after, replace(net, norms=left))
    assert not [n for n in after.graph.initializers if f"{where}." in n]


def test_a_post_net_becomes_a_pre_net() -> None:
    """What took a value's place is found by later edits: norms move from the trunk to the next block's reads."""
    net = Net(norms="post", states=True)

    def move(s: Stream, v: Vectors) -> list[tuple[str, list[Operation]]]:
        first, second = s.blocks
        held = need(first.at(Where.POST)).norm
        carried = SetNorm(Where.IN, held), Affine(Where.IN, v.add(G)), Affine(Where.POST, v.add(G), v.add(B))
        return [(first.name, [SetNorm(Where.POST, None)]), (second.name, list(carried))]

    after, _ = operate(Sheet(net).model(), move)
    p, x = net.values(), tokens(net)
    s0 = x @ p["embed.weight"]
    s0 = s0 + np.tanh(s0 @ p["h.0.up.weight"]) @ p["h.0.down.weight"]
    u = G * normal(s0, Kind.LAYER, p["h.0.post.weight"], p["h.0.post.bias"])
    s1 = G * s0 + B + np.tanh(u @ p["h.1.up.weight"]) @ p["h.1.down.weight"] + p["h.1.down.bias"]
    got = run(after, x)
    np.testing.assert_allclose(got["state.0"], s0)
    np.testing.assert_allclose(got["state.1"], normal(s1, Kind.LAYER, p["h.1.post.weight"], p["h.1.post.bias"]))


def test_a_removed_norm_whose_input_is_an_output_too_leaves_both_names() -> None:
    net = Net(norms="final")
    model = Sheet(net).model()
    (last,) = norms_of(model)
    state = last.inputs[0]
    assert state is not None
    state.name, last.outputs[0].name = "raw", "normed"
    model.graph.outputs.extend([state, last.outputs[0]])
    lift(model)
    after, _ = operate(model, lambda s, v: [(f"{s.name}.final", [SetNorm(Where.FINAL, None)])])
    got = run(after, tokens(net))
    assert list(got) == ["logits", "raw", "normed"]
    np.testing.assert_array_equal(got["raw"], got["normed"])


# ---- gains in other forms ----


@pytest.mark.parametrize("keep", [True, False])
def test_one_plus_w_gains(keep: bool) -> None:
    """A gain of 1 + w is set through w, and kept where it is not named."""
    net = Net(norms="in", kind=Kind.RMS)
    model = Sheet(net).model()
    view = lift(model)
    site = need(seen(model).blocks[0].at(Where.IN))
    one = replace(site.norm, plus_one=True)
    after, _ = operate(model, lambda s, v: [(s.blocks[0].name, [SetNorm(Where.IN, one, None if keep else v.add(G))])])
    p = net.values()["h.0.in.weight"]
    gain = (1 + p) / p if keep else G / p
    assert_same(after, net, {"h.0.in": lambda u: u * gain})
    assert need(seen(after).blocks[0].at(Where.IN)).norm == one
    assert view.uses[str(one.gamma)] == 1


@pytest.mark.parametrize("computed", [False, True])
def test_a_gain_of_another_shape_or_dtype_is_fitted(computed: bool) -> None:
    """Norms that are moved keep gains that were stored for an elementwise product, or are computed further down."""
    net = Net(norms="in", kind=Kind.RMS)
    model = Sheet(net).model()
    gain = G.astype(np.float32).reshape(1, WIDTH)
    stored = ir.Value(name="gain", shape=ir.Shape([1, WIDTH]), type=ir.TensorType(ir.DataType.FLOAT),
                      const_value=ir.tensor(gain, name="gain"))  # fmt: skip
    model.graph.register_initializer(stored)
    if computed:
        node = ir.node("Exp", [stored])
        node.outputs[0].name = "exp"
        model.graph.append(node)
        model.graph.outputs.append(node.outputs[0])
    norm = Norm(Kind.RMS, EPS, "exp" if computed else "gain", computed=computed)
    after, _ = operate(model, lambda s, v: [(s.blocks[0].name, [SetNorm(Where.IN, norm)])])
    if computed:
        after.graph.outputs.pop()
    assert [v.shape for n in norms_of(after) for v in n.inputs[1:] if v] == [[WIDTH]] * 2
    ratio = (np.exp(gain[0]) if computed else gain[0]) / net.values()["h.0.in.weight"]
    assert_same(after, net, {"h.0.in": lambda u: u * ratio}, rtol=1e-6 if computed else 1e-9)


def test_an_rms_norm_keeps_its_bias() -> None:
    net = Net(norms="in", kind=Kind.RMS)
    after, _ = operate(
        Sheet(net).model(),
        lambda s, v: [(s.blocks[0].name, [SetNorm(Where.IN, need(s.blocks[0].at(Where.IN)).norm, beta=v.add(B))])],
    )
    assert_same(after, net, {"h.0.in": lambda u: u + B})


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


# ---- torch ----


@pytest.mark.parametrize("name", ["norm in the branch (Sub-LN)", "norm in the branch alone", "convnext block"])
def test_inner_norms_are_folded_in_torch(name: str) -> None:
    module, args = nets.NETS[name].build()
    program = lnr.capture(module, args)
    result = lnr.Pipeline.parse("fold-affine").run(program, partial=True)
    assert result.report.edits > 0
    a, b = program.module()(*args), result.program.module()(*args)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


class Products(torch.nn.Module):
    """Two branches whose maps are products without a bias, of parameters at the top; gains are sigmoids or plain."""

    def __init__(self, computed: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.other = (torch.nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(3))
        self.gain, self.gain2 = (torch.nn.Parameter(torch.randn(WIDTH)) for _ in range(2))
        self.zero = torch.nn.Parameter(torch.zeros(WIDTH))
        self.computed = computed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2.0
        gain = torch.sigmoid(self.gain) if self.computed else self.gain
        x = x + torch.tanh((torch.rms_norm(x, (WIDTH,), eps=EPS) * gain + self.zero) @ self.up) @ self.down
        return x + torch.tanh(torch.rms_norm(x, (WIDTH,), self.gain2, EPS) @ self.other)


def edited(
    module: torch.nn.Module, x: torch.Tensor, edits: Callable[[Stream, Vectors], Sequence[Edit]]
) -> torch.nn.Module:
    """Return a captured module with edits."""
    program = lnr.capture(module.eval(), (x,))
    (stream,) = program.network.streams
    vectors = Vectors()
    after, _ = program.apply([(stream, Proposal(tuple(edits(stream, vectors)), vectors=vectors))], "test")
    return after.module()


def torch_in() -> torch.Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))


def test_a_bias_behind_a_product_is_made_once_in_torch() -> None:
    torch.manual_seed(0)
    module, x = Products(), torch_in()
    module.other.data.zero_()

    def twice(stream: Stream, v: Vectors) -> list[Edit]:
        block = stream.blocks[0]
        (w,), g, b = block.writers, v.add(G), v.add(B)
        return [Edit(block.name, (ScaleWriter(w, g, b), ScaleWriter(w, g, g), Affine(Where.OUT, v.add(B + 2))))]

    after = edited(module, x, twice)
    g, b = torch.from_numpy(G), torch.from_numpy(B)
    with torch.no_grad():
        branch = module(x) - 2 * x
        wanted = 2 * x + (b + 2) * (g * (g * branch + b) + g)
        torch.testing.assert_close(after(x), wanted.float(), rtol=1e-4, atol=1e-4)
    assert "down_bias" in dict(after.named_parameters())


def test_gains_are_swapped_in_torch() -> None:
    torch.manual_seed(0)
    module, x = Products(), torch_in()

    def swap(stream: Stream, v: Vectors) -> list[Edit]:
        a, b = ((block.name, need(block.at(Where.IN)).norm) for block in stream.blocks)
        set_a = SetNorm(Where.IN, a[1], Gain(str(b[1].gamma)), v.add(B))
        return [Edit(a[0], (set_a,)), Edit(b[0], (SetNorm(Where.IN, b[1], Gain(str(a[1].gamma))),))]

    after = edited(module, x, swap)
    module.gain, module.gain2 = module.gain2, module.gain
    module.zero.data += torch.from_numpy(B)
    with torch.no_grad():
        torch.testing.assert_close(after(x), module(x))


def test_a_computed_gain_is_kept_in_torch() -> None:
    torch.manual_seed(0)
    module, x = Products(computed=True), torch_in()
    program = lnr.capture(module.eval(), (x,))
    result = lnr.Pipeline.parse("canonicalize").run(program)
    assert need(program.network.blocks[0].at(Where.IN)).norm.computed and result.report.edits == 1
    assert "zero" not in dict(result.program.module().named_parameters())
    with torch.no_grad():
        torch.testing.assert_close(result.program.module()(x), module(x))
