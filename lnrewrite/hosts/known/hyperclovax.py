"""HyperCLOVA X: LLaMA in peri placement, with multipliers, which are ones here."""

from ...ir import Placement
from ..host import Config, Host, Numbers


def config(n: Numbers) -> Config:
    """Return a HyperCLOVAXConfig's fields: `use_post_norm` is what makes it peri, else it is pre."""
    ones = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0}
    biases = {"attention_bias": n.qkv_bias or n.out_bias, "mlp_bias": n.mlp_bias}
    scale = {"attention_multiplier": n.scale(), "rms_norm_eps": n.eps}
    peri = {"use_post_norm": n.placement is not Placement.PRE, "head_dim": n.head_size}
    return {**n.rotary(), **ones, **biases, **scale, **peri, "hidden_act": n.activation}


SERVED = {
    "vLLM": "`hyperclovax.py`: SiLU alone, any rotary parameters, biases as in transformers; LoRA, pipelines",
}
HOST = Host("hyperclovax", config, SERVED)
