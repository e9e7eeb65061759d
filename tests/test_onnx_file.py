"""ONNX files as they come: hostile ones end in one line and a code, good ones come back as they were."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import lnrewrite as lnr
from lnrewrite.backends.onnx import file as onnx_file
from lnrewrite.backends.onnx import session
from lnrewrite.export import writer
from mutants import protobuf_mutant
from tiers import rows

WIDTH = 8


def model_of(opset: int = 18, **external: str) -> onnx.ModelProto:
    """Build x + relu(norm(x) @ a) @ b; `external` moves the weight `a` into a file."""
    text = f"""<ir_version: 8, opset_import: ["" : {opset}]>
    g (float[n,t,{WIDTH}] x) => (float[n,t,{WIDTH}] y) {{
        u = LayerNormalization <axis = -1> (x, g1, b1) h = MatMul (u, a) r = Relu (h) f = MatMul (r, b)
        y = Add (x, f) }}"""
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    for name, shape in (("g1", (WIDTH,)), ("b1", (WIDTH,)), ("a", (WIDTH, 16)), ("b", (16, WIDTH))):
        model.graph.initializer.append(numpy_helper.from_array(rng.normal(size=shape).astype("float32"), name))
    if external:
        tensor = model.graph.initializer[2]
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in external.items():
            tensor.external_data.add(key=key, value=value)
    return model


Spoil = Callable[[onnx.ModelProto, Path], None]
SPOILS: dict[str, tuple[str, Spoil]] = {}


def spoils(code: str) -> Callable[[Spoil], Spoil]:
    def enter(spoil: Spoil) -> Spoil:
        SPOILS[spoil.__name__] = (code, spoil)
        return spoil

    return enter


@spoils("LN030")
def attribute_of_no_function(model: onnx.ModelProto, folder: Path) -> None:
    model.graph.node[0].attribute[0].ref_attr_name = "axis"


@spoils("LN030")
def attribute_that_its_function_lacks(model: onnx.ModelProto, folder: Path) -> None:
    called(1, 1)(model, folder)
    node = helper.make_node("LeakyRelu", ["x"], ["leaky"])
    node.attribute.add(name="alpha", type=onnx.AttributeProto.FLOAT, ref_attr_name="slope")
    model.functions[0].node.append(node)


@spoils("LN027")
def opset_of_the_future(model: onnx.ModelProto, folder: Path) -> None:
    model.opset_import[0].version = 999


@spoils("LN027")
def opset_of_the_past(model: onnx.ModelProto, folder: Path) -> None:
    model.opset_import[0].version = 7


@spoils("LN027")
def ir_version_of_the_future(model: onnx.ModelProto, folder: Path) -> None:
    model.ir_version = 999


@spoils("LN030")
def no_opset(model: onnx.ModelProto, folder: Path) -> None:
    del model.opset_import[:]


@spoils("LN030")
def cycle(model: onnx.ModelProto, folder: Path) -> None:
    model.graph.node[0].input[0] = "f"


@spoils("LN030")
def value_made_twice(model: onnx.ModelProto, folder: Path) -> None:
    model.graph.node[2].output[0] = "h"


@spoils("LN030")
def input_that_nothing_makes(model: onnx.ModelProto, folder: Path) -> None:
    model.graph.node[1].input[0] = "nowhere"


@spoils("LN030")
def output_that_nothing_makes(model: onnx.ModelProto, folder: Path) -> None:
    model.graph.output[0].name = "nowhere"


@spoils("LN030")
def too_few_bytes(model: onnx.ModelProto, folder: Path) -> None:
    model.graph.initializer[2].raw_data = b"1234"


@spoils("LN030")
def two_to_the_31(model: onnx.ModelProto, folder: Path) -> None:
    model.graph.initializer[2].dims[:] = [1 << 31, 1 << 31]


@spoils("LN030")
def negative_size(model: onnx.ModelProto, folder: Path) -> None:
    model.graph.initializer[2].dims[:] = [-1, 16]


@spoils("LN030")
def unknown_type(model: onnx.ModelProto, folder: Path) -> None:
    model.graph.initializer[2].data_type = 4321


@spoils("LN030")
def shape_against_its_declaration(model: onnx.ModelProto, folder: Path) -> None:
    model.graph.value_info.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, [3, 3]))


@spoils("LN030")
def recursive_function(model: onnx.ModelProto, folder: Path) -> None:
    node = helper.make_node("F", ["p"], ["q"], domain="own")
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    model.functions.append(helper.make_function("own", "F", ["p"], ["q"], [node], imports))
    model.opset_import.append(helper.make_opsetid("own", 1))
    model.graph.node[2].domain, model.graph.node[2].op_type = "own", "F"


@spoils("LN030")
def attribute_of_another_type(model: onnx.ModelProto, folder: Path) -> None:
    model.graph.node[0].attribute[0].CopyFrom(helper.make_attribute("axis", "last"))


@spoils("LN030")
def attribute_of_no_type(model: onnx.ModelProto, folder: Path) -> None:
    model.graph.node[0].attribute[0].type = onnx.AttributeProto.UNDEFINED


@spoils("LN030")
def attribute_that_is_missing(model: onnx.ModelProto, folder: Path) -> None:
    model.graph.node.append(helper.make_node("Cast", ["y"], ["z"]))


@spoils("LN030")
def too_few_inputs(model: onnx.ModelProto, folder: Path) -> None:
    del model.graph.node[0].input[1:]


@spoils("LN030")
def name_that_is_no_text(model: onnx.ModelProto, folder: Path) -> None:
    content = model.SerializeToString().replace(b"MatMul", b"MatM\xff\xfe")
    model.ParseFromString(content)


@spoils("LN024")
def weights_with_nan(model: onnx.ModelProto, folder: Path) -> None:
    model.graph.initializer[2].raw_data = np.full((WIDTH, 16), np.nan, "float32").tobytes()


@spoils("LN024")
def infinite_weights(model: onnx.ModelProto, folder: Path) -> None:
    model.graph.initializer[2].raw_data = np.full((WIDTH, 16), np.inf, "float32").tobytes()


def epsilon(value: float) -> Spoil:
    def put(model: onnx.ModelProto, folder: Path) -> None:
        model.graph.node[0].attribute.append(helper.make_attribute("epsilon", value))

    return put


def called(functions: int, times: int) -> Spoil:
    """Make functions of which each calls the one before it so many times."""

    def put(model: onnx.ModelProto, folder: Path) -> None:
        imports = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
        for i in range(functions):
            names = ["x", *(f"v{j}" for j in range(times - 1)), "y"]
            op, domain = (f"F{i - 1}", "own") if i else ("Neg", "")
            nodes = [helper.make_node(op, [a], [b], domain=domain) for a, b in pairwise(names)]
            model.functions.append(helper.make_function("own", f"F{i}", ["x"], ["y"], nodes, imports))
        model.opset_import.append(helper.make_opsetid("own", 1))
        model.graph.node.append(helper.make_node(f"F{functions - 1}", ["y"], ["z"], domain="own"))

    return put


def hard_linked(model: onnx.ModelProto, folder: Path) -> None:
    os.link(folder.parent / "secret", folder / "hard")
    model.CopyFrom(model_of(location="hard"))


def at(**external: str) -> Spoil:
    def move(model: onnx.ModelProto, folder: Path) -> None:
        model.CopyFrom(model_of(**external))

    return move


def linked(model: onnx.ModelProto, folder: Path) -> None:
    (folder / "link").symlink_to(folder.parent / "secret")
    model.CopyFrom(model_of(location="link"))


def linked_folder(model: onnx.ModelProto, folder: Path) -> None:
    (folder / "sub").symlink_to(folder.parent, target_is_directory=True)
    model.CopyFrom(model_of(location="sub/secret"))


def pipe(model: onnx.ModelProto, folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    model.CopyFrom(model_of(location="pipe"))


def short(model: onnx.ModelProto, folder: Path) -> None:
    (folder / "w").write_bytes(bytes(100))
    model.CopyFrom(model_of(location="w"))


def in_a_subgraph(model: onnx.ModelProto, folder: Path) -> None:
    tensor = model_of(location="../secret").graph.initializer[2]
    body = helper.make_graph([helper.make_node("Identity", ["a2"], ["o"])], "b", [], [], [tensor])
    body.initializer[0].name = "a2"
    body.output.append(helper.make_tensor_value_info("o", TensorProto.FLOAT, None))
    condition = numpy_helper.from_array(np.array(True), "yes")
    model.graph.initializer.append(condition)
    model.graph.node.append(helper.make_node("If", ["yes"], ["z"], then_branch=body, else_branch=body))


SPOILS |= {
    "missing": ("LN031", at(location="nothing")), "upwards": ("LN031", at(location="../secret")),
    "absolute": ("LN031", at(location="/etc/passwd")), "nameless": ("LN031", at(location="")),
    "negative offset": ("LN031", at(location="w", offset="-4")), "no number": ("LN031", at(location="w", offset="x")),
    "lying length": ("LN031", at(location="w", length="99999999999")), "folder": ("LN031", at(location=".")),
    "linked": ("LN031", linked), "linked folder": ("LN031", linked_folder), "pipe": ("LN031", pipe),
    "hard link": ("LN031", hard_linked), "zero byte": ("LN031", at(location="w\0x")),
    "long name": ("LN031", at(location="x" * 5000)), "epsilon nan": ("LN030", epsilon(np.nan)),
    "epsilon negative": ("LN030", epsilon(-1.0)), "epsilon infinite": ("LN030", epsilon(np.inf)),
    "exponential functions": ("LN039", called(26, 2)), "cubed": ("LN039", called(3, 100)),
    "short": ("LN031", short), "subgraph": ("LN031", in_a_subgraph),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILS)
def test_hostile_files_end_in_one_line_with_a_code(name: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(4 * WIDTH * 16))
    folder = tmp_path / "model"
    folder.mkdir()
    code, spoil = SPOILS[name]
    if name not in {"short"}:
        (folder / "w").write_bytes(bytes(4 * WIDTH * 16))
    model = model_of()
    spoil(model, folder)
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(lnr.LnrewriteError) as error:
        lnr.load(str(folder / "m.onnx"))
    assert error.value.code == code and "\n" not in str(error.value)


def test_a_cut_or_flipped_file_never_ends_in_another_exception(tmp_path: Path) -> None:
    content = model_of().SerializeToString()
    rng = np.random.default_rng(0)
    spoiled = [content[: int(n)] for n in rng.integers(1, len(content), 20)]
    for _ in range(60):
        flipped = bytearray(content)
        for place in rng.integers(0, len(content), 2):
            flipped[place] ^= int(rng.integers(1, 256))
        spoiled.append(bytes(flipped))
    loaded = 0
    for each in spoiled:
        (tmp_path / "m.onnx").write_bytes(each)
        try:
            lnr.load(str(tmp_path / "m.onnx")).inspect()
            loaded += 1
        except lnr.LnrewriteError as error:
            assert "\n" not in str(error)
    assert 0 < loaded < len(spoiled)


def test_nothing_outside_the_folder_is_opened(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(4 * WIDTH * 16))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "model" / "m.onnx").write_bytes(model_of(location="link").SerializeToString())
    code = """
import sys, lnrewrite as lnr, lnrewrite.models.onnx_program
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event in ("open", "mmap.__new__") else None)
try: lnr.load(sys.argv[1])
except lnr.LnrewriteError as error: print(error.code, [o for o in opened if "secret" in o or "link" in o])
"""
    command = [sys.executable, "-c", code, str(tmp_path / "model" / "m.onnx")]
    assert subprocess.run(command, capture_output=True, text=True).stdout.strip() == "LN031 []"


@pytest.mark.parametrize("limit", [1 << 30, 100])
def test_what_is_written_comes_back(limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.onnx").write_bytes(model_of(location="w").SerializeToString())
    weights = np.random.default_rng(0).normal(size=(WIDTH, 16)).astype("float32")
    (tmp_path / "w").write_bytes(weights.tobytes())
    monkeypatch.setattr(onnx_file, "ONE_FILE", limit)
    monkeypatch.setattr(session, "SENT", limit)
    program = lnr.load(str(tmp_path / "m.onnx"))
    result = lnr.Pipeline.parse("fold-affine").run(program)
    result.program.save(tmp_path / "m.onnx", force=True)  # over the file that it is read from
    again = lnr.load(str(tmp_path / "m.onnx"))
    assert lnr.verify(result.program, again)["verdict"] == "equal"
    assert lnr.verify(program, again)["verdict"] == "within"
    assert (tmp_path / "m.onnx.data").exists() == (limit == 100)
    assert [v.name for v in again.model.graph.inputs] == ["x"]


def test_weights_beside_a_model_are_never_another_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old or new, whole: also where a run ends between the two files."""
    monkeypatch.setattr(onnx_file, "ONE_FILE", 100)
    programs = []
    for seed in (0, 1):
        weights = np.random.default_rng(seed).normal(size=(WIDTH, 64)).astype("float32")
        nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
        x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", d]) for n, d in (("x", WIDTH), ("y", 64)))
        graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(weights, "w")])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
        onnx.save(model, tmp_path / f"source{seed}.onnx")
        programs.append(lnr.load(str(tmp_path / f"source{seed}.onnx")))
    real, ends = writer.land, list[bool]()

    def land(made: Path, target: Path, *, force: bool) -> None:
        if ends and target.suffix == ".onnx":
            raise OSError("the power fails")
        real(made, target, force=force)

    monkeypatch.setattr(writer, "land", land)
    out = tmp_path / "m.onnx"
    names = {"m.onnx", "m.onnx.data"}, {"m.onnx", "m.onnx.1.data"}
    monkeypatch.setattr(onnx_file, "ONE_FILE", 1 << 20)
    (tmp_path / "other.onnx.data").write_bytes(b"mine")
    programs[0].save(tmp_path / "other.onnx", force=True)  # in one file: what lies there is not its own
    assert (tmp_path / "other.onnx.data").read_bytes() == b"mine"
    monkeypatch.setattr(onnx_file, "ONE_FILE", 100)
    for times, (saved, other) in enumerate((programs, programs[::-1]) * 2):
        saved.save(out)
        assert {p.name for p in tmp_path.glob("m.*")} == names[times % 2]
        assert lnr.verify(saved, lnr.load(str(out)))["verdict"] == "equal"
        ends.append(True)
        with pytest.raises(lnr.LnrewriteError, match="LN025"):
            other.save(out)
        ends.clear()
        assert lnr.verify(saved, lnr.load(str(out)))["verdict"] == "equal"


def test_weights_that_another_model_keeps_stay(tmp_path: Path) -> None:
    onnx.save(model_of(), tmp_path / "m.onnx", save_as_external_data=True, location="m.onnx.data", size_threshold=0)
    (tmp_path / "other.onnx").write_bytes((tmp_path / "m.onnx").read_bytes())
    program = lnr.load(str(tmp_path / "m.onnx"))
    program.save(tmp_path / "m.onnx", force=True)
    assert lnr.verify(program, lnr.load(str(tmp_path / "other.onnx")))["verdict"] == "equal"
    (tmp_path / "other.onnx").unlink()
    onnx.save(model_of(), tmp_path / "m.onnx", save_as_external_data=True, location="m.onnx.data", size_threshold=0)
    program.save(tmp_path / "m.onnx", force=True)
    assert not (tmp_path / "m.onnx.data").exists()


def test_old_and_unordered_models_are_read(tmp_path: Path) -> None:
    model = model_of(11)
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    assert lnr.load(str(tmp_path / "m.onnx")).inspect()["placement"] == "pre"


@pytest.mark.parametrize("version, told", [(3, False), (8, True)])
def test_weights_that_a_caller_may_give_are_told(version: int, told: bool, tmp_path: Path) -> None:
    model = model_of(17)
    model.ir_version = version
    model.graph.input.append(helper.make_tensor_value_info("g1", TensorProto.FLOAT, [WIDTH]))
    onnx.save(model, str(tmp_path / "m.onnx"))
    report = lnr.Pipeline.parse("fold-affine").run(lnr.load(str(tmp_path / "m.onnx"))).report
    assert report.edits == 1
    assert any("inputs too, 'g1'" in note for note in report.notes) is told


@pytest.mark.parametrize("square", ["Pow (x, two)", "Mul (x, x)"])
@pytest.mark.parametrize("eps", [1e-3, 1e-6])
def test_an_eps_is_seen_whatever_onnx_runtime_makes_of_it(eps: float, square: str, tmp_path: Path) -> None:
    """ONNX Runtime 1.31 fuses such a norm in float64 with an eps of 1e-5, whatever the file says."""
    models = []
    for stored in (eps, 1e-5):
        text = f"""<ir_version: 8, opset_import: ["" : 18]>
        g (float[n,t,{WIDTH}] x) => (float[n,t,{WIDTH}] y) <float two = {{2.0}}, float eps = {{{stored}}}> {{
            axes = Constant <value_ints = [-1]> () s = {square} m = ReduceMean <keepdims = 1> (s, axes) v = Add (m, eps)
            d = Sqrt (v) u = Div (x, d) n = Mul (u, g1) h = MatMul (n, a) r = Relu (h) f = MatMul (r, b)
            y = Add (x, f) }}"""
        model = onnx.parser.parse_model(text)
        model.graph.initializer.extend(t for t in model_of().graph.initializer if t.name != "b1")
        onnx.save(model, str(tmp_path / f"{stored}.onnx"))
        models.append(lnr.load(str(tmp_path / f"{stored}.onnx")))
    assert lnr.verify(*models)["verdict"] == "different"
    assert not [r for r in models[0].network.refusals if r.code == "LN208"]
    assert lnr.Pipeline.parse("fold-affine").run(models[0]).report.edits == 1


def test_sizes_of_outputs_keep_their_names(tmp_path: Path) -> None:
    """The head's norm is made anew: rms norms of another eps behind a Reshape, whose sizes nothing infers."""
    text = f"""<ir_version: 8, opset_import: ["" : 23]>
    g (float[n,t,{WIDTH}] x, int64[3] sizes) => (float[n,t,k] y) {{
        w = Reshape (x, sizes) u = LayerNormalization <axis = -1> (w, g1, b1) h = MatMul (u, a) r = Relu (h)
        f = MatMul (r, b) s = Add (w, f) y = RMSNormalization <axis = -1> (s, g1) }}"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(model_of().graph.initializer)
    onnx.save(model, str(tmp_path / "m.onnx"))
    inputs = [np.ones((2, 3, WIDTH), np.float32), np.array([2, 3, WIDTH])]
    program = lnr.load(str(tmp_path / "m.onnx"), inputs=inputs)
    result = lnr.Pipeline.parse("rescale-stream{by=0.25}").run(program, partial=True)
    (out,) = result.program.model.graph.outputs
    assert result.report.edits and out.name == "y" and [str(d) for d in out.shape[:2]] == ["n", "t"]


CACHED = """<ir_version: 8, opset_import: ["" : 18]>
g (int64[batch,sequence] ids, float[batch,past,8] past, float[batch,{total}] mask)
  => (float[batch,sequence,8] y, float[batch,all,8] present) {
    x = Gather (table, ids) u = LayerNormalization <axis = -1> (x, g1) q = MatMul (u, a)
    present = Concat <axis = 1> (past, q) k = Transpose <perm = [0, 2, 1]> (present) s = MatMul (q, k)
    axes = Constant <value_ints = [1]> () m = Unsqueeze (mask, axes) t = Add (s, m) p = Softmax (t)
    f = MatMul (p, present) o = MatMul (f, b) y = Add (x, o) }"""


@pytest.mark.parametrize("total", ["total", '"past + sequence"'])
def test_inputs_of_a_decoder_with_a_cache_are_made_up(total: str, tmp_path: Path) -> None:
    """That the mask is as long as past and new tokens together is found by trying."""
    model, rng = onnx.parser.parse_model(CACHED.replace("{total}", total)), np.random.default_rng(0)
    for name, shape in (("table", (11, 8)), ("g1", (8,)), ("a", (8, 8)), ("b", (8, 8))):
        model.graph.initializer.append(numpy_helper.from_array(rng.normal(size=shape).astype("float32"), name))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    program = lnr.load(str(tmp_path / "m.onnx"))
    inputs = program.example_inputs()
    assert inputs["mask"].shape[1] == inputs["ids"].shape[1] + inputs["past"].shape[1]
    assert int(inputs["ids"].max()) < 11
    result = lnr.Pipeline.parse("fold-affine").run(program)
    result.program.save(tmp_path / "o.onnx")
    after = lnr.load(str(tmp_path / "o.onnx"))
    assert [v.name for v in after.model.graph.inputs] == ["ids", "past", "mask"]
    assert [v.name for v in after.model.graph.outputs] == ["y", "present"]
    found = lnr.verify(program, after)
    assert found["verdict"] == "within" and len({tuple(s) for s in found["shapes_tried"]}) > 2


def test_a_dimension_named_by_a_number_has_that_size(tmp_path: Path) -> None:
    """What transformers' own exporter writes: the name "8" is no free size."""
    model = model_of()
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[2].dim_param = "8"
    onnx.save(model, tmp_path / "m.onnx")
    program = lnr.load(str(tmp_path / "m.onnx"))
    assert program.example_inputs()["x"].shape[2] == 8 and program.dynamic_axes() == {"x": {0: "n", 1: "t"}}
    assert program.inspect()["streams"][0]["width"] == 8


def test_inputs_too_large_to_make_up_are_told(tmp_path: Path) -> None:
    model = model_of()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1 << 40
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(lnr.LnrewriteError, match="LN039"):
        lnr.load(str(tmp_path / "m.onnx")).example_inputs()


def test_functions_that_are_called_a_few_times_are_inlined(tmp_path: Path) -> None:
    model = model_of()
    called(5, 4)(model, tmp_path)
    model.graph.output[0].name = "z"
    onnx.save(model, tmp_path / "m.onnx")
    assert lnr.load(str(tmp_path / "m.onnx")).model.graph.num_nodes() == 5 + 4**5


@pytest.mark.parametrize("seed", rows(range(1500), sample=range(0, 400, 20)))
def test_a_mutant_is_a_model_or_told_as_none(seed: int, tmp_path: Path) -> None:
    mutant = protobuf_mutant(model_of(), random.Random(seed))
    try:
        content = mutant.SerializeToString()
    except ValueError:  # text that is no UTF-8 is not written
        return
    (tmp_path / "m.onnx").write_bytes(content)
    try:
        lnr.load(str(tmp_path / "m.onnx")).inspect()
    except lnr.LnrewriteError as error:
        assert error.code != "LN301" and "\n" not in str(error)
