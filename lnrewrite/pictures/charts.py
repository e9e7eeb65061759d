"""Chart figures by depth as SVG: lines, and a map of distances. Colors are the page's, in light and dark.

matplotlib draws with colors that stand for names; they are replaced by CSS variables, and its SVG is made part of a
page: no style that holds beyond it, no name twice, text as text.
"""

from __future__ import annotations

import importlib.util
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element, fromstring, tostring

from ..errors import Code, LnrewriteError, visible
from .style import SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (6.6, 3.9)
"""Inches of 72 units: a chart as wide as half a page, so that its text is read there and on a telephone."""
FAR = 1e100
"""Figures beyond are no figures."""
STAND_FOR = {f"#0b0c{k:02x}": name for k, name in enumerate(("ink", "soft", "edge", "card", "mark", *SERIES))}
COLOR = {name: color for color, name in STAND_FOR.items()}
STYLE: Mapping[str, object] = {
    "svg.fonttype": "none", "text.parse_math": False, "font.size": 12.5, "font.family": "DejaVu Sans",
    "axes.edgecolor": COLOR["soft"], "axes.labelcolor": COLOR["ink"], "axes.linewidth": 0.8,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "axes.unicode_minus": False, "grid.color": COLOR["edge"], "grid.linewidth": 0.8, "text.color": COLOR["ink"],
    "xtick.color": COLOR["soft"], "ytick.color": COLOR["soft"], "xtick.labelcolor": COLOR["ink"],
    "ytick.labelcolor": COLOR["ink"], "legend.frameon": False, "legend.fontsize": 11.5, "lines.linewidth": 1.8,
    "lines.markersize": 5, "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
}  # fmt: skip
MARKS = "osD^v"


@dataclass(frozen=True)
class Line:
    """Hold one line of a chart: a figure for each place, None where there is none, and what each place is called."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    names: Sequence[str]
    color: int = 0
    mark: int = 0
    dashed: bool = False


@dataclass(frozen=True)
class Level:
    """Hold a level that figures are read against, and its name."""

    value: float
    name: str


def need_charts(what: str) -> None:
    """Raise LnrewriteError LN018 where what draws charts is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise LnrewriteError(
            Code.LN018, what, "charts need the package matplotlib", "pip install lnrewrite[report] (or --json)"
        )


def lines_svg(
    key: str, title: str, held: Sequence[Line], unit: str, levels: Sequence[Level] = (), source: bool = False
) -> str:
    """Return a chart of figures by block, on a logarithmic axis where they span more than a factor of 30.

    key: what names in the SVG begin with. unit: of the figures. source: whether a place before the first block is shown
    (-1), for states. Raises LnrewriteError LN018.
    """
    with _drawing(key) as (axes, figure):
        every = [y for line in held for y in map(_figure, line.ys) if not math.isnan(y)]
        spread = [*every, *(level.value for level in levels)]
        if every and min(spread) > 0 and max(spread) / min(spread) > 30:
            _logarithmic(axes, min(spread), max(spread))
        hints = {f"points{index}": _plot(axes, line, f"points{index}") for index, line in enumerate(held)}
        for level in levels:
            axes.axhline(level.value, color=COLOR["mark"], linewidth=1.2, linestyle=(0, (4, 3)))
            axes.annotate(
                visible(level.name), (1, level.value), (-2, 3), xycoords=("axes fraction", "data"),
                textcoords="offset points", ha="right", color=COLOR["mark"], fontsize=11,
                bbox={"facecolor": COLOR["card"], "edgecolor": "none", "pad": 0.5},
            )  # fmt: skip
        xs = [x for line in held for x in line.xs]
        _places(axes, xs, source)
        axes.set_ylabel(visible(unit))
        if len(held) > 1 or held[0].label:
            axes.legend(
                ncols=2 if len(held) < 5 else 3, loc="lower left", bbox_to_anchor=(-0.02, 1.0), borderaxespad=0.2
            )
        return _svg(figure, key, title, hints)


def map_svg(key: str, title: str, rows: Sequence[Sequence[float | None]]) -> str:
    """Return a map of angular distances: how many sums apart, by where it starts. Raises LnrewriteError LN018."""
    with _drawing(key) as (axes, figure):
        many = len(rows)
        held = [[_figure(v) for v in row] + [math.nan] * (many - len(row)) for row in rows]
        image = axes.imshow(
            held, origin="lower", aspect="auto", extent=(-0.5, many - 0.5, 0.5, many + 0.5), cmap="viridis"
        )
        image.set_interpolation("nearest")
        axes.grid(False)
        _whole(axes.xaxis)
        _whole(axes.yaxis)
        axes.set_xlabel("first block of the run (number of its sum)")
        axes.set_ylabel("sums in the run")
        bar = figure.colorbar(image, ax=axes, pad=0.02)
        bar.outline.set_visible(False)
        bar.set_label("angular distance")
        return _svg(figure, key, title, {})


def _plot(axes: Axes, line: Line, gid: str) -> list[str]:
    """Draw one line; return what its marks say to who points at them."""
    ys, many = [_figure(y) for y in line.ys], len(line.xs) > 40
    (drawn,) = axes.plot(line.xs, ys, color=COLOR[SERIES[line.color % len(SERIES)]], label=_plain(line.label))
    drawn.set_marker(MARKS[line.mark % len(MARKS)])
    drawn.set_markersize(3 if many else 5)
    drawn.set_markeredgecolor(COLOR["card"])
    drawn.set_markeredgewidth(0.3 if many else 0.8)
    drawn.set_linestyle("--" if line.dashed else "-")
    drawn.set_gid(gid)
    return [f"{name}: {y:.4g}" for name, y in zip(line.names, ys, strict=True) if not math.isnan(y)]


@contextmanager
def _drawing(key: str) -> Iterator[tuple[Axes, Figure]]:
    """Give a figure and its axes to draw on, in our style."""
    need_charts(f"the chart {key}")
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({**STYLE, "svg.hashsalt": key}):
        figure = Figure(figsize=SIZE, layout="constrained")
        yield figure.add_subplot(), figure


def _logarithmic(axes: Axes, low: float, high: float) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    axes.set_yscale("log")
    decades = math.log10(high / low)
    axes.yaxis.set_major_locator(LogLocator(10, (1.0,) if decades > 2.5 else (1.0, 3.0), numticks=7))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())


def _places(axes: Axes, xs: Sequence[float], source: bool) -> None:
    """Number the blocks, as `inspect` does, and name the source."""
    from matplotlib.ticker import FuncFormatter

    _whole(axes.xaxis)
    if source:
        ticks = [-1, *(t for t in axes.get_xticks() if 0 <= t <= max(xs, default=0))]
        last = len(ticks) > 2 and ticks[1] == 0 and ticks[2] - ticks[1] > 1
        axes.set_xticks([t for t in ticks if not (t == 0 and (last or len(ticks) > 7))])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: "source" if value == -1 else f"{value:g}"))
    axes.set_xlabel("state behind block number" if source else "block number")


def _whole(axis: object) -> None:
    from matplotlib.axis import Axis
    from matplotlib.ticker import MaxNLocator

    assert isinstance(axis, Axis)
    axis.set_major_locator(MaxNLocator(nbins=9, integer=True, min_n_ticks=1))


def _figure(value: float | None) -> float:
    """Return a figure that can be drawn; NaN, a gap, for any other."""
    return math.nan if value is None or not abs(value) <= FAR else value


def _plain(name: str) -> str:
    """Return a label that matplotlib shows: it hides those that begin with an underscore."""
    return visible(name) if not name.startswith("_") else f"\u200b{visible(name)}"


def _svg(figure: Figure, key: str, title: str, hints: Mapping[str, Sequence[str]]) -> str:
    """Return a figure as SVG that is part of a page."""
    page = BytesIO()
    with warnings.catch_warnings():  # of characters that its own font lacks: a browser has others
        warnings.simplefilter("ignore", UserWarning)
        figure.savefig(page, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    root = fromstring(page.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            if _name(child.tag) in ("metadata", "style"):
                parent.remove(child)
    for element in root.iter():
        _adopt(element, key)
        for place, hint in zip(_points(element, key, hints), hints.get(_gid(element, key), ()), strict=False):
            place.append(_titled(hint))
    root.attrib.update({"xmlns": "http://www.w3.org/2000/svg", "class": "chart", "role": "img"})
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.insert(0, _titled(title))
    return tostring(root, encoding="unicode")


def _adopt(element: Element, key: str) -> None:
    """Take an element out of matplotlib's namespaces, colors and fonts."""
    element.tag = _name(element.tag)
    held = {_name(name): value for name, value in element.attrib.items()}
    element.attrib.clear()
    for name, value in held.items():
        if name == "id":
            value = f"{key}-{value}"
        elif name == "href" and value.startswith("#"):
            value = f"#{key}-{value[1:]}"
        value = re.sub(r"url\(#([^)]*)\)", rf"url(#{key}-\1)", value)
        if name == "style":
            value = re.sub(r"font: [^;']*?([\d.]+px) '[^;]*", r"font-size: \1", value)  # until matplotlib 3.10
            value = re.sub(r" ?font-family: [^;]*;?", "", value)
            value = re.sub("#0b0c[0-9a-f]{2}", lambda found: f"var(--{STAND_FOR[found[0]]})", value)
        element.set(name, value)


def _points(element: Element, key: str, hints: Mapping[str, Sequence[str]]) -> list[Element]:
    """Return the marks of a line that is to have hints; none where they are not as many."""
    told = hints.get(_gid(element, key))
    uses = [each for each in element.iter() if _name(each.tag) == "use"] if told else []
    return uses if told and len(uses) == len(told) else []


def _gid(element: Element, key: str) -> str:
    return element.get("id", "").removeprefix(f"{key}-")


def _titled(words: str) -> Element:
    found = Element("title")
    found.text = visible(words)
    return found


def _name(tag: str) -> str:
    """Return a name without its namespace."""
    return tag.rpartition("}")[2]
