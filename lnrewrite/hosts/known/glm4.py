"""GLM-4: peri, rms, rotary pairs side by side, gate and up in one map."""

from ..host import Config, Host, Numbers


def config(n: Numbers) -> Config:
    """Return a Glm4Config's fields; its own share of rotated channels is a half."""
    rope = n.partly()
    own = {"head_dim": n.head_size, "attention_bias": n.qkv_bias, "rms_norm_eps": n.eps}
    return {**rope, **own, "hidden_act": n.activation}


SERVED = {
    "vLLM": "`glm4.py`: SiLU alone, any rotary parameters with `partial_rotary_factor`, biases of q, k and v; LoRA",
    "llama.cpp": "`glm4.cpp`: SwiGLU, biases of q, k and v; no rotary frequency factors: not Llama 3.1's scaling",
}
HOST = Host("glm4", config, SERVED)
