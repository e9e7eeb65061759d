"""Run the hostile set: see the package's own words."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from .cases import all_cases
from .harness import Harness
from .judge import reported, trouble
from .place import Case


@click.command()
@click.option("--only", default="", metavar="PATTERN", help="Cases whose name this regular expression finds.")
@click.option("--limit", default=30, show_default=True, help="Seconds of processor time that a case may take.")
@click.option("--jsonl", type=click.Path(path_type=Path), help="Add a line a case; cases that it holds are not run.")
@click.option("--mutants", type=int, default=0, help="Run so many random mutants instead.")
@click.option("--seed", default=0, show_default=True, help="Of the mutants.")
@click.option("--names", is_flag=True, help="Print the names of the cases and run nothing.")
@click.option("--show", is_flag=True, help="Print what each case said.")
def main(only: str, limit: int, jsonl: Path | None, mutants: int, seed: int, names: bool, show: bool) -> None:
    """Run hostile files through the command line, and print what was not clean."""
    cases: Iterable[Case] = all_cases().values()
    if mutants:
        from .mutants import mutants_of

        cases = mutants_of(seed, mutants)
    chosen = [case for case in cases if re.search(only, case.name)]
    if names:
        click.echo("\n".join(case.name for case in chosen))
        return
    rows = _run(chosen, limit, jsonl, show)
    unclean = {name: row for name, row in rows.items() if row["trouble"]}
    click.echo(f"\n{len(rows)} cases, {len(unclean)} not clean")
    for name, row in unclean.items():
        click.echo(f"| {name} | [{row['exit']}] | {'; '.join(row['trouble'])} |")
    sys.exit(bool(unclean))


def _run(cases: Iterable[Case], limit: int, jsonl: Path | None, show: bool) -> dict[str, dict[str, Any]]:
    """Run cases that are not in the file yet; return all rows by name."""
    known = [json.loads(line) for line in jsonl.read_text().splitlines()] if jsonl and jsonl.exists() else []
    held = {row["name"]: row for row in known}
    found: dict[str, dict[str, Any]] = {}
    with Harness(limit) as harness:
        for case in cases:
            row = held.get(case.name)
            if row is None:
                row = harness.run(case)
                row["trouble"], row["code"] = trouble(case, row), reported(row)
                if jsonl:
                    with jsonl.open("a") as file:
                        file.write(json.dumps(row) + "\n")
            found[case.name] = row
            if show or row["trouble"]:
                said = row["stderr"].encode("unicode_escape").decode()[:400]
                click.echo(f"{case.name}: [{row['exit']}] {row['cpu']} s {row['peak_mb']} MB {row['trouble']} {said}")
    return found


if __name__ == "__main__":
    main()
