"""DATA becomes batches that fit the model's example, or one error that says what was expected and what was found."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import lnrewrite as lnr
from lnrewrite.backends.inputs import Tensors, spec_of
from lnrewrite.data.batches import Data, synthetic
from lnrewrite.errors import LnrewriteError
from reading import load_data

EXAMPLE = {"x": torch.zeros(2, 16, 4), "ids": torch.zeros(2, 16, dtype=torch.int64), "flag": True}
IDS = {"input_ids": torch.zeros(2, 16, dtype=torch.int64)}
FREE = {"x": {0: "batch"}, "ids": {0: "batch"}}


def arrays(count: int, length: int = 16) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(count, length, 4)), "ids": rng.integers(0, 9, (count, length), dtype=np.int32)}


def fails(data: Path | str, example: Any = EXAMPLE, **options: Any) -> LnrewriteError:
    with pytest.raises(LnrewriteError) as caught:
        load_data(str(data), example, **options)
    assert caught.value.code == "LN022", caught.value
    return caught.value


def joined(batches: list[Tensors], name: str) -> Tensor:
    return torch.cat([batch[name] for batch in batches])


def test_npz(tmp_path: Path) -> None:
    held = arrays(19)
    np.savez(tmp_path / "d.npz", **held)
    batches = load_data(str(tmp_path / "d.npz"), EXAMPLE)
    assert [len(b["x"]) for b in batches] == [8, 8, 3]
    assert all(set(b) == {"x", "ids"} for b in batches)
    assert batches[0]["x"].dtype is torch.float32 and batches[0]["ids"].dtype is torch.int64
    assert torch.equal(joined(batches, "x"), torch.from_numpy(held["x"]).float())
    assert joined(batches, "ids").tolist() == held["ids"].tolist()


@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_named_tensors(tmp_path: Path, form: str) -> None:
    held = {name: torch.from_numpy(value) for name, value in arrays(4).items()}
    path = tmp_path / f"d.{form}"
    torch.save(held, path) if form == "pt" else save_file(held, path)
    assert torch.equal(joined(load_data(str(path), EXAMPLE), "ids"), held["ids"].long())


def test_one_array_goes_to_the_only_input(tmp_path: Path) -> None:
    np.save(tmp_path / "d.npy", np.arange(48).reshape(3, 16))
    (batch,) = load_data(str(tmp_path / "d.npy"), IDS)
    assert batch["input_ids"].tolist() == np.arange(48).reshape(3, 16).tolist()
    error = fails(tmp_path / "d.npy")
    assert "1 unnamed array" in error.why and "x float32[2, 16, 4]" in error.why


def test_an_array_of_tokens_says_what_follows_from_them(tmp_path: Path) -> None:
    """Positions and segments are looked up in tables too, and are no tokens."""
    names = {"input_ids": 64, "position_ids": 32, "token_type_ids": 2, "attention_mask": 0}
    example = {name: torch.zeros(2, 16, dtype=torch.int64) for name in names}
    np.save(tmp_path / "d.npy", np.arange(48).reshape(3, 16))
    data = Data(str(tmp_path / "d.npy"), spec_of(example, {n: {0: "batch"} for n in names}, names))
    (batch,) = data.batches()
    want = torch.arange(48).reshape(3, 16)
    assert batch["input_ids"].tolist() == want.tolist()
    assert batch["position_ids"].tolist() == [list(range(16))] * 3
    assert not batch["token_type_ids"].any() and batch["attention_mask"].all()


def test_what_alone_is_looked_up_is_tokens_whatever_it_is_called() -> None:
    example = {name: torch.zeros(2, 16, dtype=torch.int64) for name in ("segment", "attention_mask")}
    assert spec_of(example, {}, {"segment": 99}).vocabularies == {"segment": 99}
    assert spec_of(example | IDS, {}, {"segment": 2, "input_ids": 99}).vocabularies == {"input_ids": 99}


def test_a_run_of_tokens_is_cut_into_windows(tmp_path: Path) -> None:
    np.save(tmp_path / "d.npy", np.arange(70, dtype=np.uint16))
    spec = spec_of(IDS, {"input_ids": {0: "batch"}}, {"input_ids": 99})
    (batch,) = Data(str(tmp_path / "d.npy"), spec).batches()
    assert batch["input_ids"].tolist() == np.arange(64).reshape(4, 16).tolist()
    np.save(tmp_path / "d.npy", np.arange(15))
    with pytest.raises(LnrewriteError, match="shorter than one window of 16"):
        Data(str(tmp_path / "d.npy"), spec).batches()


def test_free_and_fixed_axes(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", **arrays(11, length=5))
    assert load_data(str(tmp_path / "d.npz"), EXAMPLE)[0]["x"].shape == (8, 5, 4)
    assert "axis 1 is fixed" in fails(tmp_path / "d.npz", dynamic=FREE).why
    np.savez(tmp_path / "e.npz", **arrays(11))
    assert [len(b["x"]) for b in load_data(str(tmp_path / "e.npz"), EXAMPLE, dynamic=FREE)] == [8, 3]
    assert [len(b["x"]) for b in load_data(str(tmp_path / "e.npz"), EXAMPLE, dynamic={})] == [2] * 5
    np.savez(tmp_path / "f.npz", **arrays(1))
    assert "batches of 2" in fails(tmp_path / "f.npz", dynamic={}).why


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"x": None}, "x missing"),
        ({"mask": np.ones(3)}, "mask unknown"),
        ({"x": np.ones((3, 16, 4), int)}, "found x int64[3, 16, 4]"),
        ({"ids": np.ones((3, 16))}, "expected ids int64[2, 16]"),
        ({"x": np.ones((16, 4))}, "the first counts samples"),
        ({"x": np.ones((3, 16, 5))}, "axis 2 is fixed"),
        ({"x": np.ones((2, 16, 4))}, "x 2, ids 3"),
        ({"x": np.full((3, 16, 4), np.nan)}, "NaN"),
        ({"x": np.ones((0, 16, 4))}, "empty"),
        ({"x": np.array(["text"] * 3, dtype=object)}, "plain tensors"),
    ],
)
def test_what_does_not_fit_is_told(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    held = {name: value for name, value in (arrays(3) | change).items() if value is not None}
    np.savez(tmp_path / "d.npz", **held)
    assert word in fails(tmp_path / "d.npz").why


class Trap:
    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self.sign,)


def test_data_is_never_unpickled(tmp_path: Path) -> None:
    sign = tmp_path / "sign"
    torch.save({"input_ids": Trap(sign)}, tmp_path / "d.pt")
    np.save(tmp_path / "d.npy", np.array([Trap(sign)], dtype=object))
    fails(tmp_path / "d.pt", IDS)
    fails(tmp_path / "d.npy", IDS)
    assert not sign.exists()


def test_files_that_are_no_data(tmp_path: Path) -> None:
    assert "no such file" in fails(tmp_path / "gone.npz").why
    (tmp_path / "d.csv").write_text("1,2")
    assert ".csv" in fails(tmp_path / "d.csv").why
    (tmp_path / "d.npz").write_text("1,2")
    fails(tmp_path / "d.npz")
    fails(tmp_path / "d.npz", {"flag": True})


# --- importable iterables

BATCHES = [{"input_ids": torch.full((2, 3), i)} for i in range(3)]
TUPLES = [(torch.ones(1, 16, 4), np.ones((1, 16), int))]
EMPTY: list[Tensors] = []
WRONG = [{"input_ids": torch.ones(2, 3)}]


def endless() -> Iterator[Tensors]:
    while True:
        yield {"input_ids": torch.zeros(1, 2, dtype=torch.int64)}


def breaking() -> Iterator[Tensors]:
    yield BATCHES[0]
    raise OSError("disk gone")


def test_iterables() -> None:
    found = load_data(f"{__name__}:BATCHES", IDS)
    assert [b["input_ids"].tolist() for b in found] == [b["input_ids"].tolist() for b in BATCHES]
    assert list(load_data(f"{__name__}:TUPLES", EXAMPLE)[0]) == ["x", "ids"]
    assert len(load_data(f"{__name__}:endless", IDS, limit=5)) == 5


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("EMPTY", "no batches"),
        ("WRONG", "expected input_ids int64"),
        ("breaking", "batch 1 raised OSError: disk gone"),
        ("nothing", "no 'nothing'"),
        ("IDS", "not an array of numbers"),  # a dict is iterable too: over its keys
    ],
)
def test_iterables_that_do_not_fit(name: str, word: str) -> None:
    assert word in fails(f"{__name__}:{name}", IDS).why
    fails("no_such_module:x", IDS)


# --- text


def test_bytes(tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_bytes(bytes(range(256)) * 2)
    path = str(tmp_path / "d.txt")
    batches = load_data(path, IDS, byte_level=True, length=100, seed=1)
    rows = joined(batches, "input_ids")
    assert rows.shape == (5, 100) and rows.dtype is torch.int64
    assert sorted(row[0] for row in rows.tolist()) == sorted([0, 100, 200, 300 % 256, 400 % 256])
    assert all(b == (a + 1) % 256 for row in rows.tolist() for a, b in zip(row, row[1:], strict=False))
    assert torch.equal(rows, joined(load_data(path, IDS, byte_level=True, length=100, seed=1), "input_ids"))
    assert load_data(path, IDS, byte_level=True)[0]["input_ids"].shape == (8, 16)
    free = {"input_ids": {0: "batch", 1: "sequence"}}
    assert load_data(path, IDS, byte_level=True, dynamic=free)[0]["input_ids"].shape == (4, 128)
    assert "no tokenizer" in fails(path, IDS).why
    assert "shorter" in fails(path, IDS, byte_level=True, length=1000).why


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(50))])}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", cls_token="[CLS]").save_pretrained(
        tmp_path / "tok"
    )
    return str(tmp_path / "tok")


def test_tokens(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "d.txt").write_text(" ".join(f"w{i}" for i in range(50)))
    example = {
        name: torch.zeros(2, 12, dtype=torch.int64) for name in ("input_ids", "attention_mask", "token_type_ids")
    }
    batches = load_data(str(tmp_path / "d.txt"), example, tokenizer)
    ids = joined(batches, "input_ids")
    assert ids.shape == (5, 12)
    assert (ids[:, 0] == 1).all() and (ids[:, -1] == 2).all()
    assert sorted(ids[:, 1:-1].flatten().tolist()) == list(range(3, 53))
    assert joined(batches, "attention_mask").min() == 1 and joined(batches, "token_type_ids").max() == 0
    assert (
        "pixel_values" in fails(tmp_path / "d.txt", IDS | {"pixel_values": torch.ones(2, 3)}, tokenizer=tokenizer).why
    )
    (tmp_path / "d.txt").write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in fails(tmp_path / "d.txt", IDS, tokenizer=tokenizer).why


def test_text_for_a_folder_without_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_text("w1 w2 " * 100)
    assert "tokenizer failed" in fails(tmp_path / "d.txt", IDS, tokenizer=str(tmp_path)).why


# --- random stand-ins


def test_synthetic() -> None:
    example = {
        "input_ids": torch.tensor([[3, 7]] * 64),
        "attention_mask": torch.tensor([[1, 0]] * 64),
        "x": torch.zeros(64, 64, dtype=torch.bfloat16),
        "flag": False,
    }
    one, two = synthetic(example, batches=2, seed=5)
    assert set(one) == {"input_ids", "attention_mask", "x"}
    assert one["input_ids"].min() == 0 and one["input_ids"].max() == 7
    assert torch.equal(one["attention_mask"], example["attention_mask"])
    assert one["x"].dtype is torch.bfloat16 and 0.9 < one["x"].float().std() < 1.1
    assert not torch.equal(one["x"], two["x"])
    assert torch.equal(two["x"], synthetic(example, batches=2, seed=5)[1]["x"])
    (wide,) = synthetic(example, {"input_ids": 1000}, batches=1)
    assert wide["input_ids"].max() > 500


def test_reading_arrays_imports_no_transformers(tmp_path: Path) -> None:
    import subprocess

    np.save(tmp_path / "d.npy", np.zeros((2, 16), int))
    code = (
        "import sys, torch; from reading import load_data\n"
        "load_data(sys.argv[1], {'i': torch.zeros(2, 16, dtype=torch.int64)}); print('transformers' in sys.modules)"
    )
    command, here = [sys.executable, "-c", code, str(tmp_path / "d.npy")], Path(__file__).parent
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=here)
    assert out.stdout.strip() == "False"


class Boxes(nn.Module):
    """Look up sides of boxes: integers that mean something, as LayoutLM takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.side, self.norm, self.up, self.down = nn.Embedding(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, boxes: Tensor) -> Tensor:
        x = self.side(boxes[..., 1] - boxes[..., 0])
        found: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return found


def test_integers_that_mean_something_are_the_examples_own() -> None:
    boxes = torch.tensor([[[0, 7], [3, 5]], [[1, 2], [2, 6]]])
    program = lnr.capture(Boxes(), (boxes,))
    assert all(torch.equal(batch["boxes"], boxes) for batch in program.synthetic(0))
    assert lnr.Pipeline.parse("place{to=peri}").run(program).report.edits == 1
