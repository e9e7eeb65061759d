"""All cases, made by the generators of each form."""

from __future__ import annotations

import functools
import importlib

from .place import Case, distinct

MODULES = ("archives", "contents", "weights", "graphs", "checkpoints", "feeds", "commands")


@functools.cache
def all_cases() -> dict[str, Case]:
    """Return every case by its name; making the list makes no file."""
    found = []
    for name in MODULES:
        module = importlib.import_module(f"{__package__}.{name}")
        makers = [make for known, make in sorted(vars(module).items()) if known.endswith("_cases")]
        found += [case for make in makers if make.__module__ == module.__name__ for case in make()]
    return {case.name: case for case in distinct(found)}
