"""Measure what converting a model costs by how many tokens it is fitted to: its loss on held-out text, before healing.

    python examples/conversion_curve.py --rows rows.jsonl            # demo:tinygpt; stopped, it goes on
    python examples/conversion_curve.py zoo/qwen3 --tokens 8192      # a model of train_zoo.py, and so on

Windows of 128 bytes of the text that the models learned (of the Python standard library), the same first ones for every
number of tokens, in eight batches or more, of which an eighth is held out. The first line is `fit=constants` on 8,192
tokens. Each figure is the change of the loss in nats per byte; in brackets, its share of that of the constants.
"""

import json
import time
from pathlib import Path

import click
import torch
from heal_placements import teacher_of
from train_zoo import batch, text

import lnrewrite as lnr
from lnrewrite import demo

TO = ("post", "peri", "output", "none")
TOKENS = (1024, 4096, 8192, 16_384, 65_536, 262_144)
WINDOW = 128


def calibration(tokens: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return so many tokens in batches of eight windows or, of few windows, in eight batches."""
    windows = batch(text(), tokens // WINDOW, seed, 0)[:, :-1]
    return [{"input_ids": rows} for rows in windows.split(min(8, max(1, len(windows) // 8)))]


def loss(module: torch.nn.Module) -> float:
    """Return the loss on text that no model here learned, in nats per byte."""

    def logits(input_ids: torch.Tensor) -> torch.Tensor:
        found = module(input_ids=input_ids)
        return found if isinstance(found, torch.Tensor) else found.logits

    return demo.loss(logits, demo.heldout_text())


def measure(model: str, to: str, fit: str, tokens: int, seed: int) -> dict:
    """Convert a model, and return what that took and what it changed."""
    started, teacher = time.perf_counter(), teacher_of(model)
    made = lnr.Pipeline.parse(f"place{{to={to} fit={fit}}}").run(teacher, calibration(tokens, seed)).program
    seconds, change = time.perf_counter() - started, loss(made.module()) - loss(teacher.module())
    return {"key": [model, to, fit, tokens, seed], "change": change, "seconds": seconds}


@click.command(context_settings={"show_default": True})
@click.argument("model", default="tinygpt")
@click.option("--tokens", "counts", type=int, multiple=True, default=TOKENS, help="So many tokens.")
@click.option("--to", "placements", type=click.Choice(TO), multiple=True, default=TO, help="These placements.")
@click.option("--seed", default=0, help="Seed that draws the windows.")
@click.option("--threads", default=1, help="CPU threads.")
@click.option("--rows", type=click.Path(path_type=Path), help="A file that keeps each figure.")
def main(
    model: str, counts: tuple[int, ...], placements: tuple[str, ...], seed: int, threads: int, rows: Path | None
) -> None:
    """Print the table of MODEL: tinygpt, tinyrope.safetensors or a folder."""
    torch.set_num_threads(threads)
    known = [json.loads(line) for line in rows.read_text().splitlines()] if rows and rows.exists() else []
    found = {tuple(row["key"]): row for row in known}
    kinds = [("constants", 8192), *(("reconstruct", tokens) for tokens in sorted(counts))]
    for kind, tokens in kinds:
        for to in placements:
            if (key := (model, to, kind, tokens, seed)) not in found:
                found[key] = measure(*key)
                if rows:
                    with rows.open("a") as file:
                        file.write(json.dumps(found[key]) + "\n")
    click.echo(f"| tokens | {' | '.join(placements)} |\n|---|{'---|' * len(placements)}")
    for kind, tokens in kinds:
        cells = []
        for to in placements:
            change, plain = (found[model, to, *each, seed]["change"] for each in ((kind, tokens), kinds[0]))
            cells.append(f"{change:+.4f}" + (f" ({change / plain:.2f})" if kind == "reconstruct" else ""))
        click.echo(f"| {tokens:,}{' (constants)' if kind == 'constants' else ''} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
