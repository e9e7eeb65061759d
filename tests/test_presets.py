"""What the presets are for: fp16 without overflow, rounding to 8 bits without loss; on the examples' nets."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import lnrewrite as lnr
from lnrewrite import demo
from tiers import rows

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> ModuleType:
    """Import an example script."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def error(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.fixture(scope="module")
def overflowing() -> tuple[Any, Tensor, list[dict[str, Tensor]]]:
    net = example("fp16_overflow")
    batches = [{"ids": torch.randint(0, net.WORDS, (4, net.LENGTH))} for _ in range(4)]
    return net.Encoder().eval(), torch.randint(0, net.WORDS, (4, net.LENGTH)), batches


@pytest.mark.exhaustive
def test_a_stream_that_overflows_fp16_fits_after_the_preset(overflowing: Any, tmp_path: Path) -> None:
    model, ids, batches = overflowing
    with torch.no_grad():
        wanted = model(ids)
        assert not example("fp16_overflow").Encoder().eval().half()(ids).isfinite().all()
    result = lnr.Pipeline.preset("fp16").run(lnr.capture(model, kwargs={"ids": ids}), batches, partial=True)
    assert not result.report.refusals
    result.program.export(tmp_path / "half.onnx", dtype="fp16")
    half = lnr.load(str(tmp_path / "half.onnx")).module()(ids=ids)
    with torch.no_grad():
        assert error(result.program.module()(ids=ids), wanted) <= 1e-5
        assert error(next(iter(half.values())), wanted) <= 2e-2
        assert error(result.program.module().half()(ids=ids), wanted) <= 2e-2


def test_the_arms_are_needed(overflowing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The net's ReLUs and values overflow as well as its stream: without the scale pairs, fp16 gives NaN again."""
    from lnrewrite.passes import rescale_stream

    model, ids, batches = overflowing
    monkeypatch.setattr(rescale_stream.Headroom, "inside", lambda self: iter(()))
    result = lnr.Pipeline.preset("fp16").run(lnr.capture(model, kwargs={"ids": ids}), batches, partial=True)
    with torch.no_grad():
        assert not result.program.module().half()(ids=ids).isfinite().all()


HALVES = [(torch.bfloat16, 0.1), (torch.float16, 0.01)]


@pytest.mark.parametrize(("dtype", "most"), rows(HALVES, sample=HALVES[:1]))
def test_half_precision_reports_what_rounding_costs(dtype: torch.dtype, most: float) -> None:
    model, data = demo.load("tinygpt"), demo.calibration(batches=2, seed=0)
    program = lnr.capture(model.to(dtype), kwargs=data[0])
    report = lnr.Pipeline.preset("quantize").run(program, data, partial=True, consume=True).report
    assert report.drift and 0 < report.drift["relative_error"] < most
    assert any("rounding" in note for note in report.notes)
    assert lnr.Pipeline.preset("exact").run(lnr.capture(model.float(), kwargs=data[0])).report.drift is None


def test_a_value_that_nothing_can_shrink_is_named() -> None:
    class Gated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
            self.head = torch.nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            n = torch.nn.functional.rms_norm(x, (8,))
            x = x + self.inner[1](torch.exp(3 * self.inner[0](n) + 11))
            return self.head(torch.nn.functional.rms_norm(x, (8,)))

    torch.manual_seed(0)
    x = torch.randn(4, 5, 8)
    result = lnr.Pipeline.preset("fp16").run(lnr.capture(Gated().eval(), (x,)), [(x,)], partial=True)
    assert {r.code for r in result.report.refusals} == {"LN130"}
    assert any(r.site == "exp" for r in result.report.refusals)


def test_eight_bits_cost_less_after_the_preset() -> None:
    net, text = example("quantize_tinygpt"), demo.heldout_text()
    data = demo.calibration(batches=1, seed=0)
    program = lnr.capture(net.with_outliers(demo.load("tinygpt"), 40.0), kwargs=data[0])
    turned = lnr.Pipeline.preset("quantize").run(program, partial=True).program
    plain = demo.loss(program.module(), text, limit=2000)
    assert abs(demo.loss(turned.module(), text, limit=2000) - plain) < 1e-5
    with net.Rounded():
        before, after = (demo.loss(p.module(), text, limit=2000) - plain for p in (program, turned))
    assert before > 0.1 and after < before / 10


class Scaled(torch.nn.Module):
    """Hold a block whose sum is scaled by a stored 1, as Gemma 4's are, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.one = torch.nn.Embedding(11, 8), torch.nn.Buffer(torch.ones(1))
        self.norm, self.final = torch.nn.RMSNorm(8, eps=1e-6), torch.nn.RMSNorm(8, eps=1e-6)
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        torch.nn.init.normal_(self.final.weight)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = (x + self.down(torch.tanh(self.up(self.norm(x))))) * self.one
        return torch.nn.functional.linear(self.final(x), self.embed.weight)


def test_what_stored_numbers_hide_is_untied() -> None:
    net = Scaled().eval()
    ids = torch.arange(6).view(2, 3)
    result = lnr.Pipeline.preset("quantize").run(lnr.capture(net, (ids,)), partial=True)
    assert {step.text: step.edits for step in result.report.steps}["untie"] == 1
    assert not result.report.refusals
    assert error(result.program.module()(ids), net(ids)) < 1e-6
