"""Batch norms and computed weights on real graphs: convolutions of every sort, before, behind, and in ONNX."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lnrewrite as lnr
from test_constants import out, saved
from zoo.norms import Power, WrittenBatch, randomise

WIDTH = 8


class Convolutions(nn.Module):
    """Put batch norms behind plain and grouped convolutions, before a linear, and where nothing can take one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH)
        self.wide, self.wide_norm = nn.Conv2d(WIDTH, 16, 1), nn.BatchNorm2d(16)
        self.deep, self.deep_norm = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.BatchNorm2d(16, eps=1e-3)
        self.back, self.back_norm = nn.Conv2d(16, WIDTH, 1, bias=False), nn.BatchNorm2d(WIDTH)
        self.last, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3)
        self.alone = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.norm(self.stem(x)))
        h = F.relu(self.wide_norm(self.wide(x)))
        x = x + self.back_norm(self.back(F.relu(self.deep_norm(self.deep(h)))))
        pooled = F.relu(x.mean((2, 3)))
        return self.head(self.last(pooled)), torch.tanh(self.alone(pooled))


class RepBN(nn.Module):
    """Add a batch norm and its own input, as SLAB does in place of a LayerNorm: channels first inside."""

    def __init__(self, bare: bool) -> None:
        super().__init__()
        self.norm, self.eta = nn.BatchNorm1d(WIDTH), 1.0 if bare else nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        return (self.norm(x) + (x if isinstance(self.eta, float) else self.eta * x)).transpose(1, 2)


class Replaced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RepBN(bare) for bare in (False, True))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 12) for _ in self.norms)
        self.down = nn.ModuleList(nn.Linear(12, WIDTH) for _ in self.norms)

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(torch.tanh(up(norm(x))))
        return x


class Standardised(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, w / (w.var((1, 2, 3), keepdim=True) + 1e-5).sqrt(), self.bias, padding=1)


class Sigma(nn.Module):
    """Divide a weight by its estimated spectral norm, as sigma-reparam does."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(out, width)), nn.Parameter(torch.ones(1))
        self.register_buffer("u", torch.randn(out))
        self.register_buffer("v", torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.gain / torch.dot(self.u, torch.mv(self.weight, self.v)) * self.weight)


class Computed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = Standardised(3, WIDTH, 3), nn.LayerNorm(WIDTH)
        self.up = Sigma(WIDTH, 16)
        self.down = nn.utils.parametrizations.spectral_norm(nn.Linear(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).flatten(2).transpose(1, 2)
        return x + self.down(F.relu(self.up(self.norm(x))))


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = randomise(kind(), 0).eval()
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return model.double()


def worst(a: object, b: object) -> float:
    pairs = zip(a if isinstance(a, tuple) else (a,), b if isinstance(b, tuple) else (b,), strict=True)
    return max(((x - y).abs().max() / x.abs().max()).item() for x, y in pairs)


def test_batch_norms_fold_before_or_behind() -> None:
    model, x = made(Convolutions), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    program = lnr.capture(model, (x,))
    assert program.inspect()["norms"]["kinds"] == {"batch": 6}
    result = lnr.Pipeline.parse("fold-batchnorm").run(program, partial=True)
    assert (result.report.edits, [r.code for r in result.report.refusals]) == (5, ["LN104"])
    assert result.program.inspect()["norms"]["kinds"] == {"batch": 1}
    assert worst(model(x), result.program.module()(x)) < 1e-12


def test_a_batch_norm_with_its_input_beside_it_folds() -> None:
    model, x = made(Replaced), torch.randn(2, 5, WIDTH, dtype=torch.float64)
    program = lnr.capture(model, (x,))
    assert program.inspect()["norms"]["kinds"] == {"batch": 2}
    result = lnr.Pipeline.parse("fold-batchnorm").run(program)
    assert (result.report.edits, result.program.inspect()["norms"]["total"]) == (2, 0)
    assert worst(model(x), result.program.module()(x)) < 1e-12


class Outside(nn.Module):
    """Norm tokens between two transposes, and add the input, times a number, outside of them: or another value."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own, self.norm, self.slope = own, nn.BatchNorm1d(WIDTH), nn.Parameter(torch.tensor(0.7))
        self.inp, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.inp(x))
        normed = self.norm(y.transpose(1, 2)).transpose(1, 2)
        read = normed + self.slope * (y if self.own else x)
        return self.up(read)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("onnx", [True, False])
def test_the_input_beside_a_batch_norm_may_stand_outside_its_transposes(own: bool, onnx: bool, tmp_path: Path) -> None:
    model, x = made(lambda: Outside(own)), torch.randn(2, 5, WIDTH, dtype=torch.float64)
    program = lnr.load(saved(model, x, tmp_path / "m.onnx", True), inputs=[x]) if onnx else lnr.capture(model, (x,))
    result = lnr.Pipeline.parse("fold-batchnorm").run(program, partial=True)
    assert result.report.edits == own
    (name,) = program.example_inputs()
    assert worst(model(x), out(result.program.in_float64().call({name: x}))) < 1e-12


def test_computed_weights_are_stored() -> None:
    model, x = made(Computed), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    program = lnr.capture(model, (x,))
    assert [b["readers"] for b in program.inspect()["streams"][0]["blocks"]] == [[]]
    result = lnr.Pipeline.parse("propagate-constants,fold-affine").run(program)
    assert [s.edits for s in result.report.steps] == [3, 1]
    assert worst(model(x), result.program.module()(x)) < 1e-12
    names = [name for name, _ in result.program.module().named_parameters()]
    assert len([n for n in names if n.endswith("_frozen")]) == 3 and "up.gain" not in names


def test_integers_are_no_weights_to_store() -> None:
    """A quantised weight is computed from integers: storing the product would undo the quantisation."""

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.randint(-8, 8, (WIDTH, WIDTH), dtype=torch.int8))
            self.scale = nn.Parameter(torch.rand(WIDTH, 1))

        def forward(self, x: Tensor) -> Tensor:
            return x + F.linear(F.layer_norm(x, (WIDTH,)), self.codes.float() * self.scale)

    program = lnr.capture(Quantised().eval(), (torch.randn(2, 5, WIDTH),))
    assert program.network.computed == ()


@pytest.mark.parametrize("opset", [18, 23])
def test_batch_norms_of_an_onnx_file(opset: int, tmp_path: Path) -> None:
    """torch writes a missing bias as computed zeros, which no shift can be added to: those convolutions keep theirs."""
    model, x = made(Convolutions).float(), torch.randn(2, 3, 6, 6)
    for norm, conv in (("norm", "stem"), ("deep_norm", "deep"), ("back_norm", "back")):
        getattr(model, conv).bias = nn.Parameter(torch.randn(getattr(model, norm).num_features))
    program = torch.onnx.export(model, (x,), dynamo=True, opset_version=opset, optimize=False)
    assert program is not None
    program.save(tmp_path / "m.onnx")
    onnx = lnr.load(str(tmp_path / "m.onnx"))
    result = lnr.Pipeline.parse("fold-batchnorm").run(onnx, partial=True)
    assert result.report.edits == 5
    result.program.save(tmp_path / "folded.onnx")
    assert lnr.verify(onnx, lnr.load(str(tmp_path / "folded.onnx")))["max_rel"] < 1e-5


@pytest.mark.parametrize("kind", [Power, WrittenBatch])
def test_norms_by_stored_numbers_written_out_fold(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    module = randomise(nn.Sequential(nn.Linear(5, WIDTH), kind(WIDTH), nn.Linear(WIDTH, 3))).double().eval()
    x = torch.randn(4, 6, 5, dtype=torch.float64)
    result = lnr.Pipeline.parse("fold-batchnorm").run(lnr.capture(module, (x,)))
    assert result.report.edits == 1
    assert result.program.inspect()["norms"]["total"] == 0
    assert (module(x) - result.program.module()(x)).abs().max() < 1e-12


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("padding", [1, "same"])
def test_convolutions_of_every_sort_take_a_bias(dims: int, padding: int | str) -> None:
    """As many places as channels: a bias that lands on the wrong axis would not even be noticed by its shape."""
    torch.manual_seed(0)
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](3, WIDTH, 3, padding=padding, bias=False)
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1](WIDTH)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    module = randomise(nn.Sequential(conv, norm, nn.ReLU())).double().eval()
    x = torch.randn(2, 3, *[WIDTH] * dims, dtype=torch.float64)
    result = lnr.Pipeline.parse("fold-batchnorm").run(lnr.capture(module, (x,)))
    assert result.report.edits == 1
    assert (module(x) - result.program.module()(x)).abs().max() < 1e-12


@pytest.mark.parametrize("groups", [1, 2, WIDTH])
def test_batch_norms_at_the_end_of_a_branch_fold_into_groups(groups: int) -> None:
    """The channels are where the norms have them: a depthwise convolution shows none."""

    class Depthwise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=groups, bias=False)
            self.norm = nn.BatchNorm2d(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.norm(self.conv(x))

    net = nn.Sequential(nn.Conv2d(3, WIDTH, 2, 2), Depthwise(), Depthwise(), nn.AdaptiveAvgPool2d(1)).double()
    x = torch.randn(2, 3, 8, 8).double()
    program = lnr.capture(randomise(net, 0).eval(), (x,))
    assert [(s.width, [str(b.placement) for b in s.blocks]) for s in program.network.streams] == [
        (WIDTH, ["output"] * 2)
    ]
    result = lnr.Pipeline.parse("fold-batchnorm").run(program)
    assert result.report.edits == 2 and not result.report.refusals
    assert (result.program.module()(x) - net(x)).abs().max() <= 1e-12 * net(x).abs().max()
