"""GPT-2: pre, layer norms, learned positions, biases, weights stored transposed."""

from ..host import Config, Host, Numbers


def config(n: Numbers) -> Config:
    """Return a GPT2Config's fields."""
    return {**n.sizes(), "n_inner": n.inner, "activation_function": n.activation, "layer_norm_epsilon": n.eps}


HOST = Host("gpt2", config)
