"""RoBERTa with norms before: pre, layer norms, an embedding norm and a final one, no causal mask."""

from ..host import Config, Host, Numbers
from .roberta import NOTE, fields


def config(n: Numbers) -> Config:
    """Return a RobertaPreLayerNormConfig's fields, which are RobertaConfig's."""
    return fields(n)


HOST = Host("roberta-prelayernorm", config, note=NOTE)
