"""Hostile data, input specifications, and runs of heal."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from typing import Any

from . import zips
from .goods import FACTORY, HEAL, array, saved, spread
from .pickled import PAYLOAD, payloads
from .place import SECRET, Case, Place
from .weights import safe
from .zips import Entry


def fed(name: str, file: str, content: Callable[[Place], bytes], exits: tuple[int, ...] = (1,)) -> Case:
    """Return the case of calibration data for the good program."""

    def make(place: Place) -> None:
        place.write("m.pt2", place.goods.pt2)
        place.write(file, content(place))

    args = ("convert", "m.pt2", "--to", "peri", "-o", "o.pt2", "--calibrate", file, "--no-verify")
    return Case(f"data: {name}", args, make, exits, writes=("o.pt2",))


def npy(header: bytes, data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    """Return an .npy of this header."""
    length = struct.pack("<H" if version == b"\x01\x00" else "<I", len(header) & 0xFFFF if version == b"\x01\x00" else len(header))
    return b"\x93NUMPY" + version + length + header + data


def _head(shape: str, descr: str = "'<f4'") -> bytes:
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()


def data_cases() -> Iterator[Case]:
    """Arrays, pickles and texts."""
    headers = {
        "code": b"__import__('os').mkdir('x')\n", "a shape of 2^40": _head("(1099511627776, 16)"), "a shape of 2^70": _head(f"({1 << 70},)"), "a negative shape": _head("(-1, 4, 16)"),
        "a shape of text": _head("'x'"), "objects": _head("(1,)", "'|O'"), "a dtype of code": _head("(1,)", "'__import__(\"os\")'"), "a dtype of records": _head("(1,)", "[('a', '<f4')]"),
        "a dtype of escape bytes": _head("(1,)", "'\\x1b[31m'"), "brackets": b"(" * 60_000 + b"\n", "no keys": b"{}\n", "a tower": b"{'descr': '<f4', 'fortran_order': False, 'shape': (9**9**9,)}\n",
        "2^30 dimensions": _head("(" + "1," * 20_000 + ")"), "NUL": b"\0" * 64, "a list": b"[]\n", "texts": _head("(2,)", "'<U4'"), "dates": _head("(2,)", "'<M8[s]'"),
    }  # fmt: skip
    for name, header in headers.items():
        yield fed(f"npy, header: {name}", "d.npy", lambda place, h=header: npy(h, b"\0" * 64))  # type: ignore[misc]
        yield fed(f"npz, header: {name}", "d.npz", lambda place, h=header: zips.pack([Entry(b"x.npy", npy(h, b"\0" * 64))]))  # type: ignore[misc]
    yield fed("npy, a header of 2^31", "d.npy", lambda place: b"\x93NUMPY\x02\x00" + struct.pack("<I", 1 << 31) + b"x")
    yield fed("npy, version 99", "d.npy", lambda place: npy(_head("(1,)"), version=b"\x63\x00"))
    for name in payloads("x"):
        yield fed(f"npy, pickle: {name}", "d.npy", lambda place, n=name: payloads(place.marker)[n])  # type: ignore[misc]
        yield fed(f"pt, pickle: {name}", "d.pt", lambda place, n=name: zips.pack(  # type: ignore[misc]
            [Entry(b"a/data.pkl", payloads(place.marker)[n]), Entry(b"a/version", b"3\n"), Entry(b"a/byteorder", b"little")]))  # fmt: skip
    for name in ("a global", "eval", "an object", "lists in lists"):
        inner = _head("(1,)", "'|O'")
        yield fed(f"npy, objects of {name}", "d.npy", lambda place, n=name, h=inner: npy(h, payloads(place.marker)[n]))  # type: ignore[misc]
        yield fed(f"npz, objects of {name}", "d.npz", lambda place, n=name, h=inner: zips.pack([Entry(b"x.npy", npy(h, payloads(place.marker)[n]))]))  # type: ignore[misc]
    for name, trick in zips.TRICKS.items():
        entries = [Entry(b"root/x.npy", array())]
        yield fed(f"npz, zip: {name}", "d.npz", lambda place, t=trick, e=entries: t(e), (0, 1))  # type: ignore[misc]
    yield fed("npz, a bomb", "d.npz", lambda place: zips.pack([zips.bomb(b"x.npy")]))
    yield fed("npz, a bomb that is an array", "d.npz", lambda place: zips.pack([_big_array()]))
    yield fed("pt, 2^33 numbers of stride 0", "d.pt", lambda place: saved(spread(1 << 27, 4, 16)))
    yield fed("pt, a bomb", "d.pt", lambda place: zips.pack([zips.bomb(b"a/data.pkl"), Entry(b"a/version", b"3\n")]))
    for i in (1, 3, 5):
        yield fed(f"npy, cut at {i}/6", "d.npy", lambda place, i=i: zips.cuts(array())[f"cut at {i}/6"])  # type: ignore[misc]
    for name, content in {"empty": b"", "no UTF-8": b"\xff\xfe" * 1000, "NUL": b"\0" * 10_000, "escape bytes": b"\x1b[31m" * 1000, "deep": safe(b'{"a":' * 50_000, b"")}.items():
        for suffix in ("txt", "npy", "npz", "pt", "safetensors", "exe"):
            yield fed(f"{suffix}, {name}", f"d.{suffix}", lambda place, c=content: c)  # type: ignore[misc]
    for name, value in {"NaN": float("nan"), "infinite": float("inf"), "huge": 1e38}.items():
        yield fed(f"npy, {name} numbers", "d.npy", lambda place, v=value: _filled(v), (1,))  # type: ignore[misc]
    yield fed("good", "d.npy", lambda place: array(), (0,))


def _filled(value: float) -> bytes:
    import numpy as np

    stream = io.BytesIO()
    np.save(stream, np.full((16, 4, 16), value, dtype="float32"))
    return stream.getvalue()


def _big_array() -> Entry:
    """Return 1 GB of an array in 1 MB."""
    import zlib

    head = npy(_head("(268435456,)"))
    packed, crc = zips.zeros(1 << 30)
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    start = packer.compress(head) + packer.flush(zlib.Z_FULL_FLUSH)
    block, crc = bytes(16 << 20), zlib.crc32(head)
    for _ in range(64):
        crc = zlib.crc32(block, crc)
    return Entry(b"x.npy", packed=start + packed, crc=crc, method=8, size=len(head) + (1 << 30))


SPECS = (
    "x=float32[2,4,16]" * 200, "x=float32[-1,4,16]", "x=float32[99999999999,4,16]", "x=float32[1e9,4,16]", "x=os.system[2]", "x=float32", "x=", "=float32[2]", "x=float32[]",
    "x=float32[2,4", "x=float32[9**9**9]", "x=float32[2,4,16];import os", "\x1b[31m=float32[2,4,16]", "y=float32[2,4,16]", "x=object[2,4,16]", "x=float32[0,4,16]", "x=int64[2,4,16]",
    "secret.bin", "evil.pt", "evil.npz", "/dev/zero", "no.npz", "", "x=complex256[2,4,16]", "x=float32[1048576,1048576,16]", "x=float32[" + "1," * 5000 + "1]", "\u202e",
)  # fmt: skip


def spec_cases() -> Iterator[Case]:
    """Specifications of inputs."""
    for spec in SPECS:

        def make(place: Place) -> None:
            place.write("nets.py", FACTORY)
            place.write("secret.bin", SECRET)
            place.write("evil.pt", zips.pack([Entry(b"a/data.pkl", payloads(place.marker)["a global"])]))
            place.write("evil.npz", zips.pack([Entry(b"x.npy", npy(_head("(1,)", "'|O'"), payloads(place.marker)["a global"]))]))

        shown = spec[:40].encode("unicode_escape").decode()
        harmless = spec == "x=int64[2,4,16]"  # the net computes with integers as well
        yield Case(f"input: {shown!r}", ("inspect", "nets:net", "--input", spec), make, (0,) if harmless else (1, 2), trusts=True)


def run_cases() -> Iterator[Case]:
    """Runs of heal that are gone on with: each file of a run, foreign, cut or gone."""
    contents: dict[str, Callable[[bytes, Place], bytes | None]] = {
        "a pickle that runs": lambda c, p: payloads(p.marker)["a global"], "a zip of a pickle": lambda c, p: zips.pack([Entry(b"a/data.pkl", payloads(p.marker)["a global from the stack"])]),
        "empty": lambda c, p: b"", "cut": lambda c, p: c[: len(c) // 2], "gone": lambda c, p: None, "junk": lambda c, p: b"\xff\x1b[31m" * 50, "deep": lambda c, p: b"[" * 100_000,
        "an object": lambda c, p: b'{"a": 1}', "a bomb": lambda c, p: zips.pack([zips.bomb(b"a/data.pkl")]),
    }  # fmt: skip
    resume = (*HEAL, "--resume")

    def hurt(place: Place, kind: str, change: Callable[[bytes, Place], bytes | None]) -> None:
        place.write("m.pt2", place.goods.pt2)
        place.write("data.npy", array())
        for name, content in place.goods.run.items():
            wanted = {"run.json": "run.json", "log.jsonl": "log.jsonl"}.get(name, "index" if name.endswith((".metadata", ".json")) else "weights")
            made = change(content, place) if wanted == kind else content
            if made is not None:
                place.write(f"o.pt2.run/{name}", made)

    for kind in ("run.json", "log.jsonl", "index", "weights"):
        for name, change in contents.items():
            loose = kind == "log.jsonl" or name == "gone"
            yield Case(f"heal: {kind} of the run is {name}", resume, lambda place, k=kind, c=change: hurt(place, k, c),  # type: ignore[misc]
                       (0, 1) if loose else (1,), writes=("o.pt2", "o.pt2.run"))  # fmt: skip
    inputs: Callable[[Place], Any] = lambda place: (place.write("m.pt2", place.goods.pt2), place.write("data.npy", array()))  # noqa: E731
    yield Case("heal: resume without a run", resume, inputs)
    yield Case("heal: resume a junk folder", (*resume, "--run", "junk"), lambda p: (inputs(p), p.write("junk/precious", "x"), p.write("junk/global-000001/x", "x")))
    yield Case("heal: a run that is a file", (*HEAL, "--run", "data.npy"), inputs, (1, 2))
    yield Case("heal: resume a run of code", (*resume, "--run", "junk"), lambda p: (inputs(p), p.write("junk/payload.py", PAYLOAD.replace("{marker!r}", repr(p.marker)))))
    for option, value in (("--steps", "-1"), ("--steps", str(10**30)), ("--lr", "nan"), ("--lr", "-1"), ("--batch-size", "0"), ("--batch-size", "-5"), ("--save-steps", "0"), ("--rehearse", "7"),
                          ("--weight-decay", "inf"), ("--losses", "task=nan"), ("--losses", "__import__('os')=1"), ("--length", "-4"), ("--accumulate", "0"), ("--ramp", "-3")):  # fmt: skip
        yield Case(f"heal: {option} {value}", (*HEAL, option, value), inputs, (1, 2))
