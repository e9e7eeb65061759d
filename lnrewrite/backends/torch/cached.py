"""A decoder of transformers as it generates: called with the keys and values of the tokens before, and giving all.

    input_ids [b, s], attention_mask [b, p + s], position_ids [b, s], past_key_values.N.key/value [b, heads, p, size]
        -> logits [b, s, vocabulary], present.N.key/value [b, heads, p + s, size]

p may be 0: a prompt. Layers with a sliding window keep all their keys here; their masks hide what lies before it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.export import Dim

from ...compat.exporters import NEEDED, fits, traced
from ...compat.transformers import config_of
from ...errors import Code, LnrewriteError, told
from .capture import Capture, evaluating, quiet
from .module import unlift

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PAST, PRESENT = "past_key_values", "present"
SIDES = ("key", "value")
Flat = dict[str, Tensor]
"""Tensors by the names that ONNX models of decoders give them."""


@dataclass(frozen=True, eq=False)
class CachedDecoder:
    """Call a decoder with a flat cache.

    heads: (number, size) of the heads of each tensor of the cache, keys and values in turns. positions: whether the
    model takes position_ids. vocabulary: how many tokens it knows.
    """

    model: PreTrainedModel
    heads: tuple[tuple[int, int], ...]
    positions: bool
    vocabulary: int

    @property
    def cache(self) -> tuple[str, ...]:
        """Return the names of the cache's tensors, without what they begin with."""
        return tuple(f"{n // 2}.{SIDES[n % 2]}" for n in range(len(self.heads)))

    @property
    def dtype(self) -> torch.dtype:
        """Return the type that the model computes in."""
        found: torch.dtype = self.model.dtype
        return found

    def inputs(self, batch: int, new: int, past: int, seed: int = 0) -> Flat:
        """Make up a call for `new` tokens after `past` others, none of them padding."""
        draw = torch.Generator().manual_seed(seed)
        taken = {"input_ids": torch.randint(0, self.vocabulary, (batch, new), generator=draw)}
        taken["attention_mask"] = torch.ones(batch, past + new, dtype=torch.int64)
        if self.positions:
            taken["position_ids"] = torch.arange(past, past + new).expand(batch, -1).contiguous()
        for name, (heads, size) in zip(self.cache, self.heads, strict=True):
            held = torch.randn(batch, heads, past, size, generator=draw)
            taken[f"{PAST}.{name}"] = held.to(self.dtype)
        return taken

    def __call__(self, flat: Mapping[str, Tensor]) -> Flat:
        """Run the model itself."""
        with torch.no_grad(), evaluating(self.model):
            return self.forward(**nested(flat))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, past: Sequence[Tensor], position_ids: Tensor | None = None
    ) -> Flat:
        """Call the model's forward with a cache that holds `past`, and return its logits and the cache after it."""
        from transformers.cache_utils import DynamicCache, DynamicLayer

        cache = DynamicCache()
        for key, value in zip(past[::2], past[1::2], strict=True):
            layer = DynamicLayer()
            layer.keys, layer.values, layer.is_initialized = key, value, True
            layer.dtype, layer.device = key.dtype, key.device
            cache.layers.append(layer)
        where = {} if position_ids is None else {"position_ids": position_ids}
        out = self.model.forward(
            input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True, **where
        )
        layers: list[Any] = cache.layers
        held = [t for layer in layers for t in (layer.keys, layer.values)]
        return {"logits": out.logits, **{f"{PRESENT}.{n}": t for n, t in zip(self.cache, held, strict=True)}}

    def capture(self) -> Capture:
        """Capture the model with its cache, every batch, length and past free. Raises LnrewriteError LN023."""
        batch, new, past = 2, 3, 5
        example = nested(self.inputs(batch, new, past))
        free: dict[str, Any] = {name: {0: Dim.AUTO, 1: Dim.AUTO} for name in example}
        free["past"] = [{0: Dim.AUTO, 2: Dim.AUTO} for _ in self.heads]
        try:
            with evaluating(self.model), quiet():
                module = unlift(traced(self.model, self.forward, example, free), ())
        except Exception as error:  # a model's code may raise anything when it is traced
            raise _no_cache(type(self.model).__name__, f"it cannot be traced with its cache: {told(error)}") from error
        return Capture(module, (), {name: example[name] for name in module.signature.keywords})


def nested(flat: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the arguments of `CachedDecoder.forward` for tensors by their flat names."""
    past = [tensor for name, tensor in flat.items() if name.startswith(f"{PAST}.")]
    return {**{n: t for n, t in flat.items() if not n.startswith(f"{PAST}.")}, "past": past}


def generates(module: torch.nn.Module) -> bool:
    """Return whether a module is a model of transformers that generates text."""
    return config_of(module) is not None and bool(getattr(module, "can_generate", bool)())


def cached(module: torch.nn.Module) -> CachedDecoder:
    """Return a module as a decoder with a cache. Raises LnrewriteError LN504 with the reason where it is none."""
    name, config = type(module).__name__, config_of(module)
    takes = inspect.signature(module.forward).parameters
    if config is None or not generates(module) or "past_key_values" not in takes:
        raise _no_cache(name, "it is not a model of transformers that generates text with a cache")
    if getattr(config, "is_encoder_decoder", False):
        raise _no_cache(name, "it has an encoder and a decoder")
    if not fits():
        raise _no_cache(name, f"its cache is traced with {NEEDED}, and another version is installed")
    model: Any = module
    try:
        with torch.no_grad(), evaluating(model):
            out = model(input_ids=torch.ones(1, 2, dtype=torch.int64, device=model.device), use_cache=True)
    except Exception as error:  # a model's code may raise anything
        raise _no_cache(name, f"it does not run on two tokens alone: {told(error)}") from error
    layers = getattr(getattr(out, PAST, None), "layers", ())
    odd = sorted({type(layer).__name__ for layer in layers} - {"DynamicLayer", "DynamicSlidingWindowLayer"})
    if odd or not layers:
        raise _no_cache(name, f"its cache holds more than keys and values ({', '.join(odd) or 'it gives none'})")
    held = [t for layer in layers for t in (layer.keys, layer.values)]
    heads = tuple((int(t.shape[1]), int(t.shape[3])) for t in held)
    return CachedDecoder(model, heads, "position_ids" in takes, int(out.logits.shape[-1]))


def _no_cache(name: str, why: str) -> LnrewriteError:
    return LnrewriteError(Code.LN504, name, why, "export it without a cache: --no-kv-cache (kv_cache=False)")
