"""A folder whose weights stay on the disk while its network is healed: each process reads its part, one writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import nn

from ..backends.inputs import Tensors
from ..backends.torch.capture import capture_module
from ..backends.torch.lift import parameter_names
from ..backends.torch.module import stored
from ..compat.torch import pytree
from ..healing.living import PIPELINE
from ..healing.participant import Participant
from ..loading.checkpoint import empty_model
from ..loading.identify import identify, listed
from ..loading.source import Source
from ..loading.transformers import Tokenizer, tokenizer_in
from ..models.program import Program
from .folders import check_ties, compared, from_disk, not_as_planned
from .stored import Store
from .streaming import StoredProgram
from .writing import Done, Weights, write_checked

WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float32}
"""What is trained for each dtype of a folder that can be kept on the disk."""

ROWS = 2
"""Rows on which what was written is compared with what was healed."""


@dataclass(frozen=True)
class Kept:
    """Hold a folder's network without its weights, in float32, whatever the folder stores."""

    source: Source
    module: nn.Module
    weights: Weights
    store: Store

    @classmethod
    def open(cls, source: Source) -> Self | None:
        """Look at a folder; None where it does not hold floating point weights as the network names them."""
        if not any(source.file.glob("*.safetensors")):
            return None
        module = empty_model(source, torch.float32).float()
        weights = Weights.read(source.file, module)
        if weights is None or any(weights.files[key].dtype not in WIDE for key in weights.keys.values()):
            return None
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        files = {name: weights.files[key] for name, key in weights.keys.items()}
        return cls(source, module.to("meta"), weights, Store(files, buffers))

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

    def program(self, given: Mapping[str, object]) -> StoredProgram | None:
        """Capture the network; None where it makes tensors that only a network with weights could tell."""
        on_meta = {n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in given.items()}
        taken = capture_module(self.module, (), on_meta)
        for node in taken.module.graph.find_nodes(op="get_attr"):
            held = stored(taken.module, str(node.target))
            if held is None or isinstance(held, nn.Parameter) or not held.is_meta:
                continue
            if (real := self.store.held.get(str(node.target))) is None:
                return None
            path, _, leaf = str(node.target).rpartition(".")
            setattr(taken.module.get_submodule(path), leaf, real)
        return StoredProgram(taken, self.store, format=self.source.format, tokenizer=self.tokenizer)


@dataclass(frozen=True)
class KeptOutput:
    """Write what was healed as the folder it came from, one parameter at a time, in the dtype that it was stored in."""

    target: Path
    kept: Kept
    force: bool

    def write(self, healed: Participant, program: Program, module: nn.Module, batches: Sequence[Tensors]) -> None:
        """Write the folder whole or not at all: what was written is compared with what was trained before it lands.

        Raises LnrewriteError LN025, LN313.
        """
        given = {name: tensor[:ROWS] for name, tensor in batches[0].items()}
        wanted = healed.outputs(given)
        healed.help(lambda: self._write(healed, given, wanted))

    def _write(self, healed: Participant, given: Tensors, wanted: object) -> None:
        source, store = self.kept.source, self.kept.store

        def read(name: str) -> Iterable[torch.Tensor]:
            if (first := healed.view.first(name)) is None:
                return store.pieces(name)
            return [healed.whole(first).to(store.form(name)[0]).cpu()]

        def check(folder: Path) -> None:
            again = empty_model(identify(str(folder), source.how), torch.float32)
            written = Weights.read(folder, again)
            if written is None:
                raise not_as_planned(source, "the written folder lacks weights that the network has")
            check_ties(source, self.kept.module, again)
            files = {name: written.files[key] for name, key in written.keys.items()}
            names = parameter_names(healed.program.module())
            for name in healed.named:
                if not torch.equal(files[names[name]].read(), *read(name)):
                    raise not_as_planned(source, f"loaded again, {name} is not what was trained")
            found = from_disk(healed.program.module(), lambda name: files[names[name]].read().float(), given)
            elsewhere = healed.bf16 or healed.world.device.type != "cpu"
            compared(source, pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, wanted), found, elsewhere=elsewhere)

        write_checked(
            self.target,
            source.file,
            Done(self.kept.module, [], self.kept.weights, read, store.form, check),
            PIPELINE,
            self.force,
        )

    def __str__(self) -> str:
        return str(self.target)
