"""Passes are found by name, lazily, whoever brings them."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import pytest

from lnrewrite.errors import LnrewriteError, UsageError
from lnrewrite.ir import Exactness, Proposal, Stream
from lnrewrite.pipeline import Context, Pass, Pipeline, registry

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Mine:
    """Do nothing."""

    name: ClassVar[str] = "mine"
    exactness: ClassVar[Exactness] = Exactness.STRUCTURAL
    needs_data: ClassVar[bool] = False

    count: int = 1

    def propose(self, stream: Stream, context: Context) -> Proposal:
        return Proposal()


@dataclass(frozen=True)
class Half:
    """Lack all but a name."""

    name: ClassVar[str] = "half"


@dataclass(frozen=True)
class Unplanned(Pass):
    """Lack what the base class cannot give."""

    name: ClassVar[str] = "unplanned"


class Alias(Mine):
    """Be no dataclass of its own, but inherit one."""


MINE = f"{__name__}:Mine"
Register = Callable[..., None]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Register:
    """Give a function that makes its keyword arguments the only entry points."""

    def set_entries(*entries: tuple[str, str]) -> None:
        points = [EntryPoint(name, value, registry.GROUP) for name, value in entries]
        monkeypatch.setattr(registry, "entry_points", lambda group: points)

    return set_entries


def test_a_registered_pass_is_found_and_spelled_by_its_name(register: Register) -> None:
    register(("mine", MINE))
    assert registry.find("mine") is Mine
    assert str(Pipeline.parse("mine{count=2},mine")) == "mine{count=2},mine"
    assert str(Pipeline.parse(MINE)) == "mine"


def test_an_address_needs_no_registration(register: Register) -> None:
    register()
    assert registry.find(MINE) is Mine
    assert str(Pipeline.parse(MINE)) == MINE


def test_another_pass_of_that_name_does_not_stand_for_this_one(register: Register) -> None:
    register(("mine", f"{__name__}:Alias"))
    assert str(Pipeline((Mine(),))) == MINE
    register(("mine", "nowhere.at.all:Mine"))
    assert str(Pipeline((Mine(),))) == MINE


def test_unknown_names_are_suggested(register: Register) -> None:
    register(("mine", MINE), ("other", MINE))
    with pytest.raises(UsageError, match="LN001 pass 'mine2': unknown pass; did you mean mine?"):
        Pipeline.parse("mine2")


def test_two_packages_of_one_name_are_both_named(register: Register) -> None:
    register(("mine", MINE), ("mine", "elsewhere:Mine"), ("ok", MINE))
    assert set(registry.available()) >= {"mine", "ok"}
    with pytest.raises(UsageError, match=f"LN006 pass 'mine'.*elsewhere:Mine and {MINE}"):
        registry.find("mine")
    assert registry.find("ok") is Mine


def test_one_package_registered_twice_is_no_clash(register: Register) -> None:
    register(("mine", MINE), ("mine", MINE))
    assert registry.find("mine") is Mine


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("not_installed_at_all:Pass", "ModuleNotFoundError"),
        (f"{__name__}:Nothing", "AttributeError"),
        (f"{__name__}:Half", "it has no exactness, needs_data, propose"),
        (f"{__name__}:Unplanned", "it has no exactness, plan"),
        (f"{__name__}:ROOT", "it has no"),
        ("builtins:dict", "it has no"),
    ],
)
def test_a_broken_plugin_is_one_line_and_disturbs_no_other(register: Register, value: str, why: str) -> None:
    register(("broken", value), ("mine", MINE))
    assert "broken" in registry.available()
    assert registry.find("mine") is Mine
    with pytest.raises(LnrewriteError, match="LN005") as caught:
        registry.find("broken")
    assert why in str(caught.value) and value in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.exit_code == 1
    with pytest.raises(UsageError, match="LN005"):
        registry.find(value)


def test_a_plugin_that_crashes_is_one_line(register: Register, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "crashing_plugin.py").write_text("raise SyntaxError('many\\nlines')\n")
    monkeypatch.syspath_prepend(tmp_path)
    register(("crash", "crashing_plugin:Pass"))
    with pytest.raises(LnrewriteError, match="LN005 pass 'crash': importing crashing_plugin:Pass failed: SyntaxError"):
        registry.find("crash")


def shipped_modules() -> dict[str, str]:
    """Return what the folder holds: pass name -> address, by the naming convention."""
    stems = [path.stem for path in sorted((ROOT / "passes").glob("*.py")) if not path.stem.startswith("_")]
    return {
        stem.replace("_", "-"): f"lnrewrite.passes.{stem}:{''.join(word.capitalize() for word in stem.split('_'))}"
        for stem in stems
    }


def test_every_shipped_pass_has_its_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["lnrewrite.passes"] == shipped_modules()


def test_the_folder_is_listed_where_no_metadata_is_installed(register: Register) -> None:
    register(("mine", MINE))
    found = {name: entry.value for name, entry in registry.available().items()}
    assert found == {"mine": MINE, **shipped_modules()}


@pytest.mark.parametrize("name", sorted(shipped_modules()))
def test_shipped_passes_load_under_their_names(name: str) -> None:
    cls = registry.find(name)
    assert cls.name == name and cls.__doc__
    assert isinstance(cls.exactness, (Exactness, property)) and isinstance(cls.needs_data, (bool, property))


def test_listing_imports_no_pass() -> None:
    code = (
        "import sys; from lnrewrite.pipeline import registry; names = list(registry.available());"
        "print(len(names), sorted(m for m in sys.modules if m.startswith('lnrewrite.passes')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{len(shipped_modules())} []"
