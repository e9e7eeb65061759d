"""A fixed sample of random nets: no pass gives a wrong number or crashes on them, and none of their edits are lost."""

from __future__ import annotations

import pytest

from fuzz import judging, nets, tables
from fuzz.choices import Choices
from tiers import rows

EDITS = (
    3, 17, 13, 11, 0, 3, 3, 0, 16, 28, 0, 7, 0, 3, 0, 0, 0, 6, 0, 4, 8, 12, 3, 12, 0, 3, 28, 0, 24, 3,
    3, 0, 6, 0, 0, 4, 0, 0, 3, 3, 0, 3, 0, 0, 0, 9, 2, 15, 3, 3, 3, 3, 0, 16, 6, 13, 0, 12, 0, 13,
)  # fmt: skip
"""How many edits all pipelines together make of each net, at least."""


@pytest.mark.parametrize("seed", rows(range(len(EDITS)), sample=(9, 24, 26)))
def test_random_nets_are_edited_exactly_or_not_at_all(seed: int) -> None:
    row = judging.judge(seed)
    assert [told for told in judging.trouble(row) if told[1] != "caught"] == []
    assert sum(run["edits"] for run in row["runs"].values()) >= EDITS[seed]


FOUND = (
    (74, {"shape": "crossed", "depth": "3", "all.join": "baddbmm"}),
    (604, {"shape": "two towers"}),
    (268, {"layout": "maps", "all.norm.spelling": "var", "all.norm.gain": "scalar"}),
    (277, {"all.norm.kind": "mixed", "all.norm.one.kind": "rms", "all.norm.one.spelling": "eps outside"}),
    (388, {"all.placement": "output", "all.norm.kind": "batch"}),
    (426, {"layout": "channels first", "all.placement": "output"}),
    (16, {"layout": "channels first", "all.placement": "none", "block0.parallel": "two norms"}),
    (656, {"all.placement": "output", "block0.extra": "linear of the stream", "block0.extra where": "in the branch"}),
    (604, {"shape": "two towers", "block0.branch.down.linear": "stored transposed"}),
    (465, {"layout": "channels first", "depth": "3", "all.placement": "post", "all.join": "stack",
           "block2.extra": "source"}),
    (430, {"block0.branch.kind": "attention", "block0.branch.query norm": "yes", "block0.branch.norm.kind": "batch"}),
    (1223, {"all.norm.kind": "batch", "block0.parallel": "one norm", "block0.second.kind": "attention"}),
)  # fmt: skip
"""Nets that showed a fault, by what is not plain in them: wrong edits, or pictures that do not hold."""


@pytest.mark.parametrize("index", rows(range(len(FOUND)), sample=(1,)))
def test_what_was_found_stays_mended(index: int) -> None:
    seed, strange = FOUND[index]
    assert judging.trouble(judging.judge(seed, nets.plain_but(seed, strange))) == []


def test_a_choice_is_changed_and_the_others_stay() -> None:
    _, choices = nets.build(9)
    _, changed = nets.build(9, {"final": "no"})
    assert changed.made == choices.made | {"final": "no"}
    assert Choices(9).any("x", "abc") == Choices(9).any("x", "abc")


def test_what_two_versions_do_is_compared() -> None:
    run = {"verdict": "right", "edits": 3, "steps": {"fold-affine": 3}, "codes": {}}
    less = run | {"edits": 1, "steps": {"fold-affine": 1}, "codes": {"LN101": 2}}
    wrong = run | {"verdict": "wrong", "why": "1.0e+00 away", "caught": []}
    old = {0: {"seed": 0, "capture": "right", "runs": {"exact": run, "fp16": wrong}}}
    new = {0: {"seed": 0, "capture": "right", "runs": {"exact": less, "fp16": less}}}
    assert "3 edits then, 1 now (33.3%)" in tables.compared(old, new)
    assert "-2 net 0 exact: {'fold-affine': '3 -> 1'}; refusals more: LN101 2" in tables.compared(old, new)
    assert "wrong        1, in 1 nets" in tables.summary(old.values())
