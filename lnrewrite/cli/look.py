"""`lnrewrite inspect`, `probe`, `diff`: look at a model, at what its streams hold on data, at two models."""

from __future__ import annotations

import click

from ..errors import Code, LnrewriteError, Refusal
from ..loading.identify import identify
from ..loading.source import OpenOptions
from ..quiet import LOGGER
from .options import Screen, options

DATA = ".npz .npy .pt .safetensors .txt or pkg.module:iterable; without it inputs are made up."


@click.command()
@click.argument("model")
@click.option(
    "--hosts", is_flag=True, help="A checkpoint folder: which stock architectures could hold it, and why not."
)
@options(model=True)
def inspect(model: str, hosts: bool, how: OpenOptions, screen: Screen) -> None:
    """Show the residual streams: blocks, placements, norms, and what is not understood."""
    from .tables import host_table, placement_map

    source = identify(model, how)
    with screen.working(f"capturing {model}"):
        from ..api import load_source
        from ..rehosting import fits_of

        program, fits = fits_of(source) if hosts else (load_source(source), [])
        LOGGER.info("looking for residual streams")
        found = program.inspect()
        if hosts:
            found["hosts"] = [fit.to_dict() for fit in fits]
    if not any(stream["blocks"] for stream in found["streams"]):
        nothing = Refusal(
            Code.LN201,
            "model",
            "no residual block was found",
            "give the part of the model that holds the residual blocks",
        )
        first = next(iter(program.certified.refusals), nothing)
        raise LnrewriteError.of(first.at(f"{model}: {first.site}"))
    shown = host_table if hosts else lambda row: placement_map(row, screen.verbose)
    screen.answer(found, lambda: shown(found), found["placement"])


@click.command()
@click.argument("model")
@click.option("--data", metavar="DATA", help=DATA)
@options(model=True)
def probe(model: str, data: str | None, how: OpenOptions, screen: Screen) -> None:
    """Show what the residual streams hold on data: sizes, outliers, influence and gradients by depth."""
    source = identify(model, how)
    with screen.working(f"capturing {model}"):
        from ..api import load_source
        from ..data.batches import check_data
        from ..probing.probe import probe as probed

        if data is not None:
            check_data(data)
        found = probed(load_source(source), data, name=model, seed=how.seed)
    screen.answer(found.to_dict(), lambda: str(found), f"{found.fp16.max_abs:.6g}")


@click.command()
@click.argument("first")
@click.argument("second")
@click.option("--data", metavar="DATA", help=DATA)
@options(model=True)
def diff(first: str, second: str, data: str | None, how: OpenOptions, screen: Screen) -> None:
    """Show two models side by side: placements, norms, sizes, figures on the same data, and how far they are apart."""
    sources = [identify(model, how) for model in (first, second)]
    with screen.working(f"capturing {first}"):
        from ..api import load_source
        from ..data.batches import check_data
        from ..probing.diffing import diff as compared

        if data is not None:
            check_data(data)
        one = load_source(sources[0])
        LOGGER.info(f"capturing {second}")
        found = compared(one, load_source(sources[1]), data, seed=how.seed, names=(first, second))
    screen.answer(found.to_dict(), lambda: str(found), "")
