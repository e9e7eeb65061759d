"""Read the config.json of a transformers folder: an object, with the types that transformers takes for granted.

What it names as code to run is found wherever it stands, for a config may hold the configs of its parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from .foreign import Foreign, Json, read_file

_KERNELS = ("attn_implementation", "experts_implementation", "kernel_config")
"""Keys that transformers takes the name of a repository of compiled code from (integrations/hub_kernels.py)."""


def read_config(folder: Path) -> Json:
    """Return what a folder's config.json holds. Raises Foreign where that is no config."""
    try:
        content = read_file(folder / "config.json")
    except Foreign as error:
        raise Foreign(f"config.json: {error}") from error
    names = content.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(n, str) for n in names)):
        raise _odd("architectures", names, "a list of names")
    if not isinstance(content.get("model_type", ""), str):
        raise _odd("model_type", content["model_type"], "a name")
    code = content.get("auto_map")
    if code is not None and not (isinstance(code, dict) and all(_names(v) for v in code.values())):
        raise _odd("auto_map", code, "an object of names")
    return content


def _odd(key: str, value: object, wanted: str) -> Foreign:
    return Foreign(f"config.json: {key} is {str(value)[:60]!r}, and not {wanted}")


def _names(value: object) -> bool:
    """Return whether a value of `auto_map` is one: a name, or the names of a slow and a fast tokenizer."""
    several = isinstance(value, list) and all(n is None or isinstance(n, str) for n in value)
    return isinstance(value, str) or several


def code_named(content: Mapping[str, object]) -> list[str]:
    """Return the code that a config asks for, sorted: `module.Class` of any `auto_map` in it, kernels of the hub."""
    found: set[str] = set()
    for held in _objects(content):
        for name in _flat(held.get("auto_map")):
            found.add(name)
        for key in _KERNELS:
            found.update(n for k in (key, f"_{key}", f"_{key}_internal") for n in _flat(held.get(k)) if "/" in n)
    return sorted(found)


def _objects(value: object) -> Iterator[Mapping[str, object]]:
    """Yield every object in a value of JSON."""
    todo = [value]
    while todo:
        held = todo.pop()
        if isinstance(held, Mapping):
            yield held
        todo += held.values() if isinstance(held, Mapping) else held if isinstance(held, list) else ()


def _flat(value: object) -> Iterator[str]:
    """Yield every text in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _flat(part)
