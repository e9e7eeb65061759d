"""A MODEL as it was found at the door: what it is, and how it may be opened. Everything behind the door takes one."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import Code, LnrewriteError, Untrusted

Factory = str | Callable[[], object]


class Format(enum.StrEnum):
    """Name the forms a MODEL may have; a `pickle` needs more than tensors to load, whatever it holds."""

    PROGRAM = "program"
    STATE_DICT = "state_dict"
    PICKLE = "pickle"
    TORCHSCRIPT = "torchscript"
    SAFETENSORS = "safetensors"
    ONNX = "onnx"
    TRANSFORMERS = "transformers"
    CALLABLE = "callable"
    DEMO = "demo"


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """Hold how a MODEL may be opened: what the commands that read one share.

    factory: what builds the network of a file of weights, `pkg.module:callable` or a callable without arguments.
    inputs: example inputs by name or position, or `--input` specifications (strings); None infers them.
    """

    factory: Factory | None = None
    trust_pickle: bool = False
    trust_remote_code: bool = False
    inputs: Mapping[str, Any] | Sequence[Any] | None = None
    device: str = "cpu"
    seed: int = 0

    @property
    def specifications(self) -> list[str]:
        """Return the `--input` specifications, none where inputs were given as values, or not at all."""
        given = [] if self.inputs is None or isinstance(self.inputs, Mapping) else list(self.inputs)
        return given if all(isinstance(item, str) for item in given) else []


Stamp = tuple[tuple[str, int, int, int], ...]
"""Names, inodes, sizes and times of change of what was looked at: another one tells that something else lies there."""


def stamp_of(path: Path | None) -> Stamp:
    """Return the stamp of a file, or of the files of a folder; of a name there is none. Raises OSError."""
    if path is None:
        return ()
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    held = [(file.name, file.stat()) for file in files if file.exists()]
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in held)


@dataclass(frozen=True, slots=True)
class Source:
    """Describe what a MODEL is: its format, its path (None where it is a name), and what loading it would run.

    `name` is the MODEL as it was given; `unsafe` holds the `module.name`s and other hazards that only --trust-pickle
    allows, empty for plain weights; `how` says how it may be opened; `stamp` is of the file as it was looked at;
    `graphs` are the ONNX files of a folder of such.
    `identify` makes one.
    """

    format: Format
    name: str
    path: Path | None = None
    unsafe: tuple[str, ...] = ()
    how: OpenOptions = OpenOptions()
    stamp: Stamp = ()
    graphs: tuple[Path, ...] = ()

    @property
    def graph(self) -> Path:
        """Return the one ONNX file that this is. Raises LnrewriteError LN034 for a folder of several."""
        if len(self.graphs) > 1:
            names = ", ".join(path.name for path in self.graphs)
            remedy = f"name one of them, such as {self.graphs[0]}"
            raise LnrewriteError(Code.LN034, f"model {self.name!r}", f"it holds several graphs: {names}", remedy)
        return self.graphs[0] if self.graphs else self.file

    @property
    def file(self) -> Path:
        """Return where the file or folder lies, of a MODEL that is one."""
        assert self.path is not None, self
        return self.path

    def named_after(self, what: str) -> str:
        """Return the name, in the current folder, of what is made of this MODEL: `llama.peri`, `model.peri.pt2`."""
        folder = self.format is Format.TRANSFORMERS or bool(self.graphs)
        suffix = "" if folder else ".onnx" if self.format is Format.ONNX else ".pt2"
        if self.path is None:
            return f"{self.name.rpartition(':')[2]}.{what}{suffix}"
        name = self.path.absolute().name if folder else self.path.stem
        return f"{name}.{what}{suffix}"

    def check_trusted(self) -> None:
        """Raise Untrusted (LN012) where loading would run code that nobody trusted."""
        if self.unsafe and not self.how.trust_pickle:
            raise Untrusted(f"model {self.name!r}", self.unsafe)
