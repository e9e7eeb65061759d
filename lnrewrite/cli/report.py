"""Pages of commands that write: a model before and after, on the same data; what its norms were exported as."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from ..loading.identify import identify
from ..loading.source import OpenOptions, Source
from ..quiet import LOGGER

if TYPE_CHECKING:
    from ..pipeline.report import Report

REPORT = click.option("--report", "page", metavar="FILE.html", help="Write a page too: before and after, on DATA.")


@contextmanager
def written_to(output: str, dry_run: bool, target: Path | None) -> Iterator[str | None]:
    """Yield where a command writes; with --dry-run nowhere, or where a page shows it a folder that goes again."""
    if not dry_run:
        yield output
    elif target is None:
        yield None
    else:
        with TemporaryDirectory(prefix="lnrewrite-") as folder:
            yield str(Path(folder) / Path(output).name)


def write_report(
    target: Path | None,
    models: tuple[str, str],
    data: str | None,
    how: OpenOptions,
    force: bool,
    called: str | None = None,
) -> dict[str, str]:
    """Write the page of two models, the second one written by the command; return what the JSON says of it.

    called: what the page calls the second one.
    """
    if target is None:
        return {}
    from ..api import load_source
    from ..files.landing import write_text_whole
    from ..probing.diffing import diff

    LOGGER.info(f"reporting in {target}")
    after = replace(how, factory=None, trust_pickle=False, trust_remote_code=False)
    first, second = load_source(identify(models[0], how)), load_source(identify(models[1], after))
    found = diff(first, second, data, seed=how.seed, names=(models[0], called or models[1]))
    write_text_whole(target, found.to_html(("before", "after")), force=force)
    return {"report": str(target)}


def draw_forms(target: Path, source: Source, report: Report, force: bool) -> None:
    """Write the page of a model's streams with the operator that each norm was exported as."""
    from ..api import load_source
    from ..files.landing import write_text_whole
    from ..pictures.page import forms_page

    LOGGER.info(f"drawing {target}")
    forms = [row.to_dict() for row in report.norms or ()]
    write_text_whole(target, forms_page(load_source(source).inspect(), source.name, forms), force=force)
