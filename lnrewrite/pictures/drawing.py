"""Draw a residual stream as SVG, from the object of `inspect --json`.

    source
      |
      |---(L)---+------+        each block: what it reads, through its in norm, its branch,
      |         | attn |        and what it adds to the stream, through its out norm
     (+)--------+------+
      |
     (L)                        a post norm stands on the stream

Runs of alike layers are drawn once. Names come from strangers' files: all text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from xml.etree.ElementTree import Element, SubElement, tostring

from ..errors import visible
from ..ir.folding import BRANCH, Row, counted, folded, norm_words, shortened, spanned
from .style import DRAWING, theme

WIDE, ROW = 560, 76
TRUNK, NORM, BOX, NAMES = 34, 78, 112, 224
"""Where things stand across: the stream, norms of a branch, its box, what is said of it."""
SHOWN = 4
"""Blocks of a stream that are drawn one by one; of longer ones runs of alike layers are folded."""
NAME = 38

Fold = tuple[int, int, Row, Row]


def stream_svg(found: Row, index: int | None = None) -> str:
    """Return an SVG file of all streams of an `inspect` object; of one of them, for a page, with `index`."""
    streams = found["streams"] if index is None else [found["streams"][index]]
    pen = Pen()
    for stream in streams:
        pen.stream(stream)
    said = ", ".join(f"{s['name']}: {counted(len(s['blocks']), 'block')}" for s in streams)
    root = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "class": "stream", "role": "img"})
    root.set("viewBox", f"0 0 {WIDE} {pen.y:g}")
    named = f"The residual streams of a {found['placement']} model" if index is None else "The residual stream"
    SubElement(root, "title").text = visible(f"{named} ({said})")
    if index is None:
        root.set("width", str(WIDE))
        root.set("height", f"{pen.y:g}")
        SubElement(root, "style").text = theme(".stream") + DRAWING
        SubElement(root, "rect", {"width": "100%", "height": "100%", "style": "fill: var(--page)"})
    root.extend([*pen.below, *pen.above])
    return tostring(root, encoding="unicode")


class Pen:
    """Draw from the top down; what is drawn `below` lies under all else."""

    def __init__(self) -> None:
        self.y = 0.0
        self.below: list[Element] = []
        self.above: list[Element] = []
        self.kinds: dict[str, None] = {}

    def stream(self, stream: Row) -> None:
        """Draw one stream, from its source to its end."""
        known = f", {stream['scheme']}" if stream.get("scheme") else ""
        said = f"width {stream['width']}, {counted(len(stream['blocks']), 'block')}{known}"
        self.text(TRUNK - 20, self.y + 24, shortened(stream["name"], NAME), "name")
        self.text(TRUNK - 20, self.y + 43, said, "small soft")
        self.y += 66
        start = self.y
        self.kinds = {}
        self.circle(TRUNK, start, 4.5, "end")
        self.y += 6
        self.end_norm("embedding", stream["embedding_norm"])
        for rows in _runs(list(folded(stream["blocks"], SHOWN, named=False))):
            self.run(rows)
        self.end_norm("final", stream["final_norm"])
        self.y += 22
        self.below.append(Element("path", {"d": f"M{TRUNK} {start:g} V{self.y - 6:g}", "class": "trunk"}))
        self.add("path", d=f"M{TRUNK - 7} {self.y - 8:g} h14 l-7 12 z", cls="end")
        self.y += 22
        self.legend()

    def run(self, rows: Sequence[Fold]) -> None:
        """Draw a layer, in a frame that says how often it stands there where it is repeated."""
        times, top = rows[0][1], self.y
        if times > 1:
            self.y += 30
            self.text(NAMES, top + 25, f"× {times}", "name")
        for _, grouped in groupby(rows, key=lambda row: _sum(row[3])):
            self.sum(list(grouped))
        if times > 1:
            self.y += 4
            box = {
                "x": "6",
                "y": f"{top + 4:g}",
                "width": f"{WIDE - 12}",
                "height": f"{self.y - top - 4:g}",
                "rx": "10",
            }
            self.below.insert(0, Element("rect", {**box, "class": "group"}))
            self.y += 6

    def sum(self, rows: Sequence[Fold]) -> None:
        """Draw the blocks of one sum: each reads the stream, and what they make is added at once."""
        first = self.y + 18
        for index, (_, _, last, block) in enumerate(rows):
            tap, back = self.y + 18, self.y + 52
            self.branch(block, tap, back)
            self.words(block, last, tap)
            self.y += ROW
            if index < len(rows) - 1:
                hops = (f"V{tap + ROW * k - 6:g} a6 6 0 0 1 0 12" for k in range(1, len(rows) - index))
                down = f"{' '.join(hops)} V{back + ROW * (len(rows) - 1 - index):g}"
                self.add("path", d=f"M{BOX} {back:g} H{TRUNK + 20} {down}", cls="path")
                continue
            self.add("path", d=f"M{BOX} {back:g} H{TRUNK}", cls="path")
            for k, words in enumerate(_skips(block)):
                self.skip(words, (first + back) / 2 - 20 * k)
            self.plus(back)
            self.norms(block, "out", NORM, back)
            post = [n for n in block["norms"] if n["where"] == "post"]
            for norm in post:
                self.mark(norm, TRUNK, self.y + 3)
                self.y += 22

    def branch(self, block: Row, tap: float, back: float) -> None:
        """Draw what a block reads, and its box with the norms in it."""
        self.add("path", d=f"M{TRUNK} {tap:g} H{BOX}", cls="path")
        self.add("path", d=f"M{BOX - 9} {tap - 5:g} l9 5 l-9 5 z", cls="arrow")
        self.norms(block, "in", NORM - 6, tap)
        self.add("rect", x=BOX, y=tap - 12, width=96, height=back - tap + 24, rx=8, cls="box")
        inner = [n for n in block["norms"] if n["where"] == "inner"]
        middle = (tap + back) / 2
        self.text(BOX + 48, middle + (-4 if inner else 5), BRANCH.get(block["kind"], "f"), anchor="middle")
        for k, norm in enumerate(inner[:4]):
            self.mark(norm, BOX + 48 + 21 * (k - (min(len(inner), 4) - 1) / 2), middle + 15)

    def words(self, block: Row, last: Row, tap: float) -> None:
        """Say beside a block what it is called, how it is placed, and what is special about it."""
        self.text(NAMES, tap, shortened(spanned(block["name"], last["name"]), NAME), "name", full=block["name"])
        lines = [f"{block['placement']}, {block['kind']}", *_notes(block)]
        for k, line in enumerate(lines[:3], 1):
            self.text(NAMES, tap + 1 + 17 * k, shortened(line, 48), "small soft", full=line)

    def norms(self, block: Row, where: str, x: float, y: float) -> None:
        """Draw the norms at one of a block's places."""
        for norm in block["norms"]:
            if norm["where"] == where:
                self.mark(norm, x, y)

    def end_norm(self, place: str, norm: Row | None) -> None:
        """Draw the norm behind the embedding, or the one at the stream's end."""
        if norm:
            self.mark(norm, TRUNK, self.y + 14)
            self.text(TRUNK + 18, self.y + 18.5, f"{place} norm, {norm_words(norm)}", "small soft")
            self.y += 32

    def mark(self, norm: Row, x: float, y: float) -> None:
        """Draw a norm: a disk with the letter of its kind."""
        kind = str(norm["kind"])
        self.kinds[f"{kind[:1].upper()} {norm_words(norm)}"] = None
        disk = self.circle(x, y, 10, f"norm {kind if kind in ('layer', 'rms') else 'other'}")
        SubElement(disk, "title").text = visible(f"{norm.get('where', '')} norm: {norm_words(norm)}".strip())
        self.text(x, y + 4, kind[:1].upper(), "letter")

    def plus(self, y: float) -> None:
        """Draw a sum."""
        self.circle(TRUNK, y, 10, "sum")
        self.add("path", d=f"M{TRUNK - 6} {y:g} h12 M{TRUNK} {y - 6:g} v12", cls="plus")

    def skip(self, words: str, y: float) -> None:
        """Draw what multiplies the stream on its way past a block."""
        self.add("rect", x=TRUNK - 28, y=y - 10, width=56, height=20, rx=10, cls="scale")
        self.text(TRUNK, y + 4, shortened(words, 8), "scaled", full=words)

    def legend(self) -> None:
        """Say which letters stand for which norms, four at most."""
        for k, words in enumerate(list(self.kinds)[:4]):
            letter, _, rest = words.partition(" ")
            self.text(TRUNK - 20, self.y + 4 + 18 * k, f"{letter}: {rest}", "small soft")
        self.y += 18 * min(len(self.kinds), 4) + 10

    def circle(self, x: float, y: float, r: float, cls: str) -> Element:
        """Draw a circle."""
        return self.add("circle", cx=x, cy=y, r=r, cls=cls)

    def text(self, x: float, y: float, words: str, cls: str = "", anchor: str = "", full: str = "") -> None:
        """Write a line; one that is shortened tells all of it to who points at it."""
        element = self.add("text", x=x, y=y, cls=cls, **({"text-anchor": anchor} if anchor else {}))
        element.text = visible(words)
        if full and full != words:
            SubElement(element, "title").text = visible(full)

    def add(self, tag: str, cls: str = "", **given: float | str) -> Element:
        """Add an element."""
        held = {name: value if isinstance(value, str) else f"{value:g}" for name, value in given.items()}
        element = Element(tag, {**held, "class": cls} if cls else held)
        self.above.append(element)
        return element


def _runs(rows: Sequence[Fold]) -> Iterator[list[Fold]]:
    """Yield the blocks of each folded layer together, and every other block alone with those of its sum."""
    held: list[Fold] = []
    for row in rows:
        _, times, last, block = row
        alone = last is block
        before = held[-1][3] if held else None
        together = before is not None and (
            (not alone and times == 1) or (alone and held[-1][2] is before and _sum(before) == _sum(block))
        )
        if held and not together:
            yield held
            held = []
        held.append(row)
    if held:
        yield held


def _sum(block: Row) -> object:
    """Return what the blocks of one sum have in common."""
    group = block["parallel_group"]
    return id(block) if group is None else f"group {group}"


def _skips(block: Row) -> list[str]:
    """Write what multiplies the stream on its way past a block."""
    scale = block.get("scale", 1)
    return [*([f"× {scale:.4g}"] if scale != 1 else []), *(f"× {by}" for by in block.get("skip", ()))]


def _notes(block: Row) -> Iterator[str]:
    """Write a block's norms, each apart only where they differ, what it is parallel to, and what is not understood."""
    norms = [(n["where"], norm_words(n)) for n in block["norms"]]
    alike = dict.fromkeys(words for _, words in norms)
    said = alike if len(alike) < 2 else dict.fromkeys(f"{where} {words}" for where, words in norms)
    if block["parallel_group"] is not None:
        yield "one sum with its parallel blocks"
    if said:
        yield ", ".join(said)
    if block.get("opaque"):
        yield str(block["opaque"])
