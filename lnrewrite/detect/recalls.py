"""Find the sums that take an earlier state of a stream up again, beside a later one, each times a stored factor.

They are no blocks, as no weights make what they add: links to the embedding (`x = r * x + l * x0`: nanochat,
modded-nanogpt), and the skips of a U-shaped stack (`x = x + w * x3`). The stream goes on through them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .graph import CASTS, OpGraph
from .joins import Join, carried_on, scaled


@dataclass(frozen=True, slots=True)
class Recall:
    """Hold one such sum: it goes on from `state`; `path` are the values between the earlier state and the sum.

    `barrier` names what no linear map of the channels passes on that path: a factor for each channel, a reshape.
    """

    state: str
    path: tuple[str, ...]
    barrier: str = ""


def find_recalls(graph: OpGraph, joins: Sequence[Join]) -> dict[str, Recall]:
    """Return the sums among `joins`, in execution order, that only take an earlier state up again, by their totals."""
    sums: dict[str, Join] = {}
    found: dict[str, Recall] = {}
    for join in joins:
        state = next((n for n in carried_on(graph, join.branches[0][0]) if n in sums or n in found), None)
        alone = len(join.branches) == 1 and not join.extras and scaled(graph, join.skip)
        if alone and state and join.root in _before(graph, state, sums, found):
            path = _path(graph, join)
            barrier = next((f"{graph[n].kind} of an earlier state" for n in path if not _plain(graph, n)), "")
            found[join.total] = Recall(state, path, barrier)
        else:
            sums[join.total] = join
    return found


def _before(graph: OpGraph, state: str, sums: Mapping[str, Join], found: Mapping[str, Recall]) -> Iterator[str]:
    """Yield the states that a state was made of, the latest first."""
    at: str | None = state
    while at is not None:
        held: Collection[str] = list(carried_on(graph, sums[at].root if at in sums else found[at].state))
        yield from held
        at = next((name for name in held if name in sums or name in found), None)


def _path(graph: OpGraph, join: Join) -> tuple[str, ...]:
    """Return what stands between the earlier state and the sum."""
    names = list(carried_on(graph, join.skip))
    return tuple(names[: names.index(join.root)])


def _plain(graph: OpGraph, name: str) -> bool:
    """Return whether a value is another one times one number, or cast."""
    op = graph[name]
    return op.kind in CASTS or (op.kind in {"mul", "div"} and any(graph.is_scalar(other) for other in op.inputs[:2]))
