"""What edits of weights and norms must do on an ONNX graph, each against the same net written in numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

from lnrewrite.backends.onnx.lift import lift
from lnrewrite.ir import Affine, FoldReader, Gain, Kind, Norm, Operation, ScaleWriter, SetNorm, Stream, Vectors, Where
from numpy_nets import (
    EPS,
    READERS,
    WIDTH,
    B,
    G,
    Hook,
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
