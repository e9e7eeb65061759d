"""The command line: thin, nothing imports it; models and passes are loaded by the commands that need them."""

from __future__ import annotations

import difflib
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from . import __version__
from .diagnostics import CATALOGUE, LnrewriteError, UsageError, did_you_mean, unknown
from .diagnostics import explain as explained

if TYPE_CHECKING:
    from .pipeline import Batch, Pipeline
    from .program import Program

PLACEMENTS = ("pre", "post", "peri", "output", "none")


class Group(click.Group):
    """Suggest the nearest command for one that does not exist, and turn every failure into one line."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"there is no command {args[0]!r}; {did_you_mean(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


class Command(click.Command):
    """Suggest the nearest option, and print errors as one line or as one JSON object."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except LnrewriteError as error:
            _fail(ctx, error.to_dict(), str(error), error.exit_code)
        except KeyboardInterrupt:
            _fail(
                ctx,
                {"code": "interrupted", "what": self.name, "why": "Ctrl-C", "remedy": "start again"},
                "interrupted",
                130,
            )
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if ctx.params.get("verbose"):
                raise
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            remedy = "this is a fault of lnrewrite: please report it with what -v prints"
            row = {"code": "LN301", "what": str(self.name), "why": why, "remedy": remedy}
            _fail(ctx, row, f"LN301 {self.name}: {why}; {remedy}", 1)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known = [o for p in self.params for o in p.opts if o.startswith("--")]
            near = difflib.get_close_matches(error.option_name, known, 1)
            raise click.NoSuchOption(error.option_name, possibilities=near, ctx=ctx) from None


def _fail(ctx: click.Context, row: dict[str, Any], line: str, code: int) -> NoReturn:
    if ctx.params.get("as_json"):
        click.echo(json.dumps({"error": row}))
    else:
        click.echo(f"error: {line}", err=True)
    ctx.exit(code)


def _options(*, model: bool = False, writes: bool = False) -> Callable[[Any], Any]:
    """Add the options that commands share."""

    def add(function: Any) -> Any:
        options = [
            click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else."),
            click.option("-q", "--quiet", is_flag=True, help="Print errors only."),
            click.option("-v", "--verbose", is_flag=True, help="Print more; tracebacks of faults."),
        ]
        if model:
            options += [
                click.option(
                    "--input", "inputs", multiple=True, metavar="SPEC", help="name=dtype[d0,d1], or .npz/.pt."
                ),
                click.option(
                    "--factory", metavar="PKG.MODULE:CALLABLE", help="Builds the network that a weight file needs."
                ),
                click.option("--trust-pickle", is_flag=True, help="Allow a file to run code while it is loaded."),
                click.option("--trust-remote-code", is_flag=True, help="Allow a checkpoint folder's own Python code."),
                click.option("--device", default="cpu", show_default=True, help="Where to run the model."),
                click.option("--seed", default=0, show_default=True, help="Seed of everything random."),
            ]
        if writes:
            options += [
                click.option(
                    "--calibrate", metavar="DATA", help=".npz .npy .pt .safetensors .txt or pkg.module:iterable."
                ),
                click.option("--partial", is_flag=True, help="Write what could be done; exit with 3 if not all."),
                click.option("--force", is_flag=True, help="Overwrite OUT."),
            ]
        for option in reversed(options):
            function = option(function)
        return function

    return add


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="lnrewrite")
def main() -> None:
    """See, move and fold the norms of trained networks.

    MODEL is a torch.export archive, weights (safetensors, state dict) with --factory, a transformers checkpoint folder,
    pkg.module:callable, or demo:tinygpt.
    """


@main.command(cls=Command)
@click.argument("model")
@_options(model=True)
def inspect(model: str, as_json: bool, quiet: bool, verbose: bool, **how: Any) -> None:
    """Show the residual streams: blocks, placements, norms, and what is not understood."""
    from .tables import placement_map

    with _working(as_json or quiet, f"capturing {model}"):
        found = _load(model, **how).inspect()
    if not any(s["blocks"] for s in found["streams"]):
        row = next(iter(found["refusals"]))
        raise LnrewriteError(row["code"], f"{model}: {row['site']}", row["why"], row["remedy"])
    if not quiet:
        click.echo(json.dumps(found) if as_json else placement_map(found, verbose))


@main.command(cls=Command)
@click.argument("model")
@click.option("--to", "to", required=True, metavar="PLACEMENT", help="pre, post, peri, output or none.")
@click.option("-o", "--output", required=True, metavar="OUT", help="The file to write (.pt2).")
@click.option("--norm", default="auto", show_default=True, help="Kind of inserted norms: auto, layer or rms.")
@click.option("--blocks", metavar="SELECT", help="name-glob, 3, 0-5, first:25%, last:2, attention, mlp, joined by ';'.")
@_options(model=True, writes=True)
def convert(model: str, to: str, output: str, norm: str, blocks: str | None, **how: Any) -> None:
    """Change where the norms sit: MODEL with every (selected) block converted to one placement."""
    from .pipeline import Pipeline

    if to not in PLACEMENTS:
        unknown("LN003", "placement", to, PLACEMENTS)
    options = [f"to={to}", *([f"norm={norm}"] if norm != "auto" else []), *([f"blocks={blocks}"] if blocks else [])]
    _rewrite(model, Pipeline.parse(f"place{{{' '.join(options)}}}"), output, **how)


@main.command(cls=Command)
@click.argument("model")
@click.option("--passes", "text", metavar="PIPELINE", help="pass{option=value},pass,... (see `lnrewrite passes`).")
@click.option("--preset", metavar="NAME", help="A named pipeline; runs as with --partial.")
@click.option("-o", "--output", metavar="OUT", help="The file to write (.pt2).")
@click.option("--dry-run", is_flag=True, help="Say what would be done and write nothing.")
@_options(model=True, writes=True)
def opt(model: str, text: str | None, preset: str | None, output: str | None, dry_run: bool, **how: Any) -> None:
    """Run a pipeline of passes."""
    from .pipeline import Pipeline

    if (text is None) == (preset is None):
        raise click.UsageError("give either --passes or --preset")
    if output is None and not dry_run:
        raise click.UsageError("give -o OUT, or --dry-run")
    pipeline = Pipeline.parse(text) if text is not None else Pipeline.preset(str(preset))
    _rewrite(model, pipeline, None if dry_run else output, preset=preset is not None, **how)


@main.command(cls=Command)
@click.argument("reference")
@click.argument("candidate")
@click.option("--tolerance", metavar="CLASS", help="An exactness class or a relative error; default algebraic.")
@_options(model=True)
def verify(
    reference: str, candidate: str, tolerance: str | None, as_json: bool, quiet: bool, verbose: bool, **how: Any
) -> None:
    """Compare two models by running both in float64."""
    from .tables import report_of_verify
    from .verifying import check_tolerance
    from .verifying import verify as compare

    check_tolerance(tolerance)
    with _working(as_json or quiet, "capturing and running both models"):
        found = compare(_load(reference, **how), _load(candidate, **how), tolerance=tolerance, seed=how["seed"])
    if not quiet:
        click.echo(json.dumps(found) if as_json else report_of_verify(found))
    if found["verdict"] == "different":
        sys.exit(4)


@main.command(cls=Command)
@click.argument("name", required=False)
@_options()
def passes(name: str | None, as_json: bool, quiet: bool, verbose: bool) -> None:
    """List the passes, or describe one."""
    from .catalogue import describe

    rows = describe(name)
    if as_json:
        click.echo(json.dumps({"passes": rows}))
    elif name:
        click.echo(
            f"{rows[0]['name']} ({rows[0]['exactness']})\n\n{rows[0]['doc']}\n\noptions: {rows[0]['options'] or 'none'}"
        )
    else:
        for row in rows:
            click.echo(f"{row['name']:<22}{row['exactness']:<12}{row['does'][:66]}")


@main.command(cls=Command)
@click.argument("code")
@_options()
def explain(code: str, as_json: bool, quiet: bool, verbose: bool) -> None:
    """Say what a diagnostic code means and what to do about it."""
    text = explained(code)
    page = CATALOGUE[code.upper()]
    click.echo(json.dumps({"code": code.upper(), "title": page.title, "text": page.text}) if as_json else text)


def _load(model: str, inputs: tuple[str, ...], **how: Any) -> Program:
    from .program import load

    return load(model, inputs=list(inputs) or None, **how)


def _rewrite(
    model: str,
    pipeline: Pipeline,
    output: str | None,
    *,
    calibrate: str | None,
    partial: bool,
    force: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    preset: bool = False,
    **how: Any,
) -> None:
    """Run a pipeline on a model and write the result: the body of convert and opt."""
    from .output import check_output

    target = None
    if output is not None:
        target = Path(output) if Path(output).suffix else Path(f"{output}.pt2")
        if target.suffix != ".pt2":
            why = f"{target.suffix} is not written by this command"
            raise UsageError("LN025", output, why, "name a .pt2 file")
        check_output(target, force)
    with _working(as_json or quiet, f"capturing {model}") as say:
        program = _load(model, **how)
        data = _data(program, calibrate, how["seed"])
        result = pipeline.run(program, data, partial or preset, how["seed"], data=calibrate, progress=say)
        report = replace(result.report, output=str(target) if target else None)
        refused = bool(report.refusals)
        if refused and preset and not any(s.edits for s in report.steps):
            first = report.refusals[0]
            raise LnrewriteError(first.code, first.site, first.why, first.remedy)
        if target:
            say(f"writing {target}")
            result.program.save(target, force=force)
    if as_json:
        click.echo(json.dumps(report.to_dict()))
    elif not quiet:
        click.echo(f"{pipeline}\n{report}")
        click.echo(f"written to {target}" if target else "dry run: nothing was written")
    if refused and partial and not preset:
        sys.exit(3)


def _data(program: Program, calibrate: str | None, seed: int) -> list[Batch] | None:
    """Read --calibrate; a model whose one integer input looks up a table of 256 rows reads bytes."""
    if calibrate is None:
        return None
    from .data import load_data

    limits = program.id_limits()
    bytes_in = len(limits) == 1 and set(limits.values()) == {256} and not program.tokenizer
    example = program.example_inputs()
    axes = program.dynamic_axes()
    return [*load_data(calibrate, example, program.tokenizer, seed, dynamic=axes, byte_level=bytes_in, limit=64)]


@contextmanager
def _working(silent: bool, message: str) -> Iterator[Callable[[str], None]]:
    """Show on a terminal's stderr what is going on; elsewhere stay quiet."""
    warnings.simplefilter("ignore")
    if silent or not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status(message) as status:
        yield status.update


if __name__ == "__main__":
    main()
