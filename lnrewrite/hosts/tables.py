"""The tables that a stream starts from: which one tokens are looked up in, which one places, and times what."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ir import Linear
from .host import Misfit
from .views import View


@dataclass(frozen=True)
class Tables:
    """Hold a stream's tables by what is looked up in them, found by running what gives the rows' numbers.

    first: the row of the first token's place. factor: what the sum of all rows is multiplied by.
    """

    tokens: Linear
    positions: Linear | None = None
    types: Linear | None = None
    first: int = 0
    factor: float = 1.0

    @classmethod
    def of(cls, view: View) -> Tables:
        """Find the tables. Raises Misfit for others than those of tokens, places and token types."""
        ids = view.inputs.get("input_ids")
        if ids is None:
            raise Misfit("it takes no input_ids, and a host takes tokens")
        found: dict[str, Linear] = {}
        first = 0
        places = torch.arange(ids.shape[1])
        for source in view.stream.sources:
            node = view.run.nodes[source.node]
            if not source.table or len(node.args) < 2:
                raise Misfit(
                    f"its stream starts from {source.param}, which is not a table that tokens are looked up in"
                )
            rows = view.run(node.args[1].name, {}).expand(*ids.shape) if hasattr(node.args[1], "name") else None
            if rows is None:
                raise Misfit(f"{source.param} is read without being looked up")
            if torch.equal(rows, ids):
                role = "tokens"
            elif torch.equal(rows - rows[0, 0], places.expand(*ids.shape)):
                role, first = "positions", int(rows[0, 0])
            elif not rows.any():
                role = "types"
            else:
                raise Misfit(f"{source.param} is looked up by something else than tokens and places")
            if role in found:
                raise Misfit(f"it has two tables of {role}")
            found[role] = source
        if "tokens" not in found:
            raise Misfit("no table is looked up by the tokens")
        return cls(**found, first=first, factor=_factor(view))


def _factor(view: View) -> float:
    """Return what the stream's first state is, in units of the sum of the rows. Raises Misfit where that varies."""
    stream, draw = view.stream, torch.Generator().manual_seed(0)
    held: dict[str, Tensor] = {}
    for source in stream.sources:
        held[source.node] = torch.randn(view.run.shape(source.node), generator=draw, dtype=torch.float64)
    begun = view.run(stream.embedding.origin[0] if stream.embedding else stream.source, held)
    total = torch.stack([h.expand_as(begun) for h in held.values()]).sum(0)
    factor = float((begun * total).sum() / (total * total).sum())
    if not torch.allclose(begun, factor * total, rtol=1e-6, atol=1e-9):
        raise Misfit("its stream starts from more than the sum of its tables' rows")
    return factor
