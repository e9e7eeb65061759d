"""Run the fuzzer: see the package's own words."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path

import click
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # as pytest does

from fuzz import judging, nets, shrinking, tables  # noqa: E402


@click.command()
@click.option("--seed", default=0, show_default=True, help="The first net.")
@click.option("--n", default=100, show_default=True, help="How many nets.")
@click.option("--jsonl", type=click.Path(path_type=Path), help="Add a line a net; nets that it holds are not run.")
@click.option("--show", type=int, metavar="K", help="Print the choices of net K and what becomes of it.")
@click.option("--shrink", type=int, metavar="K", help="Print the fewest choices that still give the trouble of net K.")
@click.option("--compare", nargs=2, type=click.Path(exists=True), help="Compare the edits of two files.")
def main(
    seed: int, n: int, jsonl: Path | None, show: int | None, shrink: int | None, compare: tuple[str, str] | None
) -> None:
    """Judge random residual nets."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if compare:
        click.echo(tables.compared(*map(tables.read, compare)))
    elif show is not None:
        _show(show)
    elif shrink is not None:
        _shrink(shrink)
    else:
        _run(range(seed, seed + n), jsonl)


def _run(seeds: range, jsonl: Path | None) -> None:
    known = tables.read(jsonl) if jsonl else {}
    for seed in seeds:
        if seed in known:
            continue
        known[seed] = row = judging.judge(seed)
        if jsonl:
            with jsonl.open("a") as file:
                file.write(json.dumps(row) + "\n")
        for line in tables.told(row):
            click.echo(line)
    rows = [known[seed] for seed in seeds]
    click.echo(tables.summary(rows))
    sys.exit(any(what not in ("caught", "contradicted") for row in rows for _, what, _ in judging.trouble(row)))


def _show(seed: int) -> None:
    net, choices = nets.build(seed)
    for name, made in choices.made.items():
        click.echo(f"{' ' if made == choices.plain[name] else '*'} {name:40} {made}")
    row = judging.judge(seed)
    click.echo(json.dumps(row["runs"], indent=1) if row["runs"] else f"{row['capture']} {row.get('why', '')}")


def _shrink(seed: int) -> None:
    for kind, name in shrinking.kinds(judging.judge(seed)).items():
        choices, row = shrinking.shrink(seed, kind, name, lambda said: click.echo(said, err=True))
        click.echo(f"{' '.join(kind)} in {name}: {choices}")
        for line in tables.told(row):
            click.echo(f"  {line}")


if __name__ == "__main__":
    main()
