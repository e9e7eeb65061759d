"""Put features in the place of image tokens, as far as there are any: an image token that was generated stays one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...compat.torch import operator_name
from ..torch.module import CapturedModule

aten = torch.ops.aten
SHAPED = {"reshape", "view", "unflatten", "flatten", "unsqueeze", "squeeze", "clone", "contiguous", "cat"}
"""What gives numbers another shape; cat, of one tensor."""


def scatter_what_is_there(module: CapturedModule) -> None:
    """Write masked_scatter, which takes as many numbers as a mask shows, so that it takes fewer too, in place."""
    for node in module.graph.find_nodes(op="call_function", target=aten.masked_scatter.default):
        node.target = scattered
        node.update_arg(2, _in_a_row(node.args[2]))


def _in_a_row(source: Any) -> Any:
    """Return what has the same numbers in the same order as a value that other shapes were given to."""
    while operator_name(source.target) in SHAPED:
        given = source.args[0]
        if isinstance(given, (list, tuple)):
            if len(given) > 1:
                break
            given = given[0]
        source = given
    return source


def scattered(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Return x with the numbers of `source`, in their order, where a mask shows; behind the last of them x itself."""
    shown = mask.expand_as(x).flatten()
    place = shown.to(torch.int64).cumsum(0) - 1
    padded = torch.cat([source.flatten(), x.flatten()[:1]])  # never empty
    last = padded.shape[0] - 1
    found = padded.index_select(0, place.clamp(0, last))
    return torch.where(shown & (place < last), found, x.flatten()).reshape(x.shape)
