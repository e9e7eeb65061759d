"""A folder of ONNX files in, such a folder out: graphs are rewritten, all else is carried along, tokens stay."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import transformers
from onnx import helper

import lnrewrite as lnr
import zoo
from commands import fails, ok
from lnrewrite.backends.onnx.file import read
from lnrewrite.backends.onnx.session import runnable
from lnrewrite.comparison.generating import generated
from lnrewrite.models.decoder import encoder_decoder
from lnrewrite.runtime.generating import generate
from test_serving import PROMPT, tokenizer
from tiers import rows
from zoo.norms import randomise

FOLD = "fold-affine"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hold a checkpoint folder of a small Llama with a tokenizer."""
    folder = tmp_path_factory.mktemp("folders") / "llama"
    zoo.build("llama", head=True)[0].save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def served(checkpoint: Path) -> Path:
    """Hold a decoder's folder as genai has it: without a config.json, its weights beside the graph."""
    folder = checkpoint.with_name("served")
    lnr.export_model(checkpoint, folder, target="cpu")
    (folder / "config.json").unlink()
    model = onnx.load(folder / "model.onnx")
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="weights.data")
    (folder / "adapters").mkdir()
    (folder / "adapters" / "notes.txt").write_text("kept")
    return folder


def tokens(folder: Path, count: int = 40) -> tuple[int, ...]:
    return generate(folder, PROMPT, most=count, engine="session").tokens


def test_exact(served: Path, tmp_path: Path) -> None:
    """Gains are folded, the tokens stay; configs and folders are carried along, old weights are not."""
    ok("opt", served, "--passes", FOLD, "-o", folder := tmp_path / "folded")
    assert tokens(folder) == tokens(served)
    held = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert held == {str(p.relative_to(served)) for p in served.rglob("*") if p.is_file()} - {"weights.data"}
    assert (folder / "genai_config.json").read_bytes() == (served / "genai_config.json").read_bytes()
    norms = [n for n in onnx.load(folder / "model.onnx").graph.node if "LayerNorm" in n.op_type]
    gains = [n.input[2 if n.op_type.startswith("Skip") else 1] for n in norms]
    assert len(set(gains)) < len(gains)  # the folded norms share a gain of ones
    assert "exists" in fails("LN025", 1, "opt", served, "--passes", FOLD, "-o", folder)["why"]
    ok("opt", served, "--passes", FOLD, "-o", folder, "--force")


def test_what_reads_one_model(served: Path, tmp_path: Path) -> None:
    """`inspect`, `verify` and `lnr.load` take the graph of a folder; OUT may be a file."""
    told = [json.loads(ok("inspect", path, "--json").stdout) for path in (served, served / "model.onnx")]
    assert told[0] == told[1] and told[0]["placement"] == "pre"
    ok("opt", served, "--passes", FOLD, "-o", path := tmp_path / "one.onnx")
    assert json.loads(ok("verify", served, path, "--json").stdout)["verdict"] == "within"


def test_calibrated(served: Path, tmp_path: Path) -> None:
    """A conversion with data, through the cache, gives a folder that runs and says how far it is."""
    told = json.loads(ok("convert", served, "--to", "peri", "-o", tmp_path / "peri", "--json").stdout)
    assert told["placement_after"] == "peri" and told["drift"]["samples"]
    assert len(tokens(tmp_path / "peri", 8)) == 8


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_exported(
    served: Path, tmp_path: Path, built: Callable[[], Path], monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """An export keeps the folder; where operators of lnrewrite come in, its config names their kernels."""
    monkeypatch.setenv("LNREWRITE_KERNELS", str(library := built()))
    ok("export", served, "--target", "cpu", "--dtype", dtype, "-o", folder := tmp_path / dtype)
    assert tokens(folder, 12) == tokens(served, 12) and not (folder / library.name).exists()
    ok("convert", served, "--to", "peri", "-o", peri := tmp_path / "peri")
    ok("export", peri, "--target", "cpu", "--dtype", dtype, "--fuse", "custom", "-o", folder := tmp_path / "custom")
    held = json.loads((folder / "genai_config.json").read_text())
    assert held["model"]["decoder"]["session_options"]["custom_ops_library"] == library.name
    assert (folder / library.name).read_bytes() == library.read_bytes()
    assert tokens(folder, 8) == tokens(peri, 8)


def test_half(checkpoint: Path, tmp_path: Path) -> None:
    """An exact fold into half precision is one: what rounding the weights does explains the difference."""
    lnr.export_model(checkpoint, tmp_path / "half", target="cuda", dtype="fp16")
    told = json.loads(ok("opt", tmp_path / "half", "--passes", FOLD, "-o", tmp_path / "out", "--json").stdout)
    assert told["steps"][0]["edits"] == 4


@pytest.mark.exhaustive
def test_parts(tmp_path: Path) -> None:
    """Three graphs are rewritten as one model; what looks at data, or at one model, is refused in words."""
    lnr.export_model(model := zoo.build("t5", head=True)[0], folder := tmp_path / "t5", target="cpu")
    told = json.loads(ok("opt", folder, "--passes", FOLD, "-o", out := tmp_path / "out", "--json").stdout)
    assert {step["pass"].partition(":")[0] for step in told["steps"]} == {path.name for path in folder.glob("*.onnx")}
    assert all(step["edits"] for step in told["steps"])
    files = {path.stem: runnable(read(path, path.name)) for path in out.glob("*.onnx")}
    assert not generated(encoder_decoder(model).beside(files), 2e-5, 16).divergences
    assert "several graphs" in fails("LN034", 1, "inspect", folder)["why"]
    assert "different networks" in fails("LN034", 1, "convert", folder, "--to", "peri", "-o", tmp_path / "peri")["why"]
    assert not (tmp_path / "peri").exists()
    told = json.loads(
        ok("export", folder, "--target", "cuda", "--dtype", "fp16", "-o", out, "--force", "--json").stdout
    )
    assert sum("Skip" in row["form"] for row in told["norms"]) == len(told["norms"]) - 3  # each part's first has no add


def test_text(served: Path, tmp_path: Path) -> None:
    """Data may be a text: the folder's tokenizer cuts it, and the cache is empty."""
    (data := tmp_path / "text.txt").write_text(" ".join(f"w{i * i % 97}" for i in range(1200)))
    how = ("--to", "peri", "--fit", "constants", "--calibrate", data, "--json")
    told = json.loads(ok("convert", served, *how, "-o", tmp_path / "peri").stdout)
    assert told["drift"]["data"] == str(data) and told["drift"]["held_out"]


def in_two(served: Path, folder: Path) -> Path:
    """Write a decoder in two files, as older versions of optimum do: for the first call, and for those with a cache."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(served / name, folder / name)
    model = ir.external_data.load_to_model(read(served / "model.onnx", "model"))
    ir.save(model, folder / "decoder_with_past_model.onnx")
    ids, empty = model.graph.inputs[0], np.array([0], np.int64)
    batch = ir.node("Shape", [ids], {"start": 0, "end": 1})
    made = [batch]
    for value in [v for v in model.graph.inputs if (v.name or "").startswith("past_key_values.")]:
        heads, size = (np.array([value.shape[axis]], np.int64) for axis in (1, 3))  # type: ignore[index]
        pieces = [ir.node("Constant", [], {"value": ir.tensor(piece)}) for piece in (heads, empty, size)]
        shape = ir.node("Concat", [batch.outputs[0], *(piece.outputs[0] for piece in pieces)], {"axis": 0})
        zeros = ir.node("ConstantOfShape", [shape.outputs[0]])
        value.replace_all_uses_with(zeros.outputs[0])
        model.graph.inputs.remove(value)
        made += [*pieces, shape, zeros]
    model.graph.insert_before(model.graph[0], made)
    ir.save(model, folder / "decoder_model.onnx")
    return folder


def test_optimum(checkpoint: Path, served: Path, tmp_path: Path) -> None:
    """A decoder in two files generates as that in one; both are folded and exported; a config.json is carried along."""
    both = in_two(served, tmp_path / "two")
    shutil.copyfile(checkpoint / "config.json", both / "config.json")
    wanted = tokens(served)
    assert tokens(both) == wanted
    ok("opt", both, "--passes", FOLD, "-o", folded := tmp_path / "folded")
    ok("export", folded, "--target", "cpu", "-o", folder := tmp_path / "exported")
    assert tokens(folded) == tokens(folder) == wanted
    assert (folder / "config.json").read_bytes() == (checkpoint / "config.json").read_bytes()
    (both / "decoder_with_past_model.onnx").unlink()
    assert "no decoder_with_past_model" in fails("LN013", 1, "generate", both, PROMPT)["why"]


def merged(both: Path, folder: Path) -> Path:
    """Write a decoder in one file with an If, as optimum merges those two; without the shapes of what is inside."""
    files = [onnx.load(both / name) for name in ("decoder_with_past_model.onnx", "decoder_model.onnx")]
    branches, held = [], {i.name: i for file in files for i in file.graph.initializer}
    outputs = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in files[0].graph.output]
    for prefix, file in zip("lf", files, strict=True):
        made = {name for node in file.graph.node for name in node.output if name}
        for value in (*file.graph.node, *file.graph.output):
            value.name = f"{prefix}.{value.name}"
        for names in (names for node in file.graph.node for names in (node.input, node.output)):
            names[:] = [f"{prefix}.{name}" if name in made else name for name in names]
        branches.append(helper.make_graph(file.graph.node, prefix, [], file.graph.output))
    inputs = [*files[0].graph.input, helper.make_tensor_value_info("use_cache_branch", onnx.TensorProto.BOOL, [1])]
    names = [value.name for value in outputs]
    node = helper.make_node("If", ["use_cache_branch"], names, then_branch=branches[0], else_branch=branches[1])
    graph = helper.make_graph([node], "merged", inputs, outputs, list(held.values()))
    shutil.copytree(both, folder, ignore=shutil.ignore_patterns("*.onnx"))
    onnx.save(helper.make_model(graph, opset_imports=files[0].opset_import, ir_version=10), folder / "merged.onnx")
    return folder


def test_merged(served: Path, tmp_path: Path) -> None:
    """A decoder that was merged becomes the two files that it was made of, which generate as it does."""
    one = merged(in_two(served, tmp_path / "two"), tmp_path / "merged")
    assert "two files" in fails("LN034", 1, "inspect", one)["remedy"]
    told = json.loads(ok("opt", one, "--passes", FOLD, "-o", out := tmp_path / "out", "--json").stdout)
    assert [step["edits"] for step in told["steps"]] == [4, 4]
    assert {path.stem for path in out.glob("*.onnx")} == {"decoder_model", "decoder_with_past_model"}
    assert tokens(out) == tokens(served)


def test_shapes_are_worked_out(served: Path, tmp_path: Path) -> None:
    """A file that tells the shape of nothing inside is seen as one that does."""
    model = onnx.load(served / "model.onnx")
    del model.graph.value_info[:]
    onnx.save(model, tmp_path / "bare.onnx")
    found = [json.loads(ok("inspect", path, "--json").stdout) for path in (served, tmp_path / "bare.onnx")]
    assert found[0] == found[1]


FITS = [(to, fit) for to in ("peri", "post", "none") for fit in ("auto", "constants")]


@pytest.mark.parametrize(("to", "fit"), rows(FITS, sample=[("post", "constants")]))
def test_two_files_are_fitted_once(checkpoint: Path, served: Path, tmp_path: Path, to: str, fit: str) -> None:
    """A decoder in two files changes as that in one: both hold the same numbers, and what they generate is the same."""
    both = in_two(served, tmp_path / "two")
    (data := tmp_path / "text.txt").write_text(" ".join(f"w{i * i % 97}" for i in range(2000)))
    how = ("--to", to, "--fit", fit, "--calibrate", data, "--json")
    told = json.loads(ok("convert", both, *how, "-o", out := tmp_path / "out").stdout)
    assert told["placement_after"] == to and told["drift"]["samples"]
    assert not any("no gradients" in note for note in told["notes"])  # attention with a cache has some
    assert bool(told["fitted"]) == (fit == "auto") or any("no better" in note for note in told["notes"])
    files = [onnx.load(out / name) for name in ("decoder_model.onnx", "decoder_with_past_model.onnx")]
    held = [sorted(i.raw_data for i in file.graph.initializer if i.data_type == 1 and len(i.dims)) for file in files]
    assert held[0] == held[1]
    first = out / "decoder_with_past_model.onnx"  # which takes an empty cache as well
    shutil.copytree(out, one := tmp_path / "one")
    shutil.copyfile(first, one / "model.onnx")
    for name in ("decoder_model.onnx", "decoder_with_past_model.onnx"):
        (one / name).unlink()
    assert tokens(out) == tokens(one) != ()


def test_folders_that_are_not_read(served: Path, tmp_path: Path) -> None:
    """Files that lead out of the folder, or are no ONNX, are refused before anything is opened."""
    folder = shutil.copytree(served, tmp_path / "served")
    (folder / "other.onnx").symlink_to(served / "model.onnx")
    fails("LN028", 1, "inspect", folder)
    (folder / "other.onnx").unlink()
    (folder / "other.onnx").write_bytes(b"\x00" * 99)
    assert fails("LN011", 1, "inspect", folder)["what"]


@pytest.mark.parametrize("precision", ["fp32:cpu", "int4:cpu", "fp16:cuda", "bf16:cuda"])
def test_genai_builder(checkpoint: Path, tmp_path: Path, precision: str) -> None:
    """Folders of onnxruntime-genai's own builder: exported as they are or folded, they choose the same tokens."""
    pytest.importorskip("onnxruntime_genai.models.builder")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}  # 96 is not
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=128, tie_word_embeddings=False)
    torch.manual_seed(0)  # of embeddings and weights, which otherwise are others at each run
    randomise(model := transformers.LlamaForCausalLM(config), 0)  # the vocabulary, which the builder mistakes it for
    shutil.copytree(checkpoint, original := tmp_path / "llama")
    model.save_pretrained(original)
    kind, _, provider = precision.partition(":")
    asked = ["-m", original, "-o", source := tmp_path / kind, "-p", kind, "-e", provider, "-c", tmp_path / "cache"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", *map(str, asked)]
    subprocess.run(builder, check=True, capture_output=True, env=environment)
    command = ("export", source, "--target", "cpu") if kind == "int4" else ("opt", source, "--passes", FOLD)
    told = json.loads(ok(*command, "-o", folder := tmp_path / "out", "--json").stdout)
    assert kind == "int4" or told["steps"][0]["edits"] == 4
    if provider == "cpu":
        more = ("--to", "peri", "--fit", "constants", "--json", "-o", peri := tmp_path / "peri")
        assert json.loads(ok("convert", source, *more).stdout)["placement_after"] == "peri"
        assert generate(peri, PROMPT, most=4, engine="genai").tokens
        for engine in ("genai", "session"):
            found = [generate(path, PROMPT, most=40, engine=engine).tokens for path in (source, folder)]
            assert found[0] == found[1]
    assert (folder / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
