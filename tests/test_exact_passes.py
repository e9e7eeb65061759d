"""What every pass that claims an identity must hold on random networks; a new pass is tested by being registered.

Below them, wrong variants of the shipped ones: each forgets one thing that the field forgets, and must be caught.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from lnrewrite.ir import (
    Affine,
    Center,
    DropScale,
    Edit,
    Exactness,
    FoldReader,
    Gain,
    Normalize,
    Operation,
    Proposal,
    ScaleWriter,
    SetNorm,
    Size,
    Stream,
    Where,
    site_name,
)
from lnrewrite.ir.text import parse
from lnrewrite.pipeline import Pipeline, registry
from lnrewrite.testing.reference import Machine, apply, invent
from zoo.streams import assert_same, context, machines


def exact_passes() -> list[Any]:
    """Return an instance of every registered pass that works without options and is exact."""
    found = []
    for name in registry.available():
        try:
            item = registry.find(name)()
        except (TypeError, ValueError):  # it needs options: its own tests give them
            continue
        if item.exactness <= Exactness.ALGEBRAIC:
            found.append(item)
    return found


every = pytest.mark.parametrize("item", exact_passes(), ids=lambda item: item.name)


@every
@given(machine=machines())
def test_outputs_stay(item: Any, machine: Machine) -> None:
    assert_same(machine, apply(machine, item.propose(machine.stream, context(machine))))


AGAIN = {"rotate-stream", "scale-norms"}
"""Passes that do the same again when they are asked to: on the machine, a picture says nothing of what they put in."""


@pytest.mark.parametrize("item", [i for i in exact_passes() if i.name not in AGAIN], ids=lambda item: item.name)
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
    edited = edited_sites(stream, proposal)
    assert not set(edited) & {*refused, *skipped} and not set(refused) & set(skipped)
    assert len(skipped) == len(set(skipped)) and all(why for _, why in proposal.not_applicable)
    named = {*edited, *refused, *skipped}
    owners = {site_name(b, s): b.name for b in stream.blocks for s in b.sites}
    owners |= {b.name: b.name for b in stream.blocks if not b.sites}
    edited_blocks = {e.target for e in proposal.edits}
    for name in [n for n, _ in stream.sites()] + [b.name for b in stream.blocks if not b.sites]:
        whole = owners.get(name, name)
        assert named & {name, whole, stream.name} or (whole == name and whole in edited_blocks), name
    assert named <= {*owners, *owners.values(), stream.name, f"{stream.name}.embedding", f"{stream.name}.final"}


def edited_sites(stream: Stream, proposal: Proposal) -> list[str]:
    """Return the names of the sites whose norm an edit sets."""
    blocks = {b.name: b for b in stream.blocks}
    names = []
    for edit in proposal.edits:
        for operation in edit.operations:
            if isinstance(operation, SetNorm):
                block = blocks.get(edit.target)
                site = block and block.at(operation.where, operation.index)
                names.append(site_name(block, site) if block and site else edit.target)
    return names


OPTIONED = (
    "crmsnorm-to-rmsnorm{back=true}",
    "rescale-stream{by=0.25}",
    "rescale-stream{by=3}",
    "layernorm-to-rmsnorm{sources=weights}",
    "untie{what=all}",
    "place{to=pre keep-sizes}",
)


@pytest.mark.parametrize("text", [*OPTIONED, "rotate-stream{kind=random seed=3}"])
@given(machine=machines())
def test_outputs_stay_with_options(text: str, machine: Machine) -> None:
    (item,) = Pipeline.parse(text).passes
    assert_same(machine, apply(machine, item.propose(machine.stream, context(machine))))


@pytest.mark.parametrize(
    "text", ["fold-affine{final=true}", "layernorm-to-rmsnorm", "rotate-stream", "fold-embedding-norm"]
)
@given(machine=machines())
def test_planning_needs_no_weights(text: str, machine: Machine) -> None:
    """A model on the meta device is planned by its picture alone."""

    def unknown(param: str) -> Any:
        raise AssertionError(f"{param} was looked at")

    (item,) = Pipeline.parse(text).passes
    asked = replace(context(machine), values=unknown, is_ones=unknown, is_zeros=unknown)
    assert item.propose(machine.stream, asked).edits == item.propose(machine.stream, context(machine)).edits


@given(machine=machines())
def test_presets_keep_the_outputs(machine: Machine) -> None:
    """Presets run as with --partial: what a pass refuses, the next one meets as it is."""
    for preset in ("inference", "quantize"):
        now = machine
        for item in Pipeline.preset(preset).passes:
            now = apply(now, item.propose(now.stream, context(now)))
        assert_same(machine, now, 1e-7)


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


CENTRED = """
stream toy width=6
  source @wte.weight:1(table) @wpe.weight:1(table)
  block a attention pre
    in     layer(eps=0.1 gamma=@g beta=@t) -> @q.weight:1
    arm    @v.weight:0+@v.bias -> @o.weight:1+@o.bias run=2
    writes @o.weight:0+@o.bias
  block b mlp pre
    in     layer(eps=0.1) -> @u.weight:0
    writes @d.weight:1
  final  layer(eps=0.1 gamma=@f) -> @head.weight:1
"""
BARE = CENTRED.replace("layer(", "rms(").replace(" gamma=@g beta=@t", "").replace(" gamma=@f", "")
SCALED = """
stream toy width=6
  source @wte.weight:1(table)
  block a attention pre
    in     rms(eps=0.1 gamma=@g beta=@t) -> @q.weight:1(inexact)
    scale  read *0.5
    scale  written *@ls vector
    writes @o.weight:0+@o.bias
  block b mlp output
    out    layer(eps=0.1 gamma=@h beta=@k)
    scale  written *-1.5
    scale  branch *@m
    reads  @u.weight:1
    writes @d.weight:1
  block c mlp post scale=1.5
    post   layer(eps=0.1 gamma=@p) -> @head.weight:1
    reads  @w.weight:1
    writes @e.weight:0
"""
STACKED = """
stream toy width=6
  source @wte.weight:1(table)
  embedding layer(eps=0.1 gamma=1+@g beta=@t)
  block a attention pre
    inner  batch(eps=0.1 gamma=@n beta=@z mean=@mean variance=@variance) width=6 <- @k.weight:0+@k.bias
    in     rms(eps=0.1) over rms(eps=0.3) -> @q.weight:1
    writes @o.weight:0
  final  rms(eps=0.1 gamma=@f) over layer(eps=0.3) -> @head.weight:1
"""
POSTED = """
stream toy width=6
  source @wte.weight:1(table)
  embedding rms(eps=0.1 gamma=@g beta=@t) -> @q.weight:1
  block a attention post
    post   layer(eps=0.2 gamma=1+@h beta=@k) -> @u.weight:0 @v.weight:1
    reads  @q.weight:1
    writes @o.weight:0+@o.bias
  block b mlp post group=0 scale=1.5
    post   layer(eps=0.3 gamma=@p beta=@r) -> @w.weight:1
    reads  @u.weight:0
    scale  written *0.5
    writes @d.weight:1
  block c mlp post group=0 scale=1.5
    post   layer(eps=0.3 gamma=@p beta=@r) -> @w.weight:1
    reads  @v.weight:1
    writes @y.weight:1
  block d mlp post
    post   layer(eps=0.1 gamma=@f) -> @head.weight:1
    reads  @w.weight:1
    writes @e.weight:0
"""


def on_sizes(change: Callable[[Affine, Size], Operation | None]) -> Callable[[Proposal], Proposal]:
    return each(lambda o: change(o, o.scale) if isinstance(o, Affine) and isinstance(o.scale, Size) else o)


def sizes_at(where: Where, before: bool = False) -> Callable[[Proposal], Proposal]:
    """Leave out the sizes at one edge."""
    return on_sizes(lambda o, size: None if (o.where, o.before) == (where, before) else o)


def on_affines(change: Callable[[Affine], Operation | None]) -> Callable[[Proposal], Proposal]:
    return each(lambda o: change(o) if isinstance(o, Affine) and not isinstance(o.scale, Size) else o)


def on_writers(change: Callable[[ScaleWriter], Operation | None]) -> Callable[[Proposal], Proposal]:
    return each(lambda o: change(o) if isinstance(o, ScaleWriter) else o)


def on_param(param: str, change: Callable[[Any], Operation | None]) -> Callable[[Proposal], Proposal]:
    """Change the operations on one parameter."""

    def there(o: Any) -> Operation | None:
        linear = getattr(o, "writer", None) or getattr(o, "reader", None)
        return change(o) if linear and linear.param == param else o

    return each(there)


def nothing(operation: Any) -> None:
    return None


def without_affine(operation: Operation) -> Operation | None:
    return None if isinstance(operation, Affine) else operation


def old_eps(before: float) -> Callable[[SetNorm], SetNorm]:
    return lambda o: replace(o, norm=o.norm and replace(o.norm, eps=before))


def without_scale(proposal: Proposal) -> Proposal:
    """Leave every factor in the graph, though the weights have taken it."""
    return each(lambda o: None if isinstance(o, DropScale) else o)(proposal)


def without_gain(o: Operation) -> Operation:
    return replace(o, norm=replace(o.norm, gamma=None, beta=None, plus_one=False)) if isinstance(o, Normalize) else o


KEEP = "place{to=pre keep-sizes}"
Spoil = Callable[[Proposal], Proposal]
WRONG: dict[str, tuple[str, str, Spoil]] = {
    "the bias": ("fold-affine", PICTURE, on_folds(lambda o: replace(o, shift=None))),
    "the gain": ("fold-affine", PICTURE, on_folds(lambda o: replace(o, scale=None))),
    "the one of 1 + w": ("fold-affine", PICTURE, on_folds(other_convention)),
    "a reader": ("fold-affine", PICTURE, forget_a_reader),
    "every reader": ("fold-affine", PICTURE, on_folds(nothing)),
    "the norm": ("fold-affine", PICTURE, on_norms(nothing)),
    "eps": ("fold-affine", PICTURE, on_norms(without_eps)),
    "that a norm is shared": ("fold-affine", PICTURE, fold_twice),
    "the other block of a shared norm": ("fold-affine", PICTURE, one_of_two),
    "the stored gain": ("canonicalize", PICTURE, on_norms(lambda o: replace(o, gamma=None))),
    "eps of a plain gain": ("canonicalize", PICTURE, on_norms(without_eps)),
    "a writer's mean": ("layernorm-to-rmsnorm", CENTRED, on_param("d.weight", nothing)),
    "a position's mean": ("layernorm-to-rmsnorm", CENTRED, on_param("wpe.weight", nothing)),
    "the mean of a bias": (
        "layernorm-to-rmsnorm",
        CENTRED,
        on_param("o.weight", lambda o: replace(o, writer=replace(o.writer, bias=None))),
    ),
    "eps of an RMSNorm": ("layernorm-to-rmsnorm", CENTRED, on_norms(without_eps)),
    "the factor of a layer": ("scale-norms", CENTRED.replace("attention", "mlp"), each(without_affine)),
    "the gain of a layer": ("scale-norms", CENTRED.replace("attention", "mlp"), on_norms(nothing)),
    "eps of the stream's size": ("rescale-stream{by=0.5}", CENTRED, on_norms(old_eps(0.1))),
    "a writer's size": ("rescale-stream{by=0.5}", CENTRED, on_param("o.weight", nothing)),
    "a table's size": ("rescale-stream{by=0.5}", CENTRED, on_param("wte.weight", nothing)),
    "a writer's rotation": ("rotate-stream", BARE, on_param("d.weight", nothing)),
    "a reader's rotation": ("rotate-stream", BARE, on_param("q.weight", nothing)),
    "the head's rotation": ("rotate-stream", BARE, on_param("head.weight", nothing)),
    "the way back": (
        "rotate-stream{kind=random}",
        BARE,
        on_param("u.weight", lambda o: replace(o, scale=o.scale.transposed)),
    ),
    "eps of a CRMSNorm": ("crmsnorm-to-rmsnorm{back=true}", BARE, on_norms(old_eps(0.1))),
    "the mean in a writer": ("crmsnorm-to-rmsnorm{back=true}", BARE, on_param("d.weight", nothing)),
    "the mean in a reader": ("crmsnorm-to-rmsnorm{back=true}", BARE, on_param("q.weight", nothing)),
    "the rotation of values": ("rotate-stream", BARE, on_param("v.weight", nothing)),
    "a factor in the graph": ("absorb-scales", SCALED, without_scale),
    "a factor in the writer": ("absorb-scales", SCALED, on_param("o.weight", nothing)),
    "the bias behind LayerScale": (
        "absorb-scales",
        SCALED,
        on_param("o.weight", lambda o: replace(o, writer=replace(o.writer, bias=None))),
    ),
    "eps of DeepNorm, of gates": ("absorb-scales", SCALED, on_norms(old_eps(0.1))),
    "the gain of 1/sqrt(l), the sign of a gate": (
        "absorb-scales",
        SCALED,
        on_norms(lambda o: replace(o, gamma=None, beta=None)),
    ),
    "eps of two norms": ("merge-norms", STACKED, on_norms(old_eps(0.1))),
    "the factor of two norms": ("merge-norms", STACKED, on_norms(lambda o: replace(o, gamma=None))),
    "the shift of a batch norm": ("fold-batchnorm", STACKED, on_writers(lambda o: replace(o, shift=None))),
    "the weights of a batch norm": ("fold-batchnorm", STACKED, on_writers(nothing)),
    "the rows of the table": ("fold-embedding-norm", STACKED, each(lambda o: None if isinstance(o, Normalize) else o)),
    "the gain of the rows": ("fold-embedding-norm", STACKED, each(without_gain)),
    "eps of a size": (
        KEEP,
        POSTED,
        on_sizes(lambda o, size: replace(o, scale=replace(size, norm=replace(size.norm, eps=0.0)))),
    ),
    "the sizes before": (KEEP, POSTED, on_sizes(lambda o, size: replace(o, scale=replace(size, before=None)))),
    "the size of what a branch reads": (KEEP, POSTED, sizes_at(Where.IN, before=True)),
    "the size of what a branch adds": (KEEP, POSTED, sizes_at(Where.OUT)),
    "the size of the last state": (KEEP, POSTED, sizes_at(Where.POST, before=True)),
    "the mean of the trunk": (KEEP, POSTED, on_affines(lambda o: None if isinstance(o.scale, Center) else o)),
    "the gain of a trunk norm": (
        KEEP,
        POSTED,
        on_affines(lambda o: o if isinstance(o.scale, Center) else replace(o, scale=None)),
    ),
    "the bias of a trunk norm": (KEEP, POSTED, on_affines(lambda o: replace(o, shift=None))),
    "the norm that a branch reads through": (KEEP, POSTED, on_norms(lambda o: None if o.where is Where.IN else o)),
}


@pytest.mark.parametrize("forgotten", WRONG)
@pytest.mark.parametrize("seed", range(3))
def test_a_pass_that_forgets_is_caught(forgotten: str, seed: int) -> None:
    text, picture, spoil = WRONG[forgotten]
    machine = invent(parse(picture).streams[0], seed)
    (item,) = Pipeline.parse(text).passes
    right = item.propose(machine.stream, context(machine))
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
