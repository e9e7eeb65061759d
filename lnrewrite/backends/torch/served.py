"""A part of a model of transformers that is served alone: called with tensors by flat names, it gives tensors by such.

What servers of ONNX models know a part by is data: its inputs and outputs, each with its axes, a number or a name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.export import Dim

from ...compat.exporters import traced
from ...errors import Code, LnrewriteError, told
from .capture import Capture
from .contexts import evaluating, quiet
from .fixed import on_any_path
from .module import CapturedModule, signature_of, unlift

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import DynamicCache

PAST, PRESENT = "past_key_values", "present"
SIDES = ("key", "value")
BATCH, NEW, BEFORE, TOTAL = "batch_size", "sequence_length", "past_sequence_length", "total_sequence_length"
SOURCE = "encoder_sequence_length"

Flat = dict[str, Tensor]
"""Tensors by the names that ONNX models give them."""
Axes = tuple[int | str, ...]
"""The size of each axis, or its name where it is free."""
Interface = dict[str, Axes]
"""What a model takes or gives, in order; tensors of a cache stand last."""
Sizes = Mapping[str, int]


@dataclass(frozen=True, eq=False)
class Part(ABC):
    """Call a part of a model by flat names; a subclass says what the part does.

    vocabulary: how many tokens `input_ids` may name.
    """

    model: PreTrainedModel
    takes: Interface
    gives: Interface
    vocabulary: int

    @abstractmethod
    def forward(self, past: Sequence[Tensor] = (), **given: Any) -> Flat:
        """Run the part on tensors by name, those of its cache in `past`."""

    @property
    @abstractmethod
    def kinds(self) -> Sequence[Sizes]:
        """Return the sizes of the calls that the part is tried on."""

    @property
    def example(self) -> Sizes:
        """Return the sizes of the call that is captured: no two of them alike, none of them 1."""
        return sizes_of(2, 3, 5, 7)

    @property
    def dtype(self) -> torch.dtype:
        """Return the type that the model computes in."""
        found: torch.dtype = self.model.dtype
        return found

    def inputs(self, sizes: Sizes, seed: int = 0) -> Flat:
        """Make up a call in which nothing is padding."""
        draw = torch.Generator().manual_seed(seed)

        def made(name: str, shape: list[int]) -> Tensor:
            if name == "input_ids":
                return torch.randint(0, self.vocabulary, shape, generator=draw)
            if name == "position_ids":
                return torch.arange(sizes[BEFORE], sizes[TOTAL]).expand(shape).contiguous()
            if name.endswith("mask"):
                return torch.ones(shape, dtype=torch.int64)
            return torch.randn(shape, generator=draw).to(self.dtype)

        return {name: made(name, sized(axes, sizes)) for name, axes in self.takes.items()}

    def trials(self, seed: int) -> list[Flat]:
        """Make up calls of every kind."""
        return [self.inputs(sizes, seed) for sizes in self.kinds]

    def __call__(self, flat: Mapping[str, Tensor]) -> Flat:
        """Run the model itself."""
        with torch.no_grad(), evaluating(self.model):
            return self.forward(**nested(flat))

    def capture(self) -> Capture:
        """Capture the part, every named axis free. Raises LnrewriteError LN504."""
        example = nested(self.inputs(self.example))
        free: dict[str, Any] = {name: _free(axes) for name, axes in self.takes.items() if not is_past(name)}
        if "past" in example:
            free["past"] = [_free(axes) for name, axes in self.takes.items() if is_past(name)]

        def trace() -> CapturedModule:
            return unlift(traced(self.model, self.forward, example, free), ())

        try:
            with evaluating(self.model), quiet():
                module = on_any_path(trace, self.forward, example)
        except Exception as error:  # a model's code may raise anything when it is traced
            raise no_cache(type(self.model).__name__, f"it cannot be traced with its cache: {told(error)}") from error
        return Capture(module, (), {name: example[name] for name in signature_of(module).keywords})


def sizes_of(batch: int, new: int, past: int = 0, source: int = 6) -> Sizes:
    """Return the sizes of a call for `new` tokens after `past` others, and so many of an encoder."""
    return {BATCH: batch, NEW: new, BEFORE: past, TOTAL: past + new, SOURCE: source}


def sized(axes: Axes, sizes: Sizes) -> list[int]:
    """Return a shape with numbers for the names."""
    return [axis if isinstance(axis, int) else sizes[axis] for axis in axes]


def _free(axes: Axes) -> dict[int, Any]:
    return {i: Dim.AUTO for i, axis in enumerate(axes) if isinstance(axis, str)}


def is_past(name: str) -> bool:
    """Return whether an input holds keys or values of the tokens before."""
    return name.startswith(f"{PAST}.")


def nested(flat: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the arguments of `Part.forward` for tensors by their flat names."""
    past = [tensor for name, tensor in flat.items() if is_past(name)]
    rest = {name: tensor for name, tensor in flat.items() if not is_past(name)}
    return {**rest, "past": past} if past else rest


def going_round(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a call gave of its cache as the next call takes it: `present.*` as `past_key_values.*`."""
    return {n.replace(PRESENT, PAST, 1): value for n, value in given.items() if n.startswith(f"{PRESENT}.")}


def cache_of(past: Sequence[Tensor]) -> DynamicCache:
    """Return a cache of transformers that holds keys and values, in turns."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    cache = DynamicCache()
    for key, value in zip(past[::2], past[1::2], strict=True):
        layer = DynamicLayer()
        layer.keys, layer.values, layer.is_initialized = key, value, True
        layer.dtype, layer.device = key.dtype, key.device
        cache.layers.append(layer)
    return cache


def held_in(cache: object) -> Iterator[Tensor]:
    """Yield the keys and values of a cache of transformers, in turns."""
    for layer in getattr(cache, "layers", ()):
        yield from (layer.keys, layer.values)


def check_layers(name: str, *caches: object) -> None:
    """Raise LnrewriteError LN504 where a cache holds anything but keys and values."""
    layers = [layer for cache in caches for layer in getattr(cache, "layers", ())]
    odd = sorted({type(layer).__name__ for layer in layers} - {"DynamicLayer", "DynamicSlidingWindowLayer"})
    if odd or not layers:
        raise no_cache(name, f"its cache holds more than keys and values ({', '.join(odd) or 'it gives none'})")


def no_cache(name: str, why: str, remedy: str = "") -> LnrewriteError:
    """Return the error for a model that cannot be written with its cache."""
    return LnrewriteError(Code.LN504, name, why, remedy or "export it without a cache: --no-kv-cache (kv_cache=False)")
