"""Where branches are trained together, the logits are followed beside the states: those of tokens that count."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lnrewrite as lnr
from lnrewrite.comparison.verifying import distances
from lnrewrite.reconstruction import followed, together
from lnrewrite.reconstruction.together import Together
from zoo.norms import randomise

WIDTH, CLASSES, HIDDEN = 8, 25, 3


class Speaker(nn.Module):
    """Mix the tokens that a mask shows; give logits, or with a head as wide as the stream what may be states.

    never: classes beside those of the head that are not chosen, whose logits are -inf (a padded vocabulary).
    """

    def __init__(self, classes: int, never: int = 0) -> None:
        super().__init__()
        self.never = never
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.table(ids)
        shown = attention_mask[..., None].to(x.dtype)
        for norm, linear in zip(self.norms, self.maps, strict=False):
            y = norm(x)
            x = x + linear(y + (y * shown).sum(1, keepdim=True) / shown.sum(1, keepdim=True))
        found: Tensor = self.head(self.norms[-1](x))
        return F.pad(found, (0, self.never), value=-math.inf) if self.never else found


def batches(count: int) -> list[dict[str, Tensor]]:
    """Return rows of which the last tokens are padding."""
    g = torch.Generator().manual_seed(0)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[:, -HIDDEN:] = 0
    return [{"ids": torch.randint(0, CLASSES, (2, 8), generator=g), "attention_mask": mask} for _ in range(count)]


def program(form: str, folder: Path, classes: int, never: int = 0) -> Any:
    """Return a speaker as a captured module, or as ONNX."""
    torch.manual_seed(0)
    found = lnr.capture(randomise(Speaker(classes, never)).eval(), kwargs=batches(1)[0])
    if form != "onnx":
        return found
    found.export(folder / f"{never}.onnx")
    return lnr.load(folder / f"{never}.onnx")


def trained(classes: int, form: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Together:
    """Return the training of a conversion, as it stood before its first step."""
    seen: list[Together] = []
    run = Together.run

    def watched(self: Together) -> together.Trained:
        seen.append(self)
        return run(self)

    monkeypatch.setattr(Together, "run", watched)
    lnr.Pipeline.parse("place{to=none}").run(program(form, folder, classes), batches(5))
    return seen[0]


@pytest.mark.parametrize("form", ["torch", "onnx"])
def test_the_error_holds_the_divergence_of_the_logits_that_count(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = trained(CLASSES, form, tmp_path, monkeypatch)
    assert training.followed.scores
    pair = training._pair(batches(1)[0])
    weight, whole = followed.SCORES, training._error({}, pair, torch.mean)
    monkeypatch.setattr(followed, "SCORES", 0.0)
    states = training._error({}, pair, torch.mean)
    with torch.no_grad():
        its, mine = (run({}, values)[-1].log_softmax(-1) for run, values in zip(training._runs, pair[:2], strict=True))
    rows = F.kl_div(mine, its, reduction="none", log_target=True).sum(-1)
    nats = rows[:, :-HIDDEN].mean()
    assert nats > 1e-6
    # a difference of float32 sums, some thirty times as large as it
    torch.testing.assert_close(whole - states, weight * nats, rtol=1e-4, atol=0)


@pytest.mark.parametrize("form", ["torch", "onnx"])
def test_what_may_be_states_is_no_logits(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not trained(WIDTH, form, tmp_path, monkeypatch).followed.scores


@pytest.mark.parametrize("form", ["torch", "onnx"])
def test_classes_that_are_never_chosen_tell_no_difference(form: str, tmp_path: Path) -> None:
    """A vocabulary padded with -inf is converted as one without, and drifts as far."""
    found = list[dict[str, float]]()
    for never in (0, 7):
        speaker = program(form, tmp_path, CLASSES, never)
        drift = lnr.Pipeline.parse("place{to=none}").run(speaker, batches(5)).report.drift
        found.append({name: drift[name] for name in ("relative_error", "cosine", "kl", "top1_agreement")})
    assert found[0]["kl"] > 0
    assert found[0] == pytest.approx(found[1], rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distances_of_classes_that_are_never_chosen(dtype: torch.dtype) -> None:
    """They are those of the other classes, and what is compared stays as it is."""
    one, two = torch.randn(2, 3, 4, 25, generator=torch.Generator().manual_seed(0)).to(dtype)
    given = [F.pad(t, (0, 7), value=-math.inf) for t in (one, two)]
    before = [t.clone() for t in given]
    assert torch.allclose(distances(*given), distances(one, two), rtol=1e-6)
    assert all(torch.equal(t, was) for t, was in zip(given, before, strict=True))
