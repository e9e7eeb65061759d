"""Encoders and their decoders in the parts that are served: files that optimum loads, which generate as the model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import lnrewrite as lnr
import zoo
from commands import fails, ok
from lnrewrite.backends.onnx.file import read
from lnrewrite.backends.onnx.session import runnable
from lnrewrite.backends.torch.crossed import ENCODER, FIRST, LATER
from lnrewrite.comparison.generating import generated
from lnrewrite.export.writer import TOLERANCE
from lnrewrite.models.decoder import encoder_decoder
from lnrewrite.runtime.generating import generate
from tiers import rows

FAMILIES = ("t5", "whisper", "bart", "marian")
FORMS = [(name, target, dtype) for name in FAMILIES for target in ("cpu", "cuda") for dtype in ("fp32", "fp16")]
SAMPLE = [("t5", "cpu", "fp32")]
NORMS = ("LayerNormalization", "SimplifiedLayerNormalization")
WORDS = [f"w{n}" for n in range(100)]
LAYERS = range(2)
SIDES = ("key", "value")


def model_of(name: str, depth: int = 2) -> Any:
    return zoo.build(name, depth, head=True)[0]


def graphs(folder: Path) -> dict[str, Any]:
    return {path.stem: onnx.load(path).graph for path in folder.glob("*.onnx")}


def dims(values: Any) -> dict[str, list[int | str]]:
    return {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}


@pytest.mark.parametrize(("name", "target", "dtype"), rows(FORMS, SAMPLE))
def test_generates(tmp_path: Path, name: str, target: str, dtype: str) -> None:
    """64 tokens of three rounds are the model's, each norm is one operator, and optimum's names and sizes are there."""
    report = lnr.export_model(model_of(name), folder := tmp_path / name, target=target, dtype=dtype)
    held = encoder_decoder(model_of(name))
    files = {path.stem: runnable(read(path, path.name)) for path in folder.glob("*.onnx")}
    assert set(files) == {ENCODER, FIRST, LATER}
    found = generated(held.beside(files), TOLERANCE[dtype], 64, seed=3)
    assert found.tokens > 64 * 3
    assert all(d.gap < TOLERANCE[dtype] / 10 for d in found.divergences), found
    made = graphs(folder)
    operators = Counter(node.op_type for graph in made.values() for node in graph.node)
    norms = sum(count for op, count in operators.items() if op.removeprefix("Skip") in NORMS)
    assert norms == sum(len(part.detection.norms) for part in held.parts.values()) == len(report.norms or ())
    assert not operators["Softmax"] and operators["MultiHeadAttention"] == 2 + 4 + 4  # encoder, both decoders
    assert any("generates the same" in note or "first that differs" in note for note in report.notes)


@pytest.mark.exhaustive
def test_names(tmp_path: Path) -> None:
    """Inputs and outputs are what optimum-onnx asks for, in its order: a layer's own cache, then the encoder's."""
    lnr.export_model(model_of("bart"), folder := tmp_path / "bart", target="cpu")
    made = graphs(folder)
    taken, given = ({name: dims(getattr(graph, side)) for name, graph in made.items()} for side in ("input", "output"))
    assert taken[ENCODER] == dict.fromkeys(("input_ids", "attention_mask"), ["batch_size", "encoder_sequence_length"])
    assert list(given[ENCODER]) == ["last_hidden_state"]
    assert set(taken[FIRST]) == {"input_ids", "encoder_attention_mask", "encoder_hidden_states"}
    whole = [f"{n}.{part}.{side}" for n in LAYERS for part in ("decoder", "encoder") for side in SIDES]
    own = [name for name in whole if "decoder" in name]
    assert list(given[FIRST]) == ["logits", *(f"present.{name}" for name in whole)]
    assert list(taken[LATER]) == ["input_ids", "encoder_attention_mask", *(f"past_key_values.{n}" for n in whole)]
    assert list(given[LATER]) == ["logits", *(f"present.{name}" for name in own)]
    assert taken[LATER]["past_key_values.1.encoder.key"] == ["batch_size", 4, "encoder_sequence_length", 16]
    assert taken[LATER]["past_key_values.0.decoder.value"] == ["batch_size", 4, "past_sequence_length", 16]
    assert json.loads((folder / "config.json").read_text())["model_type"] == "bart"
    assert (folder / "generation_config.json").is_file() and not (folder / "genai_config.json").exists()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hold a checkpoint folder of a small T5 with a tokenizer that ends every source."""
    folder = tmp_path_factory.mktemp("parts") / "t5"
    made: Any = Tokenizer(
        models.WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2} | {w: 3 + n for n, w in enumerate(WORDS)})
    )
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    model = model_of("t5")
    model.generation_config.update(decoder_start_token_id=0, eos_token_id=1, pad_token_id=0)
    model.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)
    return folder


@pytest.mark.exhaustive
def test_command(checkpoint: Path, tmp_path: Path) -> None:
    """The command writes the parts, as half precision too, and `generate` chooses the tokens of the model."""
    ok("export", checkpoint, "-o", folder := tmp_path / "served", "--target", "cpu")
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(checkpoint).eval()
    ids = torch.tensor([[3 + 4, 3 + 8, 3 + 15, 1]])
    with torch.no_grad():
        wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    found = generate(folder, "w4 w8 w15", most=24)
    assert found.engine == "session" and found.prompt_tokens == 4
    assert list(found.tokens) == wanted[0, 1:].tolist()
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    for key in ("decoder_start_token_id", "bos_token_id"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config))
    assert "begins with" in fails("LN013", 1, "generate", folder, "w4")["why"]


@pytest.mark.exhaustive
def test_rewritten(checkpoint: Path, tmp_path: Path) -> None:
    """A converted checkpoint, whose network is our modeling file's, is written in its parts and generates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
        lnr.rewrite_file(checkpoint, "place{to=peri}", tmp_path / "peri")
        report = lnr.export_model(tmp_path / "peri", tmp_path / "served", target="cpu")
    assert report.placement_before == "peri"
    assert "generates the same" in " ".join(report.notes)


@pytest.mark.exhaustive
def test_sound_is_no_text(checkpoint: Path, tmp_path: Path) -> None:
    """`generate` says what a model of sound takes, whose folder has a tokenizer too."""
    lnr.export_model(model_of("whisper", 1), folder := tmp_path / "whisper", target="cpu")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((checkpoint / name).read_bytes())
    assert "input_features, not text" in fails("LN013", 1, "generate", folder, "w1")["why"]


def spoilt(files: dict[str, ir.Model]) -> Iterator[tuple[str, dict[str, ir.Model]]]:
    """Yield files of which one thing is wrong: the encoder's mask, its keys for its values, a table of positions."""
    for what in ("mask", "swapped", "bias"):
        made = {name: model.clone() for name, model in files.items()}
        if what == "mask":
            graph = made[LATER].graph
            taken = next(v for v in graph.inputs if v.name == "encoder_attention_mask")
            flat = ir.node("Equal", [taken, taken])  # true of every token, padding too
            ones = ir.node("Cast", [flat.outputs[0]], {"to": ir.DataType.INT64})
            taken.replace_all_uses_with(ones.outputs[0])
            for i in (0, 1):
                flat.replace_input_with(i, taken)
            graph.insert_before(graph[0], [flat, ones])
        elif what == "swapped":
            key, value = (v for v in made[FIRST].graph.outputs if (v.name or "").startswith("present.0.encoder"))
            key.name, value.name = value.name, key.name
        else:
            table = made[LATER].graph.initializers[
                "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            ]
            table.const_value = ir.tensor(np.roll(table.const_value.numpy(), 1, 0), name=table.name)  # type: ignore[union-attr]
        yield what, made


@pytest.mark.exhaustive
def test_what_is_wrong_is_seen() -> None:
    """Generation sees a mask, a cache and a relative bias that are not the model's."""
    held = encoder_decoder(model_of("t5"))
    for what, wrong in spoilt({name: part.to_onnx() for name, part in held.parts.items()}):
        files = {name: runnable(model) for name, model in wrong.items()}
        with pytest.raises(lnr.LnrewriteError, match="logits are") as refused:
            generated(held.beside(files), TOLERANCE["fp32"], 8)
        assert refused.value.code == "LN403", what
