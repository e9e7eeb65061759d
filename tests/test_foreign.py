"""Files that others wrote: odd JSON, lying headers, configs that ask for too much, code that nobody trusts."""

from __future__ import annotations

import json
import random
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import lnrewrite as lnr
import zoo
from lnrewrite.loading.foreign import DEPTH, Foreign, read_object, safetensors_header
from lnrewrite.loading.identify import identify
from lnrewrite.loading.open import open_module
from lnrewrite.loading.source import OpenOptions
from lnrewrite.loading.transformers import Tokenizer
from mutants import json_mutant
from reading import load_data
from tiers import rows

DEEP = b'{"a":' * 20_000 + b"1" + b"}" * 20_000


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("foreign") / "llama"
    zoo.build("llama", head=True)[0].save_pretrained(folder)
    return folder


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    """Give a copy of a small checkpoint to spoil."""
    return shutil.copytree(llama, tmp_path / "m")


def spoil(folder: Path, **changes: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def refused(model: Path, **how: Any) -> lnr.LnrewriteError:
    with pytest.raises(lnr.LnrewriteError) as error:
        open_module(identify(str(model), OpenOptions(**how)))
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000
    return error.value


@pytest.mark.parametrize(
    "text", [DEEP, b"[" * 20_000, b'{"a": 1, "a": 2}', b"[]", b"1", b"{", b"\xff", b'{"a": ' + b"9" * 5000 + b"}",
             b'{"a":[' + b"[]," * 5_000_000 + b"1]}"],
)  # fmt: skip
def test_json_that_is_no_small_object_is_told(text: bytes) -> None:
    with pytest.raises(Foreign):
        read_object(text)


def test_json_as_deep_as_is_read() -> None:
    assert read_object(b'{"a":' * DEPTH + b"1" + b"}" * DEPTH)
    with pytest.raises(Foreign):
        read_object(b'{"a":' * (DEPTH + 1) + b"1" + b"}" * (DEPTH + 1))


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_files_that_nest_too_deep_are_told(folder: Path, file: str) -> None:
    (folder / file).write_bytes(DEEP)
    assert refused(folder).code == "LN015"


@pytest.mark.parametrize(
    ("key", "value"),
    [("auto_map", ["x"]), ("auto_map", "x"), ("auto_map", {"AutoModel": 1}), ("auto_map", {"AutoModel": [1]}),
     ("architectures", [None]), ("architectures", "x"), ("architectures", {}), ("model_type", 1)],
)  # fmt: skip
def test_values_of_another_type_are_told(folder: Path, key: str, value: Any) -> None:
    error = refused(spoil(folder, **{key: value}), trust_remote_code=True)
    assert error.code == "LN015" and key in error.why


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_hidden_layers", 10**6), ("num_hidden_layers", 10**12), ("num_hidden_layers", 40_000), ("vocab_size", 10**12),
     ("intermediate_size", 10**9), ("num_labels", 10**10), ("num_hidden_layers", 1e300)],
)  # fmt: skip
def test_a_config_that_asks_for_more_than_the_weights_hold_is_told(folder: Path, key: str, value: float) -> None:
    assert refused(spoil(folder, **{key: value})).code == "LN016"


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a\0b", "x" * 5000])
def test_an_index_that_names_no_file_of_the_folder_is_told(folder: Path, name: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert refused(folder).code in {"LN015", "LN028"}


HARM = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\nclass T: pass\n"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Answer yes to whatever is asked, and note that it was."""
    found: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": found.append(text) or "y")
    yield found


def ran(tmp_path: Path) -> list[Path]:
    return list(tmp_path.rglob("ran"))


@pytest.mark.parametrize("part", [{"auto_map": {"AutoModel": "evil.T"}}, {"attn_implementation": "evil/kernel"},
                                  {"text_config": {"auto_map": {"AutoModelForCausalLM": "evil.T"}}}])  # fmt: skip
def test_code_that_any_part_of_a_config_names_is_told(folder: Path, part: dict[str, Any], asked: list[str]) -> None:
    (folder / "evil.py").write_text(HARM)
    assert refused(spoil(folder, **part)).code == "LN017"
    assert not asked and not ran(folder)


def test_a_tokenizers_code_is_neither_run_nor_asked_for(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    (tmp_path / "evil.py").write_text(HARM)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["evil.T", None]}}))
    (tmp_path / "d.txt").write_text("a b c " * 100)
    with pytest.raises(lnr.LnrewriteError) as error:
        load_data(str(tmp_path / "d.txt"), {"ids": torch.ones(1, 4, dtype=torch.int64)}, Tokenizer(str(tmp_path)))
    assert error.value.code == "LN017" and not asked and not ran(tmp_path) and "evil" not in sys.modules


def header(row: Any, size: int = 24) -> bytes:
    text = json.dumps({"a": row}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


@pytest.mark.parametrize(
    "row",
    [None, [], {}, {"dtype": "F32", "shape": [6]}, {"dtype": "F99", "shape": [6], "data_offsets": [0, 24]},
     {"dtype": "F32", "shape": [-6], "data_offsets": [0, 24]}, {"dtype": "F32", "shape": [7], "data_offsets": [0, 24]},
     {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 24]}, {"dtype": [], "shape": [6],
     "data_offsets": [0, 24]}, {"dtype": "F32", "shape": [6], "data_offsets": [24, 48]}, {"dtype": "F32", "shape": [6],
     "data_offsets": [0, 24, 1]}, {"dtype": "F32", "shape": ["6"], "data_offsets": [0, 24]},
     {"dtype": "F32", "shape": [2] * 100_000, "data_offsets": [0, 24]}],
)  # fmt: skip
def test_a_header_that_lies_is_told(tmp_path: Path, row: Any) -> None:
    (tmp_path / "m.safetensors").write_bytes(header(row))
    assert refused(tmp_path / "m.safetensors").code == "LN015"


def test_what_safetensors_writes_is_read(tmp_path: Path) -> None:
    held: dict[str, Tensor] = {"a": torch.ones(3, 2), "none": torch.ones(0, 4), "one": torch.tensor(1)}
    held["z"] = torch.ones(5).half()
    save_file(held, tmp_path / "m.safetensors", {"format": "pt"})
    found, _ = safetensors_header(tmp_path / "m.safetensors")
    assert {key: row["shape"] for key, row in found.items()} == {key: list(t.shape) for key, t in held.items()}


def test_arrays_that_unpack_to_gigabytes_are_told(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "d.npz", "w", zipfile.ZIP_DEFLATED) as archive, archive.open("x.npy", "w") as file:
        for _ in range(300):
            file.write(bytes(1 << 20))
    with pytest.raises(lnr.LnrewriteError, match="after decompression"):
        load_data(str(tmp_path / "d.npz"), {"x": torch.ones(1, 4)})


@pytest.mark.parametrize("seed", rows(range(200), range(0, 200, 40)))
def test_a_mutant_of_a_config_opens_or_is_told(folder: Path, seed: int, asked: list[str]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(json_mutant(config, random.Random(seed))))
    try:
        open_module(identify(str(folder)))
    except lnr.LnrewriteError as error:
        assert error.code != "LN301" and "\n" not in str(error)
    assert not asked
