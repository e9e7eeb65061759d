"""Compare the pictures of a source and of a host, block by block, and then their cores by running them."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir import Block, Site, Where, sums
from . import idle
from .carrying import Carrier
from .cores import Match, match_attention, match_feed, ratio, same
from .differing import why_attention, why_feed
from .host import Misfit, Numbers
from .norms import same_kind, same_norm, size_for
from .tables import Tables
from .views import Core, View


def match(source: View, host: View, n: Numbers, carrier: Carrier) -> None:
    """Compare two networks and carry the source's weights over as far as the host's blocks reach.

    A host with fewer layers stands for one of the source's depth. Raises Misfit with the one thing in the way.
    """
    ours, theirs = sums(source.stream), sums(host.stream)
    if {len(group) for group in ours} != {len(group) for group in theirs}:
        beside = "beside each other" if n.parallel else "in turns"
        raise Misfit(f"its attention and feed-forward blocks stand {beside}, and the host's do not")
    _placed(source, host)
    spare = idle.wanted(source, host)
    _ends(source, host, spare)
    _starts(source, host, carrier)
    carrier.new_layer()
    if spare and len(theirs) > len(ours):
        layer = len(theirs) - len(ours)
        idle.carry(carrier, [block for group in theirs[:layer] for block in group])
        theirs = theirs[layer:]
    last: dict[str, Match] = {}
    for index, group in enumerate(ours):
        if index % len(theirs) == 0:
            carrier.new_layer()
        for mine, its in zip(_ordered(group), _ordered(theirs[index % len(theirs)]), strict=True):
            last[mine.kind] = _block(source.core(mine), host.core(its), n, carrier, last.get(mine.kind))


def _placed(source: View, host: View) -> None:
    """Raise Misfit where the norms of two networks stand in other places, or are of other kinds."""
    ours, theirs = ({b.placement for b in view.stream.blocks} for view in (source, host))
    if ours != theirs:
        raise Misfit(f"its blocks are {' and '.join(sorted(ours))}, and the host's {' and '.join(sorted(theirs))}")
    first = [next((s for _, s in view.stream.sites() if s.where is not Where.INNER), None) for view in (source, host)]
    if first[0] and first[1]:
        same_kind(first[0].norm, first[1].norm, "its stream")


def _ordered(group: Sequence[Block]) -> list[Block]:
    return sorted(group, key=lambda b: b.kind)


def _block(source: Core, host: Core, n: Numbers, carrier: Carrier, hint: Match | None) -> Match:
    """Compare two blocks, and carry the weights of one over."""
    mine, its = source.block, host.block
    if mine.kind != its.kind:
        raise Misfit(f"{mine.name} is {mine.kind}, and the host has {its.kind} there")
    size = 1.0
    for where in (Where.IN, Where.OUT, Where.POST):
        pairs = _sites(mine, its, where)
        for a, b in pairs:
            if where is Where.OUT:
                size *= size_for(a.norm, b.norm, mine.name)
            else:
                same_norm(a.norm, b.norm, mine.name)
            carrier.norm(a, b)
    found = _attention(source, host, n, carrier, hint) if mine.kind == "attention" else match_feed(source, host)
    if found is None:
        raise Misfit(why_feed(source, host))
    carrier.readers(source, host, found)
    carrier.writer(source, host, size)
    return found


def _sites(mine: Block, its: Block, where: Where) -> list[tuple[Site, Site]]:
    """Return the pairs of two blocks' norms at one place. Raises Misfit where one has more."""
    a, b = ([s for s in block.sites if s.where is where] for block in (mine, its))
    if len(a) != len(b):
        raise Misfit(f"{mine.name} has {len(a)} norms {where}, and the host {len(b)}")
    return list(zip(a, b, strict=True))


def _attention(source: Core, host: Core, n: Numbers, carrier: Carrier, hint: Match | None) -> Match:
    """Return how the source's rows are the host's. Raises Misfit with what differs."""
    inner = _inner(source, host, n)
    if source.windows != host.windows:
        raise Misfit(_windows(source.windows, host.windows))
    for found in ([hint] if hint else []) + list(match_attention(source, host, n)):
        carrier.inner(inner, found.turned)
        by = ratio(source, host, found, n)
        if not 1e-6 < by < 1e6:
            continue
        by = 1.0 if abs(by - 1) < 1e-6 else by
        tried = found.scaled(1.0 if inner else by)
        carrier.inner(inner, found.turned, by)
        if same(source, host, tried):
            return tried
    raise Misfit(why_attention(source, host, n))


def _windows(ours: frozenset[int], theirs: frozenset[int]) -> str:
    def told(found: frozenset[int]) -> str:
        return f"a window of {min(found)} tokens" if found else "all tokens before"

    return f"its attention sees {told(ours)}, and the host's {told(theirs)}"


def _inner(source: Core, host: Core, n: Numbers) -> list[tuple[Site, Site]]:
    """Return the pairs of norms of queries and keys. Raises Misfit where only one has them, or over other channels."""
    ours, theirs = ([s for s in c.block.sites if s.where is Where.INNER] for c in (source, host))
    if len(ours) != len(theirs):
        having = "it norms queries and keys, and the host does not"
        lacking = "the host norms queries and keys, which the source does not"
        raise Misfit(having if len(ours) > len(theirs) else lacking)
    for a, b in zip(ours, theirs, strict=True):
        if a.width != b.width:
            over = {n.head_size: "each head"}
            told = (over.get(s.width, "all heads together") for s in (a, b))
            raise Misfit("its norms of queries and keys run over {}, and the host's over {}".format(*told))
        same_norm(a.norm, b.norm, source.block.name)
    return list(zip(ours, theirs, strict=True))


def _ends(source: View, host: View, spare: bool) -> None:
    """Raise Misfit where one of two streams has an end norm that the other lacks."""
    for name in ("embedding", "final"):
        ours, theirs = getattr(source.stream, name), getattr(host.stream, name)
        word = "an embedding norm" if name == "embedding" else "a final norm"
        if bool(ours) != bool(theirs) and not (spare and ours is source.stream.embedding):
            having = f"it has {word}, and the host has none"
            raise Misfit(having if ours else f"the host has {word}, and the source has none")


def _starts(source: View, host: View, carrier: Carrier) -> None:
    """Compare the tables that two streams start from, and carry them and the end norms over."""
    ours, theirs = Tables.of(source), Tables.of(host)
    if bool(ours.positions) != bool(theirs.positions):
        having = "it adds learned positions, and the host has no table of them"
        raise Misfit(having if ours.positions else "the host adds learned positions, which the source has not")
    carrier.tables(ours, theirs, idle.factor(source, host))
    for a, b in ((source.stream.embedding, host.stream.embedding), (source.stream.final, host.stream.final)):
        if a and b:
            same_norm(a.norm, b.norm, f"the stream's {a.where} norm")
            carrier.norm(a, b)
    carrier.head()
