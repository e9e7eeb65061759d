"""Say how pictures look: their colors in light and dark, as CSS."""

from __future__ import annotations

from collections.abc import Mapping

LIGHT: Mapping[str, str] = {
    "page": "#ffffff", "card": "#ffffff", "ink": "#1c2128", "soft": "#59636e", "line": "#7d8792", "edge": "#d5dae0",
    "box": "#eaf0f8", "group": "#f4f6f8", "warn": "#fff6db", "warned": "#8a5a00", "mark": "#c0262d",
    "one": "#1f6fd1", "two": "#c4560a", "three": "#16805a", "four": "#7d4bc4", "five": "#6b7480",
}  # fmt: skip
DARK: Mapping[str, str] = {
    "page": "#12161c", "card": "#191e26", "ink": "#e6eaef", "soft": "#a0aab6", "line": "#7f8a97", "edge": "#323a45",
    "box": "#232d3b", "group": "#1c222b", "warn": "#3a2f12", "warned": "#f0c869", "mark": "#ff7b72",
    "one": "#63a8ff", "two": "#f6924d", "three": "#4cc596", "four": "#b592f5", "five": "#9aa5b1",
}  # fmt: skip
SERIES = ("one", "two", "three", "four", "five")
"""The colors of lines, in the order in which they are used."""

DRAWING = """
.stream { font: 14px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
.stream text { fill: var(--ink); }
.stream .soft { fill: var(--soft); }
.stream .small { font-size: 13.5px; }
.stream .name { font: 600 13.5px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.stream .path { fill: none; stroke: var(--line); stroke-width: 2; }
.stream .trunk { fill: none; stroke: var(--ink); stroke-width: 3; stroke-linecap: round; }
.stream .arrow { fill: var(--line); }
.stream .end { fill: var(--ink); }
.stream .box { fill: var(--box); stroke: var(--edge); stroke-width: 1.5; }
.stream .group { fill: var(--group); stroke: var(--edge); }
.stream .sum { fill: var(--page); stroke: var(--ink); stroke-width: 2; }
.stream .plus { stroke: var(--ink); stroke-width: 2; }
.stream .norm { stroke: var(--page); stroke-width: 2; }
.stream .norm.layer { fill: var(--one); }
.stream .norm.rms { fill: var(--two); }
.stream .norm.other { fill: var(--three); }
.stream text.letter { fill: var(--page); font-size: 11px; font-weight: 700; text-anchor: middle; }
.stream .scale { fill: var(--warn); stroke: var(--warned); }
.stream text.scaled { fill: var(--warned); font-size: 11.5px; text-anchor: middle; }
"""

PAGE = """
.report { background: var(--page); color: var(--ink); margin: 0 auto; max-width: 1180px; padding: 1.5rem 1.25rem 3rem;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere; }
.report h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .35rem; }
.report h2 { font-size: 1.25rem; margin: 2.25rem 0 .75rem; }
.report h2 small { color: var(--soft); font-weight: 400; }
.report h3 { font-size: 1rem; margin: 0 0 .4rem; }
.report p { margin: 0 0 .5rem; }
.report .kind { color: var(--soft); font-size: .85rem; letter-spacing: .03em; margin: 0; }
.report .lead, .report footer { color: var(--soft); }
.report footer { border-top: 1px solid var(--edge); font-size: .85rem; margin-top: 2.5rem; padding-top: .75rem; }
.report .note { background: var(--warn); border-radius: 8px; color: var(--warned); padding: .5rem .8rem; }
.report ul.glance { border: 1px solid var(--edge); border-radius: 10px; list-style: none; margin: 1rem 0 0;
  padding: .4rem 1rem; }
.report ul.glance li { padding: .4rem 0 .4rem 1.6rem; position: relative; }
.report ul.glance li + li { border-top: 1px solid var(--edge); }
.report ul.glance li::before { color: var(--three); content: "\\2713"; font-weight: 700; left: .1rem;
  position: absolute; }
.report ul.glance li.said::before { color: var(--soft); content: "\\2022"; left: .3rem; }
.report ul.glance li.watch::before { color: var(--mark); content: "!"; left: .3rem; }
.report .grid { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); }
.report figure { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; break-inside: avoid;
  margin: 0; min-width: 0; padding: 1rem; }
.report figure.tall { grid-row: span 2; }
.report figure svg { display: block; height: auto; margin: 0 auto; max-width: 100%; width: 100%; }
.report figure svg.stream { max-width: 560px; }
.report .chart { font-family: inherit; }
.report figcaption { color: var(--soft); font-size: .9rem; margin-top: .5rem; }
.report figcaption .found { color: var(--ink); }
.report code { background: var(--box); border-radius: 4px; font-size: .92em; padding: .05em .3em; }
.report details { margin-top: 1rem; }
.report summary { cursor: pointer; font-weight: 600; }
.report .scroll { overflow-x: auto; margin: .6rem 0; }
.report table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
.report th, .report td { border-bottom: 1px solid var(--edge); overflow-wrap: normal; padding: .28rem .7rem .28rem 0;
  text-align: left; white-space: nowrap; }
.report th { color: var(--soft); font-weight: 600; }
.report .num { text-align: right; }
@media print { .report { font-size: 11px; max-width: none; padding: 0; } .report .scroll { overflow: visible; } }
"""


def theme(selector: str) -> str:
    """Return the CSS that gives what `selector` names its colors, as the reader's device is light or dark."""
    light, dark = ("".join(f"--{name}: {color}; " for name, color in each.items()) for each in (LIGHT, DARK))
    return (
        f"{selector} {{ color-scheme: light dark; {light}}}\n"
        f"@media (prefers-color-scheme: dark) {{ {selector} {{ {dark}}} }}\n"
        f"@media print {{ {selector} {{ {light}}} }}\n"
    )
