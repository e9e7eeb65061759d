"""StarCoder 2: pre, layer norms, biases everywhere, a feed-forward without gate."""

from ..host import Config, Host, Numbers


def config(n: Numbers) -> Config:
    """Return a Starcoder2Config's fields."""
    plain = {"use_bias": n.qkv_bias or n.out_bias or n.mlp_bias, "sliding_window": n.window, "norm_epsilon": n.eps}
    return {**n.rotary(), **plain, "hidden_act": n.activation}


HOST = Host("starcoder2", config)
