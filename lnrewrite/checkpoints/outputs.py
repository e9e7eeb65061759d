"""Write what was healed as a folder: from a module in memory, or one parameter at a time from all processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..backends.inputs import Tensors
from ..backends.torch.lift import parameter_names
from ..compat.torch import pytree
from ..healing.living import PIPELINE, compare, device_of
from ..healing.participant import Participant
from ..live.undoing import RECORD
from ..loading.checkpoint import empty_model
from ..loading.identify import identify
from ..loading.open import open_module
from ..loading.source import Source
from ..models.program import Program
from .folders import check_ties, compared, from_disk, not_as_planned
from .kept import Kept
from .writing import Done, Weights, write_checked

ROWS = 2
"""Rows on which what was written is compared with what was healed."""


@dataclass(frozen=True)
class FolderOutput:
    """Write a healed module as a folder: that of `source`, whose structure it has or was given by a healing.

    weights: where the folder holds each parameter, as it was opened.
    """

    target: Path
    source: Source
    weights: Weights | None
    force: bool

    def write(self, healed: Participant, program: Program, module: nn.Module, batches: Sequence[Tensors]) -> None:
        """Write the folder whole or not at all: opened again, it is compared with the healed program before it lands.

        Raises LnrewriteError LN025, LN310, LN313.
        """
        if not healed.world.first:
            return
        logs = vars(module).get(RECORD, [])

        def check(folder: Path) -> None:
            again = open_module(identify(str(folder), self.source.how)).module
            assert again is not None
            check_ties(self.source, module, again)
            compare(again.to(device_of(program)), program, batches)

        changes = [change for log in logs for change in log.recipe]
        done = Done.in_memory(module, changes, self.weights, check)
        write_checked(self.target, self.source.file, done, PIPELINE, self.force)

    def __str__(self) -> str:
        return str(self.target)


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
