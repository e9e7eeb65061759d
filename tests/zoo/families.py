"""Tiny random models of every architecture that the installed transformers knows: `build("llama", depth=1)`.

A config is shrunk by what its fields are called, nested configs too; inputs are found by trying what the model's
forward has names for. Nothing is downloaded. `families()` lists the names.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .norms import randomise

VOCAB, TOKENS, IMAGE = 128, 12, 32
BIG = 40_000_000  # numbers; a model that stays larger was not shrunk

SIZES: dict[int | float, str] = {
    64: """hidden_size d_model n_embd embedding_size d_embed decoder_hidden_size projection_dim hidden_dim lru_width
        attention_hidden_size embed_dim dim emb_dim word_embed_proj_dim out_hidden_size input_hidden_size width
        text_embed_dim encoder_hidden_dim hidden_units output_hidden_size output_dim vision_hidden_size text_hidden_size
        encoder_hidden_size d_text d_latents""",
    128: """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff d_inner inner_dim ffn_hidden_size dff
        mlp_hidden_size shared_intermediate_size intermediate_dim encoder_intermediate_size
        shared_expert_intermediate_size moe_shared_expert_intermediate_size intermediate_size_mlp dim_feedforward
        mlp_dim hidden_ff_dim
        vocab_size vocab_size_per_layer_input decoder_vocab_size encoder_vocab_size n_words output_vocab_size
        text_vocab_size audio_vocab_size""",
    160: """max_position_embeddings n_positions max_target_positions max_seq_len seq_length n_ctx max_sequence_length
        max_encoder_position_embeddings original_max_position_embeddings""",
    32: "moe_intermediate_size image_size img_size crop_size",
    2: """attn_layer_period expert_layer_period num_experts_per_tok moe_topk num_experts_per_token moe_k top_k_experts
        moe_top_k""",
    4: """num_attention_heads n_head n_heads encoder_attention_heads decoder_attention_heads num_heads attention_heads
        num_encoder_attention_heads num_decoder_attention_heads encoder_num_attention_heads
        decoder_num_attention_heads linear_num_value_heads linear_num_key_heads window_size
        num_local_experts n_routed_experts num_experts moe_num_experts num_routed_experts""",
    16: """head_dim kv_channels v_head_dim attention_head_dim d_kv global_head_dim query_dim qk_head_dim head_size
        linear_key_head_dim linear_value_head_dim attention_head_size q_lora_rank kv_lora_rank time_step_rank
        mamba_dt_rank gate_low_rank_dim o_lora_rank""",
    1: """n_group topk_group n_shared_experts num_expert_group first_k_dense_replace moe_num_shared_experts
        num_shared_experts num_limited_groups attn_layer_offset expert_layer_offset""",
    8: """qk_rope_head_dim qk_nope_head_dim state_size mamba_d_state ssm_state_size sliding_window rotary_dim
        attention_window_size window local_attention attention_chunk_size sliding_window_size patch_size""",
}  # fmt: skip
BY_NAME = {name: value for value, names in SIZES.items() for name in names.split()}
LAYERS = frozenset(
    {
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_layers",
        "encoder_layers",
        "decoder_layers",
        "layers",
        "depth",
        "num_encoder_layers",
        "num_decoder_layers",
        "num_layers_encoder",
        "num_attention_layers",
        "n_blocks",
        "num_decoder_hidden_layers",
        "num_blocks",
        "encoder_num_hidden_layers",
        "decoder_num_hidden_layers",
        "num_mamba_layers",
    }  # fmt: skip
)
KEY_HEADS = (
    "num_key_value_heads", "num_kv_heads", "n_head_kv", "num_global_key_value_heads", "multi_query_group_num",
    "swa_num_key_value_heads",
)  # fmt: skip
TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}

# What the names of a config's fields do not tell: lists that must agree, and sizes that must divide one another.
SETTINGS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "settings.json").read_text())
AUTO = ("CAUSAL_LM", "", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM")
WITH_HEADS = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING
BASE_FIRST = {"bert", "roberta", "electra", "camembert", "data2vec-text", "ernie", "roberta-prelayernorm", "big_bird"}


class Unbuilt(Exception):
    """Signal that an architecture cannot be built small, or fed."""


def transformers_version() -> str:
    """Return the version of the installed transformers."""
    return transformers.__version__


def classes(family: str) -> list[type[nn.Module]]:
    """Return the classes that transformers has for a model type, the one that generates text first."""
    kind = CONFIG_MAPPING[family]
    mappings = [getattr(modeling_auto, f"MODEL_FOR_{a}_MAPPING" if a else "MODEL_MAPPING") for a in AUTO]
    found = [m[kind] for m in mappings if kind in m]
    return [c[0] if isinstance(c, (tuple, list)) else c for c in found]


def families() -> Iterator[str]:
    """Yield every model type that a class of the installed transformers is registered for."""
    for family in CONFIG_MAPPING:
        try:
            if classes(family):
                yield family
        except (ImportError, AttributeError, KeyError, ValueError):
            continue


def shrunk(kind: type[PretrainedConfig], depth: int, **wanted: Any) -> PretrainedConfig:
    """Return a config of small sizes, nested configs too; a field that the class will not have set is left out."""
    known = kind()
    given: dict[str, Any] = {}
    for name in getattr(kind, "sub_configs", {}):
        inner = getattr(known, name, None)
        if isinstance(inner, PretrainedConfig):
            given[name] = shrunk(type(inner), depth)
    heads = _held(known, "num_attention_heads")
    for name in inspect.signature(kind.__init__).parameters:
        held = _held(known, name)
        if name in given or isinstance(held, (list, tuple, bool, dict, str)):
            continue
        if name in KEY_HEADS:
            given[name] = 4 if held in (None, heads) else 2
        elif name in LAYERS:
            given[name] = depth
        elif name in BY_NAME:
            given[name] = BY_NAME[name]
        elif name.endswith(("_token_id", "_token_index")) and isinstance(held, int) and held >= VOCAB:
            given[name] = TOKEN_IDS.get(name, 100 + sum(map(ord, name)) % 20)
    given |= {**SETTINGS.get(kind.model_type, {}), **wanted}
    while True:
        try:
            config = kind(**given)
            break
        except Exception as error:
            named = [k for k in given if k in str(error) and not isinstance(given[k], PretrainedConfig)]
            if not named:
                raise Unbuilt(f"its config cannot be made: {error}") from error
            del given[named[0]]
    rope = _held(config, "rope_parameters") or {}
    for part in (rope, *(p for p in rope.values() if isinstance(p, dict))):
        if "mrope_section" in part:
            part["mrope_section"] = [2, 3, 3]
    config._experts_implementation = "batched_mm"  # the one that can be exported to ONNX
    if getattr(config, "use_cache", False):
        config.use_cache = False
    return config


def _held(config: PretrainedConfig, name: str) -> Any:
    """Return a field of a config; None where it has none of its own for the whole model."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


def build(name: str, depth: int = 2, head: bool = False, seed: int = 0) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model in eval mode with random gains and biases, and keyword inputs that it runs on.

    `name` is a model type, or `type.field=value` for a variant of its config. `head`: the class that generates text,
    also of an encoder-decoder, whose base model it is otherwise. Raises Unbuilt.
    """
    family, _, setting = name.partition(".")
    field, _, value = setting.partition("=")
    wanted = {field: {"True": True, "False": False}.get(value, value)} if field else {}
    try:
        model, config = _made(family, wanted, depth, head, seed)
    except Exception as error:  # a package that is missing, sizes that do not agree: whatever its code says
        raise Unbuilt(f"{type(error).__name__}: {error}"[:300]) from error
    return model, _fed(model, config, seed)


def _made(family: str, wanted: dict[str, Any], depth: int, head: bool, seed: int) -> tuple[nn.Module, Any]:
    config = shrunk(CONFIG_MAPPING[family], depth, **wanted)
    known, two = classes(family), getattr(config, "is_encoder_decoder", False)
    base = (two and not head) or family in BASE_FIRST
    if two and head:
        known = [m[type(config)] for m in WITH_HEADS if type(config) in m]
    kind = known[1] if base and len(known) > 1 else known[0]
    with torch.device("meta"):
        numbers = sum(p.numel() for p in kind(config).parameters())
    if numbers > BIG:
        raise Unbuilt(f"{numbers} parameters are left")
    torch.manual_seed(seed)
    return randomise(kind(config), seed).eval(), config


def _fed(model: nn.Module, config: Any, seed: int) -> dict[str, Any]:
    """Return the first set of inputs that the model runs on."""
    takes = set(inspect.signature(model.forward).parameters)
    why = "it takes none of the inputs that are known"
    for names in _sets(model, takes):
        for values in product(*(_value(n, config, seed) for n in names)):
            given: dict[str, Any] = dict(zip(names, values, strict=True))
            given |= {"use_cache": False} if "use_cache" in takes else {}
            try:
                with torch.no_grad():
                    model(**given)
                given.pop("use_cache", None)  # capture sets it
                return given
            except Exception as error:
                why = why if "required" in str(error) else f"{type(error).__name__}: {error}"
    raise Unbuilt(f"no inputs were found: {why}"[:300])


MAIN = (
    "input_ids", "pixel_values", "input_values", "input_features", "inputs", "inputs_embeds", "hidden_states",
    "pixel_values_videos", "past_values",
)  # fmt: skip


def _sets(model: nn.Module, takes: set[str]) -> Iterator[list[str]]:
    """Yield names of inputs to try together: the main one with what often goes with it, alone, and with another."""
    first = getattr(model, "main_input_name", "")
    main = [n for n in dict.fromkeys((*([first] if isinstance(first, str) else first), *MAIN)) if n in takes]
    decoder = ["decoder_input_ids"] if "decoder_input_ids" in takes else []
    boxes = ["bbox"] if "bbox" in takes else []
    for name in main:
        yield [name, *decoder, *boxes]
        yield [name]
        for other in main:
            if other != name:
                yield [name, other, *boxes]
                yield [name, other, *decoder]


def _value(name: str, config: Any, seed: int) -> Iterator[Tensor]:
    """Yield what an input may be: of the shapes that models of its kind take."""
    g = torch.Generator().manual_seed(seed)
    inner = next((c for part in ("vision_config", "audio_config") if (c := _held(config, part))), config)
    size = _held(inner, "image_size") or _held(config, "image_size") or IMAGE
    size = size.get("height", IMAGE) if isinstance(size, dict) else size
    image = (_held(inner, "num_channels") or 3, *(size if isinstance(size, (list, tuple)) else (size, size)))
    bins = _held(inner, "num_mel_bins") or _held(inner, "feature_projection_input_dim") or 80
    match name:
        case "input_ids" | "inputs":
            ids = torch.randint(3, 90, (2, TOKENS), generator=g)
            end = _held(_held(config, "text_config") or config, "eos_token_id")
            ids[:, -1] = end if isinstance(end, int) and end < VOCAB else 2
            yield ids
        case "decoder_input_ids":
            yield torch.randint(3, 90, (2, TOKENS - 3), generator=g)
        case "pixel_values" | "pixel_values_videos":
            yield torch.randn(2, *image, generator=g)
            yield torch.randn(2, _held(inner, "num_frames") or 4, *image, generator=g)
        case "input_values":
            yield torch.randn(2, 2000, generator=g)
            yield torch.randn(2, _held(config, "max_length") or 64, bins, generator=g)
            yield torch.randn(2, 1, 2000, generator=g)
        case "input_features":
            yield torch.randn(2, 40, bins, generator=g)
            yield torch.randn(2, bins, 2 * (_held(config, "max_source_positions") or 24), generator=g)
        case "bbox":
            yield torch.ones(2, TOKENS, 4, dtype=torch.long)
        case "past_values":
            yield torch.randn(
                2, _held(config, "context_length") or 32, _held(config, "num_input_channels") or 1, generator=g
            )
        case _:
            yield torch.randn(2, TOKENS, _held(config, "hidden_size") or 64, generator=g)
