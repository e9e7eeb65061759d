"""Read pictures from text: a line at a time, then a descent over the lines."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from ..errors import Code, Refusal
from .network import Block, Network, Stream
from .parts import Barrier, Kind, Linear, Norm, Scale, ScalePair, Side, Site, Where
from .printer import PLAIN, implied_readers

T = TypeVar("T")

_QUOTED = r'"(?:[^"\\]|\\.)*"'
_NAME = rf"(?:{_QUOTED}|{PLAIN})"
_WORD = re.compile(rf"(?:{_QUOTED}|\S)+")
_LINEAR = re.compile(rf"@({_NAME}):(-?\d+)(?:\+@({_NAME}))?(?:\((?:uses=(\d+))?,?([a-z,]*)\))?")
_SCALE = re.compile(rf"(\w+) ([*/])(?:([@%])({_NAME})|([^\s@%]+))( vector)?")
_NORM = (
    rf"(?P<kind>\w+)\(eps=(?P<eps>[^\s)]+)(?: gamma=(?P<one>1\+)?(?P<sigil>[@%])(?P<gamma>{_NAME}))?"
    rf"(?: beta=@(?P<beta>{_NAME}))?"
    rf"(?: mean=@(?P<mean>{_NAME}))?(?: variance=@(?P<variance>{_NAME}))?(?: factor=(?P<factor>[^\s)]+))?"
    r"(?: variant=(?P<variant>\d))?(?: axis=(?P<axis>-\d+))?\)"
)
_SITE = re.compile(
    rf"(?P<norms>\w+\((?:{_QUOTED}|[^\")])*\)(?: over \w+\((?:{_QUOTED}|[^\")])*\))*)(?: width=(?P<width>\d+))?"
    rf"(?: <- (?P<writers>(?:{_QUOTED}|[^\"])+?))?(?: -> (?P<consumers>.+))?"
)
_STREAM = re.compile(rf"({_NAME}) width=(-?\d+)(?: opaque=({_QUOTED}))?")
_BLOCK = re.compile(
    rf"(?P<name>{_NAME}) (?P<kind>{_NAME}) (?P<placement>\w+)(?: group=(?P<group>-?\d+))?"
    rf"(?: scale=(?P<scale>\S+))?"
)
_REFUSED = re.compile(rf"({_NAME}) ({_NAME}) ({_QUOTED}) ({_QUOTED})")

_BLOCK_SITES = (Where.IN, Where.OUT, Where.POST, Where.INNER)
_BLOCK_LINES = (*_BLOCK_SITES, "scale", "arm", "barrier", "adds", "reads", "writes")
_STREAM_LINES = ("source", "embedding", "block", "final", "taps", "head", "exits")


def parse(text: str) -> Network:
    """Read a network from its text; raise ValueError, with the line's number, where it says something else."""
    lines = deque(_lines(text))
    streams: list[Stream] = []
    elsewhere: list[Site] = []
    refusals: list[Refusal] = []
    while lines:
        match lines[0].keyword:
            case "stream":
                streams.append(_read_stream(lines))
            case "elsewhere":
                elsewhere.append(lines.popleft().read(_read_elsewhere))
            case "refused":
                refusals.append(lines.popleft().read(_read_refusal))
            case other:
                raise lines[0].error(f"unexpected {other!r}")
    return Network(tuple(streams), tuple(elsewhere), tuple(refusals))


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    keyword: str
    rest: str

    def error(self, why: object) -> ValueError:
        return ValueError(f"line {self.number}: {why}")

    def read(self, reader: Callable[[str], T]) -> T:
        try:
            return reader(self.rest)
        except ValueError as error:
            raise self.error(error) from None


def _lines(text: str) -> Iterable[_Line]:
    for number, line in enumerate(text.splitlines(), 1):
        keyword, _, rest = line.strip().partition(" ")
        if keyword and not keyword.startswith("#"):
            yield _Line(number, keyword, rest.strip())


def _read_stream(lines: deque[_Line]) -> Stream:
    head = lines.popleft()
    stream = head.read(_read_stream_head)
    blocks: list[Block] = []
    while lines and lines[0].keyword in _STREAM_LINES:
        if lines[0].keyword == "block":
            blocks.append(_read_block(lines))
            continue
        line = lines.popleft()
        match line.keyword:
            case "source":
                stream = replace(stream, sources=line.read(_read_linears))
            case "embedding":
                stream = replace(stream, embedding=line.read(partial(_read_site, Where.EMBEDDING)))
            case "final":
                stream = replace(stream, final=line.read(partial(_read_site, Where.FINAL)))
            case "head":
                stream = replace(stream, readers=line.read(_read_linears))
            case "exits":
                stream = replace(stream, exits=line.read(_read_names))
            case _:
                stream = replace(stream, taps=line.read(_read_names))
    stream = replace(stream, blocks=tuple(blocks))
    try:
        stream.verify()
    except ValueError as error:
        raise head.error(error) from None
    return stream


def _read_block(lines: deque[_Line]) -> Block:
    head = lines.popleft()
    block, placement = head.read(_read_block_head)
    sites: list[Site] = []
    scales: list[Scale] = []
    pairs: list[ScalePair] = []
    barriers: list[Barrier] = []
    linears: dict[str, tuple[Linear, ...]] = {}
    while lines and lines[0].keyword in _BLOCK_LINES:
        line = lines.popleft()
        if line.keyword in _BLOCK_SITES:
            sites.append(line.read(partial(_read_site, Where(line.keyword))))
        elif line.keyword == "scale":
            scales.append(line.read(_read_scale))
        elif line.keyword == "arm":
            pairs.append(line.read(_read_arm))
        elif line.keyword == "barrier":
            barriers.append(line.read(_read_barrier))
        elif line.keyword in linears:
            raise line.error(f"block {block.name} has a second {line.keyword!r} line")
        else:
            linears[line.keyword] = line.read(_read_linears)
    readers, writers = linears.get("reads", implied_readers(sites)), linears.get("writes", ())
    block = replace(block, sites=tuple(sites), scales=tuple(scales), readers=readers, writers=writers)
    block = replace(block, added=linears.get("adds", ()), barriers=tuple(barriers), scale_pairs=tuple(pairs))
    if block.placement != placement:
        raise head.error(f"block {block.name} says {placement}, its norms say {block.placement}")
    return block


def _match(pattern: re.Pattern[str], text: str, what: str) -> re.Match[str]:
    found = pattern.fullmatch(text)
    if not found:
        raise ValueError(f"not {what}: {text!r}")
    return found


def _read_name(word: str) -> str:
    if not re.fullmatch(_NAME, word):
        raise ValueError(f"not a name: {word!r}")
    return str(json.loads(word)) if word.startswith('"') else word


def _read_optional(word: str | None) -> str | None:
    return None if word is None else _read_name(word)


def _read_names(rest: str) -> tuple[str, ...]:
    return tuple(_read_name(w) for w in _WORD.findall(rest))


def _read_linear(word: str) -> Linear:
    param, axis, bias, uses, flags = _match(_LINEAR, word, "a linear map (@param:axis)").groups()
    marks = set(flags.split(",")) if flags else set()
    if strange := marks - {"inexact", "table", "apart"}:
        raise ValueError(f"a linear map is inexact, a table or apart, not {sorted(strange)[0]!r}")
    held = (_read_name(param), int(axis), _read_optional(bias), int(uses or 1))
    return Linear(*held, "inexact" not in marks, "table" in marks, "apart" in marks)


def _read_arm(rest: str) -> ScalePair:
    words = _WORD.findall(rest)
    if "->" not in words:
        raise ValueError(f"not an arm (producers -> consumers): {rest!r}")
    split = words.index("->")
    run = int(words.pop().removeprefix("run=")) if words[-1].startswith("run=") else 0
    producers, consumers = (tuple(map(_read_linear, part)) for part in (words[:split], words[split + 1 :]))
    return ScalePair(producers, consumers, run)


def _read_scale(rest: str) -> Scale:
    at, sign, sigil, name, number, vector = _match(_SCALE, rest, "a scale (place *number or *@param)").groups()
    by = float(number) if name is None else _read_name(name)
    return Scale(at, by, vector is not None, sign == "/", sigil == "%")


def _read_barrier(rest: str) -> Barrier:
    at, _, op = rest.partition(" ")
    return Barrier(Side(at), _read_name(op.strip()))


def _read_linears(rest: str) -> tuple[Linear, ...]:
    return () if rest == "-" else tuple(_read_linear(w) for w in _WORD.findall(rest))


def _read_site(where: Where, rest: str) -> Site:
    found = _match(_SITE, rest, "a norm")
    words = _WORD.findall(found["consumers"] or "")
    split = words.index("taps") if "taps" in words else len(words)
    writers = _read_linears(found["writers"] or "-")
    readers, taps = tuple(map(_read_linear, words[:split])), tuple(map(_read_name, words[split + 1 :]))
    return Site(where, _read_norm(found["norms"]), readers, taps, writers, int(found["width"] or 0))


def _read_norm(rest: str) -> Norm:
    found = re.match(_NORM, rest)
    if not found:
        raise ValueError(f"not a norm: {rest!r}")
    gamma, beta, mean, variance = (_read_optional(found[key]) for key in ("gamma", "beta", "mean", "variance"))
    under = rest[found.end() :].removeprefix(" over ")
    return Norm(
        Kind(found["kind"]),
        float(found["eps"]),
        gamma,
        beta,
        plus_one=found["one"] is not None,
        computed=found["sigil"] == "%",
        mean=mean,
        variance=variance,
        factor=float(found["factor"] or 1),
        variant=int(found["variant"] or 0),
        axis=int(found["axis"] or -1),
        over=_read_norm(under) if under else None,
    )


def _read_stream_head(rest: str) -> Stream:
    name, width, opaque = _match(_STREAM, rest, "a stream (name width=N)").groups()
    return Stream(_read_name(name), int(width), opaque=_read_name(opaque or '""'))


def _read_block_head(rest: str) -> tuple[Block, str]:
    found = _match(_BLOCK, rest, "a block (name kind placement)")
    block = Block(
        _read_name(found["name"]),
        _read_name(found["kind"]),
        parallel_group=None if found["group"] is None else int(found["group"]),
        scale=float(found["scale"] or 1.0),
    )
    return block, found["placement"]


def _read_elsewhere(rest: str) -> Site:
    where, _, norm = rest.partition(" ")
    return _read_site(Where(where), norm.strip())


def _read_refusal(rest: str) -> Refusal:
    code, site, why, remedy = map(_read_name, _match(_REFUSED, rest, "a refusal (code site why remedy)").groups())
    return Refusal(Code(code), site, why, remedy)
