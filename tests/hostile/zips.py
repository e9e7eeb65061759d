"""Zip archives byte by byte: what Python's writer would not write."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache


@dataclass(frozen=True)
class Entry:
    """Hold one member; what is None is told truly. `packed` is content that is compressed already."""

    name: bytes
    content: bytes = b""
    method: int = 0
    packed: bytes | None = None
    size: int | None = None
    stored: int | None = None
    crc: int | None = None
    flags: int = 0
    local: bytes | None = None  # its name in the header before the content, where that differs


Entries = list[Entry]


def read(archive: bytes) -> Entries:
    """Return the members of a good archive."""
    with zipfile.ZipFile(io.BytesIO(archive)) as held:
        return [Entry(name.encode(), held.read(name)) for name in held.namelist()]


def pack(entries: Iterable[Entry], comment: bytes = b"", before: bytes = b"") -> bytes:
    """Write an archive."""
    body, directory = bytearray(before), bytearray()
    count = 0
    for entry in entries:
        header, central, content = _told(entry, len(body))
        body += header + content
        directory += central
        count += 1
    return bytes(body + directory + _end(count, len(directory), len(body), comment))


def _told(entry: Entry, offset: int) -> tuple[bytes, bytes, bytes]:
    content = entry.content if entry.packed is None else entry.packed
    size = len(entry.content) if entry.size is None else entry.size
    stored = len(content) if entry.stored is None else entry.stored
    crc = zlib.crc32(entry.content) if entry.crc is None else entry.crc
    local = entry.name if entry.local is None else entry.local
    shared = (20, entry.flags, entry.method, 0, 0, crc, stored, size)
    header = struct.pack("<4s5H3L2H", b"PK\3\4", *shared, len(local), 0) + local
    central = struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, *shared, len(entry.name), 0, 0, 0, 0, 0, offset) + entry.name
    return header, central, content


def _end(count: int, size: int, offset: int, comment: bytes = b"") -> bytes:
    return struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, size, offset, len(comment)) + comment


def two_directories(shown: Entries, loaded: Entries) -> bytes:
    """Write one archive whose directory depends on the reader.

    Python takes the one before the end record and gets `shown`, miniz the one where the record points and gets
    `loaded`. The members of both have the same names.
    """
    first = pack(shown)
    size = sum(46 + len(e.name) for e in shown)
    hidden = pack(loaded, before=first)
    start = len(hidden) - 22 - size
    shift = len(hidden) - 22  # where the shown members start
    offsets, body, directory = [], bytearray(), bytearray()
    for entry in shown:
        offsets.append(shift + len(body))
        header, _, content = _told(entry, 0)
        body += header + content
    concat = shift + len(body) - start  # what Python adds to every offset
    for entry, offset in zip(shown, offsets, strict=True):
        directory += _told(entry, offset - concat)[1]
    return hidden[:-22] + bytes(body + directory) + _end(len(shown), size, start)


@cache
def zeros(size: int) -> tuple[bytes, int]:
    """Return `size` zero bytes deflated, and their checksum; `size` is a multiple of 16 MiB."""
    block = bytes(16 << 20)
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    once = packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH)
    count, crc = size // len(block), 0
    for _ in range(count):
        crc = zlib.crc32(block, crc)
    return once * count + packer.flush(), crc


def bomb(name: bytes, size: int = 1 << 30, told: int | None = None) -> Entry:
    """Return a member that is `size` zeros once unpacked, and says that it is `told`."""
    packed, crc = zeros(size)
    return Entry(name, packed=packed, crc=crc, method=8, size=size if told is None else told)


def put(entries: Entries, *new: Entry) -> Entries:
    """Return members with new ones, in place of those of the same name."""
    names = {e.name for e in new}
    return [e for e in entries if e.name not in names] + list(new)


def _each(change: Callable[[Entry], Entry]) -> Callable[[Entries], bytes]:
    return lambda entries: pack([change(e) for e in entries])


TRICKS: dict[str, Callable[[Entries], bytes]] = {
    "no members": lambda e: pack([]),
    "an end record alone": lambda e: _end(0, 0, 0),
    "a directory beyond the end": lambda e: pack(e)[:-22] + _end(len(e), 100, 1 << 31),
    "65535 members promised": lambda e: pack(e)[:-22] + _end(65535, sum(46 + len(x.name) for x in e), 0),
    "sizes that lie up": _each(lambda e: replace(e, size=1 << 31, stored=1 << 31)),
    "sizes that lie down": _each(lambda e: replace(e, size=1, stored=1)),
    "sizes of 2^32 - 1": _each(lambda e: replace(e, size=0xFFFFFFFF, stored=0xFFFFFFFF)),
    "checksums that lie": _each(lambda e: replace(e, crc=1)),
    "unknown compression": _each(lambda e: replace(e, method=99)),
    "lzma announced": _each(lambda e: replace(e, method=14)),
    "encrypted members": _each(lambda e: replace(e, flags=1)),
    "every member twice": lambda e: pack([*e, *e]),
    "every member again in capitals": lambda e: pack([*e, *(replace(x, name=x.name.upper()) for x in e)]),
    "other names in the local headers": _each(lambda e: replace(e, local=b"x" * len(e.name))),
    "no root": _each(lambda e: replace(e, name=e.name.split(b"/", 1)[1])),
    "two roots": lambda e: pack([*e, *(replace(x, name=b"other/" + x.name.split(b"/", 1)[1]) for x in e)]),
    "a root of dots": _each(lambda e: replace(e, name=b"../" + e.name.split(b"/", 1)[1])),
    "an absolute root": _each(lambda e: replace(e, name=b"/" + e.name)),
    "backslashes": _each(lambda e: replace(e, name=e.name.replace(b"/", b"\\"))),
    "NUL in names": _each(lambda e: replace(e, name=e.name + b"\0.txt")),
    "escape bytes in names": lambda e: pack([*e, Entry(e[0].name.split(b"/")[0] + b"/\x1b[31mred\x07", b"x")]),
    "a member of 65535 letters": lambda e: pack([*e, Entry(e[0].name.split(b"/")[0] + b"/" + b"x" * 65000, b"x")]),
    "names that are no UTF-8": lambda e: pack([*e, Entry(e[0].name.split(b"/")[0] + b"/\xff\xfe", b"x", flags=0x800)]),
    "65000 members": lambda e: pack([*e, *(Entry(e[0].name.split(b"/")[0] + b"/extra/%d" % i) for i in range(65000))]),
    "a comment with an end record": lambda e: pack(e, comment=_end(0, 0, 0)),
}
"""What is done to the whole of an archive."""


def cuts(content: bytes, parts: int = 6) -> dict[str, bytes]:
    """Return what is left of a file that was cut off at several places."""
    return {f"cut at {i}/{parts}": content[: len(content) * i // parts] for i in range(1, parts)}
