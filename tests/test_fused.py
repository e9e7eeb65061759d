"""Losses with gradients of their own: they are what the plain formulas give, and keep less."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lnrewrite.backends.torch import fused
from lnrewrite.backends.torch.fused import IGNORED, apart, compared
from tiers import rows

SHAPES = [(7, 5), (2, 3, 11), (1, 1), (64, 300), (3, 0, 4)]
KINDS = ["entropy", "divergence", "both"]
FEW = [((2, 3, 11), "both", 40), ((64, 300), "both", 2**16), ((7, 5), "entropy", 40), ((2, 3, 11), "divergence", 1)]
SEVERAL = rows(product(SHAPES, KINDS, [1, 40, 2**16]), sample=FEW)


def plain(mine: Tensor, its: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same in the words of a textbook."""
    q, p = mine.log_softmax(-1), its.log_softmax(-1)
    found = -q.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return found.masked_fill(targets == IGNORED, 0.0), (p.exp() * (p - q)).sum(-1)


def drawn(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, others that are near, and targets, some of them ignored."""
    draw = torch.Generator().manual_seed(math.prod(shape))
    mine = 3 * torch.randn(shape, generator=draw, dtype=torch.float64)
    its = mine + 0.3 * torch.randn(shape, generator=draw, dtype=torch.float64)
    targets = torch.randint(shape[-1], shape[:-1], generator=draw)
    targets[torch.rand(shape[:-1], generator=draw) < 0.3] = IGNORED
    return mine.to(dtype).requires_grad_(), its.to(dtype), targets


def slope(found: tuple[Tensor, Tensor], of: Tensor) -> Tensor:
    """Return the gradient of a sum in which every row weighs something else, and the two losses too."""
    weights = torch.arange(1, found[0].numel() + 1, dtype=found[0].dtype).view(found[0].shape)
    made: Tensor = torch.autograd.grad((weights * found[0]).sum() - 0.7 * (weights.square() * found[1]).sum(), of)[0]
    return made


@pytest.mark.parametrize(("shape", "kind", "cached"), SEVERAL)
def test_both_losses_of_logits_are_the_plain_ones(
    shape: tuple[int, ...], kind: str, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many rows are computed at a time; what is not asked for is zero and has no gradient."""
    monkeypatch.setattr(fused, "CACHED", cached)
    mine, its, targets = drawn(shape)
    asked = (None if kind == "entropy" else its, None if kind == "divergence" else targets)
    ours, theirs = compared(mine, *asked), plain(mine, its, targets)
    theirs = tuple(t * (kind in (name, "both")) for t, name in zip(theirs, KINDS, strict=False))  # type: ignore[assignment]
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == shape[:-1] and torch.allclose(one, other, rtol=1e-12, atol=1e-12)
    assert torch.allclose(slope(ours, mine), slope(theirs, mine), rtol=1e-10, atol=1e-12)


def test_classes_without_a_chance_add_nothing() -> None:
    """What is at -inf in both might as well not be there, and takes no gradient."""
    mine, its, targets = drawn((2, 3, 11))
    never = torch.zeros(11, dtype=torch.bool)
    never[8:] = True
    targets = targets.clamp(max=7)
    with_them = compared(*(t.masked_fill(never, -math.inf) for t in (mine, its)), targets)
    without = compared(mine[..., ~never], its[..., ~never], targets)
    assert all(torch.allclose(one, other) for one, other in zip(with_them, without, strict=True))
    assert torch.allclose(slope(with_them, mine), slope(without, mine))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_numbers_are_compared_in_float32(dtype: torch.dtype) -> None:
    """Logits of half precision lose nothing more than they lost, and their gradient has their type."""
    mine, its, targets = drawn((16, 300), dtype)
    ours, theirs = compared(mine, its, targets), plain(mine.double(), its.double(), targets)
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == torch.float32 and torch.allclose(one.double(), other, rtol=1e-4, atol=1e-5)
    one, other = slope(ours, mine), slope(theirs, mine)
    assert one.dtype == dtype and float((one - other).norm() / other.norm()) < 4 * torch.finfo(dtype).eps
    state = mine.detach().requires_grad_()
    far = apart(state, its, True)
    assert far.dtype == torch.float32
    assert torch.autograd.grad(far.sum(), state)[0].dtype == dtype


class Large(TorchDispatchMode):
    """Count the new tensors of floats that are as large as the logits."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.count, self.seen = size, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for t in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(t, Tensor) and t.is_floating_point() and t.numel() >= self.size:
                where = t.untyped_storage().data_ptr()
                self.count += where not in self.seen
                self.seen.add(where)
        return made


def test_no_copy_of_the_logits_is_made_but_for_their_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "CACHED", 1024)
    mine, its, targets = drawn((4, 32, 500), torch.bfloat16)
    kept = list[Tensor]()
    watch = Large(mine.numel())
    watch.seen = {mine.untyped_storage().data_ptr(), its.untyped_storage().data_ptr()}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t), watch:
        total = sum(part.sum() for part in compared(mine, its, targets))
    assert watch.count == 0
    assert {t.untyped_storage().data_ptr() for t in kept if t.numel() >= mine.numel()} <= watch.seen
    with watch:
        total.backward()  # type: ignore[union-attr]
    assert watch.count == 1 and mine.grad is not None


def plainly_apart(mine: Tensor, its: Tensor, centered: bool) -> Tensor:
    norm: Callable[..., Tensor] = F.layer_norm if centered else F.rms_norm
    both = [norm(x, x.shape[-1:], eps=fused.TINY) for x in (mine, its)]
    return (both[0] - both[1]).square().mean(-1)


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize(("shape", "noise"), [((6, 8), 1.0), ((2, 3, 17), 1e-3), ((5, 128), 0.1)])
def test_states_are_as_far_apart_as_their_norms_say(shape: tuple[int, ...], noise: float, centered: bool) -> None:
    """With a mean and sizes that differ by token, which a norm takes out of value and gradient."""
    draw = torch.Generator().manual_seed(1)
    mine = torch.randn(shape, generator=draw, dtype=torch.float64).exp() * torch.logspace(-2, 2, shape[-2])[:, None]
    its = mine * (1 + noise * torch.randn(shape, generator=draw, dtype=torch.float64))
    mine.requires_grad_()
    ours, theirs = apart(mine, its, centered), plainly_apart(mine, its, centered)
    assert torch.allclose(ours, theirs, rtol=1e-9, atol=0)
    assert torch.allclose(slope((ours, ours), mine), slope((theirs, theirs), mine), rtol=1e-8, atol=1e-12)


def test_a_state_of_zeros_has_no_direction_and_no_infinite_gradient() -> None:
    mine = torch.zeros(1, 4, requires_grad=True)
    found = apart(mine, torch.ones(1, 4), False)
    found.sum().backward()
    assert found.tolist() == [1.0] and mine.grad is not None and torch.isfinite(mine.grad).all()
    assert apart(torch.zeros(1, 4), torch.zeros(1, 4), True).tolist() == [0.0]
