"""Select blocks by an expression: `0-5;attention`, `first:25%`, `model.layers.*`."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Sequence

from .. import errors
from ..errors import Code, UsageError
from .network import Block, Network


def select(network: Network, expression: str | None) -> frozenset[str]:
    """Return the names of the blocks that an expression selects: the union of its terms, which `;` joins.

    A term is an index over all blocks in execution order (3), a range (0-5, both ends included), a share from either
    end (first:2, last:25%, rounded up), a kind (attention, mlp) or a glob over names. None selects every block.
    Raises UsageError LN004 for a term that is no term (a number of more than nine digits, `**`) or names no block.
    """
    if expression is None:
        return frozenset(block.name for block in network.blocks)
    found: set[str] = set()
    for term in expression.split(";"):
        names = _term(network.blocks, term.strip())
        if not names:
            every = [block.name for block in network.blocks]
            why = f"it names none of the {len(every)} blocks"
            raise UsageError(Code.LN004, f"block selection {term!r}", why, errors.did_you_mean(term, every))
        found |= names
    return frozenset(found)


def _term(blocks: Sequence[Block], term: str) -> set[str]:
    """Return the names that one term selects."""
    names = [block.name for block in blocks]
    if "**" in term:
        raise UsageError(Code.LN004, f"block selection {term!r}", "one star matches any text", "write * once")
    if re.search(r"\d{10}", term):
        raise UsageError(Code.LN004, f"block selection {term!r}", "the number is too large", "name a block that exists")
    if term in ("attention", "mlp"):
        kinds = ("mlp", "moe") if term == "mlp" else ("attention",)
        return {block.name for block in blocks if block.kind in kinds}
    if span := re.fullmatch(r"(\d+)(?:-(\d+))?", term):
        return set(names[int(span[1]) : int(span[2] or span[1]) + 1])
    if term.startswith(("first:", "last:")):
        end, _, share = term.partition(":")
        count = _count(term, share, len(names))
        return set(names[:count] if end == "first" else names[len(names) - count :])
    return {name for name in names if fnmatch.fnmatchcase(name, term)}


def _count(term: str, share: str, total: int) -> int:
    """Read `2` or `25%` of `total` blocks, rounded up."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)%|(\d+)", share)
    if not found:
        why, remedy = "expected a count or a share", "write first:2 or last:25%"
        raise UsageError(Code.LN004, f"block selection {term!r}", why, remedy)
    if found[1] and float(found[1]) > 100:
        why = f"{found[1]}% is more than all of the blocks"
        raise UsageError(Code.LN004, f"block selection {term!r}", why, "write a share up to 100%")
    return min(total, math.ceil(total * float(found[1]) / 100) if found[1] else int(found[2]))
