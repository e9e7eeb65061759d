"""Tapers: exactly the teacher where they start, exactly a network of plain norms where they end, in true float64."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_leaves

import lnrewrite as lnr
import zoo
from lnrewrite import demo
from lnrewrite.healing.folding import fold
from lnrewrite.healing.tapers import Taper, Tapering
from lnrewrite.healing.view import View, tapered
from lnrewrite.ir import Kind, Norm, Placement, Where
from lnrewrite.models.calibration import flat_inputs
from lnrewrite.models.program import Program
from lnrewrite.passes.place import WANTED
from tiers import rows

START, END = 1e-9, 1e-9
MOVES = {
    "gpt2": ("peri", "output", "none", "post"),
    "gpt_neox": ("peri", "output", "none", "post"),
    "falcon": ("none", "post"),
    "llama": ("peri", "output", "none", "post"),
    "olmo2": ("pre", "peri", "none"),
    "gemma2": ("pre", "output", "none"),
    "bert": ("pre", "peri"),
    "whisper": ("peri", "post"),
}


SAMPLE = (
    ("gpt2", "peri"), ("llama", "output"), ("bert", "peri"),
)  # fmt: skip


def shaken(program: Program) -> None:
    """Move every weight, as training does: what is folded must hold for any values."""
    draw = torch.Generator().manual_seed(1)
    for parameter in program.module().parameters():
        parameter.data += 0.03 * parameter.abs().mean() * torch.randn(parameter.shape, generator=draw).double()


def first(outputs: object) -> torch.Tensor:
    return next(t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.is_floating_point())


def ends(
    teacher: Program, inputs: dict[str, torch.Tensor], to: str, final: bool = False, stages: tuple[str, ...] = ()
) -> tuple[Program, float, float]:
    """Return the folded network, and how far the view is from the teacher at the start and from it at the end."""
    norms = [site.norm for s in teacher.network.streams for _, site in s.sites()]
    style = norms[0].kind, 1e-6, norms[0].kind is Kind.LAYER
    wanted = {b.name: frozenset(WANTED[Placement(to)]) for b in teacher.network.blocks}
    with zoo.float64():
        tapering = Tapering(teacher, wanted, [inputs], style, stages, final)
        view = View(tapering.program, tapering.tapers)
        given = flat_inputs(teacher.module(), inputs)
        one, two = first(teacher.module()(**inputs)), first(view(*given).outputs)
        view.follow(torch.randn(2, len(tapering.tapers)))  # of what is a norm still, any size is the same
        start = max(((one - each).norm() / one.norm()).item() for each in (two, first(view(*given).outputs)))
        shaken(tapering.program)
        view.tapers[:, :2] = 1 - view.tapers[:, :2]
        folded = fold(tapering, tapering.program, view.sizes)
        one, two = first(view(*given).outputs), first(folded.module()(**inputs))
        return folded, start, ((one - two).norm() / one.norm()).item()


@pytest.mark.parametrize(("family", "to"), rows([(f, to) for f, targets in MOVES.items() for to in targets], SAMPLE))
def test_both_ends_are_exact(family: str, to: str) -> None:
    teacher, inputs = zoo.captured(family, double=True)
    folded, start, end = ends(teacher, inputs, to)
    assert start <= START and end <= END
    with zoo.float64():
        again = lnr.capture(folded.module(), kwargs=inputs)
    assert {b.placement for b in again.network.blocks} == {Placement(to)}


@pytest.mark.parametrize("to", rows(["none", "peri"], sample=[]))
def test_the_final_norm_goes_too_and_the_head_is_untied(to: str) -> None:
    inputs = demo.calibration(1)[0]
    with zoo.float64():
        teacher = lnr.capture(demo.load("tinygpt").double(), kwargs=inputs)
    folded, start, end = ends(teacher, inputs, to, final=True)
    assert start <= START and end <= END
    assert folded.inspect()["streams"][0]["final_norm"] is None
    assert folded.inspect()["norms"]["total"] == (0 if to == "none" else 24)


def test_stages_move_one_after_the_other() -> None:
    inputs = demo.calibration(1)[0]
    teacher = lnr.capture(demo.load("tinygpt"), kwargs=inputs)
    wanted = {b.name: frozenset[Where]() for b in teacher.network.blocks}
    style = (Kind.LAYER, 1e-5, True)
    tapers = Tapering(teacher, wanted, [inputs], style, ("mlp", "attention", "final"), final=True).tapers
    stages = {t.site: t.stage for t in tapers}
    assert {stages[s] for s in stages if ".mlp." in s} == {0} and {stages[s] for s in stages if ".attn." in s} == {1}
    assert stages["blocks.final"] == 2 and len(stages) == 13


@pytest.mark.parametrize("seed", rows(range(40), sample=range(4)))
def test_a_schedule_takes_each_taper_from_end_to_end_and_outliers_last(seed: int) -> None:
    draw = random.Random(seed)
    count, stages = draw.randint(1, 30), draw.randint(1, 4)
    plain = Taper("a.in", "x", "y", Norm(Kind.RMS, 1e-6), 1.0, going=True)
    staged = sorted(draw.randrange(stages) for _ in range(count))
    tapers = [replace(plain, stage=s, turn=draw.random(), going=draw.random() < 0.7) for s in staged]
    last = staged[-1] + draw.randint(0, 1)
    before = [(float(t.going),) * 2 for t in tapers]
    assert [t.powers(0.0, last) for t in tapers] == before
    for step in range(1, 101):
        done = step / 100 * (last + 1)
        now = [t.powers(done, last) for t in tapers]
        for taper, old, new in zip(tapers, before, now, strict=True):
            assert all(b <= a if taper.going else b >= a for a, b in zip(old, new, strict=True))
            assert done > taper.stage or new == (float(taper.going),) * 2
            assert not taper.going or new[1] == 1 or done > last
        before = now
    assert before == [(float(not t.going),) * 2 for t in tapers]


@pytest.mark.parametrize("centered", [True, False])
def test_outliers_keep_their_norm_while_the_rest_is_a_constant(centered: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(5, 64, generator=draw, dtype=torch.float64)
    x[0] *= 300  # the first token of many decoders
    x[1] *= 7
    mean = x.mean(-1, keepdim=True) if centered else torch.zeros(5, 1, dtype=torch.float64)
    sizes = (x - mean).square().mean(-1, keepdim=True).sqrt()
    normed, constant = (x - mean) / sizes, x / 2
    for powers, expected in (
        ((1.0, 1.0), normed), ((0.0, 0.0), constant), ((0.0, 1.0), torch.cat([normed[:1], constant[1:]])),
    ):  # fmt: skip
        state = torch.tensor([[*powers, math.log(2)]], dtype=torch.float64)
        seen, y = tapered(x, state, 0, None, None, centered, 0.0, False, False)
        assert torch.allclose(y, expected, rtol=1e-12)
    assert torch.allclose(seen[1], (sizes[1:] / 2).log().mean())


def test_a_network_with_a_massive_token_has_a_stage_for_it_where_it_stays_near_the_teacher() -> None:
    inputs = demo.calibration(1)[0]
    module = demo.load("tinygpt").double()
    planted = int(inputs["input_ids"][0, 0])
    with torch.no_grad():
        next(p for n, p in module.named_parameters() if n.startswith("tok"))[planted] *= 2000
    with zoo.float64():
        teacher = lnr.capture(module, kwargs=inputs)
        wanted = {b.name: frozenset[Where]() for b in teacher.network.blocks}
        tapering = Tapering(teacher, wanted, [inputs], (Kind.LAYER, 1e-5, True))
        view = View(tapering.program, tapering.tapers)
        outputs = dict[tuple[float, float], torch.Tensor]()
        for powers in ((1.0, 1.0), (0.0, 1.0), (0.0, 0.0)):
            view.move([powers] * len(tapering.tapers))
            found = first(view(*flat_inputs(teacher.module(), inputs)).outputs)
            outputs[powers] = found[inputs["input_ids"] == planted]
    start, kept, gone = outputs.values()
    assert tapering.last == 1 and any(t.outliers for t in tapering.tapers)
    assert (kept - start).norm() < 0.1 * (gone - start).norm()


def test_values_move_in_a_stage_of_their_own() -> None:
    teacher, inputs = zoo.captured("llama", double=True)
    folded, start, end = ends(teacher, inputs, "none", stages=("mlp", "attention", "values"))
    assert start <= START and end <= END and folded.inspect()["norms"]["total"] == 1
    wanted = {b.name: frozenset[Where]() for b in teacher.network.blocks}
    with zoo.float64():
        tapering = Tapering(teacher, wanted, [inputs], (Kind.RMS, 1e-6, False), ("mlp", "attention", "values"))
        view = View(tapering.program, tapering.tapers)
        before = first(view(*flat_inputs(teacher.module(), inputs)).outputs)
        view.move([(float(t.stage < 2),) * 2 for t in tapering.tapers])
        after = first(view(*flat_inputs(teacher.module(), inputs)).outputs)
    assert {t.site.rpartition(".")[2] for t in tapering.tapers} == {"in", "values"}
    assert len({len(t.reads) for t in tapering.tapers if "attn" in t.site}) == 2  # queries and keys; values
    assert not torch.allclose(before, after)


@pytest.mark.parametrize(("family", "to"), [("bert", "output"), ("olmo2", "post"), ("bert", "none")])
def test_what_has_no_exact_start_is_refused(family: str, to: str) -> None:
    teacher, inputs = zoo.captured(family, double=True)
    with pytest.raises(lnr.LnrewriteError, match="LN602"):
        ends(teacher, inputs, to)


def test_a_view_has_the_models_outputs_states_and_gradients() -> None:
    teacher, inputs = zoo.captured("llama", double=True)
    module = teacher.module()
    for recompute in (False, True):
        view = View(teacher)
        view.recompute = recompute
        seen = view(*flat_inputs(module, inputs))
        assert set(seen.states) == {b.name for b in teacher.network.blocks}
        first(seen.outputs).square().sum().backward()
        ours = {n: p.grad.clone() for n, p in module.named_parameters()}
        module.zero_grad()
        whole = first(module(**inputs))
        assert torch.allclose(first(seen.outputs), whole, atol=1e-12)
        whole.square().sum().backward()
        assert all(torch.allclose(ours[n], p.grad, rtol=1e-6, atol=1e-9) for n, p in module.named_parameters())
        module.zero_grad()


def test_detached_parts_learn_from_their_own_state_alone() -> None:
    teacher, inputs = zoo.captured("llama", double=True)
    view = View(teacher)
    view.detached = True
    states = list(view(*flat_inputs(teacher.module(), inputs)).states.items())
    states[1][1].sum().backward()
    touched = {n.split(".")[2] + n.split(".")[3] for n, p in teacher.module().named_parameters() if p.grad is not None}
    assert touched == {"0mlp", "0post_attention_layernorm"}
