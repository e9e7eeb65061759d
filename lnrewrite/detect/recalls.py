"""Find the sums that take earlier states of a stream up again, beside a later one, each times a stored factor.

They are no blocks, as no weights make what they add: links to the embedding (`x = r * x + l * x0`: nanochat,
modded-nanogpt), the skips of a U-shaped stack (`x = x + w * x3`), means over depth (DenseFormer, arXiv 2402.02622;
ELC-BERT, 2311.02265). The stream goes on through them.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .graph import CASTS, OpGraph
from .joins import Join, carried_on, scaled, summands


@dataclass(frozen=True, slots=True)
class Recall:
    """Hold one such sum: it goes on from `state`; `path` are the values between the earlier states and the sum.

    `barrier` names what no linear map of the channels passes on that path: a factor for each channel, a reshape.
    """

    state: str
    path: tuple[str, ...]
    barrier: str = ""


def find_recalls(graph: OpGraph, joins: Sequence[Join], whole: Container[str] = ()) -> dict[str, Recall]:
    """Return the sums among `joins`, in execution order, that only take earlier states up again, by their totals.

    `whole`: see `find_joins`.
    """
    sums: dict[str, Join] = {}
    found: dict[str, Recall] = {}
    for join in joins:
        recall = _recall(graph, [term for term, _ in summands(graph, join.total, whole)], sums, found)
        if recall:
            found[join.total] = recall
        else:
            sums[join.total] = join
    return found


def _recall(graph: OpGraph, terms: list[str], sums: Mapping[str, Join], found: Mapping[str, Recall]) -> Recall | None:
    """Return what a sum of these terms takes up again, where one is a state and all others are scaled earlier ones."""
    states = {t: n for t in terms if (n := next((n for n in carried_on(graph, t) if n in sums or n in found), None))}
    latest = max(states, key=lambda term: graph.index[states[term]], default=None)
    if latest is None:
        return None
    before, path = set(_before(graph, states[latest], sums, found)), list[str]()
    for term in terms:
        passed = list(carried_on(graph, term)) if term != latest else []
        if term != latest and (not scaled(graph, term) or before.isdisjoint(passed)):
            return None
        path += passed[: next((i for i, name in enumerate(passed) if name in before), 0)]
    barrier = next((f"{graph[n].kind} of an earlier state" for n in path if not _plain(graph, n)), "")
    return Recall(states[latest], tuple(path), barrier)


def _before(graph: OpGraph, state: str, sums: Mapping[str, Join], found: Mapping[str, Recall]) -> Iterator[str]:
    """Yield the states that a state was made of, the latest first."""
    at: str | None = state
    while at is not None:
        held: Collection[str] = list(carried_on(graph, sums[at].root if at in sums else found[at].state))
        yield from held
        at = next((name for name in held if name in sums or name in found), None)


def _plain(graph: OpGraph, name: str) -> bool:
    """Return whether a value is another one times one number, or cast."""
    op = graph[name]
    return op.kind in CASTS or (op.kind in {"mul", "div"} and any(graph.is_scalar(other) for other in op.inputs[:2]))
