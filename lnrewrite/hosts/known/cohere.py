"""Command R: one layer norm without bias that attention and feed-forward both read, rotary pairs side by side."""

from ..host import Config, Host, Numbers


def config(n: Numbers) -> Config:
    """Return a CohereConfig's fields: logits as they are."""
    plain = {"logit_scale": 1.0, "use_qk_norm": False, "attention_bias": n.qkv_bias or n.out_bias}
    return {**n.rotary(), **plain, "hidden_act": n.activation, "layer_norm_eps": n.eps}


HOST = Host("cohere", config)
