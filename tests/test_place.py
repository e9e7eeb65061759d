"""What `place` must hold on real graphs: full conversion of many architectures, exactness where it is exact, refusals.

The walk's algebra is tested on the reference machine elsewhere; here programs are captured, converted, run, trained
and captured afresh.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lnrewrite as lnr
import zoo
from lnrewrite import demo
from lnrewrite.comparison.verifying import drift
from lnrewrite.ir import text
from tiers import rows
from zoo import beyond, blocks, branches, nets
from zoo.norms import WIDTH, layer, randomise

TARGETS = ("pre", "post", "peri", "output", "none")
Batch = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def place(program: Any, to: str, batches: Sequence[Any] | None = None, **more: Any) -> Any:
    """Convert, with `norm`, `blocks` and `fit` as options of the pass and the rest handed to run."""
    options = "".join(f" {k}={more.pop(k)}" for k in ("norm", "blocks", "fit") if k in more)
    return lnr.Pipeline.parse(f"place{{to={to}{options}}}").run(program, batches, **more)


def build(name: str) -> tuple[nn.Module, Batch]:
    """Return a model with random gains and biases, and its inputs by name; one layer shows what two would."""
    return zoo.build(name, depth=1)


def others(like: Mapping[str, Tensor], count: int = 4, seed: int = 1) -> list[Batch]:
    """Return batches like `like`, twice as many rows: ids drawn from all but the padding, floats from a normal."""
    g = torch.Generator().manual_seed(seed)

    def draw(t: Tensor) -> Tensor:
        shape = (2 * t.shape[0], *t.shape[1:])
        if t.is_floating_point():
            return torch.randn(shape, generator=g).to(t.dtype)
        return torch.randint(1, int(t.max()) + 1, shape, generator=g)

    return [{k: draw(t) for k, t in like.items()} for _ in range(count)]


def run(module: nn.Module, batch: Mapping[str, Tensor]) -> list[Tensor]:
    """Run a module without gradients and return its floating point outputs."""
    with torch.no_grad():
        return zoo.floats(module(**batch))


def away(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Return the largest |a - b| over all outputs, relative to the largest |a|."""
    return max(((x - y).abs().max() / x.abs().max()).item() for x, y in zip(a, b, strict=True))


def gradients(module: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters that a random linear loss reaches, with their gradients."""
    module.zero_grad()
    g = torch.Generator().manual_seed(3)
    sum((t * torch.randn(t.shape, generator=g)).sum() for t in zoo.floats(module(**batch))).backward()  # type: ignore[union-attr]
    return {n: p.grad for n, p in module.named_parameters(remove_duplicate=False) if p.grad is not None}


def tied(module: nn.Module) -> set[str]:
    """Return the names of parameters that have several."""
    found = list(module.named_parameters(remove_duplicate=False))
    ids = [id(p) for _, p in found]
    return {n for n, p in found if ids.count(id(p)) > 1}


def resized(batch: Mapping[str, Tensor], axes: Mapping[str, Mapping[int, str]]) -> Batch:
    """Add one row and drop one token along the axes that are dynamic."""

    def other(t: Tensor, dynamic: Mapping[int, str]) -> Tensor:
        t = torch.cat([t, t[:1]]) if 0 in dynamic else t
        return t[:, :-1] if 1 in dynamic else t

    return {k: other(t, axes.get(k, {})) for k, t in batch.items()}


# ---- many architectures, five targets ----

ARCHITECTURES = (
    "gpt2", "llama", "opt", "bert", "albert", "gemma2", "olmo2", "gpt_neox", "t5", "bart", "vit", "mixtral",
    "parallel, two norms", "hybrid", "layer scale", "deepnorm", "encoder-decoder, post", "norm in the branch alone",
    "norm over axis 1", "convnext block",
)  # fmt: skip
SAMPLE = (
    "gpt2", "bert", "encoder-decoder, post", "parallel, two norms", "hybrid", "norm in the branch alone",
    "norm over axis 1",
)  # fmt: skip
LEFT_OUT = {("norm in the branch alone", "none"): "LN110", ("convnext block", "none"): "LN110"}
"""Everything else converts in full."""


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("name", rows(ARCHITECTURES, sample=SAMPLE))
def test_architecture(name: str) -> None:
    program, batch = zoo.captured(name, depth=2 if name == "gpt_neox" else 1)  # a lone sum before a norm reads as post
    truth = [b.placement for b in program.network.blocks]
    before, graded, data = run(program.module(), batch), gradients(program.module(), batch), others(batch)
    moved = [to for to in TARGETS if set(truth) != {to}]
    assert len(moved) >= 4
    for to in moved:
        if code := LEFT_OUT.get((name, to)):
            with pytest.raises(lnr.Refused) as refused:
                place(program, to, data)
            assert {row["code"] for row in refused.value.refusals} == {code}
            continue
        result = place(program, to, data)
        new = result.program.module()
        report = result.report
        assert not report.refusals and report.edits > 0 and report.placement_after == to

        seen = result.program.network
        assert [b.placement for b in seen.blocks] == [to] * len(truth)
        assert [len(s.blocks) for s in seen.streams] == [len(s.blocks) for s in program.network.streams]

        # changed, and not beyond recognition
        after = run(new, batch)
        assert all(torch.isfinite(t).all() for t in after)
        assert [t.shape for t in after] == [t.shape for t in before]
        assert away(before, after) > 1e-5
        assert 1e-5 < report.drift["relative_error"] < 0.8

        # every parameter that could be trained can be, and every new one
        grads = gradients(new, batch)
        ungraded = {n for n, _ in program.module().named_parameters(remove_duplicate=False)} - graded.keys()
        wanted = {n for n, _ in new.named_parameters(remove_duplicate=False)} - ungraded
        assert wanted <= grads.keys()
        assert all(torch.isfinite(g).all() for g in grads.values())
        assert all(grads[n].any() for n in wanted - graded.keys())

        # nothing but the norms taken away lost its name
        lost = graded.keys() - grads.keys() - tied(program.module())  # ties have a test of their own
        assert len(lost) <= 2 * len(truth) and all(graded[n].dim() == 1 for n in lost)

        # other sizes where the original ran at other sizes
        axes = program.dynamic_axes()
        assert result.program.dynamic_axes() == axes and any(axes.values())
        more = resized(batch, axes)
        assert away(run(new, {k: t[:2] for k, t in more.items()}), [t[:2] for t in run(new, more)]) < 1e-4
    untouched = run(program.module(), batch)
    assert all(torch.equal(a, b) for a, b in zip(before, untouched, strict=True))


@pytest.mark.parametrize(("name", "to"), rows(product(ARCHITECTURES, TARGETS), sample=product(("llama",), TARGETS)))
def test_what_comes_out_is_seen_alike_when_captured_afresh(name: str, to: str) -> None:
    """The picture of a result is lifted from its edited graph; a capture of its module says the same."""
    program, batch = zoo.captured(name, depth=1)
    result = place(program, to, others(batch), partial=True)
    fresh = lnr.capture(result.program.module(), kwargs=batch, dynamic_shapes=dict.fromkeys(batch)).network
    assert text.render(fresh) == text.render(result.program.network)


@pytest.mark.parametrize("to", TARGETS)
def test_a_program_that_changes_per_block_ends_in_one_placement(to: str) -> None:
    module, args = nets.NETS["mixed (Mix-LN)"].build()
    result = place(lnr.capture(module, args), to)
    assert {b.placement.value for b in result.program.network.blocks} == {to}


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_tied_parameters_keep_both_names(name: str) -> None:
    module, batch = build(name)
    program = lnr.capture(module, kwargs=batch)
    new = place(program, "peri").program.module()
    old = dict(program.module().named_parameters(remove_duplicate=False))
    kept = dict(new.named_parameters(remove_duplicate=False))
    assert old.keys() <= kept.keys()
    assert len({id(kept[n]) for n in tied(program.module())}) == 1


def test_a_zero_row_of_the_embedding_gives_no_nan_and_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    module, batch = zoo.build("llama", depth=1)
    with torch.no_grad():
        module.model.embed_tokens.weight[0] = 0  # as padding has it
    data = others(batch)
    data[0]["input_ids"][0, 0] = 0
    result = place(lnr.capture(module, kwargs=batch), "post", data)
    assert all(s.error is None or s.error == s.error for s in result.report.sites)
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


# ---- exact where it is exact ----


def constant(name: str, dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a net of constant branch RMS; in float64 with norms that do not cast and maps that are orthogonal."""
    module, args = nets.NETS[name].build()
    if dtype == torch.float32:
        return module, args
    for residual in module.layers:
        assert isinstance(residual.branch, branches.Constant)
        if residual.branch.out is not None:
            v = torch.randn(WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            v -= v.mean()
            reflection = torch.eye(WIDTH, dtype=torch.float64) - 2 * torch.outer(v, v) / (v @ v)
            residual.branch.out = nn.Parameter(reflection)
        if not isinstance(residual.inn, nn.LayerNorm):
            residual.inn = nn.RMSNorm(WIDTH, 1e-6)
    module.final = nn.LayerNorm(WIDTH)
    return randomise(module, 1).double(), args


CONSTANT = [n for n in nets.NETS if n.startswith("constant")]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-9)], ids=["fp32", "fp64"])
@pytest.mark.parametrize("name", rows(CONSTANT, sample=CONSTANT[:2]))
def test_branches_of_constant_rms_convert_without_error(name: str, dtype: torch.dtype, bound: float) -> None:
    module, args = constant(name, dtype)
    batch = zoo.named(module, args)
    program = lnr.capture(module, kwargs=batch)
    peri = place(program, "peri").program
    back = place(peri, "pre").program
    assert [p.network.placement for p in (program, peri, back)] == ["pre", "peri", "pre"]
    want = run(program.module(), batch)
    assert away(want, run(peri.module(), batch)) < bound
    assert away(want, run(back.module(), batch)) < bound


@pytest.mark.parametrize(
    ("name", "to"),
    [("pre", "pre"), ("post", "post"), ("peri", "peri"), ("output", "output"), ("none", "none"), ("gpt2", "pre"),
     ("bert", "post"), ("gemma2", "peri"), ("olmo2", "output"), ("encoder-decoder, pre", "pre")],
)  # fmt: skip
def test_the_placement_that_a_model_has_is_left_alone(name: str, to: str) -> None:
    program, batch = zoo.captured(name, depth=1)
    result = place(program, to)
    assert result.report.edits == 0 and not result.report.refusals and result.report.drift is None
    assert {row.site for row in result.report.not_applicable} >= {b.name for b in program.network.blocks}
    pairs = zip(run(program.module(), batch), run(result.program.module(), batch), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert str(result.program.stream) == str(program.stream)


@pytest.mark.parametrize("name", ["pre", "pre rms", "llama", "opt", "gpt2"])
def test_there_and_back_gives_the_picture_back(name: str) -> None:
    program, batch = zoo.captured(name, depth=1)
    program = lnr.Pipeline.parse("canonicalize").run(program).program
    back = lnr.Pipeline.parse("place{to=peri},place{to=pre}").run(program, others(batch)).program
    assert str(back.stream) == str(program.stream)


# ---- calibrated against naive, on trained weights ----


class Naive(nn.Module):
    """Run demo:tinygpt with norms moved by hand: unit gains put in, gains and biases taken out with their norm."""

    def __init__(self, model: Any, to: str) -> None:
        super().__init__()
        self.model, self.to = model, to

    def forward(self, input_ids: Tensor) -> Tensor:
        m = self.model
        x = m.tok(input_ids) + m.pos(torch.arange(input_ids.shape[1]))
        for norm, branch in chain(*(((b.norm1, b.attn), (b.norm2, b.mlp)) for b in m.blocks)):
            added = branch(norm(x) if self.to == "peri" else x)
            x = x + (nn.functional.layer_norm(added, x.shape[-1:]) if self.to in ("peri", "output") else added)
        return m.head(m.norm(x))


@functools.cache
def tinygpt() -> tuple[nn.Module, Any, list[Batch], list[Batch]]:
    """Return the demo model, its program, calibration batches and held-out ones."""
    model, data = demo.load("tinygpt"), demo.calibration(batches=4)
    ids = torch.tensor(list(demo.heldout_text()[: 16 * 128])).reshape(-1, 128)
    return model, lnr.capture(model, kwargs=data[0]), data, [{"input_ids": rows} for rows in ids.split(8)]


def moved_by(module: nn.Module) -> float:
    """Return the relative error of a converted demo model's logits on held-out text."""
    model, _, _, text = tinygpt()
    return drift(model, module, text, True).relative_error


def shuffled(batches: list[Batch]) -> list[Batch]:
    """Return the same tokens at random places."""
    g = torch.Generator().manual_seed(0)
    return [
        {k: t.flatten()[torch.randperm(t.numel(), generator=g)].reshape(t.shape)} for b in batches for k, t in b.items()
    ]


@pytest.mark.parametrize("to", rows(["peri", "output", "none"], sample=["output"]))
def test_calibration_halves_the_naive_drift_and_needs_true_text(to: str) -> None:
    model, program, data, _ = tinygpt()
    result = place(program, to, data, fit="constants")
    module = result.program.module()
    fitted = moved_by(module)
    assert fitted <= 0.5 * moved_by(Naive(model, to))
    if to != "output":
        scrambled = place(program, to, shuffled(data), fit="constants").program.module()
        text = demo.heldout_text()
        assert fitted < moved_by(scrambled)
        assert demo.loss(module, text, limit=48000) < demo.loss(scrambled, text, limit=48000)
    if to != "none":  # the same conversion with its fitted gains set to one
        old = {n for n, _ in program.module().named_parameters()}
        new = [(n, p) for n, p in module.named_parameters() if n not in old]
        assert len(new) >= len(program.network.blocks)
        with torch.no_grad():
            for name, parameter in new:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        assert fitted <= 0.5 * moved_by(module)


# ---- refusals ----


class Batched(nn.Module):
    """Norm channels that come last by statistics of the batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


def batch_normed() -> nn.Module:
    return blocks.Net(*(blocks.Residual(branches.Mlp(), inn=Batched) for _ in range(3)), final=layer)


def dead() -> nn.Module:
    module = blocks.pre()
    nn.init.zeros_(module.layers[1].branch.down.weight)
    nn.init.zeros_(module.layers[1].branch.down.bias)
    return module


def parallel() -> nn.Module:
    return nets.NETS["parallel, two norms"].build()[0]


Refusing = tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]], str, dict[str, str], set[str]]
IDS = nets.NETS["pre"].inputs
REFUSED: dict[str, Refusing] = {
    "no residuals": (beyond.Plain, nets._floats, "peri", {}, {"LN201"}),
    "batch norm": (batch_normed, IDS, "none", {}, {"LN111"}),
    "dead branch": (dead, IDS, "peri", {}, {"LN112"}),
    "half of a sum": (parallel, IDS, "post", {"blocks": "0"}, {"LN113"}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_change_nothing_and_are_listed_when_partial(case: str) -> None:
    make, inputs, to, options, codes = REFUSED[case]
    torch.manual_seed(0)
    module = make().eval()
    batch = zoo.named(module, inputs())
    program = lnr.capture(module, kwargs=batch)
    before, text = run(program.module(), batch), str(program.stream)
    state = {n: p.detach().clone() for n, p in program.module().named_parameters()}

    with pytest.raises(lnr.Refused) as refused:
        place(program, to, **options)
    rows = refused.value.refusals
    assert {row["code"] for row in rows} & codes and all(row["why"] and row["remedy"] for row in rows)
    assert all(row["code"] in codes | {"LN113"} for row in rows)
    assert str(program.stream) == text
    assert all(torch.equal(p, state[n]) for n, p in program.module().named_parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, run(program.module(), batch), strict=True))

    result = place(program, to, partial=True, **options)
    assert {r.code for r in result.report.refusals} & codes
    after = run(result.program.module(), batch)
    assert all(torch.isfinite(t).all() for t in after)
    sites = {r.site for r in result.report.refusals}
    old = {b.name: b.placement for b in program.network.blocks}
    for block in result.program.network.blocks:
        assert block.placement == (old[block.name] if block.name in sites or options else to)
    if result.report.edits == 0:
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_dead_branch_does_not_keep_the_others_from_peri() -> None:
    torch.manual_seed(0)
    program = lnr.capture(dead().eval(), IDS())
    result = place(program, "peri", partial=True)
    assert [b.placement.value for b in result.program.network.blocks] == ["peri", "pre", "peri", "peri"]


# ---- low precision ----


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", rows(["pre", "post", "gpt2"], sample=["pre"]))
def test_low_precision_converts_to_finite_outputs(name: str, dtype: torch.dtype) -> None:
    module, batch = build(name)
    program = lnr.capture(module.to(dtype), kwargs=batch)
    for to in ("peri", "post" if name != "post" else "pre", "none"):
        result = place(program, to)
        out = run(result.program.module(), batch)
        assert out[0].dtype is dtype and all(torch.isfinite(t).all() for t in out)
        assert {p.dtype for p in result.program.module().parameters()} == {dtype}
        assert result.report.drift["relative_error"] < 1


# ---- trunks whose tokens come and go, and what mixes them ----

CUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "every other": lambda x: x[:, ::2],
    "the first": lambda x: x[:, :3],
    "all but the first": lambda x: x[:, 1:],
    "one row": lambda x: x[:1],
    "turned round": lambda x: x.flip(1),
}


class Cut(nn.Module):
    """Take tokens away, or change their places, between the blocks of a Pre-LN net (Funnel Transformer)."""

    def __init__(self, cut: str) -> None:
        super().__init__()
        self.cut, self.start, self.head = CUTS[cut], nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.Sequential(*blocks.stack(inn=layer))
        self.final = layer(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        half = len(self.blocks) // 2
        return self.head(self.final(self.blocks[half:](self.cut(self.blocks[:half](self.start(x))))))


@pytest.mark.parametrize("to", ("peri", "output", "none"))
@pytest.mark.parametrize("cut", rows(CUTS, sample=("every other", "one row")))
def test_tokens_that_come_and_go(cut: str, to: str) -> None:
    torch.manual_seed(0)
    program = lnr.capture(Cut(cut).eval(), (torch.randn(2, 6, 5),))
    result = place(program, to, [(torch.randn(2, 6, 5),) for _ in range(3)], fit="constants")
    assert result.report.placement_after == to and not result.report.refusals


class Mixed(nn.Module):
    """Mix tokens by one linear map and channels by another, in blocks with norms (MLP-Mixer) or factors (ResMLP)."""

    def __init__(self, norms: bool, tokens: int, width: int) -> None:
        super().__init__()
        self.start, self.head = nn.Linear(5, width), nn.Linear(width, 3)
        self.norms = nn.ModuleList(nn.LayerNorm(width) if norms else nn.Identity() for _ in range(4))
        self.maps = nn.ModuleList(nn.Linear(n, n) for n in (tokens, width, tokens, width))
        self.gains = nn.ParameterList(torch.rand(width) + 0.5 for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for i, (norm, linear, gain) in enumerate(zip(self.norms, self.maps, self.gains, strict=True)):
            u = norm(x)
            x = x + gain * (linear(u) if i % 2 else linear(u.transpose(1, 2)).transpose(1, 2))
        return self.head(x)


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("norms", (True, False))
def test_mixers_have_their_channels_where_they_are(norms: bool, to: str) -> None:
    torch.manual_seed(0)
    program = lnr.capture(Mixed(norms, 9, 16).eval(), (torch.randn(2, 9, 5),))
    assert [s.width for s in program.network.streams] == [16]
    result = place(program, to, [(torch.randn(2, 9, 5),) for _ in range(2)], fit="constants", partial=True)
    assert result.report.placement_after == to or result.report.refusals
    assert [s.width for s in result.program.network.streams] == [16]


class Within(nn.Module):
    """Hold a residual sum in a branch, whose own norm reads the branch's: `h = n(x); h = h + g(m(h)); x + f(h)`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = layer(WIDTH), layer(WIDTH)
        self.one, self.two = branches.Mlp(), branches.Mlp()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.two(h + self.one(self.inner(h)))


@pytest.mark.parametrize("to", TARGETS[1:])
def test_a_norm_that_reads_a_norm_does_not_take_its_place(to: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, WIDTH), Within(), Within(), layer(WIDTH), nn.Linear(WIDTH, 3))
    program = lnr.capture(net.eval(), (torch.randn(2, 6, 5),))
    report = place(program, to, [(torch.randn(2, 6, 5),)], fit="constants", partial=True).report
    assert report.placement_after == to or {r.code for r in report.refusals} == {"LN110"}
