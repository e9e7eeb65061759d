"""Look at every architecture of the installed transformers, and write down what holds for each: a maintainers' command.

    python tests/sweep.py                                # capture and placement of every family, against the truth
    python tests/sweep.py --full                         # all columns of the page; an hour on four cores
    python tests/sweep.py --answers                      # the same placements however the model is run?
    python tests/sweep.py --only llama --only 'opt.do_layer_norm_before=False'
    python tests/sweep.py --page                         # docs/results/support.md from the results, nothing run

Each family runs in a process of its own with a deadline, on a tiny model with random weights. Results go to a file of
JSON lines, one per family; families that it holds are not run again.

truth.json holds the placements of each family's blocks in execution order, read from the modeling code (`read` names
the classes, `why` says what is not obvious), and not from what is found here: `parallel` once for branches that share
one sum, `unsupported` where the picture does not hold and a refusal is right.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import resource
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

import lnrewrite as lnr
import zoo
from lnrewrite.models.program import Program
from zoo import families
from zoo.written import WRITTEN

PAGE = Path(__file__).parents[1] / "docs" / "results" / "support.md"
PLACEMENTS = ("pre", "post", "peri", "output", "none")
DEADLINE, MEMORY = 300, 14 << 30  # seconds and bytes of one family, all its columns
RIGHT = 1e-9  # relative, in float64
EXACT = {"fold": "canonicalize,fold-affine{final=true}", "quantize": str(lnr.Pipeline.preset("quantize"))}
MISSED = lnr.LnrewriteError, lnr.Refused


def judged(name: str, program: Program) -> str:
    """Compare what is found with the truth: right, refused, wrong, or what is found where there is no truth."""
    names = zoo.placements(program.network)
    codes = sorted({r["code"] for r in program.inspect()["refusals"]} - {"LN205"})
    seen = zoo.spelled(names) or f"refused {' '.join(codes)}"
    if name not in zoo.FAMILIES and name not in zoo.CASES:
        return f"no truth: {seen}"
    truth = zoo.spelled(zoo.truth(name))
    if truth == "unsupported":
        return f"wrong: {seen}, truth unsupported" if names else f"right: {seen}"
    return f"right: {seen}" if seen == truth else f"{'wrong' if names else 'refused'}: {seen}, truth {truth}"


def answers(name: str, program: Program, module: nn.Module, inputs: dict[str, Any]) -> str:
    """Return which ways of running the model give another picture: bf16, a mask, the attention, train mode."""
    wanted = zoo.placements(program.network)
    different = []
    for how, variant in variants(name, module, inputs):
        try:
            if zoo.placements(variant().network) != wanted:
                different.append(how)
        except Exception as error:
            different.append(f"{how} ({type(error).__name__})")
    return ", ".join(different) or "same"


def variants(name: str, module: nn.Module, inputs: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Program]]]:
    """Yield ways of capturing the same model that the model itself can run."""
    half = {k: v.bfloat16() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    masked = inputs | {"attention_mask": torch.ones_like(inputs["input_ids"])} if "input_ids" in inputs else inputs
    runs: list[tuple[str, Callable[[], tuple[nn.Module, dict[str, Any]]]]] = [
        ("bf16", lambda: (zoo.build(name)[0].bfloat16(), half)),
        ("mask", lambda: (module, masked)),
        ("eager", lambda: (_attending(module, "eager"), inputs)),
        ("sdpa", lambda: (_attending(module, "sdpa"), inputs)),
    ]
    for how, make in runs:
        try:
            model, given = make()
            with torch.no_grad():
                model(**given)
        except Exception:
            continue  # the model cannot run that way at all
        yield how, lambda model=model, given=given: lnr.capture(model, kwargs=given)  # type: ignore[misc]
    yield "train", lambda: lnr.capture(zoo.build(name)[0].train(), kwargs=inputs)


def _attending(module: nn.Module, how: str) -> nn.Module:
    module.set_attn_implementation(how)  # type: ignore[operator]
    return module


def converted(program: Program, to: str, inputs: dict[str, Any]) -> str:
    """Convert to a placement: yes, part (and why not all of it), or the code of the refusal."""
    try:
        result = lnr.Pipeline.parse(f"place{{to={to}}}").run(program, partial=True)
    except MISSED as error:
        return error.code
    codes = " ".join(sorted({r.code for r in result.report.refusals}))
    if not result.report.edits:
        return codes or "-"
    with torch.no_grad():
        leaves = torch.utils._pytree.tree_leaves(result.program.module()(**inputs))
    if not all(t.isfinite().all() for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point()):
        return "NOT FINITE"
    return f"part {codes}" if codes else "yes"


def exact(name: str, inputs: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Run the exact pipelines in true float64: how many edits, or the codes that refused."""
    wide = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    with zoo.float64():
        program = lnr.capture(zoo.build(name)[0].double(), kwargs=wide)

    def ran(program: Program) -> list[torch.Tensor]:
        torch.manual_seed(0)  # some draw random numbers in eval mode too
        with zoo.float64():
            return zoo.floats(program.module()(**wide))

    wanted = ran(program)
    for column, text in EXACT.items():
        try:
            result = lnr.Pipeline.parse(text).run(program, partial=True)
        except MISSED as error:
            yield column, error.code
            continue
        pairs = zip(wanted, ran(result.program), strict=True)
        wrong = max(((a - b).abs().max() / a.abs().max().clamp_min(1e-30) for a, b in pairs), default=0.0)
        codes = " ".join(sorted({r.code for r in result.report.refusals}))
        said = f"{result.report.edits or ''} {codes}".strip() or "-"
        yield column, said if wrong <= RIGHT else f"NOT EXACT {wrong:.0e}"


def live(name: str, inputs: dict[str, Any], cells: dict[str, str]) -> str:
    """Rewrite the living module to the first placement that the captured one could be converted to."""
    to = next((p for p in ("peri", "pre", "post", "output", "none") if cells[p] == "yes"), None)
    if to is None:
        return "-"
    module = zoo.build(name)[0]
    try:
        lnr.rewrite(module, f"place{{to={to}}}", kwargs=inputs)
    except MISSED as error:
        return f"{to} {error.code}"
    with torch.no_grad():
        module(**inputs)
    return to


def onnx(program: Program, folder: str) -> str:
    """Export for onnxruntime on the CPU, prove the file, and count the forms of its norms."""
    try:
        report = program.export(f"{folder}/model.onnx", target="cpu")
    except MISSED as error:
        return error.code
    forms = Counter(row.form for row in report.norms or ())
    return ", ".join(f"{n} {form}" for form, n in forms.most_common()) or "no norms"


def look(name: str, full: bool, ways: bool, results: str) -> None:
    """Run one family and add its row to the results; what is beyond the deadline is added by the parent."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    row: dict[str, Any] = {"family": name}
    cells: dict[str, str] = {}
    try:
        module, inputs = zoo.build(name)
        row["model"] = type(module).__name__
        started = time.perf_counter()
        program = zoo.capture(module, inputs)
        cells["capture"] = f"{time.perf_counter() - started:.1f} s"
        started = time.perf_counter()
        cells["placement"] = judged(name, program)
        row["detect"] = time.perf_counter() - started
        row["ops"], row["kinds"] = len(program.graph.ops), program.inspect()["norms"]["kinds"]
        if ways and program.network.streams:
            cells["answers"] = answers(name, program, module, inputs)
        if full and program.network.streams:
            for to in PLACEMENTS:
                cells[to] = converted(program, to, inputs)
            cells |= exact(name, inputs)
            cells["live"] = live(name, inputs, cells)
        if full:
            with tempfile.TemporaryDirectory() as folder:
                cells["onnx"] = onnx(program, folder)
    except families.Unbuilt as why:
        row["unbuilt"] = str(why)
    except lnr.LnrewriteError as error:
        row["uncaptured"] = str(error)
    except BaseException as error:
        row["crash"] = f"{type(error).__name__}: {error}"
    add(results, row | {"cells": cells})


def add(results: str, row: dict[str, Any]) -> None:
    """Add a row to the results in one write."""
    with open(results, "a") as file:
        file.write(json.dumps(row) + "\n")


def read(results: str) -> dict[str, dict[str, Any]]:
    """Return the rows by family, the latest of each."""
    rows = map(json.loads, Path(results).read_text().splitlines()) if Path(results).exists() else ()
    return {row["family"]: row for row in rows}


def sweep(names: list[str], full: bool, ways: bool, results: str, jobs: int) -> None:
    """Run families side by side, each in its own process, and stop what takes longer than the deadline."""
    context = multiprocessing.get_context("fork")
    running: dict[str, tuple[Any, float]] = {}
    while names or running:
        while names and len(running) < jobs:
            process = context.Process(target=look, args=(names[0], full, ways, results))
            process.start()
            running[names.pop(0)] = process, time.monotonic()
        time.sleep(0.05)
        for name, (process, since) in list(running.items()):
            if process.is_alive() and time.monotonic() - since < DEADLINE:
                continue
            if process.is_alive():
                process.kill()
            process.join()
            del running[name]
            if process.exitcode:
                why = "it took longer than the deadline" if process.exitcode == -9 else f"exit {process.exitcode}"
                add(results, {"family": name, "crash": why, "cells": {}})
            click.echo(line(read(results).get(name, {"family": name, "cells": {}})))


def line(row: dict[str, Any]) -> str:
    """Return what to show of a family on one line."""
    said = next((f"{k}: {row[k]}" for k in ("crash", "uncaptured", "unbuilt") if k in row), "")
    cells = "  ".join(f"{k} {v}" for k, v in row["cells"].items())
    return f"{row['family']:<32}{cells} {said}"[:200]


def summary(rows: list[dict[str, Any]]) -> str:
    """Return the closing figures: how many families are right, refused, wrong, or crashed."""
    counts = Counter(row["cells"].get("placement", "").split(":")[0] for row in rows)
    counts |= Counter(k for row in rows for k in ("crash", "uncaptured", "unbuilt") if k in row and not row["cells"])
    known = counts["right"] + counts["wrong"] + counts["refused"]
    share = f" ({counts['right'] / known:.1%} right, {counts['wrong'] / known:.1%} wrong)" if known else ""
    return ", ".join(f"{n} {k}" for k, n in counts.most_common() if k) + share


HEAD = ("family", "capture", "placement", *PLACEMENTS, *EXACT, "live", "onnx")
INTRO = """# Every architecture of transformers

One row for each model type of transformers {version} that can be built small and given inputs here (torch {torch}): a
tiny model with random weights, gains and biases.

```sh
python tests/sweep.py --full
python tests/sweep.py --page
```

- *placement*: what is found, in execution order; `parallel` counts branches that share one addition once. {figures}.
- *pre ... none*: the conversion of the captured model: `yes`; `part`, with the codes that refused; a code; or `-` where
  nothing had to change. `lnrewrite explain CODE` says what a code means.
- *fold* (`{fold}`), *quantize* (the preset): the number of edits, and the codes that refused; every result is within
  {right} of the model, relative, in float64.
- *live*: the placement to which the module was rewritten in place, or why not.
- *onnx*: the form of each norm in the file for ONNX Runtime on the CPU, which was run against the model.
"""


def page(rows: list[dict[str, Any]]) -> str:
    """Return the support matrix."""
    kept = sorted((r for r in rows if "unbuilt" not in r), key=lambda r: r["family"])
    head = "| " + " | ".join(HEAD) + " |\n" + "|---" * len(HEAD) + "|\n"
    tables = [[r for r in kept if (r["family"] in WRITTEN) is hand] for hand in (False, True)]
    body, by_hand = ("".join(f"| {' | '.join(_cells(row))} |\n" for row in table) for table in tables)
    intro = INTRO.format(
        version=families.transformers_version(), torch=torch.__version__.split("+")[0], figures=summary(kept),
        fold=EXACT["fold"], right=RIGHT,
    )  # fmt: skip
    left = sorted(r["family"] for r in rows if "unbuilt" in r)
    by_hand = f"\n## Nets written by hand (tests/zoo/written.py)\n\n{head}{by_hand}"
    rest = f"\nNot built small, or not fed, here ({len(left)}): {', '.join(left)}.\n" if left else ""
    return f"{intro}\n{head}{body}{rest}{by_hand}"


def _cells(row: dict[str, Any]) -> list[str]:
    cells = row["cells"]
    seconds = cells.get("capture") or str(row.get("uncaptured") or row.get("crash") or "")[:5]
    placement = cells.get("placement", "").removeprefix("right: ").replace("refused ", "")
    return [row["family"], seconds, placement, *(cells.get(c, "") for c in HEAD[3:])]


@click.command()
@click.option("--only", multiple=True, help="A family, or family.field=value; may be repeated.")
@click.option("--full", is_flag=True, help="All columns, not only capture and placement.")
@click.option(
    "--answers", "ways", is_flag=True, help="Also in bf16, with a mask, eager and sdpa attention, and train mode."
)
@click.option("--page", "write", is_flag=True, help="Write docs/results/support.md from the results.")
@click.option("--results", default="sweep.jsonl", help="Where results are kept.", show_default=True)
@click.option("--jobs", default=os.cpu_count() or 1, help="Families at a time.")
def main(only: tuple[str, ...], full: bool, ways: bool, write: bool, results: str, jobs: int) -> None:
    """Sweep over every architecture of the installed transformers."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if not write:
        known = read(results)
        settings = [name for name in zoo.FAMILIES if "." in name]
        sweep(
            [n for n in only or (*WRITTEN, *families.families(), *settings) if n not in known or only],
            full,
            ways,
            results,
            jobs,
        )
    rows = list(read(results).values())
    if write:
        PAGE.write_text(page(rows))
    click.echo(summary(rows))


if __name__ == "__main__":
    main()
