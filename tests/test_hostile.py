"""Hostile files, folders and command lines: nothing runs, nothing outside is touched, nothing hangs, one line says why."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostile import judge
from hostile.cases import all_cases
from hostile.harness import Harness
from hostile.mutants import KINDS, mutants_of
from hostile.place import Case
from tiers import rows

SAMPLE = (
    "pt2: unpickled member data/constants/OPAQUE_OBJ_0, pickled",
    "pt2: formula: os",
    "pt2: formula in the member models/modelxjson",
    "pt2: in_spec: an enum as context",
    "pt2: zip: two directories",
    "pt2: constants configuration a list",
    "pt: pickle: a global from the stack",
    "safetensors: deep JSON",
    "onnx: weights in dots, inspect",
    "onnx: epsilon NaN",
    "folder: code of an unknown type for AutoModelForCausalLM",
    "folder: auto_map a list",
    "data: npy, objects of a global",
    "output: a folder that holds a precious file, forced",
    "verify: --tolerance 'nan'",
)

MISBEHAVING = """
import os, socket, subprocess, sys
def net():
    open({secret!r}, "rb").read(1)
    open({beside!r}, "w").close()
    open("left", "w").close()
    subprocess.run(["true"])
    socket.socket().connect_ex(("127.0.0.1", 9))
    os.mkdir({marker!r})
    held = bytearray(1500 << 20)
    held[::4096] = b"x" * len(held[::4096])
    sys.stderr.write("\\x1b[31mTraceback")
    raise ValueError("x")
"""


@pytest.fixture(scope="module")
def harness() -> Iterator[Harness]:
    with Harness() as held:
        yield held


def clean(harness: Harness, case: Case) -> None:
    row = harness.run(case)
    assert judge.trouble(case, row) == [], row["stderr"][-2000:]


@pytest.mark.parametrize("name", rows(all_cases(), sample=SAMPLE))
def test_hostile_cases_are_clean(harness: Harness, name: str) -> None:
    clean(harness, all_cases()[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(2 * len(KINDS)))
def test_mutants_are_clean(harness: Harness, seed: int) -> None:
    (*_, case) = mutants_of(0, seed + 1)
    clean(harness, case)


def test_what_a_command_should_not_do_is_seen(harness: Harness) -> None:
    def make(place: object) -> None:
        paths = {"secret": place.outside / "secret.bin", "beside": place.outside / "new", "marker": place.marker}  # type: ignore[attr-defined]
        text = MISBEHAVING
        for name, path in paths.items():
            text = text.replace(f"{{{name}!r}}", repr(str(path)))
        place.write("nets.py", text)  # type: ignore[attr-defined]

    case = Case("misbehaving", ("inspect", "nets:net"), make, exits=(0,))
    told = "\n".join(judge.trouble(case, harness.run(case)))
    for expected in (
        "CODE EXECUTED", "RAN CODE OF", "READ OUTSIDE", "WROTE OUTSIDE", "TALKED socket.connect", "MEMORY", "EXIT 1", "TRACEBACK", "ESCAPE",
        "here/left", "outside/new",
    ):  # fmt: skip
        assert expected in told


def test_every_promise_names_its_cases() -> None:
    text = (Path(__file__).parents[1] / "docs" / "security.md").read_text()
    patterns = [p for row in re.findall(r"^\|.*\| *(`.*`) *\|$", text, re.M) for p in re.findall(r"`([^`]+)`", row)]
    assert len(patterns) > 15
    assert [p for p in patterns if not any(p in name for name in all_cases())] == []
