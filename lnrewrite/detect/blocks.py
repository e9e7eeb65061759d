"""Make the picture: chain residual sums into streams and say where each block's norms sit.

A join's root is walked back through norms, constant scales and shape ops to the sum before it: so joins chain into
streams, and a norm met on the way is a trunk norm (post-LN). Inside a branch, a norm of the root is an `in` norm and
a norm that the branch ends in is an `out` norm.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import itemgetter

from ..errors import Refusal
from ..ir import Anchor, Arm, Barrier, Block, Kind, Linear, Network, Scale, Side, Site, Stream, Where
from . import scales as scales_
from .arms import find_arms
from .beside import Added, added_to, counted, skip_of, told_apart
from .branches import branch_kind
from .edges import Edge, computed, moved, readers, writers
from .graph import CASTS, SHAPE, OpGraph
from .joins import WEIGHTED, Join, find_joins, nearest_miss, scaled
from .lookalikes import placed
from .match import NormMatch
from .modulation import modulation
from .naming import common, name_blocks, stream_name
from .norms import stacked

ACTIVATIONS = frozenset({"relu", "gelu", "silu", "tanh", "sigmoid", "hardswish", "leaky_relu", "elu", "relu6"})


@dataclass(frozen=True, slots=True)
class Link:
    """Describe where a join's root comes from: the sum before it (None: a source), through which norm and factors.

    `through` names another op on the way that a linear map of the channels does not pass.
    """

    before: str | None
    norm: str | None
    start: str
    scales: tuple[Scale, ...] = ()
    through: str = ""


class Detector:
    """Hold what the steps of one detection share: the graph, its norms, its joins."""

    def __init__(self, graph: OpGraph, norms: Mapping[str, NormMatch], unknown: tuple[Refusal, ...]) -> None:
        self.graph, self.odd = graph, unknown
        self.norms = stacked(graph, norms)
        self.inside = {m: f.output for f in self.norms.values() for m in f.members}
        self.ordered = sorted(((graph.index[o], f) for o, f in self.norms.items()), key=itemgetter(0))
        self.joins, refused = find_joins(graph, self.norms)
        self.closed = bool(refused)
        self.refusals = [*refused]
        self.used: set[str] = set()

    def network(self) -> Network:
        if self.closed:
            self.joins = []
        streams = tuple(self.stream(chain, i) for i, chain in enumerate(self.chains()))
        streams = name_blocks(streams)
        if not streams and not self.closed:
            self.refusals.append(nearest_miss(self.graph))
        elsewhere = tuple(
            self.site(Where.INNER, found, None) for out, found in self.norms.items() if out not in self.used
        )
        weights = tuple(dict.fromkeys(computed(self.graph)))
        odd = (placed(self.graph, row, streams) for row in self.odd)
        return Network(streams, elsewhere, (*odd, *self.refusals), weights)

    def chains(self) -> list[list[tuple[Join, Link]]]:
        """Group joins into streams, in execution order."""
        totals = {j.total for j in self.joins}
        ends: dict[str, list[tuple[Join, Link]]] = {}
        chains: list[list[tuple[Join, Link]]] = []
        for join in self.joins:
            link = self.link(join.root, totals)
            chain = ends.pop(link.before, None) if link.before else None
            if chain is None:
                chain = []
                chains.append(chain)
            chain.append((join, link))
            ends[join.total] = chain
        return chains

    def link(self, root: str, totals: set[str]) -> Link:
        """Walk a root back to the sum, or the source, that it comes from."""
        graph, axis = self.graph, -1
        norm, name, start, through = None, root, root, ""
        scales: list[Scale] = []
        while name not in totals:
            op = graph[name]
            if name in self.norms and norm is None:
                norm, name = name, self.norms[name].source
                continue
            start = name if norm is None else start
            if (step := scales_.factor(graph, op, axis, "trunk")) is not None:
                through = through or (f"{op.kind} before its norm" if norm else "")
                scales.insert(0, step[1])
                name = step[0]
            elif op.kind in SHAPE | CASTS | {"dropout"} | ACTIVATIONS and op.data:
                through = through or (op.kind if op.kind in ACTIVATIONS else "")
                name = op.data[0]
            elif (shifted := scaled(graph, name)) is not None:
                name, through = shifted, through or op.kind
            else:
                return Link(None, norm if norm and graph[root].name == norm else None, start, tuple(scales), through)
        return Link(name, norm, start, tuple(scales), through)

    def stream(self, chain: list[tuple[Join, Link]], index: int) -> Stream:
        post = self.post_norms(chain)
        blocks: list[Block] = []
        axes = self.axes(chain)
        added = [added_to(self.graph, join, axis) for (join, _), axis in zip(chain, axes, strict=True)]
        for group, (join, _) in enumerate(chain):
            parallel = index * 10000 + group if len(join.branches) > 1 else None
            for branch, add in join.branches:
                blocks.append(self.block(join, branch, add, axes[group], parallel, post[group]))
            head = len(blocks) - len(join.branches)
            blocks[head] = self.beside(blocks[head], added[group])
            if group + 1 < len(chain):
                blocks[-1] = self.handed_on(blocks[-1], *chain[group + 1], axes[group + 1])
        blocks = told_apart(blocks)
        first, last = chain[0], chain[-1]
        embedding = self.norms.get(first[1].norm or "")
        final = None if post[-1] else self.norm_after(last[0].total)
        width = self.graph.width(first[0].total, axes[0])
        begun, axis = (embedding.source, embedding.axis) if embedding else (first[0].root, axes[0])
        sources = writers(self.graph, begun, axis)
        opaque = self.graph[sources.others[0]].kind if sources.others else ""
        if embedding and set(self.graph.users[begun]) - embedding.members:
            opaque = opaque or "a value that is read bare too"
        exits = self.exits(last[0].total, axes[-1], final or post[-1])
        name = stream_name([b.name for b in blocks], index)
        return Stream(
            name,
            width,
            tuple(blocks),
            tuple(map(self.counted, sources.linears)),
            opaque,
            self.site(Where.EMBEDDING, embedding, None) if embedding else None,
            self.site(Where.FINAL, final, None) if final else None,
            self.taps(chain),
            tuple(map(self.counted, exits.linears)),
            exits.others,
            source=first[0].root,
            last=last[0].total,
        )

    def handed_on(self, block: Block, onward: Join, link: Link, axis: int) -> Block:
        """Add what the trunk passes on its way to the next sum."""
        through = link.through
        if link.before and not through and self.followed(onward.root, axis, link.before) is None:
            through = "what moves its channels"
        barriers = [Barrier(Side.CARRIED, through)] if through else []
        return replace(block, scales=(*block.scales, *link.scales), barriers=(*block.barriers, *barriers))

    def beside(self, block: Block, added: Added) -> Block:
        """Add the further terms of a block's sum."""
        linears = tuple(counted(self.graph, linear, added.path) for linear in added.linears)
        return replace(block, added=linears, barriers=(*block.barriers, *added.barriers))

    def exits(self, last: str, axis: int, norm: NormMatch | None) -> Edge:
        """Return what reads a stream's last state, but for the norm at its end."""
        members = norm.members if norm else frozenset()
        edge = readers(self.graph, last, axis)
        others = [o for o in edge.others if o not in members]
        return Edge(edge.linears, tuple(dict.fromkeys(o if o == "output" else self.graph[o].kind for o in others)))

    def post_norms(self, chain: list[tuple[Join, Link]]) -> list[NormMatch | None]:
        """Return each join's trunk norm. The last one has no next skip to tell: the sibling most like it decides."""
        found = [self.norms[link.norm] if link.norm else None for _, link in chain[1:]]
        last = self.norm_after(chain[-1][0].total)
        if last is None:
            return [*found, None]
        kinds = [branch_kind(self.graph, join.root, join.branches[0][0]) for join, _ in chain]
        if found:
            post = found[_sibling(kinds, [f is not None for f in found])] is not None
        else:
            join = chain[-1][0]
            branch = join.branches[0][0]
            edge = bool(self.entries(join.root, branch)) or self.exit(join.root, branch) is not None
            held = any(
                join.root != o and self.graph.reaches(join.root, o) and self.graph.reaches(o, branch)
                for o in self.norms
            )
            post = not edge and not held and len(self.graph.users[join.total]) == 1
        return [*found, last if post else None]

    def norm_after(self, total: str) -> NormMatch | None:
        """Return the first norm that reads a sum, straight or through casts, slices and reshapes."""
        todo = [total]
        while todo:
            name = todo.pop(0)
            for user in self.graph.users[name]:
                if user == "output":
                    continue
                if user in self.inside:
                    return self.norms[self.inside[user]]
                if self.graph[user].kind in SHAPE | CASTS | {"dropout", "gather"}:
                    todo.append(user)
        return None

    def axes(self, chain: list[tuple[Join, Link]]) -> list[int]:
        """Return which axis of each sum is the channels; one that shows nothing has the axis of its neighbour."""
        seen = [self.axis(join, link) for join, link in chain]
        usual = next((axis for axis in seen if axis is not None), -1)
        return [usual := usual if axis is None else axis for axis in seen]

    def axis(self, join: Join, link: Link) -> int | None:
        """Return which axis of a sum is the channels: the one that norms, or else writers, work on."""
        graph = self.graph
        for branch, _ in join.branches:
            for norm in self.entries(join.root, branch):
                if (axis := self.followed(norm.source, norm.axis, join.root)) is not None:
                    return axis
        norms = [self.norms[link.norm]] if link.norm else []
        for norm in norms + [n for branch, _ in join.branches for n in self.entries(join.root, branch)]:
            one, two = graph[norm.source].shape or (), graph[join.total].shape or ()
            if len(one) == len(two) and one[norm.axis] == two[norm.axis]:
                return norm.axis
        for axis in dict.fromkeys((-1, 1 - len(graph[join.total].shape or ()))):
            for branch, _ in join.branches:
                region = {o.name for o in graph.between(join.root, branch)}
                end = self.exit(join.root, branch)
                before = self.followed(branch, axis, end.source) if end else axis
                if before is None:
                    continue
                last = scales_.back(graph, end.source if end else branch, before, "", self.norms)
                if writers(graph, last.value, last.axis, region).linears:
                    return axis
        after = self.norm_after(join.total)
        return self.followed(after.source, after.axis, join.total) if after else None

    def followed(self, name: str, axis: int, start: str) -> int | None:
        """Return where an axis of a value is in what it was made from by shapes, casts and factors; None where lost."""
        while name != start:
            if name in self.norms:
                name = self.norms[name].source
                continue
            op = self.graph[name]
            source = self.back(name)
            if source is None:
                return None
            if op.kind in SHAPE | {"gather"}:
                before = moved(self.graph, op, axis, back=True)
                if before is None:
                    return None
                axis = before
            name = source
        return axis

    def block(self, join: Join, branch: str, add: str, axis: int, group: int | None, post: NormMatch | None) -> Block:
        graph = self.graph
        region = {o.name for o in graph.between(join.root, branch)}
        entries, leave = self.entries(join.root, branch), self.exit(join.root, branch)
        sites = [self.site(Where.IN, f, None) for f in entries]
        edge_norms = {f.output for f in entries} | ({leave.output} if leave else set())
        near = self.norms_between(join.root, branch)
        inner = [f for f in near if f.output in region and f.output not in edge_norms | self.used]
        sites += [self.site(Where.INNER, f, branch) for f in inner]
        sites += [self.site(Where.OUT, leave, None)] if leave else []
        sites += [self.site(Where.POST, post, None)] if post else []
        begin = [(f.output, f.axis) for f in entries] or [(join.root, axis)]
        edges = [readers(graph, start, at, region) for start, at in begin]
        outer = scales_.back(graph, branch, axis, "branch" if leave else "written", self.norms)
        inside = scales_.back(graph, leave.source, leave.axis, "written", self.norms) if leave else outer
        reading = scales_.onward(graph, entries[0].output, entries[0].axis, "read") if len(entries) == 1 else ()
        ends = writers(graph, inside.value, inside.axis, region)
        reads = tuple(dict.fromkeys(self.counted(r) for e in edges for r in e.linears))
        writes = tuple(dict.fromkeys(self.counted(w) for w in ends.linears))
        skip = skip_of(graph, join, axis)
        barriers = [*self.barriers(edges, ends, join, entries, region), *skip.barriers]
        if leave and (outer.value != leave.output or set(graph.users[branch]) != {add}):
            barriers.append(Barrier(Side.ENDS, graph[outer.value].kind))
        made, taken = (leave.source, leave.members) if leave else (branch, {add})
        if aside := sorted(set(graph.users[made]) - taken):
            barriers.append(Barrier(Side.WRITTEN, self.kind(aside[0])))
        kind = branch_kind(graph, join.root, branch)
        done = ends.path | {o.name for o in graph.between(inside.value, branch)} | self.inside.keys()
        early = {o for o in region for f in entries if graph.reaches(o, f.source)}
        between = tuple(sorted(region - done - early, key=graph.index.__getitem__))
        anchor = Anchor(join.root, branch, add, join.skip, join.total, axis, between)
        held = {p for o in region if o not in self.inside for p in self.parameters_of(o)}
        path = common(sorted(held))
        scales = (*reading, *(inside.scales if leave else ()), *outer.scales, *skip.scales)
        arms = tuple(map(self.arm, find_arms(graph, region, self.inside)))
        block = Block(path, kind, tuple(sites), reads, writes, group, skip.number, scales, arms=arms, anchor=anchor)
        return replace(block, barriers=tuple(barriers))

    def kind(self, name: str) -> str:
        """Return what an operator is, for a barrier."""
        return "an output" if name == "output" else "a norm" if name in self.inside else self.graph[name].kind

    def parameters_of(self, name: str) -> set[str]:
        """Return the weights of a linear op, straight or through constant ops such as a split or a transpose."""
        op = self.graph[name]
        found, todo = set(), [n for n in op.data if n in self.graph.constant and op.kind in WEIGHTED]
        while todo:
            op = self.graph[todo.pop()]
            todo += op.data
            if op.kind == "param":
                found.add(str(op.attrs["param"]))
        return found

    def barriers(
        self, edges: list[Edge], ends: Edge, join: Join, entries: list[NormMatch], region: set[str]
    ) -> list[Barrier]:
        """Return what stands between a branch's linears, or its norms, and the trunk."""
        found = []
        for side, others in ((Side.READ, [o for e in edges for o in e.others]), (Side.WRITTEN, ends.others)):
            found += [Barrier(side, self.kind(o)) for o in others[:1]]
        heads = {f.output for f in entries}
        raw = [self.kind(u) for u in self.behind(join.root, region) if self.inside.get(u) not in heads]
        turned = [f for f in entries if not found and self.followed(f.source, f.axis, join.root) is None]
        found += [Barrier(Side.READ, "what moves its channels")] if turned else []
        return [*found, *[Barrier(Side.RAW, kind) for kind in raw[:1] if entries]]

    def behind(self, name: str, region: set[str]) -> list[str]:
        """Return what reads a value in a region, straight or through shapes and casts."""
        found, todo = list[str](), [name]
        while todo:
            for user in self.graph.users[todo.pop()]:
                if user in region:
                    shape = user not in self.inside and self.graph[user].kind in SHAPE | CASTS
                    (todo if shape else found).append(user)
        return found

    def arm(self, arm: Arm) -> Arm:
        return replace(arm, makers=tuple(map(self.counted, arm.makers)), takers=tuple(map(self.counted, arm.takers)))

    def counted(self, linear: Linear) -> Linear:
        """Count the uses of a linear's parameter (or bias) in the graph."""
        return replace(linear, uses=max(self.graph.uses[n] for n in (linear.param, linear.bias) if n))

    def entries(self, root: str, branch: str) -> list[NormMatch]:
        """Return the norms of the branch that read the root, straight or through casts, shapes and scales."""
        found: list[NormMatch] = []
        for norm in self.norms_between(root, branch):
            if not self.graph.reaches(norm.output, branch) or not self.graph.reaches(root, norm.source):
                continue
            name = norm.source
            while name != root and (step := self.back(name)):
                name = step
            if name == root:
                found.append(norm)
        return found

    def norms_between(self, start: str, end: str) -> list[NormMatch]:
        """Return the norms whose outputs come after one node and no later than another."""
        first, last = (bisect_right(self.ordered, self.graph.index[n], key=itemgetter(0)) for n in (start, end))
        return [found for _, found in self.ordered[first:last]]

    def back(self, name: str) -> str | None:
        op = self.graph[name]
        if op.kind in SHAPE | CASTS | {"dropout", "gather"} and op.data:
            return op.data[0]
        return scaled(self.graph, name)

    def exit(self, root: str, branch: str) -> NormMatch | None:
        """Return the norm that a branch ends in, seen through casts, shapes, scales and gates."""
        name: str | None = branch
        while name and name != root:
            if name in self.norms:
                found = self.norms[name]
                region = self.graph.between(root, found.source) if self.graph.reaches(root, found.source) else []
                return found if any(o.kind in WEIGHTED or not o.data for o in region) or len(region) > 4 else None
            op = self.graph[name]
            gate = [n for n in op.data if n not in self.graph.constant and self.graph.reaches(root, n)]
            name = self.back(name) or (gate[0] if op.kind == "mul" and len(gate) == 1 else None)
        return None

    def site(self, where: Where, found: NormMatch, branch: str | None) -> Site:
        """Describe a norm; an inner norm that its branch does not have to pass (q and k norms) gets a tap."""
        self.used.add(found.output)
        edge = readers(self.graph, found.output, found.axis)
        taps = tuple(dict.fromkeys("output" if o == "output" else self.graph[o].kind for o in edge.others))
        if branch and not self.dominates(found, branch):
            taps = (*taps, "off the branch's main path")
        width = self.graph.width(found.source, found.axis) if where is Where.INNER else 0
        writes = self.makers(found, width) if where is Where.INNER and found.norm.kind is not Kind.WEIGHT else ()
        origin = (found.source, *sorted(found.members, key=self.graph.index.__getitem__))
        origin = (*[o for o in origin if o != found.output], found.output)
        reads = tuple(dict.fromkeys(map(self.counted, edge.linears)))
        return Site(where, found.norm, reads, taps, writes, width, modulation(self.graph, found), origin)

    def makers(self, found: NormMatch, width: int) -> tuple[Linear, ...]:
        """Return the linears that make up all of a norm's input, where they serve nothing else."""
        made = writers(self.graph, found.source, found.axis, None, width, found.norm.kind is not Kind.BATCH)
        whole = not made.others and set(self.graph.users[found.source]) <= found.members
        return tuple(map(self.counted, made.linears)) if whole else ()

    def dominates(self, found: NormMatch, branch: str) -> bool:
        """Return whether every path from the norm's source's weights to the branch's end passes the norm."""
        graph = self.graph
        if not graph.reaches(found.output, branch):
            return False
        index = graph.index[found.output]
        for op in graph.between(found.source, branch):
            if op.name in found.members or graph.index[op.name] < index or graph.reaches(found.output, op.name):
                continue
            return False
        after = graph.between(found.output, branch)
        heavy = [n for o in after for n in o.data if n not in graph.constant and not graph.reaches(found.output, n)]
        return not [n for n in heavy if any(o.kind in WEIGHTED for o in graph.between(self.root_of(n), n))]

    def root_of(self, name: str) -> str:
        return next((j.root for j in reversed(self.joins) if self.graph.reaches(j.root, name)), name)

    def taps(self, chain: list[tuple[Join, Link]]) -> tuple[str, ...]:
        """Return what else reads the trunk before its last state: no block, no norm and no sum of this stream."""
        last = chain[-1][0].total
        trunk = {n for j, _ in chain for n in (j.root, j.total)} - {last}
        known = {n for j, _ in chain for n in (j.root, j.total)}
        for join, _ in chain:
            for branch, add in join.branches:
                known |= {o.name for o in self.graph.between(join.root, branch)} | {add}
            known |= {o.name for o in self.graph.between(join.root, join.skip)}
        for _, link in chain:
            if link.before:
                known |= {o.name for o in self.graph.between(link.before, link.start)}
        found = []
        for name in sorted(trunk, key=self.graph.index.__getitem__):
            for user in self.graph.users[name]:
                if user == "output" or (user not in known and user not in self.inside):
                    found.append("output" if user == "output" else self.graph[user].kind)
        return tuple(dict.fromkeys(found))


def _sibling(kinds: list[str], posts: list[bool]) -> int:
    """Return which sum is most like the last: of its kind, with the longest like history, and then the nearest.

    `posts` says of every sum but the last whether a trunk norm follows it.
    """
    last, before = len(kinds) - 1, list(zip(kinds, posts, strict=False))

    def likeness(i: int) -> tuple[bool, int, int]:
        history = 0
        while history < i and before[i - 1 - history] == before[last - 1 - history]:
            history += 1
        return kinds[i] == kinds[last], history, i

    return max(range(last), key=likeness)
