"""GPT-2 without norms, in a folder of its stock class: eps 1e12, read back as none, and folded to what it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import lnrewrite as lnr

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


@pytest.mark.parametrize("text", ["fix-norms{eps=1.0}", "fix-norms{eps=1e40}"])
def test_an_eps_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(lnr.LnrewriteError, match="LN003"):
        lnr.Pipeline.parse(text)
