"""`lnrewrite rehost`: write a checkpoint folder as a stock architecture."""

from __future__ import annotations

import click

from ..loading.identify import identify
from ..loading.source import OpenOptions
from .options import FORCE, Screen, options


@click.command()
@click.argument("model", metavar="FOLDER")
@click.option("--as", "host", required=True, metavar="HOST", help="A model type of transformers, or auto.")
@click.option("-o", "--output", required=True, metavar="OUT", help="The folder to write.")
@FORCE
@options(model=True)
def rehost(model: str, host: str, output: str, force: bool, how: OpenOptions, screen: Screen) -> None:
    """Write a checkpoint folder as a stock architecture that computes the same, so that every server takes it."""
    source = identify(model, how)
    with screen.working(f"opening {model}"):
        from ..rehosting import rehost_source

        found, _ = rehost_source(source, None, host, output, calibrate=None, force=force)
    screen.answer(found.to_dict(), lambda: str(found), found.host)
