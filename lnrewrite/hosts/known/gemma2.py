"""Gemma 2: peri, rms with gains 1 + w, the embedding multiplied by the root of its width."""

from ..host import Config, Host, Numbers


def config(n: Numbers) -> Config:
    """Return a Gemma2Config's fields: no caps, no windows, attention scaled as usual."""
    plain = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "layer_types": n.full()}
    own = {"head_dim": n.head_size, "query_pre_attn_scalar": n.head_size, "rms_norm_eps": n.eps}
    biases = {"attention_bias": n.qkv_bias or n.out_bias}
    return {**n.rotary(), **plain, **own, **biases, "hidden_activation": n.activation}


SERVED = {
    "vLLM": "`gemma2.py`: GELU (tanh) alone; a network with SiLU raises an error there",
    "onnxruntime-genai": "`builders/gemma.py` rounds the embedding's factor to two decimals: up to 5e-3 off, divided by"
    " the root of the width; lnrewrite divides by the factor of transformers",
}
HOST = Host("gemma2", config, SERVED)
