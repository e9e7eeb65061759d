"""Write a decoder as a folder that servers of ONNX models run: the model, configs, tokenizer, and what genai needs."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..backends.onnx.file import read
from ..backends.onnx.session import runnable
from ..backends.torch.crossed import ENCODER, FIRST, LATER
from ..backends.torch.pictured import EMBEDDING, VISION
from ..backends.torch.served import is_past
from ..compat.transformers import config_of
from ..export.writer import TOLERANCE
from ..files.output import CHECKPOINT, CONFIG, check_folder
from ..loading.configs import read_config
from ..models.decoder import Decoder, InParts
from ..pipeline.report import Report
from ..runtime.generating import GENAI, GENERATION, MODEL
from .graphs import tell_genai, together, write_json
from .writing import whole

BESIDE = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "source.spm", "target.spm",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "normalizer.json",
    "chat_template.jinja", "chat_template.json", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
"""What a folder keeps of its checkpoint: how text, sound and pictures become numbers, and back."""
FILES = [f"{name}.onnx" for name in ("model", ENCODER, FIRST, LATER, VISION, EMBEDDING)]
OURS = (*CHECKPOINT, *BESIDE, *FILES, *(f"{n}{data}" for n in FILES for data in (".data", ".1.data")), GENAI, "lib*.so")
"""The names of the files of such a folder, which --force may replace."""
TYPE = "decoder"
"""What genai calls a model of which it need not know more than its inputs and outputs."""


def export_folder(
    program: Decoder | InParts,
    output: str | os.PathLike[str],
    source: Path | None,
    *,
    force: bool = False,
    **how: Any,
) -> Report:
    """Export what generates into a folder: see `lnrewrite.export.writer.export` for `how`. Whole or not at all.

    source: the checkpoint folder that it was read from, whose configs and tokenizer are carried along; None for a
    living module, whose own configs are written. Raises LnrewriteError LN025, and as exporting does.
    """
    target = check_folder(output, source or Path(os.devnull), force, OURS)
    notes = list[str]()
    with whole(target, source or Path(os.devnull), force, OURS) as made:
        if isinstance(program, Decoder):
            report = program.export(made / MODEL, **how)
            _carry(made, program.part.model, source)
            notes += _for_genai(made, program)
        else:
            report = _each(made, program, **how)
            _carry(made, next(iter(program.parts.values())).part.model, source)
        tell_genai(made, how.get("target"))
    return replace(report, output=str(target), notes=(*report.notes, *notes))


def _each(folder: Path, program: InParts, **how: Any) -> Report:
    """Export every part, and generate with all of them. Raises LnrewriteError LN403 where the tokens part."""
    reports = {name: part.export(folder / f"{name}.onnx", **how) for name, part in program.parts.items()}
    notes: Sequence[str] = ()
    if how.get("verify", True):
        files = {name: runnable(read(folder / f"{name}.onnx", name)) for name in reports}
        notes = program.tried(files, math.inf if how.get("quantize") else TOLERANCE[how.get("dtype", "fp32")])
    return together(reports, (*program.notes, *notes))


def _carry(folder: Path, model: Any, source: Path | None) -> None:
    """Write configs, tokenizer and what else a model's checkpoint has beside its weights into a folder."""
    config = config_of(model)
    assert config is not None
    held = read_config(source) if source else config.to_dict()
    held.pop("auto_map", None)  # no code is needed to run what was exported
    write_json(folder / CONFIG, held)
    generation: Any = getattr(model, "generation_config", None)
    if source and (source / GENERATION).is_file():
        shutil.copyfile(source / GENERATION, folder / GENERATION)
    elif generation is not None:
        generation.save_pretrained(folder)
    for name in BESIDE:
        if source and (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _for_genai(folder: Path, program: Decoder) -> list[str]:
    """Write what onnxruntime-genai has to know of a decoder beside it; return notes."""
    if len({*program.part.heads}) > 1:
        return [f"no {GENAI} was written: its layers keep keys and values of different sizes"]
    generation = getattr(program.part.model, "generation_config", None)
    write_json(folder / GENAI, genai_config(program, read_config(folder), generation))
    return []


def genai_config(program: Decoder, config: Mapping[str, Any], generation: Any) -> dict[str, Any]:
    """Return what onnxruntime-genai has to know of an exported decoder."""
    decoder = program.part
    text = decoder.model.config.get_text_config()
    (heads, size), layers = decoder.heads[0], len(decoder.heads) // 2
    ids = {n: _token(n, generation, config) for n in ("bos_token_id", "eos_token_id", "pad_token_id")}
    first = ids["eos_token_id"][0] if isinstance(ids["eos_token_id"], list) else ids["eos_token_id"]
    ids = {**ids, "pad_token_id": first if ids["pad_token_id"] is None else ids["pad_token_id"]}
    inputs = {name: name for name in decoder.takes if name not in program.dropped and not is_past(name)}
    for side in ("key", "value"):
        inputs[f"past_{side}_names"] = f"past_key_values.%d.{side}"
    return {
        "model": {
            **{name: value for name, value in ids.items() if value is not None},
            "context_length": program.positions,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": MODEL,
                "head_size": size,
                "hidden_size": int(text.hidden_size),
                "inputs": inputs,
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
                "num_attention_heads": int(text.num_attention_heads),
                "num_hidden_layers": layers,
                "num_key_value_heads": heads,
            },
            "type": TYPE,
            "vocab_size": decoder.vocabulary,
        },
        "search": {
            "do_sample": bool(getattr(generation, "do_sample", False)),
            "max_length": program.positions,
            "min_length": 0,
            "num_beams": 1,
            "past_present_share_buffer": program.shares,
            "repetition_penalty": float(getattr(generation, "repetition_penalty", None) or 1.0),
            "temperature": float(getattr(generation, "temperature", None) or 1.0),
            "top_k": int(getattr(generation, "top_k", None) or 50),
            "top_p": float(getattr(generation, "top_p", None) or 1.0),
        },
    }


def _token(name: str, generation: Any, config: Mapping[str, Any]) -> Any:
    """Return the id of a special token: as generation has it, else as the config has it."""
    found = getattr(generation, name, None)
    return config.get(name) if found is None else found
