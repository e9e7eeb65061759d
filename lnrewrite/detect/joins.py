"""Find residual sums: adds that join a value with something computed from that same value by weights."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterator
from dataclasses import dataclass

from ..errors import Code, Refusal
from .graph import CASTS, SHAPE, OpGraph

WEIGHTED = frozenset({
    "linear", "matmul", "mm", "bmm", "baddbmm", "einsum", "conv", "conv_transpose", "lstm", "gru", "cumsum",
    "scaled_dot_product_attention", "_grouped_mm", "embedding_bag", "bilinear", "gemm",
})  # fmt: skip
MIXING = frozenset({"scaled_dot_product_attention", "cumsum", "lstm", "gru", "conv", "conv_transpose"})
POOLS = ("avg_pool", "max_pool", "adaptive_", "fft", "_fft", "roll")


@dataclass(frozen=True, slots=True)
class Join:
    """Hold one residual sum: `total` = `skip` + branches + extras; skip and branches share the trunk value `root`.

    `branches` pairs each branch's last value with the add that it enters; `extras` are all other terms.
    """

    total: str
    skip: str
    root: str
    branches: tuple[tuple[str, str], ...]
    extras: tuple[str, ...] = ()


def find_joins(graph: OpGraph, whole: Container[str] = ()) -> tuple[list[Join], list[Refusal]]:
    """Return the residual sums in execution order, inner ones too, and what is beyond the picture.

    `whole` are values that are one term though they are sums: a norm's, whose bias is added last.
    """
    found: list[Join] = []
    refusals: list[Refusal] = []
    states: set[str] = set()
    for op in graph:
        if op.kind == "add" and len(op.data) == 2 and not flattens(graph, op.name, whole):
            join = _join(graph, op.name, states, refusals, whole) if op.name not in whole else None
            if join:
                found.append(join)
                states.add(join.total)
    return found, refusals


def mixes(graph: OpGraph, start: str, end: str) -> bool:
    """Return whether a branch lets tokens see each other: a product of two of its values, or a scan, pool, FFT.

    Expert weights that a router picks are parameters here: gathers are followed through what they pick from.
    """
    for op in graph.between(start, end):
        if op.kind in MIXING or op.kind.startswith(POOLS):
            return True
        product = op.kind in {"matmul", "bmm", "einsum", "baddbmm"} and len(op.data) > 1
        if product and all(n not in graph.constant and graph.reaches(start, n) for n in op.data[:2]):
            return True
    return False


def same_shape(graph: OpGraph, a: str, b: str) -> bool:
    one, two = graph[a].shape or (), graph[b].shape or ()
    pairs = [(x, y) for x, y in zip(one, two, strict=False) if isinstance(x, int) and isinstance(y, int)]
    return len(one) == len(two) >= 2 and all(x == y for x, y in pairs)


def flattens(graph: OpGraph, name: str, whole: Container[str]) -> bool:
    """Return whether a sum is only a part of the next sum."""
    user = graph.reader(name)
    if name in whole or user is None:
        return False
    same = user.kind == "add" and len(user.data) == 2 and same_shape(graph, name, user.name)
    if not same or user.data.count(name) != 1 or user.name in whole:  # a sum twice is no part
        return False
    return not _recalled(graph, name, next(n for n in user.data if n != name))


def _recalled(graph: OpGraph, total: str, other: str) -> bool:
    """Return whether what is added to a residual sum is a state before its own, times a stored factor."""
    early = scaled(graph, other) if graph[other].kind != "add" else None
    if early is None or not graph.reaches(early, total):
        return False
    pairs = (graph[total].data, graph[total].data[::-1])
    return any(early != state and graph.reaches(early, state) and is_sublayer(graph, state, f) for state, f in pairs)


def summands(graph: OpGraph, total: str, whole: Container[str]) -> list[tuple[str, str]]:
    """Return (term, the add that it enters) for a sum written as a tree of adds."""
    found: list[tuple[str, str]] = []
    todo = [total]
    while todo:
        name = todo.pop()
        for operand in graph[name].data:
            inner = graph[operand]
            if inner.kind == "add" and len(inner.data) == 2 and flattens(graph, operand, whole):
                todo.append(operand)
            else:
                found.append((operand, name))
    return sorted(found, key=lambda pair: graph.index[pair[0]])


def carried_on(graph: OpGraph, term: str) -> Iterator[str]:
    """Yield the values that a skip carries on: itself, then back through casts, shapes, constant scales and means.

    A mean that is taken off is a barrier (`beside.skip_of`), but the skip is one.
    """
    yield term
    while True:
        op = graph[term]
        if op.kind in SHAPE | CASTS | {"dropout"} and op.data:
            term = op.data[0]
        elif op.kind in {"mul", "div", "add", "sub"} and (step := scaled(graph, term) or _centered(graph, term)):
            term = step
        else:
            return
        yield term


def _states(graph: OpGraph, root: str) -> Iterator[str]:
    """Yield what a trunk value carries on, through norms that are one operator too (post-LN)."""
    for name in carried_on(graph, root):
        yield name
        if graph[name].kind in {"layer_norm", "rms_norm"}:
            yield from _states(graph, graph[name].data[0])


def scaled(graph: OpGraph, name: str) -> str | None:
    """Return what a constant factor (or shift), one number or one per channel, is applied to; None for other ops."""
    op = graph[name]
    if op.kind not in {"mul", "div", "add"} or len(op.inputs) < 2:
        return None
    rank = len(op.shape or ())
    width, first = graph.width(name), graph.width(name, 1 - rank)
    for value, other in ((op.inputs[0], op.inputs[1]), (op.inputs[1], op.inputs[0])):
        if isinstance(value, str) and value not in graph.constant:
            plain = op.kind != "add" and graph.is_scalar(other)
            vector = graph.is_channel_vector(other, width) or graph.is_channel_vector(other, first, 1 - rank)
            if (plain or vector) and (op.kind != "div" or value == op.inputs[0]):
                return value
    return None


def _centered(graph: OpGraph, name: str) -> str | None:
    """Return the value that this one is less its own mean; None for other ops."""
    op = graph[name]
    mean = graph[op.data[1]] if op.kind == "sub" and len(op.data) == 2 else op
    return op.data[0] if mean.kind == "mean" and mean.data[0] == op.data[0] else None


def _join(graph: OpGraph, total: str, states: set[str], refusals: list[Refusal], whole: Container[str]) -> Join | None:
    rank = len(graph[total].shape or ())
    if max(graph.width(total), graph.width(total, 1 - rank)) < 2:
        return None
    every = summands(graph, total, whole)
    terms = [(t, add) for t, add in every if t not in graph.constant]
    stored = [(t, add) for t, add in every if _latents(graph, t, total, states)]
    for skip, _ in (*reversed(terms), *stored):
        others = [(t, add) for t, add in terms if t != skip and same_shape(graph, t, total)]
        for root in carried_on(graph, skip):
            branches = [(t, add) for t, add in others if t != root and is_sublayer(graph, root, t)]
            if not branches or not carries_features(graph, root) or _biases_scores(graph, root, branches):
                continue
            apart = [t for t, _ in others if t not in {b for b, _ in branches}]
            early = any(graph.reaches(state, branches[0][0]) for t in apart for state in carried_on(graph, t))
            if early and root not in states and graph[root].kind in WEIGHTED | {"add"}:
                continue  # a sublayer with a bypass, inside the branch of an earlier state
            extra = [t for t in apart if graph.reaches(t, branches[0][0])]
            if extra:
                why = f"the sum {total} carries two earlier states of the stream, {root} and {extra[0]} (as B2T does)"
                refusals.append(Refusal(Code.LN202, total, why))
            if spread := [t for t, _ in branches if _is_outer(graph, root, t)]:
                why = f"the branch {spread[0]} is written to several streams by weights computed from the data"
                refusals.append(Refusal(Code.LN203, total, why))
            if gathered := _reads_earlier(graph, root, branches):
                why = f"the branch {branches[0][0]} reads a mixture of {root} and the earlier state {gathered}"
                refusals.append(Refusal(Code.LN203, total, why))
            extras = [t for t, _ in every]
            for term in (skip, *(t for t, _ in branches)):
                extras.remove(term)
            return Join(total, skip, root, _merged(graph, root, branches), tuple(extras))
    return None


def _latents(graph: OpGraph, name: str, total: str, states: set[str]) -> bool:
    """Return whether a stored value is a state that branches read: no bias, nor what is added at several depths."""
    if name not in graph.constant & graph.learned or not same_shape(graph, name, total):
        return False
    before = [state for state in states if graph.reaches(state, total)]
    return not any(graph.reaches(value, state) for value in carried_on(graph, name) for state in before)


def carries_features(graph: OpGraph, name: str) -> bool:
    """Return whether a value holds features, not a mask or positions: it comes from weights, or is a float input."""
    if graph[name].kind == "input":
        return "float" in graph[name].dtype
    return name in graph.learned or any(
        op.kind == "input" and "float" in op.dtype and graph.reaches(op.name, name) for op in graph
    )


def _is_outer(graph: OpGraph, root: str, end: str) -> bool:
    """Return whether a value is an outer product of two values of the branch: hyper-connections write that way."""
    while graph[end].kind in SHAPE | CASTS and graph[end].data:
        end = graph[end].data[0]
    factors = [n for n in graph[end].data if n not in graph.constant and graph.reaches(root, n)]
    if graph[end].kind != "mul" or len(factors) != 2:
        return False
    one, two = (graph[n].shape or () for n in factors)
    pairs = list(zip(one[::-1], two[::-1], strict=False))
    return any(a == 1 != b for a, b in pairs) and any(b == 1 != a for a, b in pairs)


def _reads_earlier(graph: OpGraph, root: str, branches: list[tuple[str, str]]) -> str:
    """Return an earlier state that a branch stacks with its root, to attend over depth (attention residuals), or ''."""
    region = [op for branch, _ in branches for op in graph.between(root, branch)]
    rank = len(graph[root].shape or ())
    for stack in (op for op in region if op.kind == "cat" and len(op.shape or ()) == rank + 1):
        todo, found = list(stack.data), []
        while todo:
            name = todo.pop()
            if name == root or (same_shape(graph, name, root) and graph.reaches(name, root)):
                found.append(name)
            elif graph[name].kind in SHAPE | CASTS | {"cat"}:
                todo += graph[name].data
        if root in found and len(found) > 1:
            return next(n for n in found if n != root)
    return ""


def _biases_scores(graph: OpGraph, root: str, branches: list[tuple[str, str]]) -> bool:
    """Return whether all that branches do with a value is to add it to attention scores: a bias that layers share."""
    region = {op.name for branch, _ in branches for op in graph.between(root, branch)}
    todo, seen = [root], {root}
    while todo:
        value = todo.pop()
        for user in graph.users[value]:
            op = graph[user] if user in region and user not in seen else None
            if op is None or "softmax" in op.kind:
                continue
            mask = op.kind == "scaled_dot_product_attention" and value not in op.inputs[:3]
            if not mask and op.kind not in SHAPE | CASTS | {"add", "mul", "div", "where", "masked_fill"}:
                return False
            seen.add(user)
            todo += [] if mask else [user]
    return True


def is_sublayer(graph: OpGraph, root: str, end: str) -> bool:
    """Return whether weights, or what mixes tokens, make one value of another."""
    if not graph.reaches(root, end):
        return False
    return any(op.kind in WEIGHTED or op.kind.startswith(POOLS) for op in graph.between(root, end))


def _merged(graph: OpGraph, root: str, branches: list[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Count terms that are summed among themselves first as one branch: experts, or one computed from the other."""
    while True:
        for i, (a, add) in enumerate(branches):
            for b, other in branches[i + 1 :]:
                tokenwise = not mixes(graph, root, a) and not mixes(graph, root, b)
                if other == add and (tokenwise or graph.reaches(a, b)):
                    rest = [p for p in branches if p[0] not in {a, b}]
                    branches = sorted([*rest, (add, graph.users[add][0])], key=lambda p: graph.index[p[0]])
                    break
            else:
                continue
            break
        else:
            return tuple(branches)


def outermost(graph: OpGraph, joins: list[Join], refusals: list[Refusal]) -> list[Join]:
    """Drop sums that are no stream's, or lie inside a branch, and refuse skips that span a chain of blocks."""
    joins = _own(graph, joins)
    inner: set[str] = set()
    ends = [graph.index[j.total] for j in joins]
    users: dict[str, str] = {}
    for at, outer in enumerate(joins):
        for branch, _ in outer.branches:
            if branch in users:
                why = f"the branch {branch} is added to two streams (ResiDual), at {users[branch]} and {outer.total}"
                refusals.append(Refusal(Code.LN207, outer.total, why))
            users[branch] = outer.total
        first = bisect_right(ends, graph.index[outer.root])
        held = [j for j in joins[first:at] if _inside(graph, j, outer)]
        sums = {j.total for j in held}
        chained = [j for j in held if any(t in sums for t in _states(graph, j.root))]
        if chained or any(j.root == outer.root for j in held):
            blocks = ", ".join(j.total for j in held[:3])
            why = f"the skip from {outer.root} to {outer.total} spans the residual blocks {blocks}"
            if scaled(graph, outer.skip) and graph[outer.skip].kind != "add":
                why += ", by a stored weight (as DenseFormer, ELC-BERT and links to the embedding have it)"
            refusals.append(Refusal(Code.LN202, outer.total, why))
        inner |= {j.total for j in held}
    return [j for j in joins if j.total not in inner]


def _own(graph: OpGraph, joins: list[Join]) -> list[Join]:
    """Drop chains of sums that start inside a branch of another sum and end elsewhere: a state that branches hand on.

    Such as a router's, which the next layer's router adds its own to: it is no stream that blocks read and write.
    """
    totals, strays = {j.total for j in joins}, set[str]()
    for at, join in enumerate(joins):
        before = next((t for t in _states(graph, join.root) if t in totals), None)
        started = before is None and any(
            other.root != join.root
            and graph.reaches(other.root, join.root)
            and any(graph.reaches(join.root, b) and not graph.reaches(join.total, b) for b, _ in other.branches)
            for other in joins[:at]
        )
        if started or before in strays:
            strays.add(join.total)
    return [j for j in joins if j.total not in strays]


def _inside(graph: OpGraph, inner: Join, outer: Join) -> bool:
    return (
        graph.reaches(outer.root, inner.root)
        and inner.total != outer.root
        and any(graph.reaches(inner.total, branch) for branch, _ in outer.branches)
        and not graph.reaches(inner.total, outer.root)
    )
