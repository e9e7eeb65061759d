"""Describe what of a command's end is not clean."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import Any

from .place import Case

MEMORY = 1024  # MB above what an empty worker holds
SECONDS = 30  # of processor time
LONGEST = 1500  # letters of a message
_ERROR = re.compile(r"error: (LN\d{3}) .+; .+")
_OURS = re.compile(r"(note|warning): .+")
_OVERRIDES = set("\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def trouble(case: Case, row: dict[str, Any]) -> list[str]:
    """List what is not clean: empty for a clean case."""
    return [*_world(case, row), *_end(case, row), *_words(case, row), *_files(case, row)]


def _world(case: Case, row: dict[str, Any]) -> Iterator[str]:
    """Yield what the command did outside its own business."""
    if row["ran"] and not case.runs:
        yield "CODE EXECUTED"
    asked = ("ran code of", "ran", "unpickled") if case.trusts or case.runs else ()
    for kind, what in row["events"]:
        if kind in asked or (kind == "ran" and row["ran"]):
            continue
        yield f"{kind.upper()} {what}"


def _end(case: Case, row: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with how it ended."""
    if row["killed"]:
        yield "HANG" if row["killed"] == "time" else "MEMORY, killed"
    elif row["exit"] not in case.exits:
        yield f"{'CRASH' if row['exit'] < 0 else 'EXIT'} {row['exit']}"
    if row["cpu"] > SECONDS and not row["killed"]:
        yield f"SLOW {row['cpu']} s"
    if row["peak_mb"] > MEMORY:
        yield f"MEMORY {row['peak_mb']} MB"


def _words(case: Case, row: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with what it said."""
    stderr = row["stderr"].rstrip("\n").rpartition("\n")[2] if case.prints else row["stderr"]
    said, lines = row["stdout"] + stderr, stderr.splitlines()
    if "Traceback" in said:
        yield "TRACEBACK"
    if "LN301" in said or "LN302" in said or "a fault of lnrewrite" in said:
        yield "INTERNAL FAULT"
    if odd := {c for c in said if c not in "\n" and (unicodedata.category(c) in ("Cc", "Cs") or c in _OVERRIDES)}:
        yield f"ESCAPE {sorted(odd)!r}"
    if long := max(map(len, lines), default=0) > LONGEST and max(map(len, lines)):
        yield f"MESSAGE of {long} letters"
    if row["exit"] in (1, 2):
        errors = [line for line in lines if not _OURS.fullmatch(line)]
        if len(errors) != 1:
            yield f"STDERR of {len(errors)} lines"
        elif not _ERROR.fullmatch(errors[0]):
            yield "ERROR without its form"
    elif row["exit"] == 0 and [line for line in lines if not _OURS.fullmatch(line)]:
        yield f"STDERR of {len(lines)} lines"


def _files(case: Case, row: dict[str, Any]) -> Iterator[str]:
    """Yield what happened to files."""
    kept = {f"here/{name}" for name in case.keeps}
    allowed = tuple(f"here/{name}" for name in case.writes) if row["exit"] in (0, 3) else ()

    def mine(path: str) -> bool:
        return path in kept or any(path == name or path.startswith(f"{name}/") for name in allowed)

    if left := [p for p in row["new"] if not mine(p)]:
        yield f"LEFT {', '.join(left[:3])}"
    if changed := [p for p in row["changed"] if not mine(p) and p not in ("stdin", "events")]:
        yield f"CHANGED {', '.join(changed[:3])}"
    if lost := [p for p in row["lost"] if not mine(p)]:
        yield f"LOST {', '.join(lost[:3])}"


def reported(row: dict[str, Any]) -> str:
    """Return the code that a command ended with."""
    found = _ERROR.search(row["stderr"])
    return found[1] if found else ""
