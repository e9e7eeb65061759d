"""The hosts, a file each, in the order in which `auto` tries them: those that most servers take come first."""

from __future__ import annotations

from ...errors import Code, unknown
from ..host import Host
from . import (
    bert,
    cohere,
    exaone4,
    gemma2,
    gemma3,
    glm4,
    gpt2,
    gpt_neox,
    granite,
    hyperclovax,
    llama,
    mistral,
    olmo2,
    openai_gpt,
    opt,
    phi3,
    qwen2,
    qwen3,
    roberta,
    roberta_prelayernorm,
    stablelm,
    starcoder2,
)  # fmt: skip

_ORDER = (
    llama, qwen2, qwen3, mistral, phi3, granite, hyperclovax, glm4, gemma2, gemma3, olmo2, exaone4, cohere, gpt_neox,
    stablelm, starcoder2, gpt2, opt, openai_gpt, bert, roberta, roberta_prelayernorm,
)  # fmt: skip
HOSTS = {module.HOST.name: module.HOST for module in _ORDER}
"""Every host by its model type."""

SERVERS = {
    "vLLM": "vllm-project/vllm at 055e47c, `vllm/model_executor/models/`",
    "SGLang": "sgl-project/sglang at 0673f44 (`glm4.py`) and 00b08c4 (`gemma2.py`), `python/sglang/srt/models/`",
    "llama.cpp": "ggml-org/llama.cpp at 0f72889, `src/models/`",
    "onnxruntime-genai": "microsoft/onnxruntime-genai, `src/python/py/models/builders/` as of 2026",
}
"""Where what the hosts say of a server was read."""

TYPES = {
    "text-generation-inference": (
        "huggingface/text-generation-inference at db931fc, `server/text_generation_server/models/__init__.py`",
        ("llama", "qwen2", "mistral", "phi3", "granite", "gemma2", "gemma3_text", "cohere", "gpt_neox", "starcoder2",
         "gpt2", "opt"),
    ),
    "optimum-onnx": (
        "huggingface/optimum-onnx at 1939f27, `optimum/exporters/onnx/model_configs.py`",
        ("llama", "qwen2", "qwen3", "mistral", "phi3", "granite", "gemma2", "gemma3_text", "olmo2", "cohere",
         "gpt_neox", "stablelm", "gpt2", "opt", "bert", "roberta"),
    ),
}  # fmt: skip
"""Servers of whose sources only the list of model types was read: where, and the hosts among them."""

AUTO = "auto"
"""What stands for the first host that fits."""


def hosts_named(name: str) -> list[Host]:
    """Return the host of a name, all for `auto`. Raises UsageError LN003 for a name that is none."""
    if name == AUTO:
        return list(HOSTS.values())
    if name not in HOSTS:
        unknown(Code.LN003, "host", name, [*HOSTS, AUTO])
    return [HOSTS[name]]
