"""Published placements are named where the whole pattern fits, and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lnrewrite as lnr
from tiers import rows
from zoo.blocks import Net, Residual, pre, stack
from zoo.branches import Attention, Mlp
from zoo.nets import NETS, REFUSED
from zoo.norms import WIDTH, layer, randomise, rms


class AttentionQkv(Attention):
    """Norm queries, keys and values of each head, and read what comes bare (HybridNorm)."""

    def __init__(self) -> None:
        super().__init__(qk=layer)
        self.v_norm = layer(WIDTH // 2)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        assert self.q_norm is not None and self.k_norm is not None
        q, k, v = self.q_norm(q), self.k_norm(k), self.v_norm(v)
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Divided(nn.Module):
    """Norm, then divide by the root of the layer's number (LayerNorm Scaling)."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.norm, self.by = layer(WIDTH), 1 / math.sqrt(number)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(x) * self.by
        return found


def hybrid(first: bool = False) -> nn.Module:
    layers: list[nn.Module] = [*stack(1, inn=layer)] if first else []
    for _ in range(2):
        layers += [Residual(AttentionQkv(), post=layer), Residual(Mlp())]
    return Net(*layers, final=layer)


def scaled(numbers: tuple[int, ...]) -> nn.Module:
    branches = (Attention(), Mlp(), Attention(), Mlp())
    made = (Residual(b, inn=lambda _, n=n: Divided(n)) for b, n in zip(branches, numbers, strict=True))
    return Net(*made, final=layer)


def normformer(out: bool = True) -> nn.Module:
    attention = Residual(Attention(), inn=layer, out=layer if out else None)
    return Net(attention, Residual(Mlp(inner=layer), inn=layer), final=layer)


SCHEMES: dict[str, tuple[Callable[[], nn.Module], str | None]] = {
    "mix": (lambda: Net(*stack(1, post=layer), *stack(2, inn=layer), final=layer), "Mix-LN"),
    "pre before post is not Mix-LN": (lambda: Net(*stack(1, inn=layer), *stack(2, post=layer)), None),
    "pre": (pre, None),
    "post": (NETS["post"].make, None),
    "sub": (NETS["norm in the branch (Sub-LN)"].make, "Sub-LN"),
    "sub in the MLPs alone": (lambda: Net(*stack(1, inn=layer), Residual(Mlp(inner=layer), inn=layer)), None),
    "normformer": (normformer, "NormFormer"),
    "normformer without its attention norm": (lambda: normformer(out=False), None),
    "deepnorm": (NETS["deepnorm"].make, "DeepNorm"),
    "post, one skip scaled": (lambda: Net(*stack(1, post=layer, skip=2.0), *stack(1, post=layer)), None),
    "keel": (NETS["keel"].make, "KEEL"),
    "keel without the scale": (lambda: Net(*stack(1, inn=layer), *stack(2, inn=layer, post=layer)), "KEEL"),
    "hybrid": (hybrid, "HybridNorm"),
    "hybrid, plain first layer": (lambda: hybrid(True), "HybridNorm"),
    "hybrid without the norm of the values": (NETS["hybrid"].make, None),
    "scaled by depth": (lambda: scaled((1, 1, 2, 2)), "LayerNorm Scaling"),
    "scaled by something else": (lambda: scaled((1, 1, 2, 3)), None),
    "sandwich": (lambda: Net(*stack(inn=rms, out=rms), final=rms), "sandwich"),
    "peri": (NETS["peri"].make, "Peri-LN"),
    "output": (NETS["output"].make, "res-post-norm"),
}  # fmt: skip


@pytest.mark.parametrize("name", rows(SCHEMES, sample=list(SCHEMES)[::3]))
def test_scheme(name: str) -> None:
    make, wanted = SCHEMES[name]
    torch.manual_seed(0)
    found = lnr.capture(randomise(make()).eval(), (torch.randint(17, (2, 6)),)).inspect()
    (stream,) = found["streams"]
    assert stream["scheme"] == wanted


def test_two_streams_of_the_same_branches_are_called_what_they_are() -> None:
    module, inputs = REFUSED["residual and normed stream (ResiDual)"].build()
    refusals = lnr.capture(module, inputs).inspect()["refusals"]
    assert any(r["code"] == "LN207" and "ResiDual" in r["why"] for r in refusals)
