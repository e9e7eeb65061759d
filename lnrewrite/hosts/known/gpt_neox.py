"""GPT-NeoX: layer norms, attention and feed-forward side by side or in turns, queries, keys, values by heads."""

from ..host import Config, Host, Numbers


def config(n: Numbers) -> Config:
    """Return a GPTNeoXConfig's fields; its own share of rotated channels is a quarter."""
    rope = n.partly()
    del rope["num_key_value_heads"]
    plain = {"use_parallel_residual": n.parallel, "attention_bias": n.qkv_bias or n.out_bias}
    return {**rope, **plain, "hidden_act": n.activation, "layer_norm_eps": n.eps}


HOST = Host("gpt_neox", config)
