"""The wheel holds what the tree holds, and the folder `passes` is one package only."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import EntryPoints
from pathlib import Path

import pytest
import yaml

import lnrewrite

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def in_tree() -> set[str]:
    """Return what belongs into the wheel: every source, and the data that packages read."""
    ours = (ROOT / "lnrewrite").rglob("*")
    wanted = {".py", ".typed", ".md", ".safetensors", ".txt", ".cc", ".cu", ".h"}
    files = [p for p in ours if p.suffix in wanted or p.name == "NOTICE"]
    found = {p.relative_to(ROOT).as_posix() for p in files if p.relative_to(ROOT).parts[1] != "passes"}
    return found | {f"lnrewrite/passes/{p.name}" for p in (ROOT / "passes").glob("*.py")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the tree, so that nothing is left behind in it."""
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "tree").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "tree")
    # lnrewrite/passes would be the development link
    for name, left in (("lnrewrite", ("passes", "__pycache__")), ("passes", ("__pycache__",))):
        shutil.copytree(ROOT / name, folder / "tree" / name, ignore=shutil.ignore_patterns(*left))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "-w", folder, folder / "tree"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_the_tree(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = {Path(name).name for name in archive.namelist() if "/licenses/" in name}
    assert held == in_tree()
    assert licences == {"LICENSE", "NOTICE"}


def test_the_wheel_names_its_entry_points(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (text,) = [archive.read(n).decode() for n in archive.namelist() if n.endswith("entry_points.txt")]
        (metadata,) = [archive.read(n).decode() for n in archive.namelist() if n.endswith("/METADATA")]
    points = EntryPoints._from_text_for(text, None)  # type: ignore[attr-defined]
    wanted = PROJECT["project"]["entry-points"]["lnrewrite.passes"]
    assert {e.name: e.value for e in points.select(group="lnrewrite.passes")} == wanted
    assert f"\nVersion: {lnrewrite.__version__}\n" in metadata


def test_the_installed_wheel_works_from_elsewhere(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import lnrewrite, sys; from lnrewrite.pipeline import registry;"
        f"assert lnrewrite.__file__.startswith({str(tmp_path)!r}), lnrewrite.__file__;"
        "print(*(registry.find(n).__module__ for n in registry.available()), lnrewrite.Pipeline.preset('exact'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "lnrewrite.passes.fold_affine" in done.stdout and "canonicalize,fold-affine" in done.stdout


def test_every_package_is_listed() -> None:
    folders = {p.parent.relative_to(ROOT).as_posix().replace("/", ".") for p in (ROOT / "lnrewrite").rglob("*.py")}
    assert {f for f in folders if not f.startswith("lnrewrite.passes")} | {"lnrewrite.passes"} == set(
        PROJECT["tool"]["setuptools"]["packages"]
    )


def test_import_passes_is_refused() -> None:
    done = subprocess.run([sys.executable, "-c", "import passes"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "lnrewrite.passes" in done.stderr


def test_constraints_pin_every_dependency() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    assert all("==" in line and "+" not in line for line in lines)
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(d for name in ("cpu", "data", "docs", "hf", "test") for d in extras[name])]
    names = {d.split(">")[0].split("=")[0].split("[")[0] for d in wanted} - {"lnrewrite"}
    assert names <= pins


def test_the_workflow_covers_the_declared_versions() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    matrix = workflow["jobs"]["tests"]["strategy"]["matrix"]
    classifiers = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    (torch,) = [d for d in PROJECT["project"]["dependencies"] if d.startswith("torch>")]
    first, last = map(int, re.findall(r"2\.(\d+)", torch))
    assert matrix["python"] == classifiers
    assert matrix["torch"] == [f"2.{minor}" for minor in range(first, last)]


def test_the_citation_names_this_version() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == lnrewrite.__version__
