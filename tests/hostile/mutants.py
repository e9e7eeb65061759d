"""Random changes that keep a file's structure: members, JSON nodes, headers, protobuf fields, values of a config."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from . import zips
from .archives import WEIGHTS
from .checkpoints import folder
from .graphs import onnx
from .pickled import payloads
from .place import Case, Place, inspecting
from .weights import _header, safe, weighed
from .zips import Entry

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 7, 255, 1 << 31, 1 << 40, (1 << 63) - 1, 1 << 64, 1e308, float("nan"), float("inf"), -0.5, "", "x", "\x1b[31m", "\0", "\u202e", "x" * 4000, "../x", "/etc/passwd",
    "__import__('os')", [], {}, [[]], {"a": 1}, "9**9", "s0", "float32", 6, 99,
)  # fmt: skip


def mutants_of(seed: int, count: int) -> Iterator[Case]:
    """Yield `count` cases: the same ones for the same seed, each by its own number."""
    for i in range(count):
        kind = list(KINDS)[i % len(KINDS)]
        yield KINDS[kind](f"mutant {seed}.{i} of {kind}", random.Random(f"{seed}.{i}"))


def json_mutant(node: Any, random: random.Random, times: int | None = None) -> Any:
    """Return JSON with one to three nodes changed, dropped, doubled or exchanged."""
    held = [copy.deepcopy(node)]
    for _ in range(times or random.choice((1, 1, 1, 2, 3))):
        spots = list(_spots(held))
        parent, key = random.choice(spots)
        doing = random.randrange(6)
        if doing == 0 and isinstance(parent, list) and parent is not held:
            parent.insert(key, copy.deepcopy(parent[key]))
        elif doing == 1 and parent is not held:
            del parent[key]
        elif doing == 2:
            other, there = random.choice(spots)
            parent[key] = copy.deepcopy(other[there])
        elif doing == 3 and isinstance(parent, dict):
            parent[str(random.choice(ODD))] = parent.pop(key)
        elif doing == 4 and isinstance(parent[key], int | float):
            parent[key] = random.choice((-parent[key], parent[key] + 1, parent[key] * 2, parent[key] // 2 if parent[key] == parent[key] else 0))
        else:
            parent[key] = copy.deepcopy(random.choice(ODD))
    return held[0]


def _spots(node: Any) -> Iterator[tuple[Any, Any]]:
    keys: Any = node.keys() if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in list(keys):
        yield node, key
        yield from _spots(node[key])


def bytes_mutant(content: bytes, random: random.Random) -> bytes:
    """Return bytes with a few of them changed, cut out or doubled."""
    held = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 5))):
        at = random.randrange(len(held) + 1)
        doing = random.randrange(4)
        if doing == 0 and at < len(held):
            held[at] ^= 1 << random.randrange(8)
        elif doing == 1:
            del held[at : at + random.choice((1, 4, 64, 1000))]
        elif doing == 2:
            held[at:at] = random.randbytes(random.choice((1, 4, 64)))
        else:
            held[at : at + 8] = random.choice((b"\xff" * 8, b"\0" * 8, b"\x7f" * 8))
    return bytes(held)


def _entries(entries: zips.Entries, random: random.Random, evil: bytes) -> bytes:
    """Return an archive with one thing done to one member, or to the whole."""
    at = random.randrange(len(entries))
    chosen = entries[at]
    doing = random.randrange(8)
    if doing == 0:
        return zips.TRICKS[random.choice([t for t in zips.TRICKS if t[0] != "6"])](entries)
    if doing == 1:
        entries = [*entries[:at], *entries[at + 1 :]]
    elif doing == 2:
        name = random.choice((chosen.name.upper(), chosen.name + b"x", chosen.name.replace(b"/", b"//", 1), random.choice(entries).name))
        entries = [*entries, Entry(name, random.choice((evil, b"", chosen.content)))]
    elif doing == 3:
        entries[at] = Entry(chosen.name, evil)
    elif doing == 4:
        entries[at] = Entry(chosen.name, random.choice(entries).content)
    elif chosen.name.endswith(b"json"):
        entries[at] = Entry(chosen.name, json.dumps(json_mutant(json.loads(chosen.content), random)).encode())
    else:
        entries[at] = Entry(chosen.name, bytes_mutant(chosen.content, random))
    packed = zips.pack(entries)
    return bytes_mutant(packed, random) if random.random() < 0.1 else packed


def _program(name: str, random: random.Random) -> Case:
    def make(place: Place) -> bytes:
        entries = zips.read(place.goods.pt2)
        if random.random() < 0.5:  # most of the bytes are weights, most of what matters is JSON
            graph = [i for i, e in enumerate(entries) if e.name.endswith((b"model.json", WEIGHTS.encode()))]
            at = random.choice(graph)
            entries[at] = Entry(entries[at].name, json.dumps(json_mutant(json.loads(entries[at].content), random)).encode())
            return zips.pack(entries)
        return _entries(entries, random, random.choice(list(payloads(place.marker).values())))

    return inspecting(name, "m.pt2", make, (0, 1))


def _state(name: str, random: random.Random) -> Case:
    def make(place: Place) -> bytes:
        if random.random() < 0.3:
            return bytes_mutant(place.goods.legacy, random)
        return _entries(zips.read(place.goods.pt), random, random.choice(list(payloads(place.marker).values())))

    return weighed(name, make, (0, 1))


def _safe(name: str, random: random.Random) -> Case:
    def make(place: Place) -> bytes:
        header, data = _header(place)
        if random.random() < 0.2:
            return bytes_mutant(place.goods.safetensors, random)
        return safe(json_mutant(header, random), data if random.random() < 0.8 else bytes_mutant(data, random))

    return weighed(name, make, (0, 1))


def _graph(name: str, random: random.Random) -> Case:
    def change(model: Any, place: Place) -> Any:
        for _ in range(random.choice((1, 1, 2, 3))):
            message_mutant(model, random)
        content = model.SerializeToString()
        return bytes_mutant(content, random) if random.random() < 0.1 else content

    command = random.choice((("inspect", "m.onnx"), ("opt", "m.onnx", "--preset", "exact", "-o", "o.onnx")))
    case = onnx(name, change, (0, 1), command)
    return Case(name, case.args, case.make, case.exits, ("o.onnx", "o.onnx.data"))


def message_mutant(message: Any, random: random.Random) -> None:
    """Change one field somewhere in a protobuf message, in place."""
    while True:
        fields = [f for f, _ in message.ListFields()]
        if not fields or random.random() < 0.1:
            fields = list(message.DESCRIPTOR.fields)
        field = random.choice(fields)
        several = getattr(field, "is_repeated", None)
        several = field.label == 3 if several is None else several() if callable(several) else several
        value = getattr(message, field.name)
        if field.message_type is None:
            return _scalar(message, field, value if several else None, random)
        if several:
            if not len(value) or random.random() < 0.15:
                doing = random.randrange(3)
                if doing == 0 and len(value):
                    del value[random.randrange(len(value))]
                elif doing == 1 and len(value):
                    value.add().CopyFrom(random.choice(list(value)))
                else:
                    value.add()
                return None
            value = random.choice(list(value))
        message = value


def _scalar(message: Any, field: Any, repeated: Any, random: random.Random) -> None:
    kinds: dict[int, tuple[Any, ...]] = {9: ("", "x", "\x1b[31m", "h0", "x" * 4000, "\0"), 12: (b"", b"\xff" * 16, b"\x1b[31m"), 6: (0.0, -1.0, float("nan"), float("inf"), 1e38), 5: (0.0, -1.0, float("nan"), 1e300)}
    whole = (0, 1, 2, 3, 7, 8, 11, 16, 99, 1 << 20, (1 << 31) - 1, -1, -(1 << 31), 1 << 40, -(1 << 62))
    fits = {3: whole, 1: whole[:12], 2: whole, 4: whole[:12], 8: whole[:12], 10: whole}.get(field.cpp_type, whole)
    if field.cpp_type == 9:
        fits = kinds[12] if field.type == 12 else kinds[9]
    elif field.cpp_type in (5, 6):
        fits = kinds[field.cpp_type]
    value = random.choice(fits)
    try:
        if repeated is None:
            setattr(message, field.name, value)
        elif len(repeated) and random.random() < 0.7:
            repeated[random.randrange(len(repeated))] = value
        else:
            repeated.append(value)
    except (TypeError, ValueError):
        message.ClearField(field.name)


def _checkpoint(name: str, random: random.Random) -> Case:
    def change(files: Any, place: Place) -> None:
        file = random.choice(("config.json", "config.json", "config.json", *sorted(files)))
        content = files[file]
        if file.endswith(".json") and random.random() < 0.9:
            files[file] = json.dumps(json_mutant(json.loads(content), random)).encode()
        else:
            files[file] = bytes_mutant(content, random)

    command = random.choice((("inspect", "f"), ("inspect", "f"), ("opt", "f", "--preset", "exact", "-o", "o")))
    case = folder(name, change, (0, 1), command)
    return Case(name, case.args, case.make, case.exits, ("o",))


KINDS: dict[str, Callable[[str, random.Random], Case]] = {
    "pt2": _program, "pt": _state, "safetensors": _safe, "onnx": _graph, "folder": _checkpoint,
}  # fmt: skip
