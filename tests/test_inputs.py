"""Inputs come from `--input`, or are inferred by what the model really reads; each guess is a call that works."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lnrewrite as lnr
from lnrewrite.backends.inputs import draw_one
from lnrewrite.data.infer import infer_inputs, vocabulary_of
from lnrewrite.data.inputs import Inputs, parse_inputs
from lnrewrite.errors import LnrewriteError
from lnrewrite.ir.inputs import Input, content_of


def fails(code: str, call: Any) -> LnrewriteError:
    with pytest.raises(LnrewriteError) as caught:
        call()
    assert caught.value.code == code, caught.value
    return caught.value


# --- the grammar


def test_sizes_and_names() -> None:
    found = parse_inputs(["x=f32[batch,seq,8]", "ids=int64[batch,seq]", "other=bf16[batch, mem ,3]", "scale=float[]"])
    x, ids, other, scale = (found.kwargs[name] for name in ("x", "ids", "other", "scale"))
    assert (x.dtype, ids.dtype, other.dtype) == (torch.float32, torch.int64, torch.bfloat16)
    assert x.shape == (2, 16, 8) and ids.shape == (2, 16) and scale.shape == ()
    assert other.shape[0] == 2 and other.shape[1] not in (2, 16)
    assert found.dynamic == {
        "x": {0: "batch", 1: "seq"},
        "ids": {0: "batch", 1: "seq"},
        "other": {0: "batch", 1: "mem"},
    }
    assert found.args == ()


def test_distinct_names_have_distinct_sizes() -> None:
    names = ["b", "batch", "n", "seq", "time", "mem"]
    shape = parse_inputs([f"x=float32[{','.join(names)}]"]).kwargs["x"].shape
    assert len(set(shape)) == len(names) and shape[0] == 2


def test_numbers_stay_fixed() -> None:
    found = parse_inputs(["pixels=float16[1,3,7,7]"])
    assert found.dynamic == {} and found.kwargs["pixels"].shape == (1, 3, 7, 7)


def test_seed_and_vocabulary() -> None:
    specs = ["ids=int64[64,64]", "x=float32[4]"]
    one, same, other = (parse_inputs(specs, seed=seed, vocabulary=50).kwargs for seed in (1, 1, 2))
    assert torch.equal(one["ids"], same["ids"]) and torch.equal(one["x"], same["x"])
    assert not torch.equal(one["ids"], other["ids"])
    assert one["ids"].min() == 0 and one["ids"].max() == 49


def test_names_that_say_what_they_hold() -> None:
    generator = torch.Generator().manual_seed(0)

    def made(name: str, dtype: str, rows: int) -> Tensor:
        return draw_one(Input(name, dtype, (2, 3), (2, 3), content_of(name, dtype), rows), generator)

    assert made("attention_mask", "int64", 9).tolist() == [[1, 1, 1]] * 2
    assert made("token_type_ids", "int64", 9).tolist() == [[0, 0, 0]] * 2
    assert made("position_ids", "int64", 9).tolist() == [[0, 1, 2]] * 2
    assert made("ids", "uint8", 10**6).dtype is torch.uint8


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ("x", "neither"),
        ("x=float32", "neither"),
        ("x=flaot32[2]", "flaot32"),
        ("x=float32[2,-1]", "-1"),
        ("x=float32[0]", "'0'"),
        ("x=float32[2,]", "''"),
        ("x=float32[a b]", "a b"),
        ("missing.npz", "neither"),
    ],
)
def test_wrong_specifications(spec: str, word: str) -> None:
    assert word in fails("LN021", lambda: parse_inputs([spec])).why


def test_a_name_given_twice() -> None:
    assert "twice" in fails("LN021", lambda: parse_inputs(["x=float32[2]", "x=float32[3]"])).why
    assert "did you mean float32" in fails("LN021", lambda: parse_inputs(["x=flaot32[2]"])).remedy


def test_files(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", ids=np.arange(6).reshape(2, 3), mask=np.ones((2, 3), bool))
    torch.save({"x": torch.ones(2)}, tmp_path / "b.pt")
    torch.save((torch.ones(2), torch.zeros(3)), tmp_path / "c.pt")
    found = parse_inputs([str(tmp_path / "a.npz"), str(tmp_path / "b.pt"), str(tmp_path / "c.pt")])
    assert found.kwargs["ids"].tolist() == [[0, 1, 2], [3, 4, 5]] and found.kwargs["mask"].dtype is torch.bool
    assert set(found.kwargs) == {"ids", "mask", "x"} and [len(t) for t in found.args] == [2, 3]


class Trap:
    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self.sign,)


def test_files_are_never_unpickled(tmp_path: Path) -> None:
    sign = tmp_path / "sign"
    np.savez(tmp_path / "a.npz", x=np.array([Trap(sign)], dtype=object))
    torch.save({"x": Trap(sign)}, tmp_path / "b.pt")
    torch.save({"x": 3}, tmp_path / "c.pt")
    (tmp_path / "d.pt").write_bytes(b"nothing")
    for name in ("a.npz", "b.pt", "c.pt", "d.pt"):
        fails("LN021", lambda name=name: parse_inputs([str(tmp_path / name)]))
    assert not sign.exists()


# --- inference from layers


def checked(module: nn.Module, name: str) -> Tensor:
    """Infer the one input of a module, check that the call works and changed nothing, and return the tensor."""
    before = torch.random.get_rng_state()
    state = {k: v.clone() for k, v in module.state_dict().items()}
    found = infer_inputs(module)
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(v, state[k]) for k, v in module.state_dict().items())
    assert list(found.kwargs) == [name] and 0 in found.dynamic[name]
    module.eval()(**found.kwargs)
    assert torch.equal(infer_inputs(module).kwargs[name], found.kwargs[name])
    return found.kwargs[name]


class Text(nn.Module):
    """Ids through a position table that is registered first, and is shorter and larger than tests expect."""

    def __init__(self, positions: int, vocabulary: int) -> None:
        super().__init__()
        self.types = nn.Embedding(2, 4)
        self.positions = nn.Embedding(positions, 4)
        self.tokens = nn.Embedding(vocabulary, 4)
        self.head = nn.Linear(4, vocabulary)

    def forward(self, token_ids: Tensor, scale: float = 1.0) -> Tensor:
        x = self.tokens(token_ids) * scale + self.positions(torch.arange(token_ids.shape[1]))
        return self.head(x + self.types(torch.zeros_like(token_ids)))


@pytest.mark.parametrize(("positions", "vocabulary"), [(64, 300), (300, 64), (64, 20), (9, 50)])
def test_embeddings(positions: int, vocabulary: int) -> None:
    ids = checked(Text(positions, vocabulary), "token_ids")
    assert ids.dtype is torch.int64 and ids.shape == (2, min(16, 8 if positions < 16 else 16))
    assert 2 < ids.max() < vocabulary
    if vocabulary > positions > 16:
        assert ids.max() > positions  # drawn for the tokens' table, not for the positions'


def test_linear_and_its_fall_back() -> None:
    assert checked(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3)), "input").shape == (2, 16, 6)
    assert checked(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)), "input").shape == (2, 6)


def test_modes_are_put_back() -> None:
    module = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Dropout()).train()
    module[2].eval()
    infer_inputs(module)
    assert module.training and module[1].training and not module[2].training
    assert module[1].num_batches_tracked == 0


def test_convolutions() -> None:
    small = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 26 * 26, 2))
    assert checked(small, "input").shape == (2, 3, 28, 28)
    assert checked(nn.Sequential(nn.Conv2d(1, 4, 3)), "input").shape == (2, 1, 32, 32)
    assert checked(nn.Sequential(nn.Conv1d(5, 4, 3)), "input").shape == (2, 5, 64)


def test_half_precision_gets_half_inputs() -> None:
    assert checked(nn.Sequential(nn.Linear(4, 4)).bfloat16(), "input").dtype is torch.bfloat16


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, left: Tensor, right_ids: Tensor, flag: bool = True) -> Tensor:
        return self.lin(left) + right_ids


class Picky(nn.Module):
    def forward(self, x, mask):  # type: ignore[no-untyped-def]
        return x + mask


def test_what_is_missing_is_named() -> None:
    error = fails("LN020", lambda: infer_inputs(Two()))
    assert "left, right_ids are missing" in error.why and "flag" not in str(error)
    assert "--input left=float32[batch,seq,64] --input right_ids=int64[batch,seq]" in error.remedy
    assert "Two" in error.what


def test_inputs_that_a_forward_does_not_take() -> None:
    for args, kwargs, word in [
        ((), {"x": 1}, "'mask'"),
        ((1, 2), {"other": 3}, "'other'"),
        ((1, 2, 3), {}, "too many"),
    ]:
        error = fails("LN020", lambda a=args, k=kwargs: lnr.capture(Picky(), a, k))
        assert word in error.why and "(x, mask)" in error.remedy


def test_a_model_that_always_fails() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("out of cheese")

    assert "out of cheese" in fails("LN020", lambda: infer_inputs(Broken())).why
    assert "--input input=" in fails("LN020", lambda: infer_inputs(nn.Identity())).remedy


def test_the_demo() -> None:
    from lnrewrite import demo

    module = demo.load("tinygpt")
    ids = checked(module, "input_ids")
    assert ids.shape == (2, 16) and ids.max() > 128 and vocabulary_of(module) == 256


# --- inference from transformers configs


def small(name: str) -> nn.Module:
    import transformers as t

    text = {"vocab_size": 40, "pad_token_id": 1}
    makers: dict[str, Any] = {
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=10, vocab_size=40)),
        "t5": lambda: t.T5ForConditionalGeneration(
            t.T5Config(d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2, decoder_start_token_id=0, **text)
        ),
        "vit": lambda: t.ViTModel(
            t.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=48, patch_size=8)
        ),
        "whisper": lambda: t.WhisperForConditionalGeneration(
            t.WhisperConfig(
                d_model=16,
                encoder_layers=1,
                decoder_layers=1,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                max_source_positions=20,
                num_mel_bins=8,
                decoder_start_token_id=2,
                **text,
            )  # fmt: skip
        ),
        "wav2vec2": lambda: t.Wav2Vec2Model(
            t.Wav2Vec2Config(
                hidden_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                conv_dim=[8, 8],
                conv_stride=[5, 2],
                conv_kernel=[10, 3],
                num_conv_pos_embeddings=16,
                num_conv_pos_embedding_groups=4,
            )  # fmt: skip
        ),
    }
    return makers[name]().eval()


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("gpt2", {"input_ids": (2, 8)}),
        ("t5", {"input_ids": (2, 16), "decoder_input_ids": (2, 16)}),
        ("vit", {"pixel_values": (2, 3, 48, 48)}),
        ("whisper", {"input_features": (2, 8, 40), "decoder_input_ids": (2, 16)}),
        ("wav2vec2", {"input_values": (2, 4000)}),
    ],
)
def test_transformers_models(name: str, shapes: dict[str, tuple[int, ...]]) -> None:
    module = small(name)
    found: Inputs = infer_inputs(module, seed=3)
    assert {k: tuple(v.shape) for k, v in found.kwargs.items()} == shapes
    with torch.no_grad():
        module(**found.kwargs)
    again = infer_inputs(module, seed=3)
    assert all(torch.equal(v, again.kwargs[k]) for k, v in found.kwargs.items())
    if "input_ids" in shapes:
        assert found.dynamic["input_ids"] == {0: "batch", 1: "sequence"}
        assert 20 < found.kwargs["input_ids"].max() < 40
        assert name != "t5" or not (found.kwargs["input_ids"] == 1).any()  # never the padding id


@pytest.mark.parametrize("order", permutations(("ids", "flag", "other")))
def test_sizes_are_free_in_whatever_order_inputs_are_given(order: tuple[str, ...]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 4)

        def forward(self, ids: Tensor, flag: bool = True, other: Tensor | None = None) -> Tensor:
            return self.table(ids if flag else other)

    ids = torch.randint(9, (2, 5))
    given = {"ids": ids, "flag": False, "other": ids.flip(0)}
    program = lnr.capture(Net(), kwargs={name: given[name] for name in order})
    assert program.dynamic_axes()["other"].keys() == {0, 1} and not program.notes


@pytest.mark.parametrize(
    "more", [{"flag": True}, {"other": torch.ones(2, 5, 4)}, {"other": torch.ones(2, 5, 4), "flag": 1}]
)
@pytest.mark.parametrize("positional", (True, False))
def test_what_a_forward_takes_as_further_keywords(more: dict[str, Any], positional: bool) -> None:
    """Sizes stay free, tensors are inputs, constants are heeded, and the module is left as it was."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)

        def forward(self, x: Tensor, **rest: Any) -> Tensor:
            x = x + self.up(x) * (3 if rest.get("flag") else 1)
            return x + rest["other"] if "other" in rest else x

    module, x = Net(), torch.randn(2, 5, 4)
    program = lnr.capture(module, (x,) if positional else (), more if positional else {"x": x, **more})
    free = program.dynamic_axes()
    assert all(free[name].keys() == {0, 1} for name in ("x", *(set(more) & {"other"}))) and not program.notes
    longer = {name: torch.ones(3, 7, 4) if name == "other" else value for name, value in more.items()}
    x = torch.randn(3, 7, 4)
    torch.testing.assert_close(program.module()(x, **longer), module(x, **longer))
    assert "forward" not in vars(module)


def test_an_axis_of_one_size_fixes_no_other(tmp_path: Path) -> None:
    """Features beside tokens have one width; the length of the tokens stays free, in ONNX too."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.features = nn.Embedding(9, 4), nn.Linear(3, 4)

        def forward(self, ids: Tensor, features: Tensor) -> Tensor:
            return self.table(ids) + self.features(features)[:, None]

    program = lnr.capture(Net(), (torch.randint(9, (2, 6)), torch.randn(2, 3)))
    free = program.dynamic_axes()
    assert free["ids"].keys() == {0, 1} and free["features"].keys() == {0}
    assert program.notes == ("axis 1 of features is fixed at 3",)
    program.export(tmp_path / "net.onnx")
    assert lnr.load(tmp_path / "net.onnx").dynamic_axes()["ids"].keys() == {0, 1}


def test_too_many_shapes_by_remainders() -> None:
    """A length that is padded to chunks, and the chunks looped over, is fixed where following it would take minutes."""

    class Net(nn.Module):
        def __init__(self, steps: int) -> None:
            super().__init__()
            self.steps, self.up = steps, nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            chunks = nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 4))
            for _ in range(self.steps):
                chunks = chunks + 0.1
            return x + self.up(chunks)[:, : x.shape[1]]

    x, longer = torch.randn(2, 6, 4), torch.randn(5, 7, 4)
    nets = Net(2), Net(310)
    short, long = (lnr.capture(net, (x,)) for net in nets)
    assert short.dynamic_axes()["x"].keys() == {0, 1} and not short.notes
    torch.testing.assert_close(short.module()(longer), nets[0](longer))
    assert long.dynamic_axes()["x"].keys() == {0}
    assert "too many to follow" in long.notes[0] and "the sequence length is fixed" in long.notes[0]


class Complex(nn.Module):
    """A Pre-LN block of a net whose inputs, weights and outputs are complex, with real norms of both parts."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(16), nn.Linear(16, 16)
        self.into, self.out = nn.Linear(4, 8, dtype=dtype), nn.Linear(8, 3, dtype=dtype)

    def forward(self, z: Tensor) -> Tensor:
        x = torch.view_as_real(self.into(z)).flatten(-2)
        x = x + torch.tanh(self.up(self.norm(x)))
        return self.out(torch.view_as_complex(x.unflatten(-1, (8, 2))))


@pytest.mark.parametrize("dtype", (torch.complex64, torch.complex128))
def test_complex_numbers(dtype: torch.dtype) -> None:
    """They are made up as values, and compared in both parts."""
    module = Complex(dtype).eval()
    module.norm, module.up = (m.double() if dtype is torch.complex128 else m for m in (module.norm, module.up))
    nn.init.uniform_(module.norm.weight, 0.5, 1.5)
    program = lnr.capture(module, kwargs={"z": torch.randn(3, 5, 4, dtype=dtype)})
    (drawn, *_) = program.synthetic(0)
    assert drawn["z"].dtype is dtype and drawn["z"].imag.any()
    assert program.inspect()["norms"]["kinds"] == {"layer": 1}
    folded = lnr.Pipeline.parse("fold-affine").run(program).program
    assert lnr.verify(program, folded)["verdict"] == "within"
    with torch.no_grad():
        folded.module().out.bias += 0.1j
    assert lnr.verify(program, folded)["verdict"] == "different"


class Kept(nn.Module):
    """A Pre-LN block on the tokens that a mask keeps, and sums and quotients that are spelled anew for the picture."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.bias = nn.LayerNorm(8), nn.Parameter(torch.randn(8))
        self.one, self.two, self.three = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        y = x[keep]
        y = y + self.three(self.norm(y))
        z, gain = torch.tanh(self.one(y)), torch.sigmoid(self.two(y))
        z = (gain * z) / (z.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        return torch.addmm(z @ self.two.weight, y, self.one.weight) + torch.addmm(self.bias, y, self.one.weight)


def test_as_many_tokens_as_the_data_say() -> None:
    module, x, keep = Kept().eval(), torch.randn(2, 5, 8), torch.arange(10).reshape(2, 5) % 3 > 0
    program = lnr.capture(module, (x, keep))
    assert program.network.placement == "pre" and not program.fixed_paths
    folded = lnr.Pipeline.parse("fold-affine").run(program, partial=True).program.module()
    for other in (keep, ~keep):
        torch.testing.assert_close(folded(x, other), module(x, other))
