"""What works as a norm and is none that is known is noted, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lnrewrite as lnr
from commands import ok
from lnrewrite.detect.norms import find_norms

WIDTH = 8
Rule = Callable[["Rules", Tensor], Tensor]


def rms(x: Tensor) -> Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


NOTED: dict[str, Rule] = {
    "gated by itself": lambda n, x: x * torch.sigmoid(n.gain * x) / (x.var((1, 2), keepdim=True) + 1e-5).sqrt(),
    "the larger of two": lambda n, x: x / torch.maximum(n.scale.abs(), n.gain * x + x.std(1, keepdim=True)),
    "a gain of its own": lambda n, x: (torch.tanh(x @ n.gain)[..., None] * n.bias + n.gain) * x * rms(x),
    "mean and square": lambda n, x: x * torch.rsqrt((x * x).sum(-1, True) + x.sum(-1, True) ** 2 + 1e-5),
    "the largest": lambda n, x: x / x.abs().amax(-1, keepdim=True).clamp(min=1e-5),
    "a part's size": lambda n, x: x * rms(x[..., :3]),
    "a clipped length": lambda n, x: x * (2 / (x.norm(dim=-1, keepdim=True) + 1e-6)).clamp(max=1.0),
    "response": lambda n, x: x * (x.norm(dim=1, keepdim=True) / (x.norm(dim=1, keepdim=True).mean(-1, True) + 1e-6)),
    "neighbours": lambda n, x: F.local_response_norm(x, 3),
    "erf": lambda n, x: torch.erf(n.bias * x + n.shift) * n.gain,
    "arctan": lambda n, x: n.gain * torch.atan(n.scale * x),
    "softsign": lambda n, x: n.bias + n.gain * (n.scale * x / (1 + (n.scale * x).abs())),
    "stored deviations": lambda n, x: (x - x.mean(-1, keepdim=True)) / n.bias * n.gain,
    "a slope a channel": lambda n, x: torch.tanh(n.bias * x) * n.gain,
}
QUIET: dict[str, Rule] = {
    "softmax": lambda n, x: (x - x.amax(-1, True)).exp() / (x - x.amax(-1, True)).exp().sum(-1, keepdim=True),
    "largest shares": lambda n, x: x.sigmoid().topk(2).values / (x.sigmoid().topk(2).values.sum(-1, True) + 1e-9),
    "shares of squares": lambda n, x: F.relu(x).square() / (F.relu(x).square().sum(-1, keepdim=True) + 1e-6),
    "squeeze and excite": lambda n, x: x * torch.sigmoid(n.up(x.mean(1, keepdim=True))),
    "linear attention": lambda n, x: (n.up(x) @ (x.mT @ x)) / (n.up(x) * x.exp().sum(1, True)).sum(-1, keepdim=True),
    "pooled by a mask": lambda n, x: (x * (x > 0)).sum(1) / (x > 0).float().sum(1).clamp(min=1),
    "rounded": lambda n, x: (x * (127 / x.abs().amax(-1, True))).round() / (127 / x.abs().amax(-1, True)),
    "cosine": lambda n, x: F.normalize(x, dim=-1) @ F.normalize(n.up(x), dim=-1).mT,
    "gelu": lambda n, x: F.gelu(n.up(x)) * n.gain,
    "gate": lambda n, x: torch.sigmoid(n.up(x)) * n.gain * x,
    "an activation's gain": lambda n, x: torch.tanh(n.up(x) + n.bias) * n.gain,
    "capped": lambda n, x: torch.tanh(x / n.scale) * n.scale,
    "a learned slope": lambda n, x: F.relu(n.scale * x) * n.gain,
    "mixed gains": lambda n, x: x * (torch.sigmoid(n.scale * x.sum(-1, True) + n.shift) * n.gain + n.bias),
    "centred": lambda n, x: n.up(x - x.mean(-1, keepdim=True)),
    "a fixed deviation": lambda n, x: (x - x.mean(-1, keepdim=True)) / 1.7 * n.gain + n.bias,
    "known": lambda n, x: F.layer_norm(x * rms(x) * n.gain, (WIDTH,)) * F.silu(n.up(x)),
}


class Rules(nn.Module):
    """Apply some rules to one input, each for an output of its own."""

    def __init__(self, *rules: Rule) -> None:
        super().__init__()
        self.rules, self.up = rules, nn.Linear(WIDTH, WIDTH)
        self.gain, self.bias = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.scale, self.shift = nn.Parameter(torch.rand(1)), nn.Parameter(torch.rand(1))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(rule(self, x) for rule in self.rules)


class Odd(nn.Module):
    """Be a residual network whose only norm is one that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(WIDTH, WIDTH), Rules(NOTED["a part's size"])
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return x + self.down(F.gelu(self.up(self.norm(x)[0])))


def noted(*rules: Rule) -> tuple[object, ...]:
    return find_norms(lnr.capture(Rules(*rules), (torch.randn(2, 6, WIDTH),)).graph)[1]


def test_what_normalises_and_is_no_known_norm_is_noted() -> None:
    assert len(noted(*NOTED.values())) == len(NOTED)


def test_what_normalises_nothing_is_not_noted() -> None:
    assert noted(*QUIET.values()) == ()


def test_a_file_is_noted_as_its_model_is(tmp_path: Path) -> None:
    program = lnr.capture(Rules(*NOTED.values()), (torch.randn(2, 6, WIDTH),))
    program.export(tmp_path / "rules.onnx", target="generic", verify=False)
    found = [one.inspect()["refusals"] for one in (program, lnr.load(str(tmp_path / "rules.onnx")))]
    of_model, of_file = (sum(row["code"] == "LN205" for row in rows) for rows in found)
    assert of_model == len(NOTED)
    assert of_file == len(NOTED) - 1  # a gain of its own is seen beside a norm there, in a model on a stream alone


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*NOTED, *QUIET])
def test_each_alone(name: str) -> None:
    assert len(noted((NOTED | QUIET)[name])) == (name in NOTED)


def test_a_gain_that_the_value_itself_gives_is_said() -> None:
    model = Rules(lambda n, x: (torch.tanh(x @ n.gain)[..., None] * n.bias + n.gain) * (x * rms(x)))
    assert lnr.capture(model, (torch.randn(2, 6, WIDTH),)).inspect()["norms"]["modulated"] == {"adaptive": 1}


def test_inspect_and_every_report_name_the_node_and_its_block() -> None:
    program = lnr.capture(Odd(), (torch.randn(2, 6, WIDTH),))
    (row,) = program.inspect()["refusals"]
    assert row["code"] == "LN205" and "in block " in row["why"]
    for text in ("place{to=peri}", "canonicalize"):
        (note,) = [n for n in lnr.Pipeline.parse(text).run(program).report.notes if "LN205" in n]
        assert row["site"] in note and program.network.blocks[0].name in note


def test_convert_says_on_the_command_line_what_it_puts_norms_beside(tmp_path: Path) -> None:
    given = ["--to", "pre", "-o", tmp_path / "odd.pt2", "--input", "x=float32[2,6,8]"]
    told = ok("convert", "test_lookalikes:Odd", *given).output
    assert "note: 1 values are normalized by no norm that lnrewrite knows (LN205)" in " ".join(told.split())


NAMED = {
    "gated by itself": "EvoNorm-S0", "the larger of two": "EvoNorm-B0", "a gain of its own": "SeeDNorm",
    "response": "Global Response Norm", "the largest": "", "a part's size": "", "a clipped length": "",
}  # fmt: skip
"""What a refusal calls it."""


@pytest.mark.parametrize("name", NAMED)
def test_what_has_a_published_name_is_called_by_it(name: str) -> None:
    (found,) = noted(NOTED[name])
    said = str(found)
    assert f"as {NAMED[name]} (arXiv" in said if NAMED[name] else "arXiv" not in said
