"""Options and profiles that all tests share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:  # one worker a core: before torch is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

settings.register_profile("same", deadline=None, derandomize=True)  # one run, one result
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --update-goldens: write what the code gives into tests/streams instead of comparing."""
    parser.addoption("--update-goldens", action="store_true", help="rewrite tests/streams/*.stream")


@pytest.fixture
def update_goldens(request: pytest.FixtureRequest) -> bool:
    """Return whether golden files are to be written."""
    return bool(request.config.getoption("--update-goldens"))


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what builds the kernels, once for all workers.

    They are compiled for all levels of CPU instructions (`best`), or for one level under the names of all.
    """
    from lnrewrite.kernels import building

    def build(level: str = "best") -> Path:
        target = tmp_path_factory.getbasetemp().parent / f"kernels-{level}.so"
        if not target.exists():
            with pytest.MonkeyPatch.context() as patch:
                if level != "best":
                    patch.setattr(building, "LEVELS", dict.fromkeys(building.LEVELS, building.LEVELS[level]))
                building.build(target, cuda=False, strict=True)
        return target

    return build
