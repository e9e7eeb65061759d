"""Spell passes as text and read them back: `place{to=peri norm=auto blocks=0-5;attention},fold-affine`.

Comma separates passes; their options stand in braces, separated by spaces; a bare option is true. A value holds
anything but white space and braces. Options are a pass's dataclass fields, kebab-cased, and their types say how the
text is read: str, int, float, bool, a Literal, or one of these or None. Canonical text leaves defaults out.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NoReturn, cast

from .. import errors
from ..errors import Code, UsageError
from . import registry
from .presets import TARGETS
from .protocols import Proposer

_NAME = re.compile(r"[A-Za-z_][\w.-]*(?::[A-Za-z_][\w.]*)?")
_OPTION = re.compile(r"(?P<key>[a-z][a-z0-9-]*)(?:=(?P<value>[^\s{}]*))?(?=\s|$)")


MOST = 256
"""A pipeline has so many passes."""


def parse(text: str) -> Iterator[Proposer]:
    """Yield the passes that `text` describes. Raises UsageError LN001, LN002 (with the column) or LN003."""
    items = list(_items(text))  # the whole text is read before any pass is imported
    if len(items) > MOST:
        why = f"it has {len(items)} passes, and at most {MOST} are allowed"
        raise UsageError(Code.LN002, "pipeline", why, "run it in parts")
    for name, options in items:
        yield _build(name, options)


def spell(item: Proposer) -> str:
    """Return a pass's canonical text: its name and the options that are not at their defaults."""
    words = []
    for option in registry.options(type(item)):
        value = getattr(item, option.name)
        if option.init and value != _default(option):
            words.append(f"{_kebab(option.name)}={_print(value)}")
    return registry.name_of(type(item)) + (f"{{{' '.join(words)}}}" if words else "")


def _items(text: str) -> Iterator[tuple[str, dict[str, str | None]]]:
    """Yield (pass name, options) from a pipeline's text; a bare option has the value None."""
    at = _blank(text, 0)
    while True:
        name = _NAME.match(text, at)
        if not name:
            _wrong(at, f"expected a pass name, found {_found(text, at)}")
        at = _blank(text, name.end())
        options: dict[str, str | None] = {}
        if text.startswith("{", at):
            end = text.find("}", at)
            if end < 0:
                _wrong(at, "this brace is never closed")
            options = _options(text, at + 1, end)
            at = _blank(text, end + 1)
        yield name[0], options
        if at == len(text):
            return
        if text[at] != ",":
            _wrong(at, f"expected ',' after {name[0]!r}, found {_found(text, at)}")
        at = _blank(text, at + 1)


def _options(text: str, at: int, end: int) -> dict[str, str | None]:
    """Read the options between two braces."""
    options: dict[str, str | None] = {}
    while (at := _blank(text, at)) < end:
        option = _OPTION.match(text[:end], at)
        if not option:
            _wrong(at, f"expected option=value, found {_found(text, at)}")
        if option["key"] in options:
            _wrong(at, f"option {option['key']!r} is given twice")
        options[option["key"]] = option["value"]
        at = option.end()
    return options


def _blank(text: str, at: int) -> int:
    """Return the first column from `at` on that is not white space."""
    return len(text) - len(text[at:].lstrip())


def _found(text: str, at: int) -> str:
    return repr(text[at : at + 12]) if at < len(text) else "the end"


def _wrong(at: int, why: str) -> NoReturn:
    raise UsageError(Code.LN002, f"pipeline column {at + 1}", why, "write it as `pass{option=value},pass,...`")


# ---- options ----


def _build(name: str, options: Mapping[str, str | None]) -> Proposer:
    """Make the pass `name` with its options read as their types say."""
    cls = registry.find(name)
    fields = {_kebab(f.name): f for f in registry.options(cls) if f.init}
    hints = typing.get_type_hints(cls)
    values = {}
    for key, text in options.items():
        if key not in fields:
            if not fields:
                _bad(name, key, f"{name} takes no options", f"write {name} alone")
            errors.unknown(Code.LN003, f"option of {name}", key, fields)
        values[fields[key].name] = _read(name, key, text, hints[fields[key].name])
    needed = [key for key, f in fields.items() if _default(f) is dataclasses.MISSING and f.name not in values]
    if needed:
        raise UsageError(
            Code.LN003, f"pass {name}", f"it needs {', '.join(needed)}", f"write {name}{{{needed[0]}=...}}"
        )
    try:
        made: Proposer = cast("Callable[..., Proposer]", cls)(**values)
    except ValueError as reason:  # a pass may check its options in __post_init__
        raise UsageError(Code.LN003, f"pass {name}", str(reason), "choose another value") from reason
    return made


def _read(name: str, key: str, text: str | None, hint: object) -> object:
    """Read one option's text as the type of its field."""
    choices = _choices(hint)
    if text is None and bool not in choices:
        _bad(name, key, "it needs a value", f"write {key}=...")
    text = "true" if text is None else text
    for choice in choices:
        value = _parse(text, choice)
        if value is not _NO:
            return value
    _bad(name, key, f"{text!r} is not {' or '.join(map(_noun, choices))}", _nearest(text, choices))


def _choices(hint: object) -> list[object]:
    """Flatten an option's type into str, int, float, bool, None and single literals; str last, it takes anything."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        flat = [choice for part in typing.get_args(hint) for choice in _choices(part)]
        return sorted(flat, key=lambda c: c is str)
    if typing.get_origin(hint) is Literal:
        return [Literal[value] for value in typing.get_args(hint)]
    if hint in (str, int, float, bool, type(None)):
        return [hint]
    raise TypeError(f"an option's type must be str, int, float, bool, a Literal or one of these or None, not {hint}")


_NO = object()
LARGEST = 2**63
"""Integers are smaller than that, as seeds and sizes are everywhere below."""


def _parse(text: str, choice: object) -> object:
    """Return the value that `text` has as one plain type, or _NO."""
    if typing.get_origin(choice) is Literal:
        (value,) = typing.get_args(choice)
        return value if text == _print(value) else _NO
    if choice is type(None):
        return None if text == "none" else _NO
    if choice is bool:
        return {"true": True, "false": False}.get(text, _NO)
    plain: dict[object, Callable[[str], str | int | float]] = {str: str, int: int, float: float}
    try:
        value = plain[choice](text)
    except ValueError:
        return _NO
    if isinstance(value, float) and not math.isfinite(value) or isinstance(value, int) and abs(value) >= LARGEST:
        return _NO
    return value


def _print(value: object) -> str:
    """Write an option's value so that `_parse` reads it back."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, float) else str(value)


def _noun(choice: object) -> str:
    nouns: dict[object, str] = {
        str: "a word",
        int: "an integer",
        float: "a finite number",
        bool: "true or false",
        type(None): "none",
    }
    return _print(typing.get_args(choice)[0]) if typing.get_origin(choice) is Literal else nouns.get(choice, "none")


def _nearest(text: str, choices: Sequence[object]) -> str:
    words = [_noun(choice) for choice in choices if typing.get_origin(choice) is Literal]
    return errors.did_you_mean(text, words) if words else "change the value"


def _bad(name: str, key: str, why: str, remedy: str) -> NoReturn:
    raise UsageError(Code.LN003, f"option {key!r} of {name}", why, remedy)


def _kebab(name: str) -> str:
    return name.replace("_", "-")


def _default(option: dataclasses.Field[object]) -> object:
    """Return a field's default value, or dataclasses.MISSING."""
    if option.default_factory is not dataclasses.MISSING:
        return option.default_factory()
    return option.default


def placing(
    to: str,
    norm: str = "auto",
    blocks: str | None = None,
    fit: str = "auto",
    keep_sizes: bool = False,
    plain_skips: bool = False,
    post: str | None = None,
) -> str:
    """Spell the pipeline that converts the selected blocks to one of `TARGETS`. Raises UsageError LN003 for another."""
    if to not in TARGETS:
        errors.unknown(Code.LN003, "placement", to, TARGETS)
    placement, behind = TARGETS[to]
    given = {"norm": norm, "fit": fit} | ({"blocks": blocks} if blocks else {})
    more = f" post={post}" * (post is not None) + " keep-sizes" * keep_sizes + " plain-skips" * plain_skips
    text = f"place{{to={placement} {_options_of(given)}{more}}}"
    if not behind:
        return text
    taken = {_kebab(f.name) for f in registry.options(registry.find(behind))}
    return f"{text},{behind}{{{_options_of({k: v for k, v in given.items() if k in taken})}}}"


def _options_of(given: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in given.items())
