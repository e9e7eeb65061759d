"""Live modules: the plan carried out on a module's own Python, with caches, training and everything around kept."""

from __future__ import annotations

import copy
import inspect as python
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations

import lnrewrite as lnr
import zoo
from lnrewrite.backends.editor import Editor
from lnrewrite.backends.torch.editor import FxEditor
from lnrewrite.backends.torch.pieces import Piece
from lnrewrite.ir import Kind, Norm
from lnrewrite.recipe.runtime import build as build_pieces
from tiers import rows
from zoo.norms import randomise

PLACEMENTS = ("pre", "post", "peri", "output", "none")
HEADS = (
    "llama", "gpt2", "opt", "gemma2", "gpt_neox", "bloom", "olmo2", "mixtral", "opt.do_layer_norm_before=False", "t5",
    "bart", "whisper",
)  # fmt: skip
"""Twelve architectures with a causal or sequence-to-sequence head: pre, post, peri, output, parallel, experts."""

Inputs = dict[str, Tensor]


def build(name: str, depth: int = 1) -> tuple[Any, Inputs]:
    """Return one of HEADS, which may cache."""
    module, inputs = zoo.build(name, depth, head=True)
    module.config.use_cache = True
    if module.config.is_encoder_decoder:
        module.generation_config.decoder_start_token_id = 1
    return module, {k: v.contiguous() for k, v in inputs.items()}


def logits(module: Any, inputs: Inputs) -> Tensor:
    with torch.no_grad():
        return module(**inputs, use_cache=False).logits


def near(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-5 * b.abs().max())


def same_state(module: nn.Module, state: dict[str, Tensor]) -> bool:
    now = module.state_dict()
    return list(now) == list(state) and all(torch.equal(now[k], state[k]) for k in state)


def cloned(module: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in module.state_dict().items()}


@pytest.mark.parametrize("name", rows(HEADS, sample=("gpt2",)))
def test_outputs_equal_the_exported_route_and_the_cache_works(name: str) -> None:
    """`rewrite` itself proves each result against the rewritten graph (1e-5); one is compared with `convert` too."""
    module, inputs = build(name)
    state, before = cloned(module), logits(module, inputs)
    exported = lnr.convert(module, "peri", kwargs=inputs)(**inputs).logits
    for to in PLACEMENTS:
        report = lnr.rewrite(module, to=to, kwargs=inputs)
        if to == "peri":
            assert near(logits(module, inputs), exported)
        assert not near(logits(module, inputs), before) or not report.edits
        given = {k: v for k, v in inputs.items() if k in ("input_ids", "input_features")}
        how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        with_cache = module.generate(**given, use_cache=True, **how)
        assert torch.equal(with_cache, module.generate(**given, use_cache=False, **how))
        if report.edits:
            lnr.unrewrite(module)
        assert same_state(module, state) and torch.equal(logits(module, inputs), before)


@pytest.mark.parametrize("to", rows(PLACEMENTS, sample=("peri",)))
def test_norms_over_another_axis_than_the_last(to: str) -> None:
    module, inputs = zoo.build("norm over axis 1")
    exported = lnr.convert(module, to, kwargs=inputs)
    lnr.rewrite(module, to=to, kwargs=inputs)
    with torch.no_grad():
        assert near(module(**inputs), exported(**inputs))


TRAINED = tuple(product(("llama", "gpt2", "t5"), ("peri", "post")))


@pytest.mark.parametrize(("name", "to"), rows(TRAINED, sample=(("llama", "peri"),)))
def test_training_compiling_copying(name: str, to: str) -> None:
    module, inputs = build(name)
    lnr.rewrite(module, to=to, kwargs=inputs)
    want = logits(module, inputs)
    assert torch.equal(logits(copy.deepcopy(module), inputs), want)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert near(logits(compiled, inputs), want)
    module.train()
    module.gradient_checkpointing_enable()
    labels = inputs.get("decoder_input_ids", inputs["input_ids"])
    torch.manual_seed(0)
    module(**inputs, labels=labels).loss.backward()
    gradients = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    assert set(gradients) == {n for n, _ in module.named_parameters()}
    assert any("norm_out" in n or "norm_post" in n for n in gradients)
    module.gradient_checkpointing_disable()
    module.zero_grad()
    torch.manual_seed(0)
    module(**inputs, labels=labels).loss.backward()
    assert all(torch.allclose(p.grad, gradients[n], atol=1e-6) for n, p in module.named_parameters())


class Layer(nn.Module):
    """Two sublayers, in the styles people write sums in."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.a, self.drop = nn.Linear(8, 8), nn.Dropout(0.1)
        self.f = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor, times: float = 1.0) -> Tensor:
        x += self.drop(self.a(self.n1(x))) * times
        return x.add(self.drop(self.f(self.n2(x))))


class Net(nn.Module):
    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 11, bias=False)
        layer = Layer()
        self.layers = nn.ModuleList(layer if shared else Layer() for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@pytest.fixture
def net() -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    return randomise(Net()).eval(), {"ids": torch.randint(0, 11, (4, 6))}


def test_there_and_back_again_and_undone(net: tuple[nn.Module, Inputs]) -> None:
    """Post needs edited forwards: `x += f` and `x.add(f)`; back to pre edits the edited ones; a copy undoes its own."""
    module, inputs = net
    state, want = cloned(module), module(**inputs)
    lnr.rewrite(module, to="post", kwargs=inputs)
    assert lnr.capture(module, kwargs=inputs).inspect()["placement"] == "post"
    assert ".norm_post(x + " in python.getsource(python.unwrap(type(module.layers[0]).forward))
    assert type(module.layers[1]) is type(module.layers[2])
    assert "layers.0.a.norm_post.weight" in module.state_dict() and "layers.0.f_norm_post.weight" in module.state_dict()
    post, twin = module(**inputs), copy.deepcopy(module)
    lnr.rewrite(module, to="pre", kwargs=inputs)
    assert lnr.capture(module, kwargs=inputs).inspect()["placement"] == "pre"
    lnr.unrewrite(module)
    assert torch.equal(module(**inputs), post)
    lnr.unrewrite(module)
    assert same_state(module, state) and torch.equal(module(**inputs), want) and type(module.layers[0]) is Layer
    assert torch.equal(twin(**inputs), post)
    lnr.unrewrite(twin)
    assert same_state(twin, state) and torch.equal(twin(**inputs), want)


def test_parameters_stay_the_same_objects(net: tuple[nn.Module, Inputs]) -> None:
    module, inputs = net
    before = dict(module.named_parameters())
    lnr.rewrite(module, "fold-affine,layernorm-to-rmsnorm", kwargs=inputs)
    after = dict(module.named_parameters())
    assert {n for n in before if n in after} and all(after[n] is before[n] for n in before if n in after)
    exported = lnr.Pipeline.parse("fold-affine,layernorm-to-rmsnorm").run(lnr.capture(module, kwargs=inputs))
    assert exported.report.edits == 0 or near(exported.program.module()(**inputs), module(**inputs))


def test_a_folded_gain_stays_as_ones(net: tuple[nn.Module, Inputs]) -> None:
    module, inputs = net
    want = module(**inputs)
    lnr.rewrite(module, "fold-affine", kwargs=inputs)
    assert isinstance(module.layers[0].n1, nn.LayerNorm) and bool((module.layers[0].n1.weight == 1).all())
    assert bool((module.layers[0].n1.bias == 0).all())
    assert near(module(**inputs), want)


def test_convert_gives_a_living_copy(net: tuple[nn.Module, Inputs]) -> None:
    module, inputs = net
    state = cloned(module)
    living = lnr.convert(module, "peri", kwargs=inputs, live=True)
    assert isinstance(living, Net) and same_state(module, state)
    assert near(living(**inputs), lnr.convert(module, "peri", kwargs=inputs)(**inputs))


def test_train_mode_is_kept(net: tuple[nn.Module, Inputs]) -> None:
    module, inputs = net
    module.train()
    module.layers[1].eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lnr.rewrite(module, to="peri", kwargs=inputs)
    assert module.training and not module.layers[1].a.training and module.layers[0].a.norm_out.training


# ---- right, or refused with the reason, and nothing changed ----


def refused(module: nn.Module, inputs: Inputs, code: str, match: str, **how: Any) -> None:
    state, classes = cloned(module), [type(m) for m in module.modules()]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in module.modules()]
    with pytest.raises(lnr.LnrewriteError, match=match) as caught:
        lnr.rewrite(module, kwargs=inputs, **how)
    assert caught.value.code == code
    assert same_state(module, state) and [type(m) for m in module.modules()] == classes
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in module.modules()] == hooks
    assert "_lnrewrite" not in vars(module)


def test_a_module_that_is_called_several_times(net: tuple[nn.Module, Inputs]) -> None:
    refused(randomise(Net(shared=True)).eval(), net[1], "LN310", "layers.0.* is called 3 times", to="peri")


def test_a_slice_of_modules_some_of_which_are_shared(net: tuple[nn.Module, Inputs]) -> None:
    """torch calls what the slice holds by other names, and says nothing of what entered it."""

    class Sliced(Net):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.layers[0](self.embed(ids))
            for layer in self.layers[1:]:
                x = layer(x)
            return self.head(self.norm(x))

    module, inputs = net
    module.__class__ = Sliced
    module.layers[1].a = module.layers[0].a
    refused(module, inputs, "LN310", "the slice of list", to="peri")


def test_a_forward_without_source(net: tuple[nn.Module, Inputs]) -> None:
    module, inputs = net
    space: dict[str, Any] = {}
    exec("def forward(self, x):\n    x = x + self.a(self.n1(x))\n    return x + self.f(self.n2(x))", space)
    hidden = type("Hidden", (Layer,), {"forward": space["forward"]})
    for layer in module.layers:
        layer.__class__ = hidden
    refused(module, inputs, "LN310", "its source", to="post")
    want = lnr.convert(module, "peri", kwargs=inputs)(**inputs)
    lnr.rewrite(module, to="peri", kwargs=inputs)  # needs no source: the branch is a child's output
    assert near(module(**inputs), want)


def test_a_module_that_looks_at_its_norm() -> None:
    module, inputs = zoo.build("mamba", depth=1)
    refused(module, inputs, "LN313", "AttributeError", to="none")


def test_wrapped_modules(net: tuple[nn.Module, Inputs]) -> None:
    module, inputs = net
    module.layers[0] = torch.compile(module.layers[0], backend="eager")
    with pytest.raises(lnr.LnrewriteError, match="LN312 layers.0: it is compiled"):
        lnr.rewrite(module, to="peri", kwargs=inputs)


def test_a_module_without_weights() -> None:
    with torch.device("meta"):
        module = Net()
    with pytest.raises(lnr.LnrewriteError, match="LN026 calibration: the model is on the meta device"):
        lnr.rewrite(module, to="peri", kwargs={"ids": torch.zeros(4, 6, dtype=torch.long, device="meta")})


def test_the_fused_path_of_torch_does_not_pass_by_a_new_norm() -> None:
    """nn.TransformerEncoderLayer has a kernel of its own for inference, which reads the norms' weights itself."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True)
    module = randomise(nn.TransformerEncoder(layer, 2, nn.LayerNorm(16))).eval()
    inputs = {"src": torch.randn(2, 5, 16)}
    want = lnr.convert(module, "peri", kwargs=inputs)(**inputs)
    lnr.rewrite(module, to="peri", kwargs=inputs)
    with torch.inference_mode():
        assert near(module(**inputs), want)


ENCODERS = (
    (True, "none", False),
    (True, "output", True),
    (False, "none", True),
    (False, "peri", True),
    (False, "pre", False),
)


@pytest.mark.parametrize(("first", "to", "masked"), ENCODERS)
def test_the_encoder_of_torch(first: bool, to: str, masked: bool) -> None:
    """Its fused paths read `norm1.eps` in eval mode, and pack what a mask leaves into nested tensors."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=first)
    module = randomise(nn.TransformerEncoder(layer, 2, enable_nested_tensor=not first)).eval()
    inputs = {"src": torch.randn(2, 5, 16)}
    if masked:
        inputs["src_key_padding_mask"] = torch.arange(5) >= torch.tensor([[5], [3]])
    exported = lnr.convert(module, to, kwargs=inputs, fit="constants")
    fused = [(m.activation_relu_or_gelu, module.use_nested_tensor) for m in module.layers]
    with torch.no_grad():
        before = module(**inputs)
    lnr.rewrite(module, to=to, kwargs=inputs, fit="constants")
    for training, grad in product((False, True), repeat=2):
        with torch.set_grad_enabled(grad):
            assert near(module.train(training)(**inputs), exported.train(training)(**inputs))
    lnr.unrewrite(module.eval())
    assert [(m.activation_relu_or_gelu, module.use_nested_tensor) for m in module.layers] == fused
    with torch.no_grad():
        assert torch.equal(module(**inputs), before)


def test_wrong_plans_are_caught(net: tuple[nn.Module, Inputs], monkeypatch: pytest.MonkeyPatch) -> None:
    """Were a piece put somewhere else, or a value not carried over, the proof would tell."""
    from lnrewrite.live import rewriting as live

    module, inputs = net
    real = live.difference

    def forgetful(*args: Any) -> Any:
        recipe = real(*args)
        recipe.changes = [c for c in recipe.changes if c.get("after") != "layers.1.f"]
        return recipe

    monkeypatch.setattr(live, "difference", forgetful)
    refused(module, inputs, "LN313", "from what was planned", to="peri")


def test_hooks_that_are_there_already(net: tuple[nn.Module, Inputs]) -> None:
    """A hook that changes a branch is part of the model: the norm comes after it, and undoing leaves it alone."""
    module, inputs = net
    seen: list[Tensor] = []
    module.layers[0].a.register_forward_hook(lambda m, args, out: out * 1.5)
    module.layers[1].f.register_forward_pre_hook(lambda m, args: (args[0] + 0.25,))
    module.layers[2].register_forward_hook(lambda m, args, out: seen.append(out.detach()))
    want, before = lnr.convert(module, "peri", kwargs=inputs)(**inputs), module(**inputs)
    lnr.rewrite(module, to="peri", kwargs=inputs)
    assert near(module(**inputs), want) and not near(before, want)
    lnr.unrewrite(module)
    seen.clear()
    assert torch.equal(module(**inputs), before) and len(seen) == 1


def test_parametrised_layers(net: tuple[nn.Module, Inputs]) -> None:
    module, inputs = net
    parametrizations.weight_norm(module.layers[0].f[2])
    want = lnr.convert(module, "peri", kwargs=inputs)(**inputs)
    lnr.rewrite(module, to="peri", kwargs=inputs)
    assert near(module(**inputs), want)


def test_tied_heads() -> None:
    """A tied head stays tied where an edit allows; untied on request, its config says so, and undone it is tied."""
    module, inputs = build("gpt2")
    assert module.lm_head.weight is module.transformer.wte.weight
    lnr.rewrite(module, to="peri", kwargs=inputs)
    assert module.lm_head.weight is module.transformer.wte.weight
    lnr.unrewrite(module)
    lnr.rewrite(module, "untie,fold-affine{final=true}", kwargs=inputs)
    assert module.lm_head.weight is not module.transformer.wte.weight and not module.config.tie_word_embeddings
    lnr.unrewrite(module)
    assert module.lm_head.weight is module.transformer.wte.weight and module.config.tie_word_embeddings


def test_unrewrite_says_why_not(net: tuple[nn.Module, Inputs]) -> None:
    module, inputs = net
    with pytest.raises(lnr.LnrewriteError, match="LN314.*no rewrite"):
        lnr.unrewrite(module)
    lnr.rewrite(module, to="peri", kwargs=inputs, undo=False)
    with pytest.raises(lnr.LnrewriteError, match="LN314.*not kept"):
        lnr.unrewrite(module)
    other, _ = randomise(Net()).eval(), None
    lnr.rewrite(other, to="peri", kwargs=inputs)
    with torch.no_grad():
        other.layers[0].a.weight += 1
    with pytest.raises(lnr.LnrewriteError, match="LN314 weights: they have changed since"):
        lnr.unrewrite(other)


# ---- what the editor records ----


class Product(nn.Module):
    """x @ w of [batch, tokens, 6], a linear map that takes no bias, with vectors for pieces to use."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 6))
        self.gain, self.shift = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.gain + self.shift) @ self.w


def norm_of(kind: Kind, **how: Any) -> Norm:
    return Norm(kind, 1e-3, "gain", "shift", **how)


INSERTED: dict[str, list[Callable[[FxEditor, fx.Node], fx.Node]]] = {
    "value": [], "parameter": [],  # what is there already
    "norm": [
        lambda e, x: e.norm("n", x, norm_of(Kind.LAYER), x),
        lambda e, x: e.norm("n", x, norm_of(Kind.RMS, plus_one=True), x),
        lambda e, x: e.norm("n", x, replace(norm_of(Kind.RMS), axis=-2, gamma=None, beta=None), x),
        lambda e, x: e.norm("n", x, Norm(Kind.LAYER, 1e-3, over=norm_of(Kind.RMS)), x),
    ],
    "affine": [
        lambda e, x: e.affine(x, "gain", "shift"), lambda e, x: e.affine(x, "gain", None),
        lambda e, x: e.affine(x, None, "shift"),
    ],
    "center": [lambda e, x: e.center(x, -1), lambda e, x: e.center(x, -2)],
    "attach": [lambda e, x: e.attach(x, "shift")],
}  # fmt: skip
"""How an editor is asked for each of its operations that give a value."""
FROM_BLOCK_TO_BLOCK = {"size", "times"}
"""Operations of a value that one block makes and others take, which is no module's: the live route refuses (LN310)."""


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("plus_one", [True, False])
@pytest.mark.parametrize("axis", [-1, -2])
def test_a_class_of_norms_computes_one_thing(kind: str, weight: bool, bias: bool, plus_one: bool, axis: int) -> None:
    """Would catch: a server's kernel for one norm that is put for another of its class, which computes more.

    vLLM's transformers backend takes a class whose forward is `rms_norm` of the input, and nothing behind it, for an
    RMSNorm with the weight as it is stored.
    """
    how = {"kind": kind, "width": 6, "eps": 0.1, "weight": weight, "bias": bias, "plus_one": plus_one, "axis": axis}
    made = build_pieces([{"is": "norm", **how}])
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    graph = fx.symbolic_trace(made).graph
    last = next(iter(graph.output_node().all_input_nodes))
    bare = "rms_norm" in str(last.target) and next(iter(last.all_input_nodes)).op == "placeholder"
    plain = kind == "rms" and axis == -1 and not bias and not (weight and plus_one)
    assert (type(made).__name__ == "RMSNorm") is plain
    assert bare is plain
    x, w, b = torch.randn(2, 6, 6), getattr(made, "weight", None), getattr(made, "bias", None)
    y = x.transpose(axis, -1)
    y = y - y.mean(-1, keepdim=True) if kind == "layer" else y
    y = y / (y.square().mean(-1, keepdim=True) + 0.1).sqrt() * (1 if w is None else w + plus_one)
    assert torch.allclose(made(x), (y + (0 if b is None else b)).transpose(axis, -1), atol=1e-5)


def test_every_operation_of_the_editor_is_a_piece_that_a_module_computes() -> None:
    """A new operation of `Editor` stands here with its calls, or this fails: the live route would refuse it (LN310)."""
    torch.manual_seed(0)
    operations = {n for n, f in vars(Editor).items() if getattr(f, "__annotations__", {}).get("return") == "Handle"}
    assert operations - FROM_BLOCK_TO_BLOCK == set(INSERTED)
    x = torch.randn(2, 6, 6)
    for call in (call for calls in INSERTED.values() for call in calls):
        program = lnr.capture(Product(), (x,), dynamic_shapes={"x": None})
        editor = FxEditor(program.module())
        product = next(n for n in editor.graph.nodes if n.target is torch.ops.aten.matmul.default)
        edges = editor.readers(product)
        end = call(editor, product)
        for edge in edges:
            editor.redirect(edge, end)
        editor.graph.lint()
        after = copy.deepcopy(editor.module)
        after.recompile()
        nodes = {n.name: n for n in after.graph.nodes}
        node, modules = nodes[end.name], list[nn.Module]()
        while node is not nodes[product.name]:
            piece = Piece.of(node)
            assert piece is not None
            module = build_pieces([dict(piece.spec)])
            for leaf, name in piece.params:
                setattr(module, leaf, after.get_parameter(str(nodes[name].target)))
            modules.insert(0, module)
            node = nodes[piece.entry].args[0]
        with torch.no_grad():
            torch.testing.assert_close(nn.Sequential(*modules)(Product.forward(after, x)), after(x))


def test_a_node_that_records_no_piece_is_refused_by_name(
    net: tuple[nn.Module, Inputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Piece, "record", lambda piece, end: None)
    refused(*net, "LN310", "the new operation aten.layer_norm.default has no form as a module", to="peri")


class Counting(nn.Module):
    """A Pre-LN block that counts its calls in a buffer, which another buffer takes the place of."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        self.last = self.calls * 2
        return x + self.down(torch.relu(self.up(self.norm(x))))


def test_what_a_module_counts_is_left_alone() -> None:
    """Capturing and rewriting run a module: what its buffers count is what it was before."""
    module, x = Counting().eval(), torch.randn(2, 3, 8)
    module(x)
    lnr.capture(module, (x,))
    assert (float(module.calls), float(module.last)) == (1.0, 2.0)
    assert lnr.rewrite(module, "fold-affine", args=(x,)).edits
    assert (float(module.calls), float(module.last)) == (1.0, 2.0)


class Remembering(nn.Sequential):
    """Count the calls, and keep a running mean of what comes."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), Layer(), Layer(), nn.LayerNorm(8), nn.Linear(8, 3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean.lerp_(x.mean((0, 1)), 0.1)
        return super().forward(x - self.mean)


def test_buffers_are_as_they_were_whatever_is_done() -> None:
    """Programs are run to look at them and to prove them; what they count is their own, and given back to them too."""
    torch.manual_seed(0)
    module, inputs = randomise(Remembering().double()).eval(), {"x": torch.randn(3, 5, 4).double()}
    state = cloned(module)
    program = lnr.capture(module, kwargs=inputs)
    program.inspect()
    folded = lnr.Pipeline.parse("fold-affine").run(program, [inputs, inputs]).program
    lnr.verify(program, folded)
    lnr.verify(module, program, inputs=[inputs])
    lnr.diff(program, folded, data=[inputs])
    made = lnr.convert(module, "peri", kwargs=inputs)
    for held in (module, program.module(), folded.module(), made):
        assert not held.calls and not held.mean.any()
    first = made(**inputs).detach()
    assert made.calls == 1 and made.mean.any() and not torch.equal(made(**inputs), first)
    assert same_state(module, state)


def defaulted() -> nn.Module:
    """Return a net whose forward has defaults that are names of this function."""
    temperature = torch.tensor(2.0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x: Tensor, t: Tensor = temperature, *, more: Tensor = temperature) -> Tensor:
            return x + torch.tanh(self.up(self.norm(x))) / t * more

    return Net().eval()


def test_defaults_of_a_forward_stay_what_they_are() -> None:
    """They were evaluated where the class was made, and are not again where its forward is edited."""
    module, x = defaulted(), torch.randn(2, 5, 8)
    was = python.signature(module.forward)
    peri = lnr.convert(module, "peri", kwargs={"x": x}, live=True)
    assert type(peri) is not type(defaulted()) and python.signature(peri.forward) == was
    want = peri(x, torch.tensor(2.0), more=torch.tensor(2.0))
    torch.testing.assert_close(peri(x), want)


def test_undoing_a_rewrite_that_found_nothing_undoes_that_one() -> None:
    module, x = defaulted(), torch.randn(2, 5, 8)
    before = module(x)
    lnr.rewrite(module, to="peri", kwargs={"x": x})
    peri = module(x)
    assert not lnr.rewrite(module, "untie", kwargs={"x": x}).edits
    lnr.unrewrite(module)
    torch.testing.assert_close(module(x), peri)
    lnr.unrewrite(module)
    torch.testing.assert_close(module(x), before)


def test_a_parameter_that_a_forward_writes() -> None:
    """A table whose rows are kept short, in place, as they are looked up."""
    module = nn.Sequential(nn.Embedding(9, 8, max_norm=0.5), nn.LayerNorm(8), nn.Linear(8, 8)).eval()
    ids = torch.randint(9, (2, 5))
    program = lnr.capture(copy.deepcopy(module), (ids,))
    with torch.no_grad():
        torch.testing.assert_close(program.module()(ids), module(ids))
