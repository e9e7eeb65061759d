"""Decoders with a cache in ONNX: they generate what the model generates, every attention and norm one operator."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import transformers
from torch import nn

import lnrewrite as lnr
import zoo
from commands import ok
from lnrewrite.api import load_to_export
from lnrewrite.backends.onnx.file import read
from lnrewrite.backends.onnx.head_norms import take_in
from lnrewrite.backends.onnx.session import runnable
from lnrewrite.backends.torch import cached
from lnrewrite.comparison.generating import Alone, generated
from lnrewrite.compat import exporters
from lnrewrite.export.writer import TOLERANCE
from lnrewrite.loading.identify import identify
from lnrewrite.loading.source import OpenOptions
from lnrewrite.models.decoder import Decoder, decoder
from tiers import rows
from zoo.norms import randomise

FAMILIES = (
    "llama", "qwen3", "gemma2", "gemma3_text", "olmo2", "glm4", "phi3", "mixtral", "qwen3_moe", "gpt2", "opt",
    "gpt_neox", "falcon",
)  # fmt: skip
FORMS = [(name, target, dtype) for name in FAMILIES for target in ("cpu", "cuda") for dtype in ("fp32", "fp16")]
SAMPLE = [("qwen3", "cuda", "fp16"), ("gpt_neox", "cpu", "fp32"), ("gemma2", "cuda", "fp16")]
FREE = ["batch", "sequence"]
NORMS = ("LayerNormalization", "SimplifiedLayerNormalization")
KERNELS = ("GroupQueryAttention", "MultiHeadAttention")


def counts(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


def model_of(name: str) -> Any:
    return zoo.build(name, head=True)[0]


def dims(values: Any) -> dict[str, list[int | str]]:
    return {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}


APART = ("gemma2", "falcon")
"""Models of which MultiHeadAttention takes none: scores with a cap, one key that is repeated by the product alone."""


NORMED = ("qwen3", "qwen3_moe", "gemma3_text")
"""Models whose heads are normed, which attention does on CUDA."""


@pytest.mark.parametrize(("name", "target", "dtype"), rows(FORMS, SAMPLE))
def test_generates(tmp_path: Path, name: str, target: str, dtype: str) -> None:
    """64 tokens of three rounds are the model's, each attention and each norm is one operator, and sizes are free."""
    held, path = decoder(model_of(name)), tmp_path / "model.onnx"
    report = held.export(path, target=target, dtype=dtype)
    found = generated(Alone(held.part, runnable(read(path, name))), TOLERANCE[dtype], 64, seed=3)
    assert found.tokens > 64 * 3
    assert all(d.gap < TOLERANCE[dtype] / 10 for d in found.divergences), found
    made = counts(path)
    wanted = KERNELS[(target, dtype) == ("cuda", "fp32")]  # the first has no float32 there
    assert made[wanted] == (0 if name in APART and wanted == KERNELS[1] else 2)
    assert made["MoE"] == (2 if name in ("mixtral", "qwen3_moe") else 0)
    inside = [n for n in onnx.load(path).graph.node if n.op_type == KERNELS[0] and len(n.input) > 15]
    assert len(inside) == (2 if target == "cuda" and dtype == "fp16" and name in NORMED else 0)
    norms = sum(count for op, count in made.items() if op.removeprefix("Skip") in NORMS) + 2 * len(inside)
    assert norms == len(held.detection.norms) == len(report.norms)
    graph = onnx.load(path).graph
    heads, size = held.part.heads[0]
    taken, given = dims(graph.input), dims(graph.output)
    assert taken["past_key_values.1.value"] == ["batch_size", heads, "past_sequence_length", size]
    assert given["present.0.key"] == ["batch_size", heads, "total_sequence_length", size]
    assert taken["attention_mask"] == ["batch_size", "total_sequence_length"]
    assert list(given)[0] == "logits"
    biased = [n for n in graph.node if n.op_type == KERNELS[0] and len(n.input) > 10 and n.input[10]]
    assert len(biased) == (made[KERNELS[0]] if target == "cpu" else 0)


ROOM = 24


@pytest.mark.parametrize("name", rows(("llama", "gpt2", "opt", "gpt_neox", "qwen3"), sample=["llama"]))
def test_sizes_that_never_change(tmp_path: Path, name: str) -> None:
    """With a cache and a mask of one size, as a CUDA graph has them, it gives the tokens of a cache that grows."""
    held, path = decoder(model_of(name)), tmp_path / "model.onnx"
    held.export(path, target="cuda", dtype="fp16")
    file, draw = runnable(read(path, name)), torch.Generator().manual_seed(0)
    tokens = torch.randint(0, held.part.vocabulary, (1, 12), generator=draw)
    sizes = {n: list(v.shape) for n, v in file.inputs.items() if len(v.shape) == 4}
    logits = []
    for room in (0, ROOM):
        cache = {n: torch.zeros(1, shape[1], room, shape[3]) for n, shape in sizes.items()}
        for start, end in ((0, 7), (7, 8), (8, 12)):
            places = torch.arange(room or end)
            call = {"input_ids": tokens[:, start:end], "attention_mask": (places < end)[None].long()}
            call["position_ids"] = places[None, start:end]
            out = file.call({n: t for n, t in {**call, **cache}.items() if n in file.inputs})
            cache = {n: out[n.replace("past_key_values", "present")] for n in cache}
            logits.append(out["logits"])
    assert all(t.shape[2] == ROOM for t in cache.values())
    for grows, stays in zip(logits[:3], logits[3:], strict=True):
        torch.testing.assert_close(grows, stays, rtol=0, atol=2e-3 * float(grows.abs().max()))


ADDS = {
    "cuda": {
        "gpt2": 10, "mixtral": 10, "llama": 11, "phi3": 11, "gemma2": 12, "glm4": 14, "olmo2": 16, "qwen3": 12,
        "gemma3_text": 13,
    },
    "cpu": {
        "gpt2": 14, "mixtral": 10, "llama": 11, "phi3": 11, "gemma2": 12, "glm4": 14, "olmo2": 16, "qwen3": 18,
        "gemma3_text": 19,
    },
}  # fmt: skip
"""The nodes that a layer adds in half precision, at most."""


SUMS = {"cuda": {"olmo2": 2, "glm4": 1, "gpt2": 2}, "cpu": {"olmo2": 2, "glm4": 1, "gpt2": 6}}
"""The sums among them: those that no norm reads or takes in, and biases likewise. A CPU's layer norms take none in."""


LAYERS = [(target, name) for target, names in ADDS.items() for name in names]


@pytest.mark.parametrize(("target", "name"), rows(LAYERS, sample=[("cuda", "gpt2"), ("cpu", "llama")]))
def test_a_layer_adds_what_a_builder_adds(tmp_path: Path, target: str, name: str) -> None:
    """A Llama layer is 11 nodes, two of them the norms that the adds ride in, as onnxruntime-genai's builder has it.

    A Qwen 3 layer is 12 where norms of heads are inside its attention, and the builder's 18 on a CPU.

    What is packed in a checkpoint stays one product; what turns heads and tokens around a norm of heads is gone.
    """
    total = []
    for depth in (2, 4):
        held, path = decoder(zoo.build(name, depth, head=True)[0]), tmp_path / f"{depth}.onnx"
        held.export(path, target=target, dtype="fp16", verify=depth == 2)
        total.append(counts(path))
    added = total[1] - total[0]
    assert added.total() <= 2 * ADDS[target][name], added
    skips = added["SkipSimplifiedLayerNormalization"] + added["SkipLayerNormalization"]
    assert skips == (0 if name == "olmo2" or (target, name) == ("cpu", "gpt2") else 4)
    assert added["Add"] + added["Sum"] == 2 * SUMS[target].get(name, 0)
    assert not {"Transpose", "Slice"} & set(added)


def test_norms_inside_attention_are_read_before_it(tmp_path: Path) -> None:
    """A CPU, which has no such kernel, sees, runs and rewrites the file with the norms before it."""
    held, path = decoder(model_of("qwen3")), tmp_path / "model.onnx"
    report = held.export(path, target="cuda", dtype="fp16")
    assert Counter(row.form for row in report.norms)["GroupQueryAttention"] == 4
    program = lnr.load(path)
    assert program.inspect()["norms"]["total"] == len(report.norms) == 9
    assert lnr.verify(program, program)["verdict"] == "equal"
    assert lnr.session(path).get_inputs()[0].name == "input_ids"
    model = read(path, "model")
    before = [n for n in model.graph if n.op_type == KERNELS[0]]
    assert not any(len(n.inputs) > 14 for n in before) and len(take_in(model)) == 4
    again = [dict(n.attributes) for n in model.graph if n.op_type == KERNELS[0]]
    raw = [n for n in onnx.load(path).graph.node if n.op_type == KERNELS[0]]
    assert [a["qk_norm_epsilon"].as_float() for a in again] == [
        onnx.helper.get_node_attr_value(n, "qk_norm_epsilon") for n in raw
    ]
    gains = [[model.graph.initializers[n.inputs[i].name].const_value.numpy() for i in (14, 15)] for n in before]
    kept = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    np.testing.assert_array_equal(gains, [[kept[n.input[i]] for i in (14, 15)] for n in raw])


def test_peri_boundaries_are_one_operator(tmp_path: Path) -> None:
    """A living model that was converted in place has one operator of ours at each boundary, beside the cache."""
    model = model_of("llama")
    ids = {"input_ids": torch.arange(12).reshape(2, 6)}
    peri = lnr.convert(model, "peri", kwargs=ids, live=True)
    report = lnr.export_model(peri, path := tmp_path / "peri.onnx", target="cuda", dtype="fp16", fuse="custom")
    made = Counter(node.op_type for node in onnx.load(path).graph.node)
    assert made["NormAddNorm"] == 4 and made["GroupQueryAttention"] == 2
    assert report.placement_before == "peri"
    assert any("generates the same" in note for note in report.notes) or any(
        "first that differs" in n for n in report.notes
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hold a checkpoint of a small Llama."""
    where = tmp_path_factory.mktemp("decoder") / "llama"
    model_of("llama").save_pretrained(where)
    return where


def test_command(folder: Path, tmp_path: Path) -> None:
    """The command writes the cache by itself; --no-kv-cache gives tokens in and logits out, as inputs do."""
    path = tmp_path / "with.onnx"
    told = json.loads(ok("export", folder, "-o", path, "--target", "cpu", "--json").stdout)
    assert "generates the same" in " ".join(told["notes"])
    assert "past_key_values.1.key" in dims(onnx.load(path).graph.input)
    path = tmp_path / "without.onnx"
    ok("export", folder, "-o", path, "--target", "cpu", "--no-kv-cache")
    assert list(dims(onnx.load(path).graph.input)) == ["input_ids"]
    how = OpenOptions(inputs={"input_ids": torch.arange(16).reshape(2, 8)})
    assert not isinstance(load_to_export(identify(folder, how)), Decoder)


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        ("ids.npz", ["batch", "sequence"]),
        ("input_ids=int64[b,s]", ["batch", "sequence"]),
        ("input_ids=int64[2,8]", [2, 8]),
    ],
)
def test_inputs_that_are_given(folder: Path, tmp_path: Path, given: str, shape: list[int | str]) -> None:
    """A call without a cache is described by values, whose sizes stay free, by names, or by numbers, which do not."""
    np.savez(tmp_path / "ids.npz", input_ids=np.arange(16).reshape(2, 8))
    told = str(tmp_path / given) if given.endswith("npz") else given
    ok("export", folder, "-o", path := tmp_path / "plain.onnx", "--target", "cpu", "--input", told)
    assert dims(onnx.load(path).graph.input) == {"input_ids": shape}


def test_rewritten_folder(folder: Path, tmp_path: Path) -> None:
    """A folder that was converted, whose network is our modeling file's, is written as it generates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
        lnr.rewrite_file(folder, "place{to=output}", tmp_path / "output")
        report = lnr.export_model(tmp_path / "output", tmp_path / "output.onnx", target="cpu")
    assert report.placement_before == "output"
    assert counts(tmp_path / "output.onnx")["GroupQueryAttention"] == 2


@pytest.mark.exhaustive
def test_half_precision_is_what_is_asked_for(tmp_path: Path) -> None:
    """A model held in bfloat16, which no CPU session runs, is written in the type that is given; it stays as it was."""
    model = model_of("llama").to(torch.bfloat16)
    for dtype, held in (("fp32", onnx.TensorProto.FLOAT), ("fp16", onnx.TensorProto.FLOAT16)):
        report = lnr.export_model(model, path := tmp_path / f"{dtype}.onnx", target="cpu", dtype=dtype)
        graph = onnx.load(path).graph
        assert {v.type.tensor_type.elem_type for v in (*graph.input[2:], *graph.output)} == {held}
        assert "captured in float32" in report.notes[0]
    assert model.dtype is torch.bfloat16


def test_without_a_cache() -> None:
    """What has no such cache is refused in words where one is insisted on, and exported without it where not."""
    for name, why in (
        ("t5", "an encoder and a decoder"),
        ("lfm2", "more than keys"),
        ("bert", "not a model"),
    ):
        module = zoo.build(name, 2, head=name != "bert")[0]
        with pytest.raises(lnr.LnrewriteError, match=why) as refused:
            cached.cached(module)
        assert refused.value.code == "LN504"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cached, "fits", lambda: False)
        with pytest.raises(lnr.LnrewriteError, match="another version is installed"):
            cached.cached(model_of("gpt2"))


def test_falls_back(tmp_path: Path) -> None:
    """An encoder and decoder is captured as before, and a note says that there is no cache."""
    zoo.build("t5", 1, head=True)[0].save_pretrained(tmp_path / "t5")
    program = load_to_export(identify(tmp_path / "t5"))
    assert not isinstance(program, Decoder)
    assert any("exported without a cache: it has an encoder" in note for note in program.notes)
    with pytest.raises(lnr.LnrewriteError, match="LN504.*name a folder"):
        load_to_export(identify(tmp_path / "t5"), True)


@pytest.mark.parametrize(("name", "kv_cache", "inputs"), [("llama", False, 1), ("llama", None, 7), ("bert", None, 1)])
def test_living_models_with_a_cache_and_without(name: str, kv_cache: bool | None, inputs: int, tmp_path: Path) -> None:
    """What is asked for is what is written, under a name with a suffix."""
    model = zoo.build(name, 2, head=name != "bert")[0]
    report = lnr.export_model(model, tmp_path / ("m.onnx" if kv_cache is None else "m"), kv_cache=kv_cache)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    assert len(session.get_inputs()) == inputs
    assert any("without a cache" in note for note in report.notes) is (name == "bert")
    if inputs == 1:
        with pytest.raises(lnr.LnrewriteError, match="LN504") if name == "bert" else nullcontext():
            lnr.export_model(model, tmp_path / "insists.onnx", kv_cache=True)


@pytest.mark.parametrize("positions", [10, 16])
def test_few_positions(positions: int, tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=64, n_positions=positions, n_embd=16, n_layer=1, n_head=2)
    report = lnr.export_model(transformers.GPT2LMHeadModel(config), tmp_path / "m.onnx", target="cpu")
    assert any("generates the same" in note for note in report.notes)


def test_an_onnx_file_gets_no_cache(tmp_path: Path) -> None:
    """A cache is not made for a graph that has none: who insists on one is told so, and nothing is written."""
    model, inputs = zoo.build("gpt2", 1)
    lnr.capture(model, kwargs=inputs).export(path := tmp_path / "plain.onnx")
    with pytest.raises(lnr.LnrewriteError, match="LN504.*an ONNX file"):
        lnr.export_model(path, tmp_path / "out.onnx", target="cpu", kv_cache=True)
    assert not (tmp_path / "out.onnx").exists()


def test_window() -> None:
    """The installed transformers lies in the window, whose ends are what they say."""
    assert exporters.fits()
    for held, fits in (("5.22.9", False), ("5.23.0", True), ("5.99.0.dev0", True), ("6.0.0", False), ("4.57.1", False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exporters, "version", lambda _, held=held: held)
            assert exporters.fits() is fits


def spoilt(model: ir.Model) -> Iterator[tuple[str, ir.Model]]:
    """Yield models of which one thing about the cache is wrong."""
    for what in ("tables", "mask", "scale", "swapped"):
        made = model.clone()
        kernels = [n for n in made.graph if n.op_type == "GroupQueryAttention"]
        if what == "tables":
            table = made.graph.initializers["cos_cache"]
            rolled = np.roll(table.const_value.numpy(), 1, 0)  # type: ignore[union-attr]
            table.const_value = ir.tensor(rolled, name="cos_cache")
        elif what == "mask":
            for node in kernels:
                node.replace_input_with(10, None)
        elif what == "scale":
            kernels[0].attributes["scale"] = ir.AttrFloat32("scale", 0.3)
        else:
            one, two = made.graph.outputs[1:3]
            one.name, two.name = two.name, "present.0.key"
            made.graph.outputs[1:3] = [two, one]
        yield what, made


def test_what_is_wrong_is_seen() -> None:
    """Generation sees rotation, padding, scale and cache that are not the model's; none of them shows as an error."""
    held = decoder(model_of("llama"))
    for what, model in spoilt(held.to_onnx(kernels=KERNELS)):
        with pytest.raises(lnr.LnrewriteError, match="logits are") as refused:
            generated(Alone(held.part, runnable(model)), TOLERANCE["fp32"], 8)
        assert refused.value.code == "LN403", what


class Prefixed(transformers.LlamaForCausalLM):
    """A decoder that sees the whole prompt at once: its mask hides nothing of what comes later."""

    def forward(self, input_ids: Any, attention_mask: Any = None, past_key_values: Any = None, **more: Any) -> Any:
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        seen = torch.ones(*input_ids.shape, past + input_ids.shape[1], dtype=torch.bool)[:, None]
        return super().forward(input_ids, attention_mask=seen, past_key_values=past_key_values, **more)


def kernels(model: nn.Module) -> list[ir.Node]:
    return [n for n in decoder(model).to_onnx(kernels=KERNELS).graph if n.op_type in KERNELS]


def odd(size: int, shared: int = 2) -> Any:
    """Return a decoder with heads of a size that not every kernel takes."""
    sizes = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": shared, "head_dim": size}
    torch.manual_seed(0)
    return randomise(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval(), 0)


def odd_gpt2(size: int) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_positions=256, n_embd=4 * size, n_layer=2, n_head=4)
    return randomise(transformers.GPT2LMHeadModel(config).eval(), 0)


ODD = {
    **{f"llama {size} {shared}": (odd, size, shared) for size in (12, 20, 100, 24) for shared in (2, 4)},
    "gpt2 12": (odd_gpt2, 12), "gpt2 10": (odd_gpt2, 10),
}  # fmt: skip
TARGETS = [(target, dtype) for target in ("cpu", "cuda") for dtype in ("fp32", "fp16")]


@pytest.mark.parametrize(
    ("name", "target", "dtype"),
    rows([(name, *form) for name in ODD for form in TARGETS], [("llama 12 2", "cuda", "fp32")]),
)
def test_heads_of_any_size(tmp_path: Path, name: str, target: str, dtype: str) -> None:
    """Each attention is one operator, each rotation too, whether heads share keys or not, and the tokens are the same.

    What is rotated before it goes into a cache that the kernel does not keep is read by the cache alone.
    """
    build, *how = ODD[name]
    held, path = decoder(build(*how)), tmp_path / "model.onnx"
    held.export(path, target=target, dtype=dtype)
    found = generated(Alone(held.part, runnable(read(path, name))), TOLERANCE[dtype], 64, seed=3)
    assert found.tokens > 64 * 3
    assert all(d.gap < TOLERANCE[dtype] / 10 for d in found.divergences), found
    made, grouped = counts(path), how[0] == 24 and (target, dtype) != ("cuda", "fp32")
    assert made[KERNELS[not grouped]] == 2 and not made[KERNELS[grouped]] and not made["Softmax"]
    assert made["RotaryEmbedding"] == (4 if build is odd else 0)


def first_logits(path: Path, ids: torch.Tensor) -> torch.Tensor:
    """Return what a decoder in a file says of prompts."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": torch.arange(ids.shape[1])[None]}
    feed = {
        v.name: given[v.name].numpy() if v.name in given else np.zeros((1, v.shape[1], 0, v.shape[3]), np.float32)
        for v in session.get_inputs()
    }
    return torch.from_numpy(session.run(["logits"], feed)[0])


def with_rope(most: int, **rope: Any) -> Any:
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=4, max_position_embeddings=most, rope_parameters={"rope_theta": 1e4, **rope}
    )
    return randomise(transformers.LlamaForCausalLM(config).eval(), 0)


def test_frequencies_that_the_length_chooses(tmp_path: Path) -> None:
    """A forward that reads its positions is exported on the path below the length that it was trained at, and says so.

    The rotation has a row for each position up to there, so that what is longer fails, and is not wrong.
    """
    model = with_rope(32, rope_type="dynamic", factor=2.0)
    report = lnr.export_model(model, path := tmp_path / "dynamic.onnx", target="cpu")
    assert any("if seq_len > max_seq_len_cached" in path for path in report.fixed_paths)
    ids = torch.randint(64, (1, 33))
    torch.testing.assert_close(first_logits(path, ids[:, :32]), model(ids[:, :32]).logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(Exception, match="cos_cache"):
        first_logits(path, ids)


@pytest.mark.parametrize("trained", rows((24, 512, 700), sample=[512]))
def test_frequencies_that_the_longest_text_chooses(tmp_path: Path, trained: int) -> None:
    """No table says how longrope rotates: all tokens of a call go by its last position, on both sides of the length."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": trained}
    model = with_rope(2 * trained, rope_type="longrope", factor=2.0, **factors)
    lnr.export_model(model, path := tmp_path / "longrope.onnx", target="cpu")
    for length in (trained // 2, trained, trained + 1, trained + 40):
        ids = torch.randint(64, (1, length))
        torch.testing.assert_close(first_logits(path, ids), model(ids).logits, rtol=1e-4, atol=1e-4)


class Counting(transformers.LlamaForCausalLM):
    """A decoder whose tokens hold how many came before them, padding too, which is no input."""

    def forward(self, input_ids: Any, attention_mask: Any = None, past_key_values: Any = None, **more: Any) -> Any:
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        places = torch.arange(past, past + input_ids.shape[1])
        told = {"inputs_embeds": self.model.embed_tokens(input_ids) + torch.sin(0.1 * places)[None, :, None]}
        return super().forward(**told, attention_mask=attention_mask, past_key_values=past_key_values, **more)


class Asking(transformers.LlamaForCausalLM):
    """A decoder whose tokens hold how many tokens their row has."""

    def forward(self, input_ids: Any, attention_mask: Any = None, past_key_values: Any = None, **more: Any) -> Any:
        if attention_mask is None:
            past = past_key_values.get_seq_length() if past_key_values is not None else 0
            attention_mask = torch.ones(len(input_ids), past + input_ids.shape[1])
        tokens = 0.1 * attention_mask.sum(1)[:, None, None] * torch.ones(64)
        told = {"inputs_embeds": self.model.embed_tokens(input_ids) + tokens}
        return super().forward(**told, attention_mask=attention_mask, past_key_values=past_key_values, **more)


class Skipping(transformers.LlamaForCausalLM):
    """A decoder that sees every second token before each."""

    def forward(self, input_ids: Any, attention_mask: Any = None, past_key_values: Any = None, **more: Any) -> Any:
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        back = torch.arange(past, past + input_ids.shape[1])[:, None] - torch.arange(past + input_ids.shape[1])
        seen = ((back >= 0) & (back % 2 == 0))[None, None]
        seen = seen if attention_mask is None else seen & (attention_mask[:, None, None] > 0)
        return super().forward(input_ids, attention_mask=seen, past_key_values=past_key_values, **more)


@pytest.mark.parametrize("name", rows(("llama", "gemma2", "gpt2"), sample=["gemma2"]))
def test_the_kernel_hides_what_comes_later(tmp_path: Path, name: str) -> None:
    """The bias is made of attention_mask alone: later tokens and those beyond a window are no numbers of the graph."""
    held, path = decoder(zoo.build(name, 2, head=True)[0]), tmp_path / "model.onnx"
    held.export(path, target="cpu", verify=False)
    assert not {"Range", "LessOrEqual", "Less", "GatherND", "And"} & set(counts(path))


class Chunked(transformers.LlamaForCausalLM):
    """A decoder that sees the tokens of its own piece of 32, as many at the end of one as a window shows."""

    def forward(self, input_ids: Any, attention_mask: Any = None, past_key_values: Any = None, **more: Any) -> Any:
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        new, every = (torch.arange(start, past + input_ids.shape[1]) for start in (past, 0))
        seen = ((new[:, None] >= every) & (new[:, None] // 32 == every // 32))[None, None]
        seen = seen if attention_mask is None else seen & (attention_mask[:, None, None] > 0)
        return super().forward(input_ids, attention_mask=seen, past_key_values=past_key_values, **more)


KINDS = (transformers.LlamaForCausalLM, Counting, Asking, Skipping, Chunked)


@pytest.mark.parametrize("kind", rows(KINDS, sample=[Counting]))
def test_what_numbers_do_not_say_stays_a_bias(tmp_path: Path, kind: Any) -> None:
    """Without a bias padding moves; where something beside attention would see that, or a mask hides more, it stays."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128}
    config = transformers.LlamaConfig(**sizes, **heads)
    held, path = decoder(kind(config).eval()), tmp_path / "model.onnx"
    held.export(path, target="cuda", dtype="fp16")
    generated(Alone(held.part, runnable(read(path, "model"))), TOLERANCE["fp16"], 16, seed=3)
    grouped = [n for n in onnx.load(path).graph.node if n.op_type == KERNELS[0]]
    assert [len(n.input) > 10 for n in grouped] == [kind is not transformers.LlamaForCausalLM] * 2


def test_what_the_kernels_do_not_take() -> None:
    """Masks that look ahead keep heads out of the kernel that hides what is ahead by itself, whatever its bias says."""
    sizes = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, **heads, head_dim=16, attn_implementation="eager")
    assert [n.op_type for n in kernels(Prefixed(config).eval())] == ["MultiHeadAttention"]
    assert [n.op_type for n in kernels(transformers.LlamaForCausalLM(config).eval())] == ["GroupQueryAttention"]
