"""A network of torch's own layers opens without --trust-pickle, and its pickle makes nothing but inert records."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lnrewrite as lnr
from commands import fails, ok
from lnrewrite.errors import LnrewriteError
from lnrewrite.loading.layers import known, read_layers

WIDTH = 8
LAYERS: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.Linear(WIDTH, WIDTH), lambda: nn.LayerNorm(WIDTH), lambda: nn.RMSNorm(WIDTH), nn.GELU, nn.ReLU, nn.SiLU,
    lambda: nn.Dropout(0.2), lambda: nn.Softplus(2.0), nn.Identity, lambda: nn.LayerNorm(WIDTH, bias=False),
    lambda: nn.TransformerEncoderLayer(WIDTH, 2, 12, batch_first=True, norm_first=True),
    lambda: nn.TransformerEncoderLayer(WIDTH, 2, 12, batch_first=True, activation=nn.functional.gelu),
    lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 12, activation=nn.SiLU()), 2),
    lambda: nn.Sequential(nn.Unflatten(-1, (2, 4)), nn.GroupNorm(5, 5), nn.Flatten(-2)),
    lambda: nn.Sequential(nn.Conv1d(5, 5, 3, padding=1, padding_mode="circular"), nn.BatchNorm1d(5), nn.Hardswish()),
)  # fmt: skip


def net(seed: int) -> nn.Module:
    """Return a network of a few random layers, some of them twice, over tokens [2, 5]."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    body = [draw.choice(LAYERS)() for _ in range(draw.randint(1, 5))]
    return nn.Sequential(nn.Embedding(11, WIDTH), *body, *draw.sample(body, 1), nn.Linear(WIDTH, 3))


@pytest.mark.parametrize("seed", range(12))
def test_the_same_network(tmp_path: Path, seed: int) -> None:
    """What is read computes bit for bit what was saved, shares what was shared, and has every attribute."""
    model = net(seed).train(seed % 3 == 0)
    torch.save({"model": model} if seed % 4 == 0 else model, path := tmp_path / "model.pt")
    held: Any = read_layers(path)
    found = held["model"] if seed % 4 == 0 else held
    assert [type(m) for m in found.modules()] == [type(m) for m in model.modules()]
    assert found.training == model.training
    x = torch.randint(0, 11, (2, 5))
    assert torch.equal(found.eval()(x), model.eval()(x))


def test_the_first_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line on the front page works as it stands, and its result is named after the model."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, batch_first=True, norm_first=True, dropout=0.0)
    stack = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
    torch.save(nn.Sequential(nn.Embedding(11, WIDTH), stack, nn.Linear(WIDTH, 11)).eval(), tmp_path / "model.pt")
    monkeypatch.chdir(tmp_path)
    assert "written    model.peri.pt2\n" in ok("convert", "model.pt", "--to", "peri").stdout
    assert lnr.load("model.peri.pt2").inspect()["placement"] == "peri"
    assert fails("LN025", 1, "convert", "model.pt", "--to", "peri")["why"] == "it exists"
    dry = ok("convert", "model.pt", "--to", "post", "--dry-run").stdout
    assert "dry run" in dry and not (tmp_path / "model.post.pt2").exists()


class Bomb:
    """Pickle a call of one of torch's layers: a matrix of a million million numbers."""

    def __reduce__(self) -> Any:
        return nn.Linear, (10**6, 10**6)


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3))
    model[0]._forward_hooks[0] = nn.Linear  # type: ignore[assignment]
    return model


def replaced() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3))
    model.__dict__["forward"] = nn.functional.relu
    return model


def within() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3))
    model._modules["1"] = model
    return model


def misplaced() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3))
    model._modules["1"] = "a layer"  # type: ignore[assignment]
    return model


def test_what_is_named_often_is_read_once(tmp_path: Path) -> None:
    """Lists of the same list twice, 64 times over, take no longer than 64 lists."""
    held: Any = torch.ones(2)
    for _ in range(64):
        held = [held, held]
    torch.save({"state_dict": {"w": torch.ones(3)}, "more": held}, path := tmp_path / "model.pt")
    found: Any = read_layers(path)
    assert found["more"][0] is found["more"][1] and isinstance(found["more"][0], list)


@pytest.mark.parametrize("make", [Bomb, hooked, replaced, within, misplaced])
def test_anything_else_is_refused(tmp_path: Path, make: Callable[[], object]) -> None:
    """A call, a hook, a method of its own, a circle, a layer that is none: refused with LN012, nothing is made."""
    torch.save(make(), path := tmp_path / "model.pt")
    with pytest.raises(LnrewriteError, match="LN012"):
        lnr.load(path)


def test_records_are_inert() -> None:
    """No stand-in for a layer or a function takes an argument, so that a pickle calls nothing by one."""
    assert len(known()) > 150
    for stand in known().values():
        with pytest.raises(TypeError):
            stand(3)
