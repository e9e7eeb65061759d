"""Hostile files of weights: torch.save's zips and older files, safetensors."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

from . import zips
from .goods import FACTORY
from .pickled import payloads
from .place import Case, Place
from .zips import Entry


def weighed(name: str, content: Callable[[Place], bytes], exits: tuple[int, ...] = (1,)) -> Case:
    """Return the case of a file of weights for a good factory."""

    def make(place: Place) -> None:
        place.write("nets.py", FACTORY)
        place.write("w.bin", content(place))

    return Case(name, ("inspect", "w.bin", "--factory", "nets:net"), make, exits, trusts=True)


def pickle_cases() -> Iterator[Case]:
    """Every hostile pickle, in each place where torch.save puts one."""
    for name in payloads("x"):

        def zipped(place: Place, name: str = name) -> bytes:
            evil = Entry(b"archive/data.pkl", payloads(place.marker)[name])
            return zips.pack(zips.put(zips.read(place.goods.pt), evil))

        def legacy(place: Place, name: str = name) -> bytes:
            start = place.goods.legacy[:21]  # the pickle of the magic number, and that of the protocol
            return bytes(start[:15] + b"\x80\x02M\xe9\x03." + b"\x80\x02}." + payloads(place.marker)[name])

        yield weighed(f"pt: pickle: {name}", zipped)
        yield weighed(f"pt: before zips: {name}", legacy)
        yield weighed(f"pt: a bare pickle: {name}", lambda place, name=name: payloads(place.marker)[name])  # type: ignore[misc]


def zip_cases() -> Iterator[Case]:
    """What is done to the zip."""
    for name, trick in zips.TRICKS.items():
        yield weighed(f"pt: zip: {name}", lambda place, trick=trick: trick(zips.read(place.goods.pt)), (0, 1))  # type: ignore[misc]
    for i in range(1, 6):
        yield weighed(f"pt: cut at {i}/6", lambda place, i=i: zips.cuts(place.goods.pt)[f"cut at {i}/6"])  # type: ignore[misc]
        yield weighed(f"pt: before zips, cut at {i}/6", lambda place, i=i: zips.cuts(place.goods.legacy)[f"cut at {i}/6"])  # type: ignore[misc]

    def evil(place: Place, member: bytes) -> list[Entry]:
        return zips.put(zips.read(place.goods.pt), Entry(member, payloads(place.marker)["a global"]))

    for member in (b"archive/DATA.PKL", b"archive/Data.pkl", b"archive/data/../data.pkl", b"archive//data.pkl", b"other/data.pkl",
                   b"data.pkl", b"archive/constants.pkl", b"archive/x.pkl", b"archive/data.pkl\0"):  # fmt: skip
        shown = member.decode().encode("unicode_escape").decode()
        yield weighed(f"pt: another pickle as {shown}", lambda place, m=member: zips.pack(evil(place, m)), (0, 1))  # type: ignore[misc]

        def without(place: Place, member: bytes = member) -> bytes:
            return zips.pack(e for e in evil(place, member) if e.name != b"archive/data.pkl" or e.name == member)

        yield weighed(f"pt: the only pickle is {shown}", without)
    yield weighed("pt: zip: two directories", lambda place: zips.two_directories(zips.read(place.goods.pt), [
        Entry(e.name, payloads(place.marker)["a global"]) if e.name.endswith(b"data.pkl") else e for e in zips.read(place.goods.pt)]))  # fmt: skip
    for entry in (b"archive/data.pkl", b"archive/data/0", b"archive/extra", b"archive/byteorder", b"archive/version"):
        for told in (None, 10):
            yield weighed(f"pt: a bomb of 1 GB as {entry.decode()}, it says {told or 'so'}", lambda place, e=entry, t=told: zips.pack(
                zips.put(zips.read(place.goods.pt), zips.bomb(e, told=t))), (0, 1) if entry.endswith((b"extra", b"version")) else (1,))  # type: ignore[misc]  # fmt: skip
    yield weighed("pt: good, packed anew", lambda place: zips.pack(zips.read(place.goods.pt)), (0,))
    yield weighed("pt: before zips, good", lambda place: place.goods.legacy, (0,))


def tensor_cases() -> Iterator[Case]:
    """State dicts whose tensors lie, and what is no state dict."""
    lies: dict[str, tuple[Any, ...]] = {
        "more than the storage": ((1 << 40,), (1,)), "2^62 elements of stride 0": ((1 << 62,), (0,)), "2^33 elements of stride 0": ((1 << 33,), (0,)), "negative sizes": ((-4,), (1,)),
        "negative strides": ((4,), (-1,)), "sizes of text": (("x",), (1,)), "more strides than sizes": ((4,), (1, 1, 1)), "2^70": ((1 << 70,), (1,)),
        "ten thousand dimensions": ((1,) * 10_000, (1,) * 10_000),
    }  # fmt: skip
    for name, (size, stride) in lies.items():

        def make(place: Place, size: Any = size, stride: Any = stride) -> bytes:
            return zips.pack(zips.put(zips.read(place.goods.pt), Entry(b"archive/data.pkl", _rebuilt(size, stride))))

        yield weighed(f"pt: a tensor of {name}", make)
    values: dict[str, bytes] = {
        "a number": b"\x80\x02K\x07.", "None": b"\x80\x02N.", "an empty dict": b"\x80\x02}.", "a dict of numbers": b"\x80\x02}K\x01K\x02s.",
        "a list": b"\x80\x02].", "a text": b"\x80\x02X\x01\0\0\0x.", "a dict of itself": b"\x80\x02}q\0X\x01\0\0\0ah\0s.",
        "names that are no text": b"\x80\x02}(K\x01K\x02tK\x02s.", "a state_dict of None": b"\x80\x02}X\x0a\0\0\0state_dictNs.",
    }  # fmt: skip
    for name, content in values.items():
        yield weighed(f"pt: it holds {name}", lambda place, c=content: zips.pack(zips.put(zips.read(place.goods.pt), Entry(b"archive/data.pkl", c))))  # type: ignore[misc]


def _rebuilt(size: tuple[Any, ...], stride: tuple[Any, ...]) -> bytes:
    """Return the pickle of a state dict of one tensor over storage 0."""
    import pickle

    def held(value: Any) -> bytes:
        return pickle.dumps(value, 2)[2:-1]

    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\n" + held("0") + held("cpu") + held(256) + b"tQ"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\0" + held(size) + held(stride) + b"\x89ccollections\nOrderedDict\n)RtR"
    return b"\x80\x02}" + held("first.weight") + tensor + b"s."


def _header(place: Place) -> tuple[dict[str, Any], bytes]:
    content = place.goods.safetensors
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def safe(header: Any, data: bytes, length: int | None = None) -> bytes:
    """Return a safetensors file with this header (JSON, or bytes as they are)."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def safetensors_cases() -> Iterator[Case]:
    """Headers that lie."""
    entry: dict[str, dict[str, Any]] = {
        "offsets beyond": {"data_offsets": [0, 1 << 40]}, "offsets backwards": {"data_offsets": [64, 0]}, "offsets negative": {"data_offsets": [-64, 0]},
        "offsets of 2^70": {"data_offsets": [0, 1 << 70]}, "offsets of text": {"data_offsets": ["0", "64"]}, "one offset": {"data_offsets": [0]},
        "offsets null": {"data_offsets": None}, "sizes huge": {"shape": [1 << 40, 1 << 40]}, "sizes negative": {"shape": [-1]}, "sizes of text": {"shape": "x"},
        "sizes of 2^63": {"shape": [1 << 63]}, "a dtype of code": {"dtype": "__import__('os')"}, "a dtype of escape bytes": {"dtype": "\x1b[31m"},
        "dtype F64": {"dtype": "F64"}, "dtype null": {"dtype": None}, "dtype a list": {"dtype": []}, "a shape of a product over 2^64": {"shape": [1 << 33, 1 << 33]},
        "more keys": {"use_pickle": True}, "sizes of ten thousand dimensions": {"shape": [1] * 10_000}, "sizes 1e400": {"shape": [float("inf")]},
    }  # fmt: skip
    for name, values in entry.items():

        def lying(place: Place, values: dict[str, Any] = values) -> bytes:
            header, data = _header(place)
            header["first.weight"] |= values
            return safe(header, data)

        loose = name in ("more keys", "sizes of ten thousand dimensions")
        yield weighed(f"safetensors: {name}", lying, (0, 1) if loose else (1,))
    whole: dict[str, Callable[[Place], bytes]] = {
        "deep JSON": lambda p: safe(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b""), "a list": lambda p: safe([], b""), "null": lambda p: safe(None, b""),
        "a header of 2^63": lambda p: safe({}, b"", 1 << 63), "a header of 90 MB": lambda p: safe({}, b"", 90 << 20), "no tensors": lambda p: safe({}, b""),
        "a header of spaces": lambda p: safe(b"{" + b" " * (60 << 20) + b"}", b""), "a key twice": lambda p: safe(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"\0" * 4),
        "metadata of numbers": lambda p: safe(_header(p)[0] | {"__metadata__": {"a": 7}}, _header(p)[1]), "metadata a list": lambda p: safe(_header(p)[0] | {"__metadata__": []}, _header(p)[1]),
        "overlapping tensors": lambda p: safe({n: (v | {"data_offsets": [0, v["data_offsets"][1] - v["data_offsets"][0]]}) for n, v in _header(p)[0].items()}, _header(p)[1]),
        "holes between": lambda p: safe({n: (v | {"data_offsets": [x + 64 for x in v["data_offsets"]]}) for n, v in _header(p)[0].items()}, b"\0" * 64 + _header(p)[1]),
        "names of escape bytes": lambda p: safe({f"\x1b[31m{n}": v for n, v in _header(p)[0].items()}, _header(p)[1]), "names with NUL": lambda p: safe({f"{n}\0": v for n, v in _header(p)[0].items()}, _header(p)[1]),
        "names of 5000 letters": lambda p: safe({n + "x" * 5000: v for n, v in _header(p)[0].items()}, _header(p)[1]), "names of right to left": lambda p: safe({f"\u202e{n}": v for n, v in _header(p)[0].items()}, _header(p)[1]),
        "100000 tensors": lambda p: safe({f"t{i}": {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i in range(100_000)}, b"\0" * 400_000),
        "an entry a number": lambda p: safe({"a": 7}, b""), "no UTF-8": lambda p: safe(b'{"\xff\xfe": {}}', b""), "NaN weights": lambda p: safe(_header(p)[0], b"\xff" * len(_header(p)[1])), "surrogates": lambda p: safe(b'{"\\ud800": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"\0" * 4),
    }  # fmt: skip
    for name, make in whole.items():
        yield weighed(f"safetensors: {name}", make, (0, 1) if name in ("metadata of numbers", "metadata a list") else (1,))
    for i in range(1, 6):
        yield weighed(f"safetensors: cut at {i}/6", lambda place, i=i: zips.cuts(place.goods.safetensors)[f"cut at {i}/6"])  # type: ignore[misc]
    yield weighed("safetensors: good", lambda place: place.goods.safetensors, (0,))
