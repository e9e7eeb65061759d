"""Passes on pictures: each tests/streams/*.stream, and each before and after in a pass's docstring.

A file is `# RUN: pipeline`, a network, `---`, and what comes out: the new network, `# REFUSED: code site` and
`# NOT APPLICABLE: site: why` lines. `# ONES:` and `# ZEROS:` name parameters with such values; all others are random.
All of it is compared; `pytest tests/test_streams.py --update-goldens` writes what comes out.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lnrewrite.ir import Exactness, Network
from lnrewrite.ir.text import parse, render
from lnrewrite.pipeline import Pipeline, registry
from lnrewrite.testing.reference import Machine, apply, invent
from zoo.streams import assert_same, context

FILES = sorted(Path(__file__).with_name("streams").glob("*.stream"))


def directives(text: str, word: str) -> list[str]:
    """Return what stands behind `# WORD:`, as words."""
    return [w for line in re.findall(rf"^# {word}: (.+)$", text, re.MULTILINE) for w in line.split()]


def machine_of(network: Network, index: int, text: str) -> Machine:
    """Give one stream random parameters, and the values that the text asks for."""
    machine = invent(network.streams[index], seed=index)
    values = {p: v for word, v in (("ONES", 1.0), ("ZEROS", 0.0)) for p in directives(text, word)}
    changed = {p: np.full_like(machine.params[p], v) for p, v in values.items() if p in machine.params}
    return replace(machine, params={**machine.params, **changed})


def run(pipeline: str, before: str) -> str:
    """Run a pipeline on a picture and write down what came out; exact passes must keep the outputs."""
    network = parse(before)
    machines = [machine_of(network, i, before) for i in range(len(network.streams))]
    rows: list[str] = []
    for item in Pipeline.parse(pipeline).passes:
        for index, machine in enumerate(machines):
            now = replace(network, streams=tuple(m.stream for m in machines))
            proposal = item.propose(machine.stream, context(machine, now))
            machines[index] = apply(machine, proposal)
            rows += [f"# REFUSED: {r.code} {r.site}\n" for r in proposal.refusals]
            rows += [f"# NOT APPLICABLE: {site}: {why}\n" for site, why in proposal.not_applicable]
            if item.exactness <= Exactness.ALGEBRAIC:
                assert_same(machine, machines[index])
    return render(replace(network, streams=tuple(m.stream for m in machines))) + "".join(rows)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_stream_file(path: Path, update_goldens: bool) -> None:
    before, _, after = path.read_text().partition("---\n")
    pipeline = re.search(r"^# RUN: (.+)$", before, re.MULTILINE)
    assert pipeline, f"{path.name} has no `# RUN: pipeline` line"
    found = run(pipeline[1], before)
    if update_goldens:
        path.write_text(f"{before}---\n{found}")
    else:
        assert found == after


def pictures(docstring: str) -> Iterator[tuple[str, str]]:
    """Yield the pictures of a docstring, each the indented block behind `Before::` or `After::`.

    `Before (pipeline)::` names what it is drawn for, yielded as `run`.
    """
    lines = inspect.cleandoc(docstring).splitlines()
    for index, line in enumerate(lines):
        if found := re.search(r"(Before|After)(?: \((.+)\))?::$", line):
            block: list[str] = []
            for row in lines[index + 1 :]:
                if row and not row.startswith("    "):
                    break
                block.append(row)
            if found[2]:
                yield "run", found[2]
            yield found[1], textwrap.dedent("\n".join(block)).strip() + "\n"


FITTED = ("place", "fix-norms", "norm-writers")
"""Passes that ask for data."""


def drawn() -> list[str]:
    """Return the shipped passes whose pictures are exact: each draws what it does."""
    entries = registry.available().items()
    return [name for name, entry in entries if entry.value.startswith("lnrewrite.passes.") and name not in FITTED]


@pytest.mark.parametrize("name", drawn())
def test_docstring_picture(name: str) -> None:
    shown = dict(pictures(registry.find(name).__doc__ or ""))
    pipeline = shown.pop("run", name)
    assert shown.keys() == {"Before", "After"}, f"the docstring of {name} needs one `Before::` and one `After::`"
    found = "".join(line for line in run(pipeline, shown["Before"]).splitlines(True) if not line.startswith("#"))
    assert found == render(parse(shown["After"])) == shown["After"]
