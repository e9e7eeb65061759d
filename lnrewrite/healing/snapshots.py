"""Keep a run on the disk: checkpoints that are whole or not there, a log of JSON lines, and what the run was asked."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import OptimizerStateType, ValueType, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.optim import Optimizer

from ..errors import Code, LnrewriteError, told, words
from ..files.landing import write_text_whole
from ..pipeline.results import Json
from ..quiet import LOGGER, quiet
from .distributed import World
from .reading import Planner, Reader

CHECKPOINT = re.compile(r"\.?(local|global|control)-\d{6,}")
"""The names of checkpoints; one that is being written starts with a dot."""


class Snapshots:
    """Write and read the folder of one run: `PHASE-STEP/` checkpoints (torch.distributed.checkpoint), `log.jsonl`.

    A checkpoint is written beside its place and renamed; the one before goes only then. Reading one runs nothing that
    it names. `before` holds what a run that goes on had logged, by phase and step.
    """

    def __init__(
        self, folder: Path, world: World, asked: Json, resume: bool, restart: bool = False, shared: bool = False
    ) -> None:
        """Open the folder of a run that was asked for these things; `restart` drops what another run left there.

        shared: wait until no other process uses the folder, and go on with what it holds then, if anything.
        Raises LnrewriteError LN605 where it holds another run, or one that was not to be resumed.
        """
        self.folder, self.world = folder, world
        self.pending: tuple[Future[object], Path] | None = None
        self.group = dist.new_group(backend="gloo") if world.size > 1 else None
        self.lock: int | None = None
        if shared:
            self.lock = self._locked(wait=True) if world.first else None
            world.wait()
            resume = os.path.lexists(folder / "run.json")
        text = json.dumps(asked, indent=1, sort_keys=True, default=str)
        try:
            was = _same(folder, json.loads(text), resume, restart)
            held = self.rows()  # a log of something else is told before it is replaced
        except LnrewriteError:
            self.leave()
            raise
        self.before = {(row["phase"], row["step"]): row for row in held if was is not None}
        world.wait()
        if world.first and not shared:
            self.lock = self._locked()
        if world.first and was is None:
            self._clear()
            (folder / "log.jsonl").unlink(missing_ok=True)
            write_text_whole(folder / "run.json", text, force=restart)
        elif world.first:
            self._end_line()
        world.wait()

    def save(self, phase: str, step: int, view: nn.Module, optimizer: Optimizer, last: bool = True) -> None:
        """Keep weights and optimizer of a phase at a step.

        Many processes go on training while one that is not the `last` is written, of a copy in the memory of the host.
        Raises LnrewriteError LN025 where there is no room, also for the one before.
        """
        self.land()
        model, state = _states(view, optimizer)
        held = {"model": model, "optimizer": state}
        place = self.folder / f"{phase}-{step:06d}"
        temporary = _unfinished(place)
        if self.world.first:
            shutil.rmtree(temporary, ignore_errors=True)
        self.world.wait()
        with self._telling(place), quiet("torch"):  # that it is one process is no news
            if self.group is None or last:
                save(held, checkpoint_id=temporary)
            else:
                future = async_save(held, checkpoint_id=temporary, process_group=self.group)
                assert isinstance(future, Future)
                self.pending = future, place
        if self.pending is None:
            self._placed(place)

    def land(self, wait: bool = True) -> None:
        """Let the checkpoint that is being written take its place when it is whole; without `wait` only if it is."""
        if self.pending is None or not (wait or self.world.total(self.pending[0].done()) == self.world.size):
            return
        (future, place), self.pending = self.pending, None
        with self._telling(place), quiet("torch"):
            future.result()
        self._placed(place)

    @contextmanager
    def _telling(self, place: Path) -> Iterator[None]:
        """Raise LnrewriteError LN025 for what torch raises where a checkpoint cannot be written."""
        try:
            yield
        except (Exception, CheckpointException) as error:  # torch wraps what the file system says
            shutil.rmtree(_unfinished(place), ignore_errors=True)
            why = f"the checkpoint {place.name} cannot be written: {_told(error)}"
            remedy = "free some space, then continue with --resume"
            raise LnrewriteError(Code.LN025, str(self.folder), why, remedy) from error

    def _placed(self, place: Path) -> None:
        """Put a checkpoint that is whole in its place, and let the one before go."""
        self.world.wait()
        if self.world.first:
            earlier = self._checkpoints(place.name.rpartition("-")[0])
            if not place.exists():
                os.replace(_unfinished(place), place)
            for _, old in earlier:
                if old != place:
                    shutil.rmtree(old, ignore_errors=True)
        self.world.wait()

    def load(self, phase: str, view: nn.Module, optimizer: Optimizer) -> int:
        """Put the last checkpoint of a phase into place and return its step; 0 where there is none."""
        self.land()
        found = self._checkpoints(phase)
        if not found:
            return 0
        step, place = found[-1]
        model, state = _states(view, optimizer)
        held = {"model": model, "optimizer": state}
        try:
            reader = Reader(place)
            with quiet("torch"):
                load(held, storage_reader=reader, planner=Planner())
        except (Exception, CheckpointException) as error:  # whatever is wrong with the files
            why = f"it cannot be read: {_told(error)}"
            raise LnrewriteError(Code.LN605, str(place), why, "remove this checkpoint, or the run's folder") from error
        set_state_dict(view, optimizer, model_state_dict=model, optim_state_dict=state)
        return step

    def log(self, row: Json) -> None:
        """Append one line of JSON. Raises LnrewriteError LN025 where there is no room."""
        if self.world.first:
            self._append(json.dumps(row) + "\n")

    def _end_line(self) -> None:
        """End the log's last line where a stop cut it: what is appended stands in lines of its own."""
        path = self.folder / "log.jsonl"
        if os.path.lexists(path) and (held := path.read_bytes()) and not held.endswith(b"\n"):
            self._append("\n")

    def _append(self, text: str) -> None:
        try:
            with (self.folder / "log.jsonl").open("a") as stream:
                stream.write(text)
        except OSError as error:
            why = f"the log cannot be written: {error.strerror}"
            raise LnrewriteError(
                Code.LN025, str(self.folder), why, "free some space, then continue with --resume"
            ) from error

    def rows(self) -> list[Json]:
        """Return the log, of steps that ran again after a stop the last line each. Raises LnrewriteError LN605."""
        path = self.folder / "log.jsonl"
        try:
            text = path.read_text() if os.path.lexists(path) else ""
            lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
            if text.strip() and not lines and not os.path.lexists(self.folder / "run.json"):
                raise ValueError("it holds no steps of a run")
            return list({(row["phase"], row["step"]): row for row in lines}.values())
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise _no_run(path, error) from error

    def end(self) -> None:
        """Drop the checkpoints of a run that is over; log and picture stay."""
        if self.world.first:
            self._clear()
            (self.folder / "run.json").unlink(missing_ok=True)

    def leave(self, kind: type[BaseException] | None = None, *_: object) -> None:
        """Release the folder to others, when nothing is being written there any more.

        kind: of the error that ends the run; one that was refused before it began is none to go on with.
        """
        if self.pending is not None:
            with suppress(Exception, CheckpointException):
                self.pending[0].result()
        if self.lock is not None:
            refused = kind is not None and issubclass(kind, LnrewriteError)
            if refused and [path.name for path in self.folder.iterdir()] == ["run.json"]:
                (self.folder / "run.json").unlink()
            os.close(self.lock)
            self.lock = None

    def _clear(self) -> None:
        """Remove checkpoints, and nothing else that the folder may hold."""
        for path in self.folder.iterdir():
            if path.is_dir() and CHECKPOINT.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def _checkpoints(self, phase: str) -> list[tuple[int, Path]]:
        found = [p for p in self.folder.glob(f"{phase}-*") if CHECKPOINT.fullmatch(p.name)]
        return sorted((int(p.name.rpartition("-")[2]), p) for p in found)

    def _locked(self, wait: bool = False) -> int:
        """Make the folder and lock it: two processes would take each other's checkpoints away."""
        try:
            self.folder.mkdir(exist_ok=True)
            lock = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise LnrewriteError(Code.LN025, str(self.folder), str(error.strerror), "choose another folder") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if wait:
                LOGGER.info(f"waiting for the process that uses {self.folder}")
                fcntl.flock(lock, fcntl.LOCK_EX)
                return lock
            os.close(lock)
            why, remedy = (
                "another process is using the run there",
                "wait until it ends, or name another folder with --run",
            )
            raise LnrewriteError(Code.LN605, str(self.folder), why, remedy) from error
        except OSError:  # a file system without locks
            self._end_line()
        return lock


def check_run(folder: Path, resume: bool, restart: bool = False) -> Json | None:
    """Return what the run in a folder was asked, None where there is none, or where it is to be dropped (`restart`).

    Raises LnrewriteError LN605 where there is none to resume, one that did not finish, or a file that no run writes.
    """
    held = folder / "run.json"
    found = None
    try:
        if os.path.lexists(held):
            found = json.loads(held.read_text())
            if not isinstance(found, dict):
                raise ValueError("it does not hold an object")
    except (OSError, ValueError, RecursionError) as error:
        raise _no_run(held, error) from error
    if found is None or (restart and not resume):
        check_ours(folder)
    if found is None and resume:
        why, remedy = "it holds no run to resume", "run without --resume, or name the folder of the run with --run"
        raise LnrewriteError(Code.LN605, str(folder), why, remedy)
    if found is None or (restart and not resume):
        return None
    if not resume:
        remedy = "continue with --resume, or drop it with --force (restart=True)"
        raise LnrewriteError(Code.LN605, str(folder), "it holds a run that did not finish", remedy)
    return found


def _same(folder: Path, asked: Json, resume: bool, restart: bool) -> Json | None:
    """Return what the run in a folder was asked, as `check_run` does. Raises LnrewriteError LN605 for another one."""
    was = check_run(folder, resume, restart)
    if was is not None and was != asked:
        other = sorted(k for k in asked.keys() | was.keys() if asked.get(k) != was.get(k))
        why = f"the run there has other options ({', '.join(other)})"
        raise LnrewriteError(Code.LN605, str(folder), why, "give the same options, or remove the folder")
    return was


def check_ours(folder: Path) -> None:
    """Raise LnrewriteError LN605 where a folder holds what a new run would replace, and no run wrote that."""
    kept = [p for p in (folder.iterdir() if folder.is_dir() else ()) if CHECKPOINT.fullmatch(p.name)]
    whole = [p for p in kept if p.is_dir() and p.name[0] != "." and any(p.iterdir())]
    foreign = [p for p in whole if not (p / ".metadata").exists()]
    page, log = folder / "loss.html", folder / "log.jsonl"
    if os.path.lexists(page) and not os.path.lexists(log):
        foreign.append(page)
    if foreign:
        why = f"it holds {foreign[0].name}, which no run wrote, and a run would replace it"
        raise LnrewriteError(Code.LN605, str(folder), why, "name another folder, or move that away")


def _states(view: nn.Module, optimizer: Optimizer) -> tuple[dict[str, ValueType], OptimizerStateType]:
    """Return what a checkpoint holds: weights and AdamW's state, zeros for what has had no gradient yet.

    AdamW makes the state of a parameter with its first gradient; what a phase never gives one (the final norm, where
    each block learns alone) would be missing from a checkpoint, and torch would look for it there.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p not in optimizer.state:
                at = p.device if group.get("fused") else "cpu"
                optimizer.state[p] = {"step": torch.zeros((), dtype=torch.float32, device=at)}
                optimizer.state[p] |= {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
    return get_state_dict(view, optimizer)


def _unfinished(place: Path) -> Path:
    """Return where a checkpoint is while it is being written."""
    return place.with_name(f".{place.name}")


def _no_run(path: Path, error: Exception) -> LnrewriteError:
    why = f"it is not what a run writes: {told(error)}"
    return LnrewriteError(Code.LN605, str(path), why, "name another folder, or move that file away")


def _told(error: BaseException) -> str:
    """Return the cause of what torch.distributed.checkpoint raises, which is no Exception and holds tracebacks."""
    failures = error.failures.values() if isinstance(error, CheckpointException) else ()
    return words(next((cause for cause, _ in failures), error))
