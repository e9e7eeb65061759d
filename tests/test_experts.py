"""Mixtures of experts: found in whatever words they are written, computed by ONNX Runtime's operator, or left alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lnrewrite as lnr
from lnrewrite.backends.onnx.experts import find
from tiers import rows

SPELLINGS = ("gathered", "dense", "einsum", "looped")
WRONG: dict[str, Callable[[Mixture], object]] = {}


def wrong(change: Callable[[Mixture], object]) -> Callable[[Mixture], object]:
    WRONG[change.__name__] = change
    return change


@dataclass
class Form:
    """Draw how a mixture is written."""

    spelling: str
    seed: int

    def __post_init__(self) -> None:
        draw = random.Random(f"{self.spelling} {self.seed}")
        self.experts, self.k = draw.choice([(4, 2), (5, 1), (3, 3)])
        self.width, self.inner = draw.choice([(8, 12), (16, 8), (8, 4)])
        self.order = draw.choice(["gate first", "gate last", "in turns"])
        self.flipped = draw.choice([True, False])  # stored [experts, in, out]
        self.biased, self.normalized, self.late = (draw.choice([True, False]) for _ in range(3))
        self.alpha, self.beta = draw.choice([(1.0, 0.0), (1.702, 1.0)])
        self.limit = draw.choice([None, 0.5])


class Mixture(nn.Module):
    """Send tokens [batch, tokens, width] through experts of a form, behind a norm, around a skip."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        torch.manual_seed(form.seed)
        e, d, f = form.experts, form.width, form.inner
        turn = (lambda t: t.transpose(1, 2)) if form.flipped else (lambda t: t)
        self.form, self.norm, self.router = form, nn.RMSNorm(d), nn.Linear(d, e, bias=form.biased)
        self.up = nn.Parameter(turn(torch.randn(e, 2 * f, d)).contiguous())
        self.down = nn.Parameter(turn(torch.randn(e, d, f)).contiguous() / f)
        self.up_bias = nn.Parameter(torch.randn(e, 2 * f)) if form.biased else None
        self.down_bias = nn.Parameter(torch.randn(e, d)) if form.biased else None
        self.score: Callable[[Tensor], Tensor] = lambda logits: logits.softmax(-1)
        self.activation: Callable[[Tensor], Tensor] = lambda g: g * torch.sigmoid(form.alpha * g)
        self.kept: Callable[[Tensor, Tensor], Tensor] = lambda weights, chosen: weights

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens of the same shape."""
        z = self.norm(x).flatten(0, 1)
        logits = self.router(z)
        if self.form.late:
            top, chosen = logits.topk(self.form.k)
            weights = self.score(top)
        else:
            weights, chosen = self.score(logits).topk(self.form.k)
            weights = weights / weights.sum(-1, keepdim=True) if self.form.normalized else weights
        weights = self.kept(weights, chosen)
        return x + getattr(self, self.form.spelling)(z, weights, chosen).view_as(x)

    def gated(self, up: Tensor) -> Tensor:
        """Return the inner numbers of what lies in the form's order."""
        g, u = (up[..., 0::2], up[..., 1::2]) if self.form.order == "in turns" else up.chunk(2, -1)
        g, u = (u, g) if self.form.order == "gate last" else (g, u)
        if self.form.limit is not None:
            g, u = g.clamp(max=self.form.limit), u.clamp(-self.form.limit, self.form.limit)
        return self.activation(g) * (u + self.form.beta if self.form.beta else u)

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Return both, [experts, out, in]."""
        up, down = self.up, self.down
        return (up.transpose(1, 2), down.transpose(1, 2)) if self.form.flipped else (up, down)

    def gathered(self, z: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Take the matrices of each token's experts."""
        up, down = self.matrices()
        inner = (up[chosen] @ z[:, None, :, None]).squeeze(-1)
        inner = self.gated(inner if self.up_bias is None else inner + self.up_bias[chosen])
        out = (down[chosen] @ inner.unsqueeze(-1)).squeeze(-1)
        out = out if self.down_bias is None else out + self.down_bias[chosen]
        return (out * weights.unsqueeze(-1)).sum(1)

    def dense(self, z: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Send each token through all experts, and weigh those that are not chosen with nothing."""
        up, down = self.matrices()
        inner = torch.bmm(z.expand(self.form.experts, -1, -1), up.transpose(1, 2))
        inner = self.gated(inner if self.up_bias is None else inner + self.up_bias[:, None])
        out = torch.bmm(inner, down.transpose(1, 2))
        out = out if self.down_bias is None else out + self.down_bias[:, None]
        share = torch.zeros(len(z), self.form.experts, dtype=z.dtype).scatter(1, chosen, weights)
        return (out * share.t().unsqueeze(-1)).sum(0)

    def einsum(self, z: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """As `dense`, by sums over one-hot vectors."""
        up, down = self.matrices()
        inner = torch.einsum("nd,efd->nef", z, up)
        inner = self.gated(inner if self.up_bias is None else inner + self.up_bias)
        out = torch.einsum("nef,edf->ned", inner, down)
        out = out if self.down_bias is None else out + self.down_bias
        share = (F.one_hot(chosen, self.form.experts).to(z.dtype) * weights.unsqueeze(-1)).sum(1)
        return torch.einsum("ned,ne->nd", out, share)

    def looped(self, z: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Add one expert after the other."""
        up, down = self.matrices()
        total = torch.zeros_like(z)
        for e in range(self.form.experts):
            inner = z @ up[e].t()
            inner = self.gated(inner if self.up_bias is None else inner + self.up_bias[e])
            out = inner @ down[e].t()
            out = out if self.down_bias is None else out + self.down_bias[e]
            total = total + out * (weights * (chosen == e)).sum(-1, keepdim=True)
        return total


FORMS = [(spelling, seed) for spelling in SPELLINGS for seed in range(40)]


@pytest.mark.parametrize(("spelling", "seed"), rows(FORMS, [(spelling, 0) for spelling in SPELLINGS]))
def test_found_in_any_words(spelling: str, seed: int, tmp_path: Path) -> None:
    """The one operator of the file gives the numbers of the module, numbers that are cut off among them."""
    net = Mixture(form := Form(spelling, seed)).eval()
    program = lnr.capture(net, (torch.randn(2, 5, form.width),))
    program.export(path := tmp_path / "m.onnx", target="cpu")
    assert [n.op_type for n in onnx.load(path).graph.node].count("MoE") == 1, form
    session = ort.InferenceSession(path)
    for times in (1, 9):
        x = times * torch.randn(2, 5, form.width)
        (got,) = session.run(None, {"x": x.numpy()})
        assert torch.allclose(torch.from_numpy(got), net(x), atol=2e-5 * times), times


def test_without_the_operator(tmp_path: Path) -> None:
    """What a loop adds to begins as zeros that are spread: a shape of a number."""
    net = Mixture(form := Form("looped", 0)).eval()
    lnr.capture(net, (torch.randn(2, 5, form.width),)).export(path := tmp_path / "m.onnx", target="generic")
    assert "MoE" not in {n.op_type for n in onnx.load(path).graph.node}


@wrong
def another_activation(net: Mixture) -> None:
    net.activation = F.gelu


@wrong
def another_score(net: Mixture) -> None:
    net.score = torch.sigmoid


@wrong
def tokens_that_come_late_are_left_out(net: Mixture) -> None:
    def kept(weights: Tensor, chosen: Tensor) -> Tensor:
        before = F.one_hot(chosen, net.form.experts).sum(1).cumsum(0).gather(1, chosen)
        return weights * (before <= 1)

    net.kept = kept


@wrong
def a_factor(net: Mixture) -> None:
    net.kept = lambda weights, chosen: weights * 2.5


@wrong
def a_cut_that_is_seldom_reached(net: Mixture) -> None:
    plain = net.activation
    net.activation = lambda g: plain(g.clamp(-50, 50))


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("spelling", rows(SPELLINGS, ["gathered"]))
def test_what_is_none_is_left(name: str, spelling: str) -> None:
    """What another operator would be needed for is not taken for one."""
    form = Form(spelling, 1)
    form.limit = None
    net = Mixture(form).eval()
    x = torch.randn(2, 5, form.width)
    assert len(list(find(lnr.capture(net, (x,)).module()))) == 1
    WRONG[name](net)
    assert not list(find(lnr.capture(net, (x,)).module()))
