"""Heal small models in every placement, with defaults, and compare with a control: five seeds.

    python examples/heal_placements.py                                  # demo:tinygpt, a per cent of its training
    python examples/train_zoo.py --out zoo --only qwen3                 # once: a model that nothing here was tuned on
    python examples/heal_placements.py zoo/qwen3 --share 0.01 --share 0.05 --share 0.1 --seeds 2 --rows rows.jsonl

What a user types: `place{to=...}` with 8,192 tokens of the shipped training text, then `lnr.heal` with the text that
the models learned, the Python standard library, and a number of tokens: a share of those that they were trained on. It
is measured on files that no model ever saw. All seeds and shares heal the same conversion. The control is the model
itself, trained on the same windows on the task alone; it teaches the students, all placements of a seed by the same
one. With --rows, what is done is kept, conversions and controls beside it, and a run that was stopped goes on there.
"""

import json
import os
import statistics
import sysconfig
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import torch

import lnrewrite as lnr
from lnrewrite import demo
from lnrewrite.models.program import Program

TO = ("post", "peri", "none", "output")
STEPS = {"tinygpt": 13_000, "tinyrope.safetensors": 6_000, "gpt2": 2_000, "llama": 2_000, "qwen3": 2_000}
"""The steps that each model was trained for, of 16 windows of 128 bytes."""

Job = dict[str, str | int | list[str]]


@cache
def teacher_of(model: str) -> Program:
    """Return a captured model: tinygpt, the weights of tinyrope, or a folder of train_zoo.py."""
    if model == "tinygpt":
        module = demo.load(model)
    elif model.endswith(".safetensors"):
        from train_tinyrope import load

        module = load(Path(model))
    else:
        from transformers import AutoModelForCausalLM

        module = AutoModelForCausalLM.from_pretrained(model).eval()
    return lnr.capture(module, kwargs=demo.calibration(1)[0])


def convert(job: Job) -> float:
    """Write the conversion that a job heals, and return how long that took."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    place = lnr.Pipeline.parse(f"place{{to={job['to']} fit={job['fit']}}}")
    place.run(teacher_of(job["model"]), demo.calibration(job["calibration"] // 1024)).program.save(job["student"])
    return time.perf_counter() - started


def heal(job: Job) -> dict:
    """Heal, and return the job with what the report says."""
    torch.set_num_threads(1)
    started, teacher, student = time.perf_counter(), teacher_of(job["model"]), lnr.load(job["student"])
    how = {"tokens": job["tokens"], "seed": job["seed"], "held_out": job["held_out"]}
    how |= {key: json.loads(value) for key, value in (option.split("=", 1) for option in job["options"])}
    how |= {"control_run": job["control"]} if how.get("control", True) else {}
    report = lnr.heal(teacher, student, job["text"], **how).report
    losses = {name: row["mean"] for name, row in report.losses.items()}
    return job | {"losses": losses, "lr": report.recipe["lr"], "seconds": time.perf_counter() - started}


def run_all(todo: list[Job], kept: Path | None, processes: int) -> list[dict]:
    """Run the jobs that are not done yet, so many at a time, each process with one thread."""
    os.environ["OMP_NUM_THREADS"] = "1"
    known = [json.loads(line) for line in kept.read_text().splitlines()] if kept and kept.exists() else []
    done = {_name(row): row for row in known}
    left = [job for job in todo if _name(job) not in done]
    students = {job["student"]: job for job in left if not Path(job["student"]).exists()}
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for job, seconds in zip(students.values(), pool.map(convert, students.values()), strict=True):
            click.echo(f"converted to {job['to']} in {seconds:.0f} s", err=True)
        for number, row in enumerate(pool.map(heal, left), 1):
            done[_name(row)] = row
            click.echo(f"{number}/{len(left)} {_name(row)} {row['losses']['healed']:.4f}", err=True)
            if kept:
                with kept.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return [done[_name(job)] for job in todo]


def _name(job: dict) -> str:
    return " ".join(
        [*(str(job[key]) for key in ("model", "to", "fit", "calibration", "tokens", "seed")), *job["options"]]
    )


def table(rows: list[dict], tokens: int, share: float) -> None:
    """Print the gaps to the control, mean and extremes over seeds."""
    control = {r["seed"]: r["losses"]["control"] for r in rows}
    trained = rows[0]["losses"]["teacher"]
    click.echo(f"\n**{Path(rows[0]['model']).stem}**: as trained {trained:.4f} nats per byte, control ", nl=False)
    click.echo(f"{statistics.fmean(control.values()):.4f}; {tokens:,} tokens, {share:.0%} of its training:\n")
    click.echo("| to | converted | healed | gap to control | seeds | to the model as trained |")
    click.echo("|---|---|---|---|---|---|")
    for to in dict.fromkeys(r["to"] for r in rows):
        runs = [r for r in rows if r["to"] == to]
        before, after = (statistics.fmean(r["losses"][key] for r in runs) for key in ("converted", "healed"))
        gaps = [r["losses"]["healed"] - control[r["seed"]] for r in runs]
        cells = [to, f"{before:.4f}", f"{after:.4f}", f"{statistics.fmean(gaps):+.4f}"]
        cells += [f"{min(gaps):+.4f} to {max(gaps):+.4f} ({len(gaps)})", f"{after - trained:+.4f}"]
        click.echo(f"| {' | '.join(cells)} |")


@click.command(context_settings={"show_default": True})
@click.argument("model", default="tinygpt")
@click.option("--share", "shares", multiple=True, type=float, default=(0.01,), help="Of its training, in tokens.")
@click.option("--trained", type=int, help="The tokens of its training.  [default: what these scripts make of it]")
@click.option("--seeds", default=5, help="Healings of each conversion, by seeds of the windows and their order.")
@click.option("--fit", type=click.Choice(["reconstruct", "constants"]), default="reconstruct", help="As in `convert`.")
@click.option("--calibration", default=8192, help="The tokens that conversions are fitted to, in rows of 128.")
@click.option("--to", "placements", multiple=True, type=click.Choice(TO), default=TO, help="These placements.")
@click.option("--option", "options", multiple=True, help="Of `lnr.heal`, its value as JSON: lr=6e-4, progressive=true.")
@click.option("--processes", default=2, help="Runs at a time, one thread each.")
@click.option("--rows", type=click.Path(path_type=Path), help="Keep figures here, and conversions beside it.")
def main(
    model: str,
    shares: tuple[float, ...],
    trained: int | None,
    seeds: int,
    fit: str,
    calibration: int,
    placements: tuple[str, ...],
    options: tuple[str, ...],
    processes: int,
    rows: Path | None,
) -> None:
    """Print the table of gaps of MODEL: tinygpt, tinyrope.safetensors or a folder."""
    from train_tinygpt import sources

    started = time.perf_counter()
    with nullcontext(f"{rows}.kept") if rows else TemporaryDirectory() as folder:
        text, held_out = Path(folder, "training.txt"), Path(folder, "held_out.txt")
        Path(folder).mkdir(exist_ok=True)
        text.write_bytes(sources(Path(sysconfig.get_paths()["stdlib"]), 0)[0])
        held_out.write_bytes(demo.heldout_text())
        base = {
            "model": model,
            "fit": fit,
            "calibration": calibration,
            "text": str(text),
            "held_out": str(held_out),
            "options": list(options),
        }
        kept = Path(folder, f"{Path(model).as_posix().replace('/', '_')}-{fit}-{calibration}")
        students = [base | {"to": to, "student": f"{kept}-{to}.pt2"} for to in placements]
        budgets = {round(share * (trained or STEPS[Path(model).name] * 16 * 128)): share for share in shares}
        control = "-".join((Path(model).name, "control", *options))
        drawn = [
            {"tokens": many, "seed": seed, "control": str(Path(folder, f"{control}-{many}-{seed}"))}
            for many in budgets for seed in range(seeds)
        ]  # fmt: skip
        jobs = [row | one for row in students for one in drawn]  # a placement first: the others share its controls
        found = run_all(jobs, rows, processes)
    for tokens, share in budgets.items():
        table([row for row in found if row["tokens"] == tokens], tokens, share)
    minutes, each = (time.perf_counter() - started) / 60, sum(r["seconds"] for r in found) / 60
    click.echo(f"\n{len(found)} runs, {processes} at a time, one thread each: {minutes:.1f} min ({each:.1f} in all)")


if __name__ == "__main__":
    main()
