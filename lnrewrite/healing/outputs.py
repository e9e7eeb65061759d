"""Where a healed model is written: looked at before the training, written before its checkpoints are dropped."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import nn

from ..backends.inputs import Tensors
from ..files.output import check_output
from ..models.program import Program
from .participant import Participant


class Output(Protocol):
    """Describe what writes a healed model; `str()` says where."""

    def write(self, healed: Participant, program: Program, module: nn.Module, batches: Sequence[Tensors]) -> None:
        """Write a healed network: as it was trained, as a program, or as the module that computes the same.

        `batches` are held-out inputs to compare by. All processes call this, and the first one writes.
        """


@dataclass(frozen=True)
class FileOutput:
    """Write a program to a .pt2 or .onnx file."""

    path: Path
    force: bool

    def write(self, healed: Participant, program: Program, module: nn.Module, batches: Sequence[Tensors]) -> None:
        """Write the program. Raises LnrewriteError as `Program.save`."""
        if healed.world.first:
            program.save(self.path, force=self.force)

    def __str__(self) -> str:
        return str(self.path)


def output_named(given: str | os.PathLike[str] | Output | None, force: bool) -> Output | None:
    """Return what writes to a path, or what was given. Raises LnrewriteError LN025 where nothing can be written."""
    if isinstance(given, str | os.PathLike):
        return FileOutput(check_output(given, force), force)
    return given
