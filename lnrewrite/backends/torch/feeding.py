"""Give a captured module a batch: its tensors in the order of the graph's placeholders, of the types that they have."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...compat.torch import pytree
from ...pipeline.protocols import Batch
from ..inputs import check_names, fitted
from .module import CapturedModule, leaves_of, signature_of

WHAT = "calibration data"


def flat_inputs(module: CapturedModule, batch: Batch) -> list[object]:
    """Return a batch's tensors in the order of the graph's placeholders. Raises LnrewriteError LN022 on a misfit."""
    s = signature_of(module)
    wanted = (*s.positional, *s.keywords)
    given = dict(batch) if isinstance(batch, Mapping) else dict(zip(s.names, batch, strict=False))
    given = {k: v for k, v in given.items() if k in wanted or k not in s.constants}
    check_names(wanted, given, WHAT)
    flat = pytree.tree_leaves([given[n] for n in wanted])
    pairs = zip(flat, leaves_of(module), strict=False)
    return [value if like is None else fitted(like, torch.as_tensor(value), WHAT) for value, like in pairs]
