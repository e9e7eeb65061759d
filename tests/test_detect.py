"""Detection on hand-written nets: placements, kinds, end norms, look-alikes, and what is refused in words."""

from __future__ import annotations

import pytest

import lnrewrite as lnr
from lnrewrite.stream import Network
from nets import DECOYS, NETS, REFUSED, Case


def seen(case: Case) -> Network:
    module, args = case.build()
    return lnr.capture(module, args).network


def placements(network: Network) -> list[str]:
    """Return placements in execution order, the branches of one sum as one `parallel`."""
    found: dict[tuple[str, object], str] = {}
    for stream in network.streams:
        for block in stream.blocks:
            group = block.parallel_group
            alone = group is None
            found[stream.name, block.name if alone else group] = block.placement if alone else "parallel"
    return list(found.values())


@pytest.mark.parametrize("name", [*NETS, *DECOYS])
def test_placement(name: str) -> None:
    case = {**NETS, **DECOYS}[name]
    network = seen(case)
    assert placements(network) == case.truth
    assert len(network.streams) == case.streams
    if case.final is not None:
        assert all(bool(s.final) is case.final for s in network.streams)
    assert any(s.embedding for s in network.streams) is case.embedding
    if case.kinds:
        kinds = [b.kind for b in network.blocks if b.parallel_group is None]
        assert kinds == case.kinds.split() or any(b.parallel_group is not None for b in network.blocks)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_beyond_the_picture_is_named_and_not_guessed(name: str) -> None:
    network = seen(REFUSED[name])
    assert placements(network) == []
    assert {getattr(r, "code", "") for r in network.refusals} & set(REFUSED[name].codes)
