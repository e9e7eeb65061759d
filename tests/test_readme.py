"""README.md says what is so: its pass table is generated, its Python runs, its commands exist.

python -m pytest tests/test_readme.py --update-goldens      writes the pass table
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from lnrewrite.cli import main
from lnrewrite.errors import Code
from lnrewrite.pipeline import PRESETS

README = Path(__file__).parent.parent / "README.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)


def pass_table() -> str:
    """Return the table of the shipped passes in Markdown, from `lnrewrite passes --json`."""
    rows = json.loads(CliRunner().invoke(main, ["passes", "--json"]).stdout)["passes"]
    lines = ["| pass | exactness | data | does |", "|---|---|---|---|"]
    for row in rows:
        data = "yes" if row["needs_data"] else "no"
        lines.append(f"| `{row['name']}` | {row['exactness']} | {data} | {row['does'].replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


def preset_table() -> str:
    """Return the table of the presets in Markdown."""
    rows = [f"| `{name}` | {purpose} | `{steps}` |" for name, (purpose, steps) in PRESETS.items()]
    return "\n".join(["| preset | for | stands for |", "|---|---|---|", *rows])


def between(marker: str) -> str:
    (found,) = re.findall(rf"^<!-- {marker} -->\n(.*?)^<!-- /{marker} -->$", README.read_text(), re.M | re.S)
    return str(found).strip()


@pytest.mark.parametrize(("marker", "table"), [("passes", pass_table), ("presets", preset_table)])
def test_the_tables_are_generated(marker: str, table: Callable[[], str], update_goldens: bool) -> None:
    if update_goldens:
        old, new = f"<!-- {marker} -->\n{between(marker)}", f"<!-- {marker} -->\n{table()}"
        README.write_text(README.read_text().replace(old.rstrip() + "\n", new + "\n"))
    assert between(marker) == table()


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_the_python_runs(snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, str(README), "exec"), {"__name__": "readme"})


def test_there_is_python() -> None:
    assert len(SNIPPETS) >= 2


@pytest.mark.parametrize("marker", ["install", "test"])
def test_setting_up_is_one_line(marker: str) -> None:
    lines = [line for line in between(marker).splitlines() if not line.startswith("```")]
    assert len(lines) == 1
    assert lines[0].startswith("python3 -m venv ")


def test_commands_options_and_codes_exist() -> None:
    text = README.read_text()
    for name in re.findall(r"(?:\$ |`|&& )lnrewrite ([a-z]+)", text):
        assert name in main.commands
    known = {option for command in main.commands.values() for p in command.params for option in p.opts}
    shell = re.sub(r"^(?:python3|.*pytest).*$|torchrun .*? -m|`python examples/[^`]*`", "", text, flags=re.M)
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", shell)) <= known
    assert set(re.findall(r"\bLN\d{3}\b", text)) <= set(Code)
