"""Read documents one after the other: a text file, the lines of a .jsonl, the rows of a .parquet, or strings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeGuard

from ..errors import LnrewriteError, told
from ..loading.identify import listed

SUFFIXES = (".txt", ".jsonl", ".parquet")
"""The forms of a file of documents; a .txt is one document."""

PIECE = 1 << 20
"""Characters of a document that are read at a time; a piece ends with a line."""

NAMED = "call what holds the text 'text', or name it with heal's --field"

Piece = tuple[str, bool]
"""A part of a document, and whether the document ends with it."""

Bad = Callable[[str, str], LnrewriteError]
"""What makes the error of why and what to do, for data that cannot be read."""


def pieces_of(path: Path, field: str, bad: Bad) -> Iterator[Piece]:
    """Yield the documents of a file in pieces, a bounded part of it in memory at a time.

    field: what holds the text, in a line of a .jsonl and in a row of a .parquet. Raises what `bad` makes.
    """
    read = {".txt": _text, ".jsonl": _lines, ".parquet": _columns}[path.suffix]
    try:
        yield from read(path, field, bad)
    except UnicodeDecodeError as error:
        raise bad(f"it cannot be read as UTF-8 text: {error}", "check the file") from error
    except OSError as error:
        raise bad(f"it cannot be read: {error.strerror or error}", "check the file") from error


def is_document(item: object, field: str) -> TypeGuard[str | Mapping[str, str]]:
    """Return whether an item of an iterable is a text, or a mapping that holds one under `field`."""
    return isinstance(item, str) or (isinstance(item, Mapping) and isinstance(item.get(field), str))


def pieces_in(items: Iterable[object], field: str, bad: Bad) -> Iterator[Piece]:
    """Yield the documents of an iterable: strings, or mappings that hold one under `field`. Raises what `bad` makes."""
    for number, item in enumerate(items):
        if not is_document(item, field):
            raise bad(f"item {number} is not a text, and the first is one", f"give strings, or {field!r} in each")
        yield item if isinstance(item, str) else item[field], True


def _text(path: Path, field: str, bad: Bad) -> Iterator[Piece]:
    with path.open(encoding="utf-8") as stream:
        while text := stream.read(PIECE) + stream.readline():
            yield text, False
    yield "", True


def _lines(path: Path, field: str, bad: Bad) -> Iterator[Piece]:
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                held = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise bad(f"line {number} is not JSON: {told(error)}", "write one JSON object a line") from error
            text = held.get(field) if isinstance(held, dict) else None
            if not isinstance(text, str):
                has = listed(map(str, held)) if isinstance(held, dict) else f"a {type(held).__name__}"
                why = f"line {number} holds {has or 'nothing'} and no text under {field!r}"
                raise bad(why, NAMED)
            yield text, True


def _columns(path: Path, field: str, bad: Bad) -> Iterator[Piece]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise bad("reading .parquet needs pyarrow", "pip install pyarrow (or lnrewrite[data])") from error
    try:
        file = parquet.ParquetFile(path)
        if field not in (names := file.schema_arrow.names):
            raise bad(f"it has the columns {listed(names)} and no {field!r}", NAMED)
        for batch in file.iter_batches(batch_size=256, columns=[field]):
            for number, text in enumerate(batch.column(0).to_pylist()):
                if not isinstance(text, str):
                    why = f"{field!r} of row {number} of a batch is a {type(text).__name__}"
                    raise bad(why, "give a column of strings")
                yield text, True
    except pyarrow.ArrowException as error:
        raise bad(f"it cannot be read as parquet: {told(error)}", "check the file") from error
