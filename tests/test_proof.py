"""Exact passes are proved: whatever the picture says of a net, the result computes the same, and tells what it left."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lnrewrite as lnr
import zoo
from commands import fails, ok
from fuzz.judging import PIPELINES
from lnrewrite.backends.outputs import apart
from lnrewrite.backends.rewriter import Rewriter
from lnrewrite.backends.torch import ops as aten
from lnrewrite.backends.torch.capture import from_program
from lnrewrite.backends.torch.functional import SPELLINGS
from lnrewrite.backends.torch.sums import SUMS
from lnrewrite.ir import Proposal, Stream
from lnrewrite.models.onnx_program import OnnxProgram
from lnrewrite.pipeline.results import Gap
from lnrewrite.pipeline.sounding import sound
from tiers import rows
from zoo import strangers
from zoo.strangers import W

RIGHT = 1e-9


@pytest.mark.parametrize("name", rows(strangers.STRANGERS, sample=list(strangers.STRANGERS)[::6]))
def test_no_wrong_number_and_no_crash_on_nets_of_strangers(name: str) -> None:
    module, args = strangers.build(name, torch.float64)
    with zoo.float64():
        program = lnr.capture(module, args)
        want = zoo.floats(module(*args))
    edits = 0
    for text in PIPELINES.values():
        result = lnr.Pipeline.parse(text).run(program, partial=True)
        with zoo.float64():
            found = zoo.floats(result.program.module()(*args))
        for a, b in zip(want, found, strict=True):
            assert (a - b).abs().max() <= RIGHT * a.abs().max(), text
        edits += result.report.edits
        assert not [r for r in result.report.refusals if r.code == "LN404"], "the picture says what does not hold"
    assert edits or name in NOTHING_TO_EDIT


NOTHING_TO_EDIT = {
    "addmm of the skip", "alpha in add", "lerp", "subtraction", "two streams in one sum",  # no stream is seen
    "each branch one linear",  # the factor between the last sum and the final norm stands in no picture
    "one norm for all heads on the trunk",  # rightly: what it divides by and its one gain go on along the skip
    "padded before batch norm", "padded with ones before batch norm", "flipped before batch norm",  # rightly
}  # fmt: skip
"""Nets of which nothing can be edited exactly, or can be now: the first seven are refused for want of better."""


# ---- an operator that is read wrongly is caught ----


def _says(kind: str, **attrs: Any) -> aten.Rule:
    """Return a rule that takes an operator for another one, of its first argument alone where that moves nothing."""
    return lambda **how: (kind, tuple(how.values())[: 2 if kind in {"mul", "add", "sub"} else 1], attrs)


def _with(name: str, **attrs: Any) -> aten.Rule:
    """Return an operator's rule with some attributes changed."""

    def rule(**how: Any) -> aten.Normalised:
        kind, inputs, found = real(**{k: v for k, v in how.items() if k in taken or "how" in taken})
        return kind, inputs, {**found, **attrs}

    real = aten.RULES[name]
    taken = getattr(real, "reads", signature(real).parameters)
    return rule


MUTANTS: dict[str, tuple[str, str, aten.Rule]] = {
    "tanh changes nothing": ("tanh", "an input of its own", _says("cast")),
    "a product is a sum": ("mul", "out norm written out", _says("add")),
    "a sum is a difference": ("add", "out norm written out", _says("sub")),
    "a difference is a sum": ("sub", "out norm written out", _says("add")),
    "rsqrt changes nothing": ("rsqrt", "out norm written out", _says("cast")),
    "a mean changes nothing": ("mean", "out norm written out", _says("cast")),
    "a mean over another axis": ("mean", "out norm written out", _with("mean", axes=(1,))),
    "layer norm is rms norm": (
        "layer_norm", "tokens repeated",
        lambda input, weight, bias, **how: ("rms_norm", (input, weight, bias), {"axes": 1, "eps": 1e-5}),
    ),
    "another eps": ("layer_norm", "tokens repeated", _with("layer_norm", eps=1.0)),
    "flip moves nothing": ("flip", "channels flipped on the trunk", _with("flip", axes=())),
    "roll moves nothing": ("roll", "channels rolled behind a writer", _with("roll", axes=())),
    "padding adds nothing": ("pad", "channels padded and cut", _with("pad", axes=())),
    "picking changes nothing": ("index_select", "channels permuted before a linear", _with("index_select", axes=(0,))),
    "repeating changes nothing": ("repeat_interleave", "channels repeated", _says("cast")),
    "a slice is the whole": ("slice", "writer bias sliced", _says("cast")),
    "selecting keeps the axis": ("select", "learned skip", _says("cast")),
    "alpha and beta are one": (
        "addmm", "addmm alpha and beta", lambda self, mat1, mat2, **how: ("matmul", (mat1, mat2, self), {}),
    ),
    "rounding changes nothing": ("div", "division rounded", lambda self, other, **how: ("div", (self, other), {})),
    "gathering changes nothing": ("gather", "gathered tokens", _says("cast")),
    "a convolution of one group": ("conv2d", "channels first", _with("conv2d", groups=W)),
    "batch norm with another eps": ("batch_norm", "flipped before batch norm", _with("batch_norm", eps=1.0)),
    "transposed is not": ("transpose", "experts by bmm", _says("cast")),
    "a view moves the channels": ("flatten", "addmm alpha and beta", _says("cast")),
}  # fmt: skip
"""By what is read wrongly: the operator, a net that has it, and the wrong rule."""


@pytest.mark.parametrize("name", rows(MUTANTS, sample=list(MUTANTS)[::8]))
def test_an_operator_that_is_read_wrongly_gives_no_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, net, rule = MUTANTS[name]
    module, args = strangers.build(net, torch.float64)
    called = []

    def told(**how: Any) -> aten.Normalised:
        called.append(operator)
        return rule(**how)

    monkeypatch.setitem(aten.RULES, operator, told)
    try:
        with zoo.float64():
            program = lnr.capture(module, args)
            want = zoo.floats(module(*args))
        for text in (PIPELINES["quantize"], PIPELINES["fp16"], PIPELINES["rescale"]):
            result = lnr.Pipeline.parse(text).run(program, partial=True)
            with zoo.float64():
                found = zoo.floats(result.program.module()(*args))
            assert all((a - b).abs().max() <= RIGHT * a.abs().max() for a, b in zip(want, found, strict=True)), text
    except lnr.LnrewriteError as error:
        assert error.code
    assert called


@pytest.mark.parametrize("net", ["lerp", "alpha in add", "addmm of the skip", "subtraction"])
def test_a_sum_that_is_spelled_wrongly_is_no_program(net: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, args = strangers.build(net)
    for target in SUMS:
        monkeypatch.setitem(SPELLINGS, target, lambda node: (torch.ops.aten.add.Tensor, (node.args[0],) * 2, {}))
    with pytest.raises(lnr.LnrewriteError, match="on its own example inputs its outputs are") as error:
        lnr.capture(module, args)
    assert error.value.code == "LN023"
    program = torch.export.export(module, args)
    with pytest.raises(lnr.LnrewriteError, match="on its own example inputs its outputs are"):
        from_program(program)


class _MasksItself(nn.Module):
    """Attend everywhere where no mask is given, and to what went before while it is exported, as PaliGemma does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if attention_mask is None:
            every = torch.ones(x.shape[-2], x.shape[-2])
            attention_mask = every.tril() if torch.compiler.is_exporting() else every
        return x + attention_mask @ self.mix(self.norm(x))


def test_a_capture_that_is_not_the_module_names_what_the_module_makes_up() -> None:
    x = torch.randn(2, 4, 8)
    with pytest.raises(lnr.LnrewriteError, match="or give it what it makes up: attention_mask$") as error:
        lnr.capture(_MasksItself(), (x,))
    assert error.value.code == "LN023"
    assert lnr.capture(_MasksItself(), (x, torch.ones(4, 4))).network.blocks


# ---- what is left out is told ----


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the editor forget one of the edits of `fold-affine` half way: the second block's readers are not scaled."""
    real = Rewriter.apply

    def apply(self: Any, stream: Stream, edit: Any, label: str) -> None:
        if edit.target == "layers.1.branch.in" or edit.target == "layers.1.branch":
            edit = replace(edit, operations=edit.operations[:1]) if len(edit.operations) > 1 else edit
        real(self, stream, edit, label)

    monkeypatch.setattr(Rewriter, "apply", apply)


@pytest.mark.parametrize("form", ["torch", "onnx"])
def test_an_edit_that_is_wrong_is_found_left_out_and_refused(form: str, forgetful: None) -> None:
    program: Any = zoo.program("pre") if form == "torch" else OnnxProgram(zoo.program("pre").to_onnx())
    pipeline = lnr.Pipeline.parse("fold-affine")
    with pytest.raises(lnr.Refused, match="LN404 .*with it the outputs are .* please report"):
        pipeline.run(program)
    result = pipeline.run(program, partial=True)
    assert [r.code for r in result.report.refusals] == ["LN404"]
    assert result.report.edits == len(program.network.blocks) - 1
    assert lnr.verify(program, result.program)["verdict"] == "within"
    assert lnr.verify(program, pipeline.run(program, verify=False).program)["verdict"] == "different"


@pytest.mark.exhaustive
def test_the_command_says_so_and_writes_nothing(
    forgetful: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ("opt", "test_proof:stranger", "--passes", "fold-affine", "-o", "x.pt2")
    assert fails("LN404", 1, *command)["refusals"][0]["code"] == "LN404"  # type: ignore[index]
    assert "LN404" in ok(*command, "--partial", code=3).stdout
    shown = ok(*command, "--no-verify", "--force")
    assert "warning: nothing shows that x.pt2 computes what test_proof:stranger does" in shown.stderr
    assert ok("verify", "test_proof:stranger", "x.pt2", "-q", code=4).stdout == "different\n"


def stranger() -> torch.nn.Module:
    """Return the model that `forgetful` is about, for the command line."""
    return zoo.build("pre")[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_what_rounding_does_is_no_fault(dtype: torch.dtype) -> None:
    module, inputs = zoo.build("pre rms")
    program = lnr.capture(module.to(dtype), kwargs=inputs)
    result = lnr.Pipeline.preset("exact").run(program)
    assert result.report.edits and not result.report.refusals
    error = result.report.exact_error
    assert error is not None and 0 < error < 100 * torch.finfo(dtype).eps
    assert f"proved     largest error {error:.2g} of the largest output" in str(result.report)


def test_what_was_not_run_against_the_model_shows_no_error() -> None:
    program = lnr.capture(zoo.build("pre")[0], kwargs=zoo.build("pre")[1])
    exact, none = lnr.Pipeline.preset("exact"), lnr.Pipeline.parse("place{to=none fit=constants}")
    for result in (exact.run(program, verify=False), none.run(program), exact.run(exact.run(program).program)):
        assert result.report.exact_error is None and "proved" not in str(result.report)


def test_a_model_that_draws_random_numbers_is_proved_on_the_same_ones() -> None:
    class Noisy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.up(self.norm(x)) + 0.1 * torch.rand_like(x)

    program = lnr.capture(Noisy().eval(), (torch.randn(2, 5, 8),))
    assert lnr.Pipeline.parse("fold-affine").run(program).report.edits


def test_a_model_on_the_meta_device_is_looked_at_and_not_edited() -> None:
    module, inputs = zoo.build("pre")
    program = lnr.capture(module.to("meta"), kwargs={k: v.to("meta") for k, v in inputs.items()})
    assert program.inspect()["placement"] == "pre"
    for text in ("fold-affine", "place{to=none}"):
        with pytest.raises(lnr.LnrewriteError, match="LN026 .*meta device"):
            lnr.Pipeline.parse(text).run(program)


def test_sizes_that_a_model_does_not_take_are_no_crash() -> None:
    class Unrolled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum((x[:, i] for i in range(5)), torch.zeros(()))

    program = lnr.capture(Unrolled(), (torch.randn(2, 5, 8),))
    assert lnr.verify(program, program)["verdict"] == "equal"


# ---- halving ----


@dataclass(frozen=True)
class Change:
    """Represent an edit of a site."""

    target: str
    bound: float = 0.0


@dataclass(frozen=True)
class Sum:
    """Represent a program that is off where it holds wrong edits, alone or some of a set that belongs together."""

    wrong: frozenset[str]
    together: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()

    def evidence(self, seed: int) -> None:
        return None

    def apply(self, edits: Sequence[tuple[Stream, Proposal]], label: str, *, consume: bool = False) -> tuple[Sum, int]:
        held = frozenset(e.target for _, p in edits for e in p.edits)
        if "crash" in held:
            raise ValueError("no such place")
        return replace(self, held=held), len(held)

    def away(self, evidence: Any) -> Gap:
        part = self.held & self.together
        return Gap(float(bool(self.held & self.wrong) or bool(part) and part != self.together))


@pytest.mark.parametrize(
    ("wrong", "together", "refused"),
    [
        ("", "", ""),
        ("c", "", "c"),
        ("a h", "", "a h"),
        ("", "b c", ""),
        ("a", "b c", "a b c"),
        ("crash", "", "crash"),
        ("a b c d e f g h crash", "", "*"),
    ],
)
def test_halving_leaves_out_what_does_not_hold(wrong: str, together: str, refused: str) -> None:
    names = [*"abcdefgh", "crash"]
    program = Sum(frozenset(wrong.split()) - {"crash"}, frozenset(together.split()))
    names = names if "crash" in wrong else names[:-1]
    stream = zoo.program("pre").network.streams[0]
    edits: Any = tuple(Change(n) for n in names)
    kept, left = sound(program, [(stream, Proposal(edits))], "test", None)
    out = set(names) if refused == "*" else set(refused.split())
    assert {r.site for r in left} == out and all(r.code == "LN404" for r in left)
    assert [e.target for _, p in kept for e in p.edits] == [n for n in names if n not in out]
    assert "crash" not in out or any("ValueError: no such place" in r.why for r in left)


# ---- the measure ----


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan], ids=str)
def test_an_infinite_output_hides_no_difference(odd: float) -> None:
    x, y = torch.tensor([odd, 1.0, 2.0]), torch.tensor([odd, 1.0, 2.5])
    assert apart([[x]], [[x]]) == 0 and apart([[x]], [[y]]) == 0.25
    assert apart([[x]], [[-y]]) == (math.inf if odd == odd else 1.5 + 0.75)
    assert apart([[x]], [[y.nan_to_num(0.0, 0.0, 0.0)]]) == math.inf


@pytest.mark.parametrize("seed", range(3))
def test_weights_that_are_widened_in_turn_do_not_run_into_each_other(seed: int) -> None:
    """Views of one weight live on while the next one of its size is widened."""

    class Views(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.w = torch.nn.ParameterList([torch.randn(300, 300) for _ in range(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            turned = [w.t() for w in self.w]
            halves = [w[:150] for w in self.w]
            x = x + sum(torch.tanh(x @ t) for t in turned)
            return x + sum(x[..., :150] @ h for h in halves)

    module, x = Views().eval(), torch.randn(2, 5, 300)
    found = lnr.capture(module, (x,)).evidence(0)
    assert found is not None and found.wide
    for batch, (output,) in zip(found.batches, found.outputs, strict=True):
        with zoo.float64():
            want = copy.deepcopy(module).double()(*(v.double() for v in batch.values()))
        torch.testing.assert_close(output, want, rtol=1e-12, atol=1e-9)
