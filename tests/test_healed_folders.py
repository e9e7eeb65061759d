"""Healing of checkpoint folders: folders in, a folder out that opens as what it is and computes what was healed."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import lnrewrite as lnr
import zoo
from commands import fails, ok
from lnrewrite.checkpoints import healing as folders
from lnrewrite.checkpoints import outputs
from lnrewrite.healing.snapshots import Snapshots
from tiers import rows

WORDS = [f"w{i}" for i in range(60)]
HOW = ("--steps", 3, "--batch-size", 4, "--length", 16, "--lr", 1e-3, "--no-control")


CONVERTED = ("llama", "gpt2")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two checkpoints with tokenizers, and documents."""
    root = tmp_path_factory.mktemp("made")
    for name in CONVERTED:
        module, _ = zoo.build(name, depth=1, head=True)
        module.save_pretrained(root / name, max_shard_size="60KB" if name == "llama" else "1GB")
        ids = {word: i for i, word in enumerate(["<s>", "</s>", "[UNK]", *WORDS])}
        words = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="[UNK]")
        fast.save_pretrained(root / name)
        (root / name / "LICENSE").write_text("free")
    draw = random.Random(0)
    texts = (" ".join(draw.choices(WORDS, k=draw.randint(3, 30))) for _ in range(400))
    (root / "d.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return root


def converted(made: Path, name: str, to: str) -> Path:
    """Return the folder that a conversion made, of several tests once."""
    out = made / f"{name}-{to}"
    if not out.exists():
        ok("convert", made / name, "--to", to, "-o", out, "-q")
    return out


OPTIONS = {
    "plain": (),
    "local": ("--local-steps", 2),
    "progressive": ("--progressive",),
    "drop_final": ("--drop-final",),
    "all gone": ("--progressive", "--drop-final"),
}
PAIRS = (("llama", "peri"), ("llama", "none"), ("llama", "post"), ("gpt2", "peri"), ("gpt2", "none"))
CASES = [(name, to, option) for name, to in PAIRS for option in OPTIONS]
SAMPLE = [("llama", "none", "all gone")]

READ = """
import sys, torch, transformers
found = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
assert "lnrewrite" not in sys.modules, "the folder needs lnrewrite"
ids = torch.load(sys.argv[2])
with torch.no_grad():
    torch.save(found.eval()(ids).logits, sys.argv[3])
transformers.AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
"""


@pytest.mark.parametrize(("name", "to", "option"), rows(CASES, sample=SAMPLE))
def test_a_folder_comes_out_that_computes_what_was_healed(
    name: str, to: str, option: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[lnr.Program] = []
    for written in (folders.FolderOutput, outputs.KeptOutput):

        def write(self: Any, healed: Any, program: lnr.Program, *more: Any, real: Any = written.write) -> None:
            held.append(program)
            real(self, healed, program, *more)

        monkeypatch.setattr(written, "write", write)
    student, out = converted(made, name, to), tmp_path / "healed"
    how = ("--data", made / "d.jsonl", *HOW, *OPTIONS[option])
    told = json.loads(ok("heal", made / name, student, *how, "-o", f"{out}/", "--json").stdout)
    assert any("do not see each other" in note for note in told["notes"])
    assert told["output"] == str(out) and told["run"] == f"{out}.run"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["healed", "healed.run"]
    ids = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(1))
    torch.save(ids, tmp_path / "ids.pt")
    command = [sys.executable, "-c", READ, str(out), str(tmp_path / "ids.pt"), str(tmp_path / "logits.pt")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "logits.pt")
    given: dict[str, Any] = {"input_ids": ids}
    if "position_ids" in held[0].spec.names:
        given["position_ids"] = torch.arange(12).expand_as(ids)
    with torch.no_grad():
        wanted = held[0].module()(**given).logits
        before = lnr.load(student).module()(input_ids=ids).logits
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max() < (found - before).abs().max()
    assert {"LICENSE", "tokenizer.json", "config.json"} <= {p.name for p in out.iterdir()}
    assert json.loads(ok("inspect", out, "--json").stdout)["placement"] == told["placement_after"]
    if option in ("plain", "local"):
        assert (out / "config.json").read_text() == (student / "config.json").read_text()
        names = [{p.name for p in folder.iterdir()} for folder in (out, student)]
        assert names[0] == names[1]


FORMS = ("tokens.npy", "rows.npy", "tokens.bin", "ids.npz")


@pytest.mark.parametrize(("name", "form"), rows([(n, f) for n in CONVERTED for f in FORMS], sample=[]))
def test_tokens_are_read_whatever_they_lie_in(name: str, form: str, made: Path, tmp_path: Path) -> None:
    """Positions are looked up in a table as tokens are: they are none, take no random ids, and follow from tokens."""
    tokens = np.random.default_rng(0).integers(3, 60, 16 * 400).astype(np.uint16)
    path, cut = tmp_path / form, tokens.reshape(400, 16)
    if form == "tokens.bin":
        tokens.tofile(path)
    elif form == "ids.npz":
        np.savez(path, input_ids=cut)
    else:
        np.save(path, tokens if form == "tokens.npy" else cut)
    how = ("--data", path, "--held-out", path, *HOW[:-1], "--rehearse", 0.5, "-o", tmp_path / "healed", "--json")
    told = json.loads(ok("heal", made / name, converted(made, name, "peri"), *how).stdout)
    assert told["unit"] == "nats" and told["losses"]["control"]["mean"] > 1


def test_nothing_is_written_where_the_folder_would_not_open_as_healed(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = outputs.empty_model

    def spoiled(source: Any, dtype: torch.dtype) -> Any:
        if source.name.startswith(str(tmp_path)):
            with next(source.file.glob("*.safetensors")).open("r+b") as file:
                file.seek(-3, os.SEEK_END)
                file.write(b"!")
        return real(source, dtype)

    monkeypatch.setattr(outputs, "empty_model", spoiled)
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "healed"
    how = ("--data", made / "d.jsonl", *HOW, "-o", out)
    student = converted(made, "llama", "peri")
    seen = ok("heal", made / "llama", student, *how, code=1)
    assert "LN313" in seen.stderr and not out.exists()
    monkeypatch.undo()
    again = ok("heal", made / "llama", student, *how, "--resume")  # nothing of the training is lost
    assert (out / "config.json").is_file(), again.output


def test_what_cannot_be_written_is_told_before_the_training(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Snapshots, "log", lambda self, row: pytest.fail("it was trained"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "photo.jpg").touch()
    base = ("heal", made / "llama", converted(made, "llama", "peri"), "--data", made / "d.jsonl", *HOW)
    fails("LN025", 1, *base, "-o", "mine")
    fails("LN025", 1, *base, "-o", "mine", "--force")
    fails("LN025", 1, *base, "-o", "nowhere/healed")
    fails("LN025", 1, *base, "-o", made / "llama-peri" / "healed")
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
        fails("LN025", 1, *base, "-o", "healed")
    fails("LN022", 1, *base, "-o", "healed", "--tokenizer", "nowhere")
    fails("LN022", 1, *base, "-o", "healed", "--field", "body")
    fails("LN602", 1, "heal", "demo:tinygpt", *base[2:], "-o", "healed", "--progressive")
    fails("LN601", 1, "heal", "demo:tinygpt", *base[2:], "-o", "healed")


@pytest.mark.exhaustive
def test_a_file_comes_out_of_folders_too(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "healed.pt2"
    ok("heal", made / "llama", converted(made, "llama", "peri"), "--data", made / "d.jsonl", *HOW, "-o", out, "-q")
    assert out.is_file() and lnr.load(out).inspect()["placement"] == "peri"


def test_a_buffer_that_is_stored_among_the_weights_is_read(tmp_path: Path) -> None:
    """BART's final_logits_bias: the network's own is on the meta device while its weights lie on the disk."""
    model = zoo.bart()
    model.save_pretrained(tmp_path / "bart")
    ok("convert", tmp_path / "bart", "--to", "pre", "-o", tmp_path / "pre", "-q")
    draw = torch.Generator().manual_seed(0)
    ids = {name: torch.randint(3, 40, (40, 8), generator=draw) for name in ("input_ids", "decoder_input_ids")}
    torch.save(ids, tmp_path / "d.pt")
    how = ("--data", tmp_path / "d.pt", "--steps", 2, "-o", tmp_path / "healed", "--json")
    report = json.loads(ok("heal", tmp_path / "bart", tmp_path / "pre", *how).stdout)
    assert report["losses"]["healed"]["mean"] < 1e-9
    healed, trust = tmp_path / "healed", {"trust_remote_code": True}
    again = transformers.AutoModelForSeq2SeqLM.from_pretrained(healed, **trust)
    assert torch.equal(again.final_logits_bias, model.final_logits_bias)
