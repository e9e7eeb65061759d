"""Models of transformers in the parts that are served: captured programs that are exported as they generate."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from ..backends.running import Runnable
from ..backends.torch.cached import CachedDecoder, cached, two_parts
from ..backends.torch.crossed import ENCODER, LATER, crossed
from ..backends.torch.module import CapturedModule
from ..backends.torch.pictured import EMBEDDING, TEXT, VISION, pictured, sees
from ..backends.torch.served import Flat, Part, no_cache
from ..backends.torch.widened import HALVES
from ..comparison.generating import SAMPLE, Across, Alone, Seeing, Speaker, generated
from ..compat.transformers import config_of
from ..data.infer import infer_inputs, pictures_for
from ..errors import Code, LnrewriteError
from ..pipeline.protocols import Batch
from .checks import check_finite
from .program import Program

if TYPE_CHECKING:
    import onnx_ir as ir

    from ..loading.transformers import Tokenizer

POSITIONS = 2048
"""How many positions a model knows whose config does not say it."""


class Served(Program):
    """Hold a captured part of a model. It is run, where it judges, as the module it was."""

    def __init__(
        self, part: Part, notes: Sequence[str] = (), *, format: str, tokenizer: Tokenizer | None = None
    ) -> None:
        super().__init__(part.capture(), format=format, tokenizer=tokenizer)
        self.part, self.told = part, tuple(notes)
        self.dropped: set[str] = set()  # inputs that what was exported last does not take

    def call(self, batch: Batch) -> Flat:
        """Return what the model itself gives for a call by flat names."""
        assert isinstance(batch, Mapping)
        return self.part(batch)

    def trials(self, seed: int) -> Sequence[Batch]:
        """Return calls of each kind, with what the exported part takes."""
        calls = self.part.trials(seed)
        return [{name: tensor for name, tensor in call.items() if name not in self.dropped} for call in calls]

    def to_onnx(self, opset: int | None = None, *, kernels: Collection[str] = ()) -> ir.Model:
        """Return the model in ONNX, with attention as those of ONNX Runtime's kernels that are named compute it."""
        from ..backends.onnx.export import OPSET, to_onnx
        from ..backends.onnx.interface import name_part
        from ..backends.onnx.tidying import tidy

        c, found = self._capture, self.detection
        prepare = partial(self.prepare, kernels=kernels)
        model = to_onnx(c.module, c.args, c.kwargs, found.norms, found.names, opset or OPSET, prepare)
        self.dropped = name_part(model, self.part)
        tidy(model)
        return model

    def prepare(self, module: CapturedModule, kernels: Collection[str]) -> None:
        """Write attention as the kernels compute it, in a copy that is translated."""
        from ..backends.onnx.caching import attend_with

        attend_with(module, kernels)


class Decoder(Served):
    """Hold a captured decoder that takes and gives its cache."""

    part: CachedDecoder
    shares = False
    """Whether the cache of what was exported last may be longer than what it holds."""

    def tried(self, candidate: Runnable, bound: float) -> Sequence[str]:
        """Generate with what was written beside the model: a padded batch, and a continuation of one row."""
        room = (self.positions - 8) * 2 // 3  # beside prompt and continuation
        return generated(Alone(self.part, candidate), bound, max(1, min(SAMPLE, room))).notes()

    @property
    def positions(self) -> int:
        """Return how many positions the model knows."""
        config = config_of(self.part.model)
        return int(getattr(config.get_text_config(), "max_position_embeddings", POSITIONS) if config else POSITIONS)

    def prepare(self, module: CapturedModule, kernels: Collection[str]) -> None:
        """Write attention over the cache as the kernels compute it, in a copy that is translated."""
        from ..backends.onnx.caching import group

        self.shares = group(module, self.positions, kernels)


class Embedder(Served):
    """Hold what puts text and pictures together."""

    def prepare(self, module: CapturedModule, kernels: Collection[str]) -> None:
        """Let image tokens without a picture stay what they are, in a copy that is translated."""
        from ..backends.onnx.scattering import scatter_what_is_there

        scatter_what_is_there(module)
        super().prepare(module, kernels)


class EmbeddedDecoder(Decoder):
    """Hold a captured decoder that takes embeddings: it generates together with what makes them alone."""

    def tried(self, candidate: Runnable, bound: float) -> Sequence[str]:
        """Return nothing: `Pictured` generates with all parts."""
        return ()


@dataclass(frozen=True, eq=False)
class InParts(ABC):
    """Hold what generates as the parts that are served, by the names of their files."""

    parts: Mapping[str, Served]
    notes: tuple[str, ...]

    @property
    def fixed_paths(self) -> tuple[str, ...]:
        """Return what the captures fixed that the model chooses by its data."""
        return tuple(dict.fromkeys(path for part in self.parts.values() for path in part.fixed_paths))

    def tried(self, files: Mapping[str, Runnable], bound: float) -> Sequence[str]:
        """Generate with what was written of all parts beside the model."""
        return generated(self.beside(files), bound, SAMPLE).notes()

    @abstractmethod
    def beside(self, files: Mapping[str, Runnable]) -> Speaker:
        """Return what generates with the model, and with files of its parts."""


class EncoderDecoder(InParts):
    """Hold an encoder and its decoder."""

    def beside(self, files: Mapping[str, Runnable]) -> Across:
        """Return what generates with the model, and with files of its parts."""
        return Across(self.parts[LATER].part, self.parts[ENCODER].part, files)


class Pictured(InParts):
    """Hold a decoder that reads pictures, what sees them and what puts text and pictures together."""

    def beside(self, files: Mapping[str, Runnable]) -> Seeing:
        """Return what generates with the model, and with files of its parts."""
        return Seeing(self.parts[TEXT].part, {name: part.part for name, part in self.parts.items()}, files)


def served(
    module: nn.Module, notes: Sequence[str] = (), *, folder: bool, tokenizer: Tokenizer | None = None, **how: Any
) -> Decoder | InParts:
    """Return a living model of transformers as it is served: in parts where it has several, and OUT is a folder.

    how: as `decoder` takes it. Raises LnrewriteError LN504, LN024.
    """
    if folder and two_parts(module):
        return encoder_decoder(module, notes, **how)
    if sees(module):
        why = "OUT is a file, and not a folder"
        try:
            if folder:
                return reads_pictures(module, notes, tokenizer=tokenizer, **how)
        except LnrewriteError as error:
            if error.code != Code.LN504:
                raise
            why = error.why
        notes = (*notes, f"it is written as it reads text, and takes no pictures: {why}")
    return decoder(module, notes, tokenizer=tokenizer, **how)


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
    found, told = _widened({"": cached(module)}, consume)
    return Decoder(found[""], (*notes, *told), format=format, tokenizer=tokenizer)


def encoder_decoder(
    module: nn.Module, notes: Sequence[str] = (), *, format: str = "module", consume: bool = False
) -> EncoderDecoder:
    """Return a living model of transformers with an encoder and a decoder in its parts; else as `decoder`."""
    check_finite(module)
    source = infer_inputs(module).kwargs.get(str(module.main_input_name))
    if source is None:
        raise no_cache(type(module).__name__, "its encoder is not called with its main input alone")
    parts, told = _widened(crossed(module, source), consume)
    return EncoderDecoder({n: Served(part, format=format) for n, part in parts.items()}, (*notes, *told))


def reads_pictures(
    module: nn.Module,
    notes: Sequence[str] = (),
    *,
    format: str = "module",
    tokenizer: Tokenizer | None = None,
    consume: bool = False,
) -> Pictured:
    """Return a living model of transformers that reads pictures in its parts; else as `decoder`."""
    check_finite(module)
    parts, told = _widened(pictured(module, pictures_for(module)), consume)
    kinds: Mapping[str, type[Served]] = {VISION: Served, EMBEDDING: Embedder, TEXT: EmbeddedDecoder}
    made = {n: kinds[n](part, format=format, tokenizer=tokenizer) for n, part in parts.items()}
    return Pictured(made, (*notes, *told))


def _widened(parts: dict[str, Part], consume: bool) -> tuple[dict[str, Part], list[str]]:
    """Return parts of a model that is held in float32, and a note where it was not."""
    first = next(iter(parts.values()))
    if first.dtype not in HALVES:
        return parts, []
    told = f"its weights are {first.dtype}: it is captured in float32".replace("torch.", "")
    model = nn.Module.float(first.model if consume else copy.deepcopy(first.model))
    return {name: replace(part, model=model) for name, part in parts.items()}, [told]
