"""OPT: pre or post, layer norms, learned positions, biases."""

from ...ir import Placement
from ..host import Config, Host, Misfit, Numbers


def config(n: Numbers) -> Config:
    """Return an OPTConfig's fields: `do_layer_norm_before` false is post. Raises Misfit for another eps."""
    if abs(n.eps - 1e-5) > 1e-12:
        raise Misfit("its norms have an eps of 1e-05, which no config changes")
    placed = {"do_layer_norm_before": n.placement is not Placement.POST}
    sizes = {"ffn_dim": n.inner, "word_embed_proj_dim": n.width}
    return {**n.sizes(), **placed, **sizes, "activation_function": n.activation}


HOST = Host("opt", config)
