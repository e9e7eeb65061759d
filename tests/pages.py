"""Run and check what a page of the documentation shows: its commands with their output, its Python, its JSON."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner

from lnrewrite.cli import main

ROOT = Path(__file__).parent.parent
NUMBER = r"[-+]?(?:\d+\.\d+(?:e[-+]?\d+)?|\d+e[-+]?\d+)"
CLOSE = 0.05
"""How far a number may be from the one on the page, relative; ten units of its last digit are allowed too."""


@dataclass(frozen=True)
class Block:
    """Hold one fenced block of a page: its language, its text, and the comment on the line before it."""

    language: str
    text: str
    comment: str


def pages() -> list[Path]:
    """Return README and the pages that are written by hand, and not those that are generated."""
    found = [p for p in (ROOT / "docs").rglob("*.md") if not {"_build", "codes"} & set(p.parts)]
    return [
        ROOT / "README.md",
        *sorted(p for p in found if p.name not in ("passes.md", "hosts.md") or p.parent.name == "guides"),
    ]


def label(page: Path) -> str:
    """Return a page's path from the root."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page, in order."""
    text = page.read_text()
    for match in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.M | re.S):
        comment = re.search(r"<!-- (.*) -->\n\Z", text[: match.start()])
        yield Block(match[1], match[2], comment[1] if comment else "")


def shown(block: Block) -> Iterator[tuple[str, str]]:
    """Yield the commands of a console block, each with the output that the page shows for it."""
    for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of every command in the blocks of a page, and of the comments above its JSON."""
    for block in blocks(page):
        lines = block.text.replace("\\\n", " ").splitlines() if block.language == "sh" else []
        lines += [command for command, _ in shown(block)] if block.language == "console" else []
        lines += [block.comment] if block.language == "json" else []
        for line in lines:
            lexer = shlex.shlex(line, posix=True, punctuation_chars=";&")
            lexer.whitespace_split = True
            for joined, words in groupby(lexer, lambda word: word in (";", "&&")):
                if not joined:
                    yield list(words)


def check_command(words: list[str]) -> None:
    """Raise where a command does not parse: click judges ours, of scripts the file and its options must be there."""
    if words[0] in ("torchrun", "python") and "lnrewrite.cli" in words:
        words = ["lnrewrite", *words[words.index("lnrewrite.cli") + 1 :]]
    if words[0] == "lnrewrite":
        _parse(words[1:])
    elif words[0].startswith("python") and words[1].endswith(".py"):
        text = (ROOT / words[1]).read_text()
        assert not [word for word in words if word.startswith("--") and f'"{word.partition("=")[0]}"' not in text], (
            words
        )
    elif words[0].startswith("python") and "pytest" in words:
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/")), words


def _parse(words: list[str]) -> None:
    """Parse a command line of ours as click does, and run nothing."""
    command: click.Command = main
    context = command.make_context("lnrewrite", words)
    while isinstance(command, click.Group):
        name, found, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert name is not None and found is not None
        command, context = found, found.make_context(name, rest, parent=context)


def run(command: str) -> str:
    """Run a command and return what it prints; `; echo $?` behind it shows its exit code, which is 0 otherwise."""
    command, echo, _ = command.partition("; echo $?")
    program, *words = shlex.split(command)
    if program == "lnrewrite":
        done = CliRunner().invoke(main, words)
        output, code = done.output, done.exit_code
    else:
        assert program == "python" and words[0].startswith("examples/"), command
        ran = subprocess.run([sys.executable, ROOT / words[0], *words[1:]], capture_output=True, text=True)
        output, code = ran.stdout, ran.returncode
    assert echo or not code, f"{command} exits with {code}: {output}"
    return f"{output}\n{code}" if echo else output


def difference(wanted: str, found: str) -> str:
    """Return what of an output is not what the page shows, `...` for anything and numbers nearly; empty if nothing."""
    pattern, behind = "", r"\s*"
    for word in wanted.split():
        parts = re.split(rf"(\.\.\.|{NUMBER})", word)
        told = "".join(
            ".*?" if p == "..." else f"({NUMBER})" if re.fullmatch(NUMBER, p) else re.escape(p) for p in parts
        )
        pattern += told if word == "..." or not pattern else behind + told
        behind = r"\s*" if word == "..." else r"\s+"
    match = re.fullmatch(rf"\s*{pattern}\s*", found, re.S)
    if match is None:
        return f"shown:\n{wanted}\nprinted:\n{found}"
    pairs = zip(re.findall(NUMBER, wanted.replace("...", " ")), match.groups(), strict=True)
    return ", ".join(f"shown {a}, printed {b}" for a, b in pairs if not _near(a, b))


def _near(shown: str, printed: str) -> bool:
    mantissa, _, exponent = shown.partition("e")
    last = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return abs(float(shown) - float(printed)) <= max(CLOSE * abs(float(shown)), 10 * last)


def check_shape(shown: Any, printed: Any, at: str = "") -> None:
    """Raise where JSON has other fields or types than the page shows; what is null or an empty list there is open."""
    if shown is None or shown == []:
        return
    if isinstance(shown, dict):
        assert isinstance(printed, dict) and set(shown) == set(printed), f"{at}: {list(printed)}"
        for key, value in shown.items():
            check_shape(value, printed[key], f"{at}.{key}")
    elif isinstance(shown, list):
        assert isinstance(printed, list) and printed, at
        for row in printed:
            faults = [_fault(each, row, f"{at}[]") for each in shown]
            assert None in faults, faults[0]
    else:
        kinds = (int, float) if type(shown) in (int, float) else type(shown)
        assert isinstance(printed, kinds) and isinstance(shown, bool) is isinstance(printed, bool), f"{at}: {printed}"


def _fault(shown: Any, printed: Any, at: str) -> AssertionError | None:
    """Return how one row differs from one that the page shows."""
    try:
        check_shape(shown, printed, at)
    except AssertionError as fault:
        return fault
    return None


def check_json(block: Block) -> None:
    """Run the command above a JSON block and compare the objects."""
    done = CliRunner().invoke(main, shlex.split(block.comment)[1:])
    check_shape(json.loads(block.text), json.loads(done.stdout))
