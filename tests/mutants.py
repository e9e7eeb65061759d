"""Mutants of what files hold: values of JSON and fields of a protobuf message, replaced by ones nobody expects."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 1 << 20, 1 << 40, 1 << 70, -0.5, 1e300, float("nan"), float("inf"), "", "x", "\0", "../x",
    "/etc/passwd", "x" * 5000, [], {}, [None], [[]], {"a": 1}, ["x"],
)  # fmt: skip
NUMBERS = (0, 1, -1, 2, 7, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63))
FLOATS = (0.0, -1.0, 1e-30, 3e38, float("nan"), float("inf"), float("-inf"))
TEXTS = ("", "x", "\0", "../x", "y", "h", "x" * 5000, "Softmax", "Loop", "LayerNormalization", "com.microsoft")


def json_mutant(content: Any, draw: random.Random) -> Any:
    """Return a copy of a value of JSON with one or two of its parts replaced, left out or doubled in depth."""
    held = copy.deepcopy(content)
    for _ in range(draw.choice((1, 1, 2))):
        holder, key = draw.choice(list(_places(held)) or [({}, "x")])
        change = draw.randrange(8)
        if change == 0:
            del holder[key]
        elif change == 1:
            holder[key] = [holder[key]]
        else:
            holder[key] = copy.deepcopy(draw.choice(ODD))
    return held


def _places(held: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in list(held.items() if isinstance(held, dict) else enumerate(held)):
        yield held, key
        if isinstance(value, dict | list):
            yield from _places(value)


def protobuf_mutant(message: Message, draw: random.Random) -> Message:
    """Return a copy of a message with one to three of its fields, at any depth, set, cleared, doubled or moved."""
    held = copy.deepcopy(message)
    for _ in range(draw.choice((1, 1, 2, 3))):
        spot = draw.choice(list(_messages(held)))
        _change(spot, draw.choice(spot.DESCRIPTOR.fields), draw)
    return held


def _messages(message: Message) -> Iterator[Message]:
    yield message
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for each in value if field.is_repeated else [value]:
                yield from _messages(each)


def _change(message: Message, field: FieldDescriptor, draw: random.Random) -> None:
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        held = getattr(message, field.name)
        if not field.is_repeated:
            draw.choice((held.Clear, held.SetInParent))()
        elif len(held) and draw.randrange(2):
            draw.choice((lambda: held.add().CopyFrom(draw.choice(held)), lambda: held.pop(draw.randrange(len(held)))))()
        else:
            held.add()
        return
    if draw.randrange(5) == 0:
        message.ClearField(field.name)
        return
    value: Any = draw.choice(NUMBERS)
    if field.type == FieldDescriptor.TYPE_ENUM:
        value = draw.choice(field.enum_type.values).number
    elif field.type == FieldDescriptor.TYPE_INT32:
        value = max(-(1 << 31), min(value, (1 << 31) - 1))
        value = draw.randrange(24) if draw.randrange(2) else value
    elif field.type == FieldDescriptor.TYPE_UINT64:
        value = abs(value) % (1 << 64)
    elif field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        value = draw.choice(FLOATS)
    elif field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        value = draw.choice(TEXTS)
        value = value.encode() if field.type == FieldDescriptor.TYPE_BYTES else value
    if not field.is_repeated:
        setattr(message, field.name, value)
        return
    held = getattr(message, field.name)
    if len(held) and draw.randrange(2):
        held[draw.randrange(len(held))] = value
    else:
        held.append(value)
