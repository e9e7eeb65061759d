"""Captured modules as ONNX: every norm one operator, torch's numbers, names and dynamic axes kept, errors in a line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx_ir.passes.common import CheckerPass
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import lnrewrite as lnr
from lnrewrite.backends.onnx.norms import ONES, OPERATORS, SITE
from lnrewrite.backends.torch.capture import from_program
from lnrewrite.errors import LnrewriteError
from lnrewrite.models.program import Program
from tiers import rows
from zoo import build
from zoo.norms import SPELLINGS, randomise

WIDTH = 24
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-2}


def norms(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type in OPERATORS.values()]


def run(model: ir.Model, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    outputs = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    return dict(zip([o.name for o in session.get_outputs()], map(torch.from_numpy, outputs), strict=True))


def error(got: Tensor, want: Tensor) -> float:
    """Return the largest difference, relative to the largest value wanted."""
    assert got.shape == want.shape and torch.isfinite(got).all()
    return float((got.float() - want).abs().max() / want.abs().max())


def built(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model of the zoo, of which `t5` is the encoder alone, and its inputs."""
    module, inputs = build(name, depth=1)
    return (module.encoder if name == "t5" else module), inputs


MODELS = (
    ("gpt2", torch.float32, 18),
    ("gemma2", torch.float16, 23),
    ("bert", torch.float16, 20),
    ("llama", torch.float16, 18),
    ("t5", torch.float32, 23),
)


@pytest.mark.parametrize(("name", "dtype", "opset"), rows(MODELS, sample=MODELS[1:2]))
def test_models_run_as_in_torch_at_two_sizes(name: str, dtype: torch.dtype, opset: int) -> None:
    module, example = built(name)
    inputs = {"input_ids": example["input_ids"]}
    wanted = {}
    more = {"input_ids": torch.cat([inputs["input_ids"]] * 2, 1).repeat(3, 1)[:5, :11]}
    for key, batch in (("first", inputs), ("second", more)):
        with torch.no_grad():
            wanted[key] = next(iter(module(**batch).values()))
    program = lnr.capture(module.to(dtype), kwargs=inputs)
    model = program.to_onnx(opset)
    assert model.opset_imports[""] == opset
    assert len(norms(model)) == program.inspect()["norms"]["total"]
    assert [str(d) for d in model.graph.inputs[0].shape or ()] == ["batch", "sequence"]
    assert {n.metadata_props[SITE] for n in norms(model)} >= {n for s in program.network.streams for n, _ in s.sites()}
    for key, batch in (("first", inputs), ("second", more)):
        assert error(next(iter(run(model, batch).values())), wanted[key]) <= TOLERANCE[dtype]


class Spelled(nn.Module):
    """Send a stream through a norm of every spelling."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(s.make(WIDTH) for s in SPELLINGS.values())
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in SPELLINGS)

    def forward(self, x: Tensor) -> Tensor:
        for norm, out in zip(self.norms, self.maps, strict=True):
            x = x + out(norm(x))
        return x


@pytest.mark.parametrize("dtype", rows(TOLERANCE, sample=[torch.float16]), ids=str)
def test_every_spelling_that_is_recognised_is_one_operator_of_one_dtype(dtype: torch.dtype) -> None:
    module = randomise(Spelled()).eval()
    x = torch.randn(3, 5, WIDTH)
    with torch.no_grad():
        wanted = module(x)
    program = lnr.capture(module.to(dtype), (x.to(dtype),))
    kinds = program.inspect()["norms"]["kinds"]
    model = program.to_onnx()
    made = norms(model)
    assert Counter(n.op_type for n in made) == {OPERATORS[k]: kinds[k] for k in OPERATORS}
    for node in made:
        assert {v.dtype for v in (*node.inputs, *node.outputs)} == {ir.DataType.from_numpy(np.dtype(str(dtype)[6:]))}
        assert all(v.const_value is not None and v.const_value.shape == (WIDTH,) for v in node.inputs[1:])
    gains = {n.inputs[1].name for n in made}
    for i, s in enumerate(SPELLINGS.values()):
        plain = s.gamma and not s.plus_one and not s.computed
        assert f"norms.{i}.weight" not in gains or plain
        assert f"norms.{i}.weight_plus_one" not in gains or s.plus_one
    assert sum(name.startswith(ONES) for name in gains) == 1  # shared by all norms without a gain
    assert error(run(model, {"x": x.to(dtype)})["output_0"], wanted) <= TOLERANCE[dtype]


class Odd(nn.Module):
    """Hold norms with a bias alone, an RMS norm's bias, one gain for all; of a norm; in mixed dtypes, both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.bias, self.scalar = (nn.Parameter(torch.randn(s)) for s in ((1, 1, WIDTH), WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.layer_norm(x, (WIDTH,), None, self.bias)
        x = x + F.rms_norm(x, (WIDTH,), self.scalar.sigmoid().expand(WIDTH), 1e-5)
        x = x + F.layer_norm(F.rms_norm(x, (WIDTH,), None, 1e-5) * self.gain + self.bias, (WIDTH,))
        half = F.layer_norm(x, (WIDTH,)).half()
        half = half + F.layer_norm(half.float(), (WIDTH,), self.gain.flatten(), self.bias).half()
        return x + half.float()


def test_odd_gains_and_mixed_dtypes() -> None:
    torch.manual_seed(0)
    module, x = Odd().eval(), torch.randn(3, 5, WIDTH)
    program = lnr.capture(module, (x,))
    model = program.to_onnx()
    assert len(norms(model)) == program.inspect()["norms"]["total"] == 6
    assert not any(n.op_type.startswith("Reduce") for n in model.graph)
    assert Counter(str(n.inputs[0].dtype) for n in norms(model)) == {"FLOAT": 5, "FLOAT16": 1}
    for node in norms(model):
        assert {v.dtype for v in (*node.inputs, *node.outputs)} == {node.inputs[0].dtype}
    with torch.no_grad():
        assert error(run(model, {"x": x})["output_0"], module(x)) < 2e-3  # one norm in half precision


def test_a_gain_that_follows_the_input_is_left_to_torch() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, gain: Tensor) -> Tensor:
            return F.layer_norm(x, (WIDTH,), gain)

    x, gain = torch.randn(3, 5, WIDTH), torch.randn(WIDTH)
    model = lnr.capture(Scaled().eval(), (x, gain)).to_onnx()
    assert error(run(model, {"x": x, "gain": gain})["output_0"], F.layer_norm(x, (WIDTH,), gain)) < 2e-5


def test_a_decomposed_program_is_read_through_its_tuples() -> None:
    """aten.native_layer_norm gives three values; the norm is the first."""
    module, x = randomise(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))).eval(), torch.randn(3, 5, WIDTH)
    exported = torch.export.export(module, (x,)).run_decompositions()
    assert "native_layer_norm" in str(exported.graph)
    model = Program(from_program(exported)).to_onnx()
    assert [n.op_type for n in norms(model)] == ["LayerNormalization"]
    with torch.no_grad():
        assert error(run(model, {"input": x})["output_0"], module(x)) < 2e-5


def test_parameters_keep_names_axes_and_ties() -> None:
    module, inputs = build("opt", depth=1)
    program = lnr.capture(module, kwargs=inputs)
    before = str(program.module().graph)
    model = program.to_onnx()
    held = {n: v.const_value for n, v in model.graph.initializers.items()}
    parameters = dict(module.named_parameters())  # the tied head once, under its first name
    assert parameters.keys() <= held.keys()
    assert "lm_head.weight" not in held
    for name, parameter in parameters.items():
        np.testing.assert_array_equal(held[name].numpy(), parameter.detach().numpy())
    assert str(program.module().graph) == before


def test_equal_parameters_stay_apart() -> None:
    """Zero biases are equal today; an edit of one must not reach the others."""
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    for p in (module[0].bias, module[2].bias):
        nn.init.zeros_(p)
    model = lnr.capture(module.eval(), (torch.randn(2, 3, 4),)).to_onnx()
    assert model.graph.initializers.keys() >= dict(module.named_parameters()).keys()


@pytest.mark.parametrize(("name", "opset"), rows(product(("gpt2", "bert", "t5"), (18, 23)), sample=[("bert", 23)]))
def test_padding_on_the_left_gives_torchs_numbers(name: str, opset: int) -> None:
    """Rows of a mask that hide everything are zero in torch; a mean of all values, or NaN, would be as easy."""
    module, inputs = built(name)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs = {k: inputs[k] for k in ("input_ids", "attention_mask")}
    model = lnr.capture(module, kwargs=inputs).to_onnx(opset)
    assert any(node.op_type == "Attention" for node in model.graph) == (opset == 23)
    inputs["attention_mask"][0, :3] = 0
    with torch.no_grad():
        assert error(next(iter(run(model, inputs).values())), next(iter(module(**inputs).values()))) < 2e-5


MASKS = {"matrix": (4, 6), "rows": (2, 1, 4, 6), "spread": (2, 1, 1, 6), "heads": (2, 4, 4, 6)}


class Attentions(nn.Module):
    """Attend in every way: two ranks, no mask and masks of every shape, causal, grouped; heads merged, or not."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, masks: dict[str, Tensor]) -> dict[str, Tensor]:
        attend, some = F.scaled_dot_product_attention, (k[:, :2], v[:, :2])
        found = {name: attend(q, k, v, mask).transpose(1, 2).flatten(2) for name, mask in masks.items()}
        found |= {f"{name}, heads apart": attend(q, k, v, mask, scale=0.3) for name, mask in masks.items()}
        found |= {"none": attend(q, k, v), "causal": attend(q, k, v, is_causal=True)}
        found |= {"rank 3": attend(q[:, 0], k[:, 0], v[:, 0], masks["matrix"])}
        found |= {f"grouped, {c}": attend(q, *some, is_causal=c, enable_gqa=True) for c in (False, True)}
        return found | {"groups of one": attend(q, k, v, enable_gqa=True)}


@pytest.mark.parametrize("opset", [18, 23])
@pytest.mark.parametrize("numbers", [False, True], ids=["bool", "float"])
def test_attention_is_torchs_in_every_row(numbers: bool, opset: int) -> None:
    """In each mask one row sees nothing."""
    torch.manual_seed(0)
    inputs = {n: torch.randn(2, 4, 4 if n == "q" else 6, 8) for n in "qkv"}
    masks = {name: torch.rand(shape) > 0.4 for name, shape in MASKS.items()}
    for mask in masks.values():
        mask.view(-1, 6)[0] = False
    if numbers:
        masks = {name: torch.where(m, torch.randn(m.shape), -torch.inf) for name, m in masks.items()}
    wanted = Attentions()(**inputs, masks=masks)
    program = lnr.capture(Attentions().eval(), (), {**inputs, "masks": masks}, dynamic_shapes={})
    model = program.to_onnx(opset)
    assert any(n.op_type == "Attention" for n in model.graph) == (opset == 23)
    got = run(model, {**inputs, **{f"masks_{name}": mask for name, mask in masks.items()}})
    assert got.keys() == wanted.keys()
    assert not {name: e for name in wanted if (e := error(got[name], wanted[name])) > 2e-5}


class Gives(nn.Module):
    """Give outputs in a tree: one twice, an input as it came, one that is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, mul: Tensor, pair: tuple[Tensor, Tensor], *, scale: float = 2.0) -> dict[str, Any]:
        y = self.linear(mul) * scale + pair[0] + pair[1]
        return {"logits": y, "states": (mul, y), "loss": None}


def test_inputs_and_outputs_keep_their_names() -> None:
    module, t = Gives().eval(), [torch.randn(2, 3, 4) for _ in range(3)]
    model = lnr.capture(module, (t[0], (t[1], t[2]))).to_onnx()
    CheckerPass(full_check=True)(model)
    assert [v.name for v in model.graph.inputs] == ["mul", "pair_0", "pair_1"]
    got = run(model, {"mul": t[0], "pair_0": t[1], "pair_1": t[2]})
    assert list(got) == ["logits", "states_0", "states_1"]
    with torch.no_grad():
        wanted = pytree.tree_leaves(module(t[0], (t[1], t[2])))
    for value, want in zip(got.values(), wanted, strict=False):
        torch.testing.assert_close(value, want)


def test_every_value_has_a_type_and_a_shape_and_no_trace_of_files() -> None:
    module, inputs = build("llama", depth=1)
    model = lnr.capture(module, kwargs=inputs).to_onnx()
    for node in model.graph:
        assert node.metadata_props.keys() <= {SITE}
        assert all(v.dtype is not None and v.shape is not None for v in node.outputs)
    assert "site-packages" not in str(ir.to_proto(model))


@pytest.mark.parametrize("opset", [11, 17, 99])
def test_other_opsets_are_refused(opset: int) -> None:
    program = lnr.capture(nn.LayerNorm(4).eval(), (torch.randn(2, 3, 4),))
    with pytest.raises(LnrewriteError) as refused:
        program.to_onnx(opset)
    assert refused.value.code == "LN503"


@torch.library.custom_op("lnrewrite_test::unknown", mutates_args=())
def unknown(x: Tensor) -> Tensor:
    return x.clone()


unknown.register_fake(torch.empty_like)


def test_an_operator_without_translation_is_named_in_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    class Custom(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return unknown(x)

    program = lnr.capture(Custom().eval(), (torch.randn(2, 3, 4),))
    with pytest.raises(LnrewriteError) as refused:
        program.to_onnx()
    assert refused.value.code == "LN501"
    assert "lnrewrite_test.unknown" in refused.value.why and "\n" not in refused.value.why
    assert capfd.readouterr() == ("", "")


class Turned(nn.Module):
    """Turn pairs of channels by complex numbers, as Meta's Llama does, arranged in one of many ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(16.0), torch.tensor([1.0, 0.1, 0.01, 0.001]))
        self.how, self.freqs = how, torch.polar(torch.ones_like(angles), angles)
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.up(self.norm(x)).unflatten(-1, (2, 4)).repeat(1, 1, 1, 2)  # [batch, tokens, heads, size]
        pairs = torch.view_as_complex(q.unflatten(-1, (-1, 2)))
        return x + torch.view_as_real(pairs * TURNS[self.how](self.freqs, x.shape[1])).flatten(3)[..., :4].flatten(2)


TURNS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "view": lambda f, n: f[:n].view(1, n, 1, 4),
    "unsqueeze": lambda f, n: f[:n].unsqueeze(0).unsqueeze(-2),
    "index": lambda f, n: f[None, :n, None],
    "picked": lambda f, n: f[torch.arange(n)][:, None],
    "expanded": lambda f, n: f[:n, None].expand(-1, 2, -1),
    "repeated": lambda f, n: f[:n, None].repeat(1, 2, 1),
    "one of a stack": lambda f, n: torch.stack([f, f.conj()])[0, :n, None],
}


@pytest.mark.parametrize("how", TURNS)
def test_complex_numbers_are_arranged_as_pairs(how: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    program = lnr.capture(Turned(how), (torch.randn(2, 6, 8),))
    assert program.export(tmp_path / "turned.onnx", target="cpu").norms
