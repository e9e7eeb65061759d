"""What commands share: the options of a MODEL and of what is written, and where results and progress go."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ..loading.source import OpenOptions
from ..quiet import LOGGER
from .console import show, working

SEED = click.IntRange(0, 2**63 - 1)
"""What torch's and numpy's generators take."""

OUT = "What to write: .pt2, .onnx, or of a checkpoint folder a folder."

INPUT = click.option("--input", "inputs", multiple=True, metavar="SPEC", help="name=dtype[d0,d1], or .npz/.pt.")
FORCE = click.option("--force", is_flag=True, help="Overwrite OUT: a file, or a folder of a checkpoint alone.")
ACCEPT = click.option(
    "--accept-fixed-paths", "accept", is_flag=True, help="Write a model that chooses by its data on one path."
)
SHOWN = (
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else."),
    click.option("-q", "--quiet", is_flag=True, help="No report, no progress; inspect, verify: one word."),
    click.option("-v", "--verbose", is_flag=True, help="Print more, and the traceback of a fault."),
)
OPENED = (
    INPUT,
    click.option("--factory", metavar="PKG.MODULE:CALLABLE", help="Builds the network that a weight file needs."),
    click.option("--trust-pickle", is_flag=True, help="Allow a file to run code while it is loaded."),
    click.option("--trust-remote-code", is_flag=True, help="Allow a checkpoint folder's own Python code."),
    click.option("--device", default="cpu", show_default=True, help="Where to run the model."),
    click.option("--seed", type=SEED, default=0, show_default=True, help="Of everything random."),
)
DATA = ".txt .jsonl .parquet .bin .npy .npz .pt .safetensors or pkg.module:iterable"
WRITTEN = (
    ACCEPT,
    click.option("--calibrate", metavar="DATA", help=f"{DATA}."),
    click.option("--no-verify", is_flag=True, help="Do not run what exact passes made against the model."),
    click.option("--partial", is_flag=True, help="Write what could be done; exit with 3 if not all."),
    FORCE,
)


@dataclass(frozen=True)
class Screen:
    """Say how a command answers: as JSON, as text, or hardly at all."""

    as_json: bool = False
    quiet: bool = False
    verbose: bool = False

    def answer(self, row: Mapping[str, object], text: Callable[[], str], quiet: str | None = None) -> None:
        """Print a result: the JSON object, else with -q the word `quiet` (nothing where it is empty), else the text."""
        if self.as_json:
            show(json.dumps(row))
        elif not self.quiet or quiet is None:
            show(text())
        elif quiet:
            show(quiet)

    def working(self, message: str) -> AbstractContextManager[None]:
        """Show progress while something takes its time: in a line of a terminal, else now and then in a line."""
        return working(self.quiet, message, plain=not self.as_json)


def options(*, model: bool = False, writes: bool = False) -> Callable[[Any], Any]:
    """Add the options that commands share: a command takes `screen: Screen`, and `how: OpenOptions` with `model`."""

    def add(command: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(command)
        def run(*args: Any, as_json: bool, quiet: bool, verbose: bool, **given: Any) -> Any:
            given["screen"] = Screen(as_json, quiet, verbose)
            if model:
                how = {name: given.pop(name) for name in OpenOptions.__slots__}
                given["how"] = OpenOptions(**{**how, "inputs": list(how["inputs"]) or None})
            return command(*args, **given)

        for option in reversed((*SHOWN, *(OPENED if model else ()), *(WRITTEN if writes else ()))):
            run = option(run)
        return run

    return add


def among(values: Iterable[str]) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Return what completes a value in a shell."""
    return lambda context, parameter, begun: [str(v) for v in values if str(v).startswith(begun)]


def target_of(output: str, force: bool, default: str = ".pt2") -> Path:
    """Return the file to write, `default` where it has no suffix. Raises LN025 where it cannot be written."""
    from ..files.output import check_output, output_named

    return check_output(output_named(output, default), force)


def page_of(output: str | None, force: bool, suffixes: Sequence[str]) -> Path | None:
    """Return the page or picture to write, None where none is asked for. Raises LN025 where it cannot be written."""
    from ..files.output import check_output, output_named

    return None if output is None else check_output(output_named(output, suffixes[0], suffixes), force)


def charts_of(output: str | None, force: bool) -> Path | None:
    """Return the page with charts to write, as `page_of`. Raises LN018 where nothing draws them, before any work."""
    from ..files.output import PAGES

    target = page_of(output, force, PAGES)
    if target is not None:
        from ..pictures.charts import need_charts

        need_charts(str(target))
    return target


def tell_name(output: str | None, written: str | Path | None) -> None:
    """Print under which name OUT was written where that is not the name that was given."""
    if written is not None and output is not None and Path(output) != Path(written):
        LOGGER.warning(f"note: {output} has no suffix: it is written as {written}")
