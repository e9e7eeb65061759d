"""Where a case is laid out, and what a case is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARKER = "MARKER"
"""The folder that every payload makes: where it exists, code has run."""
SECRET = b"the content of a file that no command has any business with\n" * 64


@dataclass(frozen=True)
class Place:
    """One case's own folder. The command runs in `here`; `outside` holds what it is not to read."""

    root: Path
    goods: Any

    @property
    def here(self) -> Path:
        """The current folder of the command."""
        return self.root / "here"

    @property
    def outside(self) -> Path:
        """The canaries."""
        return self.root / "outside"

    @property
    def marker(self) -> str:
        """What a payload makes."""
        return str(self.root / MARKER)

    def lay_out(self) -> None:
        """Make the folders and the canary."""
        for name in ("here", "outside", "home", "tmp"):
            (self.root / name).mkdir(parents=True)
        (self.outside / "secret.bin").write_bytes(SECRET)

    def write(self, name: str, content: bytes | str) -> Path:
        """Write a file of the case."""
        path = self.here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path


Make = Callable[[Place], Any]


@dataclass(frozen=True)
class Case:
    """One command, the files that it meets, and how it may end.

    `writes` names what a command that ends with 0 may leave in its folder, `keeps` what one that fails may. `library`
    is a folder of the case that is importable (PYTHONPATH). `trusts` says that the command line itself asked for the
    user's code, `runs` that it asked for what the file names, `prints` that the user's code prints what it likes: only
    the last line is ours. `room` is how many bytes a file may have: writing more fails, as it does on a full disk.
    """

    name: str
    args: tuple[str, ...]
    make: Make
    exits: tuple[int, ...] = (1,)
    writes: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()
    library: str | None = None
    trusts: bool = False
    runs: bool = False
    prints: bool = False
    room: int | None = None
    environment: tuple[tuple[str, str], ...] = ()


def inspecting(name: str, model: str, content: Callable[[Place], bytes], exits: tuple[int, ...] = (1,)) -> Case:
    """Return the case of one file that is inspected."""
    return Case(name, ("inspect", model), lambda place: place.write(model, content(place)), exits)


def distinct(cases: Iterable[Case]) -> Iterator[Case]:
    """Yield cases, and raise where two have one name."""
    names = set()
    for case in cases:
        if case.name in names:
            raise ValueError(f"two cases are named {case.name!r}")
        names.add(case.name)
        yield case
