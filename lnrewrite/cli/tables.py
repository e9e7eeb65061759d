"""Lay out for people, in at most 100 columns, what commands answer: the placement map, the passes, a comparison."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator

from ..errors import Refusal
from ..ir.folding import BRANCH, Row, counted, folded, norm_words, shortened, spanned
from ..layout import WIDTH, aligned, wrapped

ASCII = str.maketrans({"●": "o", "•": "*", "─": "-", "×": "x", "…": "~"})
_LONG = 24  # blocks of a stream that are shown one by one
_NAME = 38  # columns that a name may take
_HEAD = "     in        out     post"  # above the marks of `drawing`


def placement_map(found: Row, every: bool = False) -> str:
    """Return the map of an `inspect` object: a row per block, runs of alike layers folded unless `every`."""
    streams, norms = found["streams"], found["norms"]
    counts = [counted(len(streams), "stream"), counted(sum(len(s["blocks"]) for s in streams), "block")]
    kinds = ", ".join(f"{count} {kind}" for kind, count in norms["kinds"].items())
    counts.append(counted(norms["total"], "norm") + (f" ({kinds}; {norms['on_stream']} on a stream)" if kinds else ""))
    lines = [f"{found['format']}, {found['placement']}: {', '.join(counts)}"]
    for stream in streams:
        lines += ["", *_stream(stream, every)]
    if any(s["blocks"] for s in streams):
        lines += ["", "● a norm: before the branch, after it, on the trunk after the sum; • norms inside the branch"]
    if any(" bare" in line for line in lines):
        lines.append("bare: without gain and bias, or with a gain of ones and a bias of zeros")
    lines += [f"note: {note}" for note in found.get("notes", ())]
    if found["refusals"]:
        lines += ["", f"not understood: {len(found['refusals'])}"]
        lines += [f"  {Refusal(**row)}" for row in found["refusals"]]
    return "\n".join(wrapped(lines))


def host_table(found: Row) -> str:
    """Return the hosts of an `inspect --hosts` object: for each placement those that fit, and why others do not."""
    lines = [f"{found['format']}, {found['placement']}"]
    for placement in dict.fromkeys(row["placement"] for row in found["hosts"]):
        rows = [row for row in found["hosts"] if row["placement"] == placement]
        fits = [row["host"] for row in rows if row["fits"]]
        as_it_is = " (as it is)" if placement == found["placement"] else ""
        lines += ["", f"{placement}{as_it_is}: {', '.join(fits) or 'no host'}"]
        reasons = dict.fromkeys(row["why"] for row in rows if not row["fits"])
        for why in reasons:
            lines.append(f"  not {', '.join(row['host'] for row in rows if row['why'] == why)}: {why}")
    return "\n".join(wrapped(lines))


def timings(found: Row) -> str:
    """Return the table of a `bench` object: a row per model, times in ms, the ratio to the first with its spread."""
    threads = "1 CPU thread" if found["threads"] == 1 else f"{found['threads']} CPU threads, spinning within a run"
    head = f"{found['target']}, {threads}; {found['rounds']} sessions of each model, {found['runs']} runs in each"
    rows = []
    for row in found["models"]:
        figures = [row[key] for key in ("median_ms", "p10_ms", "p90_ms")]
        figures += [row["ratio_to_first"][key] for key in ("median", "p10", "p90")]
        rows.append((shortened(row["path"], _NAME), *(f"{figure:.3f}" for figure in figures)))
    table = aligned(("model", "median ms", "p10", "p90", "ratio", "p10", "p90"), rows, ("model",))
    notes = (f"note: {note}" for note in found["notes"])
    return "\n".join([*wrapped([f"{head}, interleaved"]), "", *table, *wrapped(notes)])


def drawing(block: Row) -> str:
    """Draw one block, a mark where a norm is: `x ─●─ attn ─── + ───` reads its stream through one."""
    held = {norm["where"] for norm in block["norms"]}
    into, out, post = ("●" if where in held else "─" for where in ("in", "out", "post"))
    branch = BRANCH.get(block["kind"], "f") + "•" * ("inner" in held)
    return f"x ─{into}─ {branch:<5} ─{out}─ + ─{post}─"


def _stream(stream: Row, every: bool) -> Iterator[str]:
    """Yield the rows of one stream: its end norms around its blocks."""
    blocks = stream["blocks"]
    rows = list(folded(blocks, len(blocks) if every else _LONG))
    names = [shortened(spanned(block["name"], last["name"]), _NAME) for _, _, last, block in rows]
    wide = max([len(name) for name in names], default=0)
    known = f", {stream['scheme']}" if stream.get("scheme") else ""
    yield f"stream {stream['name']}, width {stream['width']}, {counted(len(blocks), 'block')}{known}"
    yield f"      {'':<{wide}}{_HEAD}"
    if stream["embedding_norm"]:
        yield f"      {'embedding':<{wide}}  x ─●─{'':<26}{norm_words(stream['embedding_norm'])}"
    for (index, times, _, block), name in zip(rows, names, strict=True):
        words = [_norms(block), *_notes(block, every), *([f"× {times}"] if times > 1 else [])]
        yield f"{index:4}  {name:<{wide}}  {drawing(block)}  {block['placement']:<6}  {', '.join(filter(None, words))}"
    if stream["final_norm"]:
        yield f"      {'final':<{wide}}  x ─●─{'':<26}{norm_words(stream['final_norm'])}"


def _norms(block: Row) -> str:
    """Write the norms at a block's edges, each site apart only where they differ."""
    edge = [(n["where"], norm_words(n)) for n in block["norms"] if n["where"] != "inner"]
    alike = dict.fromkeys(words for _, words in edge)
    return ", ".join(alike if len(alike) < 2 else (f"{where} {words}" for where, words in edge))


def _notes(block: Row, every: bool) -> Iterator[str]:
    if block["parallel_group"] is not None:
        yield f"parallel {block['parallel_group']}"
    if block.get("scale", 1) != 1:
        yield f"skip × {block['scale']:g}"
    yield from (f"skip × {by}" for by in block.get("skip", ()))
    if block.get("opaque"):
        yield block["opaque"] if every else textwrap.shorten(block["opaque"], 40, placeholder="…")


def catalogue(rows: Iterable[Row]) -> str:
    """Return the table of passes: name, exactness, whether it looks at data, what it does."""
    header = ("pass", "exactness", "data", "does")
    cells = [(r["name"], r["exactness"], "yes" if r["needs_data"] else "", r["does"]) for r in rows]
    return "\n".join(aligned(header, cells, header))


def one_pass(row: Row) -> str:
    """Return the page of one pass: its docstring, and its options as a pipeline spells them."""
    data = ", looks at sample data" if row["needs_data"] else ""
    options = re.sub(
        r"Literal\[(.*?)\]", lambda found: re.sub(", *", "|", re.sub("[\"']", "", found[1])), row["options"]
    )
    return f"{row['name']} ({row['exactness']}{data})\n\n{row['doc'].rstrip()}\n\nOptions: {options or 'none'}"


def comparison(found: Row) -> str:
    """Return the object of `verify` in words."""
    shapes = ", ".join(str(s) for s in found["shapes_tried"])
    kernels = found.get("kernels")
    more = f"\nlnrewrite's kernels: {kernels['verdict']}, relative {kernels['max_rel']:.3g}" if kernels else ""
    notes = "".join(f"\nnote: {note}" for note in found["notes"])
    return (
        f"{found['verdict']}: max |a - b| = {found['max_abs']:.3g}, relative {found['max_rel']:.3g}, "
        f"cosine {found['cosine']:.9g}\nin {found['dtype']}, on inputs of shape {shapes}{more}{notes}"
    )


def paragraphs(text: str) -> str:
    """Wrap a page of `explain`, paragraph by paragraph."""
    return "\n\n".join(textwrap.fill(part, WIDTH) for part in text.split("\n\n"))
