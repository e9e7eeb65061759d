"""Recognize norms by algebra, and prove each on random data before it counts.

A decomposed norm is a product (or quotient) of a value with an inverse root of one of its own reductions. Whatever
the spelling, the piece of graph between the value and the product is run in float64 on random data and compared
with every norm in `unit`; only what agrees to 1e-9 is a norm. Names of modules and parameters play no part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from ..errors import Code, Refusal
from ..ir import Kind, Norm
from .arithmetic import closure
from .edges import parameter_behind
from .graph import CASTS, Op, Operand, OpGraph
from .lookalikes import lookalikes
from .match import NormMatch
from .proving import Prover, statistic_axis
from .static_norms import SQUASHES, centered, squashed, standardized, stored

FUSED = {
    "layer_norm": Kind.LAYER, "rms_norm": Kind.RMS, "batch_norm": Kind.BATCH, "group_norm": Kind.GROUP,
    "instance_norm": Kind.INSTANCE, "l2_norm": Kind.L2,
}  # fmt: skip
UNKNOWN = "report it if it is a norm that should be recognized"


def find_norms(graph: OpGraph) -> tuple[Mapping[str, NormMatch], tuple[Refusal, ...]]:
    """Return the norms by output node, and what works as a norm and is none of them."""
    found: dict[str, NormMatch] = {}
    misses: dict[str, str] = {}
    taken: set[str] = set()
    prover = Prover(graph)
    for op in graph:
        if op.name in taken:
            continue
        core = _fused(graph, op)
        if core is None and op.kind in {"mul", "div"}:
            core = stored(graph, op) or _decomposed(prover, op, misses)
        if core is None and op.kind in SQUASHES:
            core = squashed(graph, op)
        if core is not None:
            whole = _with_affine(graph, core)
            whole = _turned(graph, whole) or _grouped(graph, core) or whole
            found[whole.output] = whole
            taken |= whole.members
    found |= {f.output: f for f in standardized(graph)}
    found |= {f.output: f for f in (_with_affine(graph, each) for each in centered(graph, taken)) if f.norm.gamma}
    members = frozenset[str]().union(*(f.members for f in found.values()))
    odd = ((name, "; ".join(filter(None, (why, misses.get(name))))) for name, why in lookalikes(graph, members))
    return found, tuple(Refusal(Code.LN205, name, why, UNKNOWN) for name, why in odd)


def stacked(graph: OpGraph, norms: Mapping[str, NormMatch]) -> dict[str, NormMatch]:
    """Return the norms by output, those that read a norm which nothing else reads taken together with it."""
    found: dict[str, NormMatch] = {}
    for norm in norms.values():
        value, inside = norm.source, set(norm.members)
        while value not in found and graph[value].kind in CASTS and set(graph.users[value]) <= inside:
            inside.add(value)
            value = graph[value].data[0]
        below = found.get(value)
        written = below and below.norm.kind in {Kind.LAYER, Kind.RMS}  # an edit of the two writes both anew
        if below and written and below.axis == norm.axis and set(graph.users[value]) <= inside:
            del found[value]
            whole = replace(norm.norm, over=below.norm)
            norm = replace(norm, norm=whole, source=below.source, members=below.members | inside)
        found[norm.output] = norm
    return found


def _fused(graph: OpGraph, op: Op) -> NormMatch | None:
    kind = FUSED.get(op.kind)
    if kind is None or not isinstance(op.inputs[0], str) or (kind is Kind.BATCH and op.name in graph.constant):
        return None
    if kind is Kind.L2:
        norm = Norm(kind, op.number("eps"), axis=int(op.number("axis")))
        return NormMatch(norm, op.inputs[0], op.name, frozenset({op.name}))
    source, gamma, beta = op.inputs[0], op.inputs[1], op.inputs[2]
    axis = -1 if kind in {Kind.LAYER, Kind.RMS} else 1 - len(graph[source].shape or ())
    if op.attrs.get("axes", 1) != 1:
        kind = Kind.GROUP
    if kind is Kind.GROUP and op.attrs.get("groups") == graph.width(source, axis):
        kind = Kind.INSTANCE
    held = [parameter_behind(graph, name) for name in op.inputs[3:5]] if kind is Kind.BATCH else []
    mean, variance = held if len(held) == 2 else (None, None)
    norm = _with_gain(graph, Norm(kind, op.number("eps"), mean=mean, variance=variance, axis=axis), gamma)
    norm = replace(norm, beta=parameter_behind(graph, beta))
    if isinstance(beta, str) and norm.beta is None:  # computed like a gain that no parameter is
        norm = replace(norm, beta=beta, computed=True)
    return _of_centered(graph, NormMatch(norm, source, op.name, frozenset({op.name})))


def _of_centered(graph: OpGraph, norm: NormMatch) -> NormMatch:
    """Return an RMSNorm of x less its mean as the LayerNorm of x that it is: ONNX Runtime writes such ones."""
    op, last = graph[norm.source], len(graph[norm.source].shape or ()) - 1
    mean = graph[op.data[1]] if op.kind == "sub" and len(op.data) == 2 else op
    rows = mean.kind == "mean" and bool(mean.attrs.get("keepdim")) and mean.axes in ((-1,), (last,))
    if norm.norm.kind is not Kind.RMS or not rows or mean.data[:1] != op.data[:1]:
        return norm
    if set(graph.users[op.name]) != {norm.output} or set(graph.users[mean.name]) != {op.name}:
        return norm
    members = norm.members | {op.name, mean.name}
    return replace(norm, norm=replace(norm.norm, kind=Kind.LAYER), source=op.data[0], members=members)


def _with_gain(graph: OpGraph, norm: Norm, name: Operand) -> Norm:
    """Give a norm without gain one: a parameter w, 1 + w, or something computed from parameters."""
    if not isinstance(name, str):
        return norm
    if direct := parameter_behind(graph, name):
        return replace(norm, gamma=direct)
    op = graph[name]
    while op.kind in {"cast", "reshape", "expand"} and isinstance(op.inputs[0], str):
        op = graph[op.inputs[0]]
    if op.kind == "add" and 1 in [i for i in op.inputs if not isinstance(i, str)]:
        inner = parameter_behind(graph, next((i for i in op.inputs if isinstance(i, str)), None))
        if inner:
            return replace(norm, gamma=inner, plus_one=True)
    return replace(norm, gamma=name, computed=True)


def _sources(graph: OpGraph, name: str) -> Iterator[str]:
    """Yield what a normalized value may be computed from: itself, before a cast, a gain or the centering."""
    yield name
    op = graph[name]
    gains = [i for i in op.data if graph.is_channel_vector(i, graph.width(name)) or graph.is_scalar(i)]
    gain = op.kind == "mul" and bool(gains)
    if op.kind in CASTS or op.kind == "sub" or gain:
        for inner in op.data:
            if inner not in graph.constant:
                yield from _sources(graph, inner)


def _decomposed(prover: Prover, op: Op, misses: dict[str, str]) -> NormMatch | None:
    if len(op.data) != 2:
        return None
    graph = prover.graph
    pairs = [(op.inputs[0], op.inputs[1])] + ([(op.inputs[1], op.inputs[0])] if op.kind == "mul" else [])
    for value, statistic in pairs:
        if not (isinstance(value, str) and isinstance(statistic, str)):
            continue
        axis = statistic_axis(graph, value, statistic)
        if axis is None:
            continue
        best, leaking = "", None
        for source in list(_sources(graph, value))[::-1]:
            ops = closure(graph, source, op.name)
            if ops is None or not graph.reaches(source, statistic):
                continue
            found, why = prover.prove(source, op.name, ops, axis)
            if found and set(_users(graph, ops)) <= {o.name for o in ops} | set(graph.users[op.name]):
                return found
            leaking, best = leaking or found, best or why
        if leaking:  # something else sees a value inside; where the norm starts behind that value, it is no part of it
            return leaking
        misses[op.name] = best
        return None
    return None


def _users(graph: OpGraph, ops: Iterable[Op]) -> Iterator[str]:
    for op in ops:
        yield from graph.users[op.name]


def _with_affine(graph: OpGraph, core: NormMatch) -> NormMatch:
    """Make a norm take in the gain, bias and casts that follow it."""
    norm, output, members = core.norm, core.output, set(core.members)
    while (op := graph.reader(output)) is not None:
        other = next((i for i in op.inputs if i != output), None)
        width = graph.width(op.name, core.axis)
        if op.kind in CASTS:
            pass
        elif op.kind in {"mul", "div"} and norm == core.norm and (by := _number(op, output, norm.kind)):
            norm = replace(norm, factor=by)
        elif op.kind == "mul" and not norm.gamma and not norm.beta and graph.is_channel_vector(other, width, core.axis):
            norm = _with_gain(graph, norm, other)
        elif op.kind == "add" and not norm.beta and graph.is_channel_vector(other, width, core.axis):
            beta = parameter_behind(graph, other)
            if beta is None:
                break
            norm = replace(norm, beta=beta)
        elif norm.kind is Kind.BATCH and op.kind == "add" and (beside := _beside(graph, other, core)) is not None:
            norm = Norm(Kind.BATCH, norm.eps, gamma=op.name, computed=True, axis=core.axis)
            members |= beside
        else:
            break
        output = op.name
        members.add(output)
    return replace(core, norm=norm, output=output, members=frozenset(members))


def _number(op: Op, value: str, kind: Kind) -> float | None:
    """Return the number that what an l2 norm, or a centering, gives is multiplied by."""
    by = next((i for i in op.inputs if i != value), None)
    if kind not in {Kind.L2, Kind.CENTERED} or not isinstance(by, (int, float)) or not by:
        return None
    return float(by) if op.kind == "mul" else 1 / by if op.inputs[0] == value else None


def _turned(graph: OpGraph, core: NormMatch) -> NormMatch | None:
    """Return a batch norm of tokens between two transposes with their input, times a number, added outside (RepBN)."""
    before, back = graph[core.source], graph.reader(core.output)
    if core.norm.kind is not Kind.BATCH or back is None or not (_swaps(before) and _swaps(back)):
        return None
    source, inner, add = before.data[0], set(core.members) | {back.name}, graph.reader(back.name)
    if add is None or add.kind != "add" or set(graph.users[before.name]) - inner:
        return None
    other = next((i for i in add.inputs if i != back.name), None)
    members = _beside(graph, other, replace(core, source=source))
    if members is None:
        return None
    norm = Norm(Kind.BATCH, core.norm.eps, gamma=add.name, computed=True, axis=-1)
    return NormMatch(norm, source, add.name, frozenset(inner | members | {before.name, add.name}))


def _grouped(graph: OpGraph, core: NormMatch) -> NormMatch | None:
    """Return an instance norm of channels that are reshaped into groups, and back, as the group norm that it is.

    Exporters write them so, with gains of ones for each group, which are not looked at: its gain counts as computed.
    """
    before, back = graph[core.source], graph.reader(core.output)
    if core.norm.kind is not Kind.INSTANCE or back is None or {before.kind, back.kind} != {"reshape"}:
        return None
    if not before.data or graph.reader(before.name) != graph[core.output]:
        return None
    source = before.data[0]
    shape, grouped = graph[source].shape or (), before.shape or ()
    if back.shape != shape or len(shape) < 2 or shape[:1] != grouped[:1]:
        return None
    axis = 1 - len(shape)
    channels, groups = graph.width(source, axis), graph.width(core.source, core.axis)
    if not groups or not channels or channels % groups:
        return None
    bare = Norm(Kind.GROUP if groups < channels else Kind.INSTANCE, core.norm.eps, axis=axis)
    found = _with_affine(graph, NormMatch(bare, source, back.name, core.members | {before.name, back.name}))
    gamma, beta = found.norm.gamma or core.norm.gamma, found.norm.beta or core.norm.beta
    return replace(found, norm=replace(found.norm, gamma=gamma, beta=beta, computed=True))


def _swaps(op: Op) -> bool:
    """Return whether an op swaps the last two of three axes."""
    swap, order = op.attrs.get("swap"), op.attrs.get("order")
    swapped = isinstance(swap, tuple) and {axis % 3 for axis in swap} == {1, 2}
    return op.kind == "permute" and len(op.shape or ()) == 3 and (swapped or order == (0, 2, 1))


def _beside(graph: OpGraph, name: Operand, core: NormMatch) -> set[str] | None:
    """Return the ops of what is added to a batch norm where it is its own input times a number (RepBN); else None."""
    if name == core.source:
        return set()
    op = graph[name] if isinstance(name, str) else None
    if op is None or op.kind != "mul" or core.source not in op.inputs:
        return None
    factor = next(i for i in op.inputs if i != core.source)
    return {op.name} if graph.is_scalar(factor) else None
