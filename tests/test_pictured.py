"""Decoders that read pictures, in their parts: together they generate what the model generates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers
from torch import Tensor

import lnrewrite as lnr
from lnrewrite.backends.onnx.scattering import scattered
from lnrewrite.backends.torch import pictured
from lnrewrite.runtime.generating import generate
from test_serving import PROMPT, tokenizer
from tiers import rows
from zoo.norms import randomise

WIDTH, TOKENS = 32, 400
PICTURE = TOKENS - 1
SEEING: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 2,
}  # fmt: skip
READING: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": TOKENS, "max_position_embeddings": 128, "head_dim": 8,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def llava() -> Any:
    clip = {"model_type": "clip_vision_model", **SEEING, "projection_dim": 16}
    config = transformers.LlavaConfig(
        vision_config=clip, text_config={"model_type": "llama", **READING}, image_token_index=PICTURE
    )
    return transformers.LlavaForConditionalGeneration(config)


def internvl() -> Any:
    sight = {"model_type": "internvl_vision", **SEEING, "image_size": [8, 8], "patch_size": [2, 2]}
    config = transformers.InternVLConfig(
        vision_config=sight, text_config={"model_type": "qwen3", **READING}, image_token_id=PICTURE
    )
    return transformers.InternVLForConditionalGeneration(config)


def aya() -> Any:
    sight = {"model_type": "siglip_vision_model", **SEEING, "vision_use_head": False}
    config = transformers.AyaVisionConfig(
        vision_config=sight, text_config={"model_type": "cohere2", **READING}, image_token_index=PICTURE
    )
    return transformers.AyaVisionForConditionalGeneration(config)


def gemma3() -> Any:
    sight = {"model_type": "siglip_vision_model", **SEEING, "vision_use_head": False}
    config = transformers.Gemma3Config(
        vision_config=sight, text_config=READING, mm_tokens_per_image=4, image_token_index=PICTURE,
        boi_token_index=PICTURE - 2, eoi_token_index=PICTURE - 1,
    )  # fmt: skip
    return transformers.Gemma3ForConditionalGeneration(config)


def built(make: Any) -> Any:
    torch.manual_seed(0)
    return randomise(make()).eval()


FORMS = [
    (make, target, dtype) for make in (llava, internvl, aya) for target, dtype in (("cpu", "fp32"), ("cuda", "fp16"))
]


@pytest.mark.parametrize(
    ("make", "target", "dtype"), rows(FORMS, sample=[(llava, "cpu", "fp32"), (internvl, "cuda", "fp16")])
)
def test_parts(tmp_path: Path, make: Any, target: str, dtype: str) -> None:
    """Every part is proved, all together generate, any number of pictures is seen; norms are one operator each."""
    model = built(make)
    report = lnr.export_model(model, tmp_path / "out", target=target, dtype=dtype)
    assert any("tokens as the model" in n or "first that differs" in n for n in report.notes)
    if dtype == "fp32":
        assert any("same 28 tokens" in n for n in report.notes)
    names = {path.name for path in (tmp_path / "out").glob("*.onnx")}
    assert names == {"vision.onnx", "embedding.onnx", "model.onnx"}
    made = [node.op_type for name in names for node in onnx.load(tmp_path / "out" / name).graph.node]
    assert not {"ReduceMean", "Softmax", "If", "Loop"} & {*made}
    vision = onnxruntime.InferenceSession(tmp_path / "out" / "vision.onnx", providers=["CPUExecutionProvider"])
    for count in (1, 2, 5):
        pixels = torch.randn(count, 3, 8, 8)
        given = pixels.numpy().astype(np.float32 if dtype == "fp32" else np.float16)
        (found,) = vision.run(None, {"pixel_values": given})
        with torch.no_grad():
            wanted = torch.cat([*model.get_image_features(pixel_values=pixels, return_dict=True).pooler_output])
        bound = 1e-4 if dtype == "fp32" else 2e-2
        torch.testing.assert_close(torch.tensor(found).float(), wanted.flatten(0, -2), rtol=bound, atol=bound)


def test_text_alone(tmp_path: Path) -> None:
    """A folder's `generate` runs text without pictures: the same tokens as transformers'."""
    model = built(llava)
    model.save_pretrained(folder := tmp_path / "model")
    tokenizer().save_pretrained(folder)
    model.generation_config.suppress_tokens = [PICTURE]
    lnr.export_model(folder, served := tmp_path / "served", target="cpu")
    ids = tokenizer()(PROMPT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        wanted = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
    found = list(generate(served, PROMPT, most=12, engine="session").tokens)
    assert found[: found.index(PICTURE) if PICTURE in found else 12] == wanted[: len(found)]


@pytest.mark.parametrize("folder", [True, False])
def test_what_is_told_of_pictures_by_more_than_embeddings(tmp_path: Path, folder: bool) -> None:
    """Masks that tell of pictures are not in the parts: text alone is written, and that is said; in a file too."""
    model, out = built(gemma3 if folder else llava), tmp_path / ("out" if folder else "out.onnx")
    report = lnr.export_model(model, out, target="cpu")
    why = "more than embeddings: attention_mask" if folder else "OUT is a file"
    assert any("takes no pictures" in note and why in note for note in report.notes)
    assert not (tmp_path / "out" / "vision.onnx").exists()


def test_a_model_that_mixes_pictures_up_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generating sees pictures: parts that take them in another order do not pass."""
    usual = pictured.Vision.forward

    def turned(self: Any, past: Any = (), **given: Tensor) -> Any:
        found = usual(self, past, **given)
        return {name: value.flip(0) for name, value in found.items()}

    monkeypatch.setattr(pictured.Vision, "forward", turned)
    with pytest.raises(lnr.LnrewriteError) as caught:
        lnr.export_model(built(llava), tmp_path / "out", target="cpu")
    assert caught.value.code == "LN403" and "generating" in caught.value.why
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_held_in_bfloat16(tmp_path: Path) -> None:
    """Checkpoints are mostly held so; the parts are captured in float32, pictures and all."""
    report = lnr.export_model(built(llava).to(torch.bfloat16), tmp_path / "out", target="cpu")
    assert any("same 28 tokens" in note for note in report.notes)
    assert (tmp_path / "out" / "vision.onnx").exists()


def test_scattered() -> None:
    """It is masked_scatter where there are numbers enough, and keeps what there are none for."""
    x, mask = torch.randn(2, 3, 4), torch.tensor([[[True], [False], [True]], [[False], [True], [False]]])
    source = torch.randn(3, 4)
    torch.testing.assert_close(scattered(x, mask, source), x.masked_scatter(mask, source))
    few = scattered(x, mask, source[:1])
    assert torch.equal(few[0, 0], source[0]) and torch.equal(few[0, 1:], x[0, 1:]) and torch.equal(few[1], x[1])
    assert torch.equal(scattered(x, mask, source[:0]), x)
