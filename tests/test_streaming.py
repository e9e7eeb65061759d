"""Large models: walked sum by sum, their weights on disk, with the results that the whole in memory has."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import lnrewrite as lnr
import zoo
from commands import started
from lnrewrite.api import load_source
from lnrewrite.checkpoints import kept, streaming
from lnrewrite.checkpoints.stored import Store
from lnrewrite.comparison.verifying import compare
from lnrewrite.loading.identify import identify
from lnrewrite.loading.open import open_module
from lnrewrite.loading.source import OpenOptions
from lnrewrite.models import sampling
from lnrewrite.models.calibration import collect
from lnrewrite.pipeline.protocols import Samples
from reading import load_data
from tiers import rows

NETS = sorted(zoo.nets.NETS) + sorted(zoo.WRITTEN)
KINDS = Samples.__slots__
FOLDERS = list(
    product(("llama", "gpt2", "gpt_neox", "gemma2", "opt"), ("peri", "post", "none"), ("float32", "bfloat16"))
)


@pytest.mark.parametrize("name", rows(NETS, sample=NETS[::29]))
def test_a_walk_sees_what_a_run_of_the_whole_records(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one sum's samples are held at a time, and where they are asked for again, last first."""
    program, inputs = zoo.captured(name)
    batches = [inputs, inputs]
    wanted = collect(program.network, program._record, batches)
    for room in (sampling.BYTES, 0):
        monkeypatch.setattr(sampling, "BYTES", room)
        found = program.samples(batches)
        for block in [*wanted, *list(wanted)[::-1]]:
            for kind in KINDS:
                one, other = getattr(wanted[block], kind), getattr(found[block], kind)
                assert (one is None) == (other is None), kind
                if one is not None:
                    np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5 * abs(one).max(initial=0))
        if not room and len({b.anchor.total for b in program.network.blocks}) > 1:
            assert len(found.held) < len(wanted)


def folder(name: str, dtype: str, room: Path) -> Path:
    model, _ = zoo.build(name, head=True)
    model.to(getattr(torch, dtype)).save_pretrained(room / "model")
    np.savez(room / "data.npz", input_ids=np.random.default_rng(0).integers(0, 32, (9, 12)))
    return room / "model"


@pytest.mark.parametrize(("name", "to", "dtype"), rows(FOLDERS, sample=FOLDERS[:1]))
def test_a_large_folder_becomes_what_it_becomes_in_memory(
    name: str, to: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, config and report: constants alone, and the drift of one batch that is held out."""
    source, data = folder(name, dtype, tmp_path), str(tmp_path / "data.npz")
    loaded = lnr.rewrite_file(
        source, f"place{{to={to} fit=constants}}", tmp_path / "loaded", calibrate=data, partial=True
    )
    monkeypatch.setattr(kept, "LARGE", 0)
    report = lnr.rewrite_file(source, f"place{{to={to}}}", tmp_path / "streamed", calibrate=data, partial=True)
    assert report.edits == loaded.edits and report.pipeline == loaded.pipeline
    assert any("--fit reconstruct" in note for note in report.notes)
    bit = torch.finfo(getattr(torch, dtype)).eps
    if loaded.drift is None:  # it is in that placement already
        assert report.drift is None and not report.edits
    else:
        assert report.drift["held_out"] and report.drift["samples"] == 1
        wanted = loaded.drift["relative_error"] if dtype == "float32" else apart_in_float32(source, tmp_path)
        assert abs(report.drift["relative_error"] - wanted) <= (1e-4 if dtype == "float32" else 0.1) * wanted
    one, other = (weights(tmp_path / way) for way in ("loaded", "streamed"))
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert value.dtype == other[key].dtype
        assert (value.double() - other[key].double()).abs().max() <= 8 * bit * value.double().abs().max(), key


def apart_in_float32(source: Path, room: Path) -> float:
    """Return the drift of what was written on the row that is held out: in memory, half precision is run as such."""
    ids = torch.from_numpy(np.load(room / "data.npz")["input_ids"][-1:])
    found = []
    for at in (source, room / "streamed"):
        module = open_module(identify(at, OpenOptions(None, False, False, None, "cpu", 0))).module
        assert module is not None
        with torch.no_grad():
            found.append(module.float().eval()(input_ids=ids, use_cache=False).logits.double())
    return float((found[0] - found[1]).norm() / found[0].norm())


def weights(at: Path) -> dict[str, Tensor]:
    return {key: value for path in sorted(at.glob("*.safetensors")) for key, value in load_file(path).items()}


def looked_at(at: Path) -> Any:
    source = identify(at, OpenOptions(None, False, False, None, "cpu", 0))
    return kept.stored_program(source) or load_source(source)


def test_a_buffer_that_is_stored_is_read_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not what a network without weights makes of it; the outputs are the model's."""
    model = zoo.bart()
    model.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(kept, "LARGE", 0)
    program = looked_at(tmp_path / "model")
    assert isinstance(program, streaming.StoredProgram)
    assert torch.equal(program.read("final_logits_bias"), model.final_logits_bias)
    given = program.synthetic(0)[0]
    with torch.no_grad():
        wanted = model(**given, use_cache=False).logits
    assert torch.allclose(program.call(given).logits, wanted, atol=1e-5)
    report = lnr.rewrite_file(tmp_path / "model", "place{to=pre}", tmp_path / "pre", partial=True)
    assert report.edits and torch.equal(weights(tmp_path / "pre")["final_logits_bias"], model.final_logits_bias)


@pytest.mark.parametrize("dtype", rows(["float32", "bfloat16"], sample=["float32"]))
def test_folders_are_compared_and_inspected_from_disk(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures of the models in memory; of the weights, none stays when its part was run, collected or not."""
    source = folder("llama", dtype, tmp_path)
    lnr.rewrite_file(source, "fold-affine", tmp_path / "folded")
    whole = [looked_at(at) for at in (source, tmp_path / "folded")]
    monkeypatch.setattr(kept, "LARGE", 0)
    parts = [looked_at(at) for at in (source, tmp_path / "folded")]
    assert all(isinstance(p, streaming.StoredProgram) for p in parts)
    assert str(parts[0].stream) == str(whole[0].stream)
    wanted, found = compare(*whole), compare(*parts)
    assert found.verdict == wanted.verdict and abs(found.max_rel - wanted.max_rel) <= 0.1 * wanted.max_rel
    reads: list[str] = []
    monkeypatch.setattr(parts[0].store, "read", lambda name, read=parts[0].store.read: reads.append(name) or read(name))
    before = set(map(id, alive()))
    gc.disable()
    try:
        walk = parts[0].walk([{"input_ids": torch.ones(2, 4, dtype=torch.int64)}] * 3)
        while not walk.over:
            walk.go()
            assert not [p for p in alive() if id(p) not in before]
    finally:
        gc.enable()
    assert len(reads) == len(set(reads))


def alive() -> list[Tensor]:
    return [o for o in gc.get_objects() if type(o) is nn.Parameter and not o.is_meta and o.numel()]


@pytest.mark.parametrize(("count", "sizes"), [(9, [2, 2, 2, 2, 1]), (8, [1] * 8), (3, [1] * 3), (64, [8] * 8)])
def test_rows_of_one_array_are_batches_enough_to_hold_some_out(count: int, sizes: list[int], tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", ids=np.ones((count, 4), dtype=np.int64))
    example = {"ids": torch.ones(2, 4, dtype=torch.int64)}
    free, fixed = {"ids": {0: "n"}}, {"ids": {}}
    assert [len(b["ids"]) for b in load_data(str(tmp_path / "d.npz"), example, dynamic=free, least=8)] == sizes
    assert {len(b["ids"]) for b in load_data(str(tmp_path / "d.npz"), example, dynamic=fixed, least=8)} == {2}


# ---- what is killed ----


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model in many files, and data."""
    room = tmp_path_factory.mktemp("killed")
    zoo.build("llama", depth=1, head=True)[0].save_pretrained(room / "model", max_shard_size="40KB")
    np.savez(room / "data.npz", input_ids=np.random.default_rng(0).integers(0, 32, (2, 12)))
    return room


def convert(room: Path, pipeline: str, out: Path, kill: int | None = None) -> None:
    """Rewrite a folder from disk, OUT over what stands there; be killed at a step of what is read and written."""
    torch.set_num_threads(1)
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        if steps == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    def seen(event: str, args: tuple[Any, ...]) -> None:
        if event in EVENTS and out.parent.name in str(args[0]):
            step()

    def pieces(store: Store, name: str) -> Iterator[Tensor]:
        for piece in whole(store, name):
            step()
            yield piece

    whole = Store.pieces
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "LARGE", 0)
        if kill is not None:
            patch.setattr(Store, "pieces", pieces)
            sys.addaudithook(seen)
        data = str(room / "data.npz")
        lnr.rewrite_file(room / "model", pipeline, out, calibrate=data, partial=True, force=True)


EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


WRITTEN: dict[str, dict[str, bytes]] = {}
KILLED = list(product(("place{to=peri}", "fold-affine"), range(1, 70, 3)))


@pytest.mark.parametrize(("pipeline", "step"), rows(KILLED, sample=[("fold-affine", 31)]))
def test_what_is_killed_leaves_what_was_there_and_the_next_is_whole(
    pipeline: str, step: int, source: Path, tmp_path: Path
) -> None:
    """Every other OUT is there before; what the killed one left beside OUT goes with the next; all write the same."""
    out = tmp_path / "place" / "out"
    out.parent.mkdir()
    if there := step % 2:
        shutil.copytree(source / "model", out)
    process = started(convert, source, pipeline, out, step)
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    left = held(out)
    convert(source, pipeline, out)
    assert held(out) == WRITTEN.setdefault(pipeline, held(out))
    assert left == held(out) or process.exitcode and left == (held(source / "model") if there else {})
    assert [p.name for p in out.parent.iterdir()] == ["out"]


def held(at: Path) -> dict[str, bytes]:
    return {str(p.relative_to(at)): p.read_bytes() for p in sorted(at.rglob("*")) if p.is_file()}
