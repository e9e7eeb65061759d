"""What is fitted of an ONNX model is fitted in torch: each operator is right there, or not taken, and so is a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import numpy_helper
from onnx.backend.test import loader
from onnx_ir.passes.common import CommonSubexpressionEliminationPass
from torch import Tensor, fx, nn

import lnrewrite as lnr
import zoo
from lnrewrite import demo
from lnrewrite.backends.onnx import torch_table
from lnrewrite.backends.onnx.mirror import Mirror, mirror
from lnrewrite.backends.onnx.norms import CONTRIB, ONES, RMS
from lnrewrite.backends.onnx.session import OnnxModule
from lnrewrite.models.program import Program
from test_reconstruction import as_onnx, data, placed, state
from tiers import rows
from zoo.norms import randomise

Arrays = list[np.ndarray]
KINDS = ("node", "simple", "pytorch-operator", "pytorch-converted")
PLAIN = {"float32", "float64", "int64", "int32", "bool"}


class Keeping(fx.Interpreter):
    """Run a graph and keep the values of its nodes."""

    def run(self, *inputs: object, **how: Any) -> Any:
        self.kept: dict[str, Any] = {}
        with torch.no_grad():
            return super().run(*inputs, **how)

    def run_node(self, n: fx.Node) -> Any:
        self.kept[n.name] = super().run_node(n)
        return self.kept[n.name]


def run(found: Mirror, ends: list[str], inputs: Arrays) -> list[Tensor] | None:
    """Return what a mirror computes; None where it does not take the model, or torch not these inputs."""
    if found.missing or not set(ends) <= found.names.keys():
        return None
    runner = Keeping(found.module)
    try:
        runner.run(*map(tensor, inputs), enable_io_processing=False)
    except NotImplementedError:
        return None
    except (RuntimeError, IndexError):
        if all(a.dtype.name in PLAIN and a.size for a in inputs):
            raise
        return None
    return [runner.kept[found.names[e]] for e in ends]


def tensor(array: np.ndarray) -> Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


@cache
def cases(kind: str) -> list[Any]:
    with warnings.catch_warnings(action="ignore"):
        return loader.load_model_tests(kind=kind)


def told(case: Any) -> Iterator[tuple[Arrays, Arrays]]:
    """Yield the inputs and the outputs of a case of ONNX's own tests."""
    if case.data_sets is not None:
        yield from case.data_sets
        return
    for folder in sorted(Path(case.model_dir).glob("test_data_set_*")):
        yield tuple(
            [
                numpy_helper.to_array(onnx.TensorProto.FromString((folder / f"{what}_{i}.pb").read_bytes()))
                for i in range(len(list(folder.glob(f"{what}_*.pb"))))
            ]
            for what in ("input", "output")
        )


def close(found: Tensor, wanted: np.ndarray, case: Any) -> bool:
    """Return whether a result is the one that ONNX's test tells, in its type and its shape too."""
    like = str(found.dtype).removeprefix("torch.") == wanted.dtype.name and tuple(found.shape) == wanted.shape
    slack = {"float16": 5e-3, "bfloat16": 5e-2}.get(wanted.dtype.name, 1e-5)
    return like and np.allclose(found.double().numpy(), wanted.astype(float), case.rtol, slack, equal_nan=True)


def test_each_operator_is_right_or_not_taken() -> None:
    """Every case of ONNX's own tests; several are of old opsets, and several write operators out."""
    right, wrong = set[str](), list[str]()
    for case in (c for kind in KINDS for c in cases(kind)):
        proto = case.model or onnx.load(Path(case.model_dir) / "model.onnx")
        types = [v.type for v in (*proto.graph.input, *proto.graph.output)]
        if any(not t.HasField("tensor_type") for t in types):  # sequences and optional values
            continue
        model = ir.serde.deserialize_model(proto)
        ends = [str(v.name) for v in model.graph.outputs]
        found = mirror(model, ends)
        for given, wanted in told(case):
            numbers = all(isinstance(a, (np.ndarray, np.generic)) for a in (*given, *wanted))  # of a type of NumPy's
            made = run(found, ends, given) if numbers else None
            if made is None:
                break
            if all(close(*pair, case) for pair in zip(made, wanted, strict=True)):
                right |= {n.op_type for n in proto.graph.node}
            else:
                wrong.append(case.name)
    assert not wrong
    assert torch_table.TABLE.keys() - right <= {RMS}, "operators that no case is taken of"


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).normal(size=shape).astype(np.float32)


HEADS: dict[str, Any] = {"num_heads": 2}
Q, K, V = draw(2, 5, 8), draw(2, 7, 8), draw(2, 7, 12)
MASK = np.where(draw(2, 1, 5, 7) > 0.5, -np.inf, draw(2, 1, 5, 7)).astype(np.float32)
RUNTIMES: list[tuple[str, list[np.ndarray | None], dict[str, Any]]] = [
    (RMS, [draw(3, 8), draw(8)], {"epsilon": 1e-3, "axis": -1}),
    ("Gelu", [draw(3, 8)], {}),
    ("BiasGelu", [draw(3, 8), draw(8)], {}),
    ("FastGelu", [draw(3, 8)], {}),
    ("FastGelu", [draw(3, 8), draw(8)], {}),
    ("QuickGelu", [draw(3, 8)], {"alpha": 1.5}),
    ("FusedMatMul", [draw(2, 3, 8), draw(2, 5, 8)], {"alpha": 0.5, "transB": 1}),
    ("FusedMatMul", [draw(2, 8, 3), draw(8, 5)], {"transA": 1}),
    ("MultiHeadAttention", [Q, K, V], HEADS),
    ("MultiHeadAttention", [Q, K, V], {**HEADS, "scale": 0.3}),
    ("MultiHeadAttention", [Q, K, V, draw(28)], HEADS),
    ("MultiHeadAttention", [Q, K, V, None, None, MASK], HEADS),
    ("MultiHeadAttention", [Q, K, V, draw(28), None, MASK[:1]], HEADS),
    ("MultiHeadAttention", [Q, draw(2, 2, 7, 4), draw(2, 2, 7, 4)], HEADS),
]
GROUPS: dict[str, Any] = {"num_heads": 4, "kv_num_heads": 2}
PASTS = (0, 3)


def grouped(seed: int) -> tuple[str, list[np.ndarray | None], dict[str, Any]]:
    """Draw a call of grouped attention: packed or not, turned, biased, cut or capped, with a cache that is empty, full,
    or longer than what it holds, rows of one length or of their own.
    """
    draws = np.random.default_rng(seed)
    rows, new, past, size = (int(draws.choice(each)) for each in ((1, 2), (1, 4, 6), (0, 0, 3), (8, 16)))
    rows = 1 if past and new > 1 else rows  # the kernel's contract
    total, turned, packed = past + new, bool(draws.integers(2)), bool(draws.integers(2))
    q = draw(rows, new, (8 if packed else 4) * size, seed=seed)
    k, v = (None if packed else draw(rows, new, 2 * size, seed=seed + i) for i in (1, 2))
    room = past + 6 * int(past > 0 and draws.integers(2))
    pasts: list[np.ndarray | None] = [draw(rows, 2, room, size, seed=seed + i) for i in (3, 4)]
    lengths, whole = np.full(rows, total - 1, np.int32), np.array(total, np.int32)
    if rows > 1 and draws.integers(2):
        lengths = draws.integers(0, total, rows, dtype=np.int32)
    pairs = size // 2 if size == 16 else 0
    angles = np.outer(np.arange(16), 0.5 ** np.arange(pairs)).astype(np.float32)
    tables: list[np.ndarray | None] = [np.cos(angles), np.sin(angles)] if turned and pairs else [None, None]
    bias = draw(rows, 4, new, total, seed=seed + 5) if draws.integers(2) else None
    inputs = [q, k, v, *pasts, lengths, whole, *tables, None, bias]
    held = {"do_rotary": int(tables[0] is not None), "rotary_interleaved": int(draws.integers(2))}
    if draws.integers(2):
        held["local_window_size"] = 3
    more = {"softcap": 2.0} if draws.integers(3) == 0 else {"smooth_softmax": 1} if draws.integers(3) == 0 else {}
    return "GroupQueryAttention", inputs, {**GROUPS, **held, **more, **({"scale": 0.3} if draws.integers(2) else {})}


def few_bits(seed: int) -> tuple[str, list[np.ndarray | None], dict[str, Any]]:
    """Draw a product with weights in few bits."""
    draws = np.random.default_rng(seed)
    bits, block = int(draws.choice((4, 8))), int(draws.choice((16, 32)))
    inner, outer = int(draws.choice((32, 48, 64))), 12
    blocks = -(-inner // block)
    packed = draws.integers(0, 256, (outer, blocks, block * bits // 8), dtype=np.uint8)
    scales = np.abs(draw(outer * blocks, seed=seed)) + 0.1
    zeros = draws.integers(0, 256, outer * -(-blocks * bits // 8), dtype=np.uint8) if draws.integers(2) else None
    inputs = [draw(2, 3, inner, seed=seed), packed, scales, zeros]
    return "MatMulNBits", inputs, {"K": inner, "N": outer, "bits": bits, "block_size": block}


def turned(seed: int) -> tuple[str, list[np.ndarray | None], dict[str, Any]]:
    """Draw a rotation of heads, all or a part of each, from one place on or at places of their own."""
    draws = np.random.default_rng(seed)
    size, part, heads_apart = 16, bool(draws.integers(2)), bool(draws.integers(2))
    x = draw(2, 3, 5, size, seed=seed) if heads_apart else draw(2, 5, 3 * size, seed=seed)
    pairs = 4 if part else 8
    angles = np.outer(np.arange(32), 0.5 ** np.arange(pairs)).astype(np.float32)
    places = np.array([int(draws.integers(9))]) if draws.integers(2) else draws.integers(0, 20, (2, 5))
    held = {"num_heads": 3, "rotary_embedding_dim": 2 * pairs} if part else {}
    if not part and not heads_apart:
        held = {"num_heads": 3}
    return (
        "RotaryEmbedding",
        [x, places, np.cos(angles), np.sin(angles)],
        {**held, "interleaved": int(draws.integers(2))},
    )


def headed(seed: int) -> tuple[str, list[np.ndarray | None], dict[str, Any]]:
    """Return attention under a mask, the number of keys or ones and zeros, and with what else goes."""
    draws = np.random.default_rng((seed, 4))
    b, new, keys, own = 2, int(draws.integers(1, 6)), int(draws.integers(2, 7)), bool(draws.integers(2))
    past = int(draws.choice(PASTS)) if own else 0
    new, total = (new, new + past) if own else (new, keys)
    masks = [
        None,
        draws.integers(1, total + 1, b),
        draws.integers(0, 2, (b, total)),
        draws.integers(0, 2, (b, new, total)),
    ]
    mask, held = masks[int(draws.integers(4))], {"mask_filter_value": -3.0} if draws.integers(2) else {}
    if mask is not None and not held:  # a row that sees nothing has scores about -1e4: few digits are left of them
        mask[..., 0] = 1
    inputs = [
        draw(b, new, 8, seed=seed),
        draw(b, total - past, 8, seed=seed + 1),
        draw(b, total - past, 8, seed=seed + 2),
        draw(24, seed=seed) if draws.integers(2) else None,
        None if mask is None else mask.astype(np.int32),
        draw(b, 2, new, total, seed=seed) if draws.integers(2) else None,
    ]
    if past:
        inputs += [draw(b, 2, past, 4, seed=seed + 3), draw(b, 2, past, 4, seed=seed + 4)]
    return "MultiHeadAttention", inputs, {**HEADS, **held, "unidirectional": int(own and draws.integers(2))}


DRAWN = [make(seed) for make in (grouped, few_bits, turned, headed) for seed in range(40)]
DECLINED: list[tuple[str, list[np.ndarray | None], dict[str, Any]]] = [
    ("MultiHeadAttention", [Q, K, V, None, np.array([3, 7, 0, 5, 10, 0, 7, 14], np.int32)], HEADS),
    ("MultiHeadAttention", [Q, K, V], {**HEADS, "unidirectional": 1}),
    ("MultiHeadAttention", [draw(2, 5, 2, 3, 4)], HEADS),
    ("FusedMatMul", [draw(3, 2, 8), draw(2, 8, 5)], {"transBatchA": 1}),
    ("LongformerAttention", [Q], HEADS),
]


@pytest.mark.parametrize(("name", "inputs", "attributes"), RUNTIMES + DRAWN + DECLINED)
def test_operators_of_onnx_runtime_are_right_or_not_taken(
    name: str, inputs: list[np.ndarray | None], attributes: dict[str, Any]
) -> None:
    model = one("" if name == RMS else CONTRIB, name, inputs, attributes)
    given = [a for a in inputs if a is not None]
    found = run(mirror(model, ["y"]), ["y"], given)
    if any(inputs is row[1] for row in DECLINED):
        assert found is None
    else:
        wanted = OnnxModule(model)(*map(tensor, given))["y"]
        assert found
        shown = torch.ones(wanted.shape[:2], dtype=torch.bool)
        if name == "GroupQueryAttention" and inputs[6] == wanted.shape[1]:  # what pads a prompt gets nothing
            shown = torch.arange(wanted.shape[1]) <= torch.from_numpy(inputs[5])[:, None]
        torch.testing.assert_close(found[0][shown], wanted[shown], rtol=1e-4, atol=1e-5)


def one(domain: str, name: str, inputs: list[np.ndarray | None], attributes: dict[str, Any]) -> ir.Model:
    """Return a model of one operator, whose output is y."""
    values = [
        None if a is None else ir.Value(name=f"x{i}", shape=ir.Shape(a.shape), type=ir.TensorType(ir.tensor(a).dtype))
        for i, a in enumerate(inputs)
    ]
    kept = name == "GroupQueryAttention" or (name == "MultiHeadAttention" and len(inputs) > 6)
    count = 3 if kept else 1  # without the cache they give, kernels read none
    node = ir.node(name, values, attributes, domain=domain, num_outputs=count)
    for i, value in enumerate(node.outputs):
        value.name, value.type = f"y{i}", ir.TensorType(ir.DataType.FLOAT)
    node.outputs[0].name, node.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    opsets = {"": 17, CONTRIB: 1}
    graph = ir.Graph([v for v in values if v], node.outputs, nodes=[node], opset_imports=opsets, name="one")
    return ir.Model(graph, ir_version=10)


@pytest.fixture(scope="module")
def pre(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[dict[str, Tensor]]]:
    program, inputs = zoo.captured("pre")
    return as_onnx(program, tmp_path_factory.mktemp("pre")), data(inputs, 5)


def errors(program: Any, batches: list[dict[str, Tensor]], to: str = "peri", more: str = "") -> tuple[Any, ...]:
    """Return the results with and without a fit, which is no worse."""
    plain, fitted = (placed(program, to, batches, more + how) for how in (" fit=constants", ""))
    assert fitted.report.measured.relative_error <= plain.report.measured.relative_error * (1 + 1e-6)
    return plain, fitted


OPERATORS = ("Erf", "Gather", "LayerNormalization", "MatMul", "Softmax", "Transpose")


@pytest.mark.parametrize("name", rows(OPERATORS, sample=OPERATORS[::2]))
def test_a_missing_operator_is_told_and_what_comes_before_it_is_fitted(
    name: str, pre: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, batches = pre
    reach = [b.name for b in program.network.blocks]
    monkeypatch.delitem(torch_table.TABLE, name)
    monkeypatch.setattr("lnrewrite.backends.onnx.mirror._definition", lambda node, opset: None)
    _, fitted = errors(program, batches)
    assert any(name in note for note in fitted.report.notes)
    done = [b for row in fitted.report.fitted for b in row.blocks]
    assert done == (reach[:1] if name == "Erf" else [])


def test_an_operator_that_torch_computes_otherwise_is_found(
    pre: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, batches = pre
    right: Callable[..., Tensor] = torch_table.TABLE["Softmax"]  # type: ignore[assignment]

    def softmax(x: Tensor, *, axis: int | None = None, opset: int) -> Tensor:
        return right(x, axis=axis, opset=opset) * 1.01

    softmax.__module__ = torch_table.__name__
    monkeypatch.setitem(torch_table.TABLE, "Softmax", softmax)
    _, fitted = errors(program, batches)
    assert any("otherwise than ONNX Runtime" in note for note in fitted.report.notes)
    assert not fitted.report.fitted


SPELLED = [("/Layers.{}/Add_output_0", "class {}"), ("V{}", "v{}"), ("x.{}", "x_{}"), ("__{}", "Ä{}")]


@pytest.mark.parametrize("spelled", SPELLED)
def test_names_mean_nothing(spelled: tuple[str, str], pre: tuple[Any, Any], tmp_path: Path) -> None:
    """Exporters write names that Python does not take, and torch.fx writes them its own way."""
    program, batches = pre
    model = program.model.clone()
    for i, value in enumerate(ir.convenience.create_value_mapping(model.graph).values()):
        if value not in model.graph.inputs:
            value.name = spelled[i % 2].format(i // 2)
    ir.save(model, tmp_path / "named.onnx")
    found = [placed(p, "peri", batches).report.fitted for p in (program, lnr.load(tmp_path / "named.onnx"))]
    one, other = ([(r.before, r.after, len(r.weights)) for r in rows] for rows in found)
    assert one
    assert one == other


class Reused(nn.Module):
    """A net whose head is the linear map of its last branch."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(depth))
        self.reads, self.maps = (nn.ModuleList(nn.Linear(16, 16) for _ in range(depth)) for _ in range(2))
        self.final = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        for norm, read, linear in zip(self.norms, self.reads, self.maps, strict=True):
            x = x + linear(torch.tanh(read(norm(x))))
        return self.maps[-1](self.final(x))


def reused(depth: int) -> tuple[Program, dict[str, Tensor]]:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(8, 16, 16)}
    return lnr.capture(randomise(Reused(depth)).eval(), kwargs=inputs), inputs


def test_the_gain_of_a_norm_without_one_is_no_weight(tmp_path: Path) -> None:
    """One norm alone has none, so that the ones that stand for it are read once."""
    folded = lnr.Pipeline.parse("canonicalize,fold-affine").run(as_onnx(reused(1)[0], tmp_path), partial=True).program
    assert any(n.startswith(ONES) for n in folded.model.graph.initializers)
    weights = mirror(folded.model, [b.anchor.total for b in folded.network.blocks]).weights.values()
    assert set(weights) == {"reads.0.weight", "reads.0.bias"}


@pytest.mark.parametrize("name", ["reused", "shared over layers, pre"])
@pytest.mark.parametrize("once", [False, True])
def test_what_others_read_too_stays(name: str, once: bool, tmp_path: Path) -> None:
    """Also where what is made of a weight, its transpose, is made once and read by several parts."""
    program, inputs = reused(3) if name == "reused" else zoo.captured(name)
    exported = as_onnx(program, tmp_path)
    if once:
        CommonSubexpressionEliminationPass()(exported.model)
    readers = exported.model.graph.initializers
    _, fitted = errors(exported, data(inputs, 5))
    moved = {n for row in fitted.report.fitted for n in row.weights}
    assert moved
    shared = {n for n in moved & readers.keys() if _products(readers[n]) > 1}
    assert not shared


def _products(value: ir.Value) -> int:
    """Return how many products read a weight, as it is or transposed."""
    uses = [node for node, _ in value.uses()]
    return sum(_products(n.outputs[0]) if n.op_type == "Transpose" else n.op_type == "MatMul" for n in uses)


WAYS: list[tuple[str, dict[str, Any]]] = [
    ("generic", {}), ("opset 23", {"opset": 23}), ("cuda", {"target": "cuda"}),
    ("half", {"target": "cuda", "dtype": "fp16"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "how"), rows(WAYS, sample=[]))
def test_an_export_is_fitted_as_what_it_was_exported_from(name: str, how: dict[str, Any], tmp_path: Path) -> None:
    """Attention is written out, one operator of ONNX, or one of ONNX Runtime."""
    model, batches = demo.load("tinygpt").eval(), demo.calibration(batches=4)
    program = lnr.capture(model, kwargs=batches[0])
    exported = as_onnx(program, tmp_path, **how)
    before = {n: t.dtype for n, t in state(exported).items()}
    plain, fitted = errors(exported, batches, "none", " blocks=0")
    wanted = placed(program, "none", batches, " blocks=0").report
    assert [row.blocks for row in fitted.report.fitted] == [row.blocks for row in wanted.fitted]
    assert fitted.report.measured.relative_error <= 0.9 * plain.report.measured.relative_error
    assert fitted.report.measured.relative_error <= 1.3 * wanted.measured.relative_error
    after = {n: t.dtype for n, t in state(fitted.program).items()}
    assert {n: after[n] for n in before.keys() & after.keys()} == {n: before[n] for n in before.keys() & after.keys()}
    fitted.program.save(tmp_path / "fitted.onnx")
    again = lnr.load(tmp_path / "fitted.onnx")
    one, other = (p.module()(**batches[0]) for p in (fitted.program, again))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-3) for a, b in zip(one.values(), other.values(), strict=True))
