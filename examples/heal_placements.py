"""Heal two small models in every placement and compare with a control: five seeds, the naive start beside it.

    python examples/train_tinyrope.py --out tinyrope.safetensors        # once: the second model, some ten minutes
    python examples/heal_placements.py --tinyrope tinyrope.safetensors  # 68 runs: some 25 minutes on two cores

Every run trains on the sources of the Python standard library, as the models were, for a per cent or two of the tokens
that they were trained on (or a tenth, in two hours or more: --tenth), and is measured on files that neither ever saw.
The control is the model itself, trained on the same windows for as many steps, on the task alone, with the learning
rate that is best for it (of 3e-5, 5e-5 and 1e-4 on tinygpt, 5e-5, 1e-4 and 2e-4 on tinyrope). Naive: the same norms
with unit gains, all other weights as they were, healed alike.
"""

import json
import os
import statistics
import sysconfig
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import click
import torch

import lnrewrite as lnr
from lnrewrite import demo
from lnrewrite.models.program import Program

TO = {
    "post": "place{to=post fit=constants}",
    "peri": "place{to=peri fit=constants}",
    "none": "place{to=none fit=constants}",
    "output": "place{to=output fit=constants}",
    "peri, back to pre": "place{to=peri fit=constants},place{to=pre fit=constants}",
}
NORM_FREE = {"no block norms": {}, "no norms at all": {"drop_final": True}}
WINDOW = 128
TRAINED = {"tinygpt": 13_000 * 16 * WINDOW, "tinyrope": 6_000 * 16 * WINDOW}
"""The tokens that each model was trained on."""

RATES = {
    "tinygpt": {
        "post": (2e-4, 50),
        "peri": (4e-4, 100),
        "none": (4e-4, 20),
        "output": (4e-4, 100),
        "peri, back to pre": (2e-4, 30),
        "control": (5e-5, 1),
    },
    "tinyrope": {
        "post": (6e-4, 20),
        "peri": (1.5e-3, 10),
        "none": (1e-3, 20),
        "output": (1.5e-3, 10),
        "peri, back to pre": (2e-4, 30),
        "control": (1e-4, 1),
    },
}
"""The learning rate, and how many times faster gains and biases learn: a few values tried on each model, one seed."""

NEAR = "task=0.5,kl=0.5,hidden=3,spread=0.1"
FAR = "task=0.5,kl=1,hidden=25,spread=0.1"
LONG = "task=1,kl=0.25,hidden=1.5,spread=0.1"


def tokens(job: dict) -> int:
    """Return how many tokens a run trains on."""
    return job["recipe"]["steps"] * job["recipe"]["batch_size"] * WINDOW


def objective(job: dict) -> str:
    """Return what is learned: the teacher leads the more, the fewer the tokens and the more norms were put in place."""
    if job["kind"] == "control":
        return "task=1"
    if tokens(job) > 2_000_000 and job["kind"] not in ("peri", "output"):
        return LONG
    return NEAR if tokens(job) > 1_000_000 or job["kind"] in ("post", "peri, back to pre") else FAR


@cache
def teacher_of(name: str, weights: str) -> Program:
    """Return a captured model."""
    from train_tinyrope import load

    module = demo.load("tinygpt") if name == "tinygpt" else load(Path(weights))
    return lnr.capture(module, kwargs=demo.calibration(1)[0])


def naive(teacher: Program, student: Program) -> Program:
    """Return the student's norms with unit gains, and every other weight as the teacher has it."""
    found = student.apply([], "naive")[0]
    theirs = dict(teacher.module().named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, parameter in found.module().named_parameters(remove_duplicate=False):
            if name in theirs:
                parameter.copy_(theirs[name])
            else:
                parameter.fill_(1.0 if ".norm_" in name and name.endswith("weight") else 0.0)
    return found


def one(job: dict) -> dict:
    """Run one healing and return the job with its held-out losses."""
    started = time.perf_counter()
    before, after = healing(job)
    losses = {key: demo.loss(p.module(), demo.heldout_text()) for key, p in (("before", before), ("after", after))}
    return job | losses | {"seconds": time.perf_counter() - started}


def healing(job: dict) -> tuple[Program, Program]:
    """Return what was trained, before and after."""
    teacher = teacher_of(job["model"], job["weights"])
    rates = RATES[job["model"]]
    lr, gain_lr = rates.get(job["kind"], rates["none"])
    how = {**job["recipe"], "lr": lr, "gain_lr": gain_lr, "losses": objective(job)}
    how |= {"control": False, "seed": job["seed"], "held_out": job["held_out"]}
    if job["kind"] == "control":
        return teacher, lnr.heal(teacher, teacher, job["text"], **how).program
    text = TO.get(job["kind"], "place{to=none fit=constants}")
    student = lnr.Pipeline.parse(text).run(teacher, demo.calibration(16, seed=job["seed"])).program
    if job["start"] == "naive":
        student = naive(teacher, student)
    how |= NORM_FREE.get(job["kind"], {})
    found = lnr.heal(teacher, student, job["text"], **how).program
    if job["kind"] in NORM_FREE:
        norm_free_file(found, job)
    return student, found


def norm_free_file(program: Program, job: dict) -> None:
    """Export as ONNX, proved against the model, and check that no norm but the final one is in it."""
    import onnx

    path = Path(job["text"]).with_name(f"{job['model']}-{job['seed']}.onnx")
    program.export(path, target="generic")
    norms = [n.op_type for n in onnx.load(path).graph.node if "Normalization" in n.op_type or n.op_type == "ReduceMean"]
    assert len(norms) == (job["kind"] == "no block norms"), norms


def jobs(weights: str | None, seeds: int, folder: Path, norm_free: bool, tenth: bool, **recipe: float) -> list[dict]:
    """List every run of the table."""
    from train_tinygpt import sources

    training, _, _ = sources(Path(sysconfig.get_paths()["stdlib"]), 0)
    (folder / "training.txt").write_bytes(training)
    (folder / "held_out.txt").write_bytes(demo.heldout_text()[:2048])  # `one` measures on all of it
    base = {"text": str(folder / "training.txt"), "held_out": str(folder / "held_out.txt"), "weights": weights}
    found = []
    for model in ("tinygpt", *(["tinyrope"] if weights else [])):
        steps = TRAINED[model] // 10 // (recipe["batch_size"] * WINDOW) if tenth else recipe["steps"]
        base |= {"recipe": recipe | {"steps": steps}}
        for seed in range(seeds):
            kinds = [*(NORM_FREE if norm_free else TO), "control"]
            found += [base | {"model": model, "kind": k, "start": "calibrated", "seed": seed} for k in kinds]
            names = list(TO)[:4] if not seed and not norm_free else []
            found += [base | {"model": model, "kind": k, "start": "naive", "seed": seed} for k in names]
    return found


def run_all(todo: list[dict], processes: int) -> list[dict]:
    """Run the jobs, so many at a time, each process with one thread."""
    os.environ["OMP_NUM_THREADS"] = "1"
    done = []
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for row in pool.map(one, todo):
            done.append(row)
            click.echo(f"{len(done)}/{len(todo)} {row['model']} {row['kind']} {row['after']:.4f}", err=True)
    return done


def table(rows: list[dict], model: str) -> None:
    """Print the gaps to the control of one model, mean and extremes over seeds."""
    mine = [r for r in rows if r["model"] == model]
    control = {r["seed"]: r["after"] for r in mine if r["kind"] == "control"}
    first = next(r for r in mine if r["kind"] == "control")
    click.echo(
        f"\n{model}: as trained {first['before']:.4f} nats per byte, control {_mean(control.values()):.4f}; ", nl=False
    )
    click.echo(f"{tokens(first):,} tokens, {tokens(first) / TRAINED[model]:.1%} of its training")
    click.echo("| to | converted | healed | gap to control | seeds | naive start, healed |\n|---|---|---|---|---|---|")
    for kind in [*TO, *NORM_FREE]:
        runs = [r for r in mine if r["kind"] == kind and r["start"] == "calibrated"]
        if not runs:
            continue
        gaps = [r["after"] - control[r["seed"]] for r in runs]
        worse = [r["after"] - control[r["seed"]] for r in mine if r["kind"] == kind and r["start"] == "naive"]
        cells = [kind, _spelled(r["before"] for r in runs), _spelled(r["after"] for r in runs), f"{_mean(gaps):+.4f}"]
        cells += [f"{min(gaps):+.4f} to {max(gaps):+.4f} ({len(gaps)})", f"{worse[0]:+.4f}" if worse else ""]
        click.echo(f"| {' | '.join(cells)} |")


def _mean(values) -> float:
    return statistics.fmean(values)


def _spelled(values) -> str:
    return f"{_mean(values):.4f}"


@click.command(context_settings={"show_default": True})
@click.option(
    "--tinyrope",
    "weights",
    type=click.Path(exists=True),
    help="Weights of the second model (train_tinyrope.py); left out without.",
)
@click.option("--norm-free", is_flag=True, help="Instead: take every block norm of tinygpt away, and the final one.")
@click.option("--seeds", default=5, help="Seeds of data order and calibration.")
@click.option("--steps", default=500, help="Optimizer steps.")
@click.option("--tenth", is_flag=True, help="As many steps as make a tenth of each model's training instead.")
@click.option("--batch-size", default=4, help=f"Windows of {WINDOW} bytes in a step.")
@click.option("--rehearse", default=0.03125, help="The share of rows with random tokens.")
@click.option("--bf16", is_flag=True, help="Run under bfloat16 autocast: faster where the CPU has it.")
@click.option("--processes", default=2, help="Runs at a time, one thread each.")
@click.option("--out", type=click.Path(path_type=Path), help="A JSON file for all figures.")
def main(
    weights: str | None,
    norm_free: bool,
    seeds: int,
    tenth: bool,
    processes: int,
    out: Path | None,
    **recipe: float,
) -> None:
    """Print the table of gaps."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        todo = jobs(weights and str(Path(weights).resolve()), seeds, Path(folder), norm_free, tenth, **recipe)
        rows = run_all(todo, processes)
    if out:
        out.write_text(json.dumps(rows, indent=1))
    for model in dict.fromkeys(r["model"] for r in rows):
        table(rows, model)
    minutes, each = (time.perf_counter() - started) / 60, sum(r["seconds"] for r in rows) / 60
    click.echo(f"\n{len(rows)} runs, {processes} at a time, one thread each: {minutes:.1f} min ({each:.1f} in all)")


if __name__ == "__main__":
    main()
