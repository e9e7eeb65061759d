"""Open a zip that torch wrote so that every reader sees the same members, none larger than its bytes in the file.

torch's reader (miniz, behind `record_offsets`) and Python's zipfile disagree about names in capitals, about
which of two directories counts and about where a member lies. What they see differently is refused, not guessed at.
torch writes members uncompressed (caffe2/serialize/inline_container.cc, `PyTorchStreamWriter::writeRecord`), so that a
compressed one is not torch's, and a file is never smaller than what it holds.
"""

from __future__ import annotations

import re
import zipfile
from typing import IO

DIRECTORY_LIMIT = 16 * 2**20
"""Bytes of the directory: some 10^5 members."""
_END, _END64, _LOCATOR = 22, 56, 20  # bytes of the records at a zip's end, without comments
_PART = re.compile(r"[^\x00-\x1f\x7f/\\]{1,255}")


class Damaged(ValueError):
    """Report that bytes that start like a pickle or an archive cannot be read to their end, or are not as declared."""


class Members:
    """Hold the checked members of a zip, by their names below the one folder that torch puts them in."""

    def __init__(self, stream: IO[bytes]) -> None:
        """Read and check the directory of `stream`, a seekable file. Raises Damaged."""
        _check_end(stream)
        try:
            self._zip = zipfile.ZipFile(stream)
        except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError) as error:
            raise Damaged(f"its zip archive cannot be read: {error}") from error
        infos = self._zip.infolist()
        self._infos = {_below_root(i.orig_filename): i for i in infos}
        if len({i.orig_filename.casefold() for i in infos}) < len(infos) or len(_roots(infos)) > 1:
            raise Damaged("its zip archive holds two members of the same name, or several roots")
        offsets = _check_places(stream, infos)
        _check_torch(stream, {_below_root(name): at for name, at in offsets.items()})

    def names(self) -> list[str]:
        """Return the names of all members, without the folder that all share."""
        return list(self._infos)

    def size(self, name: str) -> int:
        """Return a member's bytes."""
        return self._infos[name].file_size

    def open(self, name: str) -> IO[bytes]:
        """Open a member to read and to seek in."""
        try:
            return self._zip.open(self._infos[name])
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError) as error:
            raise Damaged(f"its member {name!r} cannot be read: {error}") from error

    def read(self, name: str, limit: int) -> bytes:
        """Return a member's bytes. Raises Damaged where there are more than `limit`, or where they are broken."""
        if self.size(name) > limit:
            raise Damaged(f"its member {name!r} has {self.size(name)} bytes, and {limit} are allowed")
        try:
            with self.open(name) as member:
                return member.read()
        except (zipfile.BadZipFile, EOFError, OSError) as error:
            raise Damaged(f"its member {name!r} cannot be read: {error}") from error


def _check_end(stream: IO[bytes]) -> None:
    """Raise Damaged unless the file ends with its only directory, where both kinds of end record say that it lies."""
    size = stream.seek(0, 2)
    stream.seek(max(0, size - _END))
    end = stream.read(_END)
    if len(end) < _END or not end.startswith(b"PK\5\6") or end[20:] != b"\0\0":
        raise Damaged("its zip archive cannot be read: it does not end with its directory (cut off, or with a comment)")
    at, length = int.from_bytes(end[16:20], "little"), int.from_bytes(end[12:16], "little")
    records = size - _END
    stream.seek(max(0, records - _LOCATOR))
    locator = stream.read(_LOCATOR) if records >= _LOCATOR + _END64 else b""
    if locator.startswith(b"PK\6\7"):
        records -= _LOCATOR + _END64
        stream.seek(records)
        end64 = stream.read(_END64)
        at64, length64 = int.from_bytes(end64[48:56], "little"), int.from_bytes(end64[40:48], "little")
        same = at in (at64, 0xFFFFFFFF) and length in (length64, 0xFFFFFFFF)
        placed = end64.startswith(b"PK\6\6") and int.from_bytes(locator[8:16], "little") == records
        if not (same and placed):
            raise Damaged("its zip archive cannot be read: it has two directories")
        at, length = at64, length64
    if at + length != records:
        raise Damaged("its zip archive cannot be read: it has two directories, or bytes before or after them")
    if length > DIRECTORY_LIMIT:
        raise Damaged("its zip archive has too many members")
    stream.seek(0)


def _below_root(name: str) -> str:
    """Return a member's name below its first folder. Raises Damaged for a name that readers could take for another."""
    parts = name.split("/")
    if len(parts) < 2 or not all(_PART.fullmatch(p) and p not in (".", "..") for p in parts):
        raise Damaged(f"its zip archive holds a member named {name[:80]!r}, which torch does not write")
    return "/".join(parts[1:])


def _roots(infos: list[zipfile.ZipInfo]) -> set[str]:
    return {i.orig_filename.split("/", 1)[0] for i in infos}


def _check_places(stream: IO[bytes], infos: list[zipfile.ZipInfo]) -> dict[str, int]:
    """Return where each member's bytes start; raise Damaged unless all are uncompressed and lie side by side."""
    starts, end = {}, 0
    for info in sorted(infos, key=lambda i: i.header_offset):
        if info.compress_type or info.file_size != info.compress_size or info.flag_bits & 1:
            raise Damaged(f"its member {info.filename[:80]!r} is compressed or encrypted; torch writes neither")
        stream.seek(info.header_offset)
        header = stream.read(30)
        if len(header) < 30 or info.header_offset < end:
            raise Damaged(f"its member {info.filename[:80]!r} lies in another, or outside the file")
        start = info.header_offset + 30 + sum(int.from_bytes(header[n : n + 2], "little") for n in (26, 28))
        starts[info.orig_filename], end = start, start + info.file_size
    if end > stream.seek(0, 2):
        raise Damaged("its zip archive is cut off")
    stream.seek(0)
    return starts


def _check_torch(stream: IO[bytes], starts: dict[str, int]) -> None:
    """Raise Damaged unless torch's own reader finds the same members at the same places."""
    from ..compat.torch import record_offsets

    try:
        found = record_offsets(stream)
    except (RuntimeError, ValueError) as error:  # ValueError: a name that is no UTF-8
        raise Damaged(f"its zip archive cannot be read: {str(error).splitlines()[0]}") from error
    finally:
        stream.seek(0)
    if found != starts:
        raise Damaged("its zip archive is read differently by torch and by Python")
