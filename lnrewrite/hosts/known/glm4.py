"""GLM-4: peri, rms, rotary pairs side by side, gate and up in one map."""

from ..host import Config, Host, Numbers


def config(n: Numbers) -> Config:
    """Return a Glm4Config's fields; its own share of rotated channels is a half.

    There always are biases of queries, keys and values: SGLang has them whatever the config says.
    """
    rope = n.partly()
    own = {"head_dim": n.head_size, "attention_bias": True, "rms_norm_eps": n.eps}
    return {**rope, **own, "hidden_act": n.activation}


SERVED = {
    "vLLM": "`glm4.py`: SiLU alone, any rotary parameters with `partial_rotary_factor`, biases of q, k and v; LoRA",
    "SGLang": "`glm4.py`: SiLU alone, any rotary parameters; always has biases of q, k and v, so that they are written,"
    " zeros where the network has none",
    "llama.cpp": "`glm4.cpp`: SwiGLU, biases of q, k and v; no rotary frequency factors: not Llama 3.1's scaling",
}
HOST = Host("glm4", config, SERVED)
