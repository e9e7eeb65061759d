"""Imports go down only: the rooms of the package's docstring, held by import-linter; and what it does not see."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import lnrewrite

ROOT = Path(__file__).parent.parent


def sources(folder: str) -> list[Path]:
    """Return the modules of a folder; the development link lnrewrite/passes is not followed."""
    return [p for p in sorted((ROOT / folder).rglob("*.py")) if "passes" not in p.relative_to(ROOT / folder).parts]


PACKAGE, PASSES = sources("lnrewrite"), sources("passes")
STANDARD = {"ir", "errors", "quiet", "algebra.basis", "pipeline.report", "files.landing", "loading.foreign"}
ARRAYS = {"pipeline", "detect", "testing", "algebra"}
FOR_PASSES = {"ir", "pipeline", "algebra", "errors"}
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def module_of(path: Path) -> str:
    relative = path.relative_to(ROOT).with_suffix("")
    parts = ("lnrewrite", *relative.parts) if relative.parts[0] == "passes" else relative.parts
    return ".".join(part for part in parts if part != "__init__")


def imports(path: Path) -> Iterator[str]:
    """Yield the absolute name of every module that a file imports, whether at its top or inside a function."""
    module = module_of(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                yield f"{base}.{alias.name}" if is_module(f"{base}.{alias.name}") else base


def is_module(name: str) -> bool:
    """Return whether `from base import x` takes a module of ours."""
    if not name.startswith("lnrewrite."):
        return False
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def outside(path: Path) -> set[str]:
    """Return the top-level packages that a file imports beyond the standard library and ourselves."""
    return {name.split(".")[0] for name in imports(path)} - set(sys.stdlib_module_names) - {"lnrewrite"}


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_imports_go_down() -> None:
    """The contracts stand in pyproject.toml: floors, and what ir, passes and others may not see."""
    found = subprocess.run([sys.executable, "-c", LINT], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("path", PACKAGE, ids=label)
def test_what_each_room_may_import(path: Path) -> None:
    name = module_of(path).removeprefix("lnrewrite.")
    if {name, name.split(".")[0]} & STANDARD:
        assert outside(path) == set()
    elif name.split(".")[0] in ARRAYS:
        assert outside(path) <= {"networkx", "numpy"}


@pytest.mark.parametrize("path", PASSES, ids=label)
def test_passes_see_the_picture_only(path: Path) -> None:
    ours = {name.removeprefix("lnrewrite.").split(".")[0] for name in imports(path) if name.startswith("lnrewrite.")}
    assert ours <= FOR_PASSES
    assert outside(path) <= {"networkx", "numpy"}


@pytest.mark.parametrize("path", PACKAGE, ids=label)
def test_the_package_imports_no_pass(path: Path) -> None:
    assert not {n for n in imports(path) if n.startswith(("lnrewrite.passes", "passes"))}


def test_passes_are_flat() -> None:
    assert not [p for p in (ROOT / "passes").iterdir() if p.is_dir() and p.name != "__pycache__"]


def test_no_module_is_named_like_a_public_function() -> None:
    for name in lnrewrite.__all__:
        assert not is_module(f"lnrewrite.{name}"), f"lnr.{name} would turn into the module on its second use"


def test_public_names_are_documented() -> None:
    public = {name for name in lnrewrite.__all__ if not name.startswith("__")}
    assert public == set(lnrewrite._HOME)
    assert all(is_module(f"lnrewrite.{home}") for home in lnrewrite._HOME.values())
    for name in sorted(public):
        assert getattr(lnrewrite, name).__doc__, f"lnr.{name} has no docstring"


def test_the_package_says_what_it_does_not_have() -> None:
    with pytest.raises(AttributeError, match="no attribute 'verifi'"):
        lnrewrite.verifi  # noqa: B018
    assert set(lnrewrite.__all__) <= set(dir(lnrewrite))


@pytest.mark.parametrize("module", ["lnrewrite", "lnrewrite.pipeline", "lnrewrite.pipeline.registry", "lnrewrite.cli"])
def test_heavy_packages_are_not_imported(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'onnx', 'numpy', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


TEXTS = [ROOT / "README.md", ROOT / "pyproject.toml", *(p for p in ROOT.rglob("*.md") if p.name != "CHANGELOG.md")]


def test_what_texts_and_scripts_name_is_there() -> None:
    """Modules move, and their names stand in scripts that tests start, in examples and in docs."""
    scripts = [p for folder in ("tests", "examples", "lnrewrite", "passes", "docs") for p in sources(folder)]
    rooms = {path.stem for path in (ROOT / "lnrewrite").iterdir() if path.suffix in ("", ".py")}
    missing = {}
    for path in {*TEXTS, *scripts}:
        if any(part.startswith(".") for part in path.relative_to(ROOT).parts):
            continue
        for found in re.finditer(r"\blnrewrite\.([a-z_]+)((?:\.\w+)*)", path.read_text()):
            if found[1] in rooms and not is_there(found[0]):
                missing[found[0]] = label(path)
    assert not missing


@cache
def is_there(name: str) -> bool:
    """Return whether a dotted name leads to a module, or to something in one."""
    module, rest = name, list[str]()
    while True:
        try:
            held: object = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            rest.insert(0, last)
    for part in rest:
        if not hasattr(held, part):
            return False
        held = getattr(held, part)
    return True
