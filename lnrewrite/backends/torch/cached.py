"""A decoder of transformers as it generates: called with the keys and values of the tokens before, and giving all.

    input_ids [b, s], attention_mask [b, p + s], position_ids [b, s], past_key_values.N.key/value [b, heads, p, size]
        -> logits [b, s, vocabulary], present.N.key/value [b, heads, p + s, size]

p may be 0: a prompt. Layers with a sliding window keep all their keys here; their masks hide what lies before it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...compat.exporters import NEEDED, fits
from ...compat.transformers import config_of
from ...errors import told
from .contexts import evaluating
from .served import (
    BATCH,
    BEFORE,
    NEW,
    PAST,
    PRESENT,
    SIDES,
    TOTAL,
    Flat,
    Interface,
    Part,
    Sizes,
    cache_of,
    check_layers,
    held_in,
    is_past,
    no_cache,
    sizes_of,
)


@dataclass(frozen=True, eq=False)
class CachedDecoder(Part):
    """Call a decoder with a flat cache."""

    @property
    def heads(self) -> list[tuple[int, int]]:
        """Return the number and size of the heads of each tensor of the cache, keys and values in turns."""
        return [(int(axes[1]), int(axes[3])) for name, axes in self.takes.items() if is_past(name)]

    @property
    def kinds(self) -> Sequence[Sizes]:
        """Return the sizes of two prompts, of one token more for two, and of several more for one."""
        return [sizes_of(2, 5), sizes_of(2, 1, 4), sizes_of(1, 3, 4)]

    def forward(self, past: Sequence[Tensor] = (), **given: Any) -> Flat:
        """Call the model's forward with a cache that holds `past`, and return its logits and the cache after it."""
        cache = cache_of(past)
        out = self.model.forward(**given, past_key_values=cache, use_cache=True)
        return dict(zip(self.gives, [out.logits, *held_in(cache)], strict=True))


def generates(module: torch.nn.Module) -> bool:
    """Return whether a module is a model of transformers that generates text."""
    return config_of(module) is not None and bool(getattr(module, "can_generate", bool)())


def two_parts(module: torch.nn.Module) -> bool:
    """Return whether a module that generates has an encoder and a decoder."""
    return generates(module) and bool(getattr(config_of(module), "is_encoder_decoder", False))


def check_cached(module: torch.nn.Module) -> None:
    """Raise LnrewriteError LN504 for what is no model of transformers that generates with a cache, as it is needed."""
    name = type(module).__name__
    if not generates(module) or "past_key_values" not in inspect.signature(module.forward).parameters:
        raise no_cache(name, "it is not a model of transformers that generates text with a cache")
    if not fits():
        raise no_cache(name, f"its cache is traced with {NEEDED}, and another version is installed")


def cached(module: torch.nn.Module) -> CachedDecoder:
    """Return a module as a decoder with a cache. Raises LnrewriteError LN504 with the reason where it is none."""
    name = type(module).__name__
    check_cached(module)
    if two_parts(module):
        raise no_cache(name, "it has an encoder and a decoder", "name a folder as OUT, which holds both, or give "
                       "--no-kv-cache")  # fmt: skip
    model: Any = module
    try:
        with torch.no_grad(), evaluating(model):
            out = model(input_ids=torch.ones(1, 2, dtype=torch.int64, device=model.device), use_cache=True)
    except Exception as error:  # a model's code may raise anything
        raise no_cache(name, f"it does not run on two tokens alone: {told(error)}") from error
    cache = getattr(out, PAST, None)
    check_layers(name, cache)
    takes: Interface = {"input_ids": (BATCH, NEW), "attention_mask": (BATCH, TOTAL)}
    if "position_ids" in inspect.signature(module.forward).parameters:
        takes["position_ids"] = (BATCH, NEW)
    vocabulary = int(out.logits.shape[-1])
    gives: Interface = {"logits": (BATCH, NEW, vocabulary)}
    for n, held in enumerate(held_in(cache)):
        name, heads, size = f"{n // 2}.{SIDES[n % 2]}", int(held.shape[1]), int(held.shape[3])
        takes[f"{PAST}.{name}"] = (BATCH, heads, BEFORE, size)
        gives[f"{PRESENT}.{name}"] = (BATCH, heads, TOTAL, size)
    return CachedDecoder(model, takes, gives, vocabulary)
