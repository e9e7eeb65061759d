"""Qwen 2: as LLaMA, with biases of queries, keys and values."""

from ..host import Config, Host, Numbers


def config(n: Numbers) -> Config:
    """Return a Qwen2Config's fields."""
    plain = {"use_sliding_window": False, "layer_types": n.full()}
    return {**n.rotary(), **plain, "hidden_act": n.activation, "rms_norm_eps": n.eps}


HOST = Host("qwen2", config)
