"""Give a captured module a batch: its tensors in the order of the graph's placeholders, of the types that they have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...errors import Code, LnrewriteError
from ...pipeline.protocols import Batch
from .module import CapturedModule, takes


def flat_inputs(module: CapturedModule, batch: Batch) -> list[Any]:
    """Return a batch's tensors in the order of the graph's placeholders. Raises LnrewriteError LN022 on a misfit."""
    s = module.signature
    wanted = (*s.positional, *s.keywords)
    given = dict(batch) if isinstance(batch, Mapping) else dict(zip(s.names, batch, strict=False))
    given = {k: v for k, v in given.items() if k in wanted or k not in s.constants}
    if missing := [n for n in wanted if n not in given]:
        _misfit(f"it lacks the input {', '.join(missing)}", wanted)
    if extra := [n for n in given if n not in wanted]:
        _misfit(f"it has an input {', '.join(extra)} that the model does not take", wanted)
    flat = pytree.tree_leaves([given[n] for n in wanted])
    expected = [n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder"]
    names = [n.name for n in module.graph.nodes if n.op == "placeholder"]
    tensors = []
    for name, value, like in zip(names, flat, expected, strict=False):
        tensors.append(_checked(name, value, like, wanted))
    return tensors


def _checked(name: str, value: Any, like: Any, wanted: tuple[str, ...]) -> Any:
    if not isinstance(like, torch.Tensor):
        return value
    value = torch.as_tensor(value)
    if value.dtype.is_floating_point != like.dtype.is_floating_point:
        _misfit(f"{name} is {value.dtype}, the model takes {like.dtype}", wanted)
    if not takes(like, value):
        _misfit(f"{name} has shape {list(value.shape)}, the model takes [{', '.join(map(str, like.shape))}]", wanted)
    return value.to(dtype=like.dtype)


def _misfit(why: str, wanted: tuple[str, ...]) -> None:
    remedy = f"give batches with exactly these inputs: {', '.join(wanted)}"
    raise LnrewriteError(Code.LN022, "calibration data", why, remedy)
