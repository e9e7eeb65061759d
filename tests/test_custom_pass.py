"""examples/custom_pass is a real package: installed as anyone would, found through its entry point, and exact."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NETWORK = """
stream toy width=8
  source @wte:1(table)
  embedding layer(eps=1e-05 gamma=@e.g beta=@e.b)
  block h.0.attn attention peri
    in     layer(eps=1e-05 gamma=@a.g beta=@a.b) -> @a.q:1+@a.qb @a.k:1
    out    rms(eps=1e-06 gamma=@a.o)
    writes @a.w:0
  block h.0.mlp mlp pre
    in     rms(eps=1e-06 gamma=1+@m.g) -> @m.up:1
    writes @m.down:0
  block h.1.attn attention pre
    in     rms(eps=1e-06 gamma=@tied) -> @b.q:1
    writes @b.w:0
  block h.1.mlp mlp pre
    in     rms(eps=1e-06 gamma=@tied) -> @n.up:1
    writes @n.down:0
  block h.2.mlp mlp pre
    in     rms(eps=1e-06) -> @o.up:1
    writes @o.down:0
  final  layer(eps=1e-05 gamma=@f.g beta=@f.b) -> @head:1
"""
PROGRAM = f"""
import sys
import numpy as np
from lnrewrite import Pipeline
from lnrewrite.ir import Where, text
from lnrewrite.pipeline import Context, registry
from lnrewrite.testing import reference

assert "plus-one-gains" in registry.available(), sorted(registry.available())
assert "lnrewrite_custom" not in sys.modules
network = text.parse({NETWORK!r})
(stream,) = network.streams
context = Context(network, samples=dict, is_ones=lambda p: False, is_zeros=lambda p: False, values=dict().get)


def check(pipeline, edited, refused, skipped):
    assert str(Pipeline.parse(pipeline)) == pipeline
    proposal = Pipeline.parse(pipeline).passes[0].propose(stream, context)
    assert [e.target for e in proposal.edits] == edited, proposal.edits
    assert [(r.code, r.site) for r in proposal.refusals] == refused, proposal.refusals
    assert [site for site, _ in proposal.not_applicable] == skipped, proposal.not_applicable
    before = reference.invent(stream, seed=1)
    after = reference.apply(before, proposal)
    for name, value in before.run().items():
        np.testing.assert_allclose(after.run()[name], value, rtol=1e-9, atol=1e-12)
    return after.stream


tied = [("LN102", "h.1.attn.in"), ("LN102", "h.1.mlp.in")]
after = check(
    "plus-one-gains", ["toy.embedding", "h.0.attn", "h.0.attn", "toy.final"], tied, ["h.0.mlp.in", "h.2.mlp.in"]
)
assert after.blocks[0].at(Where.OUT).norm.plus_one and after.final.norm.plus_one
check(
    "plus-one-gains{{blocks=0-1}}", ["h.0.attn", "h.0.attn"], [],
    ["toy.embedding", "h.0.mlp.in", "h.1.attn.in", "h.1.mlp.in", "h.2.mlp.in", "toy.final"],
)
print("done")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the example into a folder of its own, from a copy."""
    folder = tmp_path_factory.mktemp("custom")
    ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "examples" / "custom_pass", folder / "source", ignore=ignored)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "--target", folder / "site", folder / "source"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "site"


def test_the_example_is_found_and_exact(installed: Path) -> None:
    path = os.pathsep.join([str(installed), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": path},
        cwd=installed,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_the_readme_shows_the_entry_point_that_there_is() -> None:
    folder = ROOT / "examples" / "custom_pass"
    line = 'plus-one-gains = "lnrewrite_custom.plus_one_gains:PlusOneGains"'
    assert line in (folder / "README.md").read_text() and line in (folder / "pyproject.toml").read_text()
