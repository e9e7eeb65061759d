"""Chain residual sums into streams: where each sum's root comes from, its channel axis, and the norm behind it.

A sum's root is walked back through norms, constant scales and shape ops to the sum before it: so sums chain into
streams, and a norm met on the way is a trunk norm (post-LN).
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from ..ir import RECALL, Scale
from . import scales as scales_
from .branches import Branch, branches_of
from .edges import writers
from .graph import CASTS, SHAPE
from .joins import Join, scaled
from .match import NormMatch
from .normed import NormedGraph
from .recalls import Recall

ACTIVATIONS = frozenset({"relu", "gelu", "silu", "tanh", "sigmoid", "hardswish", "leaky_relu", "elu", "relu6"})
PARTIAL = "a norm of some channels each"
"""What heads, or groups, on the trunk are normalised by: one norm for all of them, which is none of the stream's."""


@dataclass(frozen=True, slots=True)
class Link:
    """Describe where a sum's root comes from: the sum before it (None: a source), through which norm and factors.

    `through` names another op on the way that a linear map of the channels does not pass. `recalled` are the values
    between earlier states that are added on the way and where they are.
    """

    before: str | None
    norm: str | None
    start: str
    scales: tuple[Scale, ...] = ()
    through: str = ""
    recalled: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Sum:
    """Hold one residual sum of a stream: its branches, the link to the sum before, the channel axis, its trunk norm.

    `tail` is the link from what the stream ends with to this sum, where more than a norm stands between.
    """

    join: Join
    link: Link
    branches: tuple[Branch, ...]
    axis: int = -1
    post: NormMatch | None = None
    tail: Link | None = None

    @property
    def end(self) -> str:
        """Return the state that the sum hands on."""
        return self.tail.recalled[0] if self.tail and self.tail.recalled else self.join.total


def chains(view: NormedGraph, joins: Sequence[Join], recalls: Mapping[str, Recall]) -> list[list[Sum]]:
    """Group sums into streams, in execution order."""
    totals = {j.total for j in joins}
    ends: dict[str, list[Sum]] = {}
    found: list[list[Sum]] = []
    for join in joins:
        link = _link(view, join.root, totals, recalls)
        chain = ends.pop(link.before, None) if link.before else None
        if chain is None:
            chain = []
            found.append(chain)
        chain.append(Sum(join, link, branches_of(view, join)))
        ends[join.total] = chain
    return [_settled(view, chain, recalls) for chain in found]


def _settled(view: NormedGraph, chain: Sequence[Sum], recalls: Mapping[str, Recall]) -> list[Sum]:
    """Return the sums of one stream with their axes and trunk norms."""
    settled = list[Sum]()
    for one, axis, post in zip(chain, _axes(view, chain), _post_norms(view, chain), strict=True):
        norm = view.norms.get(one.link.norm or "")
        whole = norm is None or view.spans(norm, one.join.total, axis)
        link = one.link if whole else replace(one.link, norm=None, through=one.link.through or PARTIAL)
        if post and not view.spans(post, one.join.total, axis):  # of some channels each, and one of all behind it
            post = view.after(post.output)
        post = post if post and view.spans(post, one.join.total, axis) else None
        settled.append(replace(one, link=link, axis=axis, post=post))
    last = settled[-1]
    again = next((name for name, recall in recalls.items() if recall.state == last.join.total), None)
    if last.post:
        again = last.post.output if last.post is not view.after(last.join.total) else None
    tail = _link(view, again, {last.join.total}, recalls) if again else None
    return [*settled[:-1], replace(last, tail=tail)]


def _link(view: NormedGraph, root: str, totals: Container[str], recalls: Mapping[str, Recall]) -> Link:
    """Walk a root back to the sum, or the source, that it comes from."""
    graph, axis = view.graph, -1
    norm, name, start, through = None, root, root, ""
    scales: list[Scale] = []
    recalled: list[str] = []
    bare = False  # the norm that starts a stream, and numbers behind it at most
    while name not in totals:
        op = graph[name]
        if name in recalls:
            recalled += [name, *recalls[name].path]
            through = through or recalls[name].barrier
            name = recalls[name].state
            continue
        if name in view.norms and norm is None:
            bare = not any(s.vector for s in scales) and len(scales) == len(graph.between(name, root))
            norm, name = name, view.norms[name].source
            continue
        if name in view.norms:  # a norm of a norm, such as PowerNorm's of groups
            name, through = view.norms[name].source, through or "another norm"
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
            return Link(None, norm if bare else None, start, tuple(scales), through)
    if recalled and not through:
        moved = any(op.kind in SHAPE for op in graph.between(name, root))
        through = RECALL if norm is None and not moved else "an earlier state behind a norm or a reshape"
    return Link(name, norm, start, tuple(scales), through, tuple(recalled))


def _post_norms(view: NormedGraph, chain: Sequence[Sum]) -> list[NormMatch | None]:
    """Return each sum's trunk norm. The last one has no next skip to tell: the sibling most like it decides."""
    found = [view.norms[one.link.norm] if one.link.norm else None for one in chain[1:]]
    last = view.after(chain[-1].join.total)
    if last is None:
        return [*found, None]
    if found:
        first = [one.branches[0] for one in chain]
        shapes = [(bool(branch.entries), branch.kind) for branch in first]
        post = found[_sibling(shapes, [f is not None for f in found])] is not None
    else:
        branch = chain[-1].branches[0]
        at_ends = bool(branch.entries) or branch.exit is not None
        post = not at_ends and not branch.holds_norm and len(view.graph.users[chain[-1].join.total]) == 1
    return [*found, last if post else None]


def _sibling(shapes: list[tuple[bool, str]], posts: list[bool]) -> int:
    """Return which sum is most like the last: normed or not before its branch, of its kind, and of its history.

    `shapes` says of every sum whether its branch reads a norm, and its kind; `posts` of every sum but the last whether
    a trunk norm follows it. The longest like history counts, and among equals the nearest.
    """
    last, before = len(shapes) - 1, list(zip(shapes, posts, strict=False))

    def likeness(i: int) -> tuple[bool, bool, int, int]:
        history = 0
        while history < i and before[i - 1 - history] == before[last - 1 - history]:
            history += 1
        normed, kind = shapes[i]
        return normed == shapes[last][0], kind == shapes[last][1], history, i

    return max(range(last), key=likeness)


def _axes(view: NormedGraph, chain: Sequence[Sum]) -> list[int]:
    """Return which axis of each sum is the channels, as norms show it, and where there are none, what writes there.

    A sum that shows nothing has the axis of its neighbor.
    """
    seen = [_normed(view, one) for one in chain]
    if not any(axis is not None for axis in seen):
        seen = []
        for one in chain:
            carried = _carried(view, one, seen[-1] if seen else None)
            seen.append(_written(view, one) if carried is None else carried)
    usual = next((axis for axis in seen if axis is not None), -1)
    return [usual := usual if axis is None else axis for axis in seen]


def _normed(view: NormedGraph, one: Sum) -> int | None:
    """Return which axis of a sum norms work on."""
    graph, join = view.graph, one.join
    entries = [norm for branch in one.branches for norm in branch.entries]
    for norm in entries:
        if (axis := view.followed(norm.source, norm.axis, join.root)) is not None:
            return axis
    ends = [branch.exit for branch in one.branches if branch.exit]
    for norm in ([view.norms[one.link.norm]] if one.link.norm else []) + entries + ends:
        there, here = graph[norm.source].shape or (), graph[join.total].shape or ()
        if len(there) == len(here) and there[norm.axis] == here[norm.axis]:
            return norm.axis
    after = view.after(join.total)
    return view.followed(after.source, after.axis, join.total) if after else None


def _carried(view: NormedGraph, one: Sum, axis: int | None) -> int | None:
    """Return where a sum's root has the channels of the sum before, or those that write the first one."""
    rank = len(view.graph[one.join.root].shape or ())
    if one.link.before is None:
        axes = dict.fromkeys((-1, 1 - rank))
        return next((a for a in axes if writers(view.graph, one.join.root, a).linears), None)
    if axis is None:
        return None
    return next((a for a in range(-1, -rank - 1, -1) if view.followed(one.join.root, a, one.link.before) == axis), None)


def _written(view: NormedGraph, one: Sum) -> int | None:
    """Return which axis of a sum linear maps produce."""
    axes = dict.fromkeys((-1, 1 - len(view.graph[one.join.total].shape or ())))
    return next((axis for axis in axes if any(_writes(view, branch, axis) for branch in one.branches)), None)


def _writes(view: NormedGraph, branch: Branch, axis: int) -> bool:
    """Return whether linear maps produce this axis of a branch's end."""
    end = branch.exit.source if branch.exit else branch.end
    before = view.followed(branch.end, axis, end) if branch.exit else axis
    if before is None:
        return False
    last = scales_.back(view.graph, end, before, "", view.norms)
    return bool(writers(view.graph, last.value, last.axis, branch.region).linears)
