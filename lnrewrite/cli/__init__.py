"""The command line: thin, nothing imports it; models and passes are loaded by the commands that need them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .._version import __version__
from ..errors import Code, Exit, LnrewriteError, Refusal, UsageError, unknown
from .console import Group, remark, show, working
from .heal import heal
from .options import ACCEPT, OUT, SEED, check_data, check_paths, feed_of, opened, options, target_of, tell_name

if TYPE_CHECKING:
    from ..pipeline.driver import Pipeline, Result
    from ..pipeline.report import Report

OPSET, THREADS, ROUNDS = click.IntRange(1, 1000), click.IntRange(1, 1024), click.IntRange(1, 100_000)
PLACEMENTS = ("pre", "post", "peri", "output", "none")


@click.group("lnrewrite", cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="lnrewrite")
def main() -> None:
    """See, move and fold the norms of trained networks.

    MODEL is a torch.export archive, an ONNX file, weights (safetensors, state dict) with --factory, a transformers
    checkpoint folder, pkg.module:callable, or demo:tinygpt.
    """


@main.command()
@click.argument("model")
@options(model=True)
def inspect(model: str, as_json: bool, quiet: bool, verbose: bool, **how: Any) -> None:
    """Show the residual streams: blocks, placements, norms, and what is not understood."""
    from .tables import placement_map

    with working(quiet, f"capturing {model}") as say:
        program = opened(model, **how)
        say("looking for residual streams")
        found = program.inspect()
    if not any(stream["blocks"] for stream in found["streams"]):
        nothing = Refusal(Code.LN201, "model", "no residual block was found", "see `lnrewrite explain LN201`")
        first = next(iter(program.certified.refusals), nothing)
        raise LnrewriteError.of(first.at(f"{model}: {first.site}"))
    show(json.dumps(found) if as_json else found["placement"] if quiet else placement_map(found, verbose))


@main.command()
@click.argument("model")
@click.option("--to", "to", required=True, metavar="PLACEMENT", help="pre, post, peri, output or none.")
@click.option("-o", "--output", required=True, metavar="OUT", help=OUT)
@click.option("--norm", default="auto", show_default=True, help="Kind of inserted norms: auto, layer or rms.")
@click.option("--blocks", metavar="SELECT", help="name-glob, 3, 0-5, first:25%, last:2, attention, mlp, joined by ';'.")
@options(model=True, writes=True)
def convert(model: str, to: str, output: str, norm: str, blocks: str | None, **how: Any) -> int:
    """Change where the norms sit: MODEL with every (selected) block converted to one placement."""
    from ..pipeline.driver import Pipeline
    from ..pipeline.spec import placing

    if to not in PLACEMENTS:
        unknown(Code.LN003, "placement", to, PLACEMENTS)
    selection = None if blocks is None else ";".join(term.strip() for term in blocks.split(";"))
    if selection is not None and not re.fullmatch(r"[^\s{}]+", selection):
        remedy = "write terms such as 0-5 or attention, joined by ';'"
        raise UsageError(Code.LN004, f"block selection {blocks!r}", "it is empty or holds spaces or braces", remedy)
    return _rewrite(model, Pipeline.parse(placing(to, norm, selection)), output, **how)


@main.command()
@click.argument("model")
@click.option("--passes", "text", metavar="PIPELINE", help="pass{option=value},pass,... (see `lnrewrite passes`).")
@click.option("--preset", metavar="NAME", help="A named pipeline; runs as with --partial.")
@click.option("-o", "--output", metavar="OUT", help=OUT)
@click.option("--dry-run", is_flag=True, help="Say what would be done and write nothing.")
@options(model=True, writes=True)
def opt(model: str, text: str | None, preset: str | None, output: str | None, dry_run: bool, **how: Any) -> int:
    """Run a pipeline of passes."""
    from ..pipeline.driver import Pipeline

    if (text is None) == (preset is None):
        raise click.UsageError("Give either --passes or --preset")
    if output is None and not dry_run:
        raise click.UsageError("Give -o OUT, or --dry-run")
    pipeline = Pipeline.parse(text) if text is not None else Pipeline.preset(str(preset))
    return _rewrite(model, pipeline, None if dry_run else output, preset=preset is not None, **how)


@main.command()
@click.argument("model")
@click.option("-o", "--output", required=True, metavar="OUT", help="The file to write (.onnx).")
@click.option("--target", metavar="TARGET", required=True, help="cpu, cuda, tensorrt or generic.")
@click.option("--dtype", default="fp32", show_default=True, help="fp32, fp16 or bf16.")
@click.option("--opset", type=OPSET, metavar="N", help="The operator set; default 18, or the ONNX file's own.")
@click.option("--optimize", metavar="MODE", help="auto or none: fuse the rest too; default auto for cpu, cuda.")
@click.option("--fuse", default="ops", show_default=True, help="ops: what ONNX Runtime has; custom: lnrewrite's too.")
@click.option("--no-verify", is_flag=True, help="Do not run the file against the model. Nothing proves it then.")
@ACCEPT
@click.option("--force", is_flag=True, help="Overwrite OUT.")
@options(model=True)
def export(
    model: str,
    output: str,
    force: bool,
    no_verify: bool,
    accept: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **how: Any,
) -> None:
    """Write ONNX with the norm forms that a target runs best, and say why each was chosen."""
    wanted = {name: how.pop(name) for name in ("target", "dtype", "opset", "optimize", "fuse")}
    target = target_of(output, force, default=".onnx")
    if target.suffix != ".onnx":
        raise UsageError(Code.LN025, output, "export writes ONNX", "name an .onnx file")
    with working(quiet, f"capturing {model}") as say:
        program = opened(model, **how)
        check_paths(model, program, accept)
        report = program.export(target, force=force, verify=not no_verify, progress=say, **wanted)
    if no_verify:
        remark(f"warning: {target} was not verified: nothing shows that it computes what {model} does")
    if as_json:
        show(json.dumps(report.to_dict()))
    elif not quiet:
        show(str(report))
    tell_name(output, target)


@main.command()
@click.argument("reference")
@click.argument("candidate")
@click.option("--tolerance", metavar="CLASS", help="An exactness class or a relative error; default algebraic.")
@options(model=True)
def verify(
    reference: str, candidate: str, tolerance: str | None, as_json: bool, quiet: bool, verbose: bool, **how: Any
) -> int:
    """Compare two models by running both in float64; exit with 4 where they differ."""
    from ..loading.identify import identify
    from .tables import comparison

    identify(reference), identify(candidate)  # a missing file is told before anything is captured
    with working(quiet, "comparing") as say:
        from ..comparison.verifying import check_tolerance, compare

        check_tolerance(tolerance)
        say(f"capturing {reference}")
        first = opened(reference, **how)
        say(f"capturing {candidate}")
        second = opened(candidate, **how)
        say("running both")
        found = compare(first, second, tolerance, how["seed"])
    show(json.dumps(found.to_dict()) if as_json else found.verdict if quiet else comparison(found.to_dict()))
    return Exit.DIFFERENT if found.differs else Exit.DONE


main.add_command(heal)


@main.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option("--target", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--threads", type=THREADS, default=1, show_default=True, help="CPU threads of an operator.")
@click.option("--input", "inputs", multiple=True, metavar="SPEC", help="name=dtype[d0,d1], or .npz/.pt.")
@click.option("--rounds", type=ROUNDS, default=9, show_default=True, help="Sessions made of each model.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of everything random.")
@options()
def bench(models: tuple[str, ...], as_json: bool, quiet: bool, verbose: bool, **how: Any) -> None:
    """Time ONNX models in ONNX Runtime, paired and interleaved, against the first."""
    from ..loading.identify import identify
    from .tables import timings

    for model in models:
        identify(model)
    with working(quiet, "timing") as say:
        from ..models.program import need_onnx

        need_onnx("bench")
        from ..runtime.benching import bench as timed

        how["inputs"] = list(how["inputs"]) or None
        found = timed(models, progress=say, **how)
    show(json.dumps(found) if as_json else timings(found))


@main.group(invoke_without_command=True)
@click.pass_context
def kernels(context: click.Context) -> None:
    """Build lnrewrite's own operators for ONNX Runtime (export --fuse custom)."""
    if context.invoked_subcommand is None:
        show(context.get_help())


@kernels.command()
@click.option("-o", "--output", metavar="FILE", help="The library; default: where sessions look for it.")
@click.option("--cuda/--no-cuda", default=None, help="With or without CUDA; default: with it where nvcc is found.")
@click.option("--force", is_flag=True, help="Overwrite FILE.")
@options()
def build(output: str | None, cuda: bool | None, force: bool, as_json: bool, quiet: bool, verbose: bool) -> None:
    """Compile the library of operators with the C++ compiler, and nvcc, that are here."""
    if output is not None:
        from ..files.output import check_output

        check_output(output, force)
    with working(quiet, "compiling") as say:
        from ..kernels.building import build as compiled

        found = compiled(output, cuda=cuda, progress=say)
    row = {"library": str(found.library), "compiler": found.compiler, "nvcc": found.nvcc}
    if as_json:
        show(json.dumps(row))
    elif not quiet:
        show(f"{found.library}\nfor the CPU, " + (f"and for CUDA by {found.nvcc}" if found.nvcc else "not for CUDA"))


@main.command()
@click.argument("name", required=False)
@options()
def passes(name: str | None, as_json: bool, quiet: bool, verbose: bool) -> None:
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
            remark(f"note: {error}")
    show(json.dumps({"passes": rows}) if as_json else one_pass(rows[0]) if name else catalogue(rows))


@main.command()
@click.argument("code")
@options()
def explain(code: str, as_json: bool, quiet: bool, verbose: bool) -> None:
    """Explain what a diagnostic code means and what to do about it."""
    from ..codes import CATALOGUE
    from ..codes import explain as explained
    from .tables import page

    text = explained(code)
    found = CATALOGUE[code.upper()]
    show(json.dumps({"code": code.upper(), "title": found.title, "text": found.text}) if as_json else page(text))


# ---- the body of convert and opt ----


def _rewrite(
    model: str,
    pipeline: Pipeline,
    output: str | None,
    *,
    calibrate: str | None,
    partial: bool,
    no_verify: bool,
    accept: bool,
    force: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    preset: bool = False,
    **how: Any,
) -> int:
    """Run a pipeline on a model and write the result, the body of convert and opt; return the exit code."""
    from ..loading.identify import Format, identify
    from ..pipeline.sounding import Unproved

    form = identify(model).format
    onnx = form is Format.ONNX
    if form is Format.TRANSFORMERS and output is not None and Path(output).suffix not in (".pt2", ".onnx"):
        shown = {"as_json": as_json, "quiet": quiet, "preset": preset}
        told = {"partial": partial, "force": force, "verify": not no_verify, "accept": accept}
        return _rewrite_folder(model, pipeline, output, calibrate, **told, **shown, **how)
    target = None if output is None else target_of(output, force, ".onnx" if onnx else ".pt2")
    if onnx and target and target.suffix == ".pt2":
        raise LnrewriteError(Code.LN032, str(target), f"{model} is an ONNX file", "name an .onnx file")
    check_data(calibrate)
    with working(quiet, f"capturing {model}") as say:
        program = opened(model, **how)
        if target:
            check_paths(model, program, accept)
        if calibrate is not None:
            say(f"reading {calibrate}")
        data = feed_of(calibrate, how["seed"])(program)

        def ran(consume: bool) -> Result[Any]:
            told: dict[str, Any] = {"data": calibrate, "progress": say, "verify": not no_verify, "consume": consume}
            return pipeline.run(program, data, partial or preset, how["seed"], **told)

        try:
            result = ran(consume=True)
        except Unproved:  # the program was used up
            program = opened(model, **how)
            result = ran(consume=False)
        report = replace(result.report, output=None if target is None else str(target))
        if preset and report.refusals and not report.edits:
            first = report.refusals[0]
            raise LnrewriteError.of(first)
        if target:
            say(f"writing {target}")
            result.program.save(target, force=force)
    if no_verify:
        remark(f"warning: nothing shows that {target or 'the result'} computes what {model} does")
    tell_name(output, target)
    _tell(pipeline, report, "" if target else "\n\ndry run: nothing was written", as_json, quiet)
    return Exit.PARTIAL if report.refusals and partial and not preset else Exit.DONE


def _rewrite_folder(
    model: str,
    pipeline: Pipeline,
    output: str,
    calibrate: str | None,
    *,
    partial: bool,
    force: bool,
    verify: bool,
    accept: bool,
    preset: bool,
    as_json: bool,
    quiet: bool,
    **how: Any,
) -> int:
    """Rewrite a transformers folder into another, the body of convert and opt where OUT is no file."""
    check_data(calibrate)
    seed, inputs = how["seed"], how.pop("inputs")
    if how.pop("factory") or how.pop("device") != "cpu":
        why = "a folder is read on the CPU, by the class that its config names"
        raise UsageError(Code.LN003, "--factory, --device", why, "leave them out, or name a .pt2 file as OUT")
    with working(quiet, f"reading {model}") as say:
        from ..checkpoints.folders import rewrite_folder

        feed = feed_of(calibrate, seed) if calibrate else None
        report = rewrite_folder(
            model,
            pipeline,
            output,
            calibrate=feed,
            data=calibrate,
            partial=partial or preset,
            force=force,
            verify=verify,
            check=lambda report: check_paths(model, report, accept),
            inputs=inputs,
            progress=say,
            **how,
        )
    _tell(pipeline, report, "", as_json, quiet)
    return Exit.PARTIAL if report.refusals and partial and not preset else Exit.DONE


def _tell(pipeline: Pipeline, report: Report, ending: str, as_json: bool, quiet: bool) -> None:
    """Show what a pipeline did."""
    if as_json:
        show(json.dumps(report.to_dict()))
    elif not quiet:
        show(f"pipeline   {pipeline}\n{report}{ending}")
