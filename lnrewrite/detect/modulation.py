"""Describe what data multiply a norm: a gain computed from a condition, stored gains mixed by time, or a gate."""

from __future__ import annotations

from .graph import CASTS, SHAPE, OpGraph
from .match import NormMatch

ACTIVATIONS = frozenset({"silu", "sigmoid", "gelu", "relu", "hardswish", "softplus"})
ELEMENTWISE = CASTS | {"add", "sub", "rsub", "mul", "expand", "reshape"}


def modulation(graph: OpGraph, norm: NormMatch) -> str:
    """Return `gated`, `adaptive`, `time-dependent` or nothing.

    gated: an activation of another value multiplies the norm's input or its output (arXiv 2405.21060). adaptive: a
    gain that is computed from a condition (adaLN, arXiv 2212.09748) or from what is normed (SeeDNorm, arXiv
    2510.22777). time-dependent: such a gain that stored vectors give, mixed by one number of the condition (DiMR, arXiv
    2406.09416).
    """
    source = graph[norm.source]
    if source.kind == "mul" and len(source.data) == 2 and any(_activated(graph, n) for n in source.data):
        return "gated"
    values = [norm.output]
    for value in values:
        for user in (graph[u] for u in graph.users[value] if u != "output"):
            if user.kind in CASTS | SHAPE:
                values.append(user.name)
            elif user.kind == "mul" and len(user.data) == 2:
                other = next((n for n in user.data if n != value), value)
                if _activated(graph, other):
                    return "gated"
                width = graph.width(norm.output, norm.axis)
                if (
                    other in graph.constant
                    or graph.reaches(norm.output, other)
                    or graph.width(other, norm.axis) != width
                ):
                    continue
                timed = not graph.reaches(norm.source, other) and _mixed(graph, other, norm.axis)
                return "time-dependent" if timed else "adaptive"
    return ""


def _activated(graph: OpGraph, name: str) -> bool:
    """Return whether a value that data give is an activation, silu written out included."""
    op = graph[name]
    while op.kind in CASTS | SHAPE and op.data:
        op = graph[op.data[0]]
    if op.name in graph.constant:
        return False
    written = op.kind == "mul" and any(graph[n].kind == "sigmoid" and graph[n].data[0] in op.data for n in op.data)
    return op.kind in ACTIVATIONS or written


def _mixed(graph: OpGraph, name: str, axis: int) -> bool:
    """Return whether a value gets its channels from stored vectors alone, scaled by numbers that data give."""
    if name in graph.constant or len(graph[name].shape or ()) < -axis or graph.width(name, axis) == 1:
        return True
    return graph[name].kind in ELEMENTWISE and all(_mixed(graph, n, axis) for n in graph[name].data)
