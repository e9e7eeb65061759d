"""A folder whose weights stay on the disk: its network without them, where they are, and what is captured of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import Self

import torch
from torch import nn

from ..backends.torch.capture import capture_module
from ..backends.torch.dynamic import Shapes
from ..backends.torch.module import stored
from ..data.infer import given_inputs, infer_inputs
from ..errors import Code, LnrewriteError
from ..live.ports import children
from ..loading.checkpoint import empty_model
from ..loading.identify import listed
from ..loading.source import Format, Source
from ..loading.transformers import Tokenizer, tokenizer_in
from ..models.checks import check_values
from ..quiet import LOGGER
from .shards import Stored
from .stored import Store
from .streaming import StoredProgram
from .writing import Weights, held_by

LARGE = 1 << 30
"""Of a folder with more bytes of weights these are read part by part, also where a model is run on data."""


def is_large(source: Source) -> bool:
    """Return whether a folder's weights stay on disk when its model is run."""
    return sum(path.stat().st_size for path in source.file.glob("*.safetensors")) > LARGE


@dataclass(frozen=True)
class Kept:
    """Hold a folder's network on the meta device, and where its weights are.

    dtype: that of the network, whatever the folder stores.
    """

    source: Source
    module: nn.Module
    weights: Weights
    store: Store
    dtype: torch.dtype

    @classmethod
    def open(cls, source: Source, dtype: torch.dtype | None = None, takes: Collection[torch.dtype] = ()) -> Self | None:
        """Look at a folder; None where it does not hold its weights as the network names them.

        dtype: of the network, None takes that of the largest weight. takes: None too for a weight of another dtype.
        """
        paths = sorted(source.file.glob("*.safetensors"))
        if not paths:
            return None
        kind = dtype or _dtype(held_by(paths[0]))
        module = empty_model(source, kind)
        if dtype is not None:
            module.to(dtype)
        weights = Weights.read(source.file, module)
        if weights is None:
            return None
        files = {name: weights.files[key] for name, key in weights.keys.items()}
        if takes and any(where.dtype not in takes for where in files.values()):
            return None
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        return cls(source, module.to("meta"), weights, Store(files, buffers), kind)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Return the folder's tokenizer."""
        return tokenizer_in(self.source.file, self.source.how.trust_remote_code)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what a user should know about how the folder was opened."""
        used = {*self.weights.keys.values(), *self.module.state_dict()}
        unused = [key for key in self.weights.files if key not in used]
        what = f"weights of the checkpoint are not used by {type(self.module).__name__}"
        return (f"{len(unused)} {what}: {listed(unused)}",) if unused else ()

    def program(self, given: Mapping[str, object], shapes: Shapes = None, called: bool = False) -> StoredProgram | None:
        """Capture the network; None where it makes tensors that only a network with weights could tell.

        shapes: what is dynamic, as `capture_module` takes it. called: note what its children are called with, for who
        carries changes over to them. Raises as `capture_module`.
        """
        module = self.module
        on_meta = {n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in given.items()}
        taken = capture_module(module, (), on_meta, shapes, (lambda a, k: children(module, a, k)) if called else None)
        found = StoredProgram(taken, self.store, format=self.source.format, tokenizer=self.tokenizer)
        for name in {str(n.target) for n in taken.module.graph.find_nodes(op="get_attr")}:
            held, first = stored(taken.module, name), found.names.get(name, name)
            there = first in self.store.files
            if held is None or not held.is_meta or (there and isinstance(held, torch.nn.Parameter)):
                continue
            if not there and first not in self.store.held:
                return None
            path, _, leaf = name.rpartition(".")
            setattr(taken.module.get_submodule(path), leaf, self.store.read(first).to(held.dtype))  # buffers are small
        return found


def _dtype(files: Mapping[str, Stored]) -> torch.dtype:
    """Return the dtype of the largest tensor of floating point numbers."""
    floats = [where for where in files.values() if where.dtype.is_floating_point]
    return max(floats, key=lambda where: prod(where.shape)).dtype if floats else torch.float32


def on_disk(source: Source, shapes: Shapes) -> tuple[Kept, StoredProgram] | None:
    """Capture a folder's model without its weights; None as `Kept.open` and `Kept.program`.

    shapes: what is dynamic, as `capture_module` takes it; None finds out, and gives None where the model cannot be
    captured without its weights. Raises LnrewriteError LN024 where a weight is NaN or infinite, and what capturing
    raises.
    """
    held = Kept.open(source)
    if held is None:
        return None
    LOGGER.info("checking the weights")
    for name, where in held.store.files.items():
        check_values(name, where.rows())
    try:
        inputs = (given_inputs(held.module, source.how) or infer_inputs(held.module, source.how.seed)).kwargs
        program = held.program(inputs, shapes, called=True)
    except LnrewriteError as error:
        if shapes is None and error.code in (Code.LN020, Code.LN023):  # with its weights it may run, and be captured
            return None
        raise
    return None if program is None else (held, program)


def stored_program(source: Source) -> StoredProgram | None:
    """Capture a large folder's model with its weights on disk; None for all else, and for what runs in memory alone.

    That is what chooses its path by its data. Raises as `on_disk`.
    """
    how = source.how
    if source.format is not Format.TRANSFORMERS or how.factory or how.device != "cpu" or not is_large(source):
        return None
    held = on_disk(source, None)
    return None if held is None or held[1].fixed_paths else held[1]
