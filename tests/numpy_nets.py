"""Residual nets written twice, as an ONNX graph and in numpy, and edits of the one held against the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
from numpy.typing import NDArray

from lnrewrite.backends.onnx.editor import OnnxEditor
from lnrewrite.backends.onnx.lift import lift
from lnrewrite.backends.rewriter import Rewriter
from lnrewrite.detect.detection import detect
from lnrewrite.ir import Edit, FoldReader, Gain, Kind, Operation, Proposal, SetNorm, Site, Stream, Vectors

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
