"""Lay text out for people on a page of 100 columns: tables by rich, long lines broken."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from io import StringIO

WIDTH = 100
"""The columns of a page."""


def aligned(header: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str], indent: str = "") -> list[str]:
    """Return the lines of a table: the columns named in `left` to the left, figures to the right.

    A cell that is wider than its column is folded; nothing is cut off.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in header:
        table.add_column(Text(name), justify="left" if name in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    page = StringIO()
    Console(file=page, width=WIDTH - len(indent), color_system=None, legacy_windows=False).print(table)
    return [f"{indent}{line}".rstrip() for line in page.getvalue().splitlines()]


def wrapped(lines: Iterable[str]) -> Iterator[str]:
    """Break lines that are wider than the page, continued with an indent; nothing is cut off but one long word."""
    for line in lines:
        line = line.rstrip()
        if len(line) <= WIDTH:
            yield line
            continue
        start = " " * (len(line) - len(line.lstrip()))
        broken = textwrap.wrap(line.strip(), WIDTH - len(start) - 4, break_on_hyphens=False, replace_whitespace=False)
        yield start + broken[0]
        yield from (f"{start}    {rest}" for rest in broken[1:])


def clock(seconds: float) -> str:
    """Return a time as minutes and seconds: 75 s is 1:15."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
