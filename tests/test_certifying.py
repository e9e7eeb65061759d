"""A picture is tried on its model: what it says wrongly becomes a barrier, and what it says rightly stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch

import lnrewrite as lnr
import zoo
from lnrewrite.ir import Block, Kind, Network, Site, Where
from lnrewrite.models.onnx_program import OnnxProgram
from lnrewrite.pipeline.certifying import CONTRADICTED, certify
from tiers import rows
from zoo import strangers

Wrong = Callable[[Block], Block]


def at(where: Where, change: Callable[[Site], Site]) -> Wrong:
    """Return what changes a block's site of that kind."""
    return lambda b: replace(b, sites=tuple(change(s) if s.where is where else s for s in b.sites))


def normed(**changes: object) -> Callable[[Site], Site]:
    return lambda s: replace(s, norm=replace(s.norm, **changes))


FALSE: dict[str, tuple[str, Wrong]] = {
    "another eps": ("pre", at(Where.IN, normed(eps=0.1))),
    "another kind": ("pre", at(Where.IN, normed(kind=Kind.RMS))),
    "no gain": ("pre", at(Where.IN, normed(gamma=None))),
    "no bias": ("pre", at(Where.IN, normed(beta=None))),
    "a reader too few": ("pre", at(Where.IN, lambda s: replace(s, readers=s.readers[1:]))),
    "readers turned": ("pre", at(Where.IN, lambda s: replace(s, readers=tuple(replace(r, axis=0) for r in s.readers)))),
    "out norm of another eps": ("peri", at(Where.OUT, normed(eps=0.1))),
    "trunk norm of another eps": ("post", at(Where.POST, normed(eps=0.1))),
    "trunk norm of another kind": ("post", at(Where.POST, normed(kind=Kind.RMS))),
    "no writer's bias": ("pre", lambda b: replace(b, writers=tuple(replace(w, bias=None) for w in b.writers))),
    "a writer turned": ("pre", lambda b: replace(b, writers=tuple(replace(w, axis=1) for w in b.writers))),
    "a reader for a writer": ("pre", lambda b: replace(b, writers=b.readers[:1])),
    "a skip that is scaled": ("pre", lambda b: replace(b, scale=2.0)),
    "a reader too few, bare": ("none", lambda b: replace(b, readers=b.readers[1:])),
}  # fmt: skip
"""What a picture may say of one block that is not so: the net's placement, and the change."""


def swapped(network: Network, index: int, change: Wrong) -> Network:
    """Return a network with one block of its first stream changed."""
    stream = network.streams[0]
    blocks = tuple(change(b) if i == index else b for i, b in enumerate(stream.blocks))
    return replace(network, streams=(replace(stream, blocks=blocks), *network.streams[1:]))


@pytest.mark.parametrize(("name", "index"), rows(product(FALSE, (0, 2)), sample=list(product(FALSE, (0, 2)))[::5]))
def test_what_is_said_wrongly_becomes_a_barrier_there_alone(
    name: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement, change = FALSE[name]
    program = zoo.program(placement)
    wrong = swapped(program.network, index, change)
    assert wrong != program.network or "few" in name
    monkeypatch.setitem(vars(program), "detection", replace(program.detection, network=wrong))
    found = certify(program)
    assert found is not None
    blocks = zip(found.streams[0].blocks, wrong.streams[0].blocks, strict=True)
    assert [i for i, (new, old) in enumerate(blocks) if new != old] == [index]
    assert CONTRADICTED in str(found.streams[0].blocks[index].barriers)
    assert {r.code for r in found.refusals} == {"LN208"}


@pytest.mark.parametrize("name", rows(strangers.STRANGERS, sample=list(strangers.STRANGERS)[::6]))
def test_a_picture_that_is_right_stays_as_it_is(name: str) -> None:
    module, args = strangers.build(name, torch.float64)
    with zoo.float64():
        program = lnr.capture(module, args)
    assert program.certified is program.network


@pytest.mark.parametrize("name", ("a reader too few", "a skip that is scaled"))
def test_an_onnx_model_is_tried_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    placement, change = FALSE[name]
    program = OnnxProgram(zoo.program(placement).to_onnx())
    assert program.certified is program.network
    wrong = swapped(program.network, 0, change)
    monkeypatch.setitem(vars(program), "detection", replace(program.detection, network=wrong))
    found = certify(program)
    assert found is not None and CONTRADICTED in str(found.streams[0].blocks[0].barriers)
    assert CONTRADICTED not in str(found.streams[0].blocks[1:])


def test_a_conversion_takes_it_for_a_barrier_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    program = zoo.program("pre")
    wrong = swapped(program.network, 0, at(Where.IN, lambda s: replace(s, readers=s.readers[1:])))
    monkeypatch.setitem(vars(program), "detection", replace(program.detection, network=wrong))
    monkeypatch.delitem(vars(program), "certified", raising=False)
    report = lnr.Pipeline.parse("place{to=none}").run(program).report
    assert any(note.startswith("LN208 layers.0.branch.in: what reads it") for note in report.notes)
    assert report.drift is not None and report.drift["relative_error"] < 0.5
    assert [row["code"] for row in program.inspect()["refusals"]] == ["LN208"]
    monkeypatch.delitem(vars(program), "certified", raising=False)


def test_a_model_without_numbers_is_not_tried_and_says_so() -> None:
    with torch.device("meta"):
        module = zoo.build("pre")[0]
    kwargs = {name: value.to("meta") for name, value in zoo.build("pre")[1].items()}
    program = lnr.capture(module, kwargs=kwargs)
    assert any("not checked numerically" in note for note in program.inspect()["notes"])
