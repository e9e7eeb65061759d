"""The forms of norms: the same numbers in every form, counted, and nothing of the old form left."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from lnrewrite.backends.onnx.norms import CONTRIB, EPSILON, LAYER, RMS, SKIP
from lnrewrite.export.lowering import lower, split
from lnrewrite.export.targets import TARGETS
from sheets import HALF, SINGLE, WIDTH, Sheet, finished, given, named, run
from tiers import rows

ORT = "1.31.1"
ADDS = (
    "alone", "shared", "output", "broadcast", "vector", "scalar batch", "twice", "norm before", "norm behind", "bias",
    "two norms", "constant", "same", "reshaped", "reshaped, shared",
)  # fmt: skip


def weights(seed: int) -> np.ndarray:
    return 1 + 0.3 * np.random.default_rng(seed).normal(size=WIDTH)


def norm(s: Sheet, kind: str, x: ir.Value, beta: bool = True) -> ir.Value:
    affine = [weights(1), weights(2)] if kind == LAYER and beta else [weights(1)]
    y = s(kind, x, *affine, axis=-1, epsilon=1e-5, stash_type=1)
    y.shape, y.type = x.shape, ir.TensorType(s.dtype)
    return y


def model_of(kind: str, dtype: ir.DataType, rank: int, add: str, opset: int, beta: bool = True) -> ir.Model:
    """Build a norm and what stands around it, as `add` says."""
    s, shape = Sheet(dtype), named(rank)
    skips = {"broadcast": [1, *shape[1:]], "vector": [WIDTH], "scalar batch": [*shape[1:]]}
    x, skip = given("x", shape, dtype), given("skip", ir.Shape(skips.get(add, shape)), dtype)

    def op(name: str, *inputs: object) -> ir.Value:
        y = s(name, *inputs)
        y.shape, y.type = shape, ir.TensorType(dtype)
        return y

    branch = norm(s, kind, skip, beta) if add == "norm before" else skip
    branch = op("Add", branch, weights(3)) if add == "bias" else branch
    total = op("Add", x, weights(4) if add == "constant" else x if add == "same" else branch)
    total = op("Add", total, x) if add == "twice" else total
    read = total
    if add.startswith("reshaped"):
        read = s("Reshape", total, np.array([-1, WIDTH]))
        read.shape, read.type = ir.Shape(["all", WIDTH]), ir.TensorType(dtype)
    outputs = [norm(s, kind, read, beta)]
    if add == "norm behind":
        outputs = [op("Add", outputs[0], x)]
    if add == "two norms":
        outputs.append(norm(s, kind, total, beta))
    if add in {"shared", "two norms"}:
        outputs.append(op("Relu", total))
    if add == "output":
        outputs.append(total)
    if add == "reshaped, shared":
        outputs.append(s("Relu", read))
        outputs[-1].shape, outputs[-1].type = read.shape, read.type
    return finished(s, [x, skip] if add not in {"constant", "same"} else [x], outputs, opset)


def lowered(model: ir.Model, target: str, ort: str = ORT) -> tuple[ir.Model, Counter[str], list[str]]:
    made = model.clone()
    rows = lower(made, TARGETS[target], ort)
    return made, Counter(n.op_type for n in made.graph), [row.form for row in rows]


@pytest.mark.parametrize("opset", rows([11, 17, 18, 23], sample=[11, 23]))
@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=["fp32", "fp16"])
@pytest.mark.parametrize("kind", [LAYER, RMS])
@pytest.mark.parametrize("add", ADDS)
def test_every_form_gives_the_same_numbers(add: str, kind: str, dtype: ir.DataType, opset: int) -> None:
    bound = 2e-6 if dtype is SINGLE else 2e-3
    for rank in (2, 3, 4):
        if add in {"broadcast", "scalar batch"} and rank == 2:
            continue
        model = model_of(kind, dtype, rank, add, opset)
        for scale in (1.0, 100.0):
            wanted = run(model, scale, optimised=False)
            for target in TARGETS:
                made, _, _ = lowered(model, target)
                for optimised in (False, True):
                    for a, b in zip(wanted, run(made, scale, optimised), strict=True):
                        assert np.abs(a - b).max() <= bound * np.abs(a).max(), (target, rank, scale, optimised)


@pytest.mark.parametrize("kind", [LAYER, RMS])
@pytest.mark.parametrize("add", ADDS)
def test_on_cuda_every_residual_add_that_can_ride_in_a_norm_does(add: str, kind: str) -> None:
    made, counts, forms = lowered(model_of(kind, SINGLE, 3, add, 18), "cuda")
    rides = {"constant": 0, "vector": 0}.get(add, 1)
    assert counts[SKIP[kind]] == rides == forms.count(SKIP[kind])
    assert counts["Add"] == {"constant": 1, "vector": 1, "twice": 1, "norm behind": 1}.get(add, 0)
    for node in made.graph:
        if node.op_type == SKIP[kind]:
            read = add in {"shared", "output", "two norms", "reshaped, shared"}
            assert (len(node.outputs) == 4) == read
            assert (len(node.inputs) == (5 if kind == LAYER else 4)) == (add == "bias")


@pytest.mark.parametrize("table", [[1, 7], [7]])
@pytest.mark.parametrize("kind", [LAYER, RMS])
def test_a_table_of_positions_rides_too(kind: str, table: list[int]) -> None:
    """What is added to the tokens of every row alike is an operand as good as a residual; a vector is none."""
    s, shape = Sheet(SINGLE), ir.Shape(["batch", 7, WIDTH])
    x = given("x", shape, SINGLE)
    total = s("Add", x, np.random.default_rng(5).normal(size=[*table, WIDTH]))
    total.shape, total.type = shape, ir.TensorType(SINGLE)
    model = finished(s, [x], [norm(s, kind, total), s("Relu", total)], 20)
    model.graph.outputs[1].shape, model.graph.outputs[1].type = shape, ir.TensorType(SINGLE)
    lowered = model.clone()
    assert [row.form for row in lower(lowered, TARGETS["cuda"], ORT)] == [SKIP[kind]]
    assert "Add" not in {node.op_type for node in lowered.graph}
    for a, b in zip(run(model, 1.0), run(lowered, 1.0), strict=True):
        assert np.abs(a - b).max() <= 2e-6 * np.abs(a).max()


@pytest.mark.parametrize("rank", [2, 4])
def test_skip_operators_are_for_ranks_2_and_3(rank: int) -> None:
    _, counts, _ = lowered(model_of(LAYER, SINGLE, rank, "shared", 18), "cuda")
    assert counts[SKIP[LAYER]] == (rank == 2)


def test_half_precision_rides_from_ort_1_27_on() -> None:
    model = model_of(RMS, HALF, 3, "shared", 18)
    assert lowered(model, "cuda", "1.26.0")[1][SKIP[RMS]] == 0
    assert lowered(model, "cuda", "1.27.0")[1][SKIP[RMS]] == 1


@pytest.mark.parametrize(("kind", "ort", "fused"), [(LAYER, "1.28.1", 1), (LAYER, "1.30.0", 0), (RMS, "1.30.0", 1)])
def test_on_the_cpu_the_version_and_the_norm_decide(kind: str, ort: str, fused: int) -> None:
    _, counts, _ = lowered(model_of(kind, SINGLE, 3, "alone", 18), "cpu", ort)
    assert (counts[SKIP[kind]], counts["Sum"]) == (fused, 1 - fused)


def test_ort_leaves_a_sum_apart_and_fuses_an_add() -> None:
    """The reason for Sum: were ORT to fuse it too, or to stop fusing Add, the table would have to change."""
    for add, kept in (("Add", False), ("Sum", True)):
        model = model_of(LAYER, SINGLE, 3, "alone", 18)
        for node in model.graph:
            node.op_type = add if node.op_type == "Add" else node.op_type
        assert (SKIP[LAYER] not in running(model)) == kept


def running(model: ir.Model) -> set[str]:
    """Return the operators of the graph that ONNX Runtime runs."""
    import tempfile

    with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath, options.log_severity_level = file.name, 4
        onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
        return {node.op_type for node in onnx.load(file.name).graph.node}


@pytest.mark.parametrize("target", ["generic", "tensorrt"])
@pytest.mark.parametrize("opset", [11, 17, 18, 23])
@pytest.mark.parametrize("kind", [LAYER, RMS])
@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=["fp32", "fp16"])
def test_standard_targets_hold_standard_operators(kind: str, opset: int, target: str, dtype: ir.DataType) -> None:
    made, counts, forms = lowered(model_of(kind, dtype, 3, "shared", opset), target)
    onnx.checker.check_model(ir.to_proto(made), full_check=True)
    assert {n.domain for n in made.graph} == {""} and RMS not in counts
    known = opset >= (17 if kind == LAYER else 23)
    assert forms == [({LAYER: LAYER, RMS: "RMSNormalization"}[kind] if known else "decomposed")]


@pytest.mark.parametrize("add", ADDS)
@pytest.mark.parametrize("kind", [LAYER, RMS])
@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=["fp32", "fp16"])
def test_split_undoes_the_skip_form(add: str, kind: str, dtype: ir.DataType) -> None:
    model = model_of(kind, dtype, 3, add, 18)
    fused, _, _ = lowered(model, "cuda")
    apart = fused.clone()
    split(apart)
    assert not [n for n in apart.graph if n.domain]
    assert [v.name for v in apart.graph.outputs] == [v.name for v in model.graph.outputs]
    for a, b in zip(run(model, 1.0, False), run(apart, 1.0, False), strict=True):
        assert np.abs(a - b).max() <= (2e-6 if dtype is SINGLE else 2e-3) * np.abs(a).max()
    again, _, _ = lowered(apart, "cuda")
    assert Counter(n.op_type for n in again.graph) == Counter(n.op_type for n in fused.graph)


def test_a_norm_that_gives_no_epsilon_has_its_schemas() -> None:
    """SkipSimplifiedLayerNormalization was read with another one, 1e-6."""
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

    found: dict[str, set[float]] = {}
    for schema in get_all_operator_schema():
        if schema.name in EPSILON and schema.domain in ("", CONTRIB):
            default = onnx.AttributeProto.FromString(schema.attributes["epsilon"]._default_value)
            found.setdefault(schema.name, set()).add(default.f)
    assert found == {name: {float(np.float32(value))} for name, value in EPSILON.items()}


@pytest.mark.parametrize("kind", [LAYER, RMS])
def test_split_keeps_the_epsilon_that_is_not_written(kind: str) -> None:
    model, _, _ = lowered(model_of(kind, SINGLE, 3, "alone", 18), "cuda")
    for node in model.graph:
        node.attributes.pop("epsilon", None)
    apart = model.clone()
    assert split(apart) == 1
    small = np.random.default_rng(0).normal(size=(3, 5, WIDTH)).astype("float32") * 1e-4
    sessions = [onnxruntime.InferenceSession(ir.to_proto(m).SerializeToString()) for m in (model, apart)]
    a, b = (session.run(None, {"x": small, "skip": small})[0] for session in sessions)
    assert np.abs(a - b).max() <= 2e-6 * np.abs(a).max()


def test_every_row_says_why() -> None:
    for target in TARGETS:
        made = model_of(LAYER, SINGLE, 3, "two norms", 18)
        rows = lower(made, TARGETS[target], ORT)
        assert len(rows) == 2 and all(row.site and row.why for row in rows)
