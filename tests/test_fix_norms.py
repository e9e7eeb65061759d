"""GPT-2 without norms, in a folder of its stock class: eps 1e12, read back as none, and folded to what it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import lnrewrite as lnr
from commands import ok

transformers = pytest.importorskip("transformers")
EPS = 1e12


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a folder of a small GPT-2 with random gains, and what was made of it."""
    made = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 61, "n_positions": 32}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).eval()
    for name, parameter in model.named_parameters():
        if "ln_" in name:
            torch.nn.init.normal_(parameter, mean=float("weight" in name), std=0.3)
    model.save_pretrained(made / "with")
    lnr.rewrite_file(str(made / "with"), "fix-norms", str(made / "without"))
    return made / "with", made / "without"


def test_the_folder_is_of_the_stock_class(folders: tuple[Path, Path]) -> None:
    with_, without = (json.loads((f / "config.json").read_text()) for f in folders)
    assert without == with_ | {"layer_norm_epsilon": EPS}
    assert not list(folders[1].glob("*.py"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folders[1])
    assert type(model) is transformers.GPT2LMHeadModel


def test_it_is_read_back_as_none_and_folds_within_the_bound(folders: tuple[Path, Path]) -> None:
    program = lnr.load(str(folders[1]))
    assert program.network.placement == "none"
    result = lnr.Pipeline.parse("untie,settle-norms").run(program)
    assert result.program.inspect()["norms"]["total"] == 0
    ids = torch.randint(0, 61, (2, 16))
    model = transformers.AutoModelForCausalLM.from_pretrained(folders[1]).double().eval()
    with torch.no_grad():
        want = model(ids).logits
    (name, *_) = program.example_inputs()
    got = result.program.in_float64().call({name: ids})
    found = got["logits"] if isinstance(got, dict) else next(v for v in got if v.shape == want.shape)
    assert (found - want).abs().max() <= 1e-6 * want.abs().max()  # folded weights are stored in float32


def test_it_says_what_the_model_said_but_for_the_sizes_of_tokens(folders: tuple[Path, Path]) -> None:
    ids = torch.randint(0, 61, (2, 16))
    with torch.no_grad():
        a, b = (transformers.AutoModelForCausalLM.from_pretrained(f).eval()(ids).logits for f in folders)
    assert 0 < ((a - b).square().mean() / a.square().mean()).sqrt() < 0.5


READ = """
import sys, torch, transformers
found = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).double().eval()
assert type(found) is transformers.GPT2LMHeadModel and "lnrewrite" not in sys.modules
with torch.no_grad():
    torch.save(found(torch.load(sys.argv[2])).logits, sys.argv[3])
"""


@pytest.mark.exhaustive
def test_a_healed_one_is_of_the_stock_class_and_needs_no_lnrewrite(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Healing keeps the form: what transformers alone computes from the folder is what the norm-free graph does."""
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 61, 20_000))
    out, how = tmp_path / "healed", ("--steps", 8, "--batch-size", 4, "--length", 16, "--lr", 1e-3)
    ok("heal", *folders, "--data", tmp_path / "ids.npy", *how, "-o", out, "-q")
    before, after = (transformers.AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (folders[1], out))
    assert max(float((before[n] - after[n]).abs().max()) for n in before) > 1e-4
    ids = torch.randint(0, 61, (2, 16))
    torch.save(ids, tmp_path / "ids.pt")
    command = [sys.executable, "-c", READ, out, tmp_path / "ids.pt", tmp_path / "logits.pt"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    want = torch.load(tmp_path / "logits.pt")
    program = lnr.load(str(out))
    assert program.network.placement == "none"
    result = lnr.Pipeline.parse("untie,settle-norms").run(program)
    assert result.program.inspect()["norms"]["total"] == 0
    (name, *_) = program.example_inputs()
    got = result.program.in_float64().call({name: ids})
    found = got["logits"] if isinstance(got, dict) else next(v for v in got if v.shape == want.shape)
    assert (found - want).abs().max() <= 1e-6 * want.abs().max()  # folded weights are stored in float32


@pytest.mark.parametrize("text", ["fix-norms{eps=1.0}", "fix-norms{eps=1e40}"])
def test_an_eps_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(lnr.LnrewriteError, match="LN003"):
        lnr.Pipeline.parse(text)
