"""Checkpoints of a healing: those of others run nothing, and their names sort at any length."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lnrewrite as lnr
from lnrewrite.healing import snapshots
from lnrewrite.healing.distributed import World

ALONE = World(0, 1, torch.device("cpu"))


class Trap:
    """Write a file when it is unpickled: the sign that a pickle ran."""

    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.sign),)


@pytest.mark.parametrize("where", ["index", "values", "path"])
def test_a_checkpoint_runs_nothing(tmp_path: Path, where: str) -> None:
    def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
        module = nn.Linear(3, 3)
        return module, torch.optim.AdamW(module.parameters())

    held = snapshots.Snapshots(tmp_path / "run", ALONE, {}, resume=False)
    held.save("global", 1, *trained())
    assert held.load("global", *trained()) == 1
    place = tmp_path / "run" / "global-000001"
    found = pickle.loads((place / ".metadata").read_bytes())
    values = next(i for i in found.storage_data if i.fqn.endswith(".lr"))
    if where == "values":
        buffer = io.BytesIO()
        torch.save(Trap(tmp_path / "sign"), buffer)
        (place / "__9_0.distcp").write_bytes(buffer.getvalue())
        found.storage_data[values] = type(found.storage_data[values])("__9_0.distcp", 0, len(buffer.getvalue()))
    elif where == "path":
        found.storage_data[values].relative_path = "../../elsewhere"
    index = Trap(tmp_path / "sign") if where == "index" else found
    (place / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(lnr.LnrewriteError, match="LN605"):
        held.load("global", *trained())
    assert not (tmp_path / "sign").exists()


def test_steps_of_seven_digits_have_checkpoints_too(tmp_path: Path) -> None:
    """A run of more than 999,999 steps goes on, and leaves nothing behind."""
    module = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(module.parameters())
    held = snapshots.Snapshots(tmp_path / "run", ALONE, {}, resume=False)
    for step in (999_999, 1_000_000):
        held.save("global", step, module, optimizer)
    assert [p.name for p in (tmp_path / "run").glob("global-*")] == ["global-1000000"]
    assert held.load("global", module, optimizer) == 1_000_000
    held.end()
    assert not list((tmp_path / "run").glob("global-*"))
