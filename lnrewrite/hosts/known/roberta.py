"""RoBERTa: BERT with positions that count from behind the id of the padding."""

from ..host import Config, Host, Numbers

NOTE = "positions count the tokens before them but for padding, which has to stand behind the text, masked"


def fields(n: Numbers) -> Config:
    """Return a RobertaConfig's fields; positions begin behind the padding's id."""
    pad = n.tokens.get("pad_token_id")
    pad = 0 if pad is None else pad
    own = {"type_vocab_size": n.types or 1, "pad_token_id": pad, "max_position_embeddings": n.positions + pad + 1}
    return {**n.sizes(), **own, "hidden_act": n.activation, "layer_norm_eps": n.eps}


def config(n: Numbers) -> Config:
    """Return a RobertaConfig's fields."""
    return fields(n)


HOST = Host("roberta", config, note=NOTE)
