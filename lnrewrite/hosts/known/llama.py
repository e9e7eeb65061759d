"""LLaMA: pre, rms, rotary halves, gated feed-forward; biases where the config says so."""

from ..host import Config, Host, Numbers


def config(n: Numbers) -> Config:
    """Return a LlamaConfig's fields: `attention_bias` gives queries, keys, values and the output biases."""
    biases = {"attention_bias": n.qkv_bias or n.out_bias, "mlp_bias": n.mlp_bias}
    return {**n.rotary(), **biases, "hidden_act": n.activation, "rms_norm_eps": n.eps}


HOST = Host("llama", config)
