"""Check the tensors that a model is called with, and make some up: one rule for calls, data, calibration and proofs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from ..errors import Code, LnrewriteError, did_you_mean
from ..ir.inputs import Content, Input, InputSpec, content_of

Tensors = dict[str, Tensor]
"""The tensors of one call, or of many samples, by the names of the inputs."""

FreeAxes = Mapping[str, Mapping[int, str]]
"""The free axes of each input, with the names of their sizes."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int64,
        torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
    )
}  # fmt: skip


def spec_of(
    example: Mapping[str, object], free: FreeAxes | None = None, rows: Mapping[str, int] | None = None
) -> InputSpec:
    """Return what an example's tensors say of the inputs; what is not a tensor is left out.

    free: None where nothing is known of it: every batch axis then, every axis of integers, and of floating point
    inputs of three axes the second.
    """
    held = {name: value for name, value in example.items() if isinstance(value, Tensor)}
    inputs = []
    for name, tensor in held.items():
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        named = _usually_free(name, tensor) if free is None else free.get(name, {})
        dims = tuple(named.get(axis, size) for axis, size in enumerate(shape))
        inputs.append(Input(name, dtype, dims, shape, content_of(name, dtype), (rows or {}).get(name, 0)))
    return InputSpec(tuple(inputs))


def _usually_free(name: str, tensor: Tensor) -> dict[int, str]:
    axes = 2 if tensor.dim() == 3 else 1  # [batch, sequence, width]
    count = min(axes if tensor.is_floating_point() else tensor.dim(), tensor.dim())
    return {axis: f"{name}.{axis}" for axis in range(count)}


# ---- check ----


def misfit(what: str, why: str, remedy: str) -> NoReturn:
    """Raise LnrewriteError LN022 for inputs that a model does not take."""
    raise LnrewriteError(Code.LN022, what, why, remedy)


def check(spec: InputSpec, given: Mapping[str, object] | Sequence[object], what: str) -> Tensors:
    """Return a batch as a model takes it: named as its inputs are, cast to their widths.

    given: tensors or arrays by name, or as many without names as there are inputs. what: what they are in errors.
    Raises LnrewriteError LN022 for a name, a kind of numbers or a size that the model does not take.
    """
    held = by_name(spec, given, what)
    return {each.name: fitted(each, held[each.name], what) for each in spec}


def by_name(spec: InputSpec, given: Mapping[str, object] | Sequence[object], what: str) -> Tensors:
    """Return tensors by the names of the inputs, each exactly once. Raises LnrewriteError LN022."""
    if not isinstance(given, Mapping):
        if len(given) != len(spec.inputs):
            why = f"it holds {len(given)} unnamed array(s) and the model takes {spec}"
            misfit(what, why, "name the arrays, in an .npz or a dict")
        given = dict(zip(spec.names, given, strict=True))
    found = {str(name): as_tensor(value, what) for name, value in given.items()}
    check_names(spec.names, found, what, str(spec), str(spec_of(found, {})))
    return found


def check_names(
    wanted: Sequence[str], given: Mapping[str, object], what: str, takes: str = "", holds: str = ""
) -> None:
    """Raise LnrewriteError LN022 where names are not those that a model takes."""
    missing, extra = sorted(set(wanted) - set(given)), sorted(set(given) - set(wanted))
    words = [f"{', '.join(missing)} missing"] if missing else []
    words += [f"{', '.join(extra)} unknown ({did_you_mean(extra[0], wanted)})"] if extra else []
    if words:
        both = f"the model takes {takes or ', '.join(wanted)} and is given {holds or ', '.join(given) or 'nothing'}"
        misfit(what, f"{both}: {'; '.join(words)}", f"give exactly these inputs: {', '.join(wanted)}")


def as_tensor(value: object, what: str) -> Tensor:
    """Return a tensor, or an array of numbers as one. Raises LnrewriteError LN022 for anything else."""
    if isinstance(value, Tensor):
        return value.detach()
    try:
        return torch.from_numpy(np.array(value))
    except (TypeError, ValueError):
        misfit(what, f"a {type(value).__name__} is not an array of numbers", "give tensors or arrays")


def fitted(wanted: Input, found: Tensor, what: str, *, kinds: bool = True) -> Tensor:
    """Return a tensor as an input takes it: float16 as float32, int32 as int64.

    kinds: floating point numbers are not taken for integers, nor the other way. Raises LnrewriteError LN022.
    """
    dtype = DTYPES.get(wanted.dtype, found.dtype)
    if kinds and (found.is_floating_point(), found.is_complex()) != (dtype.is_floating_point, dtype.is_complex):
        misfit(what, _both(wanted, found), "convert the data; floats and integers are not mixed")
    if why := wanted.misfit(found.shape):
        misfit(what, f"{_both(wanted, found)}: {why}", "reshape or cut the data")
    return found.to(dtype)


def _both(wanted: Input, found: Tensor) -> str:
    return f"expected {wanted} and found {spec_of({wanted.name: found}, {})}"


def check_numbers(spec: InputSpec, tensors: Tensors, what: str) -> None:
    """Raise LnrewriteError LN022 for no samples, NaN or infinite values, and ids that a table has no row for.

    A value may be empty along other axes, as a cache is before its first token; a mask that is added may hold -inf.
    """
    for name, tensor in tensors.items():
        if not tensor.numel():
            if not len(tensor) or not tensor.is_floating_point():
                misfit(what, f"{name} is empty", "give at least one sample")
            continue
        wrong = tensor.isfinite().logical_not()
        if content_of(name, str(tensor.dtype)) is Content.MASK:
            wrong &= tensor != -torch.inf
        if tensor.is_floating_point() and bool(wrong.any()):
            misfit(what, f"{name} holds NaN or infinite values", "clean the data")
    for name, rows in spec.rows.items():
        check_ids(name, rows, tensors[name], what)


def check_ids(name: str, rows: int, ids: Tensor, what: str) -> None:
    """Raise LnrewriteError LN022 where an id has no row in a table of so many."""
    if not ids.numel():
        return
    values = ids.numpy(force=True)  # torch has no minimum of uint16
    if wrong := [id for id in (int(values.min()), int(values.max())) if not 0 <= id < rows]:
        misfit(what, f"{name} holds {wrong[0]} and the model's table has {rows} rows", "use the model's own tokenizer")


# ---- draw ----


def draw(spec: InputSpec, seed: int | torch.Generator) -> Tensors:
    """Make up a tensor for each input, of its example's shape, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
    return {each.name: draw_one(each, generator) for each in spec}


def draw_one(wanted: Input, generator: torch.Generator) -> Tensor:
    """Make up one input: values are normal, ids lie below its rows; masks are ones, types zeros, positions count."""
    shape, dtype = wanted.shape, DTYPES[wanted.dtype]
    if wanted.content is Content.MASK:
        return torch.ones(shape, dtype=dtype)
    if wanted.content is Content.VALUES:
        drawn = torch.complex128 if dtype.is_complex else None
        return torch.randn(shape, generator=generator, dtype=drawn).to(dtype)
    if wanted.content is Content.TYPE:
        return torch.zeros(shape, dtype=dtype)
    if wanted.content is Content.POSITION and shape:
        return torch.arange(shape[-1]).expand(shape).to(dtype).contiguous()
    limit = min(wanted.rows, torch.iinfo(dtype).max)
    return torch.randint(0, max(limit, 1), shape, generator=generator).to(dtype)


def resized(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor in another size: along each axis its slices are repeated from the first on, or cut off."""
    for axis, size in enumerate(shape):
        if size != tensor.shape[axis]:
            rows = torch.arange(size) % tensor.shape[axis]
            tensor = tensor.index_select(axis, rows.to(tensor.device))
    return tensor
