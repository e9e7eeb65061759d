"""Configure Sphinx: pages in MyST Markdown, and reference pages that are generated from the package when docs build."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import generate

from lnrewrite import __version__

project = "lnrewrite"
author = "The lnrewrite authors"
copyright = "The lnrewrite authors, Apache-2.0"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_click"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"lnrewrite {version}"
html_copy_source = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
add_module_names = False
default_role = "code"
smartquotes = False


def plain(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turn a docstring into reStructuredText: paragraphs in which `this` is code, and indented text, kept as it is."""
    if name == "lnrewrite":  # its docstring is for readers of the source: see the page on architecture
        lines.clear()
    blocks = re.split(r"(?m)^((?: .*\n|\n)*(?: .*))", "\n".join(lines))
    for index, block in enumerate(blocks):
        if index % 2:  # indented
            blocks[index] = f"\n::\n\n{block}\n\n"
        else:
            block = re.sub(r"::(?=\s*\Z)", ":", block)
            parts = re.split(r"`+([^`]*)`+", block)
            parts[::2] = [re.sub(r"([*|_\\])", r"\\\1", part) for part in parts[::2]]
            parts[1::2] = [f"``{' '.join(part.split())}``" for part in parts[1::2]]
            blocks[index] = "".join(parts)
    lines[:] = "".join(blocks).split("\n")


def setup(app: Any) -> None:
    """Write the generated pages before Sphinx reads its sources, and tidy docstrings as autodoc reads them."""
    generate.pages(Path(app.srcdir) / "reference")
    app.connect("autodoc-process-docstring", plain)
