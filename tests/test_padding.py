"""Tokens that a mask hides: what stands there decides nothing that is fitted or measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lnrewrite as lnr
from lnrewrite.backends.hiding import ELSEWHERE, counted, hides
from lnrewrite.comparison.verifying import distances
from lnrewrite.healing.losses import Objective
from tiers import rows
from zoo import families

LENGTH, WORDS, WIDTH = 12, 40, 32


class Layer(nn.Module):
    """A pre-norm layer whose attention takes torch's mask: true where a token is hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.one(x)
        x = x + self.attention(y, y, y, key_padding_mask=mask, need_weights=False)[0]
        return x + self.feed(self.two(x))


class Encoder(nn.Module):
    """Two of them over an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, padding_mask: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, padding_mask)
        return self.head(self.norm(x))


def ids(seed: int, length: int = LENGTH) -> Tensor:
    return torch.randint(4, WORDS, (2, length), generator=torch.Generator().manual_seed(seed))


def hiding(seed: int, left: bool) -> Tensor:
    """Return which tokens are hidden: true[rows, tokens], a stretch at one end of each row."""
    lengths = torch.randint(1, LENGTH - 3, (2,), generator=torch.Generator().manual_seed(seed + 100))
    places = torch.arange(LENGTH)
    return places < lengths[:, None] if left else places >= LENGTH - lengths[:, None]


def model(kind: str, left: bool = False) -> nn.Module:
    """Return a small model, without a pooler, which reads the first token, where that may be hidden."""
    torch.manual_seed(0)
    made = Encoder() if kind == "torch" else families.build(kind, head=kind in ("llama", "t5"))[0]
    if left and hasattr(made, "pooler"):
        made.pooler = None
    return made.eval()


def batches(kind: str, left: bool, other: int) -> list[dict[str, Tensor]]:
    """Return data of a kind of model; `other` draws what the mask hides."""
    found = []
    for seed in range(8):
        hidden = hiding(seed, left)
        tokens = torch.where(hidden, ids(1000 * other + seed), ids(seed))
        if kind == "torch":
            found.append({"input_ids": tokens, "padding_mask": hidden})
            continue
        batch = {"input_ids": tokens, "attention_mask": (~hidden).long()}
        found.append(batch | ({"decoder_input_ids": ids(seed + 50)} if kind == "t5" else {}))
    return found


KINDS = [(kind, left) for kind in ("bert", "llama", "t5", "torch") for left in (False, True)]


def converted(kind: str, left: bool, other: int, fit: str) -> Any:
    module, data = model(kind, left), batches(kind, left, other)
    program = lnr.capture(module, kwargs=data[0])
    to = "pre" if kind == "bert" else "peri"
    return lnr.Pipeline.parse(f"place{{to={to} fit={fit}}}").run(program, calibrate=data)


@pytest.mark.parametrize("fit", ["constants", "reconstruct"])
@pytest.mark.parametrize(("kind", "left"), rows(KINDS, sample=[("bert", False), ("torch", True)]))
def test_what_is_hidden_decides_nothing(kind: str, left: bool, fit: str) -> None:
    """Whatever stands where the mask hides, the same weights and the same drift come out."""
    one, two = (converted(kind, left, other, fit) for other in (0, 1))
    apart = {}
    for (name, a), b in zip(one.program.module().named_parameters(), two.program.module().parameters(), strict=True):
        apart[name] = float((a - b).detach().norm() / a.detach().norm().clamp_min(1e-9))
    table = {n for n in apart if "embed" in n or "shared" in n}  # T5's mask is not of its decoder's tokens
    limit = 1e-3 if fit == "reconstruct" else 1e-5
    assert max(v for n, v in apart.items() if n not in table) < limit, apart
    assert one.report.edits == two.report.edits > 0
    assert one.report.drift["relative_error"] == pytest.approx(two.report.drift["relative_error"], rel=1e-3)
    assert (one.report.drift["kl"] or 0) == pytest.approx(two.report.drift["kl"] or 0, rel=1e-3)


@pytest.mark.parametrize(("kind", "number"), [("bert", 0), ("llama", 0), ("torch", 1)])
def test_which_number_hides(kind: str, number: int) -> None:
    module, batch = model(kind), batches(kind, False, 0)[0]
    name = "padding_mask" if kind == "torch" else "attention_mask"
    program = lnr.capture(module, kwargs=batch)
    objective = Objective.of(program, batch)
    assert objective.masks == {name: number}
    assert torch.equal(counted(objective.masks, batch, batch[name]), ~hiding(0, False))


def test_what_hides_nothing() -> None:
    """Masks that the model does not look at, and an encoder's beside the values of a decoder."""
    batch = batches("t5", False, 0)[0] | {"loss_mask": (~hiding(0, False)).long()}

    def run(given: dict[str, Tensor]) -> dict[str, Tensor]:
        here, far = given["input_ids"].double(), given["decoder_input_ids"].double()
        seen = (here * given["attention_mask"]).sum(1, keepdim=True)
        values = {"embedding": here, "encoder": here + seen, "decoder": far + seen, "short": here[:, :3]}
        return {name: value[..., None] for name, value in values.items()}

    assert hides("attention_mask", batch, run) == {"embedding": None, "encoder": 0, "decoder": ELSEWHERE}
    assert set(hides("loss_mask", batch, run).values()) == {None}


def test_arrays_are_data_too(tmp_path: Path) -> None:
    """An ONNX file takes numpy arrays, whose masks hide as tensors' do."""
    data = batches("bert", False, 0)
    lnr.capture(model("bert"), kwargs=data[0]).export(file := tmp_path / "bert.onnx", target="cpu")
    given = [{name: value.numpy() for name, value in batch.items()} for batch in data]
    runs = [lnr.Pipeline.parse("place{to=pre fit=constants}").run(lnr.load(file), calibrate=d) for d in (given, data)]
    assert runs[0].report.edits > 0 and runs[0].report.drift == runs[1].report.drift


def test_an_output_that_is_given_twice() -> None:
    """Logits under two names are measured once for each, and as logits once."""
    one = torch.randn(2, 3, 5)
    both, alone = distances({"logits": one, "again": one}, {"logits": one + 1, "again": one}), distances(one, one + 1)
    assert both[6] == alone[6] == 6


def test_rows_are_the_shown_ones() -> None:
    """Samples hold as many rows as tokens are shown."""
    module, data = model("bert"), batches("bert", False, 0)
    program = lnr.capture(module, kwargs=data[0])
    found = program.samples(data)
    shown = sum(int(batch["attention_mask"].sum()) for batch in data)
    assert {len(each.state) for each in found.values()} == {shown}
    assert all(np.isfinite(each.total).all() for each in found.values())
