"""Neutral graphs as files: what `lift` made of a model once, so that detection is tested without capturing it again.

    cd tests && python -m zoo.graphs             # write the graphs that tests/graphs lacks
    cd tests && python -m zoo.graphs llama gpt2  # write these anew

A graph is plain data: a line for each op, packed. tests/test_detect.py captures models anew and compares what is seen
in them with what is seen in their graphs: a sample in each run, all with `-m exhaustive`.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import zoo
from lnrewrite.detect.detection import detect
from lnrewrite.detect.graph import Op, OpGraph
from lnrewrite.ir import text

FOLDER = Path(__file__).parents[1] / "graphs"


def path(name: str) -> Path:
    """Return the file of a model's graph."""
    return FOLDER / f"{re.sub('[^A-Za-z0-9_.=-]+', '_', name)}.json.gz"


def packed(graph: OpGraph) -> str:
    """Return a graph as lines of JSON: its outputs and aliases, then each op."""
    rows: list[Any] = [{"outputs": graph.outputs, "alias": graph.alias}]
    rows += [[op.name, op.kind, op.inputs, op.attrs, op.shape, op.dtype] for op in graph]
    return "".join(json.dumps(row, default=str, separators=(",", ":")) + "\n" for row in rows)


def unpacked(text: str) -> OpGraph:
    """Return the graph that `packed` wrote."""
    head, *rows = map(json.loads, text.splitlines())
    ops = [Op(name, kind, tuple(i), _tuples(a), _tuples(s), d) for name, kind, i, a, s, d in rows]
    return OpGraph({op.name: op for op in ops}, head["alias"], tuple(head["outputs"]))


def _tuples(value: Any) -> Any:
    """Return a value with tuples where JSON has lists."""
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def read(name: str) -> OpGraph:
    """Return a model's graph from its file."""
    return unpacked(gzip.decompress(path(name).read_bytes()).decode())


def write(name: str, graph: OpGraph) -> None:
    """Write a model's graph, the same bytes for the same graph."""
    FOLDER.mkdir(exist_ok=True)
    path(name).write_bytes(gzip.compress(packed(graph).encode(), 9, mtime=0))


def main(names: Iterable[str]) -> None:
    """Capture families and write their graphs; the picture of what was written is that of the model."""
    for name in names or [n for n in (*zoo.CASES, *zoo.FAMILIES) if not path(n).exists()]:
        try:
            program = zoo.capture(*zoo.build(name))
            same = text.render(detect(unpacked(packed(program.graph))).network) == text.render(program.network)
            assert same, f"{name}: the graph as a file gives another picture"
            write(name, program.graph)
            print(f"{name:32} {len(program.graph.ops):6}  {zoo.spelled(zoo.placements(program.network))}", flush=True)
        except Exception as error:
            print(name, f"{type(error).__name__}: {error}"[:200], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
