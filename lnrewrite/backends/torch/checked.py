"""Check a capture: the captured program against the module, on inputs that it was not captured with.

Both run as they are stored, which costs little beside the capture; where they differ, which may be rounding, both run
in float64. A module that does not give the same outputs twice (noise, a counter) is not judged.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import nn

from ...compat.torch import pytree, tensors_in
from ...errors import Code, LnrewriteError, words
from ..outputs import Outputs, apart
from .fixed import fixed_paths, mark, other_path
from .module import Args, CapturedModule, Kwargs, signature_of
from .widened import Float64, doubled, in_float64

SAME = 1e-4
"""The largest relative difference of one computation in two spellings; in float64, of constants kept in float32."""
ROUGH = 0.1
"""The same where only low precision can be run."""
BYTES = 1 << 31
"""The largest copy in float64 that is made."""
MORE = ("attention_mask", "token_type_ids", "position_ids")
"""Inputs that models make up where they are not given, some otherwise while they are exported."""
KEPT = ("mask", "type", "segment", "position")
FACTORS = (-1.0, 3.0, 0.3, -3.0)


def check(module: nn.Module, captured: CapturedModule, args: Args, kwargs: Kwargs) -> list[str]:
    """Run a module and what was captured of it on other inputs: mark in the graph that they differ; return notes.

    Raises LnrewriteError LN023 where a program that differs, or takes no other inputs, or whose path is fixed, is not
    the module on its own example inputs.
    """
    if has_no_numbers(captured):
        return []
    fixed = bool(fixed_paths(captured.graph))
    if fixed:
        same(module, captured, args, kwargs)
    for more in others(captured, args, kwargs, len(FACTORS) if fixed else 1):
        try:
            apart = _apart(module, captured, *more)
        except Exception:  # a module that takes no such values, a program that insists on its path or on its sizes
            apart = 0.0
            if not fixed:
                same(module, captured, args, kwargs)
        if apart is None:
            return ["the capture could not be checked: the module gives other outputs each time that it is run"]
        if apart:
            if not fixed:
                same(module, captured, args, kwargs)
            text = f"on other inputs of these shapes the module's outputs are {apart:.1e} (relative) from the program's"
            mark(captured, text)
            break
    return []


def same(module: nn.Module, captured: CapturedModule, args: Args, kwargs: Kwargs) -> None:
    """Run a module and what was captured of it on the inputs that it was captured with.

    Raises LnrewriteError LN023 where they differ.
    """
    if not has_no_numbers(captured) and (why := _wrong(module, captured, args, kwargs)):
        remedy = "let the model compute the same while it is exported, and choose by torch.where or torch.cond"
        takes = inspect.signature(module.forward).parameters
        if more := [name for name in MORE if name in takes and kwargs.get(name) is None]:  # what it makes up without
            remedy += f", or give it what it makes up: {', '.join(more)}"
        raise LnrewriteError(Code.LN023, type(module).__name__, f"on its own example inputs {why}", remedy)


def has_no_numbers(module: nn.Module) -> bool:
    """Return whether a module holds no weights, so that it cannot be run."""
    return any(t.is_meta for t in (*module.parameters(), *module.buffers()))


def _wrong(module: nn.Module, captured: CapturedModule, args: Args, kwargs: Kwargs) -> str:
    """Return what is wrong with a program on the inputs that it was captured with; empty where nothing is."""
    try:
        want = run(module, args, kwargs)
    except Exception:  # then they say nothing of the program
        return ""
    try:
        got = run(captured, args, kwargs)
    except Exception as why:
        path = other_path(why)
        return f"it takes another path: {path}" if path else f"it fails: {words(why).partition(chr(10))[0]}"
    error = away(module, captured, want, got, args, kwargs)
    return f"its outputs are {error:.1e} (relative) from the module's" if error else ""


def _apart(module: nn.Module, captured: CapturedModule, args: Args, kwargs: Kwargs) -> float | None:
    """Return how far apart their outputs are, as `away`. Raises what one of them raises that takes no such inputs."""
    want, got = run(module, args, kwargs), run(captured, args, kwargs)
    return away(module, captured, want, got, args, kwargs)


def away(
    module: nn.Module, captured: CapturedModule, want: Outputs, got: Outputs, args: Args, kwargs: Kwargs
) -> float | None:
    """Return how far apart what a module and its program give is, relative; 0 where that is rounding.

    None where the module differs from itself, infinite where their outputs are of other types.
    """
    if not all(map(alike, want, got)):
        return math.inf
    error = apart([want], [got])
    if error <= SAME:
        return 0.0
    if apart([want], [run(module, args, kwargs, seed=1)]) > SAME:
        return None
    try:
        wide = [[run(each, args, kwargs, wide=True)] for each in (_wide(module), _wide(captured))]
    except Exception:  # what holds its dtype for given, or is too large
        return error if error > ROUGH else 0.0
    error = apart(*wide)
    return error if error > SAME else 0.0


def alike(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return whether two tensors are of one type and one shape."""
    return one.dtype == two.dtype and one.shape == two.shape


def _wide(module: nn.Module) -> nn.Module:
    """Return a module in float64. Raises MemoryError where it is large."""
    if 8 * sum(t.numel() for t in (*module.parameters(), *module.buffers())) > BYTES:
        raise MemoryError
    return in_float64(module)


def run(module: nn.Module, args: Args, kwargs: Kwargs, *, wide: bool = False, seed: int = 0) -> Outputs:
    """Return the tensors that a module gives; what it draws at random depends on the seed alone."""
    if wide:
        args, kwargs = pytree.tree_map_only(torch.Tensor, doubled, (args, kwargs))
    with torch.random.fork_rng(devices=[]), Float64() if wide else nullcontext():
        torch.manual_seed(seed)
        outputs = module(*args, **kwargs)
    return [t.detach() for t in tensors_in(outputs)]


def others(captured: CapturedModule, args: Args, kwargs: Kwargs, count: int) -> Iterator[tuple[Args, Kwargs]]:
    """Yield inputs like the given ones: their values in another order, numbers multiplied by a factor too.

    A mask of ones hides the last column.
    """
    for seed, factor in enumerate(FACTORS[:count]):
        draw = torch.Generator().manual_seed(seed)

        def other(name: str, value: object, draw: torch.Generator = draw, factor: float = factor) -> object:
            if not isinstance(value, torch.Tensor) or value.is_complex():
                return value
            if any(word in name for word in KEPT):
                hides = "mask" in name and value.dim() == 2 and value.shape[1] > 2 and bool((value == 1).all())
                return torch.cat([value[:, :-1], torch.zeros_like(value[:, -1:])], 1) if hides else value
            order = torch.randperm(value.numel(), generator=draw).to(value.device)
            value = value.flatten()[order].reshape(value.shape)
            return value * factor if value.is_floating_point() else value

        names = (*signature_of(captured).names, *("" for _ in args))
        yield tuple(map(other, names, args)), {name: other(name, value) for name, value in kwargs.items()}
