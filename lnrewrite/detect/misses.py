"""Say why a model without residual sums has none, by what comes nearest to one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..errors import Code, LnrewriteError, Refusal
from .graph import CASTS, SHAPE, OpGraph
from .joins import carries_features, is_sublayer

REMEDY = "give the part of the model that holds the residual blocks"


def none_found(name: str, refusals: Iterable[Refusal]) -> LnrewriteError:
    """Return the error for a model, called `name`, in which no residual block was found: the first of what hindered."""
    nothing = Refusal(Code.LN201, "model", "no residual block was found", REMEDY)
    first = next(iter(refusals), nothing)
    return LnrewriteError.of(first.at(f"{name}: {first.site}"))


def nearest_miss(graph: OpGraph) -> Refusal:
    """Return why a model without residual sums has none: its skips pass weights (LN204) or mixtures (LN203)."""
    for op in reversed(list(graph)):
        widths = graph.width(op.name), graph.width(op.name, 1 - len(op.shape or ()))
        if op.kind != "add" or len(op.data) != 2 or max(widths) < 2:
            continue
        for skip, other in (op.data, op.data[::-1]):
            for root, through in _carried(graph, skip):
                if through and carries_features(graph, root) and is_sublayer(graph, root, other):
                    code = Code.LN204 if through & {"linear", "conv"} else Code.LN203
                    mixed = "stored weights (static hyper-connections, arXiv 2409.19606)"
                    mixed = "data-dependent weights" if "data" in through else mixed
                    what = "a linear map or convolution" if code == Code.LN204 else f"a mixture with {mixed}"
                    return Refusal(code, op.name, f"the skip from {root} passes through {what}")
    if attended := _attended(graph):
        why = f"{attended} reads earlier outputs by a softmax over them (attention residuals, arXiv 2603.15031)"
        return Refusal(Code.LN203, attended, why)
    why = "no add joins a value with something that weights compute from it"
    return Refusal(Code.LN201, "model", why, REMEDY)


def _carried(graph: OpGraph, name: str) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield (value, the kinds of op that change it on the way) for what a skip may carry, up to a dozen steps back."""
    todo: list[tuple[str, frozenset[str]]] = [(name, frozenset())]
    for _ in range(12):
        if not todo:
            return
        name, through = todo.pop(0)
        yield name, through
        op = graph[name]
        if op.kind in SHAPE | CASTS | {"batch_norm", "sum", "add", "gather"}:
            todo += [(n, through) for n in op.data if n not in graph.constant]
        elif op.kind in {"linear", "conv"} and not through:
            todo.append((op.data[0], frozenset({op.kind})))
        elif op.kind in {"matmul", "bmm", "einsum", "mul"}:
            weights = "stored" if any(n in graph.constant for n in op.data) else "data"
            todo += [(n, through | {op.kind, weights}) for n in op.data if n not in graph.constant]


def _attended(graph: OpGraph) -> str:
    """Return a product of several values, put together, with a softmax: attention over depth; empty without one."""
    for op in graph:
        origins = set[str]()
        for name in op.data if op.kind == "mul" and len(op.data) == 2 else ():
            while graph[name].kind in SHAPE | CASTS and graph[name].data:
                name = graph[name].data[0]
            origins.add(graph[name].kind)
        if len(origins) == 2 and origins & {"cat", "stack"} and any("softmax" in kind for kind in origins):
            return op.name
    return ""
