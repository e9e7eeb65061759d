"""What a model is called with, as `--input` describes it: names, dtypes and sizes, or a file of tensors."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from ..backends.inputs import draw_one
from ..errors import Code, LnrewriteError, did_you_mean
from ..files.output import named_path
from ..ir.inputs import Input, content_of
from .files import read_tensors

BATCH, LENGTH = 2, 16  # sizes of an example: sequences of 16, or shorter where a model takes no longer ones
_SPEC = re.compile(r"([A-Za-z_]\w*)=(\w+)\[([^\[\]]*)\]")
_DTYPES = {
    name: dtype
    for dtype, names in {
        "float32": "float32 float f32 fp32",
        "float64": "float64 double f64 fp64",
        "float16": "float16 half f16 fp16",
        "bfloat16": "bfloat16 bf16",
        "int64": "int64 long i64",
        "int32": "int32 int i32",
        "int16": "int16 i16",
        "int8": "int8 i8",
        "uint8": "uint8 u8",
        "bool": "bool",
    }.items()
    for name in names.split()
}


@dataclass(frozen=True, slots=True)
class Inputs:
    """Hold one example call: positional `args`, keyword tensors, and for each keyword its named (dynamic) axes.

    described: whether sizes and names were written for an input; values alone, as of a file, leave its axes open.
    """

    args: tuple[object, ...] = ()
    kwargs: dict[str, Tensor] = field(default_factory=dict)
    dynamic: dict[str, dict[int, str]] = field(default_factory=dict)
    described: bool = False


def parse_inputs(specs: Sequence[str], *, seed: int = 0, vocabulary: int = 2) -> Inputs:
    """Make the inputs that `--input` options describe, random and the same for the same seed.

    Each of `specs` is `name=dtype[d0,d1,...]`, with sizes or names of dynamic dimensions, or the path of an .npz or .pt
    file of named tensors. A name has one size everywhere and no two names share one. Integers are drawn below
    `vocabulary`. Raises LnrewriteError LN021.
    """
    generator = torch.Generator().manual_seed(seed)
    args: tuple[object, ...] = ()
    kwargs: dict[str, Tensor] = {}
    dynamic: dict[str, dict[int, str]] = {}
    sizes: dict[str, int] = {}
    drawn = False
    for spec in specs:
        found: dict[str, Tensor] = {}
        if match := _SPEC.fullmatch(spec.strip()):
            name, dtype, dims = match[1], _dtype(spec, match[2]), _dims(spec, match[3])
            shape = tuple(d if isinstance(d, int) else _size(d, sizes) for d in dims)
            described = Input(name, dtype, tuple(dims), shape, content_of(name, dtype), vocabulary)
            found[name], drawn = draw_one(described, generator), True
            dynamic |= {name: axes} if (axes := {i: d for i, d in enumerate(dims) if isinstance(d, str)}) else {}
        else:
            positional, found = _read(spec)
            args += positional
        if twice := sorted(set(found) & set(kwargs)):
            raise _bad(spec, f"{twice[0]} is given twice")
        kwargs |= found
    return Inputs(args, kwargs, dynamic, drawn)


def _bad(
    spec: str, why: str, remedy: str = "write name=dtype[d0,d1,...], or the path of an .npz or .pt file"
) -> LnrewriteError:
    return LnrewriteError(Code.LN021, f"--input {spec!r}", why, remedy)


def _dtype(spec: str, name: str) -> str:
    if name not in _DTYPES:
        raise _bad(spec, f"unknown dtype {name!r}", did_you_mean(name, set(_DTYPES.values())))
    return _DTYPES[name]


ELEMENTS, AXES = 2**31, 32
"""A made-up input has fewer elements, and no more axes, as numpy's and torch's own kernels do not."""


def _dims(spec: str, text: str) -> list[int | str]:
    """Read `d0,d1,...`: positive numbers and names."""
    dims: list[int | str] = []
    for word in text.split(",") if text.strip() else []:
        word = word.strip()
        if not (word.isidentifier() or word.isascii() and word.isdigit() and len(word) < 20 and int(word) > 0):
            raise _bad(spec, f"the dimension {word!r} is neither a positive number nor a name")
        dims.append(int(word) if word.isdigit() else word)
    if len(dims) > AXES:
        raise _bad(spec, f"it has {len(dims)} dimensions, and at most {AXES} are allowed", "give fewer")
    if math.prod(d for d in dims if isinstance(d, int)) >= ELEMENTS:
        raise _bad(spec, "it is too large for a synthetic input", "give smaller dimensions")
    return dims


def _size(name: str, sizes: dict[str, int]) -> int:
    """Give a dynamic dimension a size that no other name has: batches 2, others multiples of 4 from 16 on."""
    if name not in sizes:
        start = BATCH if name.lower() in ("b", "n", "bs", "batch", "batch_size") else LENGTH
        sizes[name] = next(s for s in chain([start], range(LENGTH + 4, 10_000, 4)) if s not in sizes.values())
    return sizes[name]


def _read(spec: str) -> tuple[tuple[object, ...], dict[str, Tensor]]:
    """Read a file of tensors: named ones as keywords, a single tensor or a tuple as positional arguments."""
    path = named_path(spec)
    if not os.path.isfile(path):
        raise _bad(spec, "it is neither a specification nor a file")
    held = read_tensors(path, Code.LN021)
    if isinstance(held, Tensor):
        return (held,), {}
    if isinstance(held, Mapping):
        return (), dict(held)
    return tuple(held), {}
