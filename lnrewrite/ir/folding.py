"""Fold runs of alike layers, and write norms and names short, for who shows the object of `inspect --json`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

BRANCH = {"attention": "attn", "mlp": "mlp", "moe": "moe", "ssm": "ssm", "conv": "conv"}
"""The kinds of blocks, short; any other is a function f."""

Row = Mapping[str, Any]
"""An object of the JSON that a command prints."""


def folded(blocks: Sequence[Row], longest: int, *, named: bool = True) -> Iterator[tuple[int, int, Row, Row]]:
    """Yield (index, times, its last repetition, block); a run of alike layers once, its first layer's blocks.

    longest: the number of blocks up to which each is shown, alike or not. named: whether blocks whose names differ in
    more than numbers are apart.
    """
    groups = [block["parallel_group"] for block in blocks]
    joins = [group is not None and group == before for before, group in zip([None, *groups], groups, strict=False)]
    keys = [(_key(block, named), joined) for block, joined in zip(blocks, joins, strict=True)]
    at = 0
    while at < len(blocks):
        period, times = (1, 1) if len(blocks) <= longest else _run(keys, at)
        for index in range(at, at + period):
            yield index, times if index == at else 1, blocks[index + period * (times - 1)], blocks[index]
        at += period * times


def _run(keys: Sequence[object], at: int) -> tuple[int, int]:
    """Return (blocks of one layer, how often it stands there) for the run from `at` on that covers most."""
    best = (1, 1)
    for period in range(1, min(8, (len(keys) - at) // 3) + 1):
        layer, times = keys[at : at + period], 1
        while keys[at + period * times : at + period * (times + 1)] == layer:
            times += 1
        if times >= 3 and period * times > best[0] * best[1]:
            best = (period, times)
    return best


def _key(block: Row, named: bool) -> object:
    """Return what two blocks have in common that are shown alike: all but their names, or the numbers in them."""
    norms = tuple((n["where"], norm_words(n)) for n in block["norms"])
    shared = block["parallel_group"] is not None
    name = re.sub(r"\d+", "0", block["name"]) if named else ""
    return name, block["kind"], norms, shared, block.get("scale"), block.get("opaque")


def spanned(first: str, last: str) -> str:
    """Write the names from `h.0.attn` to `h.11.attn` as `h.0…11.attn`; both where more than numbers differ."""
    if re.sub(r"\d+", "0", first) != re.sub(r"\d+", "0", last):
        return f"{first} … {last}"
    parts = zip(re.split(r"(\d+)", first), re.split(r"(\d+)", last), strict=True)
    return "".join(a if a == b else f"{a}…{b}" for a, b in parts)


def shortened(name: str, columns: int) -> str:
    """Return the end of a name that is longer than `columns`."""
    return name if len(name) <= columns else f"…{name[1 - columns :]}"


def norm_words(norm: Row) -> str:
    """Write a norm as `layer 1e-05`, what data multiply it before that, and say where it has no gain.

    Behind that stands the operator that it was written as, where the norm tells one.
    """
    said = f"{norm['modulated']} " if norm.get("modulated") else ""
    gain = "" if norm["gamma"] else " bare" if not norm["beta"] else " no gain"
    form = f" as {norm['form']}" if norm.get("form") else ""
    return f"{said}{norm['kind']} {norm['eps']:g}{gain}{form}"


def counted(number: int, noun: str) -> str:
    """Write `1 block`, `2 blocks`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
