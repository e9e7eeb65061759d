"""A decoder that reads pictures, as it generates: what sees, what puts text and pictures together, and the decoder.

    vision     pixel_values [images, channels, height, width] -> image_features [image tokens, width]
    embedding  input_ids [b, s], image_features [image tokens, width] -> inputs_embeds [b, s, width]
    model      inputs_embeds [b, s, width], attention_mask [b, p + s], past_key_values.N.key/value, ..
        -> logits [b, s, vocabulary], present.N.key/value

The names are those of onnxruntime-genai's models that read pictures. Text without pictures has no image tokens: 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...compat.torch import pytree
from ...errors import told
from .cached import CachedDecoder, cached
from .contexts import evaluating
from .served import BATCH, NEW, Flat, Interface, Part, Sizes, no_cache, sizes_of

VISION, EMBEDDING, TEXT = "vision", "embedding", "model"
PIXELS, FEATURES, EMBEDS = "pixel_values", "image_features", "inputs_embeds"
IMAGES, SEEN = "num_images", "num_image_tokens"

KINDS = ("token_type_ids", "mm_token_type_ids")
"""Inputs that tell which tokens are a picture's."""


@dataclass(frozen=True, eq=False)
class Vision(Part):
    """Call what sees: every picture becomes as many image tokens, of which `each` says the number."""

    each: int

    @property
    def kinds(self) -> Sequence[Sizes]:
        """Return two numbers of pictures."""
        return [{IMAGES: 2, SEEN: 2 * self.each}, {IMAGES: 1, SEEN: self.each}]

    @property
    def example(self) -> Sizes:
        """Return the sizes of three pictures."""
        return {IMAGES: 3, SEEN: 3 * self.each}

    def forward(self, past: Sequence[Tensor] = (), **given: Any) -> Flat:
        """Return the features of all pictures, one after the other."""
        model: Any = self.model
        with any_number():
            features = model.get_image_features(**given, return_dict=True).pooler_output
            return {FEATURES: torch.cat([each.flatten(0, -2) for each in features])}


@contextmanager
def any_number() -> Iterator[None]:
    """Let a model that lists pictures one by one, whose number a trace leaves free, have them as one."""
    usual = torch.Tensor.__iter__

    def iterate(x: Tensor) -> Iterator[Tensor]:
        return iter([x]) if x.dim() and isinstance(x.shape[0], torch.SymInt) else usual(x)

    torch.Tensor.__iter__ = iterate  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.__iter__ = usual  # type: ignore[method-assign]


@dataclass(frozen=True, eq=False)
class Embedding(Part):
    """Put the features of pictures where a text has image tokens, and the embeddings of its own tokens elsewhere.

    each: image tokens of a picture. token: their id. apart: whether features come as [pictures, each, width].
    """

    each: int
    token: int
    apart: bool

    @property
    def kinds(self) -> Sequence[Sizes]:
        """Return a text with two pictures, and one without any."""
        return [{**sizes_of(2, self.each + 3), SEEN: 2 * self.each}, {**sizes_of(1, 4), SEEN: 0}]

    @property
    def example(self) -> Sizes:
        """Return the sizes of three rows with a picture each."""
        return {**sizes_of(3, self.each + 5), SEEN: 3 * self.each}

    def inputs(self, sizes: Sizes, seed: int = 0) -> Flat:
        """Make up a call: a picture, where there is one, stands behind the first token of every row."""
        made = super().inputs(sizes, seed)
        ids = made["input_ids"]
        ids[ids == self.token] = (self.token + 1) % self.vocabulary
        if sizes[SEEN]:
            ids[:, 1 : 1 + self.each] = self.token
        return made

    def forward(self, past: Sequence[Tensor] = (), **given: Any) -> Flat:
        """Return what the model calls its decoder with."""
        return {EMBEDS: decoded(self.model, **self.call(given))[EMBEDS]}

    def call(self, given: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return a text and the features of its pictures as the model's forward takes them."""
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        features, width = given[FEATURES], given[FEATURES].shape[1]
        pooled = features.reshape(features.shape[0] // self.each, self.each, width) if self.apart else [features]
        seen = BaseModelOutputWithPooling(pooler_output=pooled)  # type: ignore[arg-type]
        return {"input_ids": given["input_ids"], "mm_encoder_outputs": {"image": seen}}


def decoded(model: Any, **given: Any) -> Mapping[str, Any]:
    """Return what a model calls its decoder with; the decoder itself does nothing meanwhile."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    decoder, seen = model.get_decoder(), dict[str, Any]()
    names = [*inspect.signature(decoder.forward).parameters]

    def forward(*args: Any, **given: Any) -> BaseModelOutputWithPast:
        seen.update({**dict(zip(names, args, strict=False)), **given})
        return BaseModelOutputWithPast(last_hidden_state=seen[EMBEDS])

    decoder.forward = forward
    try:
        model.forward(**given, use_cache=True)
    finally:
        del decoder.forward
    return seen


def sees(module: torch.nn.Module) -> bool:
    """Return whether a module that generates is called with pictures beside text."""
    return "image" in getattr(module, "input_modalities", ()) and hasattr(module, "get_image_features")


def pictured(module: torch.nn.Module, pixels: Tensor) -> dict[str, Part]:
    """Return the parts of a decoder that reads pictures, by the names of their files, the decoder's last.

    pixels: [pictures, channels, height, width]. Raises LnrewriteError LN504 with the reason where it has no such parts.
    """
    alone, name = cached(module), type(module).__name__
    whole: Any = module
    token = getattr(whole.config, "image_token_id", None)
    if not isinstance(token, int):
        raise no_cache(name, "its config names no image token")
    try:
        with torch.no_grad(), evaluating(whole):
            pooled = whole.get_image_features(pixel_values=pixels.to(whole.dtype), return_dict=True).pooler_output
            shape = tuple(torch.stack(list(pooled)).shape)
            each, width = int(shape[1]), int(shape[2])
            text: Interface = {"input_ids": (BATCH, NEW), FEATURES: (SEEN, width)}
            both: Interface = {EMBEDS: (BATCH, NEW, width)}
            pair = Embedding(whole, text, both, alone.vocabulary, each, token, isinstance(pooled, Tensor))
            made = pair.inputs(pair.kinds[0])
            kinds = (made["input_ids"] == token).long()  # what processors tell beside, if a model asks for it
            asked = {n: kinds for n in KINDS if n in inspect.signature(whole.forward).parameters}
            given = decoded(whole, **pair.call(made), **asked)
            bare = decoded(whole, inputs_embeds=given[EMBEDS])
    except Exception as error:  # a model's code may raise anything
        raise no_cache(name, f"its pictures are not seen by themselves: {told(error)}") from error
    if odd := [key for key in sorted({*given, *bare}) if not _same(given.get(key), bare.get(key))]:
        raise no_cache(name, f"its decoder is told of pictures by more than embeddings: {', '.join(odd)}")
    takes: Interface = both | {n: a for n, a in alone.takes.items() if n != "input_ids"}
    sight: Interface = {PIXELS: (IMAGES, *map(int, pixels.shape[1:]))}
    return {
        VISION: Vision(whole, sight, {FEATURES: (SEEN, width)}, alone.vocabulary, each),
        EMBEDDING: pair,
        TEXT: CachedDecoder(alone.model, takes, alone.gives, alone.vocabulary),
    }


def _same(one: object, other: object) -> bool:
    """Return whether two arguments hold equal tensors."""
    pair = [[t for t in pytree.tree_leaves(each) if isinstance(t, Tensor)] for each in (one, other)]
    return len(pair[0]) == len(pair[1]) and all(
        a.shape == b.shape and torch.equal(a, b) for a, b in zip(*pair, strict=True)
    )
