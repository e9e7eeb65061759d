"""Gemma 3 (text): Gemma 2 with queries and keys normed head by head."""

from ..host import Config, Host, Numbers


def config(n: Numbers) -> Config:
    """Return a Gemma3TextConfig's fields: no caps, no windows, one kind of rotary positions."""
    rotary = n.rotary()
    ropes = {"full_attention": rotary["rope_parameters"], "sliding_attention": rotary["rope_parameters"]}
    plain = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "layer_types": n.full()}
    own = {"head_dim": n.head_size, "query_pre_attn_scalar": n.head_size, "rms_norm_eps": n.eps}
    biases = {"attention_bias": n.qkv_bias or n.out_bias}
    return {**rotary, "rope_parameters": ropes, **plain, **own, **biases, "hidden_activation": n.activation}


HOST = Host("gemma3_text", config)
