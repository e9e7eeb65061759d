"""Errors keep what they say wherever they go, and every code has a page and a cause."""

from __future__ import annotations

import ast
import functools
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lnrewrite
from lnrewrite import codes
from lnrewrite.cli.tables import placement_map
from lnrewrite.errors import Code, Diagnostic, Exit, LnrewriteError, Refusal, Refused, UsageError
from lnrewrite.healing.training import Stopped

ROOT = Path(__file__).parent.parent
PAGES = Path(codes.__file__).parent
LITERAL = re.compile(r"LN\d{3}")
RETIRED = {"LN206", "LN302", "LN401"}


@functools.cache
def sources() -> dict[str, ast.Module]:
    """Return the product's code, by path: the package, its passes, and the examples that people copy."""
    every = [p for folder in ("lnrewrite", "passes", "examples") for p in (ROOT / folder).rglob("*.py")]
    ours = [p.relative_to(ROOT) for p in every if p.relative_to(ROOT).parts[:2] != ("lnrewrite", "passes")]
    assert len(ours) > 150
    return {str(p): ast.parse((ROOT / p).read_text()) for p in sorted(ours)}


@functools.cache
def parents(tree: ast.AST) -> dict[ast.AST, ast.AST]:
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


# ---- errors ----


@pytest.mark.parametrize(
    "error",
    [
        LnrewriteError(Code.LN403, "model.onnx", "its outputs are off", "export it in float32"),
        UsageError(Code.LN003, "lr=-1", "a rate is positive", "give one"),
        Refused([Refusal(Code.LN310, "blocks.0", "shared", "untie it"), Refusal(Code.LN312, "blocks.1", "gated", "")]),
        Stopped("global", 7),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_comes_back_whole_from_another_process(error: LnrewriteError) -> None:
    """A pool of processes reports what a worker raised; an error that cannot be read again breaks the pool."""
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error)
    assert (str(found), found.__dict__, found.exit_code) == (str(error), error.__dict__, error.exit_code)


def test_an_error_carries_the_diagnostic_that_it_reports() -> None:
    refusal = Refusal(Code.LN110, "blocks.0", "the raw trunk has another reader", "choose post")
    error = LnrewriteError.of(refusal.at("blocks.1"))
    assert error.diagnostic == Diagnostic(Code.LN110, "blocks.1", refusal.why, refusal.remedy)
    assert str(error) == "LN110 blocks.1: the raw trunk has another reader; choose post"
    assert error.to_dict() == {"code": "LN110", "what": "blocks.1", "why": refusal.why, "remedy": refusal.remedy}


def test_nothing_stands_where_nothing_can_be_done() -> None:
    alone = Refusal(Code.LN127, "stream.embedding", "it reads a sum of 2 sources", "")
    assert str(alone) == "LN127 stream.embedding: it reads a sum of 2 sources"
    assert str(Refused([alone])).endswith("2 sources; allow partial results (partial=True, --partial)")
    found = {"streams": [], "norms": {"total": 0, "on_stream": 0, "kinds": {}}, "placement": "none", "format": "onnx"}
    assert placement_map({**found, "refusals": [alone.to_dict()]}).endswith("2 sources")


def test_a_code_is_the_string_that_users_see() -> None:
    row = Refusal(Code.LN101, "blocks.0", "why", "remedy").to_dict()
    assert row["code"] == "LN101" and type(row["code"]) is str and f"{Code.LN101}" == "LN101"


def test_exit_codes_are_those_of_the_contract() -> None:
    assert {code.name: int(code) for code in Exit} == {
        "DONE": 0, "FAILED": 1, "USAGE": 2, "PARTIAL": 3, "DIFFERENT": 4, "INTERRUPTED": 130,
    }  # fmt: skip
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "exit_code":
                assert ast.unparse(node.value).startswith("Exit."), f"{path}:{node.lineno}"


# ---- codes ----


def test_codes_are_written_as_members() -> None:
    """mypy sees a typo in Code.LN101, and none in a string."""
    literal = [
        f"{path}:{node.lineno}"
        for path, tree in sources().items()
        if path != "lnrewrite/errors.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and LITERAL.fullmatch(node.value)
    ]
    assert not literal


def test_every_code_has_a_cause() -> None:
    """A code that is only compared with, or has a page only, is dead."""
    made: set[str] = set()
    for path, tree in sources().items():
        above = parents(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Code":
                assert node.attr in Code.__members__, f"{path}:{node.lineno}"
                made |= set() if isinstance(above[node], ast.Compare) else {node.attr}
    assert made == set(Code.__members__)
    assert not RETIRED & made, "a retired code never comes back with another meaning"


def test_every_code_has_a_page_and_every_page_a_code() -> None:
    assert {p.stem for p in PAGES.glob("*.md")} == set(Code)
    for code in Code:
        page = codes.page(code.lower())
        assert page.code is code and page.title and page.text and "\n\n\n" not in page.text
        assert lnrewrite.explain(code) == f"{code}: {page.title}\n\n{page.text}"
        heading = (PAGES / f"{code}.md").read_text().split("\n")[0]
        assert heading == f"# {code}: {page.title}", "a page begins with its code and title"
        assert code is Code.INTERRUPTED or code[:3] in codes.GROUPS


def test_only_codes_that_exist_are_named() -> None:
    """Docstrings, comments, messages and documents that name a code name one that `explain` knows."""
    documents = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *PAGES.glob("*.md"),
        *map(ROOT.joinpath, sources()),
    ]
    for path in documents:
        named = set(LITERAL.findall(path.read_text()))
        allowed = RETIRED if path.name in ("CHANGELOG.md", "errors.py") else {"LN999"}  # an example of an unknown one
        assert named <= set(Code) | allowed, path


# ---- messages ----


def resolved(node: ast.expr, tree: ast.Module, above: dict[ast.AST, ast.AST]) -> Iterator[str]:
    """Yield the strings that an argument may be made of: its own, and those of names assigned around it."""
    scope: ast.AST | None = node
    while scope is not None and not isinstance(scope, ast.FunctionDef):
        scope = above.get(scope)
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    values: list[ast.expr] = [node]
    for assignment in (a for within in (scope, tree) if within for a in ast.walk(within)):
        if not isinstance(assignment, ast.Assign):
            continue
        for target in assignment.targets:
            if isinstance(target, ast.Name) and target.id in names:
                values.append(assignment.value)
            if isinstance(target, ast.Tuple) and isinstance(assignment.value, ast.Tuple):
                both = zip(target.elts, assignment.value.elts, strict=False)
                values += [v for t, v in both if isinstance(t, ast.Name) and t.id in names]
    for value in values:
        yield from (c.value for c in ast.walk(value) if isinstance(c, ast.Constant) and isinstance(c.value, str))


def remedies() -> Iterator[tuple[str, str]]:
    """Yield every remedy of the product's code, a part of an f-string each, and where it is given."""
    for path, tree in sources().items():
        above = parents(tree)
        for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call) and len(n.args) > 2):
            if any(isinstance(a, ast.Attribute) and ast.unparse(a.value) == "Code" for a in call.args[:1]):
                for text in resolved(call.args[-1], tree, above):
                    yield f"{path}:{call.lineno}", text


def test_messages_are_idiomatic() -> None:
    """What is refused "is not a norm", not "is no norm"; a name is "unknown", not "there is no such name"."""
    stilted = re.compile(
        r"\b(is|are) no (?!longer|norm )|there (is|are) no such|\bto be told\b| \w+(al|ogn|ant|tim)ised\b"
    )
    found = [
        f"{path}:{node.lineno}: {node.value}"
        for path, tree in sources().items()
        if path.startswith(("lnrewrite", "passes"))
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value
        and not isinstance(parents(tree)[node], ast.Expr) and stilted.search(node.value)
    ]  # fmt: skip
    assert not found


def test_a_remedy_is_something_to_do() -> None:
    """A user who is told to leave it as it is has been told nothing."""
    found = list(remedies())
    assert len(found) > 150
    idle = re.compile(r"\bleav(e|es|ing)\b|\bleft (alone|as)\b|as it is\b", re.I)
    assert not [(place, text) for place, text in found if idle.search(text)]
