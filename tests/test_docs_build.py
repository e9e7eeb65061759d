"""The documentation builds without warnings, from a copy of its sources, and with no network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the built pages; the sources are copied, for pages are generated among them."""
    folder = tmp_path_factory.mktemp("docs")
    generated = shutil.ignore_patterns("_build", "__pycache__", "codes")
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=generated)
    shutil.copytree(ROOT / "examples" / "custom_pass", folder / "examples" / "custom_pass")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "docs", "site"]
    nowhere = "http://127.0.0.1:9"
    env = os.environ | {"http_proxy": nowhere, "https_proxy": nowhere, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert not done.stderr and not done.returncode, done.stderr
    return folder / "site"


def test_the_reference_is_whole(site: Path) -> None:
    import lnrewrite
    from lnrewrite.cli import main
    from lnrewrite.errors import Code
    from lnrewrite.pipeline import registry

    assert all((site / f"reference/codes/{code}.html").exists() for code in Code if code.startswith("LN"))
    python = (site / "reference/python/lnrewrite.html").read_text()
    assert not [name for name in lnrewrite.__all__ if name != "__version__" and f'id="lnrewrite.{name}"' not in python]
    commands = (site / "reference/cli.html").read_text()
    assert not [name for name in main.commands if f'id="lnrewrite-{name}"' not in commands]
    assert ".. option" not in commands, "its reStructuredText is taken for Markdown"
    passes = (site / "reference/passes.html").read_text()
    assert not [name for name in registry.available() if f'id="{name}"' not in passes]
