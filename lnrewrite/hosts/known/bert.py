"""BERT: post, layer norms, an embedding norm, tables of positions and token types, no causal mask."""

from ..host import Config, Host, Numbers


def config(n: Numbers) -> Config:
    """Return a BertConfig's fields."""
    return {**n.sizes(), "type_vocab_size": n.types or 1, "hidden_act": n.activation, "layer_norm_eps": n.eps}


HOST = Host("bert", config)
