"""What a host is, and the numbers that its config is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from ..ir import Placement

Config = dict[str, Any]
"""The fields of a transformers config by name."""


class Misfit(Exception):
    """Say in plain words what one thing keeps a network out of a host."""


@dataclass(frozen=True)
class Numbers:
    """Hold what a host's config needs to know of a network: sizes, and choices that a config names.

    width: channels of the stream. inner: channels inside its feed-forward blocks. positions: tokens that it knows
    places for. activation: as transformers names it. rope: rotary parameters, none where the source's config has none.
    types: rows of a third table, that of token types. *_bias: whether such a bias is not zero. causal: whether it gives
    logits of a next token; else it is a bare network. tokens: ids of the padding, the first and the last token.
    """

    width: int
    vocab: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    positions: int
    eps: float
    activation: str
    placement: Placement
    parallel: bool
    causal: bool
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    types: int = 0
    window: int | None = None
    rope: Mapping[str, Any] = field(default_factory=dict)
    tokens: Mapping[str, Any] = field(default_factory=dict)

    def of_layers(self, layers: int) -> Self:
        """Return the same of a network of another depth."""
        return replace(self, layers=layers)

    def sizes(self) -> Config:
        """Return the fields that most configs share."""
        own = {} if self.heads * self.head_size == self.width else {"head_dim": self.head_size}
        return {
            "vocab_size": self.vocab,
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "max_position_embeddings": self.positions,
            "tie_word_embeddings": self.tied,
            **own,
            **self.tokens,
        }

    def rotary(self, **changed: object) -> Config:
        """Return what configs of decoders with rotary positions share; `changed` are further rotary parameters."""
        rope = {"rope_type": "default", "rope_theta": 10000.0, **self.rope, **changed}
        return {**self.sizes(), **changed, "num_key_value_heads": self.kv_heads, "rope_parameters": rope}

    def partly(self) -> Config:
        """Return the same for an architecture that turns a part of the channels where nothing says all."""
        return self.rotary(partial_rotary_factor=self.rope.get("partial_rotary_factor", 1.0))

    def full(self) -> list[str]:
        """Return the layer types of attention without windows."""
        return ["full_attention"] * self.layers

    def scale(self) -> float:
        """Return what attention scores are multiplied by as a rule."""
        return float(self.head_size**-0.5)


@dataclass(frozen=True)
class Host:
    """Hold a stock architecture: its model type in transformers, and its config for a network's numbers.

    config: raises Misfit where the architecture has no way to say a number. served: for each server, what of the
    architecture it takes, as its source says (read, not run). note: what a user should know of this host.
    """

    name: str
    config: Callable[[Numbers], Config]
    served: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
