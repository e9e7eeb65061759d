"""`lnrewrite inspect`, `probe`, `diff`: look at a model, at what its streams hold on data, at two models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from ..files.landing import write_text_whole
from ..files.output import PICTURES
from ..loading.identify import identify
from ..loading.source import Format, OpenOptions
from ..quiet import LOGGER
from .options import DATA, Screen, charts_of, options, page_of

FORCED = click.option("--force", is_flag=True, help="Overwrite OUT.")

LOOKED = f"{DATA}; without it inputs are made up."


@click.command()
@click.argument("model")
@click.option(
    "--hosts", is_flag=True, help="A checkpoint folder: which stock architectures could hold it, and why not."
)
@click.option("-o", "--output", metavar="OUT", help="Draw the streams: an .html page, or an .svg picture.")
@FORCED
@options(model=True)
def inspect(model: str, hosts: bool, output: str | None, force: bool, how: OpenOptions, screen: Screen) -> None:
    """Show the residual streams: blocks, placements, norms, and what is not understood."""
    from .tables import host_table, placement_map

    source, target = identify(model, how), page_of(output, force, PICTURES)
    with screen.working(f"capturing {model}"):
        from ..api import load_source
        from ..checkpoints.kept import stored_program
        from ..rehosting import fits_of

        program, fits = fits_of(source) if hosts else (stored_program(source) or load_source(source), [])
        LOGGER.info("looking for residual streams")
        found = program.inspect()
        if hosts:
            found["hosts"] = [fit.to_dict() for fit in fits]
    if not any(stream["blocks"] for stream in found["streams"]):
        from ..detect.misses import none_found

        raise none_found(model, program.certified.refusals)
    shown = host_table if hosts else lambda row: placement_map(row, screen.verbose)
    if target is not None:
        from ..pictures.drawing import stream_svg
        from ..pictures.page import stream_page

        text = stream_svg(found) if target.suffix == ".svg" else stream_page(found, model)
        write_text_whole(target, text, force=force)
    screen.answer({**found, **_named(target)}, lambda: f"{shown(found)}{_told(target)}", found["placement"])


@click.command()
@click.argument("model")
@click.option("--data", metavar="DATA", help=LOOKED)
@click.option("-o", "--output", metavar="OUT", help="An .html page: the streams drawn, charts with words, tables.")
@FORCED
@options(model=True)
def probe(model: str, data: str | None, output: str | None, force: bool, how: OpenOptions, screen: Screen) -> None:
    """Show what the residual streams hold on data: sizes, outliers, influence and gradients by depth."""
    source, target = identify(model, how), charts_of(output, force)
    with screen.working(f"capturing {model}"):
        from ..api import load_source
        from ..data.calibration import check_data
        from ..probing.probe import probe as probed

        if data is not None:
            check_data(data)
        found = probed(load_source(source), data, name=model, seed=how.seed)
        if target is not None:
            LOGGER.info("drawing the report")
            write_text_whole(target, found.to_html(), force=force)
    quiet = f"{found.fp16.max_abs:.6g}"
    screen.answer({**found.to_dict(), **_named(target)}, lambda: f"{found}{_told(target)}", quiet)


@click.command()
@click.argument("first")
@click.argument("second")
@click.option("--data", metavar="DATA", help=LOOKED)
@click.option("-o", "--output", metavar="OUT", help="An .html page: both models' charts in one.")
@FORCED
@click.option("--hosts", is_flag=True, help="Which stock architectures could hold each, of checkpoint folders.")
@options(model=True)
def diff(
    first: str,
    second: str,
    data: str | None,
    output: str | None,
    force: bool,
    hosts: bool,
    how: OpenOptions,
    screen: Screen,
) -> None:
    """Show two models side by side: placements, norms, sizes, figures on the same data, and how far they are apart."""
    sources, target = [identify(model, how) for model in (first, second)], charts_of(output, force)
    with screen.working(f"capturing {first}"):
        from ..api import load_source
        from ..data.calibration import check_data
        from ..probing.diffing import diff as compared

        if data is not None:
            check_data(data)
        if hosts:
            from ..rehosting import hosts_of

            held = [hosts_of(s) if s.format is Format.TRANSFORMERS else (load_source(s), None) for s in sources]
        else:
            held = [(load_source(source), None) for source in sources]
        (one, fit), (two, fits) = held
        found = compared(one, two, data, seed=how.seed, names=(first, second))
        found = replace(found, hosts=(fit, fits)) if hosts else found
        if target is not None:
            write_text_whole(target, found.to_html(), force=force)
    screen.answer({**found.to_dict(), **_named(target)}, lambda: f"{found}{_told(target)}", "")


def _named(target: Path | None) -> dict[str, object]:
    """Return what the JSON says of a file that was written."""
    return {} if target is None else {"output": str(target)}


def _told(target: Path | None) -> str:
    return "" if target is None else f"\n\nwritten: {target}"
