"""What stands at OUT is old or new, whole, and nothing else is touched; a refusal is one line with a code.

Models that these tests name as `test_outputs:...` stand in this file: the tests' folder is importable.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import resource
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lnrewrite as lnr
import zoo
from commands import as_process, run, started
from killing import net
from lnrewrite.cli import main
from lnrewrite.comparison.verifying import check_tolerance
from lnrewrite.errors import LnrewriteError, UsageError
from lnrewrite.files import landing
from lnrewrite.healing.distributed import World
from lnrewrite.healing.snapshots import Snapshots
from lnrewrite.ir.select import select
from lnrewrite.loading.identify import identify
from lnrewrite.loading.source import Format
from lnrewrite.pipeline import registry
from lnrewrite.pipeline.spec import parse
from tiers import rows

__all__ = ["net"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hold a checkpoint, an ONNX model, a converted student and data."""
    folder = tmp_path_factory.mktemp("sources")
    zoo.build("llama", head=True)[0].save_pretrained(folder / "llama")
    np.savez(folder / "data.npz", input=np.random.default_rng(0).normal(size=(40, 3, 4)).astype(np.float32))
    program = lnr.capture(net(), (torch.zeros(2, 3, 4),))
    program.export(folder / "model.onnx")
    lnr.Pipeline.parse("place{to=peri}").run(program).program.save(folder / "student.pt2")
    return folder


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# ---- what stands at OUT, times the command, times --force ----

HEAL = (
    "heal test_outputs:net S/student.pt2 --data S/data.npz --steps 1 --batch-size 2 --no-control --run room -o OUT.pt2"
)
COMMANDS = {
    "convert": "convert test_outputs:net --to peri -o OUT.pt2",
    "opt": "opt S/model.onnx --passes canonicalize -o OUT.onnx",
    "export": "export test_outputs:net --target generic -o OUT.onnx",
    "heal": HEAL,
    "folder": "opt S/llama --passes fold-affine -o OUT",
}


def checkpoint(at: Path, *more: str) -> None:
    at.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", *more):
        (at / name).parent.mkdir(exist_ok=True)
        (at / name).write_text(name)


def linked(at: Path, made: Callable[[Path], Any]) -> None:
    made(at.parent / "behind")
    at.symlink_to("behind")


def bound(at: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(at.name)  # the whole path is too long for one


STANDING: dict[str, Callable[[Path], Any]] = {
    "nothing": lambda at: None,
    "file": lambda at: at.write_text("mine"),
    "link to a file": lambda at: linked(at, lambda p: p.write_text("mine")),
    "link to nothing": lambda at: at.symlink_to("nowhere"),
    "link to itself": lambda at: at.symlink_to(at.name),
    "link to a checkpoint": lambda at: linked(at, checkpoint),
    "link to a folder": lambda at: linked(at, lambda p: checkpoint(p, "precious")),
    "link to a device": lambda at: at.symlink_to("/dev/null"),
    "empty folder": lambda at: at.mkdir(),
    "checkpoint": checkpoint,
    "checkpoint and a file": lambda at: checkpoint(at, "precious"),
    "checkpoint and a hidden file": lambda at: checkpoint(at, ".precious"),
    "checkpoint and a folder": lambda at: checkpoint(at, "precious/config.json"),
    "checkpoint and a link": lambda at: (checkpoint(at), (at / "precious").symlink_to("..")),
    "folder without config.json": lambda at: (checkpoint(at), (at / "config.json").unlink()),
    "folder of anything": lambda at: (at.mkdir(), (at / "precious").write_text("mine")),
    "pipe": os.mkfifo,
    "socket": bound,
}
NOWHERE = {"link to nothing", "link to itself"}
REPLACED = {
    "file": {"file", "link to a file", *NOWHERE},
    "folder": {"empty folder", "checkpoint", "link to a checkpoint", "link to a folder", *NOWHERE},
}


def held(folder: Path) -> dict[str, str]:
    """Return what a folder holds, by path: what it is, and what it says."""
    found = {}
    for path in sorted(folder.rglob("*")):
        mode, name = path.lstat().st_mode, str(path.relative_to(folder))
        link = os.readlink(path) if path.is_symlink() else ""
        text = path.read_bytes().hex() if not link and path.is_file() else ""
        found[name] = f"{mode:o} {link} {text}"
    return found


def command(name: str, sources: Path, force: bool = False, **place: str) -> list[str]:
    """Return the words of a command; `OUT` in place of another name."""
    words = COMMANDS[name].replace("S/", f"{sources}/").split()
    words = [word.replace("OUT", place.get("out", "OUT")) if i and words[i - 1] == "-o" else word
             for i, word in enumerate(words)]  # fmt: skip
    return [*words, *["--force"] * force]


def refused(words: list[str], code: str = "LN025") -> str:
    """Check that a command fails with one line and touches nothing; return the line."""
    before = held(Path())
    seen = run(*words)
    assert seen.exit_code in (1, 2), seen.output
    assert re.fullmatch(rf"error: {code} [^\n]+; [^\n]+\n", seen.stderr), seen.stderr
    assert held(Path()) == before
    return seen.stderr


CASES = [*itertools.product(STANDING, COMMANDS, (False, True))]


def case_sample() -> list[tuple[str, str, bool]]:
    """Return all refusals of two commands, which cost nothing, and a few of the writes."""
    writes = [("checkpoint", "folder", True), ("link to a folder", "folder", True), ("link to a file", "opt", True)]
    return [*writes, *(c for c in CASES if c[1] in ("convert", "folder") and not accepted(*c))]


def accepted(standing: str, name: str, force: bool) -> bool:
    """Return whether a command is to write there."""
    return standing == "nothing" or force and standing in REPLACED["folder" if name == "folder" else "file"]


@pytest.mark.parametrize(("standing", "name", "force"), rows(CASES, sample=case_sample()))
def test_what_stands_there(standing: str, name: str, force: bool, sources: Path) -> None:
    words = command(name, sources, force)
    out = Path(words[words.index("-o") + 1])
    STANDING[standing](out)
    if not accepted(standing, name, force):
        line = refused(words)
        assert "precious" in line or "precious" not in standing or not force or name != "folder"
        return
    before = held(Path())
    seen = run(*words)
    assert seen.exit_code == 0, seen.output
    after = held(Path())
    ours = {k for k in {*before, *after} if Path(k).parts[0] in (str(out), "room")}
    assert {k: v for k, v in before.items() if k not in ours} == {k: v for k, v in after.items() if k not in ours}
    assert not out.is_symlink()
    made = {".pt2": Format.PROGRAM, ".onnx": Format.ONNX, "": Format.TRANSFORMERS}[out.suffix]
    assert identify(str(out)).format is made


def test_a_refusal_names_what_would_be_lost(sources: Path) -> None:
    for what in ("file", "hidden file", "folder", "link"):
        shutil.rmtree("OUT", ignore_errors=True)
        STANDING[f"checkpoint and a {what}"](Path("OUT"))
        assert "precious" in refused(command("folder", sources, force=True))


# ---- names of OUT ----

PLACES = {
    "no such folder": lambda: "gone/OUT",
    "a file for a folder": lambda: (Path("file").write_text(""), "file/OUT")[1],
    "a link to nothing for a folder": lambda: (Path("link").symlink_to("gone"), "link/OUT")[1],
    "a link to itself for a folder": lambda: (Path("link").symlink_to("link"), "link/OUT")[1],
    "a name too long": lambda: "x" * 300,
    "a path too long": lambda: "x/" * 3000 + "OUT",
    "a system folder": lambda: "/proc/OUT",
}
NAMES = ["", " ", ".", "..", "./", "gone/", "x\0y", "\x1b[31m/x", "a\nb/x"]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("place", PLACES)
def test_places_where_nothing_can_be_written(place: str, name: str, force: bool, sources: Path) -> None:
    refused(command(name, sources, force, out=PLACES[place]()))


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("name", COMMANDS)
def test_names_of_nothing(name: str, force: bool, sources: Path) -> None:
    words = command(name, sources, force)
    at = words.index("-o") + 1
    file = [".pt2", ".onnx", "x.gguf", "x.PT2", "x/.pt2"] if name != "folder" else []
    devices = [] if force else ["/dev/null", "/dev/stdout"]  # never by force: what if it were written, by root?
    for out in (*NAMES, *devices, *file):
        if name == "folder" and out == "gone/":
            continue
        line = refused([*words[:at], out, *words[at + 1 :]])
        assert line[:-1].isprintable()


def test_a_name_without_suffix_is_told(sources: Path) -> None:
    seen = run("opt", "test_outputs:net", "--passes", "canonicalize", "-o", "OUT", "-q")
    assert seen.exit_code == 0 and seen.stdout == ""
    assert seen.stderr == "note: OUT has no suffix: it is written as OUT.pt2\n"
    Path("there").write_text("mine")
    assert "there.pt2" in refused(["opt", "test_outputs:net", "--passes", "canonicalize", "-o", "there", "--force"])


# ---- a moment later ----


def test_what_appears_while_a_file_is_made_stays() -> None:
    def write(temporary: str) -> None:
        Path(temporary).write_text("ours")
        Path("x.pt2").write_text("theirs")

    with pytest.raises(LnrewriteError, match="LN025 x.pt2: it exists"):
        landing.write_whole(Path("x.pt2"), write, force=False)
    assert held(Path()).keys() == {"x.pt2"} and Path("x.pt2").read_text() == "theirs"


def test_what_appears_while_a_folder_is_made_stays(sources: Path) -> None:
    from lnrewrite.checkpoints.writing import whole

    for force in (False, True):
        with (
            pytest.raises(LnrewriteError, match="LN025 x: it (exists|holds precious)"),
            whole(Path("x"), sources / "llama", force) as folder,
        ):
            (folder / "config.json").write_text("ours")
            if not force:
                checkpoint(Path("x"), "precious")
        assert sorted(os.listdir()) == ["x"] and Path("x/precious").read_text() == "precious"


@pytest.mark.parametrize("swaps", [True, False], ids=["swaps", "renames"])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_many_writers_and_a_reader(kind: str, swaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a reader sees is what one of them wrote; where the system cannot swap, it may see nothing for a moment."""
    if not swaps:
        monkeypatch.setattr(landing, "_renamed", lambda *_: False)
    target, errors = Path("out"), list[BaseException]()

    def writer(number: int) -> None:
        try:
            for _ in range(40):
                with landing.room(Path()) as room:
                    made = room / "made"
                    if kind == "folder":
                        made.mkdir()
                    for part in ("a", "b") if kind == "folder" else ("",):
                        (made / part).write_text(str(number) * 1000)
                    landing.land(made, target, force=True)
        except BaseException as error:
            errors.append(error)

    def seen() -> set[str]:
        if kind == "file":
            return {target.read_text()}
        opened = os.open(target, os.O_RDONLY)  # one folder, whatever takes its place
        try:
            names = [f"/proc/self/fd/{opened}/{part}" for part in ("a", "b")]
            return {Path(name).read_text() for name in names if os.path.exists(name)}
        finally:
            os.close(opened)

    threads = [threading.Thread(target=writer, args=(n,)) for n in range(2 if swaps or kind == "file" else 1)]
    for thread in threads:
        thread.start()
    while any(t.is_alive() for t in threads):
        try:
            found = seen()
        except OSError as error:
            assert error.errno == errno.ENOENT
            continue
        assert len(found) <= 1 and all(len(text) == 1000 for text in found)
    assert not errors and os.listdir() == ["out"]


def test_rooms_of_killed_processes_go_and_others_stay() -> None:
    abandoned, mine = Path(".lnrewrite-abcd1234"), Path(".lnrewrite-kept")
    abandoned.mkdir(), (abandoned / "part").write_text("half")
    mine.write_text("a file of that name")
    Path(".lnrewrite-back").mkdir()
    Path(".lnrewrite-back/old").write_text("stood at a target")
    with landing.room(Path()) as first, landing.room(Path()) as second:
        assert first.is_dir() and second.is_dir()  # the second leaves the first alone
    assert sorted(os.listdir()) == [".lnrewrite-back", ".lnrewrite-kept"]


# ---- a full disk ----


def test_torch_writes_to_a_full_disk() -> None:
    """Torch's writer ends the process where a stream fails, in a destructor: this one never does."""
    program = torch.export.export(nn.Linear(64, 64), (torch.zeros(1, 64),))
    for error in (OSError(errno.ENOSPC, "full"), KeyboardInterrupt()):

        def failing(data: Any, /, error: BaseException = error) -> int:
            raise error

        def save(stream: Any, failing: Any = failing) -> None:
            stream.file.close()
            stream.file = type("Full", (), {"write": staticmethod(failing), "close": lambda self: None})()
            torch.export.save(program, stream)

        with pytest.raises(type(error)):
            landing.poured(save)("x.pt2")
    with pytest.raises(OSError, match="No space left"):
        landing.poured(lambda stream: torch.export.save(program, stream))("/dev/full")


def limited(words: list[str], room: int, said: str) -> None:
    """Run a command where no file may grow beyond `room` bytes, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
    as_process(words, Path(said))


@pytest.mark.parametrize(("name", "room"), rows([*itertools.product(COMMANDS, (600, 2000, 5000))], [("convert", 2000)]))
def test_a_full_disk(name: str, room: int, sources: Path) -> None:
    words = command(name, sources, force=True)
    out = Path(words[words.index("-o") + 1])
    checkpoint(out) if name == "folder" else out.write_text("old")
    before = held(Path())
    process = started(limited, words, room, "said.txt")
    process.join()
    said = Path("said.txt").read_text()
    assert process.exitcode == 1 and re.match("error: (LN025|LN403) ", said) and said.count("\n") == 1, said
    after = {k: v for k, v in held(Path()).items() if Path(k).parts[0] not in ("said.txt", "room")}
    assert after == before


# ---- code of the user's that leaves Python ----

EXITS = """
import sys, torch
class Leaves(torch.nn.Module):
    def forward(self, x): sys.exit(0)
def leaves(): return Leaves(), {"x": torch.zeros(2, 4)}
def exits(): raise SystemExit(CODE)
def batches():
    yield {"input": torch.zeros(2, 3, 4)}
    sys.exit(CODE)
"""


CALIBRATED = ["convert", "test_outputs:net", "--to", "peri", "-o", "x", "--calibrate"]


@pytest.mark.parametrize("code", ["0", "7", "None", "'text'"])
def test_no_exit_code_but_ours(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module = f"exits_{re.sub('[^a-z0-9]', '', code.lower())}"
    Path(f"{module}.py").write_text(EXITS.replace("CODE", code))
    Path(f"{module}_import.py").write_text(f"raise SystemExit({code})")
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    names = (
        f"{module}:exits",
        f"{module}:leaves",
        f"{module}_import:net",
        "builtins:exit",
        "builtins:quit",
        "sys:exit",
    )
    for name in names:
        refused(["inspect", name], code="LN019")
        if "leaves" not in name:
            refused([*CALIBRATED, name], code="LN022")
    refused([*CALIBRATED, f"{module}:batches"], code="LN022")


# ---- numbers ----

HUGE = ("9" * 30, "9" * 5000, "-" + "9" * 30, "1e400", "nan", "inf", "-inf")


def numeric() -> list[tuple[str, str]]:
    """Return every option that takes a number, with its command."""
    kinds = (click.types.IntParamType, click.types.FloatParamType)
    every = [(name, p) for name, c in main.commands.items() for p in c.params]
    return [(name, p.opts[0]) for name, p in every if isinstance(p.type, kinds)]


@pytest.mark.parametrize(("name", "option"), numeric())
def test_every_number_has_bounds(name: str, option: str) -> None:
    Path("data.txt").write_text("text " * 100)
    Path("model.onnx").write_bytes(b"\x08\x0a\x12\x01x")
    words = {
        "heal": "demo:tinygpt demo:tinygpt --data data.txt -o x.pt2",
        "convert": "demo:tinygpt --to peri -o x.pt2",
        "opt": "demo:tinygpt --passes canonicalize -o x.pt2",
        "export": "demo:tinygpt --target cpu -o x.onnx",
        "verify": "demo:tinygpt demo:tinygpt",
        "bench": "model.onnx",
    }.get(name, "demo:tinygpt")
    for value in HUGE:
        if option in ("--gain-lr", "--weight-decay", "--lr", "--control-lr") and value.isdigit() and len(value) < 400:
            continue  # large, and a number
        refused([name, *words.split(), option, value], code="LN003")


@pytest.mark.parametrize("value", ["nan", "-1", "-1e-30", "inf", "-inf", "1e400", float("nan"), -1.0, float("inf")])
def test_tolerances_that_say_nothing(value: Any) -> None:
    with pytest.raises(UsageError, match="LN003 tolerance"):
        check_tolerance(value)


def test_the_largest_seed() -> None:
    assert run("inspect", "test_outputs:net", "--seed", str(2**63 - 1)).exit_code == 0


@pytest.mark.parametrize("name", registry.available())
def test_numbers_of_passes(name: str) -> None:
    cls = registry.find(name)
    for option in (f for f in cls.__dataclass_fields__ if f in cls.__annotations__):
        for value in HUGE:
            with pytest.raises(UsageError):
                (made,) = parse(f"{name}{{{option.replace('_', '-')}={value}}}")
                if option != "blocks":
                    pytest.fail(value)
                select(blocks_of(12), getattr(made, option))  # any text names blocks, until a model says which it has


def blocks_of(count: int) -> Any:
    """Return what a selection sees of a network."""
    return SimpleNamespace(blocks=[SimpleNamespace(name=f"blocks.{i}", kind="mlp") for i in range(count)])


@given(st.lists(st.sampled_from([*"0123456789%*?[]!;:-. ", "first:", "last:", "mlp", "blocks.", "9" * 400, "1e9"])))
def test_selections(words: list[str]) -> None:
    network = blocks_of(12)
    try:
        assert select(network, "".join(words)) <= {b.name for b in network.blocks}
    except UsageError as error:
        assert error.code == "LN004" and len(str(error)) < 1000


# ---- runs of heal that are none ----


def logged(at: Path, log: bytes) -> None:
    (at / "run.json").write_text('{"steps": 4}')
    (at / "log.jsonl").write_bytes(log)


JUNK: dict[str, Callable[[Path], Any]] = {
    "nothing": lambda at: None,
    "no folder": lambda at: at.rmdir(),
    "a file": lambda at: (at.rmdir(), at.write_text("")),
    "a folder of anything": lambda at: (at / "precious").write_text("mine"),
    "an empty record": lambda at: (at / "run.json").write_text(""),
    "half a record": lambda at: (at / "run.json").write_text('{"steps": '),
    "a record of a list": lambda at: (at / "run.json").write_text("[]"),
    "a record of bytes": lambda at: (at / "run.json").write_bytes(b"\xff\xfe\x00"),
    "a deep record": lambda at: (at / "run.json").write_text("[" * 100_000),
    "a record of another run": lambda at: (at / "run.json").write_text('{"steps": 7}'),
    "a folder for a record": lambda at: (at / "run.json").mkdir(),
    "a link to nothing for a record": lambda at: (at / "run.json").symlink_to("gone"),
    "a log of text": lambda at: logged(at, b"a }\n"),
    "a log of something else": lambda at: logged(at, b"{}\n"),
    "a log of bytes": lambda at: logged(at, b"\xff"),
}  # fmt: skip


@pytest.mark.parametrize("junk", JUNK)
def test_there_is_no_run_to_resume(junk: str) -> None:
    folder = Path("run")
    folder.mkdir()
    JUNK[junk](folder)
    before = held(Path())
    with pytest.raises(LnrewriteError, match="LN605"):
        Snapshots(folder, World(0, 1, torch.device("cpu")), {"steps": 4}, resume=True)
    assert held(Path()) == before


def test_a_log_of_something_else_stays() -> None:
    Path("run").mkdir()
    Path("run/log.jsonl").write_text('{"of": "mine"}\n')
    with pytest.raises(LnrewriteError, match="LN605"):
        Snapshots(Path("run"), World(0, 1, torch.device("cpu")), {"steps": 4}, resume=False)
    assert json.loads(Path("run/log.jsonl").read_text()) == {"of": "mine"}


def test_two_processes_do_not_share_a_run() -> None:
    def opened(resume: bool) -> Snapshots:
        return Snapshots(Path("run"), World(0, 1, torch.device("cpu")), {"steps": 4}, resume)

    first = opened(False)
    with pytest.raises(LnrewriteError, match="LN605 run: another process"):
        opened(True)
    first.leave()
    opened(True).leave()
