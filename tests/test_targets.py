"""Targets that are published designs: each is seen as what it is called, and exact where its identity says so."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lnrewrite as lnr
import zoo
from lnrewrite.errors import UsageError
from lnrewrite.ir.network import layers
from lnrewrite.ir.schemes import scheme
from lnrewrite.pipeline import Pipeline
from lnrewrite.pipeline.spec import placing
from tiers import rows
from zoo import nets

CALLED = {"mix": "Mix-LN", "sub": "Sub-LN", "lns": "LayerNorm Scaling"}
FAMILIES = ("gpt2", "llama", "bert", "gemma2", "olmo2", "t5", "opt")
WIDTH = 24
EXACT, NARROW = 1e-9, 1e-6
"""Bounds in float64, and where norms have their statistics in float32, as ONNX has them."""


SEEN = [row for row in product(FAMILIES, CALLED) if row != ("opt", "lns")]  # its factors stand behind a Reshape


@pytest.mark.parametrize(("family", "to"), rows(SEEN, sample=product(("llama",), CALLED)))
def test_a_target_is_seen_as_what_it_is_called(family: str, to: str, tmp_path: Path) -> None:
    """In a graph, captured afresh, and in an ONNX file that is converted or that what is converted was written to."""
    program, inputs = zoo.captured(family, depth=3)
    program.export(tmp_path / "m.onnx", target="cuda", optimize="none")
    pipeline = Pipeline.parse(placing(to, fit="constants"))
    made = pipeline.run(program).program
    made.export(tmp_path / "made.onnx", target="cuda", optimize="none")
    fresh = lnr.capture(made.module(), kwargs=inputs)
    both = [pipeline.run(lnr.load(tmp_path / "m.onnx")).program, lnr.load(tmp_path / "made.onnx")]
    for one in (made, fresh, *both):
        assert scheme(one.network.streams[0]) == CALLED[to]


PRE = [name for name, case in nets.NETS.items() if set(case.truth) == {"pre"}]


@pytest.mark.parametrize("name", rows(PRE, sample=PRE[:2]))
def test_the_factors_of_layers_change_no_output_and_go_again(name: str) -> None:
    module, inputs = nets.NETS[name].build()
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    with zoo.float64():
        program = lnr.capture(module.double(), inputs)
        made = Pipeline.parse("scale-norms").run(program, partial=True)
        want, got = (zoo.floats(p.module()(*inputs)) for p in (program, made.program))
    assert made.report.edits or made.report.refusals or all(max(layers(s)) < 2 for s in program.network.streams)
    for a, b in zip(want, got, strict=True):
        assert (a - b).abs().max() <= 1e-12 * a.abs().max()
    assert not Pipeline.parse("scale-norms").run(made.program, partial=True).report.edits
    assert not [p for p in made.program.module().state_dict() if "times" in p]  # fixed, as in the paper


class Even(nn.Module):
    """Add branches of one size for every token, each in channels of its own: all sums have one size, and all norms."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 2)
        self.start = self.out(0, 4, 9.0)
        self.reads = nn.ModuleList(nn.Linear(WIDTH, 2, bias=False) for _ in range(depth))
        self.writes = nn.ModuleList(self.out(i + 1, 4, 5.0 + i) for i in range(depth))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, eps=1e-12) for _ in range(depth + 1))
        self.head = nn.Linear(WIDTH, 3)

    def out(self, place: int, width: int, size: float) -> nn.Linear:
        """Return a map of `width` values of one size to as many channels, to one size."""
        linear = nn.Linear(width, WIDTH, bias=False)
        weight = torch.zeros(WIDTH, width, dtype=torch.float64)
        turn = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64))[0]
        weight[place * width : (place + 1) * width] = size * turn
        linear.weight = nn.Parameter(weight)
        return linear

    def forward(self, x: Tensor) -> Tensor:
        angles = self.inp(x)
        x = self.start(torch.cat([angles.cos(), angles.sin()], -1))
        for norm, read, write in zip(self.norms, self.reads, self.writes, strict=False):
            angles = read(norm(x))
            x = x + write(torch.cat([angles.cos(), angles.sin()], -1))
        return self.head(self.norms[-1](x))


def even(depth: int) -> tuple[Any, Tensor]:
    torch.manual_seed(depth)
    module = Even(depth)
    for norm in module.norms:
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    return module.double().eval(), torch.randn(4, 9, 5, dtype=torch.float64)


WAYS = [
    "place{to=mix}", "place{to=mix post=0-1}", "place{to=mix},place{to=pre}", "place{to=post},place{to=mix}",
    "place{to=post blocks=0}", "place{to=post blocks=1-2}", "place{to=post},place{to=pre blocks=0-1}", "norm-writers",
    "norm-writers{norm=rms},place{to=post}", "place{to=peri},place{to=mix}",
]  # fmt: skip


@pytest.mark.parametrize(("way", "depth"), rows(product(WAYS, (4, 5)), sample=product(WAYS[:5], (4,))))
def test_tokens_of_one_size_convert_without_error(way: str, depth: int, tmp_path: Path) -> None:
    """All blocks behind a norm of the trunk live in its size, those that keep their placement too."""
    module, x = even(depth)
    torch.onnx.export(module, (x,), tmp_path / "m.onnx", dynamo=True, verbose=False)
    with zoo.float64():
        for program, bound in ((lnr.capture(module, (x,)), EXACT), (lnr.load(tmp_path / "m.onnx"), NARROW)):
            made = Pipeline.parse(way).run(program, [(x,)]).program
            want, got = module(x), zoo.floats(made.module()(x))[0]
            assert (want - got).abs().max() <= bound * want.abs().max()


def test_what_no_norm_can_stand_before_is_refused() -> None:
    module, inputs = nets.NETS["constant angles, no writer"].build()
    report = Pipeline.parse("norm-writers").run(lnr.capture(module, inputs), partial=True).report
    assert not report.edits and {r.code for r in report.refusals} == {"LN110"}


def test_branches_of_one_sum_go_one_way() -> None:
    program, _ = zoo.captured("gpt_neox", depth=3)
    made = Pipeline.parse("place{to=mix post=0 fit=constants}").run(program).program
    assert [b.placement for b in made.network.blocks] == ["post"] * 2 + ["pre"] * 4


WORSE = [("lsn", {}), ("pre", {"post": "0"}), ("sub", {"keep_sizes": True, "norm": "rms"})]


@pytest.mark.parametrize(("to", "more"), WORSE)
def test_a_target_that_is_none_is_told(to: str, more: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="LN003"):
        list(Pipeline.parse(placing(to, **more)).passes)


@pytest.mark.parametrize("to", CALLED)
def test_a_live_module_can_be_converted(to: str) -> None:
    module, inputs = zoo.build("llama", depth=2)
    made = lnr.convert(module, to, kwargs=inputs, live=True)
    want = lnr.convert(module, to, kwargs=inputs)
    a, b = (zoo.floats(m.eval()(**inputs))[0] for m in (want, made))
    assert (a - b).abs().max() <= 1e-5 * a.abs().max()
