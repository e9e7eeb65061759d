"""Find passes by name: shipped ones and anyone's come through one entry-point group, `lnrewrite.passes`.

Listing imports nothing; a pass is imported when it is used, so that one broken plugin disturbs no other pass.
"""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any, cast

from .. import errors
from ..errors import Code, LnrewriteError, UsageError, code_of_others
from .presets import PRESETS
from .protocols import Proposer

GROUP = "lnrewrite.passes"
_SHIPPED = "lnrewrite.passes"  # a package named by string: lnrewrite never imports its passes itself
_MEMBERS = ("name", "exactness", "needs_data", "propose")


def available() -> dict[str, EntryPoint]:
    """Return every pass that can be asked for by name, sorted, without importing any.

    Where two packages register one name, the first stands here and `find` refuses to choose.
    """
    found: dict[str, EntryPoint] = {}
    for entry in sorted(_entries(), key=lambda e: (e.name, e.value)):
        found.setdefault(entry.name, entry)
    return found


def find(name: str) -> type[Proposer]:
    """Import the pass of that name, or the one that `package.module:Class` points to.

    Raises UsageError LN001 for an unknown name, LN006 where two packages claim it, and LN005 where it cannot be
    imported or is no pass.
    """
    if ":" in name:
        return _load(EntryPoint(name, name, GROUP), UsageError)
    claims = {entry.value: entry for entry in _entries() if entry.name == name}
    if not claims and name in PRESETS:
        remedy = f"--preset {name}, or Pipeline.preset({name!r})"
        raise UsageError(Code.LN001, f"pass {name!r}", "it is a preset", remedy)
    if not claims:
        errors.unknown(Code.LN001, "pass", name, available())
    if len(claims) > 1:
        raise UsageError(
            Code.LN006,
            f"pass {name!r}",
            "several packages register that name: " + " and ".join(sorted(map(_origin, claims.values()))),
            "uninstall one of them, or write `package.module:Class` in the pipeline",
        )
    return _load(claims.popitem()[1], LnrewriteError)


def options(cls: type[Proposer]) -> tuple[dataclasses.Field[object], ...]:
    """Return the fields of a pass, which are its options."""
    return dataclasses.fields(cast(Any, cls))


def name_of(cls: type[Proposer]) -> str:
    """Return what a pipeline's text calls a pass: its name where `find` gives this very class, else module:Class."""
    entry = available().get(cls.name)
    if entry is not None and (entry.module, entry.attr) != (cls.__module__, cls.__qualname__):
        try:  # another class of that name, or this one under another address
            entry = entry if find(cls.name) is cls else None
        except LnrewriteError:
            entry = None
    return str(cls.name) if entry is not None else f"{cls.__module__}:{cls.__qualname__}"


def _entries() -> list[EntryPoint]:
    """Return the group's entry points, and what lies in the folder and was not there when the package was installed."""
    installed = list(entry_points(group=GROUP))
    known = {entry.value for entry in installed}
    return [*installed, *(entry for entry in _listed() if entry.value not in known)]


def _listed() -> Iterator[EntryPoint]:
    """Yield the shipped passes by convention: module `fold_affine` holds class `FoldAffine`, pass `fold-affine`."""
    spec = find_spec(_SHIPPED)
    for module in pkgutil.iter_modules(spec.submodule_search_locations if spec else []):
        if not module.name.startswith("_"):
            words = module.name.split("_")
            value = f"{_SHIPPED}.{module.name}:{''.join(map(str.capitalize, words))}"
            yield EntryPoint("-".join(words), value, GROUP)


def _load(entry: EntryPoint, error: type[LnrewriteError]) -> type[Proposer]:
    """Import one pass and check that it is one; whatever a plugin raises becomes one line that names it."""
    what, remedy = f"pass {entry.name!r}", "repair or uninstall that package; other passes still work"
    with code_of_others(lambda why: error(Code.LN005, what, f"importing {_origin(entry)} failed: {why}", remedy)):
        cls = entry.load()
    lacks = [member for member in _MEMBERS if not hasattr(cls, member)]
    lacks += sorted(getattr(cls, "__abstractmethods__", ()))
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)) or lacks:
        why = f"it has no {', '.join(lacks)}" if lacks else "it is not a dataclass"
        remedy = "see examples/custom_pass for a complete pass"
        raise error(Code.LN005, f"pass {entry.name!r}", f"{_origin(entry)} is not a pass: {why}", remedy)
    return cast("type[Proposer]", cls)


def _origin(entry: EntryPoint) -> str:
    """Return where an entry point comes from: its address, and the distribution where one is known."""
    return f"{entry.value} ({entry.dist.name})" if entry.dist else entry.value
