"""Turn DATA into batches that fit a model: arrays, text, an importable iterable, or random stand-ins.

A batch is a dict of keyword tensors like the model's example inputs. Everything is checked against that example first,
so that a wrong name or shape is reported here, in the user's words, and not deep inside a forward.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..backends.torch.fixed import elsewhere, other_path
from ..errors import Code, LnrewriteError, code_of_others, did_you_mean, told, words
from ..files.output import named_path
from ..loading.open import import_object
from ..loading.transformers import Tokenizer, closed
from ..pipeline import protocols
from ..pipeline.job import BatchReader
from ..quiet import LOGGER
from .files import read_tensors
from .inputs import random_tensor

Batch = dict[str, Tensor]
Axes = Mapping[str, Mapping[int, str]]

BATCH = 8  # samples of a batch, where the model leaves their number free
LENGTH = 128  # tokens of a text sample, where the model leaves their number free
_LIMIT = 1024  # batches; an endless iterable ends here
_SUFFIXES = (".npz", ".npy", ".pt", ".safetensors", ".txt")


def load_data(
    data: str,
    example: Mapping[str, Any],
    tokenizer_folder: Tokenizer | str | None = None,
    seed: int = 0,
    *,
    dynamic: Axes | None = None,
    byte_level: bool = False,
    length: int | None = None,
    limit: int = _LIMIT,
) -> list[Batch]:
    """Read DATA as at most `limit` batches of keyword tensors named and shaped like `example`.

    `data` is an .npz, .npy, .pt (tensors only), .safetensors or .txt file, or `pkg.module:iterable`. Axis 0 counts the
    samples. `dynamic` names the axes of each input whose size is free; None: every batch axis and every axis of integer
    inputs is. Text is cut into windows of `length` tokens (default: the example's length, or 128 where that is free),
    by the tokenizer in `tokenizer_folder`, or byte by byte where `byte_level`; `seed` orders the windows.
    Raises LnrewriteError LN022 with what was expected and what was found.
    """
    wanted = {name: value for name, value in example.items() if isinstance(value, Tensor)}
    if not wanted:
        raise bad(data, "the model takes no tensors", "leave the data out")
    if importable(data):
        batches = (named(data, item, wanted) for item in imported(data, limit))
        return [{n: fitted(data, n, held[n], wanted[n], dynamic) for n in wanted} for held in batches]
    path = file_of(data)
    if path.suffix == ".txt":
        arrays = text_rows(data, path, wanted, tokenizer_folder, byte_level, window_of(wanted, dynamic, length))
        count = len(next(iter(arrays.values())))
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        arrays = {name: value[order] for name, value in arrays.items()}
    else:
        arrays = named(data, read_tensors(path, Code.LN022), wanted)
    arrays = {name: fitted(data, name, arrays[name], wanted[name], dynamic) for name in wanted}
    return _batches(data, arrays, wanted, dynamic)[:limit]


def importable(data: str) -> bool:
    """Return whether DATA names a Python object rather than a file."""
    return ":" in data and not os.path.exists(named_path(data))


def file_of(data: str) -> Path:
    """Return the file that DATA names. Raises LnrewriteError LN022 where there is none, or of no known form."""
    path = named_path(data)
    if not os.path.isfile(path):
        raise bad(data, "there is no such file", "check the path, or name pkg.module:iterable")
    if path.suffix not in _SUFFIXES:
        raise bad(data, f"{path.suffix or 'no suffix'} is no form of data", f"give one of {', '.join(_SUFFIXES)}")
    return path


def reads_bytes(program: Any) -> bool:
    """Return whether a model reads bytes: one integer input, a table of 256 rows, no tokenizer."""
    limits = program.id_limits()
    return len(limits) == 1 and set(limits.values()) == {256} and not program.tokenizer


def check_ids(data: str, limits: Mapping[str, int], batch: Batch) -> None:
    """Raise LnrewriteError LN022 where a batch holds an id that the model's table has no row for."""
    for name, rows in limits.items():
        found = batch.get(name)
        values = found.numpy(force=True) if found is not None and found.numel() else None  # torch has no uint16 minimum
        ends = [] if values is None else [int(values.min()), int(values.max())]
        if wrong := [id for id in ends if not 0 <= id < rows]:
            why = f"{name} holds {wrong[0]} and the model's table has {rows} rows"
            raise bad(data, why, "use the model's own tokenizer")


def batches_for(program: Any, data: str, seed: int, **how: Any) -> list[Batch]:
    """Read DATA for a program, as `load_data` does, and check the ids against its tables."""
    how |= {"dynamic": program.dynamic_axes(), "byte_level": reads_bytes(program)}
    batches = load_data(data, program.example_inputs(), program.tokenizer, seed, **how)
    for batch in batches:
        check_ids(data, program.id_limits(), batch)
    return batches


def reader_of(
    calibrate: str | Iterable[protocols.Batch] | None, seed: int = 0
) -> tuple[BatchReader | None, str | None]:
    """Return what gives calibration batches for a program, and the name of DATA. Raises LN022 where that is missing."""
    if calibrate is None:
        return None, None
    if not isinstance(calibrate, str):
        batches = list(calibrate)
        return lambda program: batches, None
    check_data(calibrate)

    def read(program: Any) -> list[Batch]:
        LOGGER.info(f"reading {calibrate}")
        return calibration_for(program, calibrate, seed)

    return read, calibrate


def check_data(data: str) -> None:
    """Raise LN022 where DATA is plainly missing: told before a model is captured."""
    if ":" not in data and not os.path.isfile(named_path(data)):
        remedy = "check the path, or name pkg.module:iterable"
        raise LnrewriteError(Code.LN022, f"data {data!r}", "there is no such file", remedy)


def calibration_for(program: Any, data: str, seed: int = 0) -> list[Batch]:
    """Read DATA for a program and run its module on the first batch. Raises LnrewriteError LN022 where that fails.

    A model whose one integer input looks up a table of 256 rows, and which has no tokenizer, reads bytes.
    """
    batches = batches_for(program, data, seed, limit=64)
    try:
        with torch.no_grad():
            program.module()(**batches[0])
    except (RuntimeError, IndexError, ValueError, AssertionError) as error:
        if path := other_path(error):
            raise elsewhere(f"data {data!r}", path) from error
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in batches[0].items())
        why = f"the model fails on {shapes}: {words(error).partition(chr(10))[0]}"
        raise bad(data, why, "give inputs that the model takes, no longer than its context") from error
    return batches


def synthetic(
    example: Mapping[str, Any],
    vocabulary: Mapping[str, int] | None = None,
    batches: int = 8,
    seed: int = 0,
    keep: bool = False,
) -> list[Batch]:
    """Draw `batches` random batches shaped like `example`, the same ones for the same seed.

    Floats are normal; integers are uniform below `vocabulary[name]`, by default up to the largest id of the example;
    masks, token types and positions are the example's own, and with `keep` all integers without a vocabulary. What is
    no tensor is left out.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: value for name, value in example.items() if isinstance(value, Tensor)}
    known = vocabulary or {}
    own = ("mask", "type", "segment", "position")
    kept = {n for n in tensors if any(word in n for word in own) or (keep and n not in known)}
    return [{n: _like(n, t, known, n in kept, generator) for n, t in tensors.items()} for _ in range(batches)]


def _like(name: str, tensor: Tensor, vocabulary: Mapping[str, int], kept: bool, generator: torch.Generator) -> Tensor:
    if tensor.dtype is torch.bool or not tensor.numel() or (kept and not tensor.is_floating_point()):
        return tensor.clone()
    above = 0 if tensor.is_floating_point() else vocabulary.get(name, int(tensor.max()) + 1)
    return random_tensor(name, tensor.dtype, tensor.shape, generator, above).to(tensor.device)


def bad(data: str, why: str, remedy: str) -> LnrewriteError:
    return LnrewriteError(Code.LN022, f"data {data!r}", why, remedy)


def _described(tensors: Mapping[str, Tensor]) -> str:
    """Write names, dtypes and shapes: what an error shows as expected or found."""
    return ", ".join(f"{n} {str(t.dtype)[6:]}{list(t.shape)}" for n, t in tensors.items()) or "nothing"


# --- arrays


def named(data: str, held: Any, wanted: Mapping[str, Tensor]) -> Batch:
    """Give what a file or an item of an iterable holds the names of the inputs, each exactly once."""
    if isinstance(held, Mapping):
        found = {str(name): _tensor(data, value) for name, value in held.items()}
    else:
        values = list(held) if isinstance(held, tuple | list) else [held]
        if len(values) != len(wanted):
            why = f"it holds {len(values)} unnamed array(s) and the model takes {_described(wanted)}"
            raise bad(data, why, "name the arrays, in an .npz or a dict")
        found = {name: _tensor(data, value) for name, value in zip(wanted, values, strict=True)}
    if set(found) != set(wanted):
        missing, extra = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
        words = [f"{', '.join(missing)} missing"] if missing else []
        words += [f"{', '.join(extra)} unknown ({did_you_mean(extra[0], wanted)})"] if extra else []
        why = f"the model takes {_described(wanted)} and the data holds {_described(found)}: {'; '.join(words)}"
        raise bad(data, why, "name the arrays like the inputs")
    return found


def _tensor(data: str, value: Any) -> Tensor:
    """Make a tensor of a tensor or an array of numbers."""
    import numpy as np

    if isinstance(value, Tensor):
        return value.detach()
    try:
        return torch.from_numpy(np.array(value))
    except (TypeError, ValueError) as error:
        raise bad(data, f"a {type(value).__name__} is no array of numbers", "give tensors or arrays") from error


def fitted(data: str, name: str, found: Tensor, wanted: Tensor, dynamic: Axes | None) -> Tensor:
    """Check one array against the example input and cast its width: float16 to float32, int32 to int64."""
    expected, got = _described({name: wanted}), _described({name: found})
    if found.is_floating_point() != wanted.is_floating_point() or found.is_complex() != wanted.is_complex():
        raise bad(data, f"expected {expected} and found {got}", "convert the data; floats and integers are not mixed")
    if found.dim() != wanted.dim():
        raise bad(data, f"expected {expected} and found {got}: axis 0 counts samples", "reshape the data")
    free = _free(name, wanted, dynamic) | {0}
    wrong = [axis for axis in range(wanted.dim()) if axis not in free and found.shape[axis] != wanted.shape[axis]]
    if wrong:
        raise bad(data, f"expected {expected} and found {got}: axis {wrong[0]} is fixed", "reshape or cut the data")
    if not found.numel():
        raise bad(data, f"{name} is empty", "give at least one sample")
    if found.is_floating_point() and not bool(torch.isfinite(found).all()):
        raise bad(data, f"{name} holds NaN or infinite values", "clean the data")
    return found.to(wanted.dtype)


def _free(name: str, wanted: Tensor, dynamic: Axes | None) -> set[int]:
    """Return the axes whose size may differ from the example's."""
    if dynamic is not None:
        return set(dynamic.get(name, ()))
    if not wanted.is_floating_point():
        return set(range(wanted.dim()))
    return {0, 1} if wanted.dim() == 3 else {0}  # [batch, sequence, width]


def _batches(data: str, arrays: Batch, wanted: Mapping[str, Tensor], dynamic: Axes | None) -> list[Batch]:
    """Split arrays along axis 0; a remainder that a fixed batch size cannot hold is left out."""
    counts = {name: len(t) if t.dim() else 1 for name, t in arrays.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise bad(data, f"the arrays differ in their number of samples: {listed}", "give every input the same number")
    fixed = {len(t) for name, t in wanted.items() if t.dim() and 0 not in _free(name, t, dynamic)}
    total = next(iter(counts.values()))
    size = min(fixed) if fixed else max([BATCH, *(len(t) for t in wanted.values() if t.dim())])
    if fixed and total < size:
        raise bad(data, f"it holds {total} samples and the model takes batches of {size}", "give more samples")
    starts = range(0, total - size + 1 if fixed else total, size)
    return [{name: t[s : s + size] for name, t in arrays.items()} for s in starts]


# --- importable iterables


END = object()
"""Nothing is left of an iterable."""


def imported(data: str, limit: int | None = None) -> Iterator[Any]:
    """Yield what `pkg.module:name` gives: an iterable, or a callable that returns one."""
    source = import_object(data, Code.LN022)
    with code_of_others(lambda why: bad(data, f"it gives no batches: {why}", "name an iterable of batches")):
        items: Iterable[Any] = source if not callable(source) or hasattr(source, "__iter__") else source()
        iterator = iter(items)
    count = 0
    while limit is None or count < limit:
        with code_of_others(lambda why, n=count: bad(data, f"batch {n} raised {why}", "check the iterable")):  # type: ignore[misc]
            item = next(iterator, END)
        if item is END:
            break
        yield item
        count += 1
    if not count:
        raise bad(data, "it gives no batches", "an iterator can be walked once only: name a list or a function")


# --- text


def window_of(wanted: Mapping[str, Tensor], dynamic: Axes | None, length: int | None) -> int:
    """Choose how many tokens a sample has: `length`, else the example's where it is fixed, else 128."""
    ids = next(((name, t) for name, t in wanted.items() if not t.is_floating_point() and t.dim() == 2), None)
    if length is not None or ids is None:
        return length or LENGTH
    name, tensor = ids
    return LENGTH if dynamic is not None and 1 in _free(name, tensor, dynamic) else tensor.shape[1]


def text_rows(
    data: str, path: Path, wanted: Mapping[str, Tensor], folder: Tokenizer | str | None, byte_level: bool, length: int
) -> Batch:
    """Cut a text file into windows of `length` tokens or bytes, one row each, for every input."""
    try:
        raw = path.read_bytes()
        text = raw.decode("utf-8") if folder is not None else ""
    except (OSError, UnicodeDecodeError) as error:
        raise bad(data, f"it cannot be read as UTF-8 text: {error}", "check the file") from error
    if folder is not None:
        rows = _tokenized(data, text, folder, length)
    elif byte_level:
        whole = len(raw) // length * length
        rows = torch.tensor(list(raw[:whole]), dtype=torch.int64).reshape(-1, length)
    else:
        raise bad(data, "the model brings no tokenizer, so text cannot be read", "give token ids, as .npz or .pt")
    if not len(rows):
        raise bad(data, f"the text is shorter than one window of {length} tokens", "give a longer text")
    return {name: rows if len(wanted) == 1 else text_input(data, name, rows) for name in wanted}


def text_input(data: str, name: str, rows: Tensor) -> Tensor:
    """Make one input of the windows `rows`: the ids themselves, full attention, or a single segment."""
    if "mask" in name:
        return torch.ones_like(rows)
    if "type" in name or "segment" in name:
        return torch.zeros_like(rows)
    if "position" in name:
        return torch.arange(rows.shape[1]).expand_as(rows)
    if name.endswith(("ids", "tokens")):
        return rows
    raise bad(data, f"text gives no values for the input {name}", "give all inputs, as .npz or .pt")


def _tokenized(data: str, text: str, folder: Tokenizer | str, length: int) -> Tensor:
    """Tokenize a text into full windows [count, length], each with the special tokens that the tokenizer adds."""
    try:
        tokenize = (Tokenizer(folder) if isinstance(folder, str) else folder).load()
        with closed():
            found = tokenize(text, truncation=True, max_length=length, return_overflowing_tokens=True)["input_ids"]
    except ImportError as error:
        raise bad(data, "reading text needs transformers", "pip install transformers (or lnrewrite[hf])") from error
    except LnrewriteError:
        raise
    except Exception as error:  # tokenizers raise anything
        raise bad(data, f"the tokenizer failed: {told(error)}", "give token ids, as .npz or .pt") from error
    windows = found if found and isinstance(found[0], list) else [found]
    full = [window for window in windows if len(window) == length]
    return torch.tensor(full, dtype=torch.int64).reshape(-1, length)
