"""What a model is called with is described once: whoever checks a batch says the same, sizes follow their names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

import lnrewrite as lnr
from lnrewrite.backends.inputs import check, check_numbers, draw, resized, spec_of
from lnrewrite.errors import LnrewriteError
from lnrewrite.ir.inputs import Content, Input, InputSpec, content_of


def sized(**dims: tuple[int | str, ...]) -> InputSpec:
    """Return inputs of floats with these dimensions."""
    return InputSpec(tuple(Input(n, "float32", d, (0,) * len(d), Content.VALUES) for n, d in dims.items()))


def test_names_and_types_say_what_numbers_are() -> None:
    found = [
        content_of(name, "int64") for name in ("ids", "attention_mask", "token_type_ids", "segment", "position_ids")
    ]
    assert found == [Content.IDS, Content.MASK, Content.TYPE, Content.TYPE, Content.POSITION]
    assert content_of("x", "bool") is Content.MASK and content_of("positions", "bfloat16") is Content.VALUES


def test_a_second_size_has_a_row_more_and_a_token_less() -> None:
    spec = sized(x=("b", "t", 4), mask=("b", "t"), y=("b", "u")).at({"b": 2, "t": 7, "u": 2})
    assert [each.shape for each in spec.fewer()] == [(3, 6, 4), (3, 6), (3, 3)]  # of two, none can be taken


def test_what_is_the_sum_of_two_sizes_stays_it() -> None:
    spec = sized(x=("b", "new"), past=("b", "old"), mask=("b", "all")).at({"b": 2, "new": 5, "old": 11, "all": 16})
    found = [other.sizes for other in spec.more()]
    assert found[0] == {"b": 3, "new": 6, "old": 12, "all": 18} and len(found) == 7
    assert all(sizes["all"] == sizes["new"] + sizes["old"] for sizes in found)


def test_slices_are_repeated_or_cut_off() -> None:
    tensor = torch.arange(6).reshape(2, 3)
    assert resized(tensor, (3, 2)).tolist() == [[0, 1], [3, 4], [0, 1]]
    assert resized(tensor, (2, 3)) is tensor


def test_what_is_drawn_is_what_is_taken() -> None:
    example = {
        "x": torch.zeros(2, 3),
        "ids": torch.zeros(2, 3, dtype=torch.int32),
        "position_ids": torch.ones(2, 3).long(),
    }
    spec = spec_of(example, rows={"ids": 5})
    drawn = draw(spec, 0)
    assert all(torch.equal(v, check(spec, drawn, "these")[k]) for k, v in drawn.items())
    check_numbers(spec, drawn, "these")
    assert drawn["position_ids"].tolist() == [[0, 1, 2]] * 2 and int(drawn["ids"].max()) < 5
    with pytest.raises(LnrewriteError, match="LN022.*these.*ids holds 5 and the model's table has 5 rows"):
        check_numbers(spec, drawn | {"ids": drawn["ids"] + 5 - drawn["ids"].min()}, "these")


class Reader(nn.Module):
    """Read a vector and a mask for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = x + self.up(self.norm(x)) * mask[..., None]
        return found


@pytest.fixture(scope="module")
def program() -> Any:
    return lnr.capture(Reader(), kwargs={"x": torch.randn(2, 6, 4), "mask": torch.ones(2, 6, dtype=torch.int64)})


RIGHT = {"x": np.ones((2, 6, 4), np.float32), "mask": np.ones((2, 6), np.int64)}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"x": RIGHT["x"], "y": RIGHT["x"]}, "mask missing; y unknown"),
        (RIGHT | {"ids": RIGHT["mask"]}, "ids unknown"),
        (RIGHT | {"x": np.ones((2, 6, 5), np.float32)}, "expected x float32.* and found x float32.*axis 2 is fixed"),
        (RIGHT | {"x": np.ones((2, 6), np.float32)}, "expected x float32.*: the model takes 3 axes"),
    ],
)
def test_every_way_in_says_the_same(program: Any, tmp_path: Path, wrong: dict[str, Any], words: str) -> None:
    np.savez(tmp_path / "d.npz", **wrong)
    program.save(tmp_path / "m.onnx")
    file = lnr.load(str(tmp_path / "m.onnx"))
    ways: list[Callable[[], object]] = [
        lambda: lnr.Pipeline.parse("place{to=peri}").run(program, [wrong]),
        lambda: lnr.Pipeline.parse("place{to=peri}").run(file, [wrong]),
        lambda: lnr.convert(Reader(), to="peri", kwargs=program.example_inputs(), calibrate=[wrong]),
        lambda: lnr.heal(program, program, str(tmp_path / "d.npz"), steps=1, batch_size=1),
        lambda: file.module()(**wrong),
    ]
    for way in ways:
        with pytest.raises(LnrewriteError, match=f"(?s)LN022.*{words}"):
            way()


def test_an_onnx_file_says_what_it_is_called_with(tmp_path: Path) -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 18]>
    g (int64[n,t] ids, float[n,t,4] x, bool[n] keep) => (float[n,t,4] y)
    <float[9,4] table> { e = Gather (table, ids) y = Add (e, x) }
    """
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((9, 4), np.float32), "table"))
    onnx.save(model, tmp_path / "m.onnx")
    spec = lnr.load(str(tmp_path / "m.onnx")).spec
    assert str(spec) == "ids int64[2, 5], x float32[2, 5, 4], keep bool[2]"
    assert spec.rows == {"ids": 9} and [each.content for each in spec] == [Content.IDS, Content.VALUES, Content.MASK]
    assert spec.axes == {"ids": {0: "n", 1: "t"}, "x": {0: "n", 1: "t"}, "keep": {0: "n"}}
