"""Placements of transformers models, against the truth read from their modeling code."""

from __future__ import annotations

import pytest
import torch

import lnrewrite as lnr
from test_detect import placements
from zoo import ZOO, build


@pytest.mark.parametrize("name", ZOO)
def test_placement(name: str) -> None:
    truth = ZOO[name]
    module, inputs = build(name)
    network = lnr.capture(module, kwargs=inputs).network
    assert placements(network) == truth.truth
    assert len(network.streams) == truth.streams
    if truth.final is not None:
        assert bool(network.streams[-1].final) is truth.final


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_dtype_and_mode_do_not_change_the_picture(name: str) -> None:
    module, inputs = build(name)
    picture = str(lnr.capture(module, kwargs=inputs).stream)
    assert str(lnr.capture(module.train(), kwargs=inputs).stream) == picture
    half = lnr.capture(module.eval().to(torch.bfloat16), kwargs=inputs)
    assert str(half.stream) == picture


def test_an_attention_mask_does_not_change_the_picture() -> None:
    module, inputs = build("llama")
    masked = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}
    assert lnr.capture(module, kwargs=masked).stream == lnr.capture(module, kwargs=inputs).stream
