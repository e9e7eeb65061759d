"""The command line: thin, nothing imports it; models and passes are loaded by the commands that need them."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .._version import __version__
from ..errors import Code, Exit, LnrewriteError, UsageError, unknown
from ..files.output import PAGES
from ..loading.identify import identify
from ..loading.source import Format, OpenOptions
from ..pipeline.presets import PRESETS, TARGETS
from ..quiet import LOGGER
from .about import doctor, versions, versions_told
from .console import Group, show
from .generate import generate
from .heal import heal
from .kernels import kernels
from .look import diff, inspect, probe
from .options import ACCEPT, FORCE, OUT, Screen, among, charts_of, options, page_of, target_of, tell_name
from .processes import joined
from .rehost import rehost
from .report import REPORT, draw_forms, write_report, written_to

if TYPE_CHECKING:
    from ..pipeline.driver import Pipeline

OPSET, THREADS, ROUNDS = click.IntRange(1, 1000), click.IntRange(1, 1024), click.IntRange(1, 100_000)
DEVICES, DTYPES = ("cpu", "cuda", "tensorrt", "generic"), ("fp32", "fp16", "bf16")


@click.group(
    "lnrewrite",
    cls=Group,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("--version", is_flag=True, help="Show the version and exit; with -v those of the libraries too.")
@click.option("-v", "--verbose", is_flag=True, hidden=True)
@click.pass_context
def main(context: click.Context, version: bool, verbose: bool) -> None:
    """See, move and fold the norms of trained networks.

    MODEL is a torch.export archive, an ONNX file, weights (safetensors, state dict) with --factory, a transformers
    checkpoint folder, pkg.module:callable, or demo:tinygpt.
    """
    if version:
        show(f"lnrewrite, version {__version__}")
        if verbose:
            show("\n".join(versions_told(versions())))
        context.exit()
    if verbose:
        raise click.UsageError("-v stands behind a command, or with --version", context)
    if context.invoked_subcommand is None:
        show(context.get_help())


@main.command()
@click.argument("model")
@click.option(
    "--to",
    required=True,
    metavar="PLACEMENT",
    help="pre, post, peri, output, none, mix (Mix-LN), sub (Sub-LN) or lns (LayerNorm Scaling).",
    shell_complete=among(TARGETS),
)
@click.option("-o", "--output", metavar="OUT", help=f"{OUT}  [default: NAME.PLACEMENT.pt2, here]")
@click.option("--dry-run", is_flag=True, help="Say what would be done and write nothing.")
@click.option("--norm", default="auto", show_default=True, help="Kind of inserted norms: auto, layer or rms.")
@click.option("--blocks", metavar="SELECT", help="name-glob, 3, 0-5, first:25%, last:2, attention, mlp, joined by ';'.")
@click.option("--post", metavar="SELECT", help="With --to mix: the blocks that are post.  [default: first:25%]")
@click.option("--fit", help="With DATA: reconstruct, the default but for large folders, or constants alone.")
@click.option("--keep-sizes", is_flag=True, help="Post to pre, exactly: keep what a norm divides by, for each token.")
@click.option("--as", "host", metavar="HOST", help="Of a checkpoint folder: write a stock architecture, or auto.")
@REPORT
@options(model=True, writes=True)
def convert(
    model: str,
    to: str,
    output: str | None,
    dry_run: bool,
    norm: str,
    blocks: str | None,
    post: str | None,
    fit: str | None,
    keep_sizes: bool,
    host: str | None,
    **asked: Any,
) -> int:
    """Change where the norms sit: MODEL with every (selected) block converted to one placement.

    Under torchrun the same command shares the calibration data over all processes.
    """
    from ..pipeline.driver import Pipeline
    from ..pipeline.spec import placing

    if to not in TARGETS:
        unknown(Code.LN003, "placement", to, TARGETS)
    if keep_sizes and fit:
        raise UsageError(Code.LN003, "--fit with --keep-sizes", "nothing is fitted where sizes are kept", "give one")
    plain = host is not None and to == "pre" and not keep_sizes  # no stock architecture scales its skips
    text = placing(to, norm, _selection(blocks), fit or "auto", keep_sizes, plain, _selection(post))
    return _rewrite(model, Pipeline.parse(text), output, dry_run, named=to, host=host, **asked)


def _selection(given: str | None) -> str | None:
    """Return a selection of blocks as an option of a pass holds it. Raises UsageError LN004."""
    selection = None if given is None else ";".join(term.strip() for term in given.split(";"))
    if selection is not None and not re.fullmatch(r"[^\s{}]+", selection):
        remedy = "write terms such as 0-5 or attention, joined by ';'"
        raise UsageError(Code.LN004, f"block selection {given!r}", "it is empty or holds spaces or braces", remedy)
    return selection


@main.command()
@click.argument("model")
@click.option("--passes", "text", metavar="PIPELINE", help="pass{option=value},pass,... (see `lnrewrite passes`).")
@click.option(
    "--preset", metavar="NAME", help="A named pipeline; runs as with --partial.", shell_complete=among(PRESETS)
)
@click.option("-o", "--output", metavar="OUT", help=OUT)
@click.option("--dry-run", is_flag=True, help="Say what would be done and write nothing.")
@REPORT
@options(model=True, writes=True)
def opt(model: str, text: str | None, preset: str | None, output: str | None, dry_run: bool, **asked: Any) -> int:
    """Run a pipeline of passes."""
    from ..pipeline.driver import Pipeline

    if (text is None) == (preset is None):
        raise click.UsageError("Give either --passes or --preset")
    if output is None and not dry_run:
        raise click.UsageError("Give -o OUT, or --dry-run")
    pipeline = Pipeline.parse(text) if text is not None else Pipeline.preset(str(preset))
    return _rewrite(model, pipeline, output, dry_run, lenient=preset is not None, **asked)


@main.command()
@click.argument("model")
@click.option("-o", "--output", required=True, metavar="OUT", help="The .onnx file to write, or a folder of a decoder.")
@click.option(
    "--target", metavar="TARGET", required=True, help="cpu, cuda, tensorrt or generic.", shell_complete=among(DEVICES)
)
@click.option("--dtype", default="fp32", show_default=True, help="fp32, fp16 or bf16.", shell_complete=among(DTYPES))
@click.option("--opset", type=OPSET, metavar="N", help="The operator set; default 18, or the ONNX file's own.")
@click.option("--optimize", metavar="MODE", help="auto or none: fuse the rest too; default auto for cpu, cuda.")
@click.option("--fuse", default="ops", show_default=True, help="ops: what ONNX Runtime has; custom: lnrewrite's too.")
@click.option("--int4", is_flag=True, help="Store the weights of products in 4 bits, and measure what that loses.")
@click.option("--int8", is_flag=True, help="The same in 8 bits, and what they multiply too: for the CPU.")
@click.option("--no-kv-cache", is_flag=True, help="A model that generates: tokens in, logits out, and no cache.")
@click.option("--no-verify", is_flag=True, help="Do not run the file against the model. Nothing proves it then.")
@click.option(
    "--explain", "page", metavar="FILE.html", help="Draw the streams: what each norm was written as, and why."
)
@ACCEPT
@FORCE
@options(model=True)
def export(
    model: str,
    output: str,
    force: bool,
    int4: bool,
    int8: bool,
    no_kv_cache: bool,
    no_verify: bool,
    page: str | None,
    accept: bool,
    how: OpenOptions,
    screen: Screen,
    **wanted: object,
) -> None:
    """Write ONNX with the norm forms that a target runs best, and say why each was chosen."""
    if int4 and int8:
        raise UsageError(Code.LN003, "--int4 with --int8", "weights are stored in one way", "give one")
    wanted["quantize"] = "int4" if int4 else "int8" if int8 else None
    source, drawn = identify(model, how), page_of(page, force, PAGES)
    named = not Path(output).suffix
    folder = named and (bool(source.graphs) or source.format is Format.TRANSFORMERS and not no_kv_cache)
    target = Path(output) if folder else target_of(output, force, default=".onnx")
    if not folder and target.suffix != ".onnx":
        raise UsageError(Code.LN025, output, "export writes ONNX files", "name an .onnx file")
    with screen.working(f"capturing {model}"):
        from ..api import export_source

        cache = False if no_kv_cache or source.graphs else True if folder else None
        report = export_source(source, target, cache, accept, force=force, verify=not no_verify, **wanted)
        if drawn is not None:
            draw_forms(drawn, source, report, force)
    if no_verify:
        LOGGER.warning(f"warning: {target} was not verified: nothing shows that it computes what {model} does")
    screen.answer(report.to_dict(), lambda: str(report), "")
    tell_name(output, target)


@main.command()
@click.argument("reference")
@click.argument("candidate")
@click.option("--tolerance", metavar="CLASS", help="An exactness class or a relative error; default algebraic.")
@options(model=True)
def verify(reference: str, candidate: str, tolerance: str | None, how: OpenOptions, screen: Screen) -> int:
    """Compare two models by running both in float64; exit with 4 where they differ."""
    from .tables import comparison

    sources = identify(reference, how), identify(candidate, how)  # a missing file is told before anything is captured
    with screen.working(f"capturing {reference}"):
        from ..api import load_source
        from ..checkpoints.kept import stored_program
        from ..comparison.verifying import check_tolerance, compare

        check_tolerance(tolerance)
        first = stored_program(sources[0]) or load_source(sources[0])
        LOGGER.info(f"capturing {candidate}")
        second = stored_program(sources[1]) or load_source(sources[1])
        LOGGER.info("running both")
        found = compare(first, second, tolerance, how.seed)
    screen.answer(found.to_dict(), lambda: comparison(found.to_dict()), found.verdict)
    return Exit.DIFFERENT if found.differs else Exit.DONE


for command in (inspect, probe, diff, heal, generate, rehost, kernels):
    main.add_command(command)
main.add_command(doctor)


@main.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option("--target", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--threads", type=THREADS, default=1, show_default=True, help="CPU threads of an operator.")
@click.option("--rounds", type=ROUNDS, default=9, show_default=True, help="Sessions made of each model.")
@options(model=True)
def bench(models: tuple[str, ...], how: OpenOptions, screen: Screen, **asked: Any) -> None:
    """Time models in ONNX Runtime, paired and interleaved, against the first; others than ONNX files are exported."""
    from .tables import timings

    for model in models:
        identify(model, how)  # a missing file is told before anything is loaded
    with screen.working("timing"):
        from ..benched import bench as timed

        found = timed(models, **asdict(how), **asked)
    screen.answer(found, lambda: timings(found))


@main.command()
@click.argument("name", required=False)
@options()
def passes(name: str | None, screen: Screen) -> None:
    """List the passes, or describe one."""
    from ..pipeline.catalog import describe
    from ..pipeline.registry import available
    from .tables import catalogue, one_pass

    rows = []
    for known in [name] if name else available():
        try:
            rows += describe(known)
        except LnrewriteError as error:  # one broken plugin hides no other pass
            if name:
                raise
            LOGGER.warning(f"note: {error}")
    screen.answer({"passes": rows}, lambda: one_pass(rows[0]) if name else catalogue(rows))


@main.command()
@click.argument("code", required=False, shell_complete=among(Code))
@options()
def explain(code: str | None, screen: Screen) -> None:
    """Explain what a diagnostic code means and what to do about it, or list the codes."""
    from ..codes import GROUPS, page
    from .tables import paragraphs

    if code is not None and code.isdecimal():  # 110 is LN110
        code = f"LN{code:0>3}"
    if code is None:
        titles = {str(each): page(each).title for each in Code}
        rows = [{"code": name, "title": title} for name, title in titles.items()]
        lines = {group: [f"  {n}  {t}" for n, t in titles.items() if n.startswith(group)] for group in GROUPS}
        text = "\n\n".join("\n".join([GROUPS[group], *each]) for group, each in lines.items() if each)
        screen.answer({"codes": rows}, lambda: text)
        return
    found = page(code)
    screen.answer(asdict(found), lambda: paragraphs(str(found)))


def _rewrite(
    model: str,
    pipeline: Pipeline,
    output: str | None,
    dry_run: bool,
    *,
    no_verify: bool,
    accept: bool,
    partial: bool,
    how: OpenOptions,
    screen: Screen,
    calibrate: str | None,
    force: bool,
    lenient: bool = False,
    named: str = "result",
    host: str | None = None,
    page: str | None = None,
) -> int:
    """Run a pipeline on a model and write the result, the body of convert and opt; return the exit code."""
    from ..pipeline.job import Job

    source = identify(model, how)  # what is not there is told before torch is imported
    output = source.named_after(named) if output is None else output
    page_target = charts_of(page, force)
    working = screen.working(f"opening {model}")
    with working, joined(source, pipeline, host) as shares, written_to(output, dry_run, page_target) as out:
        from ..api import rewrite_source
        from ..rehosting import rehost_source

        job = Job(pipeline, partial, lenient, not no_verify, accept, how.seed, shares=shares)
        if host is not None and not dry_run:
            found, done = rehost_source(source, job, host, output, calibrate=calibrate, force=force)
            assert done is not None
            report, housed, said = done, found.to_dict(), f"\n\n{found}"
        else:
            report = rewrite_source(source, job, out, calibrate=calibrate, force=force)
            housed, said = {}, ""
        called = f"{model} as it would be" if dry_run else None
        if shares.first:
            shown = write_report(page_target, (model, str(report.output)), calibrate, how, force, called)
    report = replace(report, output=None) if dry_run else report
    if no_verify:
        LOGGER.warning(f"warning: nothing shows that {report.output or 'the result'} computes what {model} does")
    tell_name(output, report.output)
    dry = "" if report.output else "\n\ndry run: nothing was written"
    if shares.first:
        row = {**housed, **report.to_dict(), **shown}
        screen.answer(row, lambda: f"pipeline   {report.pipeline}\n{report}{dry}{said}", "")
    return Exit.PARTIAL if report.refusals and partial and not lenient else Exit.DONE
