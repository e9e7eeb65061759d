"""Mistral: as LLaMA without biases, attention over a window where there is one."""

from ..host import Config, Host, Numbers


def config(n: Numbers) -> Config:
    """Return a MistralConfig's fields."""
    window = {"sliding_window": n.window, "head_dim": n.head_size}
    return {**n.rotary(), **window, "hidden_act": n.activation, "rms_norm_eps": n.eps}


HOST = Host("mistral", config)
