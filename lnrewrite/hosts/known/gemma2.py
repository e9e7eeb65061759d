"""Gemma 2: peri, rms with gains 1 + w, the embedding multiplied by the root of its width."""

from ..host import Config, Host, Numbers


def config(n: Numbers) -> Config:
    """Return a Gemma2Config's fields: no caps, no windows, attention scaled as usual.

    Servers that give every other layer a window, whatever `layer_types` say, get one that holds all positions.
    """
    plain = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "layer_types": n.full()}
    own = {"head_dim": n.head_size, "query_pre_attn_scalar": n.head_size, "rms_norm_eps": n.eps}
    biases = {"attention_bias": n.qkv_bias or n.out_bias, "sliding_window": n.positions}
    return {**n.rotary(), **plain, **own, **biases, "hidden_activation": n.activation}


SERVED = {
    "vLLM": "`gemma2.py` (at 025adfb): GELU (tanh) alone, and a head tied to the embedding: else an error",
    "SGLang": "`gemma2.py`: GELU (tanh) alone: else an error; a head of its own is not read, and the embedding taken"
    " instead: only where config.json says `tie_word_embeddings`",
    "onnxruntime-genai": "`builders/gemma.py` rounds the embedding's factor to two decimals: up to 5e-3 off, divided by"
    " the root of the width; lnrewrite divides by the factor of transformers",
}
HOST = Host("gemma2", config, SERVED)
