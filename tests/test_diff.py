"""Diff: two models side by side, in any two formats; nothing differs between a model and itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import lnrewrite as lnr
from commands import fails, ok
from test_probe import Net, near, program_of
from tiers import rows


@pytest.mark.parametrize("seed", rows(range(30), sample=range(4)))
def test_a_model_does_not_differ_from_itself(seed: int, tmp_path: Path) -> None:
    net = Net(seed)
    program, data = program_of(net, net.inputs(0)), [(net.inputs(k),) for k in (1, 2)]
    program.export(tmp_path / "m.onnx", target="generic")
    for other in (program, lnr.load(tmp_path / "m.onnx")):
        found = lnr.diff(program, other, data)
        assert found.drift is not None and found.drift.relative_error is not None and found.drift.relative_error < 1e-5
        assert found.parameters[0] == found.parameters[1] and found.norms[0] == found.norms[1]
        for a, b in found.rows():
            assert a and b and (a.name, a.placement) == (b.name, b.placement) and near(a.branch_ratio, b.branch_ratio)
        assert "->" not in "".join(str(found).splitlines(keepends=True)[6:-2]) or other is not program
        json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize("to", ["peri", "post", "none"])
def test_a_conversion_shows_as_what_it_is(to: str) -> None:
    program = lnr.load("demo:tinygpt")
    made = lnr.Pipeline.parse(f"place{{to={to} fit=constants}}").run(program).program
    found = lnr.diff(program, made)
    assert [p.placement for p in found.probes] == ["pre", to] and found.drift is not None
    assert all(a and b and (a.placement, b.placement) == ("pre", to) for a, b in found.rows())
    assert found.to_dict()["blocks"][0]["placement"] == ["pre", to] and f"pre -> {to}" in str(found)
    assert str(found).count("made-up inputs") == 1


def test_blocks_that_one_model_lacks_are_told() -> None:
    one, two = Net(3), Net(3)
    two.sums = two.sums[:1]
    assert len(one.sums) > 1
    x = one.inputs(0)
    pairs = list(lnr.diff(program_of(one, x), program_of(two, x), [(x,)]).rows())
    assert [b is None for _, b in pairs].count(True) == len(pairs) - sum(len(g) for g in two.sums)


def test_outputs_that_do_not_compare_leave_the_rest(tmp_path: Path) -> None:
    one, two = Net(3), Net(3)
    two.head = torch.nn.Linear(two.width, 5) if two.axis == -1 else torch.nn.Conv2d(two.width, 5, 1)
    x = one.inputs(0)
    found = lnr.diff(program_of(one, x), program_of(two, x), [(x,)])
    assert found.drift is None and "cannot be compared" in str(found) and found.to_dict()["why"]


def test_the_command(tmp_path: Path) -> None:
    row = json.loads(ok("diff", "demo:tinygpt", "demo:tinygpt", "--json").stdout)
    assert row["models"] == ["demo:tinygpt"] * 2 and row["drift"]["relative_error"] == 0
    fails("LN010", 1, "diff", "demo:tinygpt", tmp_path / "nowhere.pt2")
    fails("LN022", 1, "diff", "demo:tinygpt", "demo:tinygpt", "--data", tmp_path / "nowhere.txt")


@pytest.mark.parametrize(
    "command", [["convert", "--to", "peri", "--fit", "constants"], ["opt", "--passes", "fold-affine"]]
)
def test_a_page_shows_before_and_after(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name, *rest = command
    row = json.loads(ok(name, "demo:tinygpt", *rest, "-o", "made.pt2", "--report", "page.html", "--json").stdout)
    page = Path("page.html").read_text()
    assert row["report"] == "page.html" and "made.pt2" in page and "before" in page and "after" in page
    fails("LN025", 1, name, "demo:tinygpt", *rest, "-o", "other.pt2", "--report", "page.html")
    Path("made.pt2").unlink()
    row = json.loads(ok(name, "demo:tinygpt", *rest, "--dry-run", "--report", "new.html", "--json").stdout)
    assert row["output"] is None and row["report"] == "new.html" and "as it would be" in Path("new.html").read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new.html", "page.html"]


@pytest.mark.exhaustive
def test_heal_writes_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_bytes(bytes(k * k % 251 for k in range(40_000)))
    Path("held.jsonl").write_text("".join(json.dumps({"text": f"document {k} " * 9}) + "\n" for k in range(40)))
    ok("convert", "demo:tinygpt", "--to", "peri", "--fit", "constants", "-o", "peri.pt2")
    heal = ["heal", "demo:tinygpt", "peri.pt2", "--data", "text.txt", "--held-out", "held.jsonl"]
    heal += ["--steps", 1, "--batch-size", 1, "--no-control", "--lr", 1e-4, "--length", 16]
    row = json.loads(ok(*heal, "-o", "healed.pt2", "--report", "page.html", "--json").stdout)
    assert row["report"] == "page.html" and "healed.pt2" in Path("page.html").read_text()
    fails("LN025", 1, *heal, "-o", "other.pt2", "--report", "page.html")
