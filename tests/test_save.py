"""What a program is once it leaves us: a file that torch alone loads, and a module that trains like any other."""

from __future__ import annotations

import copy
import hashlib
import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lnrewrite as lnr
import zoo
from lnrewrite.files import landing
from tiers import rows
from zoo import branches, nets
from zoo.norms import TOKENS, VOCAB, WIDTH, randomise


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def converted(name: str, to: str = "peri") -> tuple[Any, dict[str, Tensor]]:
    """Return a converted program and its example inputs by name."""
    program, batch = zoo.captured(name, depth=1)
    return lnr.Pipeline.parse(f"place{{to={to}}}").run(program).program, batch


def alone(code: str, *args: Path) -> str:
    """Run code in a fresh interpreter that cannot import lnrewrite or transformers; return what it prints."""
    head = """
        import sys
        sys.modules["lnrewrite"] = sys.modules["transformers"] = None
        import torch
        torch.set_num_threads(1)
    """
    text = textwrap.dedent(head) + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", text, *map(str, args)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


LOAD = """
    program = torch.export.load(sys.argv[1])
    given = torch.load(sys.argv[2], weights_only=True)
    module = program.module()
    torch.save([module(**batch) for batch in given], sys.argv[3])
    names = {n.meta["custom"]["lnrewrite"] for n in program.graph.nodes if "lnrewrite" in (n.meta.get("custom") or {})}
    print(len(names))
"""


CONVERSIONS = (("llama", "peri"), ("two towers", "output"), ("gpt2", "post"), ("bart", "pre"))


@pytest.mark.parametrize(("name", "to"), rows(CONVERSIONS, sample=CONVERSIONS[:1]))
def test_torch_alone_loads_the_file_and_runs_it_at_any_size(name: str, to: str, tmp_path: Path) -> None:
    program, batch = converted(name, to)
    file, inputs, outputs = tmp_path / "model.pt2", tmp_path / "inputs.pt", tmp_path / "outputs.pt"
    program.save(file)
    axes = program.dynamic_axes()
    assert all({0, 1} <= set(axes[n]) for n in batch)
    larger = {k: torch.cat([v, v[:1]])[:, :-1] for k, v in batch.items()}
    torch.save([batch, larger], inputs)
    edits = int(alone(LOAD, file, inputs, outputs))
    assert edits >= len(program.network.blocks)  # provenance survives: every edit has left its name on a node

    module = program.module()
    for given, got in zip((batch, larger), torch.load(outputs, weights_only=True), strict=True):
        with torch.no_grad():
            want = module(**given)
        if isinstance(want, Tensor):
            assert torch.allclose(want, got, atol=1e-5)
            continue
        assert type(got) is dict and list(got) == [k for k, v in want.items() if v is not None]
        assert all(torch.allclose(v, want[k], atol=1e-5) for k, v in got.items() if isinstance(v, Tensor))


def test_the_file_keeps_library_classes_out_and_the_module_keeps_them() -> None:
    program, batch = converted("llama")
    kind = type(zoo.build("llama")[0](**batch))
    assert type(program.module()(**batch)) is kind
    assert kind.__module__.startswith("transformers")


def test_saved_programs_load_again_as_programs(tmp_path: Path) -> None:
    program, batch = converted("pre")
    program.save(tmp_path / "model.pt2")
    again = lnr.load(str(tmp_path / "model.pt2"))
    assert str(again.stream) == str(program.stream)
    assert {k: set(v) for k, v in again.dynamic_axes().items()} == {
        k: set(v) for k, v in program.dynamic_axes().items()
    }
    assert torch.allclose(again.module()(**batch), program.module()(**batch), atol=1e-6)
    old, new = (dict(p.module().named_parameters()) for p in (program, again))
    assert old.keys() == new.keys() and all(torch.equal(old[n], new[n]) for n in old)


def test_every_edit_is_stamped_on_nodes_in_memory() -> None:
    program, _ = converted("pre")
    stamps = {(n.meta.get("custom") or {}).get("lnrewrite") for n in program.module().graph.nodes}
    assert stamps >= {f"place{{to=peri}}:{b.name}" for b in program.network.blocks}


@pytest.mark.parametrize("name", rows(["gpt2", "bart"], sample=["gpt2"]))
def test_ties_are_kept(name: str, tmp_path: Path) -> None:
    module, batch = zoo.build(name)
    shared = module.get_input_embeddings().weight
    program = lnr.Pipeline.parse("place{to=none}").run(lnr.capture(module, kwargs=batch)).program
    like = [p for p in program.module().parameters() if p.shape == shared.shape and torch.equal(p, shared)]
    assert len(like) == 1
    program.save(tmp_path / "model.pt2")
    state = torch.export.load(tmp_path / "model.pt2").state_dict
    assert len({t.data_ptr() for t in state.values() if t.shape == shared.shape and torch.equal(t, shared)}) == 1


# ---- the file as a file ----


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def save(path: str | Path) -> None:
    """Write a converted model; in another process too, whose hashes are others."""
    program, _ = converted("pre")
    program.save(path)


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    save(tmp_path / "one.pt2")
    command, place = "import sys, test_save; test_save.save(sys.argv[1])", str(Path(__file__).parent)
    environment = os.environ | {"PYTHONPATH": place, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", command, tmp_path / "two.pt2"], check=True, env=environment)
    assert digest(tmp_path / "one.pt2") == digest(tmp_path / "two.pt2")


def test_the_same_seed_gives_the_same_weights() -> None:
    one, two = (converted("pre")[0].module().state_dict() for _ in range(2))
    assert list(one) == list(two) and all(torch.equal(one[n], two[n]) for n in one)


@pytest.mark.parametrize("failure", [OSError("no room"), KeyboardInterrupt(), RuntimeError("odd")], ids=repr)
def test_a_failing_write_leaves_nothing_and_keeps_the_old(
    failure: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, _ = converted("pre")

    def half(_: Any, file: Any, **more: Any) -> None:
        Path(file).write_bytes(b"half of it") if isinstance(file, (str, Path)) else file.write(b"half of it")
        raise failure

    monkeypatch.setattr(torch.export, "save", half)
    expected = lnr.LnrewriteError if isinstance(failure, OSError) else type(failure)
    with pytest.raises(expected):
        program.save(tmp_path / "new.pt2")
    assert not list(tmp_path.iterdir())
    (tmp_path / "old.pt2").write_bytes(b"the old one")
    with pytest.raises(expected):
        program.save(tmp_path / "old.pt2")
    assert [p.name for p in tmp_path.iterdir()] == ["old.pt2"]
    assert (tmp_path / "old.pt2").read_bytes() == b"the old one"


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    program, _ = converted("pre")
    (tmp_path / "there.pt2").write_bytes(b"x")
    for path, force in ((tmp_path, True), (tmp_path / "no" / "model.pt2", True), (tmp_path / "there.pt2", False)):
        with pytest.raises(lnr.LnrewriteError, match="LN025"):
            program.save(path, force=force)
    assert [p.name for p in tmp_path.iterdir()] == ["there.pt2"]
    assert (tmp_path / "there.pt2").read_bytes() == b"x"


def test_write_whole_replaces_and_is_readable(tmp_path: Path) -> None:
    target = tmp_path / "file.bin"
    for content in (b"one", b"two"):
        landing.write_whole(target, lambda t, c=content: Path(t).write_bytes(c))  # type: ignore[misc]
        assert target.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir()] == ["file.bin"] and target.stat().st_mode & 0o444 == 0o444


def test_saving_leaves_the_module_as_it_was(tmp_path: Path) -> None:
    program, batch = converted("llama")
    module = program.module().train()
    kind = type(module(**batch))
    program.save(tmp_path / "model.pt2")
    assert module.training and type(module(**batch)) is kind and program.module() is module


# ---- the module ----


class Dropping(nn.Module):
    """Drop half of each branch of a Pre-LN net."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.final = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.branches = nn.ModuleList(branches.Mlp() for _ in range(3))
        self.dropout = nn.Dropout(0.5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for norm, branch in zip(self.norms, self.branches, strict=True):
            x = x + self.dropout(branch(norm(x)))
        return self.final(x)


def dropping() -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    batch = {"ids": nets._ids()[0]}
    program = lnr.capture(randomise(Dropping()).eval(), kwargs=batch)
    return lnr.Pipeline.parse("place{to=peri}").run(program).program, batch


def test_module_is_one_object() -> None:
    program, _ = dropping()
    assert isinstance(program.module(), nn.Module) and program.module() is program.module()


def test_train_and_eval_switch_the_dropout() -> None:
    program, batch = dropping()
    module = program.module()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        still = module(**batch)
        assert torch.equal(still, module(**batch)) and not module.training
        assert module.train() is module and module.training
        assert not torch.equal(module(**batch), module(**batch))
        assert module.eval() is module and not module.training
        assert torch.equal(still, module(**batch))


def test_capture_keeps_the_mode() -> None:
    torch.manual_seed(0)
    batch = {"ids": nets._ids()[0]}
    original = Dropping().train()
    program = lnr.capture(original, kwargs=batch)
    assert program.module().training and original.training
    assert not torch.equal(program.module()(**batch), program.module()(**batch))


def test_a_mode_that_cannot_follow_warns_once() -> None:
    module, batch = zoo.build("gpt2")
    module.config.attn_pdrop = 0.1
    for layer in module.transformer.h:
        layer.attn.attn_dropout.p, layer.attn.dropout = 0.1, 0.1
    captured = lnr.capture(module, kwargs=batch).module()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        captured.train()
        captured.eval()
        captured.train()
    assert len([w for w in seen if "keeps the mode" in str(w.message)]) <= 1


def test_a_converted_module_trains() -> None:
    program, batch = dropping()
    module = program.module().train()
    optimiser = torch.optim.AdamW(module.parameters(), 1e-2)
    target = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))

    def error() -> Tensor:
        return (module(**batch) - target).pow(2).mean()

    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    first = error().item()
    for _ in range(30):
        optimiser.zero_grad()
        error().backward()
        optimiser.step()
    module.eval()
    assert error().item() < 0.8 * first
    assert all(not torch.equal(p, before[n]) for n, p in module.named_parameters())


def test_deepcopy_and_state_dict_give_an_independent_module() -> None:
    program, batch = dropping()
    module = program.module()
    twin = copy.deepcopy(module)
    want = module(**batch)
    assert torch.equal(twin(**batch), want)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(0.1)
    assert torch.equal(module(**batch), want) and not torch.equal(twin(**batch), want)
    twin.load_state_dict(module.state_dict())
    assert torch.equal(twin(**batch), want)
    twin.train()
    assert twin.training and not module.training
    assert torch.equal(module(**batch), want)  # the twin's mode is its own


def test_the_module_is_called_as_the_original_was() -> None:
    program, batch = converted("llama")
    module = program.module()
    want = module(**batch).logits
    assert torch.equal(module(batch["input_ids"]).logits, want)
    assert torch.equal(module(**batch, use_cache=False).logits, want)
    with pytest.raises(TypeError, match="use_cache=True"):
        module(**batch, use_cache=True)
    with pytest.raises(TypeError, match="input_ids"):
        module()
