"""Write the reference pages that come from the package itself: one for each diagnostic code, and one of all passes."""

from __future__ import annotations

import inspect
from pathlib import Path

import lnrewrite
from lnrewrite.codes import GROUPS
from lnrewrite.errors import Code
from lnrewrite.hosts.host import Host
from lnrewrite.hosts.known import HOSTS, SERVERS, TYPES
from lnrewrite.pipeline import PRESETS
from lnrewrite.pipeline.catalog import describe

CODES = sorted(code.value for code in Code if code.startswith("LN"))


def pages(folder: Path) -> None:
    """Write `codes/` and `passes.md` into the folder of the reference; what has not changed is left as it is."""
    codes = folder / "codes"
    for code in CODES:
        _write(codes / f"{code}.md", code_page(code))
    _write(codes / "index.md", code_index())
    _write(folder / "passes.md", pass_page())
    _write(folder / "hosts.md", host_page())
    for old in codes.glob("LN*.md"):
        if old.stem not in CODES:
            old.unlink()


def code_page(code: str) -> str:
    """Return the page of one diagnostic code: what `lnrewrite explain` prints. It is kept out of the sidebar."""
    title, _, text = lnrewrite.explain(code).partition("\n\n")
    return f"---\norphan: true\n---\n\n# {title}\n\n{text}\n\n[All codes](index.md)\n"


def code_index() -> str:
    """Return the list of all codes, by the part of the program that reports them."""
    lines = [
        "# Diagnostic codes\n",
        "Every error and every refusal carries a code. `lnrewrite explain CODE` prints the same text as these pages,",
        "and so does `lnr.explain(code)`. A code never changes its meaning.\n",
    ]
    for start, heading in GROUPS.items():
        lines += [f"## {start}xx: {heading}\n", "| code | |", "|---|---|"]
        for code in CODES:
            if code.startswith(start):
                title = lnrewrite.explain(code).partition("\n")[0].partition(": ")[2]
                lines.append(f"| [{code}]({code}.md) | {title} |")
        lines.append("")
    return "\n".join(lines)


def pass_table() -> str:
    """Return the table of the shipped passes in Markdown."""
    lines = ["| pass | exactness | data | does |", "|---|---|---|---|"]
    for row in describe():
        data = "yes" if row["needs_data"] else "no"
        name, does = row["name"], row["does"].replace("|", r"\|")
        lines.append(f"| [`{name}`](#{name}) | {row['exactness']} | {data} | {does} |")
    return "\n".join(lines)


def preset_table() -> str:
    """Return the table of the presets in Markdown."""
    rows = [f"| `{name}` | {purpose} | `{steps}` |" for name, (purpose, steps) in PRESETS.items()]
    return "\n".join(["| preset | for | stands for |", "|---|---|---|", *rows])


def pass_page() -> str:
    """Return the page of passes and presets: tables, then each pass's own documentation."""
    parts = [
        "# Passes and presets",
        "`lnrewrite passes` lists the installed passes, `lnrewrite passes NAME` prints one of the sections below.\n"
        "A pipeline is text: `canonicalize,place{to=peri blocks=0-5;attention}`. *Exactness* is what a pass claims\n"
        "([](../concepts/exactness.md)); *data* says whether it looks at calibration data.",
        pass_table(),
        "## Presets",
        "A preset is a named pipeline. It runs as if `--partial` were given and succeeds if anything was edited.",
        preset_table(),
    ]
    for row in describe():
        options = f"Options: `{row['options']}`" if row["options"] else "No options."
        parts += [f"## {row['name']}", f"```text\n{row['doc'].rstrip()}\n```", options]
    return "\n\n".join(parts) + "\n"


def host_page() -> str:
    """Return the page of hosts: a table of all, and what servers take of those whose sources were read."""
    parts = [
        "# Hosts",
        "The stock architectures of transformers that `lnrewrite rehost` and `convert --as` write, in the order\n"
        "in which `auto` tries them. Which of them a network fits is found by comparing and running the two\n"
        "([](../guides/serving.md)), never looked up.",
        "\n".join(["| host | |", "|---|---|", *(f"| `{h.name}` | {_about(h)} |" for h in HOSTS.values())]),
        "## What servers take",
        "These were read in the servers' sources, not run:",
        "\n".join(f"- {server}: {where}" for server, where in SERVERS.items()),
    ]
    rows = [f"| `{h.name}` | {server} | {what} |" for h in HOSTS.values() for server, what in h.served.items()]
    parts.append("\n".join(["| host | server | takes |", "|---|---|---|", *rows]))
    parts.append("Of these, only the list of model types was read:")
    types = (f"- {server} ({where}): {', '.join(f'`{t}`' for t in known)}" for server, (where, known) in TYPES.items())
    parts.append("\n".join(types))
    return "\n\n".join(parts) + "\n"


def _about(host: Host) -> str:
    """Return what a host's own file says of it."""
    text = (inspect.getmodule(host.config).__doc__ or "").strip()
    return text + (f" {host.note[0].upper()}{host.note[1:]}." if host.note else "")


def _write(path: Path, text: str) -> None:
    """Write a page unless it already says so, for Sphinx reads again what is newer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
