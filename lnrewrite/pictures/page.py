"""Write a page about a model, or about two side by side: one HTML file that needs no network and runs no script."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from .._version import __version__
from ..errors import visible
from ..ir.folding import Row, counted, norm_words
from .drawing import stream_svg
from .style import DRAWING, PAGE, theme
from .views import Labeled, View, places, views
from .words import WHAT, figure, glance, of_massive, of_outliers

if TYPE_CHECKING:
    from ..probing.figures import Probe, StreamFigures

SAFE = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What a browser may do with the page: show it."""
HOW = (
    "Read it from the top down. A block reads the stream where its arrow leaves it, and what it makes is added at the "
    "circled plus. Disks are norms: before a branch (in), behind it (out), inside it, or on the stream (post)."
)
TALL = 640
SHOWN = 20
"""How many rows a table of the worst has."""
HEADER = (
    "no.", "behind", "kind", "placement", "variance", "RMS", "spread", "kurtosis", "largest", "channel",
    "branch", "influence", "gradient", "sink",
)  # fmt: skip
OUTLIERS = ("read at", "by RMS", "8 bits/token", "8 bits/tensor", "channel", "largest", "kurtosis")

Held = Sequence[tuple[str, "Probe"]]
"""Probes and what each is called beside the other, such as `before`; empty where there is one."""


def report(held: Held, title: str | None = None) -> str:
    """Return a page about probes: what was run, the streams drawn, charts with words. Raises LnrewriteError LN018."""
    title = title or " and ".join(dict.fromkeys(probe.model for _, probe in held))
    return _page(f"{title}: what its streams hold", report_body(held, title))


def report_body(held: Held, title: str | None = None) -> str:
    """Return what stands on the page, with its styles: a notebook shows it. Raises LnrewriteError LN018."""
    parts = [_head("lnrewrite probe", title or held[0][1].model, (_lead(*row) for row in held))]
    for _, probe in held:
        parts += [f'<p class="note">{_e(note)}</p>' for note in probe.notes]
    for label, probe in held:
        rows = [f'<li class="{_watch(fine)}">{_told(words)}</li>' for fine, words in glance(probe)]
        parts.append(f'<h2>At a glance{_small(label)}</h2><ul class="glance">{"".join(rows)}</ul>')
    for index in range(max(len(probe.streams) for _, probe in held)):
        parts += _stream([row for row in held if index < len(row[1].streams)], index)
    parts += [*_massive(held), *_outliers(held)]
    return _body(parts)


def forms_page(found: Row, model: str, forms: Sequence[Row]) -> str:
    """Return a page that draws the streams of an `inspect` object with the operator that each norm was written as.

    forms: the rows `norms` of an export's report.
    """
    known = {row["site"]: row["form"] for row in forms}

    def told(norm: Row, site: str) -> Row:
        return {**norm, "form": known[site]} if site in known else norm

    def block(row: Row) -> Row:
        places = [norm["where"] for norm in row["norms"]]
        sites = [f"{p}{places[:k].count(p) + 1}" if places.count(p) > 1 else p for k, p in enumerate(places)]
        norms = [told(norm, f"{row['name']}.{site}") for norm, site in zip(row["norms"], sites, strict=True)]
        return {**row, "norms": norms}

    streams = []
    for row in found["streams"]:
        held = {f"{end}_norm": (row[f"{end}_norm"], f"{row['name']}.{end}") for end in ("embedding", "final")}
        ends = {name: told(norm, site) if norm else None for name, (norm, site) in held.items()}
        streams.append({**row, **ends, "blocks": [block(b) for b in row["blocks"]]})
    alike: dict[tuple[str, str], list[str]] = {}
    for row in forms:
        alike.setdefault((row["form"], row["why"]), []).append(row["site"])
    why = ["<h2>Why each norm was written so</h2>"]
    for (form, reason), sites in alike.items():
        many = f"{', '.join(sites[:3])}{f' and {len(sites) - 3} more' if len(sites) > 3 else ''}"
        why.append(f"<p><b>{_e(form)}</b>, {counted(len(sites), 'norm')} ({_e(many)}): {_e(reason)}</p>")
    return stream_page({**found, "streams": streams}, model, "lnrewrite export", why)


def stream_page(found: Row, model: str, said: str = "lnrewrite inspect", more: Sequence[str] = ()) -> str:
    """Return a page that draws the streams of an `inspect` object, and shows more below them."""
    parts = [_head(said, model, [_counts(found)])]
    parts += [f'<p class="note">{_e(note)}</p>' for note in found.get("notes", ())]
    for index, stream in enumerate(found["streams"]):
        width = f"width {stream['width']}"
        parts.append(f"<h2>{_e(stream['name'])}{_small(width)}</h2>")
        parts.append(f'<div class="grid">{_drawn(found, index, "The stream")}</div>{_norms(stream)}')
    if found["refusals"]:
        rows = [[row["code"], row["site"], row["why"], row["remedy"]] for row in found["refusals"]]
        parts.append(f"<h2>Not understood</h2>{_table(('code', 'site', 'why', 'what to do'), rows, 4)}")
    return _page(f"{model}: its residual streams", _body([*parts, *more]))


def _stream(held: Held, index: int) -> Iterator[str]:
    """Yield what the page says of streams that belong together."""
    streams: list[Labeled] = [(label, probe.streams[index]) for label, probe in held]
    names = " and ".join(dict.fromkeys(stream.name for _, stream in streams))
    width = f"width {' and '.join(dict.fromkeys(str(stream.width) for _, stream in streams))}"
    cards = []
    for label, probe in held:
        if index < len((probe.picture or {}).get("streams", ())):
            cards.append(_drawn(probe.picture or {}, index, ", ".join(filter(None, ("The stream", label)))))
    cards += map(_card, views(streams, f"s{index}"))
    yield f'<h2>{_e(names)}{_small(width)}</h2><div class="grid">{"".join(cards)}</div>'
    for label, stream in streams:
        said = f" of {label}" if label else ""
        yield f"<details><summary>{_e(f'All figures{said}')}</summary>{_table(HEADER, _rows(stream), 4)}</details>"
        if stream.gains:
            header = ("norm", "kind", "eps", "RMS of gain", "largest gain", "RMS of bias")
            rows = [
                [g.site, g.kind, f"{g.eps:g}", figure(g.rms), figure(g.max_abs), figure(g.bias_rms)]
                for g in stream.gains
            ]
            words = f"<p>{_told(WHAT['gains'])}</p>"
            table = _table(header, rows, 2)
            yield f"<details><summary>{_e(f'Gains and biases of norms{said}')}</summary>{words}{table}</details>"


def _massive(held: Held) -> Iterator[str]:
    """Yield the table of massive activations."""
    yield "<h2>Massive activations</h2>"
    for label, probe in held:
        yield f"<p>{_told(': '.join(filter(None, (label, of_massive(probe)[1]))))}</p>"
        if probe.massive:
            top = sorted(probe.massive, key=lambda each: -abs(each.value))
            rows = [
                [
                    m.after or "the source",
                    str(m.channel),
                    figure(m.value),
                    figure(m.ratio),
                    ", ".join(map(str, m.token)),
                ]
                for m in top[:SHOWN]
            ]
            yield _table(("behind", "channel", "value", "by the median", "token"), rows, 1)
            if len(top) > SHOWN:
                yield f"<p>{len(top) - SHOWN} more: <code>--json</code> lists all.</p>"
    yield f'<p class="lead">{_told(WHAT["massive"])}</p>'


def _outliers(held: Held) -> Iterator[str]:
    """Yield the table of what `quantize` is for, those first that stand out farthest."""
    shown = [(label, probe) for label, probe in held if probe.outliers]
    if shown:
        yield "<h2>Outliers of what linear maps read</h2>"
    for label, probe in shown:
        yield f"<p>{_told(': '.join(filter(None, (label, of_outliers(probe)))))}</p>"
        rows = [
            [o.at, figure(o.ratio), f"{o.int8_token:.2%}", f"{o.int8_tensor:.2%}", str(o.channel)]
            + [figure(o.max_abs), figure(o.kurtosis)]
            for o in probe.worst()
        ]
        yield _table(OUTLIERS, rows[:SHOWN], 1)
        if len(rows) > SHOWN:
            yield f"<p>{len(rows) - SHOWN} more: <code>--json</code> lists all.</p>"
    if shown:
        yield f'<p class="lead">{_told(WHAT["outliers"])}</p>'


def _rows(stream: StreamFigures) -> Iterator[list[str]]:
    """Yield a row for the source and for each block; figures of a state stand at the last block of its sum."""
    states = dict(zip(places(stream), stream.states, strict=True))
    for number in range(-1, len(stream.blocks)):
        state, block = states.get(number), stream.blocks[number] if number >= 0 else None
        if state is None and block is None:
            continue
        named = [str(number), block.name, block.kind, block.placement] if block else ["", "source", "", ""]
        held = (state.variance, state.rms, state.size_cv, state.kurtosis, state.max_abs) if state else (None,) * 5
        rest = (block.branch_ratio, block.influence, block.gradient_norm, block.sink) if block else (None,) * 4
        yield [*named, *map(figure, held), str(state.channel) if state else "", *map(figure, rest)]


def _norms(stream: Row) -> str:
    """List the norms of an `inspect` stream."""
    rows = [
        [str(number), block["name"], block["kind"], block["placement"], norm["where"], norm_words(norm)]
        for number, block in enumerate(stream["blocks"])
        for norm in block["norms"] or [{"where": "", "kind": "none", "eps": 0, "gamma": True, "beta": True}]
    ]
    table = _table(("no.", "block", "kind", "placement", "norm", "what"), rows, 6)
    return f"<details><summary>All blocks and norms</summary>{table}</details>"


def _drawn(found: Row, index: int, title: str) -> str:
    """Return the card of a stream's drawing."""
    svg = stream_svg(found, index)
    high = re.search(r'viewBox="0 0 \d+ (\d+)', svg)
    tall = " tall" if high and int(high[1]) > TALL else ""
    return f'<figure class="drawn{tall}"><h3>{_e(title)}</h3>{svg}<figcaption><p>{_e(HOW)}</p></figcaption></figure>'


def _card(view: View) -> str:
    found = "".join(f'<p class="found">{_told(words)}</p>' for words in view.found)
    said = f"<figcaption>{found}<p>{_told(view.what)}</p></figcaption>"
    return f"<figure><h3>{_e(view.title)}</h3>{view.svg}{said}</figure>"


def _lead(label: str, probe: Probe) -> str:
    """Say what was probed, and on what."""
    shape = _counts(probe.picture) if probe.picture else f"{probe.format}, {probe.placement}"
    data = "made-up inputs" if probe.data == "synthetic" else "given batches" if probe.data == "given" else probe.data
    of = f"{label}: {probe.model}, " if label else ""
    graded = f"; gradients of {probe.differentiated}" if probe.differentiated else ""
    return f"{of}{shape}; probed on {data}, {probe.tokens:,} tokens{graded}"


def _counts(found: Row) -> str:
    streams, norms = found["streams"], found["norms"]
    counts = [counted(len(streams), "stream"), counted(sum(len(s["blocks"]) for s in streams), "block")]
    kinds = ", ".join(f"{count} {kind}" for kind, count in norms["kinds"].items())
    counts.append(counted(norms["total"], "norm") + (f" ({kinds})" if kinds else ""))
    return f"{found['format']}, {found['placement']}: {', '.join(counts)}"


def _head(kind: str, title: str, leads: Iterable[str]) -> str:
    said = "".join(f'<p class="lead">{_e(lead)}</p>' for lead in leads)
    return f'<header><p class="kind">{kind}</p><h1>{_e(title)}</h1>{said}</header>'


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], words: int) -> str:
    """Return a table whose first `words` columns are words, and the others numbers."""

    def row(cells: Sequence[str], tag: str) -> str:
        classes = ("" if k < words else ' class="num"' for k in range(len(cells)))
        held = (f"<{tag}{cls}>{_e(cell)}</{tag}>" for cls, cell in zip(classes, cells, strict=True))
        return f"<tr>{''.join(held)}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f'<div class="scroll"><table><thead>{row(header, "th")}</thead><tbody>{body}</tbody></table></div>'


def _body(parts: Sequence[str]) -> str:
    made = f"<footer>Made by lnrewrite {__version__}. Point at a mark of a chart to read its block and figure.</footer>"
    style = f"<style>{theme('.report')}{PAGE}{DRAWING.replace('.stream', '.report .stream')}</style>"
    return f'{style}<div class="report">{"".join(parts)}{made}</div>'


def _page(title: str, body: str) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{SAFE}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        f'content="light dark"><title>{_e(title)}</title><style>{theme("body")}body {{ background: var(--page); '
        f"margin: 0; }}</style></head><body>{body}</body></html>\n"
    )


def _watch(fine: bool | None) -> str:
    return "said" if fine is None else "fine" if fine else "watch"


def _small(words: str) -> str:
    return f" <small>{_e(words)}</small>" if words else ""


def _told(words: str) -> str:
    """Return words as HTML; what stands between backticks is code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", _e(words))


def _e(text: str) -> str:
    """Return text as HTML: names come from strangers' files."""
    return escape(visible(text))
