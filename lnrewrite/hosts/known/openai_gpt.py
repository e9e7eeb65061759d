"""The first GPT: post, layer norms, learned positions, no cache."""

from ..host import Config, Host, Misfit, Numbers

ACTIVATIONS = {"gelu_new": "gelu", "silu": "silu", "relu": "relu"}
"""What it calls an activation that it has."""


def config(n: Numbers) -> Config:
    """Return an OpenAIGPTConfig's fields. Raises Misfit for what it has no words for."""
    if n.activation not in ACTIVATIONS:
        raise Misfit(f"it has no activation {n.activation}")
    if n.inner != 4 * n.width:
        raise Misfit("its feed-forward blocks are four times as wide as its stream, and nothing else")
    return {**n.sizes(), "afn": ACTIVATIONS[n.activation], "layer_norm_epsilon": n.eps}


HOST = Host("openai-gpt", config, note="it has no cache: every token is computed from all before it")
