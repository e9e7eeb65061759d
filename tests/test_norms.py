"""Norms in every spelling are recognised for what they compute, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lnrewrite as lnr
from lnrewrite.detect import detection, proving
from lnrewrite.detect.match import NormMatch
from lnrewrite.detect.norms import find_norms
from zoo.blocks import Net, Residual, stack
from zoo.branches import Mlp
from zoo.norms import SPELLINGS, WIDTH, WRONG, Factory, Power, WrittenBatch, randomise


class Between(nn.Module):
    """Put a norm between two linears."""

    def __init__(self, make: Factory) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, WIDTH), make(WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(self.norm(self.up(x)))
        return found


def norms(make: Factory) -> list[NormMatch]:
    torch.manual_seed(0)
    module = randomise(Between(make)).eval()
    found, _ = find_norms(lnr.capture(module, (torch.randn(3, 6, 8),)).graph)
    return list(found.values())


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str) -> None:
    truth = SPELLINGS[name]
    (found,) = norms(truth.make)
    norm = found.norm
    assert (norm.kind, norm.eps) == (truth.kind, pytest.approx(truth.eps, rel=1e-6))
    assert (norm.gamma is not None, norm.beta is not None) == (truth.gamma, truth.beta)
    assert (norm.plus_one, norm.computed) == (truth.plus_one, truth.computed)
    if norm.gamma and not norm.computed:
        assert norm.gamma.startswith("norm.")


def test_norms_are_recognized_once_a_model_and_proved_once_a_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ONNX writer and the live route take the matches that detection found; equal norms have one verdict."""
    looked, proved = list[object](), list[object]()
    find, verdict = detection.find_norms, proving._verdict
    monkeypatch.setattr(detection, "find_norms", lambda graph: looked.append(graph) or find(graph))
    monkeypatch.setattr(proving, "_verdict", lambda graph, *rest: proved.append(graph) or verdict(graph, *rest))
    torch.manual_seed(0)
    layers = [layer for _ in range(5) for layer in (Clamped(8), nn.Linear(8, 8))]
    program = lnr.capture(nn.Sequential(*layers).eval(), (torch.randn(3, 6, 8),))
    assert len(program.detection.norms) == 5 and program.network is program.detection.network
    program.to_onnx()
    assert (len(looked), len(proved)) == (1, 1)
    assert {m.norm.gamma for m in program.detection.norms.values()} == {f"{i}.weight" for i in range(0, 10, 2)}


class Clamped(nn.Module):
    """RMSNorm whose mean square is clamped from below."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, True).clamp_min(1e-6)) * self.weight


@pytest.mark.parametrize("size", [0.0, 1e-9, 1e-4, 1e-2])
def test_a_row_below_a_clamp_stays_what_the_norm_makes_of_it(size: float) -> None:
    net = Net(Residual(Mlp(), inn=Clamped), final=Clamped).eval()
    with torch.no_grad():
        net.embedding.weight[0] *= size
        net.position[1] = 0
        net.layers[0].branch.down.bias.zero_(), net.layers[0].branch.up.bias.zero_()
    result = lnr.Pipeline.preset("exact").run(lnr.capture(net, (torch.ones(2, 4, dtype=torch.long),)))
    ids = torch.zeros(2, 4, dtype=torch.long)
    assert result.report.edits
    torch.testing.assert_close(result.program.module()(ids), net(ids))


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_layer_or_rms_norm_over_the_channels(name: str) -> None:
    assert not [f for f in norms(WRONG[name]) if f.norm.kind in {"layer", "rms"} and f.axis == -1]


class DynamicTanh(nn.Module):
    """Squash instead of norming (DyT)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), 0.5))
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.alpha * x) * self.weight + self.bias


class ScaleNorm(nn.Module):
    """Bring every token to one learned length."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.tensor(width**0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.g * x / x.norm(dim=-1, keepdim=True).clamp(min=1e-5)


class Squash(nn.Module):
    """Cap values, as logits are: no norm."""

    def __init__(self, width: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x / 50.0) * 50.0


class FeatureMaps(nn.Module):
    """Norm feature maps between two convolutions."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Conv2d(3, WIDTH, 3), norm, nn.Conv2d(WIDTH, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(self.norm(self.up(x)))
        return found


class Standardised(nn.Conv2d):
    """Centre and scale each filter (weight standardisation)."""

    def forward(self, x: Tensor) -> Tensor:
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        spread = self.weight.std((1, 2, 3), keepdim=True) + 1e-5
        return nn.functional.conv2d(x, (self.weight - mean) / spread, self.bias)


TOKENS_OF = {"power": Power, "batch": WrittenBatch, "dynamic_tanh": DynamicTanh, "l2": ScaleNorm}


@pytest.mark.parametrize("kind", TOKENS_OF)
def test_kinds_of_norms_of_tokens(kind: str) -> None:
    (found,) = norms(TOKENS_OF[kind])
    assert found.norm.kind == kind
    assert found.norm.gamma
    assert (found.norm.beta is not None) == (kind != "l2")


MAPS = [
    (lambda: nn.BatchNorm2d(WIDTH), "batch"),
    (lambda: nn.GroupNorm(4, WIDTH), "group"),
    (lambda: nn.GroupNorm(WIDTH, WIDTH), "instance"),
    (lambda: nn.InstanceNorm2d(WIDTH, affine=True), "instance"),
]


@pytest.mark.parametrize(("make", "wanted"), MAPS)
def test_kinds_of_norms_of_feature_maps(make: Callable[[], nn.Module], wanted: str) -> None:
    module = FeatureMaps(make()).eval()
    assert lnr.capture(module, (torch.randn(2, 3, 6, 6),)).inspect()["norms"]["kinds"] == {wanted: 1}


def test_a_batch_norm_of_tokens_that_ends_a_network() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.norm((x + self.linear(x)).transpose(1, 2)).transpose(1, 2)
            return out

    (block,) = lnr.capture(Net().eval(), (torch.randn(2, 5, WIDTH),)).network.blocks
    assert [site.norm.kind for site in block.sites] == ["batch"]


def test_a_cap_is_no_dynamic_tanh() -> None:
    assert not norms(Squash)


def test_standardised_weights_are_counted_as_what_they_are() -> None:
    module = nn.Sequential(Standardised(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    assert lnr.capture(module, (torch.randn(2, 3, 6, 6),)).inspect()["norms"]["kinds"] == {"weight_standardised": 1}


@pytest.mark.parametrize("how", ["adaptive", "time-dependent", "gated"])
def test_what_data_multiply_is_said(how: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.down = nn.Linear(8, WIDTH), nn.RMSNorm(WIDTH, 1e-6), nn.Linear(WIDTH, 5)
            self.gate, self.scale = nn.Linear(8, WIDTH), nn.Linear(3, WIDTH)
            self.one, self.two = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x: Tensor, c: Tensor) -> Tensor:
            y = self.norm(self.up(x))
            if how == "adaptive":
                y = y * (1 + self.scale(c)[:, None])
            elif how == "time-dependent":
                s = torch.sigmoid(c[:, :1, None])
                y = y * (s * self.one + (1 - s) * self.two)
            else:
                y = y * nn.functional.silu(self.gate(x))
            found: Tensor = self.down(y)
            return found

    found = lnr.capture(randomise(Net()).eval(), (torch.randn(2, 6, 8), torch.randn(2, 3))).inspect()
    assert found["norms"]["modulated"] == {how: 1}
    assert found["norms"]["kinds"] == {"rms": 1}


@pytest.mark.parametrize("kind", [Power, DynamicTanh])
def test_passes_refuse_kinds_that_they_are_not_exact_for(kind: Factory) -> None:
    torch.manual_seed(0)
    module = randomise(Net(*stack(1, inn=kind), final=kind)).double().eval()
    ids = torch.randint(17, (3, 6))
    program = lnr.capture(module, (ids,))
    result = lnr.Pipeline.parse("place{to=post}").run(program, partial=True)
    assert result.report.edits == 0
    assert {r.code for r in result.report.refusals} == {"LN111"}
    quantised = lnr.Pipeline.preset("quantize").run(program, partial=True)
    assert bool(quantised.report.edits) == (kind is Power)  # stored numbers fold like a batch norm's
    assert (quantised.program.module()(ids) - module(ids)).abs().max() < 1e-12
