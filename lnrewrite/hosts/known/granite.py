"""Granite: as LLaMA, with multipliers, which are ones here."""

from ..host import Config, Host, Numbers


def config(n: Numbers) -> Config:
    """Return a GraniteConfig's fields."""
    ones = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0}
    biases = {"attention_bias": n.qkv_bias or n.out_bias, "mlp_bias": n.mlp_bias}
    scale = {"attention_multiplier": n.scale(), "rms_norm_eps": n.eps}
    return {**n.rotary(), **ones, **biases, **scale, "hidden_act": n.activation}


HOST = Host("granite", config)
