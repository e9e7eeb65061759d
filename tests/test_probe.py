"""Probe: every figure against its formula on states that the network notes itself; planted faults that must show."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lnrewrite as lnr
from commands import fails, ok
from lnrewrite.probing.attention import Sinks
from lnrewrite.probing.measuring import MASSIVE, TIMES, Meter, state_nodes
from lnrewrite.probing.predicting import error
from lnrewrite.probing.probe import largest
from tiers import rows


class Norm(nn.Module):
    """A norm over the channels' axis, with a random gain."""

    def __init__(self, width: int, axis: int, layer: bool) -> None:
        super().__init__()
        self.axis, self.layer = axis, layer
        self.weight = nn.Parameter(0.5 + torch.rand(width))
        self.bias = nn.Parameter(torch.randn(width) / 4) if layer else None

    def forward(self, x: Tensor) -> Tensor:
        x = x.movedim(self.axis, -1)
        if self.layer:
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias).movedim(-1, self.axis)
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-6).movedim(-1, self.axis)


class Block(nn.Module):
    """One residual branch with norms where its placement says."""

    def __init__(self, width: int, axis: int, placement: str, layer: bool) -> None:
        super().__init__()
        held = {"pre": "i", "peri": "io", "output": "o", "post": "p", "none": ""}[placement]
        self.placement = placement
        self.into, self.out, self.post = (Norm(width, axis, layer) if c in held else nn.Identity() for c in "iop")
        make = nn.Linear if axis == -1 else lambda a, b: nn.Conv2d(a, b, 1)
        self.up, self.down = make(width, 2 * width), make(2 * width, width)

    def branch(self, x: Tensor) -> Tensor:
        return self.out(self.down(F.gelu(self.up(self.into(x)))))


class Net(nn.Module):
    """A random residual network that can be walked a sum at a time; a sum may have two branches."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        draw = random.Random(seed)
        self.axis = draw.choice([-1, -1, 1])
        width, layer = draw.choice([6, 9, 16]), draw.random() < 0.5
        self.width = width
        self.inp = nn.Linear(5, width) if self.axis == -1 else nn.Conv2d(5, width, 1)
        placements = [draw.choice(["pre", "peri", "output", "post", "none"]) for _ in range(draw.randint(1, 4))]
        if placements[-1] == "post" and set(placements) != {"post"}:
            placements.append("pre")  # else it reads as well as a final norm behind a sum without one
        sums = []
        for placement in placements:
            many = 2 if placement in ("pre", "peri") and draw.random() < 0.3 else 1
            sums.append(nn.ModuleList(Block(width, self.axis, placement, layer) for _ in range(many)))
        self.sums = nn.ModuleList(sums)
        self.head = nn.Linear(width, 3) if self.axis == -1 else nn.Conv2d(width, 3, 1)

    def walk(self, x: Tensor) -> tuple[list[Tensor], list[list[Tensor]], list[Tensor]]:
        """Return the states, the branches of each sum, and the sums before a trunk norm."""
        states, branches, totals = [self.inp(x)], [], []
        for group in self.sums:
            branches.append([block.branch(states[-1]) for block in group])
            totals.append(states[-1] + branches[-1][0])
            for more in branches[-1][1:]:
                totals[-1] = totals[-1] + more
            states.append(group[-1].post(totals[-1]))
        return states, branches, totals

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.walk(x)[0][-1])

    def inputs(self, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return torch.randn(3, 4, 5) * 3 if self.axis == -1 else torch.randn(2, 5, 3, 4) * 3

    def tokens(self, values: list[Tensor]) -> np.ndarray:
        """Return a value of all batches as rows [tokens, channels]."""
        found = [v.detach().movedim(self.axis, -1).reshape(-1, v.shape[self.axis]) for v in values]
        return torch.cat(found).double().numpy()


def near(found: float | None, wanted: float) -> bool:
    return found is not None and abs(found - wanted) <= 2e-5 * max(1.0, abs(wanted))


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)


def program_of(net: nn.Module, x: Tensor) -> lnr.Program:
    return lnr.capture(net.eval(), (x,))


@pytest.mark.parametrize("seed", rows(range(120), sample=range(12)))
def test_every_figure_is_its_formula(seed: int) -> None:
    net = Net(seed)
    batches = [net.inputs(seed + k) for k in range(1, 4)]
    with torch.no_grad():
        walks = [net.walk(x) for x in batches]
    states = [net.tokens([w[0][k] for w in walks]) for k in range(len(net.sums) + 1)]
    found = lnr.probe(program_of(net, batches[0]), [(x,) for x in batches])
    (stream,) = found.streams
    assert found.tokens == len(states[0]) and [s.after is None for s in stream.states] == [True] + [False] * len(
        net.sums
    )
    for state, x in zip(stream.states, states, strict=True):
        sizes, apart = np.sqrt((x**2).mean(-1)), x - x.mean(-1, keepdims=True)
        assert near(state.variance, x.var(-1).mean()) and near(state.rms, math.sqrt((x**2).mean()))
        assert near(state.size_cv, sizes.std() / sizes.mean()) and near(state.max_abs, abs(x).max())
        assert near(state.kurtosis, ((apart**4).mean(-1) / x.var(-1) ** 2).mean())
        assert state.channel == abs(x).max(0).argmax()
    for n, distances in enumerate(stream.angular_distance, 1):
        for start, angle in enumerate(distances):
            assert near(angle, math.acos(cosines(states[start], states[start + n]).mean()) / math.pi)
    figures = iter(stream.blocks)
    for k, group in enumerate(net.sums):
        for j, block in enumerate(group):
            figure = next(figures)
            branch = net.tokens([w[1][k][j] for w in walks])
            assert figure.placement == block.placement
            assert near(figure.branch_ratio, math.sqrt((branch**2).mean() / (states[k] ** 2).mean()))
            assert near(figure.influence, 1 - cosines(states[k], states[k + 1]).mean())
            assert near(figure.gradient_norm, gradient_norm(net, group[j], batches))


def gradient_norm(net: Net, block: Block, batches: list[Tensor]) -> float:
    """Return the gradient of half the mean square of the output, by a block's parameters, mean over batches."""
    found = []
    for x in batches:
        net.zero_grad()
        (net(x).square().mean() / 2).backward()
        found.append(
            math.sqrt(sum(float(p.grad.double().square().sum()) for p in block.parameters() if p.grad is not None))
        )
    return sum(found) / len(found)


def test_parameters_are_as_they_were() -> None:
    """Between two steps of somebody's training nothing is lost, and nothing of it is counted."""
    net = Net(0)
    program = program_of(net, net.inputs(0))
    untouched = lnr.probe(program, [(net.inputs(1),)])
    for k, parameter in enumerate(program.module().parameters()):
        parameter.requires_grad_(k % 2 == 0)
        parameter.grad = torch.full_like(parameter, 3.0) if k % 3 else None
    assert lnr.probe(program, [(net.inputs(1),)]) == untouched
    for k, parameter in enumerate(program.module().parameters()):
        assert parameter.requires_grad == (k % 2 == 0)
        assert bool((parameter.grad == 3.0).all()) if k % 3 else parameter.grad is None


@pytest.mark.parametrize("mask", [-torch.inf, -3e38, torch.nan])
def test_masks_are_no_activations(mask: float) -> None:
    sizes = torch.tensor([[1.0, -5.0], [mask, 2.0]])
    assert largest(sizes) == 5.0 and largest(sizes[:0]) == 0.0


def plain(blocks: int = 3) -> Net:
    """Return a network whose branches write nothing yet: identity blocks."""
    net = Net(7)
    net.axis, net.width = -1, 8
    net.inp, net.head = nn.Linear(5, 8), nn.Linear(8, 3)
    net.sums = nn.ModuleList(nn.ModuleList([Block(8, -1, "pre", layer=True)]) for _ in range(blocks))
    with torch.no_grad():
        for (block,) in net.sums:
            block.down.weight.zero_()
            block.down.bias.zero_()
    return net


def test_identity_blocks_have_no_influence() -> None:
    net = plain()
    (stream,) = lnr.probe(program_of(net, net.inputs(0)), [(net.inputs(1),)]).streams
    assert all(b.branch_ratio == 0 and abs(b.influence) < 1e-12 for b in stream.blocks)
    assert all(a < 1e-6 for row in stream.angular_distance for a in row)


def test_growth_of_variance_is_told() -> None:
    """Blocks that write a constant c along the same channel: the state is x + k c, its figures are known."""
    net, c = plain(), torch.zeros(8)
    c[2] = 4.0
    with torch.no_grad():
        net.inp.weight.zero_(), net.inp.bias.copy_(c)
        for (block,) in net.sums:
            block.down.bias.copy_(c)
    (stream,) = lnr.probe(program_of(net, net.inputs(0)), [(net.inputs(1),)]).streams
    for k, state in enumerate(stream.states, 1):
        x = c.double().numpy() * k
        assert near(state.variance, x.var()) and near(state.rms, math.sqrt((x**2).mean())) and state.size_cv < 1e-6
        assert near(state.max_abs, 4.0 * k) and state.channel == 2
    assert [near(b.branch_ratio, 1 / k) for k, b in enumerate(stream.blocks, 1)] == [True] * 3


@pytest.mark.parametrize("seed", range(6))
def test_a_planted_massive_activation_is_found_where_it_was_put(seed: int) -> None:
    draw = random.Random(seed)
    net, at, channel = plain(), draw.randrange(3), draw.randrange(8)
    value = draw.choice([-1, 1]) * draw.choice([150.0, 2e4])
    with torch.no_grad():
        net.sums[at][0].down.bias[channel] = value
        if at + 1 < 3:
            net.sums[at + 1][0].down.bias[channel] = -value  # and taken away again
    batches = [net.inputs(k) * size for k, size in ((seed, 1e-4), (seed + 1, 1e-3))]
    found = lnr.probe(program_of(net, batches[0]), [(x,) for x in batches])
    (stream,) = found.streams
    states = [net.tokens([net.walk(x)[0][at + 1]]) for x in batches]
    massive = any(abs(s).max() > max(MASSIVE, TIMES * np.median(abs(s))) for s in states)
    assert [(m.after, m.channel) for m in found.massive] == [(stream.blocks[at].name, channel)] * massive
    for m in found.massive:
        row = np.ravel_multi_index(m.token, (6, 4))  # of both batches, one behind the other
        assert near(m.value, np.concatenate(states)[row, channel]) and abs(m.value - value) < 1


@pytest.mark.parametrize("seed", rows(range(60), sample=range(6)))
def test_outliers_of_what_is_read_are_their_formulas(seed: int) -> None:
    net = Net(seed)
    batches = [net.inputs(seed + k) * size for k, size in ((1, 1.0), (2, 3.0))]
    with torch.no_grad():
        walks = [net.walk(x)[0] for x in batches]
        read = [[b.into(w[k]) for w in walks] for k, group in enumerate(net.sums) for b in group]
    program = program_of(net, batches[0])
    (stream,) = program.network.streams
    names = [f"{b.name}.in" if b.placement in ("pre", "peri") else b.name for b in stream.blocks]
    if stream.readers:  # where detection knows of the head, which has no norm but a trunk norm
        names.append(f"{stream.name}.last")
        read.append([w[-1] for w in walks])
    found = lnr.probe(program, [(x,) for x in batches], gradients=False)
    assert [o.at for o in found.outliers] == names
    for outlier, values in zip(found.outliers, read, strict=True):
        parts = [net.tokens([v]) for v in values]
        x = np.concatenate(parts)
        top, rms, apart = abs(x).max(), math.sqrt((x**2).mean()), x - x.mean(-1, keepdims=True)
        assert near(outlier.max_abs, top) and near(outlier.ratio, top / rms)
        assert outlier.channel == abs(x).max(0).argmax()
        assert near(outlier.kurtosis, ((apart**4).mean(-1) / x.var(-1) ** 2).mean())
        tokenwise = [lost(part, abs(part).max(-1, keepdims=True)) for part in parts]
        tensorwise = [lost(part, abs(part).max()) for part in parts]
        for figure, squares in ((outlier.int8_token, tokenwise), (outlier.int8_tensor, tensorwise)):
            wanted = math.sqrt(np.concatenate(squares).mean()) / rms
            assert abs(figure - wanted) <= 2e-3 * wanted  # a number on an edge may fall to either side


def lost(x: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """Return the squares of what rounding to 8 bits loses: at most half of the largest / 127."""
    step = largest / 127
    return np.square(x - step * np.floor(x / step + 0.5))


@pytest.mark.parametrize("seed", range(3))
def test_a_rotation_takes_a_planted_outlier_away(seed: int) -> None:
    """All of a token stands in one channel of n: the norm makes it sqrt(n). Turned by Hadamard, each channel has 1."""
    torch.manual_seed(seed)
    net, n, channel = plain(), 16, seed + 3
    net.inp, net.head = nn.Linear(5, n), nn.Linear(n, 3)
    net.sums = nn.ModuleList(nn.ModuleList([Block(n, -1, "pre", layer=False)]) for _ in range(2))
    with torch.no_grad():
        net.inp.weight.zero_(), net.inp.bias.zero_()
        net.inp.bias[channel] = 50.0
        for (block,) in net.sums:
            block.into.weight.fill_(1)
            block.down.weight.zero_(), block.down.bias.zero_()
    program, data = program_of(net, net.inputs(0)), [(net.inputs(1),)]
    turned = lnr.Pipeline.preset("quantize").run(program, partial=True).program
    before, after = (lnr.probe(p, data, gradients=False).outliers for p in (program, turned))
    assert len(before) == len(after) == 3
    for one, two in zip(before, after, strict=True):
        assert near(one.ratio, math.sqrt(n)) and one.channel == channel and near(one.kurtosis, n - 2 + 1 / (n - 1))
        assert near(two.ratio, 1)


def test_what_is_far_beyond_the_median_and_not_beyond_100_is_not_massive() -> None:
    net = plain()
    meter = Meter(program_of(net, net.inputs(0)).network.streams[0])
    rows = torch.full((4, 8), 1e-3)
    rows[1, 2], rows[2, 3] = -150.0, 99.0
    meter._largest(0, rows, (4,))
    assert [(m.channel, m.value) for m in meter.massive.values()] == [(2, -150.0)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_in_half_precision_are_measured(dtype: torch.dtype) -> None:
    net = plain()
    with torch.no_grad():
        net.sums[1][0].down.bias[3] = 2e4
    x = net.inputs(0) * 1e-3
    one, two = (lnr.probe(program_of(net.to(d), x.to(d)), [(x.to(d),)]) for d in (torch.float32, dtype))
    assert [(m.after, m.channel) for m in two.massive] == [(m.after, m.channel) for m in one.massive] != []
    for a, b in zip(one.streams[0].states, two.streams[0].states, strict=True):
        assert all(abs(x - y) <= 0.05 * abs(x) + 1e-3 for x, y in zip(figures(a), figures(b), strict=True))


@pytest.mark.parametrize("inside", [False, True])
def test_a_planted_overflow_has_no_headroom(inside: bool) -> None:
    net = plain()
    with torch.no_grad():
        (net.sums[1][0].up.bias if inside else net.sums[1][0].down.bias)[3] = 1e5
    found = lnr.probe(program_of(net, net.inputs(0)), [(net.inputs(1),)])
    assert 1e5 - 50 < found.fp16.max_abs < 1e5 + 50 and near(found.fp16.headroom, 65504 / found.fp16.max_abs)
    assert "does NOT fit" in str(found)


def test_the_largest_number_is_that_of_all_batches() -> None:
    net = plain()
    batches = [(net.inputs(k) * size,) for k, size in enumerate((1.0, 1e3, 1.0))]
    program = program_of(net, net.inputs(0))
    assert lnr.probe(program, batches).fp16.max_abs == lnr.probe(program, batches[1:2]).fp16.max_abs


def test_what_is_not_finite_is_told() -> None:
    net = plain()
    with torch.no_grad():
        net.sums[1][0].down.bias[3] = 3e38
        net.sums[2][0].down.bias[3] = 3e38
    with pytest.raises(lnr.LnrewriteError, match="LN026.*NaN or infinite"):
        lnr.probe(program_of(net, net.inputs(0)), [(net.inputs(1),)])


@pytest.mark.parametrize("seed", rows(range(30), sample=range(3)))
def test_onnx_has_the_same_figures(seed: int, tmp_path: Path) -> None:
    net = Net(seed)
    program, data = program_of(net, net.inputs(0)), [(net.inputs(k),) for k in range(1, 3)]
    program.export(tmp_path / "m.onnx", target="generic")
    one, two = lnr.probe(program, data, gradients=False), lnr.probe(lnr.load(tmp_path / "m.onnx"), data)
    for a, b in zip(one.streams[0].states, two.streams[0].states, strict=True):
        assert all(near(x, y) for x, y in zip(figures(a), figures(b), strict=True))
    for a, b in zip(one.outliers, two.outliers, strict=True):
        assert near(a.ratio, b.ratio) and near(a.int8_token, b.int8_token) and near(a.int8_tensor, b.int8_tensor)
    for a, b in zip(one.streams[0].blocks, two.streams[0].blocks, strict=True):
        assert near(a.branch_ratio, b.branch_ratio) and near(a.influence, b.influence) and b.gradient_norm is None
        assert a.expected_error.keys() == b.expected_error.keys()
        assert all(near(a.expected_error[p], b.expected_error[p]) for p in a.expected_error)


def figures(state: object) -> list[float]:
    names = ("variance", "rms", "size_cv", "kurtosis", "max_abs")
    return [getattr(state, name) for name in names]


class Attention(nn.Module):
    """A pre-norm attention block that is taken twice, with one mask; its kernel is called in one of several ways."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        draw = random.Random(seed)
        self.way = draw.choice(["causal", "bool", "float", "plain", "gqa", "written"])
        self.scale = draw.choice([None, 0.7])
        self.inp, self.norm, self.o = nn.Linear(5, 16), nn.LayerNorm(16), nn.Linear(16, 16)
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, self.heads * 4), nn.Linear(16, self.heads * 4)

    @property
    def heads(self) -> int:
        return 2 if self.way == "gqa" else 4

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        u = self.norm(x)
        return tuple(m(u).unflatten(-1, (-1, 4)).transpose(1, 2) for m in (self.q, self.k, self.v))

    def weights(self, x: Tensor) -> Tensor:
        """Return the attention's weights, written out."""
        q, k, _ = self.parts(x)
        k = k.repeat_interleave(4 // self.heads, 1)
        scores = q @ k.mT * (self.scale or 0.5)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return (scores if self.way == "plain" else scores.masked_fill(~mask, -torch.inf)).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return self.block(self.block(self.inp(x), allowed), allowed)

    def block(self, x: Tensor, allowed: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        if self.way == "written":
            made = self.weights(x) @ v
        elif self.way in ("bool", "float"):
            mask = (
                allowed if self.way == "bool" else torch.zeros_like(allowed, dtype=x.dtype).masked_fill(~allowed, -1e9)
            )
            made = F.scaled_dot_product_attention(q, k, v, mask, scale=self.scale)
        else:
            how = {"enable_gqa": True} if self.way == "gqa" else {}
            causal = self.way != "plain"
            made = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=self.scale, **how)
        return x + self.o(made.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("seed", rows(range(40), sample=range(8)))
def test_sinks_are_the_first_position_s_share(seed: int) -> None:
    net = Attention(seed).eval()
    torch.manual_seed(seed)
    batches = [torch.randn(2, 6, 5) for _ in range(2)]
    (stream,) = lnr.probe(program_of(net, batches[0]), [(x,) for x in batches]).streams
    allowed = torch.ones(6, 6, dtype=torch.bool).tril()
    with torch.no_grad():
        first = [net.inp(x) for x in batches]
        second = [net.block(x, allowed) for x in first]
        for block, states in zip(stream.blocks, (first, second), strict=True):
            wanted = torch.stack([net.weights(x)[..., 1:, 0].mean() for x in states]).mean().item()
            assert near(block.sink, wanted), net.way


def test_nothing_of_a_batch_is_held() -> None:
    net = Attention(0).eval()
    program = program_of(net, torch.randn(2, 6, 5))
    sinks = Sinks(program.graph, program.module(), program.network.blocks)
    with torch.no_grad():
        program.observe((torch.randn(2, 6, 5),), sinks.wanted, sinks.see)
    sinks.end()
    assert sinks.found and not sinks.held


@pytest.mark.parametrize("seed", range(20))
def test_an_expected_error_does_not_see_units(seed: int) -> None:
    """Constants are fitted: factors of both numbers change nothing, and numbers that are constant cost nothing."""
    torch.manual_seed(seed)
    share, added, read = torch.rand(3, 50).double() + 0.1
    assert error(share, added**9, read) < error(1e6 * share, added, read) < torch.pi / 2
    share, one = share / 1e4, torch.ones_like(read)  # so small, an angle is its tangent
    found = error(share, added, read)
    assert found > 0
    for other, wanted in (
        (error(share, 3 * added, read / 7), found),
        (error(2 * share, added, read), 2 * found),
        (error(share, added, added), 2 * error(share, added, one)),
        (error(share, one, read, tempered=True), 2**0.5 * error(share, one, read)),
        (error(share, added, one, tempered=True), error(share, added, one)),
        (error(share, 2 * one, one), 0.0),
    ):
        assert abs(other - wanted) <= 1e-6 * found


def test_what_attention_reads_is_a_temperature_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the term for queries, attention that loses its in norm counts as an MLP."""
    seen: list[bool] = []
    monkeypatch.setattr("lnrewrite.probing.predicting.error", lambda *given: seen.append(given[3]) or 0.0)
    lnr.probe("demo:tinygpt", gradients=False)
    assert seen == ([True] * 4 + [False] * 4) * 6


@pytest.mark.parametrize("to", ["peri", "none", "output"])
def test_expected_errors_are_those_of_the_conversion(to: str) -> None:
    """An MLP of ReLUs without biases is linear in size, so that the second term of the formula counts nothing there."""
    torch.manual_seed(0)
    net = plain(blocks=1)
    (block,) = net.sums[0]
    block.into = nn.RMSNorm(8)
    block.up, block.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)
    block.branch = lambda x: block.down(F.relu(block.up(block.into(x))))
    batches = [(net.inputs(k) * torch.rand(3, 4, 1).exp(),) for k in range(8)]
    program = program_of(net, batches[0][0])
    made = lnr.Pipeline.parse(f"place{{to={to} fit=constants norm=rms}}").run(program, batches).program
    expected = lnr.probe(program, batches, gradients=False).streams[0].blocks[0].expected_error[to]
    turned = []
    for one, two in zip(*(states_of(p, batches) for p in (program, made)), strict=True):
        turned.append((unit(one) - unit(two)).square().sum(-1))
    found = float(torch.cat(turned).mean().sqrt())
    assert expected / 3 < found < 1.2 * expected, (found, expected)
    assert to != "peri" or found > 0.8 * expected


def states_of(program: lnr.Program, batches: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """Return the last state for each batch, in front of the head's norm if there is one."""
    name, held = state_nodes(program.network.streams[0])[1][0], []
    for batch in batches:
        with torch.no_grad():
            program.observe(batch, [name], lambda _, value: held.append(value.double()))
    return held


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def test_tokens_of_one_size_convert_without_error() -> None:
    """Where every token has the same size and each branch too, constants lose nothing."""
    net = plain()
    with torch.no_grad():
        net.inp.weight.zero_()
        net.inp.bias.normal_()
        for (block,) in net.sums:
            block.down.bias.normal_()
    (stream,) = lnr.probe(program_of(net, net.inputs(0)), [(net.inputs(1),)]).streams
    assert all(abs(e) < 1e-6 for b in stream.blocks for e in b.expected_error.values())
    assert all(set(b.expected_error) == {"post", "peri", "output", "none"} for b in stream.blocks)


KEYS = {"model", "data", "streams", "massive", "fp16"}


def test_the_command_answers_as_the_contract_says(tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_bytes(bytes(random.Random(0).randrange(256) for _ in range(600)))
    done = ok("probe", "demo:tinygpt", "--data", text, "--json")
    found = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert found.keys() >= KEYS and found["data"] == str(text) and found["tokens"] == 512
    (stream,) = found["streams"]
    assert len(stream["states"]) == 13 and stream["states"][0]["after"] is None and stream["width"] == 128
    assert [len(row) for row in stream["angular_distance"]] == list(range(12, 0, -1))
    assert all(set(b["expected_error"]) == {"post", "peri", "output", "none"} for b in stream["blocks"])
    sites = [*(f"{b['name']}.in" for b in stream["blocks"]), "blocks.final"]
    assert [row["at"] for row in found["outliers"]] == sites
    assert {"max_abs", "headroom"} <= found["fp16"].keys()
    shown = ok("probe", "demo:tinygpt").stdout
    assert "made-up inputs" in shown and max(map(len, shown.splitlines())) <= 100


@pytest.mark.parametrize(
    ("command", "code"),
    [(["nowhere.pt2"], "LN010"), (["demo:tinygpt", "--data", "nowhere.txt"], "LN022")],
)
def test_what_is_missing_is_told_in_a_line(command: list[str], code: str) -> None:
    fails(code, 1, "probe", *command)


def test_a_model_without_blocks_is_told() -> None:
    program = lnr.capture(nn.Linear(4, 4), (torch.randn(2, 4),))
    with pytest.raises(lnr.LnrewriteError, match="LN201"):
        lnr.probe(program)


def test_reports_are_values() -> None:
    found = lnr.probe("demo:tinygpt", gradients=False)
    assert replace(found) == found and found.differentiated is None and json.dumps(found.to_dict())
