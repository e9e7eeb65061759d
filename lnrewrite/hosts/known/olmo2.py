"""OLMo 2: output placement, rms, queries and keys normed over all heads together."""

from ..host import Config, Host, Numbers


def config(n: Numbers) -> Config:
    """Return an Olmo2Config's fields."""
    return {**n.rotary(), "attention_bias": n.qkv_bias or n.out_bias, "hidden_act": n.activation, "rms_norm_eps": n.eps}


HOST = Host("olmo2", config)
