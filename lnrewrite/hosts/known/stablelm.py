"""StableLM: pre, layer norms with biases, rotary halves of a part of the channels, gated feed-forward."""

from ..host import Config, Host, Numbers


def config(n: Numbers) -> Config:
    """Return a StableLmConfig's fields; its own share of rotated channels is a quarter."""
    rope = n.partly()
    plain = {"use_parallel_residual": n.parallel, "qk_layernorm": False, "use_qkv_bias": n.qkv_bias}
    return {**rope, **plain, "hidden_act": n.activation, "layer_norm_eps": n.eps}


HOST = Host("stablelm", config)
