"""Describe a residual branch as a block: its norms, the linears at its two ends, and what stands in between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..ir import Anchor, Barrier, Block, Kind, Linear, Scale, ScalePair, Side, Site, Where
from . import scales as scales_
from .beside import Skip, skip_of
from .branches import Branch
from .chains import Sum
from .edges import LinearEdge, counted, moved, read, readers, writers
from .graph import CASTS, OpGraph
from .joins import Join
from .match import NormMatch
from .naming import common
from .normed import NormedGraph
from .scale_pairs import find_scale_pairs
from .scales import Straight
from .sites import Sites


def block(sites: Sites, one: Sum, branch: Branch, group: int | None) -> Block:
    """Describe a branch of a sum; `group` numbers the sum where it has several."""
    view, graph = sites.view, sites.graph
    leave, entries = branch.exit, branch.entries
    leave = leave if leave and view.spans(leave, branch.add, one.axis) else None
    held = tuple(_sites(sites, one, branch, leave))
    edges = [readers(graph, norm.output, norm.axis, branch.region) for norm in entries]
    outer = scales_.back(graph, branch.end, one.axis, "branch" if leave else "written", view.norms)
    inside = scales_.back(graph, leave.source, leave.axis, "written", view.norms) if leave else outer
    reading = tuple(scales_.onward(graph, entries[0].output, entries[0].axis, "read")) if len(entries) == 1 else ()
    if not entries:
        reading, edge = _scaled(graph, branch, one.axis)
        edges = [edge]
    ends = writers(graph, inside.value, inside.axis, branch.region)
    skip = skip_of(graph, one.join, one.axis)
    if leave and leave.norm.kind is Kind.BATCH and ends.others:  # a convolution in groups takes a factor per channel
        alone = sites.producers(leave, 0)
        held = tuple(replace(site, writers=alone) if site.where is Where.OUT else site for site in held)
    return Block(
        name=common(sorted(branch.parameters)),
        kind=branch.kind,
        sites=held,
        readers=tuple(dict.fromkeys(counted(graph, r) for e in edges for r in e.linears)),
        writers=tuple(dict.fromkeys(counted(graph, w) for w in ends.linears)),
        parallel_group=group,
        scale=skip.number,
        scales=(*reading, *(inside.scales if leave else ()), *outer.scales, *skip.scales),
        barriers=tuple(_barriers(view, branch, leave, edges, ends, skip, outer)),
        scale_pairs=tuple(_counted(sites, pair) for pair in find_scale_pairs(graph, branch.region, view.inside)),
        anchor=_anchor(view, branch, one.join, one.axis, ends, inside),
    )


def _scaled(graph: OpGraph, branch: Branch, axis: int) -> tuple[tuple[Scale, ...], LinearEdge]:
    """Return what reads the trunk without a norm, and the factors ahead of it where linear maps alone do.

    Behind a factor for each channel they are `others` too: no linear map of the channels passes it.
    """
    value, scales = branch.root, list[Scale]()
    while value == branch.root or len(graph.users[value]) == 1:
        users = [u for u in graph.users[value] if u in branch.region]
        step = scales_.factor(graph, graph[users[0]], axis, "read") if len(users) == 1 else None
        if step is None:
            break
        value, scales = users[0], [*scales, step[1]]
    edge = readers(graph, value, axis, branch.region)
    if not scales or edge.others or not set(graph.users[value]) <= branch.region:
        return (), readers(graph, branch.root, axis, branch.region)
    linears = tuple(replace(linear, exact=False) for linear in edge.linears)
    return tuple(scales), LinearEdge(linears, tuple(s.node for s in scales if s.vector))


def _sites(sites: Sites, one: Sum, branch: Branch, leave: NormMatch | None) -> Iterator[Site]:
    """Yield the norms of a branch in dataflow order, and the trunk norm behind its sum."""
    for norm in branch.entries:
        whole = sites.view.spans(norm, branch.add, one.axis)  # a sum may be of some channels alone
        yield sites.site(Where.IN if whole else Where.INNER, norm)
    at_ends = {norm.output for norm in (*branch.entries, *([leave] if leave else []))}
    taken = at_ends | sites.used
    for norm in branch.view.within(branch.root, branch.end):
        if norm.output in branch.region and norm.output not in taken:
            yield sites.site(Where.INNER, norm, branch.end)
    if leave:
        yield sites.site(Where.OUT, leave)
    if one.post:
        yield sites.site(Where.POST, one.post)


def _barriers(
    view: NormedGraph,
    branch: Branch,
    leave: NormMatch | None,
    edges: Sequence[LinearEdge],
    ends: LinearEdge,
    skip: Skip,
    outer: Straight,
) -> Iterator[Barrier]:
    """Yield what stands between a branch's linears, or its norms, and the trunk."""
    read, written = [o for edge in edges for o in edge.others], ends.others
    for side, others in ((Side.READ, read), (Side.WRITTEN, written)):
        yield from (Barrier(side, view.kind(o)) for o in others[:1])
    moved = any(view.followed(norm.source, norm.axis, branch.root) is None for norm in branch.entries)
    if moved and not read and not written:
        yield Barrier(Side.READ, "what moves its channels")
    heads = {norm.output for norm in branch.entries}
    raw = [u for u in view.readers(branch.root, branch.region) if view.inside.get(u) not in heads]
    if heads and raw:
        yield Barrier(Side.RAW, view.kind(raw[0]))
    yield from skip.barriers
    users = view.graph.users
    if leave and (outer.value != leave.output or set(users[branch.end]) != {branch.add}):
        yield Barrier(Side.ENDS, view.graph[outer.value].kind)
    made, taken = (leave.source, leave.members) if leave else (branch.end, {branch.add})
    if aside := sorted(set(users[made]) - taken):
        yield Barrier(Side.WRITTEN, view.kind(aside[0]))


def _anchor(view: NormedGraph, branch: Branch, join: Join, axis: int, ends: LinearEdge, inside: Straight) -> Anchor:
    """Record where a block lives in its graph, and which values are neither of the stream's size nor a norm's."""
    graph = view.graph
    done = ends.path | {o.name for o in graph.between(inside.value, branch.end)} | view.inside.keys()
    early = {o for o in branch.region for norm in branch.entries if graph.reaches(o, norm.source)}
    between = tuple(sorted(branch.region - done - early, key=graph.index.__getitem__))
    return Anchor(branch.root, branch.end, branch.add, join.skip, join.total, axis, between, _hidden(graph, ends))


def _hidden(graph: OpGraph, ends: LinearEdge) -> str:
    """Return what the one linear map that ends a branch reads, ahead of casts and reshapes, where nothing else does."""
    if len(ends.linears) != 1 or ends.others:
        return ""
    op = graph[ends.linears[0].node]
    name = next((n for n in op.data if n not in graph.constant and read(graph, op, n, -1)), "")
    while name and graph[name].kind in CASTS | {"reshape"} and len(graph.users[name]) == 1:
        if moved(graph, graph[name], -1, back=True) != -1:
            break
        name = graph[name].data[0]
    return name if name and len(graph.users[name]) == 1 else ""


def _counted(sites: Sites, pair: ScalePair) -> ScalePair:
    def many(linears: tuple[Linear, ...]) -> tuple[Linear, ...]:
        return tuple(counted(sites.graph, linear) for linear in linears)

    return replace(pair, producers=many(pair.producers), consumers=many(pair.consumers))
