"""Healing by many processes: each makes its rows and holds its part, and all give what one gives."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import lnrewrite as lnr
import zoo
from commands import ok, started
from lnrewrite.backends.inputs import spec_of
from lnrewrite.checkpoints.healing import heal_folder
from lnrewrite.checkpoints.shards import stored_in
from lnrewrite.comparison.verifying import distances
from lnrewrite.compat.memory import give_back_at_once
from lnrewrite.data.batches import Data
from lnrewrite.healing.config import HealingConfig
from lnrewrite.healing.distributed import World
from lnrewrite.healing.losses import Objective
from lnrewrite.healing.rehearsal import Rehearsed
from lnrewrite.healing.session import heal
from lnrewrite.healing.sources import ArraySource, BatchSource, IterableSource, Windows
from lnrewrite.loading.identify import identify
from tiers import rows
from zoo import families

HOW: dict[str, Any] = {"steps": 3, "batch_size": 8, "lr": 1e-3, "gain_lr": 10.0, "control_lr": 1e-3, "warmup": 0}
TEXT: dict[str, Any] = HOW | {"accumulate": 2, "gradient_checkpointing": True, "progressive": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a Llama, what conversion makes of it, both in float32 and in bfloat16, and tokens."""
    root = tmp_path_factory.mktemp("folders")
    draw = np.random.default_rng(0)
    np.save(root / "tokens.npy", draw.integers(0, families.VOCAB, 3000, dtype=np.int32))
    np.save(root / "rows.npy", draw.integers(0, families.VOCAB, (8, 16)))
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        module, _ = zoo.build("llama", depth=2, head=True)
        module.to(dtype).save_pretrained(root / f"{name}-teacher", max_shard_size="60KB")
        how = ("--to", "peri", "--calibrate", root / "rows.npy", "--fit", "constants", "-q")
        ok("convert", root / f"{name}-teacher", *how, "-o", root / f"{name}-student")
    return root


def healed(folders: Path, out: Path, dtype: str = "float32", resume: bool = False, **how: Any) -> dict[str, Any]:
    """Heal a folder in this process, which may be one of several; return the report's JSON."""
    torch.set_num_threads(1)
    pair = [identify(str(folders / f"{dtype}-{side}")) for side in ("teacher", "student")]
    options: dict[str, Any] = {"length": 16, "run": f"{out}.run", "resume": resume}
    config = HealingConfig(**HOW | how)
    return heal_folder(*pair, str(folders / "tokens.npy"), config, out, **options).report.to_dict()


def one_of(rank: int, size: int, port: int, work: Any, *args: Any, **how: Any) -> None:
    """Be one of many processes, as torchrun starts them; what the first returns is written beside the output."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    os.environ.update(place, RANK=str(rank), LOCAL_RANK="0")
    found = work(*args, **how)
    if rank == 0:
        Path(f"{args[1]}.json").write_text(json.dumps(found))


def all_of(size: int, work: Any, *args: Any, **how: Any) -> list[Any]:
    port = random.Random(os.getpid() + time.time_ns()).randrange(20_000, 30_000)
    return [started(_with, rank, size, port, work, args, how) for rank in range(size)]


def _with(rank: int, size: int, port: int, work: Any, args: Any, how: Any) -> None:
    one_of(rank, size, port, work, *args, **how)


def tensors(folder: Path) -> dict[str, Tensor]:
    return {key: where.read() for path in folder.glob("*.safetensors") for key, where in stored_in(path).items()}


# ---- what each makes ----


def sources() -> dict[str, BatchSource]:
    tokens, ids = torch.arange(1000), torch.arange(320).reshape(40, 8)
    data = Data("d", spec_of({"ids": tokens}), length=8)
    given = [{"ids": ids[i : i + 5]} for i in range(0, 35, 5)] + [{"ids": ids[:3]}] * 4
    windows = Windows(tokens, data, 5, 4, 0)
    rehearsed = Rehearsed(windows, 0.5, {"ids": 1000}, Objective("ids", {}, True), torch.ones(1000), 3)
    arrays = ArraySource({"ids": ids}, data, 5, 4, 0)
    return {
        "windows": windows,
        "rehearsed": rehearsed,
        "arrays": arrays,
        "batches": IterableSource(lambda: iter(given), data),
    }


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", sources())
def test_the_rows_of_all_are_the_rows_of_one(name: str, size: int) -> None:
    whole, parts = sources()[name], sources()[name]
    for index in (0, 1, 2, 7, 3):
        batch = whole.batch(index)
        for rank in range(size):
            mine = parts.batch(index, World(rank, size, torch.device("cpu")).rows)
            assert mine.keys() == batch.keys()
            assert all(torch.equal(mine[n], t[rank::size]) for n, t in batch.items())
        assert whole.rows_of(index) == len(batch["ids"])


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_every_row_that_is_measured_counts_once(size: int) -> None:
    batch = {"ids": torch.arange(12).reshape(6, 2)}
    found = [World(rank, size, torch.device("cpu")).spread(batch) for rank in range(size)]
    seen = [row.tolist() for part, counts in found if counts for row in part["ids"]]
    assert sorted(seen) == batch["ids"].tolist() and all(len(part["ids"]) for part, _ in found)


@pytest.mark.parametrize("rows_of", [1, 5, 8, 9])
def test_parts_of_a_parameter_are_those_of_torch(rows_of: int) -> None:
    whole = torch.arange(rows_of)
    for size in (1, 2, 3, 4):
        parts = [whole[World(rank, size, torch.device("cpu")).piece(rows_of)] for rank in range(size)]
        wanted = [*whole.chunk(size), *[whole[:0]] * size][:size]
        assert all(torch.equal(one, two) for one, two in zip(parts, wanted, strict=True))


def frees() -> None:
    """Leave with an error where the memory of freed tensors stays: those that are kept lie between them."""
    give_back_at_once()
    torch.ones(5 << 20)  # when this is freed, glibc begins to hold such blocks back
    before = resident()
    kept, freed = zip(*((torch.ones(1 << 10), torch.ones(1 << 20)) for _ in range(40)), strict=True)
    assert len(kept) == 40 and resident() > before + (150 << 20)
    del freed
    assert resident() < before + (20 << 20)


def resident() -> int:
    row = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(row.split()[1]) << 10


@pytest.mark.skipif(sys.platform != "linux", reason="other systems give memory back as they do")
def test_freed_memory_goes_back_at_once() -> None:
    process = started(frees)
    process.join()
    assert process.exitcode == 0


def test_distances_add_up_over_rows_and_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from lnrewrite.comparison import verifying

    one, two = torch.randn(2, 6, 5, 11).unbind()
    whole = distances({"logits": one}, {"logits": two})
    rows_of = [distances({"logits": one[i::2]}, {"logits": two[i::2]}) for i in (0, 1)]
    monkeypatch.setattr(verifying, "PIECE", 13)
    for other in (sum(rows_of), distances({"logits": one}, {"logits": two})):
        assert torch.allclose(whole, torch.as_tensor(other), rtol=1e-12)


# ---- what all give ----

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"dtype": "bfloat16"},
    "bf16": {"bf16": True},
    "norms": {"train": "norms", "accumulate": 2},
    "local": {"local_steps": 2, "gradient_checkpointing": True, "accumulate": 2},
}
CASES = [(kind, size) for kind in KINDS for size in (2, 4)]


@pytest.mark.parametrize(("kind", "size"), rows(CASES, sample=[]))
def test_many_processes_write_the_folder_that_one_does(kind: str, size: int, folders: Path, tmp_path: Path) -> None:
    how = {"save_steps": 1, **KINDS[kind]}
    one = healed(folders, tmp_path / "one", **how)
    every = all_of(size, healed, folders, tmp_path / "many", **how)
    for process in every:
        process.join(500)
    assert [process.exitcode for process in every] == [0] * size
    many = json.loads((tmp_path / "many.json").read_text())
    low = kind in ("bf16", "bfloat16")
    for name, losses in one["losses"].items():
        assert many["losses"][name]["mean"] == pytest.approx(losses["mean"], abs=2e-2 if kind == "bf16" else 1e-4), name
    assert many["drift"]["relative_error"] == pytest.approx(one["drift"]["relative_error"], rel=0.1 if low else 1e-2)
    assert many["tokens"] == one["tokens"] and many["trained"] == one["trained"]
    before = tensors(folders / f"{how.get('dtype', 'float32')}-student")
    ours, theirs = tensors(tmp_path / "one"), tensors(tmp_path / "many")
    assert ours.keys() == theirs.keys() == before.keys()
    moved = {name for name in ours if not torch.equal(ours[name], before[name])}
    assert moved == {name for name in theirs if not torch.equal(theirs[name], before[name])}
    assert moved == ({n for n in before if "norm" in n} if kind == "norms" else set(before))
    for name, tensor in ours.items():
        assert theirs[name].dtype == before[name].dtype
        far = (theirs[name].float() - tensor.float()).norm() / (tensor.float() - before[name].float()).norm()
        assert low or name not in moved or far < 5e-4, name
    if low:  # Adam's first steps are as long where a gradient is rounding alone
        flat = [torch.cat([held[n].float().flatten() for n in ours]) for held in (ours, theirs, before)]
        assert (flat[0] - flat[1]).norm() < 0.3 * (flat[0] - flat[2]).norm()


@pytest.mark.exhaustive
def test_two_processes_give_what_one_gives_in_memory(tmp_path: Path) -> None:
    """Programs that each process holds, whose norms move by degrees.

    In float64, where sums in another order differ by too little to turn a step of Adam about.
    """
    from lnrewrite import demo

    text, data = tmp_path / "t.txt", demo.calibration(batches=4)
    text.write_bytes(demo.training_text()[:40_000])
    teacher = lnr.capture(zoo.short_gpt().double(), kwargs=data[0])
    teacher.save(tmp_path / "teacher.pt2")
    lnr.Pipeline.parse("place{to=peri fit=constants}").run(teacher, data).program.save(tmp_path / "peri.pt2")
    one = in_memory(text, tmp_path / "one")
    both = all_of(2, in_memory, text, tmp_path / "two")
    for process in both:
        process.join(300)
    assert [process.exitcode for process in both] == [0, 0]
    two = json.loads((tmp_path / "two.json").read_text())
    assert two["losses"].keys() == {"teacher", "converted", "healed", "control"}
    for name, losses in one["losses"].items():
        assert two["losses"][name]["mean"] == pytest.approx(losses["mean"], abs=1e-5), name
    ours, theirs = (torch.load(tmp_path / f"{name}.pt") for name in ("one", "two"))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == torch.float64
        if not name.endswith("qkv.bias"):  # what a bias of all keys adds cancels: its gradient is rounding alone
            assert torch.allclose(theirs[name], tensor, rtol=0, atol=1e-9), name


def in_memory(text: Path, out: Path) -> dict[str, Any]:
    """Heal programs; keep the weights."""
    pair = (lnr.load(str(text.parent / f"{name}.pt2")) for name in ("teacher", "peri"))
    found = heal(*pair, str(text), HealingConfig(**TEXT), length=32)
    if os.environ.get("RANK", "0") == "0":
        torch.save({n: p.detach() for n, p in found.program.module().named_parameters()}, f"{out}.pt")
    return found.report.to_dict()


# ---- what is killed ----


@pytest.mark.parametrize("phase", rows(["local", "global", "control"], sample=[]))
def test_two_that_are_killed_go_on_to_the_same_weights(phase: str, folders: Path, tmp_path: Path) -> None:
    how = {"steps": 12, "local_steps": 12, "save_steps": 2}
    for process in (whole := all_of(2, healed, folders, tmp_path / "whole", **how)):
        process.join(500)
    assert [p.exitcode for p in whole] == [0, 0]
    out, run = tmp_path / "killed", tmp_path / "killed.run"
    both = all_of(2, healed, folders, out, **how)
    log = run / "log.jsonl"
    while not (log.exists() and f'"phase": "{phase}", "step": 5' in log.read_text()):
        assert all(p.is_alive() for p in both), "it ended before it could be killed"
        time.sleep(0.002)
    for process in both:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    assert sorted(p.name for p in tmp_path.iterdir() if "killed" in p.name) == ["killed.run"]
    for place in run.glob("[a-z]*-*"):
        assert (place / ".metadata").is_file(), f"{place.name} is not whole"
    for process in (again := all_of(2, healed, folders, out, resume=True, **how)):
        process.join(500)
    assert [p.exitcode for p in again] == [0, 0]
    ours, theirs = tensors(tmp_path / "whole"), tensors(out)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
    losses = [json.loads((tmp_path / f"{name}.json").read_text())["losses"] for name in ("whole", "killed")]
    assert losses[0] == losses[1]


# ---- folders in half precision ----


@pytest.mark.exhaustive
def test_half_precision_is_trained_in_float32_and_the_loss_is_that_of_what_is_written(
    folders: Path, tmp_path: Path
) -> None:
    """Steps that are too small for bfloat16 add up, and the report is of the rounded weights."""
    how = {"dtype": "bfloat16", "lr": 1e-5, "gain_lr": 1.0, "steps": 40, "control": False, "train": "all"}
    told = healed(folders, tmp_path / "out", **how)
    before, after = tensors(folders / "bfloat16-student"), tensors(tmp_path / "out")
    assert all(t.dtype is torch.bfloat16 for t in after.values())
    assert any(not torch.equal(before[n], after[n]) for n in before)
    again = HealingConfig(**HOW | {"control": False})
    pair = [identify(str(each)) for each in (folders / "bfloat16-teacher", tmp_path / "out")]
    found = heal_folder(*pair, str(folders / "tokens.npy"), again, tmp_path / "again", length=16).report
    assert found.losses["converted"]["mean"] == pytest.approx(told["losses"]["healed"]["mean"], abs=1e-6)
