"""Residual nets that choose by their data what they compute, each way of spelling it once, and some that do not."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

WIDTH = 16
Choice = Callable[["Chooser", Tensor], Tensor]


class Chooser(nn.Module):
    """Two residual blocks with a choice between them."""

    def __init__(self, choice: Choice) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.choice = choice
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.into = nn.ModuleList(nn.Linear(WIDTH, 32) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(32, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def block(self, h: Tensor, index: int) -> Tensor:
        out: Tensor = h + self.out[index](torch.tanh(self.into[index](self.norms[index](h))))
        return out

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = self.head(self.block(self.choice(self, self.block(h, 0)), 1))
        return out


def on_mean(net: Chooser, h: Tensor) -> Tensor:
    if h.mean() > 0:
        return -h
    return h


def on_max(net: Chooser, h: Tensor) -> Tensor:
    return h * 2 if bool((h.abs() > 3).any()) else h


def on_item(net: Chooser, h: Tensor) -> Tensor:
    return -h if h.sum().item() > 0 else h


def on_list(net: Chooser, h: Tensor) -> Tensor:
    return -h if h[0, 0].tolist()[0] > 0 else h


def on_float(net: Chooser, h: Tensor) -> Tensor:
    return -h if float(h.sum()) > 0 else h


def on_numpy(net: Chooser, h: Tensor) -> Tensor:
    return -h if h.detach().numpy().mean() > 0 else h


def loop(net: Chooser, h: Tensor) -> Tensor:
    size = h.abs().mean()
    while size.item() > 0.2:
        h, size = h * 0.7, size * 0.7
    return h


def early(net: Chooser, h: Tensor) -> Tensor:
    for _ in range(2):
        if h.norm() > 30:
            break
        h = net.block(h, 0)
    return h


def first(net: Chooser, h: Tensor) -> Tensor:
    count = int((h.mean(-1) > 0).sum())
    return torch.cat([h.flatten(0, 1)[:count] * 2, h.flatten(0, 1)[count:]]).reshape(h.shape)


def kept(net: Chooser, h: Tensor) -> Tensor:
    return h.flatten(0, 1)[(h.mean(-1) > 0).flatten().nonzero().squeeze(-1)]


def scaled(net: Chooser, h: Tensor) -> Tensor:
    return h * h.mean().item()


def checked(net: Chooser, h: Tensor) -> Tensor:
    assert (h.abs() < 1e3).all()
    if not torch.isfinite(h).all():
        raise ValueError("not finite")
    return h


def by_weights(net: Chooser, h: Tensor) -> Tensor:
    return -h if net.head.weight.sum() > 0 else h


def by_size(net: Chooser, h: Tensor) -> Tensor:
    return -h if torch.ones(h.shape[:2]).bool().all() else h


def noisy(net: Chooser, h: Tensor) -> Tensor:
    return h + torch.rand_like(h)


def erratic(net: Chooser, h: Tensor) -> Tensor:
    return h * random.random()


def while_exported(net: Chooser, h: Tensor) -> Tensor:
    return h * 2 if torch.compiler.is_exporting() else h


def for_negative(net: Chooser, h: Tensor) -> Tensor:
    return h * 2 if not torch.compiler.is_exporting() and h.mean() < 0 else h


FIXED = (on_mean, on_max, on_item, on_list, on_float, on_numpy, loop, early, first)
FREE = (kept, scaled, checked, by_weights, by_size, noisy)
NETS = {choice.__name__: partial(Chooser, choice) for choice in (*FIXED, *FREE, erratic, while_exported, for_negative)}
mean, number = NETS["on_mean"], NETS["on_float"]
