"""Heal a checkpoint folder: folders in, a folder out, which is the student's with the weights that were trained."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..backends.inputs import Tensors
from ..backends.torch.capture import evaluating, from_program
from ..data.corpus import Ready
from ..data.infer import given_inputs, infer_inputs
from ..errors import Code, LnrewriteError
from ..files.output import check_folder, named_path
from ..healing.config import HealingConfig
from ..healing.living import PIPELINE, compare, device_of
from ..healing.opening import tokenizer_named
from ..healing.pairing import unlike
from ..healing.session import Healed, heal
from ..live.undoing import RECORD
from ..loading.identify import identify
from ..loading.open import Opened, open_module
from ..loading.source import Format, Source
from ..loading.transformers import Tokenizer
from ..models.program import Program
from ..quiet import LOGGER
from .folders import check_ties
from .writing import Done, Weights, check_room, write_checked

PACKED = (".jsonl", ".parquet", ".bin")
"""How the names of files end that may hold many documents, beside .npy."""


@dataclass(frozen=True)
class FolderOutput:
    """Write a healed module as a folder: that of `source`, whose structure it has or was given by a healing.

    weights: where the folder holds each parameter, as it was opened.
    """

    target: Path
    source: Source
    weights: Weights | None
    force: bool

    def write(self, healed: Program, module: nn.Module, batches: Sequence[Tensors]) -> None:
        """Write the folder whole or not at all: opened again, it is compared with the healed program before it lands.

        Raises LnrewriteError LN025, LN310, LN313.
        """
        logs = vars(module).get(RECORD, [])

        def check(folder: Path) -> None:
            again = open_module(identify(str(folder), self.source.how)).module
            assert again is not None
            check_ties(self.source, module, again)
            compare(again.to(device_of(healed)), healed, batches)

        changes = [change for log in logs for change in log.recipe]
        done = Done.in_memory(module, changes, self.weights, check)
        write_checked(self.target, self.source.file, done, PIPELINE, self.force)

    def __str__(self) -> str:
        return str(self.target)


def heal_folder(
    teacher: Source,
    student: Source,
    data: str,
    config: HealingConfig,
    output: str | os.PathLike[str],
    *,
    tokenizer: str | None = None,
    force: bool = False,
    **how: Any,
) -> Healed:
    """Heal a student that is a transformers folder, and write a folder: its own files, with the trained weights.

    Where norms move by degrees (`progressive`) the healed network has the structure that the teacher's gets, and the
    folder is the teacher's, rewritten. Text is read with the teacher's tokenizer, else the student's. All else is as
    `lnr.heal` takes it. Raises what that and opening the folders raise, LnrewriteError LN025, LN310, LN313 for OUT.
    """
    target = check_folder(output, student.file, force)
    check_room(target, student.file)
    reads = tokenizer_named(tokenizer)
    origin = teacher if config.progressive else student
    if origin.format is not Format.TRANSFORMERS:
        why = "the healed network has the structure of the teacher, which is not a transformers folder"
        remedy = "give the teacher's folder, heal without --progressive, or name a .pt2 file as OUT"
        raise LnrewriteError(Code.LN602, f"model {teacher.name!r}", why, remedy)
    first, second = (_opened(source) for source in (teacher, student))
    assert second.module is not None
    reads = reads or first.tokenizer or second.tokenizer
    model: Program | nn.Module | None = first.module
    if first.program is not None:
        model = Program(from_program(first.program), format=first.kind)
    assert model is not None
    named = [name for name in (data, how.get("held_out")) if name]
    given = model.example_inputs() if isinstance(model, Program) else _inputs(second.module, student, named, reads)
    _check_takes(model, given)
    base = first.module if config.progressive else second.module
    assert base is not None
    into = FolderOutput(target, origin, Weights.read(origin.file, base), force)
    found = heal(model, second.module, data, config, output=into, tokenizer=reads, kwargs=given, **how)
    notes = dict.fromkeys((*first.notes, *second.notes, *found.report.notes))
    return replace(found, report=replace(found.report, notes=tuple(notes)))


def _opened(source: Source) -> Opened:
    LOGGER.info(f"loading {source.name}")
    return open_module(source)


def _inputs(
    module: nn.Module, source: Source, data: Sequence[str], tokenizer: Tokenizer | Ready | None
) -> Mapping[str, object]:
    """Return what both networks are captured with: as specified, else inferred.

    Documents get what keeps them apart: positions, or the mask of an encoder, whose rows are padded.
    """
    if (given := given_inputs(module, source.how)) is not None:
        return given.kwargs
    found: Mapping[str, object] = infer_inputs(module, source.how.seed).kwargs
    ids = found.get("input_ids")
    if len(found) != 1 or not isinstance(ids, torch.Tensor) or not all(map(_packed, data)):
        return found
    encoder = _encodes(tokenizer)
    name = "attention_mask" if encoder else "position_ids"
    more = torch.ones_like(ids) if encoder else torch.arange(ids.shape[1]).expand_as(ids).clone()
    if name not in inspect.signature(module.forward).parameters:
        return found
    try:
        with evaluating(module), torch.no_grad():
            module(**found, **{name: more})
    except Exception:  # its own code, which may take it in another form
        return found
    return {**found, name: more}


def _check_takes(teacher: nn.Module | Program, given: Mapping[str, object]) -> None:
    """Raise LnrewriteError LN601 where a teacher has no inputs of the student's names."""
    takes = {} if isinstance(teacher, Program) else inspect.signature(teacher.forward).parameters
    if takes and not any(p.kind is p.VAR_KEYWORD for p in takes.values()) and (other := sorted(given.keys() - takes)):
        why = f"it takes {', '.join(given)}, and the teacher no {', '.join(other)}"
        raise unlike(why)


def _encodes(tokenizer: Tokenizer | Ready | None) -> bool:
    """Return whether a tokenizer is one of an encoder; one that cannot be loaded is told where text is read."""
    try:
        return tokenizer is not None and tokenizer.load().cls_token_id is not None
    except Exception:
        return False


def _packed(data: str) -> bool:
    """Return whether DATA may hold many documents: .jsonl, .parquet, or one long run of tokens."""
    path = named_path(data)
    if path.suffix != ".npy":
        return path.suffix in PACKED
    try:
        return len(np.load(path, mmap_mode="r", allow_pickle=False).shape) == 1
    except (OSError, ValueError):  # told where it is read
        return False
