"""Kill commands that write at random moments (kill -9), and look whether what stands at OUT is old or new, whole.

    python tests/killing.py                       # 50 moments of each command; some ten minutes
    python tests/killing.py --moments 5 --only heal
    python tests/killing.py --table               # what the results say, nothing run

Half of the moments are drawn from the time that the command takes, half from the steps that it takes in the file system
once it began to write. Every other run starts where nothing stands. After a killed heal the run is resumed, and has to
end with the same file. Results go to a file of JSON lines, one a moment; moments that it holds are not run again.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import nn

COMMANDS = {
    "convert": "convert killing:net --to peri -o OUT.pt2",
    "opt": "opt model.onnx --passes canonicalize,fold-affine -o OUT.onnx",
    "export": "export killing:net --target generic -o OUT.onnx",
    "folder": "opt llama --passes fold-affine -o OUT",
    "heal": "heal killing:net student.pt2 --data data.npz -o OUT.pt2 --steps 4 --save-steps 2 --batch-size 2"
    " --no-control",
}
SEEN = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree", "os.scandir")
"""The steps, as audit events, at which a run is killed."""


class Layer(nn.Module):
    """One Pre-LN branch."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), Layer(), Layer())


def digest(path: Path) -> str:
    """Return a digest of a file, or of all names and files in a folder; empty where nothing stands."""
    if not path.exists():
        return ""
    held = hashlib.sha256()
    for file in sorted(p for p in (path, *path.rglob("*")) if p.is_file()):
        held.update(str(file.relative_to(path.parent)).encode() + b"\0" + file.read_bytes())
    return held.hexdigest()[:16]


def child(words: list[str], hook: Callable[[str, Any], None] | None = None, log: str = "said.txt") -> int:
    """Start a command in a copy of this process, which has only imported things; return its id."""
    if pid := os.fork():
        return pid
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)
    if hook:
        sys.addaudithook(lambda event, args: hook(event, args) if event in SEEN else None)
    from lnrewrite.cli import main

    try:
        main(words)
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    finally:
        os._exit(99)


def finish(pid: int, at: float | None = None) -> int:
    """Wait for a process, or kill it after `at` seconds; return its exit status, negative for a signal."""
    if at is not None:
        time.sleep(at)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def writing(act: Callable[[int], None]) -> Callable[[str, Any], None]:
    """Return a hook that calls `act` with the number of each step from the first that makes a room on."""
    count = [-1]

    def hook(event: str, args: Any) -> None:
        if count[0] < 0 and not (event == "os.mkdir" and ".lnrewrite-" in str(args[0])):
            return
        count[0] += 1
        act(count[0])

    return hook


class Trial:
    """One command in a folder of its own: what it makes, of what, and how long it takes."""

    def __init__(self, name: str) -> None:
        self.name, self.words = name, COMMANDS[name].split()
        self.out = Path(next(w for w in self.words if w.startswith("OUT")))
        self.run = Path(f"{self.out}.run")
        self.old = Path("old", self.out)
        self.clear()
        (begun := Path("steps")).write_text("")
        started = time.monotonic()
        self.whole(writing(lambda n: os.write(STEPS, b".")))
        self.seconds, self.steps = time.monotonic() - started, begun.stat().st_size
        self.new = digest(self.out)
        self.old.parent.mkdir(exist_ok=True)
        self.clear(self.old)
        shutil.move(self.out, self.old)
        if self.old.is_dir():
            (self.old / "config.json").write_text(" " + (self.old / "config.json").read_text())
        else:
            self.old.write_bytes(self.old.read_bytes() + b"old")

    def clear(self, *more: Path) -> None:
        for path in (*(more or (self.out, self.run)),):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def whole(self, hook: Callable[[str, Any], None] | None = None, *more: str) -> None:
        if code := finish(child([*self.words, "-q", *more], hook)):
            raise RuntimeError(f"{self.name} exits with {code}: {Path('said.txt').read_text()}")

    def kill(self, moment: int) -> dict[str, Any]:
        """Kill a run at the moment of that number; return a row of the results."""
        draw = random.Random(f"{self.name} {moment}")
        self.clear()
        force = ["--force"] if moment % 2 else []
        if force:
            shutil.copytree(self.old, self.out) if self.old.is_dir() else shutil.copyfile(self.old, self.out)
        before = digest(self.out)
        if moment // 2 % 2:
            at, step = draw.uniform(0, self.seconds), None
            code = finish(child([*self.words, "-q", *force]), at)
        else:
            at, step = None, draw.randrange(self.steps)
            code = finish(child([*self.words, "-q", *force], writing(lambda n: suicide(n == step))))
        after = digest(self.out)
        state = "new" if after == self.new else "as before" if after == before else "BROKEN"
        rooms = len(list(Path().glob(".lnrewrite-*")))
        row = {"command": self.name, "moment": moment, "at": at, "step": step, "code": code, "state": state}
        if self.name == "heal" and code:
            resume = ["--resume"] if (self.run / "run.json").exists() else []
            self.whole(None, "--force", *resume)
            row["resumed"] = bool(resume)
            row["state"] += "" if digest(self.out) == self.new else ", BROKEN when resumed"
        return row | {"rooms": rooms}


def suicide(now: bool) -> None:
    if now:
        os.kill(os.getpid(), signal.SIGKILL)


STEPS = -1


def prepare(room: Path) -> None:
    """Make what the commands read, and go there."""
    global STEPS
    room.mkdir(exist_ok=True)
    os.chdir(room)
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    sys.modules["killing"] = sys.modules[__name__]
    STEPS = os.open("steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    if not Path("llama").exists():
        pid = os.fork()
        if not pid:
            import zoo

            np.savez("data.npz", input=np.random.default_rng(0).normal(size=(40, 3, 4)).astype(np.float32))
            zoo.build("llama", head=True)[0].save_pretrained("llama")
            os._exit(0)
        assert finish(pid) == 0
        for words in (
            "export killing:net --target generic -o model.onnx --force",
            "convert killing:net --to peri -o student.pt2 --force",
        ):
            if code := finish(child(words.split())):
                raise RuntimeError(f"{words} exits with {code}: {Path('said.txt').read_text()}")


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results, a line for each command."""
    lines = [f"{'command':9}{'moments':>8}{'killed':>8}{'before':>8}{'new':>6}{'broken':>8}{'resumed':>9}{'rooms':>7}"]
    for name in COMMANDS:
        mine = [row for row in rows if row["command"] == name]
        states = Counter("broken" if "BROKEN" in row["state"] else row["state"] for row in mine)
        killed = sum(row["code"] == -signal.SIGKILL for row in mine)
        resumed = sum(row.get("resumed", False) for row in mine)
        rooms = max((row["rooms"] for row in mine), default=0)
        lines.append(
            f"{name:9}{len(mine):8}{killed:8}{states['as before']:8}{states['new']:6}{states['broken']:8}"
            f"{resumed:9}{rooms:7}"
        )
    return "\n".join(lines)


@click.command()
@click.option("--moments", default=50, show_default=True, help="Moments of each command.")
@click.option("--only", multiple=True, type=click.Choice(list(COMMANDS)), help="These commands alone.")
@click.option("--room", default="killing", show_default=True, help="The folder to work in.")
@click.option("--log", default="killing.jsonl", show_default=True, help="The results.")
@click.option("--table", "shown", is_flag=True, help="Show what the results say, and run nothing.")
def main(moments: int, only: tuple[str, ...], room: str, log: str, shown: bool) -> None:
    """Kill commands that write at random moments, and look at what stands at OUT."""
    results = Path(log).absolute()
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    if not shown:
        import lnrewrite.checkpoints.folders
        import lnrewrite.cli
        import lnrewrite.export.writer
        import lnrewrite.healing.session
        import lnrewrite.models.onnx_program  # noqa: F401

        prepare(Path(room).absolute())
        for name in only or COMMANDS:
            if not (left := set(range(moments)) - {row["moment"] for row in rows if row["command"] == name}):
                continue
            trial = Trial(name)
            for moment in sorted(left):
                rows.append(trial.kill(moment))
                with results.open("a") as stream:
                    stream.write(json.dumps(rows[-1]) + "\n")
            trial.clear()
            trial.whole()
            if rooms := list(Path().glob(".lnrewrite-*")):
                raise SystemExit(f"{name}: a whole run leaves {len(rooms)} rooms of killed ones")
    click.echo(table(rows))
    raise SystemExit(any("BROKEN" in row["state"] for row in rows))


if __name__ == "__main__":
    main()
