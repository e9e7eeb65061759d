"""Describe the installed passes from what they say of themselves."""

from __future__ import annotations

import inspect

from ..ir import Exactness
from . import registry


def describe(name: str | None = None) -> list[dict[str, object]]:
    """Return a row for each installed pass, or for the one named: name, exactness, data, options, documentation.

    Raises UsageError LN001 for an unknown name.
    """
    rows = []
    for known in [name] if name else sorted(registry.available()):
        cls = registry.find(known)
        doc = inspect.getdoc(cls) or ""
        exactness = vars(cls).get("exactness")
        rows.append(
            {
                "name": known,
                "exactness": str(exactness) if isinstance(exactness, Exactness) else "depends",
                "needs_data": bool(vars(cls).get("needs_data", False)),
                "does": doc.partition("\n")[0],
                "options": ", ".join(f"{f.name.replace('_', '-')}: {f.type}" for f in registry.options(cls)),
                "doc": doc,
            }
        )
    return rows
