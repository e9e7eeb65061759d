"""Detection, against the truth read from the models' code: of hand-written nets and of every transformers family.

The graphs are files (zoo/graphs.py), so that all are looked at in seconds; that they are what a capture gives today is
seen on a sample here, and on all of them with `-m exhaustive`.
"""

from __future__ import annotations

import pytest
import torch

import lnrewrite as lnr
import zoo
from lnrewrite.detect.detection import detect
from lnrewrite.ir import text
from tiers import rows
from zoo import CASES, DECOYS, FAMILIES, NETS, REFUSED, WRITTEN, graphs, strangers

LIVE = (
    "pre", "parallel, peri", "norm over axis 1", "u-net", "ResNet", "llama", "gpt_neox",
    "score bias and temperature", "opt.do_layer_norm_before=False", "gemma2", "patchtst",
)  # fmt: skip
"""Models that are captured in every run: an idea of capture, lift or detection each."""

NO_GRAPH = {name for name in FAMILIES if not graphs.path(name).exists()}
"""Families that cannot be built small or captured; `test_all_but_a_few_have_graphs` counts them."""


@pytest.mark.parametrize("name", [*NETS, *DECOYS, *WRITTEN])
def test_placement(name: str) -> None:
    case, network = CASES[name], detect(graphs.read(name)).network
    assert zoo.placements(network) == case.truth
    assert len(network.streams) == case.streams
    if case.final is not None:
        assert all(bool(s.final) is case.final for s in network.streams)
    if name not in WRITTEN:
        assert any(s.embedding for s in network.streams) is case.embedding
    if case.kinds:
        kinds = [b.kind for b in network.blocks if b.parallel_group is None]
        assert kinds == case.kinds.split() or any(b.parallel_group is not None for b in network.blocks)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_beyond_the_picture_is_named_and_not_guessed(name: str) -> None:
    network = detect(graphs.read(name)).network
    assert zoo.placements(network) == []
    assert {r.code for r in network.refusals} & set(REFUSED[name].codes)


@pytest.mark.parametrize("name", [n for n in FAMILIES if n not in NO_GRAPH])
def test_family(name: str) -> None:
    truth, network = FAMILIES[name], detect(graphs.read(name)).network
    if truth["blocks"] == "unsupported":
        assert not network.streams and network.refusals
        return
    assert zoo.spelled(zoo.placements(network)) == truth["blocks"]
    assert "streams" not in truth or len(network.streams) == truth["streams"]
    assert "final" not in truth or bool(network.streams[-1].final) is truth["final"]


def test_all_but_a_few_have_graphs() -> None:
    assert len(NO_GRAPH) <= 5, sorted(NO_GRAPH)


@pytest.mark.parametrize("name", rows((*CASES, *(n for n in FAMILIES if n not in NO_GRAPH)), sample=LIVE))
def test_a_capture_gives_the_picture_of_the_graph(name: str) -> None:
    torch.manual_seed(0)
    program = zoo.capture(*zoo.build(name))
    assert text.render(program.network) == text.render(detect(graphs.read(name)).network)
    assert program.certified is program.network, "what is seen is not so"


@pytest.mark.parametrize("name", rows(("gpt2", "llama", "bert", "t5"), sample=("gpt2", "bert")))
def test_dtype_and_mode_do_not_change_the_picture(name: str) -> None:
    module, inputs = zoo.build(name, depth=1)
    picture = str(lnr.capture(module, kwargs=inputs).stream)
    assert str(lnr.capture(module.train(), kwargs=inputs).stream) == picture
    half = lnr.capture(module.eval().to(torch.bfloat16), kwargs=inputs)
    assert str(half.stream) == picture


def test_an_attention_mask_does_not_change_the_picture() -> None:
    module, inputs = zoo.build("llama", depth=1)
    masked = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}
    assert lnr.capture(module, kwargs=masked).stream == lnr.capture(module, kwargs=inputs).stream


BESIDE = {
    "positions at each layer": "adds   @pos:1(uses=4,table)",
    "a bias in the sum": "adds   @b:1(uses=4,table)",
    "an input of its own": "adds   @p:1(uses=4)",
    "learned skip": "scale  skip *%select",
    "channel scales on the skip": "scale  skip *%select vector",
    "channels flipped on the trunk": "barrier carried flip",
    "the state twice": "mlp pre scale=2.0",
    "a branch is an output": 'barrier written "an output"',
    "writer bias sliced": "barrier written linear",
    "tokens padded with ones": "barrier written pad_value",
    "channels first": "axis=-3) -> @up.0.weight:1+@up.0.bias",
}
"""What the picture must hold of each of these nets: a term, a factor, an axis, or what stands in the way."""


@pytest.mark.parametrize("name", BESIDE)
def test_everything_at_a_branch_is_accounted_for(name: str) -> None:
    assert BESIDE[name] in text.render(lnr.capture(*strangers.build(name)).network)
