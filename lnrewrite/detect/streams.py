"""Describe a chain of residual sums as a stream: its blocks, its norms at both ends, and what else sees its states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir import Barrier, Block, Linear, Side, Stream, Where
from .beside import added_to, counted_behind, told_apart
from .blocks import block
from .chains import Link, Sum
from .edges import LinearEdge, counted, readers, writers
from .graph import OpGraph
from .match import NormMatch
from .naming import stream_name
from .normed import NormedGraph
from .sites import Sites


def stream(sites: Sites, chain: Sequence[Sum], index: int) -> Stream:
    """Describe one stream; `index` is its place in the model."""
    view, graph = sites.view, sites.graph
    blocks = _blocks(sites, chain, index)
    first, last = chain[0], chain[-1]
    embedding = view.norms.get(first.link.norm or "")
    final = None if last.post else view.after(last.end)
    final = final if final and view.spans(final, last.end, last.axis) else None
    begun, axis = (embedding.source, embedding.axis) if embedding else (first.join.root, first.axis)
    sources = writers(graph, begun, axis)
    recalled = {name for one in chain for link in (one.link, one.tail) if link for name in link.recalled}
    opaque = next((graph[name].kind for name in sources.others if name not in recalled), "")
    if embedding and set(graph.users[begun]) - embedding.members:
        opaque = opaque or "a value that is read bare too"
    exits = _exits(view, last.end, last.axis, final or last.post)
    return Stream(
        name=stream_name([b.name for b in blocks], index),
        width=graph.width(first.join.total, first.axis),
        blocks=tuple(blocks),
        sources=tuple(_source(graph, linear, sources.path, begun, recalled) for linear in sources.linears),
        opaque=opaque,
        embedding=sites.site(Where.EMBEDDING, embedding) if embedding else None,
        final=sites.site(Where.FINAL, final) if final else None,
        taps=_taps(view, chain),
        readers=tuple(counted(graph, linear) for linear in exits.linears),
        exits=exits.others,
        source=first.join.root,
        last=last.end,
    )


def _source(graph: OpGraph, linear: Linear, path: frozenset[str], begun: str, recalled: set[str]) -> Linear:
    """Count a source's uses: what it gives the first state, and what later sums take up again of that, is one.

    Of stored latents that are the first state itself, those that read the state are one.
    """
    if linear.node == begun and graph[begun].kind == "param":
        found = counted(graph, linear)
        return replace(found, uses=found.uses - len(graph.users[begun]) + 1)
    return counted_behind(graph, linear, path - {begun}, recalled | {begun})


def _blocks(sites: Sites, chain: Sequence[Sum], index: int) -> list[Block]:
    """Describe the branches of all sums, with what the sums hold beside them and what the trunk passes in between."""
    blocks: list[Block] = []
    for number, one in enumerate(chain):
        group = index * 10000 + number if len(one.branches) > 1 else None
        described = [block(sites, one, branch, group) for branch in one.branches]
        described[0] = _with_further_terms(sites.view, described[0], one)
        if number + 1 < len(chain):
            onward = chain[number + 1]
            described[-1] = _handed_on(sites.view, described[-1], onward.link, onward.join.root, onward.axis)
        elif one.tail:
            described[-1] = _handed_on(sites.view, described[-1], one.tail, one.end, one.axis)
        blocks += described
    return told_apart(blocks)


def _with_further_terms(view: NormedGraph, block: Block, one: Sum) -> Block:
    """Add the further terms of a block's sum."""
    added = added_to(view.graph, one.join, one.axis)
    linears = tuple(counted_behind(view.graph, linear, added.path) for linear in added.linears)
    return replace(block, added=linears, barriers=(*block.barriers, *added.barriers))


def _handed_on(view: NormedGraph, block: Block, link: Link, root: str, axis: int) -> Block:
    """Add what the trunk passes on its way to the next sum, whose root it is, or to the stream's end."""
    through = link.through
    if link.before and not through and view.followed(root, axis, link.before) is None:
        through = "what moves its channels"
    barriers = [Barrier(Side.CARRIED, through)] if through else []
    return replace(block, scales=(*block.scales, *link.scales), barriers=(*block.barriers, *barriers))


def _exits(view: NormedGraph, last: str, axis: int, norm: NormMatch | None) -> LinearEdge:
    """Return what reads a stream's last state, but for the norm at its end."""
    members = norm.members if norm else frozenset()
    edge = readers(view.graph, last, axis)
    others = [o for o in edge.others if o not in members]
    return LinearEdge(edge.linears, tuple(dict.fromkeys(o if o == "output" else view.graph[o].kind for o in others)))


def _taps(view: NormedGraph, chain: Sequence[Sum]) -> tuple[str, ...]:
    """Return what else reads the trunk before its last state: no block, no norm and no sum of this stream."""
    graph = view.graph
    trunk = {n for one in chain for n in (one.join.root, one.join.total)}
    known = set(trunk)
    for one in chain:
        for branch in one.branches:
            known |= branch.region | {branch.add}
        known |= {o.name for o in graph.between(one.join.root, one.join.skip)}
        for norm in (view.norms.get(one.link.norm or ""), one.post):
            known |= norm.members if norm else set()
        for link in (one.link, one.tail):
            known |= set(link.recalled) if link else set()
            known |= {o.name for o in graph.between(link.before, link.start)} if link and link.before else set()
    found = []
    for name in sorted(trunk - {chain[-1].end}, key=graph.index.__getitem__):
        for user in graph.users[name]:
            if user not in known:
                found.append("output" if user == "output" else view.kind(user))
    return tuple(dict.fromkeys(found))
