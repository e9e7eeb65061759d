"""An encoder and its decoder as they generate: the encoder, the decoder's first call, and every later call.

    encoder_model            input_ids [b, t], attention_mask [b, t], or features -> last_hidden_state [b, t, width]
    decoder_model            input_ids [b, s], encoder_attention_mask [b, t], encoder_hidden_states [b, t, width]
        -> logits [b, s, vocabulary], present.N.decoder.key/value [b, heads, s, size], present.N.encoder.* [b, heads, t,
           size]
    decoder_with_past_model  input_ids [b, s], encoder_attention_mask [b, t], past_key_values.N.decoder/encoder.*
        -> logits [b, s, vocabulary], present.N.decoder.key/value [b, heads, p + s, size]

The names, and that keys and values over the encoder's tokens are made once, are those of optimum-onnx 0.1.0
(optimum/onnxruntime/modeling_seq2seq.py, optimum/exporters/onnx/base.py: OnnxSeq2SeqConfigWithPast), which loads them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ...errors import told
from .cached import check_cached
from .contexts import evaluating
from .served import (
    BATCH,
    BEFORE,
    NEW,
    PAST,
    PRESENT,
    SIDES,
    SOURCE,
    TOTAL,
    Axes,
    Flat,
    Interface,
    Part,
    Sizes,
    cache_of,
    check_layers,
    held_in,
    no_cache,
    sizes_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ENCODER, FIRST, LATER = "encoder_model", "decoder_model", "decoder_with_past_model"
HIDDEN, STATES, MASK = "last_hidden_state", "encoder_hidden_states", "encoder_attention_mask"
SELF, CROSS = "decoder", "encoder"


@dataclass(frozen=True, eq=False)
class Encoder(Part):
    """Call the encoder of a model."""

    @property
    def kinds(self) -> Sequence[Sizes]:
        """Return two sizes of source."""
        return [sizes_of(2, 1, 0, 6), sizes_of(1, 1, 0, 9)]

    def forward(self, past: Sequence[Tensor] = (), **given: Any) -> Flat:
        """Return the encoder's states."""
        encoder: Any = self.model.get_encoder()
        return {HIDDEN: encoder(**given).last_hidden_state}


@dataclass(frozen=True, eq=False)
class CrossDecoder(Part):
    """Call a decoder that attends to an encoder's states: first with the states, later with what was made of them.

    width: of the encoder's states.
    """

    width: int

    @property
    def later(self) -> bool:
        """Return whether this is the part that later calls take."""
        return STATES not in self.takes

    @property
    def kinds(self) -> Sequence[Sizes]:
        """Return sizes of calls for several rows and for several tokens, after a past where there is one."""
        past = 4 if self.later else 0
        return [sizes_of(2, 1 if self.later else 5, past, 6), sizes_of(1, 3, past, 9)]

    def forward(self, past: Sequence[Tensor] = (), **given: Any) -> Flat:
        """Call the model's forward with a cache that holds `past`: of each layer its own, then the encoder's."""
        from transformers.cache_utils import EncoderDecoderCache
        from transformers.modeling_outputs import BaseModelOutput

        own, cross = (cache_of([t for i, t in enumerate(past) if i % 4 // 2 == side]) for side in (0, 1))
        cache = EncoderDecoderCache(own, cross)
        states = given.get(STATES)
        if states is None:  # keys and values were made of them: their shape alone is read
            states = past[2].new_zeros(past[2].shape[0], past[2].shape[2], self.width)
        out = self.model.forward(
            decoder_input_ids=given["input_ids"], attention_mask=given.get(MASK), past_key_values=cache,
            encoder_outputs=BaseModelOutput(last_hidden_state=states), use_cache=True,
        )  # fmt: skip
        made = in_layers(own, cross)
        return {"logits": out.logits, **{name: made[name] for name in self.gives if name != "logits"}}


def in_layers(own: object, cross: object) -> Flat:
    """Return what two caches hold by the names that a call gives it."""
    pairs = [zip(*[iter(held_in(cache))] * 2, strict=True) for cache in (own, cross)]
    return {
        f"{PRESENT}.{layer}.{whose}.{side}": held
        for layer, both in enumerate(zip(*pairs, strict=True))
        for whose, tensors in zip((SELF, CROSS), both, strict=True)
        for side, held in zip(SIDES, tensors, strict=True)
    }


def crossed(module: torch.nn.Module, source: Tensor) -> dict[str, Part]:
    """Return the parts of an encoder and its decoder, by the names of their files.

    source: what the encoder is called with. Raises LnrewriteError LN504 with the reason where it has no such parts.
    """
    from transformers.modeling_outputs import BaseModelOutput

    check_cached(module)
    name, whole = type(module).__name__, cast("PreTrainedModel", module)
    main, text = str(whole.main_input_name), not source.is_floating_point()
    encoder = whole.get_encoder()
    axes: Axes = (BATCH, SOURCE) if text else (BATCH, *map(int, source.shape[1:]))
    takes: Interface = {main: axes}
    masked = text and "attention_mask" in inspect.signature(encoder.forward).parameters
    if masked:
        takes["attention_mask"] = (BATCH, SOURCE)
    try:
        with torch.no_grad(), evaluating(whole):
            states = encoder(source).last_hidden_state
            ids = torch.ones(len(source), 2, dtype=torch.int64, device=source.device)
            out = whole(
                decoder_input_ids=ids, encoder_outputs=BaseModelOutput(last_hidden_state=states), use_cache=True
            )
    except Exception as error:  # a model's code may raise anything
        raise no_cache(name, f"its parts do not run alone: {told(error)}") from error
    both = [getattr(getattr(out, PAST, None), f"{kind}_attention_cache", None) for kind in ("self", "cross")]
    check_layers(name, *both)
    width, vocabulary = int(states.shape[2]), int(out.logits.shape[2])
    table = getattr(encoder, "get_input_embeddings", whole.get_input_embeddings)() if text else None
    rows = int(getattr(table, "num_embeddings", vocabulary))
    gives: Interface = {HIDDEN: (BATCH, SOURCE if text else int(states.shape[1]), width)}
    return {
        ENCODER: Encoder(whole, takes, gives, rows),
        **_decoders(whole, in_layers(*both), width, vocabulary, masked),
    }


def _decoders(model: Any, held: Flat, width: int, vocabulary: int, masked: bool) -> dict[str, Part]:
    """Return the two decoders. held: what a call gives of the cache."""
    logits = {"logits": (BATCH, NEW, vocabulary)}
    tokens: Interface = {"input_ids": (BATCH, NEW)}
    if masked:
        tokens[MASK] = (BATCH, SOURCE)

    def cache(prefix: str, length: str, whose: Sequence[str] = (SELF, CROSS)) -> Interface:
        kept = [(n.removeprefix(f"{PRESENT}."), t.shape) for n, t in held.items() if n.split(".")[2] in whose]
        return {
            f"{prefix}.{n}": (BATCH, int(shape[1]), length if f".{SELF}." in n else SOURCE, int(shape[3]))
            for n, shape in kept
        }

    states = {STATES: (BATCH, SOURCE, width)}
    past, after = cache(PAST, BEFORE), cache(PRESENT, TOTAL, (SELF,))
    return {
        FIRST: CrossDecoder(model, {**tokens, **states}, {**logits, **cache(PRESENT, NEW)}, vocabulary, width),
        LATER: CrossDecoder(model, {**tokens, **past}, {**logits, **after}, vocabulary, width),
    }
