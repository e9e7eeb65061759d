"""Run cases: lay each out in a folder of its own, run it in a worker's child, and collect what was seen."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

from . import hook
from .goods import Goods
from .place import Case, Place

REPOSITORY = Path(__file__).resolve().parents[2]
OLD = 1_000_000_000  # seconds: long before now, so that a read shows in the time of the last access


class Harness:
    """Hold a worker and the good files that the cases are made of; use it in a `with`."""

    def __init__(self, limit: int = 30) -> None:
        self.limit = limit  # seconds of processor time
        self.folder = Path(tempfile.mkdtemp(prefix="hostile-")).resolve()
        self.goods = Goods(self.folder / "goods")
        self.worker: subprocess.Popen[str] | None = None
        self.count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        _unlock(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)

    def stop(self) -> None:
        """End the worker."""
        if self.worker:
            self.worker.kill()
            self.worker.wait()
            self.worker = None

    def run(self, case: Case) -> dict[str, Any]:
        """Run a case and return what was seen of it: a row for the judge."""
        self.count += 1
        place = Place(self.folder / f"case-{self.count}", self.goods)
        place.lay_out()
        try:
            case.make(place)
            canaries = [p for p in place.outside.rglob("*") if p.is_file()]
            for path in canaries:
                os.utime(path, (OLD, OLD + 1))
            before = tree(place.root)
            row = self._ask(case, place)
            after = tree(place.root)
            row |= {name: _text(place.root / name) for name in ("stdout", "stderr")}
            row["events"] = hook.told(place.root / "events")
            row["events"] += [["read outside", str(p)] for p in canaries if p.exists() and p.stat().st_atime != OLD]
            row["ran"] = Path(place.marker).exists()
            row["new"] = sorted(set(after) - set(before) - {"stdout", "stderr", "stdin", "events", "MARKER"})
            row["changed"] = sorted(p for p in set(before) & set(after) if before[p] != after[p])
            row["lost"] = sorted(set(before) - set(after))
        finally:
            _unlock(place.root)
            shutil.rmtree(place.root, ignore_errors=True)
        return {"name": case.name, **row}

    def _ask(self, case: Case, place: Place) -> dict[str, Any]:
        (place.root / "stdin").write_text("y\n" * 50)  # what a prompt of another library would be answered
        asked = {
            "root": str(place.root),
            "args": [a.replace("{here}", str(place.here)).replace("{outside}", str(place.outside)) for a in case.args],
            "repository": str(REPOSITORY),
            "limit": self.limit,
            "room": case.room,
            "library": case.library,
            "environment": dict(case.environment),
        }
        worker = self._worker()
        assert worker.stdin and worker.stdout
        worker.stdin.write(json.dumps(asked) + "\n")
        worker.stdin.flush()
        line = worker.stdout.readline()
        if not line:
            self.worker = None
            raise RuntimeError(f"the worker ended at {case.name!r}")
        return dict(json.loads(line))

    def _worker(self) -> subprocess.Popen[str]:
        if self.worker is None:
            caches = self.folder / "home"
            caches.mkdir(exist_ok=True)
            unset = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "XDG_", "TRANSFORMERS_", "TORCH"))}
            ours = {"PYTHONPATH": str(REPOSITORY), "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1", "HOME": str(caches)}
            command = [sys.executable, "-P", str(Path(__file__).with_name("worker.py"))]
            pipe, silent = subprocess.PIPE, subprocess.DEVNULL
            self.worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=silent, text=True, env=unset | ours)
        return self.worker


def tree(root: Path) -> dict[str, Any]:
    """Return what a folder holds: of each path its kind, size and time of change."""
    found: dict[str, Any] = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                seen = os.lstat(path)
                plain = name in folders and not os.path.islink(path)
                found[os.path.relpath(path, root)] = None if plain else (seen.st_ino, seen.st_size, seen.st_mtime_ns)
    return found


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "surrogateescape") if path.exists() else ""


def _unlock(root: Path) -> None:
    """Make folders writable again, so that they can be removed."""
    for folder, folders, _ in os.walk(root):
        for name in folders:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                with contextlib.suppress(OSError):
                    os.chmod(path, 0o700)
