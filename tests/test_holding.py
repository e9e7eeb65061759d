"""What a program holds that it made of constants: counted value by value, as a machine would hold them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch.export import Dim

import lnrewrite as lnr
from lnrewrite.backends.holding import PER_BYTE, SPARE, Step, check_held


@pytest.mark.parametrize("seed", range(20))
def test_values_are_held_until_they_are_read_last(seed: int) -> None:
    rng = random.Random(seed)
    steps: list[Step] = []
    for place in range(rng.randint(1, 12)):
        names = [name for step in steps for name, _ in step.makes] + ["weight"]
        made = tuple((f"v{place}.{i}", rng.choice((0, SPARE // 3, SPARE // 2))) for i in range(rng.randint(1, 2)))
        steps.append(Step(tuple(rng.choices(names, k=rng.randint(0, 3))), made))
    counts = dict(made for step in steps for made in step.makes)
    peak = 0
    for place in range(len(steps)):
        read_later = {name for step in steps[place:] for name in step.reads}
        made_before = {name for step in steps[:place] for name, _ in step.makes}
        now = {name for name, _ in steps[place].makes}
        peak = max(peak, sum(counts[name] for name in made_before & read_later | now))
    size = max(0, peak - SPARE) // PER_BYTE  # the most bytes of weights with which it does not fit, if there are any
    check_held(steps, size + 1, "it")
    if peak > SPARE + PER_BYTE * size:
        with pytest.raises(lnr.LnrewriteError, match=r"LN039 it: where it makes v\d"):
            check_held(steps, size, "it")


class Masked(torch.nn.Module):
    """Make a table of constants in each block, as a causal mask is made, and take a part of it."""

    def __init__(self, count: int, depth: int) -> None:
        super().__init__()
        self.count = count
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(8) for _ in range(depth))
        self.maps = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, linear in zip(self.norms, self.maps, strict=True):
            table = torch.full((self.count, 8), 0.5)
            x = x + linear(norm(x)) * table[: x.shape[0]]
        return x


@pytest.mark.parametrize("shape", ["pt2", "onnx"])
def test_tables_of_constants_may_be_made_again_and_again(tmp_path: Path, shape: str) -> None:
    """Twenty tables, which together would be too much, are held one at a time; one that is too much is not made."""
    for count, depth in ((1 << 21, 20), (1 << 26, 1)):
        module, path = Masked(count, depth).eval(), tmp_path / f"m{count}.{shape}"
        given, free = (torch.randn(3, 8),), {"x": {0: Dim("n", min=1, max=100)}}
        if shape == "pt2":
            torch.export.save(torch.export.export(module, given, dynamic_shapes=free), path)
        else:
            torch.onnx.export(module, given, path, dynamic_shapes=free, optimize=False, verbose=False)
        if depth > 1:
            assert len(lnr.load(path).network.blocks) == depth
        else:
            with pytest.raises(lnr.LnrewriteError, match="LN039"):
                lnr.load(path)
