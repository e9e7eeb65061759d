"""Tables of what fuzzing gave: verdicts, edits and refusals of one version, or edits of two."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .judging import trouble

Rows = dict[int, dict[str, Any]]


def read(path: str | Path) -> Rows:
    """Return the rows of a file by seed."""
    lines = Path(path).read_text().splitlines() if Path(path).exists() else ()
    return {row["seed"]: row for row in map(json.loads, lines)}


def told(row: Mapping[str, Any]) -> list[str]:
    """Return a line for each trouble of a net that is not the one before in another pipeline."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, what, why in trouble(row):
        found.setdefault((what, why.replace("{final=true}", "")), []).append(name)
    return [f"{what} net {row['seed']} {', '.join(names)}: {why}" for (what, why), names in found.items()]


def summary(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the closing table: how many are wrong, crash, are contradicted or caught, edits by pass and refusals by code."""
    rows = list(rows)
    troubles = [(row["seed"], *each) for row in rows for each in trouble(row)]
    runs = [run for row in rows for run in row["runs"].values()]
    edits, codes, passes = Counter[str](), Counter[str](), Counter[str]()
    for run in runs:
        edits.update(run.get("steps", {}))
        codes.update(run.get("codes", {}))
        passes.update(line.partition(" ")[0] for line in run.get("caught", ()))
    captures = Counter(row["capture"].partition(":")[0] for row in rows)
    nets = {what: len({t[0] for t in troubles if t[2] == what}) for what in ("wrong", "crash", "contradicted", "caught")}
    lines = [
        f"{len(rows)} nets, {len(runs)} runs, {sum(row.get('seconds', 0) for row in rows):.0f} s of CPU",
        f"captures     {_counted(captures)}",
        *(f"{what:<12} {sum(t[2] == what for t in troubles)}, in {nets[what]} nets" for what in nets),
        f"edits        {sum(edits.values())}: {_counted(edits)}",
        f"refusals     {sum(codes.values())}: {_counted(codes)}",
    ]
    if passes:
        lines.append(f"caught by pass: {_counted(passes)}")
    return "\n".join(lines)


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {n}" for name, n in counts.most_common()) or "none"


def compared(old: Rows, new: Rows, shown: int = 20) -> str:
    """Return how many of the edits that the old version made rightly the new one makes, and where it makes fewer."""
    both = [(seed, name, run, new[seed]["runs"].get(name, {})) for seed, row in old.items() if seed in new
            for name, run in row["runs"].items() if run["verdict"] == "right"]  # fmt: skip
    before = sum(a["edits"] for *_, a, _ in both)
    after = sum(b.get("edits", 0) for *_, b in both)
    kept = sum(
        min(a["steps"].get(step, 0), b.get("steps", {}).get(step, 0)) for *_, a, b in both for step in a["steps"]
    )
    losses = sorted(
        ((a["edits"] - b.get("edits", 0), seed, name, a, b) for seed, name, a, b in both), key=lambda t: -t[0]
    )
    lines = [
        f"{len(both)} runs that were right: {before} edits then, {after} now ({after / max(before, 1):.1%}), "
        f"{kept} of the same pass and net ({kept / max(before, 1):.1%})"
    ]
    for lost, seed, name, a, b in losses[:shown]:
        if lost > 0:
            less = {step: f"{n} -> {b.get('steps', {}).get(step, 0)}" for step, n in a["steps"].items()
                    if n > b.get("steps", {}).get(step, 0)}  # fmt: skip
            more = Counter(b.get("codes", {})) - Counter(a.get("codes", {}))
            lines.append(f"  -{lost} net {seed} {name}: {less}; refusals more: {_counted(more)}")
    return "\n".join(lines)
