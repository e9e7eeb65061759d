"""Networks written as stock architectures: what fits is written and proved by others' code, all else is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import lnrewrite as lnr
from commands import fails, ok
from lnrewrite.backends.running import as_runnable
from lnrewrite.errors import LnrewriteError
from lnrewrite.hosts.carrying import Carrier
from lnrewrite.hosts.host import Misfit
from lnrewrite.hosts.known import HOSTS
from lnrewrite.hosts.writing import Guest
from lnrewrite.loading.identify import identify
from lnrewrite.pipeline.spec import placing
from lnrewrite.rehosting import fits_of
from tiers import rows

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2, "tie_word_embeddings": False}
SCALED = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
WHOLE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
FULL = ["full_attention"] * 2
SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", GROUPED),
    "llama-scaled": ("llama", {**GROUPED, "rope_parameters": SCALED}),
    "llama-tied": ("llama", {**GROUPED, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", GROUPED),
    "qwen3": ("qwen3", {**GROUPED, "head_dim": 8}),
    "mistral": ("mistral", {**GROUPED, "sliding_window": 9}),
    "phi3": ("phi3", {**GROUPED, "rope_parameters": WHOLE}),
    "olmo2": ("olmo2", GROUPED),
    "gemma2": ("gemma2", {
        **GROUPED, "head_dim": 8, "query_pre_attn_scalar": 20, "layer_types": FULL, "attn_logit_softcapping": None,
        "final_logit_softcapping": None, "tie_word_embeddings": True,
    }),
    "gpt_neox": ("gpt_neox", SIZES),
    "gpt_neox-in-turns": ("gpt_neox", {**SIZES, "use_parallel_residual": False}),
    "cohere": ("cohere", {**GROUPED, "logit_scale": 0.5}),
    "granite": ("granite", {
        **GROUPED, "attention_multiplier": 0.3, "logits_scaling": 4.0, "residual_multiplier": 0.22,
        "embedding_multiplier": 12.0,
    }),
    "starcoder2": ("starcoder2", {**GROUPED, "use_bias": True}),
    "stablelm": ("stablelm", {**GROUPED, "use_qkv_bias": True}),
    "gpt2": ("gpt2", {**SIZES, "n_inner": 128}),
    "opt": ("opt", {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    "bert": ("bert", SIZES),
}  # fmt: skip
"""Small networks, by what they are called here: model type, and fields of the config."""

LLAMA = {"llama", "qwen2", "mistral", "phi3", "granite", "hyperclovax"}
PERI = {"hyperclovax", "glm4", "gemma2"}
FITS: dict[str, dict[str, set[str]]] = {
    "llama": {"pre": LLAMA, "peri": PERI},
    "llama-scaled": {"pre": LLAMA - {"phi3"}, "peri": PERI},
    "llama-tied": {"pre": LLAMA, "peri": PERI},
    "qwen2": {"pre": LLAMA - {"mistral", "phi3"}, "peri": PERI},
    "qwen3": {"pre": {"qwen3"}, "peri": {"gemma3_text"}, "output": {"exaone4"}},
    "mistral": {"pre": {"mistral", "phi3"}},
    "phi3": {"pre": LLAMA, "peri": PERI},
    "olmo2": {"output": {"olmo2"}},
    "gemma2": {"pre": LLAMA, "peri": PERI},
    "gpt_neox": {"pre": {"gpt_neox"}},
    "gpt_neox-in-turns": {"pre": {"gpt_neox"}},
    "cohere": {"pre": {"cohere", "stablelm"}},
    "granite": {"pre": LLAMA, "peri": PERI},
    "starcoder2": {"pre": {"starcoder2"}},
    "stablelm": {"pre": {"stablelm"}},
    "gpt2": {"pre": {"gpt2", "opt"}, "post": {"opt", "openai-gpt"}},
    "opt": {"pre": {"gpt2", "opt"}, "post": {"opt"}},
    "bert": {"pre": {"roberta-prelayernorm"}, "post": {"bert", "roberta"}},
}
"""Which hosts each source fits, by placement; where none does a placement is left out."""
ELSEWHERE = """
import sys
sys.modules["lnrewrite"] = None  # as if it were not installed
import json, torch, transformers
torch.set_num_threads(1)
for folder in sys.argv[1:]:
    told = torch.load(folder + "/../" + folder.rpartition("/")[2] + ".pt")
    cls = transformers.AutoModelForCausalLM if told["causal"] else transformers.AutoModel
    load = dict(local_files_only=True, output_loading_info=True, dtype=torch.float64, attn_implementation="eager")
    for place in (folder, folder + "-again"):
        model, info = cls.from_pretrained(place, **load)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), (place, info)
        assert type(model).__module__.startswith("transformers.models."), type(model)
        with torch.no_grad():
            made = model(told["ids"])[0]
        off = (made - told["made"]).abs().max() / told["made"].abs().max()
        assert off < 1e-6, (place, off)
        if place == folder:
            model.save_pretrained(folder + "-again")
    if told["causal"]:
        for cache in (True, False) if told["cached"] else (False,):
            ids = model.generate(told["prompt"], max_new_tokens=32, min_new_tokens=32, do_sample=False,
                                 use_cache=cache, pad_token_id=0, eos_token_id=None)
            assert torch.equal(ids[:, -32:], told["greedy"]), (folder, cache)
"""


def build(name: str) -> Any:
    """Return a small network with random gains and biases."""
    kind, fields = SOURCES[name]
    config = transformers.AutoConfig.for_model(kind, **fields)
    torch.manual_seed(len(name))
    made: Any = transformers.AutoModel if kind == "bert" else transformers.AutoModelForCausalLM
    model = made.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.1))
    return model


def stored(name: str, room: Path) -> Path:
    """Write a source as a folder."""
    folder = room / name
    build(name).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}\n")
    return folder


def answers(module: nn.Module, causal: bool, cached: bool) -> dict[str, Any]:
    """Return what a captured network gives in float64, and its greedy continuation of a prompt."""
    ids = torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(1))
    model = as_runnable(module).in_float64()

    def made(held: Tensor) -> Tensor:
        return model.run({"input_ids": held})[0]

    told = {"ids": ids, "made": made(ids), "causal": causal, "cached": cached, "prompt": ids[:, :6]}
    if causal:
        held = ids[:, :6]
        for _ in range(32):
            held = torch.cat([held, made(held)[:, -1:].argmax(-1)], 1)
        told["greedy"] = held[:, -32:]
    return told


def write_all(name: str, triples: list[tuple[str, str]], room: Path) -> None:
    """Write a source in each (placement, host), and have a process without lnrewrite compare and generate."""
    folder = stored(name, room)
    program = lnr.load(folder)
    held: dict[str, Any] = {program.network.placement: program}
    outs = []
    for placement, host in triples:
        if placement not in held:
            pipeline = lnr.Pipeline.parse(placing(placement, plain_skips=placement == "pre"))
            held[placement] = pipeline.run(program, None).program
        out = room / f"{placement}-{host}"
        done = lnr.rehost(folder, host, out, to=None if placement == program.network.placement else placement)
        assert done.host == host and done.relative_error < 1e-6
        assert (out / "tokenizer_config.json").is_file()
        assert not list(out.glob("*.py")) and "auto_map" not in json.loads((out / "config.json").read_text())
        told = answers(held[placement].module(), name != "bert", host != "openai-gpt")
        torch.save(told, room / f"{placement}-{host}.pt")
        outs.append(str(out))
    subprocess.run([sys.executable, "-c", ELSEWHERE, *outs], check=True, cwd=room)


@pytest.mark.parametrize("name", rows(SOURCES, []))
def test_what_fits_is_written_and_nothing_else(name: str, tmp_path: Path) -> None:
    """Would catch: any wrong weight, name, config field or number, in any host, seen from a process of its own."""
    _, fits = fits_of(identify(stored(name, tmp_path)))
    found = [(fit.placement, fit.host) for fit in fits if fit.fits]
    assert all(bool(fit.why) != fit.fits for fit in fits)
    table: dict[str, set[str]] = {}
    for placement, host in found:
        table.setdefault(placement, set()).add(host)
    assert table == FITS[name]
    write_all(name, found, tmp_path / "out")


def test_the_table_holds_what_was_promised() -> None:
    """Would catch: a host that silently stops to fit, with its row of the table dropped."""
    triples = {(n, p, h) for n, row in FITS.items() for p, hosts in row.items() for h in hosts}
    assert len(triples) >= 30
    assert {h for n, p, h in triples if (n, p) == ("llama", "peri")} >= {"hyperclovax", "glm4", "gemma2"}
    assert ("qwen3", "output", "exaone4") in triples and ("bert", "pre", "roberta-prelayernorm") in triples
    assert {("gpt2", "post", "opt"), ("gpt2", "post", "openai-gpt")} <= triples
    assert FITS.keys() == SOURCES.keys()
    assert {h for _, _, h in triples} == HOSTS.keys()


@pytest.mark.parametrize(("name", "triples"), [("qwen2", [("peri", "glm4"), ("pre", "hyperclovax")])])
def test_a_few_in_every_run(name: str, triples: list[tuple[str, str]], tmp_path: Path) -> None:
    """Would catch: as the whole table, in seconds; and tensors that vLLM's loader has no parameter for, or lacks."""
    write_all(name, triples, tmp_path)
    for placement, host in triples:
        assert as_vllm_loads(tmp_path / f"{placement}-{host}") == of_vllm(tmp_path / f"{placement}-{host}")


Shapes = dict[str, tuple[int, ...]]


def as_vllm_loads(folder: Path) -> Shapes:
    """Return a folder's tensors under the names, and of the sizes, that vLLM's mapper makes of them.

    As `hf_to_vllm_mapper` of its hyperclovax.py, and its AutoWeightsLoader: rows of q, k and v are put together, and so
    are gate and up (vllm-project/vllm at 055e47c, read).
    """
    made: Shapes = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        name = re.sub(r"\.(q|k|v)_proj\.", ".qkv_proj.", re.sub(r"\.(gate|up)_proj\.", ".gate_up_proj.", name))
        rows = made.get(name, (0,))[0] + tensor.shape[0]
        made[name] = (rows, *tensor.shape[1:])
    return made


def of_vllm(folder: Path) -> Shapes:
    """Return the parameters of vLLM's HyperCLOVAXForCausalLM or Glm4ForCausalLM for a config (at 055e47c, read)."""
    config = json.loads((folder / "config.json").read_text())
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head
    rows = queries + 2 * config["num_key_value_heads"] * head
    clova = config["model_type"] == "hyperclovax"
    outer = ["post_norm1", "post_norm2"] if clova else ["post_self_attn_layernorm", "post_mlp_layernorm"]
    norms = ["input_layernorm", "post_attention_layernorm", *(outer if config.get("use_post_norm", True) else [])]
    layer: Shapes = {f"{norm}.weight": (width,) for norm in norms}
    layer |= {"self_attn.qkv_proj.weight": (rows, width), "self_attn.o_proj.weight": (width, queries)}
    layer |= {"mlp.gate_up_proj.weight": (2 * inner, width), "mlp.down_proj.weight": (width, inner)}
    layer |= {"self_attn.qkv_proj.bias": (rows,)} if config["attention_bias"] else {}
    layer |= {"self_attn.o_proj.bias": (width,)} if config["attention_bias"] and clova else {}
    whole = {f"model.layers.{i}.{n}": s for i in range(config["num_hidden_layers"]) for n, s in layer.items()}
    ends = {"model.embed_tokens.weight": (config["vocab_size"], width), "model.norm.weight": (width,)}
    head_too = {} if config["tie_word_embeddings"] else {"lm_head.weight": (config["vocab_size"], width)}
    return {**whole, **ends, **head_too}


def refusal(name: str, host: str, change: Any = None) -> str:
    """Return why a network, changed by `change`, does not fit a host; empty where it does."""
    module = build(name)
    if change:
        change(module)
    program = lnr.capture(module, kwargs={"input_ids": torch.randint(3, 97, (2, 12))})
    try:
        Guest.of(program, module.config).trial(HOSTS[host])
    except Misfit as error:
        return str(error)
    return ""


def other_activation(module: Any) -> None:
    for layer in module.model.layers:
        layer.mlp.act_fn = nn.ELU()


def later_bias(module: Any) -> None:
    module.model.layers[-1].mlp.down_proj.bias = nn.Parameter(torch.ones(32))


def capped(module: Any) -> None:
    head, forward = module.lm_head, module.lm_head.forward
    head.forward = lambda x: 5 * torch.tanh(forward(x) / 5)


def raw_stream(module: Any) -> None:
    for layer in module.model.layers:
        mlp, forward = layer.mlp, layer.mlp.forward
        mlp.forward = lambda x, f=forward: f(x) + 0.1 * x


def other_base(module: Any) -> None:
    module.config.rope_parameters["rope_theta"] = 500.0


CASES: list[tuple[str, str, Any, str]] = [
    ("llama", "gemma3_text", None, "its blocks are pre, and the host's peri"),
    ("qwen3", "llama", None, "it norms queries and keys, and the host does not"),
    ("llama", "qwen3", None, "the host norms queries and keys, which the source does not"),
    ("qwen2", "mistral", None, "it has biases of queries, keys or values, and the host has none there"),
    ("mistral", "llama", None, "its attention sees a window of 9 tokens, and the host's all tokens before"),
    ("gpt2", "llama", None, "the norms of its stream are layer, and the host's rms"),
    ("gpt2", "starcoder2", None, "it adds learned positions, and the host has no table of them"),
    ("starcoder2", "gpt2", None, "the host adds learned positions, which the source has not"),
    ("gpt_neox", "stablelm", None, "it has biases of what its branches end in, and the host has none there"),
    ("gpt_neox", "starcoder2", None, "stand beside each other, and the host's do not"),
    ("bert", "opt", None, "has eps|have an eps"),
    ("llama", "llama", other_activation, "computes something else than an activation"),
    ("llama", "mistral", later_bias, "it has biases of what its branches end in, and the host has none there"),
    ("llama", "llama", capped, "its logits are capped"),
    ("llama", "llama", raw_stream, "."),
    ("llama", "llama", other_base, "its positions turn queries and keys by other angles"),
]  # fmt: skip
"""A source, a host, what is done to the source, and what the refusal says."""


@pytest.mark.parametrize(("name", "host", "change", "told"), rows(CASES, CASES[3:5] + CASES[-6:-4]))
def test_a_refusal_names_the_one_thing(name: str, host: str, change: Any, told: str) -> None:
    """Would catch: a difference that nobody looks for, which then stands in a written folder."""
    assert re.search(told, why := refusal(name, host, change)), why


def test_another_scale_of_attention_goes_into_the_queries() -> None:
    """Would catch: attention scaled as the host does it, or a scale that is lost in a norm of queries."""

    def scaled(module: Any) -> None:
        for index, layer in enumerate(module.model.layers):
            layer.self_attn.scaling *= 1.5 + index

    assert refusal("llama", "phi3", scaled) == "" == refusal("qwen3", "qwen3", scaled)


def test_what_is_not_proved_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a folder that is written although its numbers are wrong, or its weights not all there."""
    folder, out = stored("llama", tmp_path), tmp_path / "out"
    writer = Carrier.writer

    def twice(self: Carrier, source: Any, host: Any, times: float) -> None:
        writer(self, source, host, times)
        self.host.carried[host.writer.param] = self.host.carried.get(host.writer.param, torch.zeros(())) * 2

    for broken in (twice, lambda *_: None):
        monkeypatch.setattr(Carrier, "writer", broken)
        with pytest.raises(LnrewriteError) as caught:
            lnr.rehost(folder, "llama", out)
        assert caught.value.code in ("LN315", "LN316")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["llama"]


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: an option that is not passed on, a row without its fields, a name that is guessed at."""
    monkeypatch.chdir(tmp_path)
    stored("llama", tmp_path)
    row = json.loads(ok("convert", "llama", "--to", "peri", "--as", "hyperclovax", "-o", "peri", "--json").stdout)
    assert row["host"] == "hyperclovax" and row["placement_after"] == "peri" and row["relative_error"] < 1e-6
    assert "glm4 is a stock glm4" in ok("rehost", "peri", "--as", "glm4", "-o", "glm4").stdout
    ok("verify", "peri", "glm4")
    fails("LN315", 1, "convert", "llama", "--to", "post", "--as", "glm4", "-o", "out")
    assert "did you mean glm4?" in fails("LN003", 2, "rehost", "peri", "--as", "glm5", "-o", "out")["remedy"]
    fails("LN003", 2, "rehost", "demo:tinygpt", "--as", "gpt2", "-o", "out")
    fails("LN025", 1, "rehost", "peri", "--as", "glm4", "-o", "glm4")


def test_norms_without_gains_are_told_of(tmp_path: Path) -> None:
    """Would catch: flags of FlashNorm where gains are left, or none where they are gone; a folder that they break."""
    lnr.rewrite_file(stored("llama", tmp_path), "fold-affine{final=true}", tmp_path / "folded")
    config = json.loads((tmp_path / "folded" / "config.json").read_text())
    assert config["flash_norm"] is True and config["flashnorm_folded"] is True
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folded")
    lnr.rewrite_file(stored("llama-tied", tmp_path), "fold-affine", tmp_path / "tied", partial=True)
    config = json.loads((tmp_path / "tied" / "config.json").read_text())
    assert config["flash_norm"] is True and "flashnorm_folded" not in config
    lnr.rewrite_file(tmp_path / "folded", "place{to=peri}", tmp_path / "peri")
    assert not {"flash_norm", "flashnorm_folded"} & json.loads((tmp_path / "peri" / "config.json").read_text()).keys()


def test_gguf_knows_the_names_of_the_glm4_host() -> None:
    """Would catch: a tensor that llama.cpp's converter has no name for."""
    gguf = pytest.importorskip("gguf")
    config = transformers.AutoConfig.for_model("glm4", **{**GROUPED, "head_dim": 8, "attention_bias": True})
    model = transformers.AutoModelForCausalLM.from_config(config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM4, 2)
    assert not [n for n in model.state_dict() if names.get_name(n, (".weight", ".bias")) is None]


@pytest.mark.parametrize("host", rows(["hyperclovax", "glm4"], ["glm4"]))
def test_training_goes_on_in_the_host(host: str, tmp_path: Path) -> None:
    """Would catch: a host that Trainer or PEFT cannot train, or not save and open again."""
    import peft

    lnr.rehost(stored("llama", tmp_path), host, tmp_path / "host", to="peri")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "host")
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    ids = torch.randint(3, 97, (8, 12), generator=torch.Generator().manual_seed(0))
    how = transformers.TrainingArguments(
        str(tmp_path / "run"), max_steps=8, learning_rate=1e-2, report_to=[], use_cpu=True, disable_tqdm=True, seed=0
    )
    texts = [{"input_ids": row, "labels": row} for row in ids]
    trainer = transformers.Trainer(model, how, train_dataset=texts)
    before = trainer.evaluate(texts)["eval_loss"]
    trainer.train()
    assert trainer.evaluate(texts)["eval_loss"] < before
    model.merge_and_unload().save_pretrained(tmp_path / "trained")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")


@pytest.mark.exhaustive
def test_two_folders_and_the_hosts_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is no folder nothing is said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lnrewrite.rehosting.HOSTS", {name: HOSTS[name] for name in ("llama", "gpt2", "glm4")})
    stored("llama", tmp_path)
    for output in ("peri", "peri.pt2"):
        ok("convert", "llama", "--to", "peri", "--fit", "constants", "-o", output)
    row = json.loads(ok("diff", "llama", "peri", "--hosts", "--json").stdout)
    assert row["hosts"] == [["llama"], ["glm4"]]
    told = ok("diff", "peri.pt2", "llama", "--hosts").stdout
    assert "A fits in: no checkpoint folder" in told and "B fits in: llama" in told
    assert "fits in" not in ok("diff", "llama", "peri").stdout
