"""The command `lnrewrite heal`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import Code, LnrewriteError, UsageError
from ..files.output import SUFFIXES, check_apart, check_folder, check_outside, named_path
from ..loading.identify import identify
from ..loading.source import Format, OpenOptions, Source
from ..quiet import LOGGER
from .options import ACCEPT, DATA, FORCE, Screen, charts_of, options, target_of, tell_name
from .processes import number
from .report import REPORT, write_report

if TYPE_CHECKING:
    from ..healing.config import HealingConfig
    from ..healing.session import Healed


@click.command()
@click.argument("teacher")
@click.argument("student")
@click.option("--data", required=True, metavar="DATA", help=f"{DATA}.")
@click.option(
    "-o", "--output", required=True, metavar="OUT", help="What to write: .pt2, .onnx, or of a folder a folder."
)
@click.option("--held-out", metavar="DATA", help="Measure on these; default: a part of DATA that is not trained on.")
@click.option("--tokens", type=int, help="Learn from so many tokens in all; default 6,400 rows of DATA.")
@click.option("--steps", type=int, help="Optimizer steps of student and control; default what the tokens make.")
@click.option("--local-steps", default=0, show_default=True, help="First so many steps on each block alone.")
@click.option("--losses", metavar="NAME=W,...", help="task, kl, hidden, spread; default by how far STUDENT is.")
@click.option("--train", default="all", show_default=True, help="all, norms or touched.")
@click.option("--progressive", is_flag=True, help="Start exactly at the teacher and move the norms gradually.")
@click.option(
    "--stages", "order", metavar="SELECT,...", help="What moves one after the other: mlp,attention,values,final."
)
@click.option("--ramp", default=0.6, show_default=True, help="The share of the steps in which norms move.")
@click.option("--drop-final", is_flag=True, help="Also remove the final norm, gradually.")
@click.option("--no-control", is_flag=True, help="Do not train the teacher on the same tokens first.")
@click.option("--batch-size", type=int, help="Rows of a step, over all processes; default a few.")
@click.option("--accumulate", default=1, show_default=True, help="Micro-batches of a step.")
@click.option("--rehearse", default=0.0078125, show_default=True, help="This share of the rows holds random tokens.")
@click.option("--tokenizer", metavar="FOLDER", help="Reads the text; default: that of TEACHER's folder.")
@click.option("--field", default="text", show_default=True, help="What holds the text in .jsonl and .parquet.")
@click.option("--length", type=click.IntRange(2, 2**20), help="Tokens of a window cut from a text.")
@click.option("--lr", type=float, help="Peak learning rate; default the usual one, unless short trials lower it.")
@click.option("--gain-lr", type=float, help="Gains and biases learn so many times faster; default by their size.")
@click.option("--control-lr", type=float, help="The control's peak learning rate; default as for --lr.")
@click.option(
    "--weight-decay", default=0.1, show_default=True, help="Weight decay of matrices; norms are never decayed."
)
@click.option("--bf16", is_flag=True, help="Train under bfloat16 autocast.")
@click.option("--gradient-checkpointing", is_flag=True, help="Keep no activations inside a block: slower, less memory.")
@click.option("--save-steps", default=100, show_default=True, help="Steps between checkpoints.")
@click.option("--run", metavar="FOLDER", help="Checkpoints, log.jsonl, loss.html; default OUT.run.")
@click.option("--control-run", metavar="FOLDER", help="Keep the control there; other healings of TEACHER share it.")
@click.option("--resume", is_flag=True, help="Go on where the run in that folder stopped.")
@REPORT
@ACCEPT
@FORCE
@options(model=True)
def heal(
    teacher: str,
    student: str,
    data: str,
    output: str,
    held_out: str | None,
    order: str | None,
    no_control: bool,
    tokenizer: str | None,
    field: str,
    length: int | None,
    run: str | None,
    control_run: str | None,
    resume: bool,
    page: str | None,
    accept: bool,
    force: bool,
    how: OpenOptions,
    screen: Screen,
    **asked: Any,
) -> None:
    """Recover a converted model's quality: train STUDENT, which convert made of TEACHER, for a short time.

    The report gives the held-out loss of teacher, converted, healed and control: the teacher trained on the same
    tokens. Under torchrun the same command shares the work over all processes.
    """
    on_cpu = replace(how, device="cpu")
    sources = identify(teacher, on_cpu), identify(student, on_cpu)
    for source in sources:
        if source.format is Format.ONNX:
            why = "an ONNX file can be rewritten and run, not trained"
            raise LnrewriteError(Code.LN601, f"model {source.name!r}", why, "heal the torch model, then export it")
    into_folder = sources[1].format is Format.TRANSFORMERS and Path(output).suffix not in SUFFIXES
    paths = [source.path for source in sources] + [named_path(name) for name in (data, held_out, tokenizer) if name]
    read = [path for path in paths if path is not None and path.exists()]
    if into_folder:
        target = check_folder(output, sources[1].file, force, read=read)
    else:
        target = target_of(output, force)
        if sources[0].path is not None:
            check_apart(target, sources[0].path, f"the teacher, {sources[0].name}")
    page_target = charts_of(page, force)
    for name, value in (("run", run), ("control-run", control_run)):
        if value is not None and not value.strip():
            raise UsageError(Code.LN003, f"{name} {value!r}", "it names nothing (an unset variable?)", "name a folder")
    with screen.working(f"capturing {teacher}"):
        from ..api import check_device
        from ..data.calibration import check_data
        from ..healing.config import HealingConfig, check_control
        from ..healing.opening import tokenizer_named
        from ..healing.snapshots import check_run

        for name in filter(None, (data, held_out)):
            check_data(name)
        tokenizer_named(tokenizer)
        check_device(how.device)
        folder = run or f"{target}.run"
        for place in filter(None, (folder, control_run)):
            for path in read:
                check_apart(Path(place), path, str(path))
            check_outside(Path(place), target, f"what is to be written, {target}")
        check_run(Path(folder), resume, force)
        stages = tuple(order.split(",")) if order else ()
        config = HealingConfig(**asked, seed=how.seed, stages=stages, control=not no_control)
        check_control(config, folder, control_run)
        places: dict[str, Any] = {"output": target, "held_out": held_out, "length": length, "run": folder}
        places |= {"tokenizer": tokenizer, "field": field, "control_run": control_run}
        places |= {"device": how.device, "resume": resume, "restart": force, "force": force}
        found = _healed(sources, data, config, accept, into_folder, places)
        if number():
            return
        shown = write_report(page_target, (student, str(target)), held_out or data, on_cpu, force)
    screen.answer({**found.report.to_dict(), **shown}, lambda: str(found.report), "")
    tell_name(output, target)


def _healed(
    sources: tuple[Source, Source],
    data: str,
    config: HealingConfig,
    accept: bool,
    into_folder: bool,
    places: Mapping[str, Any],
) -> Healed:
    """Heal what two MODELs hold, as programs or, where a folder is to be written, as modules in Python."""
    from ..api import load_source
    from ..checkpoints.healing import heal_folder
    from ..healing.session import heal as heal_programs
    from ..models.program import Program
    from ..pipeline.job import check_paths

    if into_folder:
        return heal_folder(*sources, data, config, **places)
    first = load_source(sources[0])
    LOGGER.info(f"capturing {sources[1].name}")
    second = load_source(sources[1])
    check_paths(sources[1].name, second.fixed_paths, accept)
    assert isinstance(first, Program) and isinstance(second, Program)
    return heal_programs(first, second, data, config, **places)
