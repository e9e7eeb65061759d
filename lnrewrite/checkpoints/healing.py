"""Heal a checkpoint folder: folders in, a folder out, which is the student's with the weights that were trained."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..backends.torch.capture import from_program
from ..backends.torch.contexts import evaluating
from ..data.corpus import Ready
from ..data.infer import given_inputs, infer_inputs
from ..errors import Code, LnrewriteError
from ..files.output import check_folder, named_path
from ..healing.config import HealingConfig
from ..healing.opening import tokenizer_named
from ..healing.outputs import Output
from ..healing.pairing import unlike
from ..healing.session import Healed, heal
from ..loading.open import Opened, open_module
from ..loading.source import Format, Source
from ..loading.transformers import Tokenizer
from ..models.program import Program
from ..quiet import LOGGER
from .kept import Kept
from .outputs import FolderOutput, KeptOutput
from .writing import Weights, check_room

HELD = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes that are trained in float32: a folder of others is loaded whole."""

PACKED = (".jsonl", ".parquet", ".bin")
"""How the names of files end that may hold many documents, beside .npy."""


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

    Each process reads its part of both folders, and no more. Where norms move by degrees (`progressive`) the healed
    network has the structure that the teacher's gets, and the folder is the teacher's, rewritten; there, with
    `drop_final`, and of a folder that does not hold its weights as its network names them, both are loaded whole. Text
    is read with the teacher's tokenizer, else the student's. All else is as `lnr.heal` takes it.
    Raises what that and opening the folders raise, LnrewriteError LN025, LN310, LN313 for OUT.
    """
    target = check_folder(output, student.file, force, read=[] if teacher.path is None else [teacher.path])
    check_room(target, student.file)
    reads = tokenizer_named(tokenizer)
    origin = teacher if config.progressive else student
    if origin.format is not Format.TRANSFORMERS:
        why = "the healed network has the structure of the teacher, which is not a transformers folder"
        remedy = "give the teacher's folder, heal without --progressive, or name a .pt2 file as OUT"
        raise LnrewriteError(Code.LN602, f"model {teacher.name!r}", why, remedy)
    named = [name for name in (data, how.get("held_out")) if name]
    models = None if config.progressive or config.drop_final else _on_disk(teacher, student, named, reads)
    if models is None:
        models = _in_memory(teacher, student, config.progressive, named, reads)
    how |= {"tokenizer": reads or models.tokenizer, "kwargs": models.given}
    found = heal(*models.sides, data, config, output=models.writer(target, force), **how)
    notes = dict.fromkeys((*models.notes, *found.report.notes))
    return replace(found, report=replace(found.report, notes=tuple(notes)))


@dataclass(frozen=True)
class _Models:
    """Hold a teacher and a student, what writes the healed one to a folder, and what was found with them.

    given: the inputs of modules in Python, None for programs.
    """

    sides: tuple[Program | nn.Module, Program | nn.Module]
    writer: Callable[[Path, bool], Output]
    tokenizer: Tokenizer | None
    notes: tuple[str, ...]
    given: Mapping[str, object] | None = None


def _on_disk(
    teacher: Source, student: Source, data: Sequence[str], tokenizer: Tokenizer | Ready | None
) -> _Models | None:
    """Return two folders whose weights stay where they are; None where one has to be loaded to be understood."""
    if teacher.format is not Format.TRANSFORMERS:
        return None
    LOGGER.info(f"looking at {teacher.name} and {student.name}")
    first, second = (Kept.open(each, torch.float32, HELD) for each in (teacher, student))
    if first is None or second is None:
        return None
    reads = first.tokenizer or second.tokenizer
    tried = list[Program | None]()
    given = _inputs(second.module, student, data, tokenizer or reads, lambda given: tried.append(second.program(given)))
    _check_takes(first.module, given)
    one, two = first.program(given), tried[0] if tried else second.program(given)
    if one is None or two is None:
        return None
    notes = dict.fromkeys((*first.notes, *second.notes))
    return _Models((one, two), lambda target, force: KeptOutput(target, second, force), reads, tuple(notes))


def _in_memory(
    teacher: Source, student: Source, progressive: bool, data: Sequence[str], tokenizer: Tokenizer | Ready | None
) -> _Models:
    """Return two models as they are loaded, the student as a module whose structure can be changed."""
    first, second = (_opened(source) for source in (teacher, student))
    assert second.module is not None
    reads = first.tokenizer or second.tokenizer
    model: Program | nn.Module | None = first.module
    if first.program is not None:
        model = Program(from_program(first.program), format=first.kind)
    assert model is not None
    given: Mapping[str, object]
    if isinstance(model, Program):
        given = model.example_inputs()
    else:
        given = _inputs(second.module, student, data, tokenizer or reads, lambda given: _run(second.module, given))
    _check_takes(model, given)
    origin, base = (teacher, first.module) if progressive else (student, second.module)
    assert base is not None
    weights = Weights.read(origin.file, base)
    notes = dict.fromkeys((*first.notes, *second.notes))

    def writer(target: Path, force: bool) -> Output:
        return FolderOutput(target, origin, weights, force)

    return _Models((model, second.module), writer, reads, tuple(notes), given)


def _opened(source: Source) -> Opened:
    LOGGER.info(f"loading {source.name}")
    return open_module(source)


def _inputs(
    module: nn.Module,
    source: Source,
    data: Sequence[str],
    tokenizer: Tokenizer | Ready | None,
    tries: Callable[[Mapping[str, object]], object],
) -> Mapping[str, object]:
    """Return what both networks are captured with: as specified, else inferred.

    Documents get what keeps them apart: positions, or the mask of an encoder, whose rows are padded. That the module
    takes it is what `tries` tries.
    """
    if (given := given_inputs(module, source.how)) is not None:
        return given.kwargs
    found: Mapping[str, object] = infer_inputs(module, source.how.seed).kwargs
    ids = found.get("input_ids")
    if len(found) != 1 or not isinstance(ids, torch.Tensor) or not all(map(_packed, data)):
        return found
    encoder = _encodes(tokenizer)
    name = "attention_mask" if encoder else "position_ids"
    row = torch.arange(ids.shape[1], device=ids.device)
    more = torch.ones_like(ids) if encoder else row.expand_as(ids).clone()
    if name not in inspect.signature(module.forward).parameters:
        return found
    try:
        tries({**found, name: more})
    except Exception:  # its own code, which may take it in another form
        return found
    return {**found, name: more}


def _run(module: nn.Module | None, given: Mapping[str, object]) -> None:
    assert module is not None
    with evaluating(module), torch.no_grad():
        module(**given)


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
