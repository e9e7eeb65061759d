"""Draw what `peri_paper.py` measured: SVG without a background, whose text takes the color of light or dark pages."""

import math
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from peri_claims import ARMS, Arm, Row, Runs, failed, label, largest, tables

INK = "#010203"
"""Stands for the color of the page's text, until the file is written."""
STYLE = "<style>svg{color:#24292f}@media(prefers-color-scheme:dark){svg{color:#d0d7de}}</style>"
LOOK = {
    "post": ("#d9730d", "o"),
    "pre": ("#3f8fd2", "s"),
    "peri": ("#2f9e5f", "^"),
    "output": ("#9a6dd7", "D"),
    "peri from pre": ("#d6457f", "v"),
}
"""The color and the marker of each arm, that can be told apart on white and on black, and without colors."""
PARTS = {"whole": "trained in one placement", "second": "the second half of training"}


def write_report(rows: list[Row], frequencies: float, folder: Path) -> None:
    """Write table.md and the figures to a folder; each is replaced whole."""
    runs = Runs(rows, frequencies)
    _write(folder / "table.md", tables(runs))
    figures = {"variance": "variance of the state", "gradient": "norm of the gradient"}
    for name, axis in figures.items():
        _write(folder / f"{name}.svg", svg(by_depth(runs, name, axis)))
    _write(folder / "rates.svg", svg(by_rate(runs)))


def by_depth(runs: Runs, name: str, axis: str) -> Figure:
    """Draw a measure over depth, before and after, of each arm at its best rate: mean and extremes of seeds."""
    figure, panels = _panels()
    for row, (part, told) in zip(panels, PARTS.items(), strict=True):
        for panel, when in zip(row, ("start", "end"), strict=True):
            for arm in [arm for arm in ARMS if arm[1] == part]:
                seeds = [run[when][name] for run in runs.at_best(arm)]
                first = 0 if name == "variance" else 1
                _line(panel, arm, range(first, first + len(seeds[0])), list(zip(*seeds, strict=True)))
            _logarithmic(panel)
            panel.set(xlabel="layer", ylabel=axis, title=f"{told}: {'before' if when == 'start' else 'after'}")
        row[0].legend(frameon=False, fontsize=8, labelcolor=INK)
    return figure


def by_rate(runs: Runs) -> Figure:
    """Draw loss and largest activation by learning rate: mean and extremes of seeds, a cross for each that failed."""
    figure, panels = _panels()
    numbers: tuple[tuple[str, Callable[[Row], float]], ...]
    numbers = (("loss, nats per byte", lambda row: row["loss"]), ("largest activation", largest))
    for row, (part, told) in zip(panels, PARTS.items(), strict=True):
        for panel, (axis, number) in zip(row, numbers, strict=True):
            for arm in [arm for arm in ARMS if arm[1] == part]:
                every = [[number(run) for run in runs.of(arm, rate)] for rate in runs.rates()]
                _line(panel, arm, runs.rates(), every)
                for rate in runs.rates():
                    bad = [number(run) for run in runs.of(arm, rate) if failed(run, runs.frequencies)]
                    panel.plot([rate] * len(bad), bad, "x", color=LOOK[arm[0]][0], markersize=8)
            panel.set(xscale="log", xlabel="learning rate", ylabel=axis, title=told)
            panel.set_xticks(runs.rates(), [f"{rate:g}" for rate in runs.rates()])
            panel.set_xticks([], minor=True)
        _logarithmic(row[1])
        row[0].legend(frameon=False, fontsize=8, labelcolor=INK)
    return figure


def _panels() -> tuple[Figure, list[list[Axes]]]:
    with matplotlib.rc_context(dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), INK)):
        figure = Figure(figsize=(9, 7), layout="constrained")
        panels = figure.subplots(2, 2)
    for panel in panels.flat:
        panel.tick_params(which="both", colors=INK)
        panel.spines[["top", "right"]].set_visible(False)
        panel.title.set_fontsize(10)
    return figure, panels.tolist()


def _logarithmic(panel: Axes) -> None:
    panel.set_yscale("log")
    panel.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_formatter("{x:g}")


def _line(panel: Axes, arm: Arm, x: object, seeds: list) -> None:
    color, marker = LOOK[arm[0]]
    finite = [[v for v in values if math.isfinite(v)] or [math.nan] for values in seeds]
    mean = [sum(values) / len(values) for values in finite]
    panel.plot(x, mean, color=color, marker=marker, markersize=4, linewidth=1.5, label=label(arm))
    panel.fill_between(x, [min(v) for v in finite], [max(v) for v in finite], color=color, alpha=0.2, linewidth=0)


def svg(figure: Figure) -> str:
    """Return the text of a figure: the same one for the same figure, its letters as text, its ink the page's."""
    file = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "peri", "font.family": "sans-serif"}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue().replace(INK, "currentColor")
    return re.sub(r"(<svg [^>]*>)", rf"\1{STYLE}", text, count=1)


def _write(path: Path, content: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(content)
    part.replace(path)
