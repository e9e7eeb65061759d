"""Watch a process from inside: every file that is opened, every name that is looked up for a pickle, every program."""

from __future__ import annotations

import json
import os
import site
import sys
from pathlib import Path
from typing import Any

SYSTEM = ("/proc", "/sys", "/dev", "/etc", "/usr", "/lib", "/opt")
STARTS = ("system", "exec", "posix_spawn", "spawn", "fork", "forkpty")
RUNS = {"subprocess.Popen", "pty.spawn", *(f"os.{name}" for name in STARTS)}
REACHES = ("connect", "bind", "getaddrinfo", "gethostbyname", "sendto")
TALKS = {"urllib.Request", *(f"socket.{name}" for name in REACHES)}
HARMFUL = {"os", "posix", "nt", "subprocess", "sys", "builtins", "importlib", "runpy", "shutil", "payload", "socket"}


def under(path: str, roots: tuple[str, ...]) -> bool:
    """Return whether a path is one of `roots` or lies in one."""
    return any(path == r or path.startswith(r.rstrip("/") + "/") for r in roots)


def file_of(code: object) -> str:
    """Return the file that a code object is of; empty where it is of none."""
    file = getattr(code, "co_filename", "")
    return os.path.realpath(file) if isinstance(file, str) and not file.startswith("<") else ""


def install(root: str, repository: str, fd: int) -> None:
    """Write a line of JSON to `fd` for all that a command in the folder `root` of a case should not do."""
    python = {sys.prefix, sys.base_prefix, os.path.dirname(os.__file__), *site.getsitepackages(), repository}
    inside = tuple(os.path.join(root, name) for name in ("here", "home", "tmp"))
    stdin = os.path.join(root, "stdin")  # a command line may name /dev/stdin
    readable = tuple(os.path.realpath(p) for p in (*inside, stdin, *python, *SYSTEM, *filter(None, sys.path)))
    writable = (*map(os.path.realpath, inside), "/dev/null", "/dev/tty", "/dev/shm", "/proc")
    server = [sys.executable, "-P", os.path.join(repository, "lnrewrite", "backends", "onnx", "server.py")]
    marker, here = os.path.join(root, "MARKER"), os.path.realpath(inside[0])

    def tell(kind: str, what: Any) -> None:
        os.write(fd, (json.dumps([kind, str(what)[:300]]) + "\n").encode())

    def opened(path: Any, flags: Any) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return
        name = os.fsdecode(path)
        real = os.path.realpath(name) if "\0" not in name else name
        if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            if not under(real, writable):
                tell("wrote outside", real)
        elif not under(real, readable):
            tell("read outside", real)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            opened(args[0], args[2])
        elif event == "os.mkdir" and os.fsdecode(args[0]) == marker:
            tell("ran", "the payload")
        elif event in RUNS and not (event == "subprocess.Popen" and args[1] == server):  # which runs ONNX Runtime
            tell("ran", f"{event} {args[:2]}")
        elif event in TALKS:
            tell("talked", f"{event} {args[-1]}")
        elif event == "pickle.find_class" and str(args[0]).split(".")[0] in HARMFUL:
            tell("unpickled", ".".join(map(str, args)))
        elif event == "exec" and under(file_of(args[0]), (here,)):
            tell("ran code of", file_of(args[0]))

    sys.addaudithook(hook)


def told(path: Path) -> list[list[str]]:
    """Read what was told, each thing once."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [list(row) for row in dict.fromkeys(tuple(json.loads(line)) for line in lines)]
