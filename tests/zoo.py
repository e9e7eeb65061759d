"""Tiny transformers models of many families, random weights, with the placements that their modeling code has.

The truth stands beside each entry, read from the library's code and not from our detector: the placement of every
residual branch in execution order, `parallel` once for branches that share one add. Nothing is downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from nets import randomise

VOCAB, TOKENS = 61, 8

# What a config calls its sizes, by family; only names that the config's class knows are set.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "hidden_dim", "embed_dim", "embedding_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "d_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"), 64),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0),
    "vocab_size": VOCAB, "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8, "max_source_positions": TOKENS,
    "num_mel_bins": 16, "image_size": 16, "patch_size": 4, "word_embed_proj_dim": 32, "type_vocab_size": 2,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_intermediate_size": 24,
    "num_experts_per_tok": 2, "rotary_dim": 4, "use_cache": False,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """Hold one model: its class, what its config sets beyond SMALL, and the truth."""

    model: str
    blocks: str
    norm: str = "layer"
    streams: int = 1
    final: bool | None = None
    inputs: str = "ids"
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def truth(self) -> list[str]:
        """Return the placements in execution order."""
        return placements(self.blocks)


def placements(text: str) -> list[str]:
    """Spell out `none pre*3`."""
    parts = [p.partition("*") for p in text.split()]
    return [name for name, _, times in parts for _ in range(int(times or 1))]


def e(model: str, blocks: str, norm: str = "layer", streams: int = 1, final: bool | None = None, inputs: str = "ids", **config: Any) -> Entry:  # fmt: skip
    return Entry(model, blocks, norm, streams, final, inputs, config)


ZOO: dict[str, Entry] = {
    # decoders, pre
    "gpt2": e("GPT2LMHeadModel", "pre*4", final=True),
    "gpt_bigcode": e("GPTBigCodeForCausalLM", "pre*4", final=True),
    "gpt_neo": e("GPTNeoForCausalLM", "pre*4", final=True, attention_types=[[["global", "local"], 1]]),
    "opt": e("OPTForCausalLM", "pre*4", final=True),
    "bloom": e("BloomForCausalLM", "pre*4", final=True),
    "mpt": e("MptForCausalLM", "pre*4", final=True),
    "biogpt": e("BioGptForCausalLM", "pre*4", final=True),
    "xglm": e("XGLMForCausalLM", "pre*4", final=True, attention_heads=4, num_layers=2),
    "ctrl": e("CTRLLMHeadModel", "pre*4", final=True, dff=48),
    "llama": e("LlamaForCausalLM", "pre*4", "rms", final=True),
    "mistral": e("MistralForCausalLM", "pre*4", "rms", final=True),
    "qwen2": e("Qwen2ForCausalLM", "pre*4", "rms", final=True),
    "qwen3": e("Qwen3ForCausalLM", "pre*4", "rms", final=True),
    "gemma": e("GemmaForCausalLM", "pre*4", "rms", final=True),
    "granite": e("GraniteForCausalLM", "pre*4", "rms", final=True, residual_multiplier=0.22, embedding_multiplier=12.0),
    "helium": e("HeliumForCausalLM", "pre*4", "rms", final=True),
    "phi3": e("Phi3ForCausalLM", "pre*4", "rms", final=True),
    "bitnet": e("BitNetForCausalLM", "pre*4", "rms", final=True),
    "olmo": e("OlmoForCausalLM", "pre*4", final=True),
    "stablelm": e("StableLmForCausalLM", "pre*4", final=True),
    "starcoder2": e("Starcoder2ForCausalLM", "pre*4", final=True),
    "nemotron": e("NemotronForCausalLM", "pre*4", final=True),
    "persimmon": e("PersimmonForCausalLM", "pre*4", final=True),
    # post
    "bert": e("BertModel", "post*4", final=False),
    "roberta": e("RobertaModel", "post*4", final=False),
    "distilbert": e("DistilBertModel", "post*4", final=False),
    "electra": e("ElectraModel", "post*4", final=False),
    "albert": e("AlbertModel", "post*4", final=False),
    "mpnet": e("MPNetModel", "post*4", final=False),
    "deberta_v2": e("DebertaV2Model", "post*4", final=False),
    "fnet": e("FNetModel", "post*4", final=False),
    "convbert": e("ConvBertModel", "post*4", final=False),
    "openai_gpt": e("OpenAIGPTLMHeadModel", "post*4", final=False),
    "xlnet": e("XLNetModel", "post*4", final=False),
    "opt.post": e("OPTForCausalLM", "post*4", final=False, do_layer_norm_before=False),
    "roberta_prelayernorm": e("RobertaPreLayerNormModel", "pre*4", final=True),
    "esm": e("EsmModel", "pre*4", final=True, position_embedding_type="rotary"),
    # peri, output, mixed
    "gemma2": e("Gemma2ForCausalLM", "peri*4", "rms", final=True),
    "gemma3": e("Gemma3ForCausalLM", "peri*4", "rms", final=True),
    "glm4": e("Glm4ForCausalLM", "peri*4", "rms", final=True),
    "olmo2": e("Olmo2ForCausalLM", "output*4", "rms", final=True),
    "olmo3": e("Olmo3ForCausalLM", "output*4", "rms", final=True),
    "exaone4": e("Exaone4ForCausalLM", "output*4", "rms", final=True),
    "modernbert": e("ModernBertModel", "none pre*3", final=True),
    # parallel
    "gptj": e("GPTJForCausalLM", "parallel*2", final=True),
    "gpt_neox": e("GPTNeoXForCausalLM", "parallel*2", final=True),
    "gpt_neox.serial": e("GPTNeoXForCausalLM", "pre*4", final=True, use_parallel_residual=False),
    "codegen": e("CodeGenForCausalLM", "parallel*2", final=True),
    "falcon": e("FalconForCausalLM", "parallel*2", final=True),
    "cohere": e("CohereForCausalLM", "parallel*2", final=True),
    "phi": e("PhiForCausalLM", "parallel*2", final=True),
    # experts
    "mixtral": e("MixtralForCausalLM", "pre*4", "rms", final=True),
    "qwen2_moe": e("Qwen2MoeForCausalLM", "pre*4", "rms", final=True, shared_expert_intermediate_size=24),
    "qwen3_moe": e("Qwen3MoeForCausalLM", "pre*4", "rms", final=True),
    "olmoe": e("OlmoeForCausalLM", "pre*4", "rms", final=True),
    "gpt_oss": e("GptOssForCausalLM", "pre*4", "rms", final=True),
    "granitemoe": e("GraniteMoeForCausalLM", "pre*4", "rms", final=True),
    # state spaces and other mixers
    "mamba": e("MambaForCausalLM", "pre*2", "rms", final=True, state_size=4),
    "falcon_mamba": e("FalconMambaForCausalLM", "pre*2", "rms", final=True, state_size=4),
    "jamba": e("JambaForCausalLM", "pre*4", "rms", final=True, mamba_d_state=4, mamba_dt_rank=4, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, use_mamba_kernels=False),  # fmt: skip
    "lfm2": e("Lfm2ForCausalLM", "pre*4", "rms", final=True, full_attn_idxs=[1], block_auto_adjust_ff_dim=False),
    "poolformer": e("PoolFormerModel", "pre*4", inputs="image", depths=[1, 1], hidden_sizes=[16, 32], num_encoder_blocks=2, patch_sizes=[3, 3], strides=[2, 2], padding=[1, 1], streams=2),  # fmt: skip
    # encoder-decoders
    "bart": e("BartModel", "post*10", streams=2, final=False, inputs="encdec"),
    "marian": e("MarianModel", "post*10", streams=2, final=False, inputs="encdec", decoder_vocab_size=VOCAB),
    "mbart": e("MBartModel", "pre*10", streams=2, final=True, inputs="encdec"),
    "m2m_100": e("M2M100Model", "pre*10", streams=2, final=True, inputs="encdec"),
    "t5": e("T5Model", "pre*10", "rms", streams=2, final=True, inputs="encdec"),
    "whisper": e("WhisperModel", "pre*10", streams=2, final=True, inputs="mel"),
    "moonshine": e("MoonshineModel", "pre*10", streams=2, final=True, inputs="wave2seq", encoder_num_hidden_layers=2, decoder_num_hidden_layers=2, encoder_num_attention_heads=4, decoder_num_attention_heads=4, encoder_num_key_value_heads=4, decoder_num_key_value_heads=4),  # fmt: skip
    # vision, audio, several towers
    "vit": e("ViTModel", "pre*4", final=True, inputs="image"),
    "deit": e("DeiTModel", "pre*4", final=True, inputs="image"),
    "beit": e("BeitModel", "pre*4", inputs="image"),
    "dinov2": e("Dinov2Model", "pre*4", final=True, inputs="image"),
    "videomae": e("VideoMAEModel", "pre*4", inputs="video", num_frames=2, tubelet_size=2),
    "convnext": e("ConvNextModel", "inner*2", streams=2, inputs="image", depths=[1, 1], hidden_sizes=[16, 32], num_stages=2, patch_size=2),  # fmt: skip
    "clip": e("CLIPModel", "pre*8", streams=2, final=True, inputs="clip"),
    "siglip": e("SiglipModel", "pre*9", streams=3, final=True, inputs="clip"),
    "ast": e("ASTModel", "pre*4", final=True, inputs="spectrogram", max_length=16, num_mel_bins=16, frequency_stride=4, time_stride=4),  # fmt: skip
    "wav2vec2": e("Wav2Vec2Model", "post*5", final=False, inputs="wave"),
    "hubert.stable": e("HubertModel", "none pre*4", final=True, inputs="wave", do_stable_layer_norm=True, feat_extract_norm="layer"),  # fmt: skip
    "speech_to_text": e("Speech2TextModel", "pre*10", streams=2, final=True, inputs="speech", input_feat_per_channel=16, conv_channels=16),  # fmt: skip
}  # fmt: skip

WAVES = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}  # fmt: skip


def shrunk(kind: type, wanted: dict[str, Any]) -> Any:
    """Return a config of the smallest sizes that its class has names for, nested configs too."""
    known = kind()  # a scratch copy: _takes writes to it
    given = {k: v for k, v in {**SMALL, **wanted}.items() if k in wanted or _takes(known, k, v)}
    for name in ("text_config", "vision_config"):
        if hasattr(known, name):
            given[name] = shrunk(type(getattr(known, name)), {}).to_dict()
    config = kind(**given)
    if hasattr(config, "num_experts_per_tok") or "num_local_experts" in given:
        config._experts_implementation = "batched_mm"
    return config


def _takes(config: Any, name: str, value: Any) -> bool:
    """Say whether a config has a name and lets it be set."""
    try:
        known = hasattr(config, name)
        setattr(config, name, value)
    except (AttributeError, NotImplementedError):
        return False
    return known


def build(name: str, seed: int = 0) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the entry's model in eval mode with random gains and biases, and its keyword inputs."""
    entry = ZOO[name]
    kind = getattr(transformers, entry.model)
    wanted = {**(WAVES if entry.inputs == "wave" else {}), **entry.config}
    torch.manual_seed(seed)
    model = kind(shrunk(kind.config_class, wanted))
    return randomise(model, seed).eval(), inputs(entry.inputs, seed)


def inputs(kind: str, seed: int = 0) -> dict[str, Tensor]:
    """Return keyword inputs of a batch of two."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (2, TOKENS), generator=g)
    image = torch.randn(2, 3, 16, 16, generator=g)
    match kind:
        case "ids":
            return {"input_ids": ids}
        case "encdec":
            return {"input_ids": ids, "decoder_input_ids": ids.flip(1)[:, :6]}
        case "image":
            return {"pixel_values": image}
        case "video":
            return {"pixel_values": torch.randn(2, 2, 3, 16, 16, generator=g)}
        case "clip":
            return {"input_ids": ids, "pixel_values": image}
        case "mel":
            return {"input_features": torch.randn(2, 16, 2 * TOKENS, generator=g), "decoder_input_ids": ids}
        case "speech":
            return {"input_features": torch.randn(2, 16, 16, generator=g), "decoder_input_ids": ids}
        case "spectrogram":
            return {"input_values": torch.randn(2, 16, 16, generator=g)}
        case "wave":
            return {"input_values": torch.randn(2, 400, generator=g)}
        case "wave2seq":
            return {"input_values": torch.randn(2, 4000, generator=g), "decoder_input_ids": ids}
    raise ValueError(kind)
