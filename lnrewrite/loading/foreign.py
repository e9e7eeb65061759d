"""Read what others wrote and nobody has checked: JSON of bounded size and depth, names of files that stay in a folder.

Nothing here trusts a number that a file gives: what would be read or built is weighed before it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

LIMIT = 100_000_000
"""Bytes of one JSON text: safetensors' own limit on its header, the longest that anyone writes."""
ITEMS = 4_000_000
"""Values of one JSON text: the header of a model of 200,000 tensors has half as many."""
DEPTH = 64
"""How deep a JSON text nests at most; a config has fewer than ten levels."""


class Foreign(ValueError):
    """Signal what is wrong with content that came from elsewhere."""


Json = dict[str, Any]
"""What a JSON text holds; whoever reads a value of it looks at what that is."""


def read_object(content: bytes) -> Json:
    """Return the object that a JSON text holds. Raises Foreign where it is none, too long, or nests too deep."""
    items = sum(content.count(sign) for sign in (b",", b"[", b"{"))
    if len(content) > LIMIT or items > ITEMS:
        raise Foreign(f"its JSON has {len(content)} bytes and up to {items} values; no model needs as many")
    try:
        held = json.loads(content, object_pairs_hook=_once)
    except RecursionError as error:
        raise Foreign(f"its JSON nests deeper than {DEPTH} levels") from error
    except ValueError as error:
        raise Foreign(f"its JSON cannot be read: {error}") from error
    if not isinstance(held, dict):
        raise Foreign(f"its JSON holds a {type(held).__name__}, not an object")
    level: list[dict[str, object] | list[object]] = [held]
    for _ in range(DEPTH):
        level = [v for each in level for v in _parts(each) if isinstance(v, dict | list)]
    if level:
        raise Foreign(f"its JSON nests deeper than {DEPTH} levels")
    return held


def read_file(path: Path) -> Json:
    """Return the object that a JSON file holds. Raises Foreign as `read_object`, OSError where it cannot be read."""
    if (size := path.stat().st_size) > LIMIT:
        raise Foreign(f"its JSON has {size} bytes; no model needs as many")
    return read_object(path.read_bytes())


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    held = dict(pairs)
    if len(held) != len(pairs):
        raise Foreign("an object has the same key twice")
    return held


def _parts(held: dict[str, object] | list[object]) -> Iterable[object]:
    return held.values() if isinstance(held, dict) else held


def astray(path: Path, roots: Iterable[Path]) -> str:
    """Return where a path leads that is in none of the resolved `roots`, in words; empty where it stays inside."""
    try:
        end = path.resolve()
        end.exists()
    except (OSError, ValueError, RuntimeError) as error:  # a zero byte, a name too long, links in a circle
        return f"is not a file name ({error})"
    return "" if any(end.is_relative_to(root) for root in roots) else f"leads to {end}, outside the folder"


# --- safetensors

BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""How many bits a value of each type of safetensors has (huggingface.co/docs/safetensors, dtype.rs)."""


def safetensors_header(path: Path) -> tuple[dict[str, Json], int]:
    """Return the rows of a safetensors file by key (dtype, shape, data_offsets), and where its data start in bytes.

    The rows are checked: types are known, sizes are what shapes and offsets say, and the data lie without gap or
    overlap to the file's end. Raises Foreign, and OSError where it cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > LIMIT or 8 + length > size:
            raise Foreign("its safetensors header is cut off")
        try:
            rows = read_object(stream.read(length))
        except Foreign as error:
            raise Foreign(f"its safetensors header cannot be read: {error}") from error
    rows.pop("__metadata__", None)
    end = 0
    for key, (start, stop) in sorted(((k, _place(k, row)) for k, row in rows.items()), key=lambda row: row[1]):
        if start != end:
            raise Foreign(f"its safetensors header puts {key!r} at {start}, where {end} is expected")
        end = stop
    if 8 + length + end != size:
        raise Foreign(f"its safetensors header promises {8 + length + end} bytes and the file has {size}")
    return rows, 8 + length


def _place(key: str, row: object) -> tuple[int, int]:
    """Return where a tensor starts and stops. Raises Foreign where its row is not of the form."""
    if not isinstance(row, dict) or set(row) != {"dtype", "shape", "data_offsets"}:
        raise Foreign(f"its safetensors header says of {key!r} {str(row)[:60]}")
    dtype, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
    numbers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else [None]
    whole = all(type(n) is int and 0 <= n < 1 << 63 for n in numbers)
    if not whole or len(offsets) != 2 or len(shape) > 64 or not isinstance(dtype, str) or dtype not in BITS:
        raise Foreign(f"its safetensors header says of {key!r} {str(row)[:60]}")
    start, stop = offsets
    if (stop - start) * 8 != prod(shape) * BITS[dtype]:
        raise Foreign(f"{key!r} is {dtype} {shape} and has {stop - start} bytes")
    return start, stop
