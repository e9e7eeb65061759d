"""Nets as people write them, exported to ONNX by torch: placed as their code says, norms off the stream left out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lnrewrite as lnr
import zoo
from tiers import rows
from zoo import WRITTEN

FOLDED = {"ResNet"}  # the exporter folds batch norms into convolutions: none is left
SAMPLE = ("nanoGPT", "annotated transformer", "ResNet", "ConvNeXt", "two towers")


@pytest.mark.parametrize("name", rows(WRITTEN, sample=SAMPLE))
def test_placement(name: str, tmp_path: Path) -> None:
    case = WRITTEN[name]
    module, args = case.build()
    torch.onnx.export(module, args, tmp_path / "model.onnx", dynamo=True, verbose=False)
    found = lnr.load(str(tmp_path / "model.onnx")).network
    assert zoo.placements(found) == (["none"] * len(case.truth) if name in FOLDED else case.truth)
