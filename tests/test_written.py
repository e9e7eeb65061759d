"""Nets as people write them, as torch modules and as ONNX: placed as their code says, norms off the stream left out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lnrewrite as lnr
from test_detect import placements
from written import WRITTEN

FOLDED = {"ResNet"}  # the exporter folds batch norms into convolutions: none is left


@pytest.mark.parametrize("name", WRITTEN)
def test_placement(name: str, tmp_path: Path) -> None:
    case = WRITTEN[name]
    module, args = case.build()
    program = lnr.capture(module, args)
    assert placements(program.network) == case.truth
    assert len(program.network.streams) == case.streams

    torch.onnx.export(module, args, tmp_path / "model.onnx", dynamo=True, verbose=False)
    onnx = lnr.load(str(tmp_path / "model.onnx"))
    folded = name in FOLDED
    assert placements(onnx.network) == (["none"] * len(case.truth) if folded else case.truth)
