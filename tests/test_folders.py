"""A transformers folder in, a transformers folder out: it loads without lnrewrite and computes what was planned."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import lnrewrite as lnr
import zoo
from lnrewrite.checkpoints import shards
from lnrewrite.recipe.modeling import FILE
from tiers import rows

IDS = torch.arange(16).reshape(2, 8) + 1

LOAD = """
import sys
sys.modules["lnrewrite"] = None  # as if it were not installed
import torch, transformers
torch.set_num_threads(1)
ids = torch.arange(16).reshape(2, 8) + 1
for folder in sys.argv[2:]:
    kind = "AutoModelForSeq2SeqLM" if "t5" in folder else "AutoModelForCausalLM"
    model, info = getattr(transformers, kind).from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True, local_files_only=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if "t5" in folder else {})
    with torch.no_grad():
        torch.save(model(**inputs).logits, sys.argv[1] + "/" + folder.rpartition("/")[2] + ".pt")
    if "t5" not in folder:
        a = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None, use_cache=True)
        b = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None, use_cache=False)
        assert torch.equal(a, b)
    model.save_pretrained(sys.argv[1] + "/again-" + folder.rpartition("/")[2])
"""


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Hold small checkpoints: a Llama in shards with tokenizer files, a GPT-2 with a tied head, a T5."""
    folder = tmp_path_factory.mktemp("folders")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_MODULES_CACHE", str(folder / "modules"))
        for name in ("llama", "gpt2", "t5"):
            model, _ = zoo.build(name, head=True)
            model.config.use_cache = True
            model.save_pretrained(folder / name, max_shard_size="20KB" if name == "llama" else "1GB")
        (folder / "llama" / "tokenizer_config.json").write_text("{}")
        (folder / "llama" / "sub").mkdir()
        (folder / "llama" / "sub" / "notes.txt").write_text("carried along")
        (folder / "llama" / "pytorch_model.bin").write_bytes(b"old weights, left out")
        yield folder


def logits(model: Any) -> Tensor:
    inputs = {"input_ids": IDS} | ({"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {})
    with torch.no_grad():
        return model(**inputs).logits


def opened(folder: Path) -> Any:
    kind = transformers.T5ForConditionalGeneration if "t5" in folder.name else transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder).eval()


def weights(folder: Path) -> dict[str, Tensor]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def rewritten(room: Path, name: str, text: str, **how: Any) -> Path:
    target = room / f"{name}-{text.partition('{')[0]}-{text.partition('to=')[2].rstrip('}')}"
    lnr.rewrite_file(str(room / name), text, target, **how)
    return target


RMS = "fold-affine,layernorm-to-rmsnorm"
CASES = (("llama", "place{to=peri}"), ("gpt2", RMS), ("gpt2", "place{to=post}"), ("t5", "place{to=peri}"))


@pytest.mark.parametrize(("name", "text"), rows(CASES, sample=[]))
def test_round_trips_without_lnrewrite(name: str, text: str, room: Path, tmp_path: Path) -> None:
    """Peri and post of three families, and a LayerNorm model turned RMSNorm on disk: same logits in a fresh process."""
    living = opened(room / name)
    batch = {"input_ids": IDS} | ({"decoder_input_ids": IDS} if name == "t5" else {})
    calibrate = [batch] if "place" in text else None
    lnr.rewrite(living, text, kwargs=batch, calibrate=calibrate)
    folder, want = rewritten(room, name, text, calibrate=calibrate), logits(living)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", LOAD, tmp_path, folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    got = torch.load(tmp_path / f"{folder.name}.pt")
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    again = tmp_path / f"again-{folder.name}"
    assert (again / FILE).is_file() and weights(again).keys() == weights(folder).keys()


def test_a_converted_folder_holds_what_the_old_one_held(room: Path) -> None:
    peri = room / "llama-place-peri"
    if not peri.exists():
        rewritten(room, *CASES[0], calibrate=[{"input_ids": IDS}])
    assert lnr.load(str(peri)).inspect()["placement"] == "peri"  # our own code, unchanged, needs no trust
    before, after = weights(room / "llama"), weights(peri)
    assert before.keys() < after.keys() and all("norm_out" in key for key in after.keys() - before.keys())
    same = [key for key in before if torch.equal(before[key], after[key])]
    assert {k for k in before if "layers" not in k} <= set(same)  # what was fitted lies in the branches
    assert (peri / "sub" / "notes.txt").read_text() == "carried along"
    assert (peri / "tokenizer_config.json").is_file() and not (peri / "pytorch_model.bin").exists()
    shapes = {p.name: set(load_file(p)) for p in (room / "llama").glob("*.safetensors")}
    assert {p.name for p in peri.glob("*.safetensors")} == set(shapes)  # the shards stay what they were

    twice = room / "llama-output"  # a second rewrite, of the rewritten folder
    plan = lnr.Pipeline.parse("place{to=output}")
    lnr.rewrite_file(str(peri), plan, twice, calibrate=[{"input_ids": IDS}])
    assert lnr.load(str(twice)).inspect()["placement"] == "output"
    (peri / FILE).write_text((peri / FILE).read_text() + "\n# edited\n")
    with pytest.raises(lnr.LnrewriteError, match="LN017"):
        lnr.load(str(peri))


def test_what_only_changes_weights_stays_an_architecture_of_transformers(room: Path) -> None:
    want = logits(opened(room / "llama"))
    for text in ("fold-affine", "untie,fold-affine{final=true},rotate-stream"):
        target = rewritten(room, "llama", text, force=True)
        assert not (target / FILE).exists()
        assert json.loads((target / "config.json").read_text())["model_type"] == "llama"
        got = logits(opened(target))
        assert (got - want).abs().max() <= 2e-5 * want.abs().max()
        assert weights(target).keys() == weights(room / "llama").keys()
        up = "model.layers.0.mlp.up_proj.weight"
        assert not torch.equal(weights(target)[up], weights(room / "llama")[up])


LESS_ONE = [(name, text) for name in ("gemma", "gemma2", "gemma3_text") for text in ("exact", "inference", "quantize")]


@pytest.mark.parametrize(("name", "preset"), rows(LESS_ONE, sample=[("gemma2", "inference")]))
def test_gains_stored_less_one(name: str, preset: str, tmp_path: Path) -> None:
    """Norms that add one to their weights keep their class: what is written is what they compute with."""
    model, inputs = zoo.build(name, head=True)
    model.save_pretrained(tmp_path / "m")
    want = model.double()(**inputs, use_cache=False).logits
    report = lnr.rewrite_file(tmp_path / "m", lnr.Pipeline.preset(preset), tmp_path / "out", partial=True)
    made = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True).double().eval()
    got = made(**inputs, use_cache=False).logits
    assert report.edits and (got - want).abs().max() < 3e-6 * want.abs().max()


@pytest.mark.exhaustive
def test_untying_a_head_is_written_and_what_a_class_ties_again_is_refused(room: Path) -> None:
    want = logits(opened(room / "gpt2"))
    target = rewritten(room, "gpt2", "untie,fold-affine")
    assert not json.loads((target / "config.json").read_text())["tie_word_embeddings"]
    assert "lm_head.weight" in weights(target) and "lm_head.weight" not in weights(room / "gpt2")
    assert (logits(opened(target)) - want).abs().max() <= 2e-5 * want.abs().max()
    with pytest.raises(lnr.LnrewriteError, match="LN313.* ties lm_head.weight to shared.weight whatever"):
        rewritten(room, "t5", "untie")
    assert not [p for p in room.iterdir() if p.name.startswith((".lnrewrite", "t5-untie"))]


def test_half_precision_and_prefixes(room: Path, tmp_path: Path) -> None:
    """Keys of a bare network in a file, loaded into one with a head; bfloat16 stays bfloat16."""
    source = tmp_path / "bare"
    shutil.copytree(room / "llama", source)
    state = {k.removeprefix("model."): v.bfloat16() for k, v in weights(source).items()}
    for file in [*source.glob("*.safetensors*"), source / "pytorch_model.bin"]:
        file.unlink()
    save_file(state, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    lnr.rewrite_file(str(source), "fold-affine", tmp_path / "out")
    after = weights(tmp_path / "out")
    assert after.keys() == state.keys() and {t.dtype for t in after.values()} == {torch.bfloat16}
    assert bool((after["layers.0.input_layernorm.weight"] == 1).all())
    want = state["layers.0.mlp.up_proj.weight"].double() * state["layers.0.post_attention_layernorm.weight"].double()
    assert torch.equal(after["layers.0.mlp.up_proj.weight"], want.bfloat16())


def test_whole_or_not_at_all(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {p: p.read_bytes() for p in (room / "llama").rglob("*") if p.is_file()}
    target = room / "stopped"

    def stopping(error: BaseException) -> Any:
        def write(self: Any, key: str, pieces: Any) -> None:
            if "layers.1" in key:
                raise error

        return write

    for error, seen in ((KeyboardInterrupt(), KeyboardInterrupt), (OSError(28, "no space left"), lnr.LnrewriteError)):
        with monkeypatch.context() as patch:
            patch.setattr(shards.Writer, "write", stopping(error))
            with pytest.raises(seen):
                lnr.rewrite_file(str(room / "llama"), "fold-affine", target)
        assert not target.exists() and not [p for p in room.iterdir() if p.name.startswith(".lnrewrite")]
    assert {p: p.read_bytes() for p in (room / "llama").rglob("*") if p.is_file()} == before


def test_where_a_folder_cannot_be_written(room: Path, tmp_path: Path) -> None:
    plan = lnr.Pipeline.parse("fold-affine")
    (tmp_path / "file").write_text("")
    (tmp_path / "there").mkdir()
    for target, why in (
        (room / "llama", "it holds the source"),
        (room, "it holds the source"),
        (room / "llama" / "inside", "it would lie in the source"),
        (tmp_path / "file", "it is a file"),
        (tmp_path / "there", "it exists"),
        (tmp_path / "no" / "such", "its folder does not exist"),
    ):
        with pytest.raises(lnr.LnrewriteError, match=f"LN025.*{why}"):
            lnr.rewrite_file(str(room / "llama"), plan, target)
    lnr.rewrite_file(str(room / "llama"), plan, tmp_path / "there", force=True)
    assert (tmp_path / "there" / "config.json").is_file()


def test_damaged_shards(room: Path, tmp_path: Path) -> None:
    """A shard that is cut off, and one that is noise: told by file, before anything is written."""
    for content in (lambda whole: whole[:3000], lambda whole: os.urandom(100)):
        source = tmp_path / "damaged"
        shutil.copytree(room / "llama", source, dirs_exist_ok=True)
        shard = sorted(source.glob("*.safetensors"))[1]
        shard.write_bytes(content(shard.read_bytes()))
        with pytest.raises(lnr.LnrewriteError, match=rf"LN015.*{shard.name}.*safetensors header"):
            lnr.rewrite_file(str(source), "fold-affine", tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_a_recipe_that_does_not_fit_is_refused_when_it_is_loaded(room: Path) -> None:
    """Another version of the library: the forward that was edited is another one."""
    folder = rewritten(room, "gpt2", "place{to=post}", force=True)
    config = json.loads((folder / "config.json").read_text())
    for change in config["lnrewrite"]["changes"]:
        if "digest" in change:
            change["digest"] = "0" * 16
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(lnr.LnrewriteError, match="forward is not the one that this model was rewritten from"):
        lnr.load(str(folder))


OTHER = """
from transformers import LlamaConfig, LlamaForCausalLM


class OtherConfig(LlamaConfig):
    model_type = "other"


class OtherForCausalLM(LlamaForCausalLM):
    config_class = OtherConfig
"""


def test_folders_with_code_of_their_own(room: Path, tmp_path: Path) -> None:
    """Trusted, their weights are rewritten and their code is carried along; ours is not put on top of it."""
    source = tmp_path / "other"
    shutil.copytree(room / "llama", source)
    (source / "modeling_other.py").write_text(OTHER)
    config = json.loads((source / "config.json").read_text())
    code = {"AutoConfig": "modeling_other.OtherConfig", "AutoModelForCausalLM": "modeling_other.OtherForCausalLM"}
    config |= {"model_type": "other", "architectures": ["OtherForCausalLM"], "auto_map": code}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(lnr.LnrewriteError, match="LN017"):
        lnr.rewrite_file(str(source), "fold-affine", tmp_path / "out")
    lnr.rewrite_file(str(source), "fold-affine", tmp_path / "out", trust_remote_code=True)
    assert (tmp_path / "out" / "modeling_other.py").read_text() == OTHER
    assert bool((weights(tmp_path / "out")["model.layers.0.input_layernorm.weight"] == 1).all())
    with pytest.raises(lnr.LnrewriteError, match="LN310 OtherForCausalLM: model is not a class of transformers"):
        lnr.rewrite_file(str(source), "place{to=peri}", tmp_path / "peri", trust_remote_code=True)
    assert not (tmp_path / "peri").exists()


SIZE = 10_000_000_000


@pytest.mark.slow
@pytest.mark.skipif("LNREWRITE_SLOW" not in os.environ, reason="writes 30 GB; set LNREWRITE_SLOW to run it")
def test_ten_gigabytes(tmp_path: Path) -> None:
    """Peak memory under 3 GB; prints how long it takes beside copying the folder, in turns."""
    source, times = tmp_path / "source", {"copy": [], "lnrewrite": []}
    sizes = {"hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 18, "num_attention_heads": 32}
    config = transformers.LlamaConfig(**sizes, vocab_size=32000, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(source)
    with torch.device("meta"):
        names = {n: p.shape for n, p in transformers.LlamaForCausalLM(config).named_parameters()}
    where: dict[str, str] = {}
    held: dict[str, Tensor] = {}
    for name, shape in names.items():
        held[name] = torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02) + ("norm" in name)
        if sum(t.nbytes for t in held.values()) > 1e9 or name == list(names)[-1]:
            file = f"model-{len(set(where.values())):05}.safetensors"
            save_file(held, source / file, {"format": "pt"})
            where |= dict.fromkeys(held, file)
            held = {}
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    assert sum(p.stat().st_size for p in source.iterdir()) >= SIZE
    command = Path(sys.executable).with_name("lnrewrite")
    for _ in range(3):
        for kind in times:
            target = tmp_path / kind
            shutil.rmtree(target, ignore_errors=True)
            os.sync()
            fold = [command, "opt", source, "--passes", "fold-affine", "-o", target, "-q"]
            work = ["cp", "-r", source, target] if kind == "copy" else fold
            started = time.perf_counter()
            subprocess.run(work, check=True)
            times[kind].append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(f"\ncopy {times['copy']} s, lnrewrite {times['lnrewrite']} s, peak {peak / 1e9:.2f} GB")
    assert peak < 3e9
