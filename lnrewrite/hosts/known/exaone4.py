"""EXAONE 4: output placement, rms, queries and keys normed head by head."""

from ..host import Config, Host, Numbers


def config(n: Numbers) -> Config:
    """Return an Exaone4Config's fields: without windows, so that every layer has rotary positions."""
    plain = {"sliding_window": None, "layer_types": n.full(), "head_dim": n.head_size}
    return {**n.rotary(), **plain, "hidden_act": n.activation, "rms_norm_eps": n.eps}


SERVED = {"vLLM": "`exaone4.py` (at 00620f9): SiLU alone; rotary positions in layers without a window too"}
HOST = Host("exaone4", config, SERVED)
