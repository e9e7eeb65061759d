"""Post-LN nets drawn at random, converted to pre with sizes kept: exact, seen as pre, safe for what follows.

The algebra by itself, and what it must not forget, is tested on the reference machine in test_exact_passes.
"""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn
from torch.nn import functional as F

import lnrewrite as lnr
import zoo
from lnrewrite.ir import Exactness, Kind, Placement
from lnrewrite.testing.reference import Machine, apply
from tiers import rows
from zoo.streams import assert_same, context, machines

WIDTH, HEADS, VOCABULARY = 12, 2, 11
KEEP = "place{to=pre keep-sizes}"
RIGHT = 1e-10
"""The largest difference, relative to the largest number of an output."""
SEEDS = rows(range(60), sample=range(12))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Norm(nn.Module):
    """A layer or rms norm as one operator or written out, with a gain, 1 + a gain or none, and a bias or none."""

    def __init__(self, r: random.Random) -> None:
        super().__init__()
        self.mean, self.written, self.plus = r.random() < 0.6, r.random() < 0.3, float(r.random() < 0.2)
        self.eps = 10 ** r.uniform(-12, -1)
        self.gain = nn.Parameter(torch.randn(WIDTH) / 2 + 1 - self.plus) if r.random() < 0.8 else None
        self.bias = nn.Parameter(torch.randn(WIDTH) / 2) if r.random() < 0.7 else None

    def forward(self, x: Tensor) -> Tensor:
        gain = None if self.gain is None else self.gain + self.plus if self.plus else self.gain
        if not self.written:
            if self.mean:
                return F.layer_norm(x, (WIDTH,), gain, self.bias, self.eps)
            u = F.rms_norm(x, (WIDTH,), gain, self.eps)
            return u if self.bias is None else u + self.bias
        x = x - x.mean(-1, keepdim=True) if self.mean else x
        u = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        u = u if gain is None else u * gain
        return u if self.bias is None else u + self.bias


class Branch(nn.Module):
    """Attention under a mask, or an MLP; now and then with a factor at its end."""

    def __init__(self, r: random.Random) -> None:
        super().__init__()
        self.attends, bias = r.random() < 0.5, r.random() < 0.7
        self.up = nn.Linear(WIDTH, 3 * WIDTH, bias)
        self.down = nn.Linear(WIDTH if self.attends else 3 * WIDTH, WIDTH, bias)
        self.factor = nn.Parameter(torch.randn(WIDTH)) if r.random() < 0.2 else None

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.up(x)
        if self.attends:
            q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in h.chunk(3, -1))
            h = F.scaled_dot_product_attention(q, k, v, mask[:, None, None]).transpose(1, 2).flatten(2)
        else:
            h = torch.tanh(h)
        f = self.down(h)
        return f if self.factor is None else f * self.factor


class PostNet(nn.Module):
    """Draw a Post-LN net from a seed: parallel branches, scaled skips, shared norms and branches among its kinds."""

    def __init__(self, seed: int, plain: bool = False) -> None:
        super().__init__()
        r = random.Random(seed)
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.first = Norm(r) if r.random() < 0.7 else None
        depth = r.randint(2, 4)
        self.branches = nn.ModuleList(
            nn.ModuleList(Branch(r) for _ in range(1 + (r.random() < 0.25))) for _ in range(depth)
        )
        self.norms = nn.ModuleList(Norm(r) for _ in range(depth))
        self.skips = [1.0 if plain or r.random() < 0.7 else r.choice([2.5, -0.5]) for _ in range(depth)]
        if r.random() < 0.2:
            self.norms[1] = self.norms[0]
        if r.random() < 0.2:
            self.branches[1] = self.branches[0]
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.head.weight if r.random() < 0.7 else self.embed.weight

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x if self.first is None else self.first(x)
        for branches, norm, skip in zip(self.branches, self.norms, self.skips, strict=True):
            total = x if skip == 1 else skip * x
            for branch in branches:
                total = total + branch(x, mask)
            x = norm(total)
        return self.head(x)


def inputs(batch: int, length: int) -> dict[str, Tensor]:
    """Return ids, those of the padding, whose row is zero, among them, and a mask that hides some tokens."""
    g = torch.Generator().manual_seed(batch)
    mask = torch.rand(batch, length, generator=g) < 0.8
    mask[:, 0] = True
    return {"ids": torch.randint(0, VOCABULARY, (batch, length), generator=g), "mask": mask}


SIZES = inputs(2, 6), inputs(3, 7)


@functools.cache
def drawn(seed: int) -> tuple[Any, list[Tensor]]:
    """Return the program of a net in float64, and what it gives for each of the inputs."""
    with zoo.float64():
        net = PostNet(seed).double().eval()
        return lnr.capture(net, kwargs=SIZES[0]), [net(**given) for given in SIZES]


def away(program: Any, wanted: list[Tensor]) -> float:
    """Return how far a program's outputs are from what is wanted, relative to the largest number."""
    with zoo.float64():
        pairs = [(y, program.module()(**given)) for given, y in zip(SIZES, wanted, strict=True)]
    return max(((a - b).abs().max() / a.abs().max()).item() for a, b in pairs)


def placements(net: Any) -> list[str]:
    """Return what is to be seen: pre, but for the first sum of a net whose stream starts without a norm."""
    bare = 0 if net.first else len(net.branches[0])
    return ["none"] * bare + ["pre"] * (sum(map(len, net.branches)) - bare)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_conversion_is_exact_and_its_result_is_seen_as_pre(seed: int) -> None:
    program, wanted = drawn(seed)
    result = lnr.Pipeline.parse(KEEP).run(program)
    report, network = result.report, result.program.network
    assert (report.exactness, report.refusals, report.drift) == (Exactness.ALGEBRAIC, (), None)
    assert away(result.program, wanted) < RIGHT
    assert [b.placement for b in program.network.blocks] == ["post"] * len(network.blocks)
    assert [b.placement.value for b in network.blocks] == placements(PostNet(seed))
    (stream,) = network.streams
    assert stream.final and stream.final.norm == program.network.streams[0].blocks[-1].sites[-1].norm
    assert not network.refusals and not result.program.certified.refusals
    assert {site.norm.kind for site in network.elsewhere} <= {Kind.CENTERED}  # the mean comes off, and no size


AFTER = (
    *lnr.Pipeline.PRESETS.values(),
    "canonicalize",
    "fold-affine{final=true}",
    "layernorm-to-rmsnorm",
    "rescale-stream{by=0.25}",
    "rotate-stream",
    "absorb-scales",
    "merge-norms",
    "fold-embedding-norm",
    "untie{what=all}",
)


@pytest.mark.parametrize("seed", rows(range(24), sample=range(6)))
def test_other_exact_passes_stay_right_on_the_result_or_refuse(seed: int) -> None:
    program, wanted = drawn(seed)
    made = lnr.Pipeline.parse(KEEP).run(program).program
    edits = 0
    for text in AFTER:
        result = lnr.Pipeline.parse(text).run(made, partial=True)
        assert not [r for r in result.report.refusals if r.code == "LN404"], text
        assert away(result.program, wanted) < RIGHT * 10, text
        edits += result.report.edits
    assert edits


@pytest.mark.parametrize("seed", rows(range(12), sample=range(4)))
def test_onnx_files_are_converted_alike(seed: int, tmp_path: Path) -> None:
    net = PostNet(seed, plain=True).eval()
    program = lnr.capture(net, kwargs=SIZES[0])
    program.export(tmp_path / "post.onnx", target="generic")
    given = lnr.load(tmp_path / "post.onnx")
    result = lnr.Pipeline.parse(KEEP).run(given)
    result.program.save(tmp_path / "pre.onnx")
    made = lnr.load(tmp_path / "pre.onnx")
    assert [b.placement.value for b in made.network.blocks] == placements(net)
    assert lnr.verify(given, made)["max_rel"] < RIGHT


@given(machine=machines(placements=(Placement.POST,)))
def test_the_reference_machine_agrees(machine: Machine) -> None:
    (item,) = lnr.Pipeline.parse(KEEP).passes
    assert_same(machine, apply(machine, item.propose(machine.stream, context(machine))))  # type: ignore[arg-type]


def test_sizes_do_not_grow_with_the_depth() -> None:
    """A DeepNorm of 60 blocks: the product of all sizes alone is above 1e46, and float32 ends at 3e38."""
    net, depth = PostNet(0).eval(), 60
    net.branches, net.norms = nn.ModuleList([net.branches[0]] * depth), nn.ModuleList([net.norms[0]] * depth)
    net.skips = [6.0] * depth
    exact = lnr.convert(net, to="pre", keep_sizes=True, kwargs=SIZES[0])
    assert torch.allclose(exact(**SIZES[1]), net(**SIZES[1]), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_only_rounds(dtype: torch.dtype) -> None:
    module, batch = zoo.build("bert")
    report = lnr.Pipeline.parse(KEEP).run(lnr.capture(module.to(dtype), kwargs=batch)).report
    assert report.placement_after == "pre" and report.exactness is Exactness.ALGEBRAIC
    assert report.drift["relative_error"] < 4 * torch.finfo(dtype).eps


# ---- what cannot be done ----


@pytest.mark.parametrize(
    ("name", "options", "codes"),
    [
        ("bert", " blocks=0-2", {"LN113"}),
        ("gpt2", "", set()),
        ("olmo2", "", {"LN110"}),
        ("hybrid", "", {"LN110", "LN113"}),
        ("xlnet", "", {"LN110"}),
        ("squeezebert", "", {"LN114"}),
    ],
)
def test_refusals(name: str, options: str, codes: set[str]) -> None:
    program = zoo.program(name)
    report = lnr.Pipeline.parse(f"place{{to=pre keep-sizes{options}}}").run(program, partial=True).report
    assert {r.code for r in report.refusals} == codes and not report.edits


class Pooled(nn.Module):
    """Post-LN blocks of which one halves the number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](x)
        for i, (each, norm) in enumerate(zip(self.maps, list(self.norms)[1:], strict=True)):
            f = torch.tanh(each(x)) @ each.weight
            x = norm(x[:, ::2] + f[:, ::2] if i == 1 else x + f)
        return x


def test_a_stream_that_loses_tokens_is_refused_before_the_proof() -> None:
    x = torch.randn(2, 6, WIDTH)
    program = lnr.capture(Pooled(), (x,), dynamic_shapes={"x": None})
    assert program.network.placement == "post"
    report = lnr.Pipeline.parse(KEEP).run(program, partial=True, verify=False).report
    assert {r.code for r in report.refusals} == {"LN113", "LN114"} and not report.edits


@pytest.mark.parametrize("text", ["to=post", "to=peri", "to=none", "to=pre norm=rms", "to=pre fit=constants"])
def test_options_that_make_no_sense_together(text: str) -> None:
    with pytest.raises(lnr.LnrewriteError, match="LN003.*keep-sizes"):
        lnr.Pipeline.parse(f"place{{{text} keep-sizes}}")


def test_a_live_module_has_no_place_for_it() -> None:
    module, batch = zoo.build("bert")
    exact = lnr.convert(module, to="pre", keep_sizes=True, kwargs=batch)
    assert torch.allclose(exact(**batch)[0], module(**batch)[0], atol=1e-5)
    with pytest.raises(lnr.LnrewriteError, match="LN310"):
        lnr.convert(module, to="pre", keep_sizes=True, kwargs=batch, live=True)
