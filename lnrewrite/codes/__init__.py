"""Explain every code: a page each, `LN101.md` beside this file, which `lnrewrite explain LN101` prints.

A page is a title behind its code, and paragraphs that say what happened, why, and what to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

from ..errors import Code, unknown

GROUPS = {
    "LN0": "the command line, opening models, inputs and data",
    "LN1": "a pass addresses a site and something blocks it",
    "LN2": "detection: what no pass may take for a stream, a block or a norm",
    "LN3": "edits of a graph, of a living module, of a folder",
    "LN4": "results that are compared and proved",
    "LN5": "ONNX: export, sessions, benchmarks, kernels",
    "LN6": "healing",
}
"""What the first digit of a code says."""


@dataclass(frozen=True, slots=True)
class Page:
    """Explain one code: a title, and paragraphs in Markdown with a blank line between two, each on one line."""

    code: Code
    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.code}: {self.title}\n\n{self.text}"


def page(code: str) -> Page:
    """Return the page of a code, in capitals or not. Raises UsageError LN001 for a code that does not exist."""
    found = next((known for known in Code if known.lower() == code.lower()), None)
    if found is None:
        unknown(Code.LN001, "code", code, Code)
    heading, *paragraphs = (files(__name__) / f"{found}.md").read_text("utf-8").split("\n\n")
    title = heading.removeprefix(f"# {found}: ")
    return Page(found, title, "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs))


def explain(code: str) -> str:
    """Return what a diagnostic code means and what to do about it: its page, as text.

    Raises UsageError LN001 for a code that does not exist.
    """
    return str(page(code))
