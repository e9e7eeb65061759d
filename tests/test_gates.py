"""A gate on a branch is seen as the factor that it is, however it is spelled, in PyTorch and in ONNX."""

from __future__ import annotations

import warnings
from functools import cache, reduce
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lnrewrite as lnr
import zoo
from fuzz import gates, judging, nets
from fuzz.gates import ADDED, FORMS, GATES, MIXED, STORED
from lnrewrite.ir import Network
from lnrewrite.models.program import Program
from tiers import rows

WIDTH = 8
DRAWN = [name for name in FORMS if name not in ADDED | MIXED]
PLAIN = [gate for gate in GATES if gate != "spread"]
SAME = [*product(ADDED, GATES), *product(DRAWN, PLAIN), *((m, g) for m, g in product(MIXED, PLAIN) if g in STORED)]
SEEN = [
    ("lerp(x, x + f, g)", "per channel"), ("x - g (x - f)", "sigmoid"), ("lerp(x, x + f, g)", "by the stream"),
    ("at random 11", "learned"),
]  # fmt: skip
FILES = [row for row in SAME if row[0] not in DRAWN and row[1] != "spread"]


def choices(form: str, gate: str) -> dict[str, str]:
    """Return the choices of a net of plain blocks that are gated."""
    plain = {"depth": "2", "source": "floats", "end": "linear", "layout": "last", "all.placement": "pre"}
    return nets.plain_but(3, plain | {"all.gate": gate, "all.gated as": form})


def captured(form: str, gate: str) -> Program:
    net, _ = nets.build(3, choices(form, gate))
    with zoo.float64():
        return lnr.capture(net, nets.inputs(net, 2, 6))


def seen(network: Network, scales: bool = True) -> list[object]:
    """Return what a picture says of blocks, but for how their factors are called.

    A map without a bias is `linear` in torch and `matmul` in a file.
    """
    assert not network.refusals
    barriers = [{(x.at, x.op.replace("matmul", "linear")) for x in b.barriers} for b in network.blocks]
    sizes = [(b.scale, {s.at for s in b.scales}) if scales else () for b in network.blocks]
    return [
        (b.placement, len(b.readers), len(b.writers), held, size)
        for b, held, size in zip(network.blocks, barriers, sizes, strict=True)
    ]


@cache
def plain(mixed: bool, gate: str) -> list[object]:
    """Return what is seen of x + g f, or of (1 - g) x + g f."""
    return seen(captured(next(iter(MIXED if mixed else ADDED)), gate).network)


@pytest.mark.parametrize(("form", "gate"), rows(SAME, sample=SEEN))
def test_a_spelling_is_read_as_the_plain_one(form: str, gate: str) -> None:
    program = captured(form, gate)
    assert seen(program.network) == plain(form in MIXED, gate)
    assert not [r for r in program.certified.refusals if r.code == "LN208"]


@pytest.mark.parametrize(("form", "gate"), rows(SAME, sample=SEEN[:1]))
def test_nothing_made_of_a_spelling_is_wrong(form: str, gate: str) -> None:
    assert judging.trouble(judging.judge(3, choices(form, gate), "inference")) == []


@pytest.mark.parametrize(("form", "gate"), rows(FILES, sample=SEEN[:1]))
def test_a_file_is_read_as_the_plain_one(form: str, gate: str, tmp_path: Path) -> None:
    """Exporters fold 1 - g by themselves, in float32: what it was is not seen, and it is a factor on the skip."""
    net, _ = nets.build(3, choices(form, gate))
    net, inputs = net.float(), tuple(x.float() for x in nets.inputs(net, 2, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, inputs, tmp_path / "m.onnx", dynamo=True, verbose=False)
    program = lnr.load(str(tmp_path / "m.onnx"))
    blocks = seen(program.network, scales=False)
    assert blocks == seen(captured(form, gate).network, scales=False)
    found = program.module()(*inputs) if gate in STORED else net(*inputs)
    torch.testing.assert_close(zoo.floats(found)[0], zoo.floats(net(*inputs))[0], rtol=1e-5, atol=1e-5)


class Joined(torch.nn.Module):
    """Join two branches to a stream in one way."""

    def __init__(self, form: gates.Form) -> None:
        super().__init__()
        self.norm, self.form = torch.nn.LayerNorm(WIDTH), form
        self.w, self.g = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.form(x, self.w(self.norm(x)), self.g)
        return self.form(x, self.w(self.norm(x)), self.g)


ODD: dict[str, gates.Form] = {
    "a small part": lambda x, f, g: x + x - 1e-11 * f,
    "a number without end": lambda x, f, g: torch.where(g > 0.5, x + (f - x), -torch.inf),
    "many terms": lambda x, f, g: sum((g * f for _ in range(100)), x),
    "doubled": lambda x, f, g: reduce(lambda a, _: a + a, range(12), x + f),
    "cut in training": lambda x, f, g: x + g * (f - x.detach()),
    "dropped in training": lambda x, f, g: torch.lerp(x, x + F.dropout(f, 0.5, False), g),
    "of a clamp": lambda x, f, g: (1 - g.clamp(-9, 9)) * x + g * (x + f),
    "of its size": lambda x, f, g: (1 - g.abs()) * x + g * (x + f),
}


@pytest.mark.parametrize("name", ODD)
def test_what_only_seems_to_meet_is_left_as_it_is(name: str) -> None:
    torch.manual_seed(0)
    net = Joined(ODD[name]).double().eval()
    with torch.no_grad():
        net.w.weight *= 1e6 if name == "a small part" else 1
        net.g[0] = -1.0 if name == "of its size" else net.g[0]
        net.g[0] = 20.0 if name == "of a clamp" else net.g[0]
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    found = lnr.capture(net, (x,)).module()
    torch.testing.assert_close(found(x), net(x), rtol=1e-12, atol=0, equal_nan=True)
    if name == "cut in training":
        grown = x.clone().requires_grad_()
        want, got = (torch.autograd.grad(n(grown).sum(), grown)[0] for n in (net, found))
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    if name == "dropped in training":
        assert not torch.equal(found.train()(x), found(x))


@pytest.mark.parametrize("twice", [True, False])
def test_long_sums_are_looked_at_once(twice: bool) -> None:
    """A sum that is added to itself again and again has a million ways back, and a long one more steps than a stack."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.map = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.map(self.norm(x))
            y = x
            for _ in range(40 if twice else 400):
                y = y + (y if twice else x)
            return y + self.map(self.norm(y))

    assert len(lnr.capture(Net(), args=(torch.randn(2, 3, 8),)).network.blocks) == 2
