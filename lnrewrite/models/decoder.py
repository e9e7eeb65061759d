"""A decoder of transformers with its cache: a captured model that is exported as it generates."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from ..backends.running import Runnable
from ..backends.torch.cached import CachedDecoder, Flat, cached
from ..backends.torch.module import CapturedModule
from ..backends.torch.widened import HALVES
from ..comparison.generating import SAMPLE, generated
from ..compat.transformers import config_of
from ..pipeline.protocols import Batch
from .program import Program, check_finite

if TYPE_CHECKING:
    import onnx_ir as ir

    from ..loading.transformers import Tokenizer

POSITIONS = 2048
"""How many positions a model knows whose config does not say it."""


class Decoder(Program):
    """Hold a captured decoder that takes and gives its cache. It is run, where it judges, as the module it was."""

    def __init__(
        self, decoder: CachedDecoder, notes: Sequence[str] = (), *, format: str, tokenizer: Tokenizer | None = None
    ) -> None:
        super().__init__(decoder.capture(), format=format, tokenizer=tokenizer)
        self.decoder, self.told = decoder, tuple(notes)
        self.dropped: set[str] = set()  # inputs that what was exported last does not take
        self.shares = False  # whether its cache may be longer than what it holds

    def call(self, batch: Batch) -> Flat:
        """Return what the model itself gives for a call by flat names."""
        assert isinstance(batch, Mapping)
        return self.decoder(batch)

    def trials(self, seed: int) -> Sequence[Batch]:
        """Return calls of the three kinds: two prompts, one token more for two, several more for one."""
        calls = [self.decoder.inputs(*sizes, seed) for sizes in ((2, 5, 0), (2, 1, 4), (1, 3, 4))]
        return [{name: tensor for name, tensor in call.items() if name not in self.dropped} for call in calls]

    def tried(self, candidate: Runnable, bound: float) -> Sequence[str]:
        """Generate with what was written beside the model: a padded batch, and a continuation of one row."""
        return generated(self.decoder, candidate, bound, SAMPLE).notes()

    @property
    def positions(self) -> int:
        """Return how many positions the model knows."""
        config = config_of(self.decoder.model)
        return int(getattr(config.get_text_config(), "max_position_embeddings", POSITIONS) if config else POSITIONS)

    def to_onnx(self, opset: int | None = None, *, contrib: bool = False) -> ir.Model:
        """Return the model in ONNX, with attention over the cache as ONNX Runtime has it where `contrib` allows."""
        from ..backends.onnx.caching import group
        from ..backends.onnx.export import OPSET, to_onnx
        from ..backends.onnx.interface import name_cache
        from ..backends.onnx.packing import pack_heads, turn_weights

        c, found = self._capture, self.detection

        def prepare(module: CapturedModule) -> None:
            self.shares = contrib and group(module, self.positions)

        model = to_onnx(c.module, c.args, c.kwargs, found.norms, found.names, opset or OPSET, prepare)
        self.dropped = name_cache(model, self.decoder.cache)
        turn_weights(model)
        pack_heads(model)
        return model


def decoder(
    module: nn.Module,
    notes: Sequence[str] = (),
    *,
    format: str = "module",
    tokenizer: Tokenizer | None = None,
    consume: bool = False,
) -> Decoder:
    """Return a living model of transformers as a decoder with its cache, in float32 where it is held in half precision.

    What type is written is for the export to say. consume: the module may be changed for it; else a copy is. Raises
    LnrewriteError LN504, LN024.
    """
    check_finite(module)
    found = cached(module)
    if found.dtype in HALVES:
        model = found.model if consume else copy.deepcopy(found.model)
        notes = (*notes, f"its weights are {found.dtype}: it is captured in float32".replace("torch.", ""))
        found = replace(found, model=nn.Module.float(model))
    return Decoder(found, notes, format=format, tokenizer=tokenizer)
