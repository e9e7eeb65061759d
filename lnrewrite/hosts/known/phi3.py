"""Phi 3: as LLaMA without biases, queries, keys and values in one map, gate and up in another."""

from ..host import Config, Host, Misfit, Numbers


def config(n: Numbers) -> Config:
    """Return a Phi3Config's fields. Raises Misfit for rotary angles that it has no words for."""
    if (kind := n.rope.get("rope_type", "default")) not in ("default", "longrope"):
        raise Misfit(f"it has no rotary positions of the kind {kind}")
    plain = {"sliding_window": n.window, "original_max_position_embeddings": n.positions}
    rope = n.partly()
    return {**rope, **plain, "hidden_act": n.activation, "rms_norm_eps": n.eps}


HOST = Host("phi3", config)
