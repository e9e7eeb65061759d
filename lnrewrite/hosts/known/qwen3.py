"""Qwen 3: as LLaMA, queries and keys normed head by head."""

from ..host import Config, Host, Numbers


def config(n: Numbers) -> Config:
    """Return a Qwen3Config's fields, whose heads have a size of their own."""
    plain = {"use_sliding_window": False, "layer_types": n.full(), "attention_bias": n.qkv_bias or n.out_bias}
    return {**n.rotary(), **plain, "head_dim": n.head_size, "hidden_act": n.activation, "rms_norm_eps": n.eps}


HOST = Host("qwen3", config)
