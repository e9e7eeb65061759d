"""What every pass that claims an identity must hold on random networks; a new pass is tested by being registered.

Below them, wrong variants of the shipped ones: each forgets one thing that the field forgets, and must be caught.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from lnrewrite import registry
from lnrewrite.plan import Edit, Exactness, FoldReader, Gain, Operation, Proposal, SetNorm
from lnrewrite.ref import Machine, apply, invent
from lnrewrite.stream import Stream, Where, site_name
from lnrewrite.text import parse
from strategies import assert_same, context, machines


def exact_passes() -> list[Any]:
    """Return an instance of every registered pass that works without options and is exact."""
    found = []
    for name in registry.available():
        try:
            item = registry.find(name)()
        except TypeError:  # it needs options: its own tests give them
            continue
        if item.exactness <= Exactness.ALGEBRAIC:
            found.append(item)
    return found


every = pytest.mark.parametrize("item", exact_passes(), ids=lambda item: item.name)


@every
@given(machine=machines())
def test_outputs_stay(item: Any, machine: Machine) -> None:
    assert_same(machine, apply(machine, item.propose(machine.stream, context(machine))))


@every
@given(machine=machines())
def test_a_second_run_finds_nothing_to_do(item: Any, machine: Machine) -> None:
    once = apply(machine, item.propose(machine.stream, context(machine)))
    again = item.propose(once.stream, context(once))
    assert again.edits == ()
    assert apply(once, again).stream == once.stream


@every
@given(machine=machines())
def test_every_site_is_edited_refused_or_not_applicable(item: Any, machine: Machine) -> None:
    stream = machine.stream
    proposal = item.propose(stream, context(machine))
    refused, skipped = [r.site for r in proposal.refusals], [site for site, _ in proposal.not_applicable]
    named = [*edited_sites(stream, proposal), *refused, *skipped]
    assert len(named) == len(set(named))
    wanted = {name for name, _ in stream.sites()} | {b.name for b in stream.blocks if not b.sites}
    assert set(named) == wanted
    assert all(why for _, why in proposal.not_applicable)


def edited_sites(stream: Stream, proposal: Proposal) -> list[str]:
    """Return the names of the sites whose norm an edit sets."""
    blocks = {b.name: b for b in stream.blocks}
    names = []
    for edit in proposal.edits:
        for operation in edit.operations:
            if isinstance(operation, SetNorm):
                block = blocks.get(edit.target)
                site = block and block.at(operation.where)
                names.append(site_name(block, site) if block and site else edit.target)
    return names


@given(machine=machines())
def test_fold_affine_final_folds_the_head(machine: Machine) -> None:
    item = registry.find("fold-affine")(final=True)
    proposal = item.propose(machine.stream, context(machine))
    after = apply(machine, proposal)
    assert_same(machine, after)
    final = machine.stream.final
    if final and final.norm.gamma and not any(r.shared for r in final.readers):
        assert after.stream.final and after.stream.final.norm.gamma is None


# ---- wrong variants: what each forgets, and that it is caught ----

PICTURE = """
stream toy width=6
  block a attention pre
    in     layer(eps=0.1 gamma=1+@g beta=@t) -> @q.weight:1 @k.weight:1+@k.bias
    inner  rms(eps=0.1 gamma=@i beta=@j) -> @o.weight:1+@o.bias
    writes @o.weight:0+@o.bias
  block b mlp peri group=0
    in     rms(eps=0.1 gamma=@h) -> @u.weight:0 @v.weight:0
    reads  @u.weight:0
    out    rms(eps=0.1 gamma=1+@p)
    writes @d.weight:1
  block c mlp pre group=0
    in     rms(eps=0.1 gamma=@h) -> @u.weight:0 @v.weight:0
    reads  @v.weight:0
    writes @e.weight:1
  final  layer(eps=0.1 gamma=1+@f beta=@z) -> @head.weight:1
"""


def each(change: Callable[[Operation], Operation | None]) -> Callable[[Proposal], Proposal]:
    """Make a wrong variant that changes, or forgets, single operations."""

    def wrong(proposal: Proposal) -> Proposal:
        edits = [replace(e, operations=tuple(n for o in e.operations if (n := change(o)))) for e in proposal.edits]
        return replace(proposal, edits=tuple(edits))

    return wrong


def forget_a_reader(proposal: Proposal) -> Proposal:
    """Leave out the last reader of the first norm."""
    first = proposal.edits[0]
    readers = [o for o in first.operations if isinstance(o, FoldReader)]
    kept = tuple(o for o in first.operations if o is not readers[-1])
    return replace(proposal, edits=(replace(first, operations=kept), *proposal.edits[1:]))


def fold_twice(proposal: Proposal) -> Proposal:
    """Fold a norm that two parallel blocks share with each of them."""
    shared = next(e for e in proposal.edits if e.target == "b")
    return replace(proposal, edits=(*proposal.edits, Edit("c", shared.operations)))


def one_of_two(proposal: Proposal) -> Proposal:
    """Take the affine from one of the two blocks that share a norm."""
    return replace(proposal, edits=tuple(e for e in proposal.edits if e.target != "c"))


def on_folds(change: Callable[[FoldReader], Operation | None]) -> Callable[[Proposal], Proposal]:
    return each(lambda o: change(o) if isinstance(o, FoldReader) else o)


def on_norms(change: Callable[[SetNorm], Operation | None]) -> Callable[[Proposal], Proposal]:
    return each(lambda o: change(o) if isinstance(o, SetNorm) else o)


def without_eps(edit: SetNorm) -> SetNorm:
    return replace(edit, norm=edit.norm and replace(edit.norm, eps=0.0))


def other_convention(fold: FoldReader) -> FoldReader:
    assert isinstance(fold.scale, Gain)
    return replace(fold, scale=Gain(fold.scale.param, not fold.scale.plus_one))


WRONG: dict[str, tuple[str, Callable[[Proposal], Proposal]]] = {
    "the bias": ("fold-affine", on_folds(lambda o: replace(o, shift=None))),
    "the gain": ("fold-affine", on_folds(lambda o: replace(o, scale=None))),
    "the one of 1 + w": ("fold-affine", on_folds(other_convention)),
    "a reader": ("fold-affine", forget_a_reader),
    "every reader": ("fold-affine", on_folds(lambda o: None)),
    "the norm": ("fold-affine", on_norms(lambda o: None)),
    "eps": ("fold-affine", on_norms(without_eps)),
    "that a norm is shared": ("fold-affine", fold_twice),
    "the other block of a shared norm": ("fold-affine", one_of_two),
    "the stored gain": ("canonicalize", on_norms(lambda o: replace(o, gamma=None))),
    "eps of a plain gain": ("canonicalize", on_norms(without_eps)),
}


@pytest.mark.parametrize("forgotten", WRONG)
@pytest.mark.parametrize("seed", range(3))
def test_a_pass_that_forgets_is_caught(forgotten: str, seed: int) -> None:
    name, spoil = WRONG[forgotten]
    machine = invent(parse(PICTURE).streams[0], seed)
    right = registry.find(name)().propose(machine.stream, context(machine))
    wrong = spoil(right)
    assert wrong != right
    assert_same(machine, apply(machine, right))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_same(machine, apply(machine, wrong))


def test_shared_norms_are_folded_once() -> None:
    machine = invent(parse(PICTURE).streams[0], 0)
    proposal = registry.find("fold-affine")().propose(machine.stream, context(machine))
    by_target = {e.target: [type(o).__name__ for o in e.operations if o] for e in proposal.edits if e.target in "bc"}
    assert by_target == {"b": ["FoldReader", "FoldReader", "SetNorm"], "c": ["SetNorm"]}
    after = apply(machine, proposal).stream
    assert [b.sites[0].norm.gamma for b in after.blocks if b.at(Where.IN)] == [None, None, None]
