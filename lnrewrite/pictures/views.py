"""Choose what is charted of probes' streams: a list of charts with words, over one probe, or over two side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from .charts import Level, Line, lines_svg, map_svg
from .words import BF16, WHAT, capital, known, of_blocks, of_conversions, of_runs, of_states

if TYPE_CHECKING:
    from ..probing.figures import StreamFigures


@dataclass(frozen=True)
class View:
    """Hold a chart for a page: its SVG, what it shows and what is normal, and what was found, a line for each probe."""

    title: str
    svg: str
    what: str
    found: Sequence[str]


Labeled = tuple[str, "StreamFigures"]
"""A stream and what it is called beside another: `before`; empty where it is alone."""

STATES = (
    ("variance", "Variance of the state", "variance, mean over tokens"),
    ("rms", "Size of the state", "RMS"),
    ("max_abs", "Largest number of the state", "size"),
    ("size_cv", "Spread of the tokens' sizes", "deviation by mean, over tokens"),
    ("kurtosis", "Outlier channels", "kurtosis of a token's channels"),
)
BLOCKS = (
    ("branch_ratio", "What each block adds, by what was there", "RMS of branch by RMS of state"),
    ("influence", "Influence of each block", "1 - cosine"),
    ("gradient_norm", "Gradients by depth", "L2 norm"),
    ("sink", "Attention on the first position", "share"),
)
LEVELS = {
    "max_abs": (Level(65504.0, "65504: fp16 ends"),),
    "kurtosis": (Level(3.0, "3: normal distribution"),),
}


def views(held: Sequence[Labeled], key: str) -> Iterator[View]:
    """Yield the charts of streams that belong together, where there are figures. Raises LnrewriteError LN018."""
    for name, title, unit in STATES[:2]:
        yield from _states(held, key, name, title, unit)
    yield from _blocks(held, key, *BLOCKS[0])
    for name, title, unit in STATES[2:]:
        yield from _states(held, key, name, title, unit)
    for name, title, unit in BLOCKS[1:2]:
        yield from _blocks(held, key, name, title, unit)
    for index, (label, stream) in enumerate(held):
        if any(known(v) is not None for row in stream.angular_distance for v in row):
            title = "Angular distance over runs of blocks" + (f", {label}" if label else "")
            svg = map_svg(f"{key}-angular{index}", title, stream.angular_distance)
            yield View(title, svg, WHAT["angular"], [of_runs(stream)])
    for name, title, unit in BLOCKS[2:]:
        yield from _blocks(held, key, name, title, unit)
    yield from _conversions(held, key)


def _states(held: Sequence[Labeled], key: str, name: str, title: str, unit: str) -> Iterator[View]:
    lines = []
    for index, (label, stream) in enumerate(held):
        ys = [getattr(state, name) for state in stream.states]
        names = [state.after or "source" for state in stream.states]
        lines.append(Line(label, places(stream), ys, names, index, index, index > 0))
    if _any(lines):
        svg = lines_svg(f"{key}-{name}", title, lines, unit, LEVELS.get(name, ()), source=True)
        yield View(title, svg, WHAT[name], _found(held, lambda stream: of_states(stream, name)))


def _blocks(held: Sequence[Labeled], key: str, name: str, title: str, unit: str) -> Iterator[View]:
    lines = []
    for index, (label, stream) in enumerate(held):
        kinds = list(dict.fromkeys(block.kind for block in stream.blocks))
        for k, kind in enumerate(kinds):
            rows = [(i, block) for i, block in enumerate(stream.blocks) if block.kind == kind]
            said = ", ".join(filter(None, (label, kind if len(kinds) > 1 else "")))
            ys, names = [getattr(block, name) for _, block in rows], [block.name for _, block in rows]
            lines.append(Line(said, [i for i, _ in rows], ys, names, index if len(held) > 1 else k, k, index > 0))
    if _any(lines):
        ys = [v for line in lines for y in line.ys if (v := known(y)) is not None]
        low = name == "branch_ratio" and min(ys) < 0.02
        levels = (Level(BF16, "1/256: a step of bf16"),) if low else ()
        svg = lines_svg(f"{key}-{name}", title, [line for line in lines if _any([line])], unit, levels)
        yield View(title, svg, WHAT[name], _found(held, lambda stream: of_blocks(stream, name)))


def _conversions(held: Sequence[Labeled], key: str) -> Iterator[View]:
    """Chart the expected errors; placements whose errors are alike share a line."""
    lines = []
    for index, (label, stream) in enumerate(held):
        alike: dict[tuple[float | None, ...], list[str]] = {}
        for placement in dict.fromkeys(p for b in stream.blocks for p in b.expected_error):
            alike.setdefault(tuple(b.expected_error.get(placement) for b in stream.blocks), []).append(placement)
        for k, (ys, placements) in enumerate(alike.items()):
            said = ", ".join(filter(None, (label, f"to {' or '.join(placements)}")))
            names = [block.name for block in stream.blocks]
            lines.append(Line(said, range(len(names)), ys, names, k, k, index > 0))
    if _any(lines):
        title = "Expected error of conversions"
        svg = lines_svg(f"{key}-expected", title, [x for x in lines if _any([x])], "radians, RMS over tokens")
        found = _found(held, lambda stream: f"{capital(of_conversions(stream.blocks))}.")
        yield View(title, svg, WHAT["expected_error"], found)


def places(stream: StreamFigures) -> list[int]:
    """Return for each state the number of the block behind which it stands; -1 for the source."""
    return [many - 1 for many in accumulate(len(blocks) for _, blocks in stream.steps())]


def _any(lines: Sequence[Line]) -> bool:
    return any(known(y) is not None for line in lines for y in line.ys)


def _found(held: Sequence[Labeled], say: Callable[[StreamFigures], str]) -> list[str]:
    rows = [(label, say(stream)) for label, stream in held]
    return [f"{label}: {words}" if label else words for label, words in rows if words]
