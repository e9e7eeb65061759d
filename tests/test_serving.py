"""A decoder's folder: what servers of ONNX models need lies in it, and it generates what the model generates."""

from __future__ import annotations

import importlib.util
import json
import shutil
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import lnrewrite as lnr
import zoo
from commands import fails, ok, run
from lnrewrite.checkpoints.graphs import tell_genai
from lnrewrite.runtime.generating import _by_genai, _check, generate
from tiers import rows

PROMPT = "the quick brown fox"


def tokenizer() -> Any:
    """Return a tokenizer of 128 tokens, bytes and some pairs."""
    made: Any = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    trainer: Any = trainers.BpeTrainer
    trained = trainer(vocab_size=128, special_tokens=[*special.values()], show_progress=False)
    made.train_from_iterator([PROMPT + string.printable] * 3, trained)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hold a checkpoint folder of a small Qwen3 with a tokenizer."""
    folder = tmp_path_factory.mktemp("serving") / "qwen3"
    model = zoo.build("qwen3", head=True)[0]
    model.generation_config.update(eos_token_id=[2, 3], repetition_penalty=1.5)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def served(checkpoint: Path) -> Path:
    """Hold what the command makes of it."""
    ok("export", checkpoint, "-o", folder := checkpoint.with_name("served"), "--target", "cpu")
    return folder


def wanted(model: Any, count: int) -> list[int]:
    """Return what the model itself generates."""
    ids = tokenizer()(PROMPT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, repetition_penalty=1.0
        )
    return found[0, ids.shape[1] :].tolist()


def test_folder(checkpoint: Path, served: Path) -> None:
    """Configs and tokenizer are carried along, and genai's config speaks of the inputs that the model has."""
    names = {path.name for path in served.iterdir()}
    assert names >= {"model.onnx", "config.json", "generation_config.json", "genai_config.json", "tokenizer.json"}
    assert not {path.name for path in served.iterdir() if path.suffix == ".safetensors"}
    held = json.loads((served / "genai_config.json").read_text())
    inputs, outputs = (held["model"]["decoder"][side] for side in ("inputs", "outputs"))
    graph = onnx.load(served / "model.onnx").graph
    layers = range(held["model"]["decoder"]["num_hidden_layers"])
    for told, values in ((inputs, graph.input), (outputs, graph.output)):
        assert {n % i if "%d" in n else n for n in told.values() for i in layers} == {v.name for v in values}
    assert held["model"]["eos_token_id"] == [2, 3] and held["search"]["repetition_penalty"] == 1.5
    assert held["search"]["past_present_share_buffer"]


def test_generate(checkpoint: Path, served: Path) -> None:
    """A plain session gives the tokens of the model, streams their text, and stops where the model does."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    told = list[str]()
    found = generate(served, PROMPT, most=48, engine="session", told=told.append)
    assert list(found.tokens) == wanted(model, 48)
    assert "".join(told) == found.text == tokenizer().decode(found.tokens, skip_special_tokens=True)
    (served / "generation_config.json").write_text(json.dumps({"eos_token_id": [found.tokens[5]]}))
    short = generate(served, PROMPT, most=48, engine="session")
    assert short.tokens == found.tokens[: found.tokens.index(found.tokens[5]) + 1]
    row = json.loads(ok("generate", served, PROMPT, "--max-new-tokens", 4, "--engine", "session", "--json").stdout)
    assert row["tokens"] == list(found.tokens[:4]) and row["engine"] == "session" and row["tokens_per_second"] > 0
    said = ok("generate", served, PROMPT, "--max-new-tokens", 4, "--engine", "session")
    assert "4 tokens, " in said.stderr and said.stdout.strip() == row["text"].strip()


@pytest.mark.parametrize("plan", ["", "place{to=peri}"])
def test_genai(checkpoint: Path, tmp_path: Path, plan: str) -> None:
    """onnxruntime-genai runs the folder as written, of a converted checkpoint too, and chooses the same tokens."""
    pytest.importorskip("onnxruntime_genai")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
        source = checkpoint
        if plan:
            lnr.rewrite_file(checkpoint, plan, source := tmp_path / "converted")
        lnr.export_model(source, tmp_path / "served", target="cpu")
        load = transformers.AutoModelForCausalLM.from_pretrained
        model = load(source, trust_remote_code=True).eval()
    assert "auto_map" not in json.loads((tmp_path / "served" / "config.json").read_text())
    found = generate(tmp_path / "served", PROMPT, most=48)
    assert found.engine == "genai"
    assert list(found.tokens) == wanted(model, 48)


def test_for_cuda(checkpoint: Path, tmp_path: Path) -> None:
    """The config names the provider; without CUDA a session runs the folder, and genai does or says why not."""
    lnr.export_model(checkpoint, served := tmp_path / "served", target="cuda", dtype="fp16")
    options = json.loads((served / "genai_config.json").read_text())["model"]["decoder"]["session_options"]
    assert [*options["provider_options"][0]] == ["cuda"]
    plain = generate(served, PROMPT, most=8, engine="session").tokens
    if importlib.util.find_spec("onnxruntime_genai"):
        said = ok("generate", served, PROMPT, "--max-new-tokens", 8, "--json")
        assert tuple(json.loads(said.stdout)["tokens"]) == plain
        said = run("generate", served, PROMPT, "--max-new-tokens", 8, "--engine", "genai", "--json")
        error = json.loads(said.stdout).get("error")
        assert said.exit_code == 0 or (error["code"] == "LN520" and "q_norm" in error["why"])  # norms of a head

    lnr.export_model(served, again := tmp_path / "again", target="cpu")
    options = json.loads((again / "genai_config.json").read_text())["model"]["decoder"]["session_options"]
    assert not options["provider_options"]


ODD = ["model", "model.decoder", "model.decoder.session_options", "model.decoder.session_options.provider_options"]


@pytest.mark.parametrize("value", [None, 3, "cuda", ["cuda"], [[]], {"cuda": 1}])
@pytest.mark.parametrize("where", ODD)
def test_configs_of_genai_that_make_no_sense(served: Path, tmp_path: Path, where: str, value: object) -> None:
    """They are genai's to refuse, which is told in one line; writing a folder anew leaves them as they are."""
    held = json.loads((served / "genai_config.json").read_text())
    folder = tmp_path / "served"
    folder.mkdir()
    _set(held, where, value)
    (folder / "genai_config.json").write_text(json.dumps(held))
    tell_genai(folder, "cuda")
    tell_genai(folder, "cpu")
    if importlib.util.find_spec("onnxruntime_genai"):
        with pytest.raises(lnr.LnrewriteError) as caught:
            list(_by_genai(folder, [1], 1, None))
        assert caught.value.code in ("LN520", "LN015")


BOUNDARIES = {"peri": 4, "output": 4, "post": 0}
"""How many operators of ours two layers have; in Post-LN nothing stands between a branch and its sum."""


@pytest.mark.parametrize("placement", rows(BOUNDARIES, sample=["peri"]))
def test_operators_of_ours(
    checkpoint: Path, tmp_path: Path, built: Callable[[], Path], monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    """A folder with operators of lnrewrite brings their kernels along and names them; both engines run them."""
    monkeypatch.setenv("LNREWRITE_KERNELS", str(library := built()))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    plan = f"place{{to={placement} fit=constants}}"
    lnr.rewrite_file(checkpoint, plan, source := tmp_path / placement)
    lnr.export_model(source, served := tmp_path / "served", target="cpu", fuse="custom")
    made = [node.op_type for node in onnx.load(served / "model.onnx").graph.node]
    assert made.count("NormAddNorm") + made.count("NormAdd") == BOUNDARIES[placement]
    if BOUNDARIES[placement]:
        held = json.loads((served / "genai_config.json").read_text())
        assert held["model"]["decoder"]["session_options"]["custom_ops_library"] == library.name
        assert (served / library.name).read_bytes() == library.read_bytes()
    model = transformers.AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True).eval()
    here = importlib.util.find_spec("onnxruntime_genai") is not None
    for engine in ("session", "genai") if here else ("session",):
        assert list(generate(served, PROMPT, most=24, engine=engine).tokens) == wanted(model, 24)


def _set(held: Any, where: str, value: object) -> None:
    *way, last = where.split(".")
    for key in way:
        held = held.setdefault(key, {})
    held[last] = value


OPTIONS = "model.decoder.session_options"
BAD = [
    (f"{OPTIONS}.custom_ops_library", "evil.so", "LN017"),
    (f"{OPTIONS}.custom_ops_library", "../evil.so", "LN017"),
    (f"{OPTIONS}.provider_options", [{"qnn": {"backend_path": "evil"}}], "LN017"),
    (f"{OPTIONS}.provider_options", [{"new": {"anything": "libevil.so.1"}}], "LN017"),
    ("model.vision.session_options.custom_ops_library", "evil.so", "LN017"),
    ("model.decoder.filename", "../model.onnx", "LN015"),
    ("model.decoder.filename", "none.onnx", "LN015"),
]


@pytest.mark.parametrize(("where", "value", "code"), BAD)
def test_genai_loads_no_code_that_a_folder_names(
    served: Path, tmp_path: Path, where: str, value: Any, code: str
) -> None:
    """Its config may name libraries to load; only lnrewrite's own are, and nothing outside of the folder is read."""
    held = json.loads((served / "genai_config.json").read_text())
    folder = shutil.copytree(served, tmp_path / "served")
    for library in (folder / "evil.so", tmp_path / "evil.so"):
        library.write_bytes(b"code")
    _check(folder)
    _set(held, where, value)
    (folder / "genai_config.json").write_text(json.dumps(held))
    with pytest.raises(lnr.LnrewriteError) as caught:
        _check(folder)
    assert caught.value.code == code


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": "x", "eos_token_id": 1}', "[" * 99 + "]" * 99])
def test_configs_that_cannot_be_read(served: Path, tmp_path: Path, text: str) -> None:
    folder = shutil.copytree(served, tmp_path / "served")
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(lnr.LnrewriteError) as caught:
        generate(folder, PROMPT, most=2, engine="session")
    assert caught.value.code == "LN015"


def test_living_module(tmp_path: Path) -> None:
    """A module that was never a folder is written with its own configs; of a tokenizer it has none."""
    lnr.export_model(zoo.build("gpt2", head=True)[0], tmp_path / "gpt2", target="cpu")
    held = json.loads((tmp_path / "gpt2" / "genai_config.json").read_text())
    assert held["model"]["decoder"]["inputs"]["position_ids"] == "position_ids"
    assert fails("LN013", 1, "generate", tmp_path / "gpt2", PROMPT)["why"] == "it holds no tokenizer"


def test_folders_that_are_not_written(checkpoint: Path, served: Path, tmp_path: Path) -> None:
    """What stands there is kept unless it is such a folder and --force is given; without a cache there is none."""
    export = ("export", checkpoint, "--target", "cpu", "-o")
    assert "exists" in fails("LN025", 1, *export, served)["why"]
    (other := tmp_path / "other").mkdir()
    (other / "thesis.txt").write_text("mine")
    assert "thesis.txt" in fails("LN025", 1, *export, other, "--force")["why"]
    before = (served / "model.onnx").stat().st_ino
    ok(*export, served, "--force")
    assert (served / "model.onnx").stat().st_ino != before
    zoo.build("lfm2", 2, head=True)[0].save_pretrained(tmp_path / "lfm2")
    refused = fails("LN504", 1, "export", tmp_path / "lfm2", "--target", "cpu", "-o", tmp_path / "out")
    assert "more than keys" in refused["why"] and not (tmp_path / "out").exists()
    assert "model.onnx" in fails("LN013", 1, "generate", tmp_path / "lfm2", PROMPT)["why"]
    fails("LN003", 2, "generate", served, PROMPT, "--engine", "steam")
