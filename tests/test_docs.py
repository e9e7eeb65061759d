"""README and docs say what is so: their commands and Python run, their output is what is printed, their names exist."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import tomllib
from pathlib import Path

import pytest

import lnrewrite
import pages
from lnrewrite.cli import main
from lnrewrite.errors import Code
from pages import ROOT
from tiers import rows

README = ROOT / "README.md"
NO_CODE = "LN999"  # the example of a code that does not exist
PAGES = pages.pages()
RUN = [page for page in PAGES if {b.language for b in pages.blocks(page)} & {"console", "python", "json"}]
SAMPLE = [ROOT / page for page in ("README.md", "docs/concepts/refusals.md")]


def between(marker: str) -> str:
    (found,) = re.findall(rf"^<!-- {marker} -->\n(.*?)^<!-- /{marker} -->$", README.read_text(), re.M | re.S)
    return str(found).strip()


@pytest.mark.parametrize("page", rows(RUN, sample=SAMPLE), ids=pages.label)
@pytest.mark.usefixtures("demo_captured_once", "fitted_once")
def test_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks run from top to bottom in one folder, its Python in one namespace."""
    monkeypatch.chdir(tmp_path)
    if "trust_remote_code=True)" in page.read_text():  # transformers keeps copies of such code
        monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    names = {"__name__": "page"}
    for block in pages.blocks(page):
        if block.language == "python":
            exec(compile(block.text, str(page), "exec"), names)
        elif block.language == "console":
            for command, output in pages.shown(block):
                found = pages.difference(output, pages.run(command))
                assert not found, f"{command}\n{found}"
        elif block.language == "json":
            pages.check_json(block)


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("drift 0.104, top-1 0.8677", "drift  0.1041,\ntop-1 0.8676\n", True),
        ("drift 0.104", "drift 0.2", False),
        ("drift 0.104", "drift nan", False),
        ("error 1.7e-03", "error 2.1e-03", True),
        ("error 1.7e-03", "error 2.1e-02", False),
        ("a\n...\nc 1", "a\nb 2\nb 3\nc 1", True),
        ("a\n...\nc 1", "a\nb 2\nb 3\nc 2", False),
        ("a", "a\nb", False),
        ("", "", True),
    ],
)
def test_what_is_printed_is_compared(shown: str, printed: str, same: bool) -> None:
    assert (not pages.difference(shown, printed)) is same


@pytest.mark.parametrize("page", PAGES, ids=pages.label)
def test_commands_parse(page: Path) -> None:
    for words in pages.commands(page):
        pages.check_command(words)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"], ids=pages.label)
def test_names_exist(page: Path) -> None:
    """Commands, options, codes, public names, files and links, in the text too."""
    text = page.read_text()
    assert set(re.findall(r"`lnrewrite ([a-z]+)", text)) <= set(main.commands)
    scripts = [p.read_text() for folder in ("examples", "tests") for p in (ROOT / folder).rglob("*.py")]
    options = {option for command in main.commands.values() for p in command.params for option in p.opts}
    options |= {found for script in scripts for found in re.findall(r'"(--[a-z][a-z-]+)"', script)}
    options |= {"--nproc-per-node", "--cov"}  # those of torchrun and pytest-cov
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text)) <= options
    assert set(re.findall(r"\bLN\d{3}\b", text)) - {NO_CODE} <= set(Code)
    assert set(re.findall(r"\blnr\.(\w+)", text)) <= set(lnrewrite.__all__)
    paths = re.findall(r"`((?:\.ci|\.github|docs|examples|lnrewrite|passes|tests)/[\w./-]*)", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[\w-]+)?\)", text)
    generated = re.compile(r"reference/(codes/(index|LN\d+)|passes|hosts)\.md$")
    there = [
        generated.search((page.parent / link).as_posix()) or (page.parent / link).exists() for link in links if link
    ]
    assert all(there), links


def test_readme_is_short_and_has_code() -> None:
    assert len(README.read_text().splitlines()) <= 120
    assert {"sh", "console", "python"} == {block.language for block in pages.blocks(README)}


SCRIPTS = sorted((ROOT / "examples").rglob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=pages.label)
def test_what_examples_import_exists(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and re.match(r"lnrewrite(\.|$)", node.module):
            held = importlib.import_module(node.module)
            modules = {name for _, name, _ in pkgutil.iter_modules(getattr(held, "__path__", []))}
            assert [a.name for a in node.names if not hasattr(held, a.name) and a.name not in modules] == []


@pytest.mark.parametrize("marker", ["install", "test"])
def test_setting_up_is_one_line(marker: str) -> None:
    lines = [line for line in between(marker).splitlines() if not line.startswith("```")]
    assert len(lines) == 1
    assert lines[0].startswith("python3 -m venv ")


def test_the_summary_of_other_tools_adds_up() -> None:
    """Each cell of the short table is the sum of a column of the long one."""
    folder = ROOT / "docs" / "results"
    whole = {}
    for title, table in re.findall(
        r"^## opset (.*?)\n\n(.*?)\n(?=\n|\Z)", (folder / "onnx_peers.md").read_text(), re.M | re.S
    ):
        cells = [line.strip("| ").split(" | ")[1:] for line in table.splitlines()[2:]]
        whole[title] = [_sum(column) for column in zip(*cells, strict=True)]
    lines = [line.strip("| ").split(" | ") for line in (folder / "onnx.md").read_text().splitlines()]
    short = {head: cells for head, *cells in lines if re.match(r"\d+, fp", head)}
    assert short == whole


def _sum(column: tuple[str, ...]) -> str:
    done = [re.match(r"(\d+)/\d+ \+(\d+)", cell) for cell in column]
    norms, adds = (sum(int(found[i]) for found in done if found) for i in (1, 2))
    failed = sum(found is None for found in done)
    return f"{norms} +{adds}" + (f", {failed} fail" if failed else "")


def test_the_gaps_of_healing_add_up() -> None:
    """A gap is healed minus control, and lies within the extremes of its seeds."""
    text = (ROOT / "docs" / "results" / "healing.md").read_text()
    tables = re.findall(r"control ([\d.]+); .*?tokens.*?\n\n((?:\|.*\n)+)", text)
    assert len(tables) == 7
    for control, table in tables:
        for line in table.splitlines()[2:]:
            _, _, healed, gap, seeds, _ = [cell.strip() for cell in line.strip("|").split("|")]
            low, high = map(float, re.findall(r"[-+][\d.]+", seeds))
            assert low <= float(gap) <= high, line
            assert abs(float(healed) - float(control) - float(gap)) < 1.6e-4, line  # three numbers of four digits


# ---- the rooms: in the docstring of the package, on the page, and as they are ----

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LAYERS = next(c["layers"] for c in PROJECT["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
FLOORS = [{room.strip() for room in layer.split("|")} for layer in LAYERS]


def test_the_rooms_of_the_docstring_are_those_that_exist() -> None:
    assert lnrewrite.__doc__ is not None
    lines = re.findall(r"^    (\w[\w/]*(?:, [\w/]+)*) {2,}(.*)$", lnrewrite.__doc__.partition("Rooms, ")[2], re.M)
    floors: list[set[str]] = []
    for names, told in lines:
        rooms = {name.strip("/") for name in names.split(", ")}
        if told.startswith("beside them: "):
            floors[-1] |= rooms
        else:
            floors.append(rooms)
    assert floors == FLOORS


def test_the_rooms_of_the_page_are_those_that_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    lines = re.findall(r"^\| (\d+) \| (.*?) \|", text, re.M)
    assert [{name.strip("/") for name in re.findall(r"`([\w/]+)`", rooms)} for _, rooms in lines] == FLOORS
    assert [int(number) for number, _ in lines] == [*range(len(FLOORS), 0, -1)]
