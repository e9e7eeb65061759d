"""Pictures of streams and reports of probes: whole, escaped, readable in a browser, and without a network."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lnrewrite as lnr
from commands import fails, ok
from lnrewrite.pictures import charts, views
from lnrewrite.pictures.drawing import stream_svg
from lnrewrite.pictures.page import forms_page, report, stream_page
from lnrewrite.pictures.words import glance
from lnrewrite.probing.figures import BlockFigures, Gain, Headroom, Massive, Outlier, Probe, State, StreamFigures

TINY = "demo:tinygpt"
SVG = "{http://www.w3.org/2000/svg}"

# ---- what is made up: probes and pictures, with names as a hostile file has them ----

EVIL = (
    "<script>alert(1)</script>", '"><img src=https://evil.example/x onerror=alert(1)>', "]]>&lt;&#0;", "a\0b\x1b[31m",
    "$\\frac{1}{$", "_hidden",
    "'</style></svg>", "url(https://evil.example)", "\ud800", "", "javascript:alert(1)", "`x`",
)  # fmt: skip
NAMES = st.sampled_from(EVIL) | st.text(max_size=60) | st.sampled_from([f"h.{k}.attn" for k in range(9)])
FIGURES = st.none() | st.floats(0, 1e60) | st.sampled_from([0.0, 5e-324, 1e-30, 1.0, 1e308])
NUMBERS = st.floats(0, 1e60) | st.just(0.0)
KINDS = st.sampled_from(["attention", "mlp", "other"]) | NAMES


@st.composite
def norms(draw: Any, where: str | None = None) -> dict[str, Any]:
    row = {
        "kind": draw(st.sampled_from(["layer", "rms", "batch"]) | NAMES), "eps": draw(st.floats(0, 1)),
        "gamma": draw(st.booleans()), "beta": draw(st.booleans()), "origin": [],
    }  # fmt: skip
    if draw(st.booleans()):
        row["modulated"] = draw(NAMES)
    return row if where is None else {**row, "where": where}


@st.composite
def blocks(draw: Any) -> dict[str, Any]:
    sites = draw(st.lists(st.sampled_from(["in", "out", "post", "inner"]), max_size=5))
    row = {
        "name": draw(NAMES), "kind": draw(KINDS), "placement": draw(st.sampled_from(["pre", "peri"]) | NAMES),
        "parallel_group": draw(st.none() | st.integers(0, 1)), "norms": [draw(norms(where)) for where in sites],
        "scale": draw(st.sampled_from([1, 0.5]) | st.floats(-9, 9)), "opaque": draw(st.just("") | NAMES),
    }  # fmt: skip
    return {**row, "skip": [draw(NAMES)]} if draw(st.booleans()) else row


@st.composite
def pictures(draw: Any, streams: int | None = None) -> dict[str, Any]:
    """Make an object of `inspect --json` up, alike layers in runs among its blocks."""

    def stream() -> dict[str, Any]:
        held = draw(st.lists(blocks(), max_size=3)) * draw(st.sampled_from([1, 1, 4]))
        ends = {end: draw(st.none() | norms()) for end in ("embedding_norm", "final_norm")}
        return {"name": draw(NAMES), "width": 8, "scheme": draw(st.just("") | NAMES), "blocks": held, **ends}

    many = draw(st.integers(0, 2)) if streams is None else streams
    held = {"total": 3, "on_stream": 2, "kinds": {draw(NAMES): 3}}
    refusals = [{"code": "LN201", "site": draw(NAMES), "why": draw(NAMES), "remedy": draw(NAMES)}]
    notes = draw(st.lists(NAMES, max_size=2))
    return {
        "format": draw(NAMES), "placement": draw(NAMES), "streams": [stream() for _ in range(many)], "norms": held,
        "refusals": refusals, "notes": notes,
    }  # fmt: skip


@st.composite
def figures(draw: Any) -> StreamFigures:
    """Make a stream's figures up: blocks, some of one sum, none of them too; figures that are None."""
    held = [
        BlockFigures(draw(NAMES), draw(KINDS), draw(NAMES), draw(NUMBERS), *(draw(FIGURES) for _ in range(3)), draw(
            st.dictionaries(NAMES, NUMBERS, max_size=2)))
        for _ in range(draw(st.integers(0, 4)))
    ]  # fmt: skip
    after = [None, *(block.name for block in held if draw(st.booleans()))]
    states = [State(name, *(draw(NUMBERS) for _ in range(3)), draw(FIGURES), draw(NUMBERS), 3) for name in after]
    many = len(states)
    distances = tuple(tuple(draw(FIGURES) for _ in range(many - n)) for n in range(1, many))
    gains = [Gain(draw(NAMES), draw(NAMES), 1e-5, *(draw(NUMBERS) for _ in range(3)))] * draw(st.integers(0, 1))
    return StreamFigures(draw(NAMES), 8, tuple(states), tuple(held), distances, tuple(gains))


@st.composite
def probes(draw: Any) -> Probe:
    streams = tuple(draw(st.lists(figures(), min_size=0, max_size=2)))
    massive = [Massive(draw(st.none() | NAMES), 1, draw(NUMBERS), draw(FIGURES), (0, 1))] * draw(
        st.sampled_from([0, 1, 30])
    )
    fp16 = Headroom(draw(NUMBERS), draw(FIGURES), draw(NAMES))
    outliers = [Outlier(draw(NAMES), draw(NUMBERS), 1, draw(NUMBERS), draw(FIGURES), draw(NUMBERS), 0.1)] * draw(
        st.sampled_from([0, 1, 30])
    )
    picture = draw(st.none() | pictures(len(streams)))
    return Probe(
        draw(NAMES), draw(NAMES), draw(NAMES), draw(NAMES), 9, streams, tuple(massive), fp16, tuple(outliers),
        draw(st.none() | NAMES), tuple(draw(st.lists(NAMES, max_size=2))), picture,
    )  # fmt: skip


# ---- a page as a browser takes it apart ----

TAGS = re.compile(
    "html|head|meta|title|style|body|div|header|footer|p|h1|h2|h3|small|code|ul|li|figure|figcaption|details|summary|"
    "table|thead|tbody|tr|th|td|svg|g|path|circle|rect|text|tspan|use|defs|clippath|image"
)


class Page(HTMLParser):
    """Check a page's tags and attributes as they come: nothing that stands in a name may become one."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.figures = 0
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert TAGS.fullmatch(tag), tag
        self.figures += tag == "figure"
        for name, value in attrs:
            assert not name.startswith("on"), name
            assert "evil" not in (value or "") or name == "content", (name, value)
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href"):
                assert (value or "").startswith(("#", "data:image/png;base64,")), value

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def checked(text: str) -> Page:
    """Take a page apart and check what holds for every page."""
    text.encode()
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", "".join(re.findall(r"<style.*?</style>", text, re.S)))
    for svg in re.findall(r"<svg.*?</svg>", text, re.S):
        ElementTree.fromstring(svg)
    return page


def faked(key: str, title: str, *rest: Any, **more: Any) -> str:
    return f"<svg><title>{key}</title></svg>"


# ---- drawings ----


@given(pictures())
def test_a_drawing_is_whole_whatever_names_say(found: dict[str, Any]) -> None:
    root = ElementTree.fromstring(stream_svg(found))
    assert {each.tag for each in root.iter()} <= {
        SVG + t for t in ("svg", "title", "style", "rect", "path", "circle", "text")
    }
    assert checked(stream_page(found, EVIL[0])).figures == len(found["streams"])
    left, top, wide, high = map(float, root.attrib["viewBox"].split())
    for each in root.iter(f"{SVG}circle"):
        assert left < float(each.attrib["cx"]) < wide
        assert top < float(each.attrib["cy"]) < high


def marks(found: dict[str, Any], cls: str) -> int:
    root = ElementTree.fromstring(stream_svg(found))
    return sum(cls in each.get("class", "").split() for each in root.iter())


def block(name: str, *where: str, group: int | None = None, **more: Any) -> dict[str, Any]:
    held = [{"where": w, "kind": "rms", "eps": 1e-6, "gamma": True, "beta": False, "origin": []} for w in where]
    row = {
        "name": name,
        "kind": "mlp",
        "placement": "pre",
        "parallel_group": group,
        "norms": held,
        "scale": 1,
        "opaque": "",
    }
    return {**row, **more}


def drawn(*held: dict[str, Any]) -> dict[str, Any]:
    stream = {"name": "s", "width": 8, "scheme": "", "blocks": list(held), "embedding_norm": None, "final_norm": None}
    return {"format": "module", "placement": "pre", "streams": [stream], "notes": []}


def test_every_norm_sum_and_scale_has_its_mark() -> None:
    found = drawn(block("a", "in", "out"), block("b", "post"), block("c", "in", "inner", "inner", scale=0.5))
    assert marks(found, "norm") == 6
    assert marks(found, "sum") == marks(found, "box") == 3
    assert marks(found, "scale") == 1
    found["streams"][0]["final_norm"] = found["streams"][0]["embedding_norm"] = block("a", "in")["norms"][0]
    assert marks(found, "norm") == 8


def test_parallel_blocks_share_one_sum() -> None:
    apart = drawn(*(block(f"h.{k}.{name}", "in") for k in range(2) for name in ("attn", "mlp")))
    shared = drawn(*(block(f"h.{k}.{name}", "in", group=k) for k in range(2) for name in ("attn", "mlp")))
    assert (marks(apart, "box"), marks(apart, "sum")) == (4, 4)
    assert (marks(shared, "box"), marks(shared, "sum")) == (4, 2)


@pytest.mark.parametrize("group", [False, True])
def test_96_blocks_are_drawn_as_one_layer(group: bool) -> None:
    layers = [block(f"h.{k}.{n}", "in", group=k if group else None) for k in range(48) for n in ("attn", "mlp")]
    if not group:  # those of one sum stay together, alike or not
        layers = [{**each, "kind": each["name"][-4:]} for each in layers]
    assert marks(drawn(*layers), "box") == 2
    assert "× 48" in stream_svg(drawn(*layers))
    odd = drawn(block("first", "in", "out"), *layers, block("last", "post"))
    assert marks(odd, "box") == 4


def test_names_that_differ_do_not_keep_layers_apart() -> None:
    names = ["enc.SelfAttention", "enc.attention", "enc.attention@2", "enc.attention@3", "enc.attention@4"]
    assert marks(drawn(*(block(name, "in") for name in names)), "box") == 1


# ---- charts ----

LINES = st.lists(st.tuples(NAMES, st.lists(FIGURES, min_size=1, max_size=6)), min_size=1, max_size=3)


@settings(max_examples=15)
@given(LINES, NAMES, st.booleans())
def test_a_chart_is_whole_whatever_figures_there_are(held: list[Any], name: str, source: bool) -> None:
    start = -1 if source else 0
    lines = [
        charts.Line(n, range(start, start + len(ys)), ys, [name] * len(ys), k, k) for k, (n, ys) in enumerate(held)
    ]
    text = charts.lines_svg("k", name, lines, name, [charts.Level(3.0, name)], source)
    checked(text)
    for k, (_, ys) in enumerate(held):
        (line,) = (each for each in ElementTree.fromstring(text).iter() if each.get("id") == f"k-points{k}")
        assert sum(1 for _ in line.iter(f"{SVG}use")) == sum(y is not None and y <= charts.FAR for y in ys)


@pytest.mark.parametrize("ys", [[1.0, None, 2.0], [1.0, 1e200, 2.0], [1.0, float("nan"), 2.0], [0.001, None, 900.0]])
def test_a_figure_that_is_none_leaves_a_gap(ys: list[float | None]) -> None:
    text = charts.lines_svg("k", "t", [charts.Line("", range(3), ys, "abc")], "u")
    (line,) = (each for each in ElementTree.fromstring(text).iter() if each.get("id") == "k-points0")
    assert [each.text for each in line.iter(f"{SVG}title")] == [f"a: {ys[0]:g}", f"c: {ys[2]:g}"]
    assert "L" not in line[0].attrib.get("d", "")


def test_a_chart_takes_its_colors_and_fonts_from_the_page() -> None:
    text = charts.lines_svg("k", "t", [charts.Line("a", range(3), [1, 2, 3], "abc")], "u", [charts.Level(2, "two")])
    text += charts.map_svg("m", "t", [[0.1, 0.2], [0.3]])
    assert not re.search(r"#0b0c|DejaVu|font:|font-family|#000000|#ffffff", text)
    assert "var(--one)" in text and "var(--mark)" in text and "var(--ink)" in text


# ---- reports ----


@given(probes(), probes())
def test_a_report_is_whole_whatever_a_probe_holds(one: Probe, other: Probe) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(views, "lines_svg", faked)
        patch.setattr(views, "map_svg", faked)
        checked(report([("", one)]).replace("<title>s", "<title>"))
        checked(report([("before", one), (EVIL[1], other)]))


@settings(max_examples=3)
@given(probes())
def test_a_report_with_its_charts_is_whole(probe: Probe) -> None:
    checked(probe.to_html())


@pytest.fixture(scope="module")
def tiny() -> Probe:
    """Return a probe of a trained model, on few tokens."""
    return lnr.probe(TINY)


def test_a_report_shows_every_figure(tiny: Probe) -> None:
    page = checked(tiny.to_html())
    words = " ".join(page.text)
    titles = [title for _, title, _ in (*views.STATES, *views.BLOCKS)]
    for title in (*titles, "Angular distance over runs of blocks", "Expected error of conversions"):
        assert title in words, title
    assert page.figures == 12
    assert "made-up inputs" in words
    for each in tiny.streams[0].blocks:
        assert each.name in words


def test_names_are_told_as_they_are() -> None:
    """Sentences begin with a capital, and no name in them changes."""
    held = BlockFigures("h.MLP", "mlp", "pre", 0.5, 0.1, expected_error={"peri": 0.2})
    stream = StreamFigures("S", 8, (State(None, 1, 1, 0, 3, 1, 0), State("h.MLP", 4, 2, 0, 3, 1, 0)), (held,), ())
    found = Probe("m", "module", "pre", "given", 9, (stream,) * 2, (), Headroom(1.0, 65504.0, "x"))
    assert [words for _, words in glance(found)] == [
        "fp16 fits: the largest number that a linear map or a stream holds is 1 (at x), and fp16 has room for 65,504 "
        "times that.",
        "No activation is massive (beyond 100 and 1,000 times the median).",
        "S: the variance of the state goes from 1 to 4, 4 times; the largest step is 4 times, behind h.MLP.",
        "S: dropping would cost least: h.MLP (0.1).",
        "S: the variance of the state goes from 1 to 4, 4 times; the largest step is 4 times, behind h.MLP.",
        "S: dropping would cost least: h.MLP (0.1).",
        "Converting with constants is expected to turn the state, to peri: 0.2 radians a block, most 0.2 at h.MLP.",
    ]


def test_what_does_not_fit_is_marked() -> None:
    found = Probe("m", "module", "pre", "given", 9, (), (), Headroom(131008.0, 0.5, "x"))
    found = replace(found, massive=(Massive(None, 3, -131008.0, None, (0, 1)),))
    assert [fine for fine, _ in glance(found)] == [False, False]
    assert "fp16 overflows" in glance(found)[0][1]
    page = found.to_html()
    assert page.count('<li class="watch">') == 2
    assert "<td>the source</td>" in page and ">-131,008</td>" in page


def test_figures_that_there_are_not_have_no_chart(tiny: Probe) -> None:
    stream = tiny.streams[0]
    bare = replace(stream, blocks=tuple(replace(b, gradient_norm=None, sink=None) for b in stream.blocks))
    page = checked(replace(tiny, streams=(bare,), picture=None).to_html())
    assert page.figures == 9
    assert "Gradients by depth" not in page.text


def test_two_probes_stand_side_by_side(tiny: Probe) -> None:
    page = checked(report([("before", tiny), ("after", tiny)]))
    assert page.figures == 14  # of both the drawing and the map of distances
    assert any(text.startswith("after: From") for text in page.text)


def test_the_json_of_probe_does_not_hold_the_picture(tiny: Probe) -> None:
    assert tiny.picture is not None
    assert "picture" not in tiny.to_dict()
    assert "picture" not in repr(tiny)


def test_a_notebook_shows_the_report_or_the_table(tiny: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = tiny._repr_html_()
    assert "<figure>" in shown and "<html" not in shown
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert replace(tiny, model="<b>")._repr_html_().startswith("<pre>&lt;b&gt; (demo, pre)")


# ---- the command line ----


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_inspect_draws(tmp_path: Path) -> None:
    told = ok("inspect", TINY, "-o", "stream.svg").stdout
    assert told.endswith("written: stream.svg\n")
    assert marks_of(tmp_path / "stream.svg", "norm") == 3  # one layer's two and the final one
    ok("inspect", TINY, "-o", "page.html", "-q")
    assert checked((tmp_path / "page.html").read_text()).figures == 1
    assert '"output": "stream.svg"' in ok("inspect", TINY, "-o", "stream.svg", "--force", "--json").stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["page.html", "stream.svg"]


def marks_of(path: Path, cls: str) -> int:
    return sum(cls in each.get("class", "").split() for each in ElementTree.parse(path).iter())


def test_probe_writes_a_report(tmp_path: Path) -> None:
    told = ok("probe", TINY, "-o", "report").stdout
    assert told.endswith("written: report.html\n")
    assert checked((tmp_path / "report.html").read_text()).figures == 12


@pytest.mark.parametrize(
    ("command", "output"),
    [("probe", "a.svg"), ("probe", "a.pt2"), ("inspect", "a.pdf"), ("inspect", ""), ("probe", "-")],
)
def test_other_suffixes_are_refused(command: str, output: str) -> None:
    fails("LN025", 2, command, TINY, "-o", output)


def test_nothing_is_replaced_unasked(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text("mine")
    for command in ("inspect", "probe"):
        fails("LN025", 1, command, TINY, "-o", "a.html")
    assert (tmp_path / "a.html").read_text() == "mine"


def test_what_draws_is_missed_before_the_model_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lnrewrite.api.load_source", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    error = fails("LN018", 1, "probe", TINY, "-o", "a.html")
    assert "pip install lnrewrite[report]" in error["remedy"]


def test_an_export_draws_what_each_norm_was_written_as() -> None:
    """Each norm stands beside its own operator, also where a branch holds several, and at the end of the stream."""
    norm = {"kind": "rms", "eps": 1e-6, "gamma": True, "beta": False}
    norms = [{**norm, "where": where} for where in ("in", "inner", "inner")]
    block = {"name": "h.0", "kind": "attention", "placement": "pre", "parallel_group": None, "norms": norms}
    stream = {"name": "h", "width": 8, "scheme": None, "blocks": [block], "embedding_norm": None, "final_norm": norm}
    found = {
        "placement": "pre",
        "streams": [stream],
        "refusals": [],
        "format": "demo",
        "norms": {"kinds": {}, "total": 4},
    }
    sites = ["h.0.in", "h.0.inner1", "h.0.inner2", "h.final"]
    page = forms_page(found, "m", [{"site": s, "form": f"Op{k}", "why": f"<{k}>"} for k, s in enumerate(sites)])
    titles = re.findall(r"<title>(\w+) ?norm: rms 1e-06 as (Op\d)</title>", page)
    assert titles == [("in", "Op0"), ("inner", "Op1"), ("inner", "Op2")], titles
    assert "final norm, rms 1e-06 as Op3" in page and "&lt;3&gt;" in page


# ---- a browser ----

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MEASURE = """<script>addEventListener("load", () => {
  const wide = document.documentElement.getBoundingClientRect().width, clip = "svg, .scroll";
  const out = [...document.body.querySelectorAll("*")].filter(e => !e.parentElement.closest(clip) && e.getBoundingClientRect().right > wide + 1);
  const low = [...document.querySelectorAll("figure")].filter(e => e.getBoundingClientRect().height < 150 || !e.querySelector("svg"));
  const cut = [...document.querySelectorAll("svg text")].filter(e => { const s = e.ownerSVGElement.getBoundingClientRect(), b = e.getBoundingClientRect();
    return b.left < s.left - 2 || b.right > s.right + 2 || b.bottom > s.bottom + 2 || b.top < s.top - 2; });
  document.title = ["MEASURED", Math.round(wide), document.body.scrollWidth <= wide, out.map(e => e.className || e.tagName), low.length, document.querySelectorAll("figure").length, cut.map(e => e.textContent)].join("|");
});</script>"""  # noqa: E501


def browsed(page: str, folder: Path, width: int) -> tuple[str, str]:
    """Return what a browser makes of a page, and what it says on its console."""
    (folder / "page.html").write_text(page)
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--user-data-dir={folder / 'user'}",
    ]
    command = [str(CHROMIUM), *options, f"--window-size={width},1400", "--dump-dom", f"file://{folder / 'page.html'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
@pytest.mark.parametrize(("width", "dark"), list(itertools.product((420, 1200), (False, True))))
def test_a_browser_shows_the_report(tiny: Probe, tmp_path: Path, width: int, dark: bool) -> None:
    page = tiny.to_html()
    if dark:
        page = page.replace("(prefers-color-scheme: dark)", "(prefers-color-scheme: light)")
    assert browsed(page, tmp_path, width)[1] == ""  # as it stands, its policy in force
    narrow = f"<style>html {{ width: {width}px }}</style>"  # a window is never narrower than 500
    measured = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', MEASURE + narrow, page)
    dom, said = browsed(measured, tmp_path, width)
    assert said == ""
    title = re.search("<title>MEASURED(.*?)</title>", dom)
    assert title is not None
    assert title[1].split("|") == ["", str(width), "true", "", "0", "12", ""]


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
def test_a_browser_runs_nothing_of_a_hostile_name(tiny: Probe, tmp_path: Path) -> None:
    """The page's own policy is taken out here: escaping alone has to hold."""
    stream = tiny.streams[0]
    evil = [replace(b, name=EVIL[k % len(EVIL)]) for k, b in enumerate(stream.blocks)]
    states = [replace(s, after=s.after and EVIL[(k - 1) % len(EVIL)]) for k, s in enumerate(stream.states)]
    shown = replace(
        tiny, model=EVIL[1], streams=(replace(stream, name=EVIL[0], blocks=tuple(evil), states=tuple(states)),)
    )
    open_ = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', MEASURE, shown.to_html())
    dom, said = browsed(open_, tmp_path, 500)
    assert said == ""
    assert re.search(r"<title>MEASURED\|\d+\|true\|\|0\|12\|", dom)
    assert "<img" not in dom
