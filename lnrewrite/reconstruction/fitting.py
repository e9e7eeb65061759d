"""Fit the parameters of one part to what its end shall be: L-BFGS in coordinates that the data make round.

The loss is a sum of squares, r_k(p), so that its curvature is J^T J: random cotangents v of the residuals give samples
J^T v of it. For a matrix their second moments over rows and over columns, L and R, stand for the whole (Kronecker:
Martens & Grosse, 1503.05671), and a step d in the new coordinates is the step L^-1/2 d R^-1/2 of the matrix. In these
a few dozen L-BFGS steps do what takes hundreds otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..pipeline.shares import number, total

STEPS, CHUNK = 64, 8
"""How many steps are made at most, and after how many of them the held-out data are asked."""
WORTH = 0.03
"""How much of the held-out error these are to take off, so that it goes on."""
DAMPING = 1e-3
"""How much of the mean curvature is added to every direction's."""
PROBES = 8
"""How many random cotangents tell the curvature."""
FLAT = 1e-4
"""The least curvature of a vector, of the largest of any parameter: along less there is round-off (a key's bias)."""
WIDE = 2048
"""Of a matrix with more rows (or columns), the curvature over these is taken for diagonal."""

Run = Callable[[int, Mapping[str, Tensor]], Tensor]
"""Gives the residuals on one batch for the parameters."""


@dataclass(frozen=True)
class Round:
    """Map steps of one parameter from round coordinates to its own, and gradients back: both are symmetric.

    left, right: [rows, rows] and [columns, columns] of a matrix, or the diagonals of these; a vector has `left` alone.
    """

    left: Tensor
    right: Tensor | None = None

    def __call__(self, step: Tensor) -> Tensor:
        if self.right is None:
            return step * self.left
        flat = step.reshape(len(self.left), -1)
        flat = self.left @ flat if self.left.dim() == 2 else self.left[:, None] * flat
        flat = flat @ self.right if self.right.dim() == 2 else flat * self.right
        return flat.reshape(step.shape)


@dataclass(frozen=True)
class Fitting:
    """Minimise the sum of squared residuals over batches, plus ridge |W - W0|^2 / |W0|^2 for every matrix W."""

    run: Run
    batches: int
    start: Mapping[str, Tensor]
    ridge: float

    def fit(self, judge: Callable[[Mapping[str, Tensor]], float]) -> tuple[dict[str, Tensor], float]:
        """Return the parameters that `judge` finds best, the start among them, and what it says of these.

        It is asked every `CHUNK` steps, and the search ends where these have gained less than `WORTH` of what is left.
        """
        moments = dict(zip(self.start, self._moments(), strict=True))
        least = FLAT * max((_mean(m, self.start[n]) for n, m in moments.items()), default=0.0)
        rounds = {n: self._round(p, moments[n], least) for n, p in self.start.items()}
        moves = {n: torch.zeros_like(p) for n, p in self.start.items()}

        def here() -> dict[str, Tensor]:
            return {n: p + rounds[n](moves[n]) for n, p in self.start.items()}

        def closure() -> Tensor:
            value, slopes = self.loss(here())
            for name, move in moves.items():
                move.grad = rounds[name](slopes[name])
            return torch.tensor(value)

        search = torch.optim.LBFGS(
            list(moves.values()), max_iter=CHUNK, max_eval=2 * CHUNK, history_size=20, tolerance_grad=0.0,
            tolerance_change=0.0, line_search_fn="strong_wolfe",
        )  # fmt: skip
        best, lowest = dict(self.start), judge(self.start)
        for _ in range(STEPS // CHUNK):
            search.step(closure)
            now, before = here(), lowest
            if (found := judge(now)) < lowest:
                best, lowest = now, found
            if lowest > (1 - WORTH) * before:
                break
        return best, lowest

    def loss(self, here: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        """Return what is minimised, and its gradient for every parameter."""
        value, slopes = 0.0, {n: torch.zeros_like(p) for n, p in here.items()}
        for batch in range(self.batches):
            leaves = {n: p.detach().requires_grad_() for n, p in here.items()}
            part = self.run(batch, leaves).square().sum()
            value += part.item()
            self._add(slopes, part, leaves)
        value, slopes = total(value), {n: total(s) for n, s in slopes.items()}
        for name, start in self.start.items():
            if start.dim() >= 2:
                pull, moved = self.ridge / max(start.square().sum().item(), 1e-30), here[name] - start
                value += pull * moved.square().sum().item()
                slopes[name] += 2 * pull * moved
        return value if math.isfinite(value) else math.inf, slopes

    def _add(self, slopes: dict[str, Tensor], part: Tensor, leaves: Mapping[str, Tensor]) -> None:
        found = torch.autograd.grad(part, list(leaves.values()), allow_unused=True)
        for name, slope in zip(leaves, found, strict=True):
            if slope is not None:
                slopes[name] += slope

    def _moments(self) -> list[tuple[Tensor, ...]]:
        """Return, for each parameter, the second moments of random samples of its curvature: L and R, or a diagonal."""
        draw = torch.Generator().manual_seed(number())
        many = max(1, self.batches // 4)
        share = total(self.batches) / total(many) / PROBES
        found: list[tuple[Tensor, ...]] = []
        for probe in range(PROBES):
            slopes = {n: torch.zeros_like(p) for n, p in self.start.items()}
            for batch in (probe * many + k for k in range(many)):
                leaves = {n: p.detach().requires_grad_() for n, p in self.start.items()}
                out = self.run(batch % self.batches, leaves)
                self._add(slopes, (out * torch.randn(out.shape, generator=draw).to(out)).sum(), leaves)
            each = [_second(total(s) * math.sqrt(share)) for s in slopes.values()]
            pairs = zip(found, each, strict=True) if found else ()
            found = [tuple(a + b for a, b in zip(x, y, strict=True)) for x, y in pairs] or each
        return found

    def _round(self, start: Tensor, moments: tuple[Tensor, ...], least: float) -> Round:
        curvature = _mean(moments, start)
        if len(moments) == 1:
            return Round((0.5 * (moments[0] + curvature)).clamp_min(max(least, 1e-20)).rsqrt())
        pull = self.ridge / max(start.square().sum().item(), 1e-30)
        damping = max(DAMPING, math.sqrt(pull / max(curvature, 1e-30)))
        left, right = (_root(m, damping) for m in moments)
        return Round(left / math.sqrt(max(curvature, 1e-20)), right)


def _second(slope: Tensor) -> tuple[Tensor, ...]:
    if slope.dim() < 2 or min(slope.shape[0], slope[0].numel()) < 2:
        return (slope.square(),)
    flat = slope.reshape(len(slope), -1)
    return tuple(m @ m.T if len(m) <= WIDE else m.square().sum(1) for m in (flat, flat.T))


def _mean(moments: tuple[Tensor, ...], start: Tensor) -> float:
    """Return the mean curvature along the numbers of a parameter."""
    return float(_diagonal(moments[0]).sum()) / max(start.numel(), 1)


def _diagonal(moment: Tensor) -> Tensor:
    return moment.diagonal() if moment.dim() == 2 else moment


def _root(moment: Tensor, damping: float) -> Tensor:
    """Return (M / mean(diag M) + damping)^-1/2."""
    scaled = moment / _diagonal(moment).mean().clamp_min(1e-30)
    if scaled.dim() == 1:
        return (scaled + damping).rsqrt()
    values, vectors = torch.linalg.eigh(scaled)
    return (vectors * (values.clamp_min(0) + damping).rsqrt()) @ vectors.T
