"""Write a decoder as a folder that servers of ONNX models run: the model, configs, tokenizer, and what genai needs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..compat.transformers import config_of
from ..files.landing import failing, land, room
from ..files.output import CHECKPOINT, CONFIG, check_folder, check_replaceable
from ..kernels.library import find
from ..loading.configs import read_config
from ..models.decoder import Decoder
from ..pipeline.report import Report
from ..runtime.generating import GENAI, GENERATION, MODEL
from ..runtime.sessions import holds_operators

OURS = (*CHECKPOINT, MODEL, f"{MODEL}.data", f"{MODEL}.1.data", GENAI, "lib*.so")
"""The names of the files of such a folder, which --force may replace."""
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
TYPE = "decoder"
"""What genai calls a model of which it need not know more than its inputs and outputs."""


def export_folder(
    program: Decoder, output: str | os.PathLike[str], source: Path | None, *, force: bool = False, **how: Any
) -> Report:
    """Export a decoder into a folder: see `lnrewrite.export.writer.export` for `how`. Whole or not at all.

    source: the checkpoint folder that it was read from, whose configs and tokenizer are carried along; None for a
    living module, whose own configs are written. Raises LnrewriteError LN025, and as exporting does.
    """
    target = check_folder(output, source or Path(os.devnull), force, OURS)
    with failing(target), room(target.absolute().parent) as place:
        made = place / "whole"
        made.mkdir()
        report = program.export(made / MODEL, **how)
        notes = _carry(made, program, source)
        check_replaceable(target, source or made, OURS)
        land(made, target, force=force)
    return replace(report, output=str(target), notes=(*report.notes, *notes))


def _carry(folder: Path, program: Decoder, source: Path | None) -> list[str]:
    """Write everything but the model into a folder; return notes."""
    config, model = config_of(program.decoder.model), program.decoder.model
    assert config is not None
    held = read_config(source) if source else config.to_dict()
    held.pop("auto_map", None)  # no code is needed to run what was exported
    _write(folder / CONFIG, held)
    generation: Any = getattr(model, "generation_config", None)
    if source and (source / GENERATION).is_file():
        shutil.copyfile(source / GENERATION, folder / GENERATION)
    elif generation is not None:
        generation.save_pretrained(folder)
    for name in TOKENIZER:
        if source and (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    library = find() if holds_operators(folder / MODEL) else None
    if library is not None:
        shutil.copyfile(library, folder / library.name)
    if len({*program.decoder.heads}) > 1:
        return [f"no {GENAI} was written: its layers keep keys and values of different sizes"]
    _write(folder / GENAI, genai_config(program, held, generation, library.name if library else ""))
    return []


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, default=str) + "\n")


def genai_config(program: Decoder, config: Mapping[str, Any], generation: Any, library: str = "") -> dict[str, Any]:
    """Return what onnxruntime-genai has to know of an exported decoder. library: operators beside the model."""
    decoder = program.decoder
    text = decoder.model.config.get_text_config()
    (heads, size), layers = decoder.heads[0], len(decoder.heads) // 2
    ids = {n: _token(n, generation, config) for n in ("bos_token_id", "eos_token_id", "pad_token_id")}
    first = ids["eos_token_id"][0] if isinstance(ids["eos_token_id"], list) else ids["eos_token_id"]
    ids = {**ids, "pad_token_id": first if ids["pad_token_id"] is None else ids["pad_token_id"]}
    options: dict[str, Any] = {"log_id": "onnxruntime-genai", "provider_options": []}
    if library:
        options["custom_ops_library"] = library
    taken = [n for n in ("input_ids", "attention_mask", "position_ids") if n not in program.dropped]
    if not decoder.positions:
        taken = [n for n in taken if n != "position_ids"]
    inputs = {n: n for n in taken}
    for side in ("key", "value"):
        inputs[f"past_{side}_names"] = f"past_key_values.%d.{side}"
    return {
        "model": {
            **{name: value for name, value in ids.items() if value is not None},
            "context_length": program.positions,
            "decoder": {
                "session_options": options,
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
