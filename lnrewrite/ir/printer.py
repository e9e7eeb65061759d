"""Write pictures as text."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable

from ..errors import Refusal
from .network import Block, Network, Stream
from .parts import Linear, Norm, Scale, ScalePair, Site, Where

PLAIN = r"[A-Za-z0-9_./:$~-]+"
"""A name that is written without quotes."""


def render(network: Network) -> str:
    """Write a network as text; `parse` reads it back."""
    lines = [render_stream(s) for s in network.streams]
    lines += [f"elsewhere {s.where} {_site(s)}\n" for s in network.elsewhere]
    lines += [_refusal(r) for r in network.refusals]
    return "".join(lines)


def render_stream(stream: Stream) -> str:
    """Write one stream as text."""
    opaque = f" opaque={json.dumps(stream.opaque)}" if stream.opaque else ""
    lines = [f"stream {_name(stream.name)} width={stream.width}{opaque}"]
    if stream.sources:
        lines.append(f"  source {_linears(stream.sources)}")
    if stream.embedding:
        lines.append(f"  embedding {_site(stream.embedding)}")
    for block in stream.blocks:
        lines += _block(block)
    if stream.final:
        lines.append(f"  final  {_site(stream.final)}")
    if stream.taps:
        lines.append("  taps   " + _names(stream.taps))
    if stream.readers:
        lines.append(f"  head   {_linears(stream.readers)}")
    if stream.exits:
        lines.append("  exits  " + _names(stream.exits))
    return "\n".join(lines) + "\n"


def digest(network: Network) -> str:
    """Return 16 hex digits of the sha256 of the network's text: equal pictures, equal digests."""
    return hashlib.sha256(render(network).encode()).hexdigest()[:16]


def _name(name: str) -> str:
    return name if re.fullmatch(PLAIN, name) else json.dumps(name)


def _names(names: Iterable[str]) -> str:
    return " ".join(map(_name, names))


def _linear(linear: Linear) -> str:
    bias = "" if linear.bias is None else f"+@{_name(linear.bias)}"
    uses = [f"uses={linear.uses}"] * (linear.uses != 1)
    flags = ",".join([*uses, *["inexact"] * (not linear.exact), *["table"] * linear.table, *["apart"] * linear.apart])
    return f"@{_name(linear.param)}:{linear.axis}{bias}" + (f"({flags})" if flags else "")


def _linears(linears: Iterable[Linear]) -> str:
    return " ".join(map(_linear, linears))


def _norm(norm: Norm) -> str:
    words = [f"eps={float(norm.eps)!r}"]
    if norm.gamma is not None:
        words.append(f"gamma={'1+' * norm.plus_one}{'%' if norm.computed else '@'}{_name(norm.gamma)}")
    if norm.beta is not None:
        words.append(f"beta=@{_name(norm.beta)}")
    words += [f"{key}=@{_name(name)}" for key in ("mean", "variance") if (name := getattr(norm, key)) is not None]
    words += [f"factor={norm.factor!r}"] * (norm.factor != 1) + [f"variant={norm.variant}"] * (norm.variant != 0)
    words += [f"axis={norm.axis}"] * (norm.axis != -1)
    return f"{norm.kind}({' '.join(words)})" + (f" over {_norm(norm.over)}" if norm.over else "")


def _site(site: Site) -> str:
    words = [_linear(r) for r in site.readers]
    if site.taps:
        words += ["taps", _names(site.taps)]
    before = ["<-", _linears(site.writers)] if site.writers else []
    width = [f"width={site.width}"] * bool(site.width)
    return " ".join([_norm(site.norm), *width, *before, *(["->", *words] if words else [])])


def _scale_pair(pair: ScalePair) -> str:
    words = [*map(_linear, pair.producers), "->", *map(_linear, pair.consumers), *[f"run={pair.run}"] * (pair.run > 0)]
    return " ".join(words)


def _scale(scale: Scale) -> str:
    by = f"{'%' if scale.computed else '@'}{_name(scale.by)}" if isinstance(scale.by, str) else repr(float(scale.by))
    return f"{scale.at} {'/' if scale.inverse else '*'}{by}{' vector' * scale.vector}"


def _block(block: Block) -> list[str]:
    header = [_name(block.name), _name(block.kind), block.placement.value]
    if block.parallel_group is not None:
        header.append(f"group={block.parallel_group}")
    if block.scale != 1.0:
        header.append(f"scale={float(block.scale)!r}")
    lines = [f"  block {' '.join(header)}"]
    lines += [f"    {s.where:<6} {_site(s)}" for s in block.sites]
    lines += [f"    scale  {_scale(s)}" for s in block.scales]
    lines += [f"    arm    {_scale_pair(p)}" for p in block.scale_pairs]
    lines += [f"    barrier {b.at} {_name(b.op)}" for b in block.barriers]
    lines += [f"    adds   {_linears(block.added)}"] if block.added else []
    if block.readers != implied_readers(block.sites):
        lines.append(f"    reads  {_linears(block.readers) or '-'}")
    if block.writers:
        lines.append(f"    writes {_linears(block.writers)}")
    return lines


def implied_readers(sites: Iterable[Site]) -> tuple[Linear, ...]:
    return next((s.readers for s in sites if s.where is Where.IN), ())


def _refusal(row: Refusal) -> str:
    return f"refused {_name(row.code)} {_name(row.site)} {json.dumps(row.why)} {json.dumps(row.remedy)}\n"
