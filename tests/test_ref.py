"""The reference machine against straight numpy, and its edits against the algebra that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lnrewrite.ir import (
    Affine,
    Edit,
    FoldReader,
    Gain,
    Kind,
    Linear,
    Norm,
    Operation,
    Proposal,
    ScaleWriter,
    SetNorm,
    Stream,
    Vectors,
    Where,
    sums,
)
from lnrewrite.ir.text import parse
from lnrewrite.testing.reference import Floats, Machine, apply, fit, invent, normalize
from zoo.streams import machines

# ---- running: one straight forward pass for each placement ----


def layer(x: Floats, eps: float, gamma: Floats | float = 1.0, beta: Floats | float = 0.0) -> Floats:
    mean = x.mean(axis=1, keepdims=True)
    return (x - mean) / np.sqrt(((x - mean) ** 2).mean(axis=1, keepdims=True) + eps) * gamma + beta


def rms(x: Floats, eps: float, gamma: Floats | float = 1.0) -> Floats:
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + eps) * gamma


def mlp(p: dict[str, Floats], x: Floats, n: str = "") -> Floats:
    return np.tanh(x @ p[f"up{n}"].T + p[f"c{n}"]) @ p[f"down{n}"].T + p[f"d{n}"]


def attention(p: dict[str, Floats], x: Floats) -> Floats:
    h = np.tanh(np.concatenate([x @ p["q"].T, x @ p["k"].T], axis=1))
    mixed = np.array([h[t] + h[: t + 1].mean(axis=0) for t in range(len(h))])
    return (mixed[:, :6] + mixed[:, 6:]) @ p["o"]


CASES: dict[str, tuple[str, Callable[[dict[str, Floats]], Floats]]] = {
    "pre": (
        """
        stream s width=5
          source @E:1(table) @P:1(table)
          block b mlp pre
            in     layer(eps=0.01 gamma=@g beta=@t) -> @up:1+@c
            writes @down:0+@d
          final  rms(eps=0.001 gamma=1+@gf) -> @head:1
        """,
        lambda p: (
            rms((x := p["E"] + p["P"]) + mlp(p, layer(x, 0.01, p["g"], p["t"])), 0.001, 1 + p["gf"]) @ p["head"].T
        ),
    ),
    "post": (
        """
        stream s width=5
          source @E:1(table)
          embedding layer(eps=1e-05 gamma=@ge)
          block b mlp post scale=1.5
            reads  @up:1+@c
            writes @down:0+@d
            post   layer(eps=0.01 gamma=@g beta=@t) -> @head:1
        """,
        lambda p: layer(1.5 * (x := layer(p["E"], 1e-5, p["ge"])) + mlp(p, x), 0.01, p["g"], p["t"]) @ p["head"].T,
    ),
    "peri": (
        """
        stream s width=5
          source @E:1(table)
          block b attention peri
            in     rms(eps=0.01 gamma=@g) -> @q:1 @k:1
            out    rms(eps=0.02 gamma=@h)
            writes @o:1
        """,
        lambda p: (x := p["E"]) + rms(attention(p, rms(x, 0.01, p["g"])), 0.02, p["h"]),
    ),
    "output": (
        """
        stream s width=5
          source @E:1(table)
          block b mlp output
            reads  @up:1+@c
            writes @down:0+@d
            out    layer(eps=0.02 gamma=@h beta=@t)
        """,
        lambda p: (x := p["E"]) + layer(mlp(p, x), 0.02, p["h"], p["t"]),
    ),
    "inner": (
        """
        stream s width=5
          source @E:1(table)
          block b mlp pre
            in     rms(eps=0.01) -> @up:1
            inner  layer(eps=0.03 gamma=@i beta=@j) -> @down:1
            writes @down:0
        """,
        lambda p: (x := p["E"]) + layer(np.tanh(rms(x, 0.01) @ p["up"].T), 0.03, p["i"], p["j"]) @ p["down"].T,
    ),
    "parallel": (
        """
        stream s width=5
          source @E:1(table)
          block a mlp post group=0
            reads  @up:1+@c
            writes @down:0+@d
            post   rms(eps=0.01 gamma=@g)
          block b mlp post group=0
            reads  @up2:1+@c2
            writes @down2:0+@d2
            post   rms(eps=0.01 gamma=@g)
        """,
        lambda p: rms((x := p["E"]) + mlp(p, x) + mlp(p, x, "2"), 0.01, p["g"]),
    ),
}


def stream_of(text: str) -> Stream:
    return parse(text).streams[0]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_machine_agrees_with_straight_numpy(name: str, seed: int) -> None:
    text, forward = CASES[name]
    machine = invent(stream_of(text), seed)
    seen = machine.run()
    expected = forward(dict(machine.params))
    np.testing.assert_allclose(seen["logits" if "head" in text else "state"], expected, rtol=1e-12)


def test_taps_see_the_norms_output_and_the_states() -> None:
    stream = stream_of("""
        stream s width=4
          block b mlp pre
            in     rms(eps=0.01 gamma=@g) -> @up:1 taps cosine
            writes @down:0
          taps hidden
    """)
    machine = invent(stream, 0)
    seen = machine.run()
    np.testing.assert_allclose(seen["b.in -> cosine"], rms(machine.params["state"], 0.01, machine.params["g"]))
    np.testing.assert_array_equal(seen["b state"], seen["state"])


def test_every_column_counts_when_activations_are_fitted() -> None:
    for size in (1, 2, 3, 6, 9):
        assert np.all(fit(np.eye(6), size).sum(axis=1) == 1.0)


@pytest.mark.parametrize("kind", [Kind.BATCH, Kind.GROUP])
def test_norms_over_other_axes_do_not_run(kind: Kind) -> None:
    with pytest.raises(ValueError, match=f"cannot run a {kind} norm"):
        normalize(Norm(kind, 1e-5), np.ones((2, 3)), {})


@pytest.mark.parametrize("kind", [Kind.STD, Kind.L2])
def test_other_kinds_over_the_channels_do(kind: Kind) -> None:
    x = np.random.default_rng(0).normal(size=(2, 5)) + 1
    m = x - x.mean(1, keepdims=True)
    by_hand = {
        Kind.STD: m / (m.std(1) + 0.5)[:, None],
        Kind.L2: x / np.maximum(np.linalg.norm(x, axis=1), 0.5)[:, None],
    }
    np.testing.assert_allclose(normalize(Norm(kind, 0.5), x, {}), by_hand[kind])


@given(
    st.sampled_from((Kind.LAYER, Kind.RMS)),
    st.floats(1e-12, 1e-1),
    st.floats(1e-12, 1e-1),
    st.floats(1e-4, 1e3),
    st.integers(0, 2**31),
)
def test_norm_of_norm_is_one_norm_that_carries_eps(kind: Kind, e1: float, e2: float, size: float, seed: int) -> None:
    """N_e2(N_e1(x)) = N_e(x) / sqrt(1 + e2) with e = e1 * e2 / (1 + e2): exact, eps and all."""
    x = np.random.default_rng(seed).normal(size=(3, 7)) * size
    twice = normalize(Norm(kind, e2), normalize(Norm(kind, e1), x, {}), {})
    once = normalize(Norm(kind, e1 * e2 / (1 + e2)), x, {}) / np.sqrt(1 + e2)
    np.testing.assert_allclose(once, twice, rtol=1e-9)


def test_norm_of_norm_without_carrying_eps_is_not() -> None:
    x = np.random.default_rng(0).normal(size=(3, 16)) * 1e-2
    norm = Norm(Kind.RMS, 1e-5)
    once = normalize(norm, x, {})
    assert np.abs(normalize(norm, once, {}) / once - 1).max() > 1e-3


@given(machines())
def test_random_machines_run(machine: Machine) -> None:
    assert all(np.isfinite(value).all() for value in machine.run().values())


# ---- edits ----

TOY = """
stream s width=5
  source @E:1(table)
  embedding rms(eps=0.1 gamma=@ge)
  block a mlp pre
    in     layer(eps=0.1 gamma=@g beta=@t) -> @up.weight:1
    writes @down:0+@d
  block b mlp pre
    in     layer(eps=0.2) -> @up2:0+@c2
    writes @down2:1
  final  layer(eps=0.3) -> @head:1
"""


def toy(seed: int = 0) -> Machine:
    return invent(stream_of(TOY), seed)


def edited(machine: Machine, target: str, *operations: Operation, vectors: Vectors | None = None) -> Machine:
    return apply(machine, Proposal((Edit(target, operations),), vectors=vectors or Vectors()))


def same(a: Machine, b: Machine) -> bool:
    left, right = a.run(), b.run()
    return left.keys() == right.keys() and all(np.allclose(left[k], right[k], rtol=1e-10, atol=1e-12) for k in left)


def test_fold_reader_undone_by_its_inverse() -> None:
    machine, vectors = toy(), Vectors()
    g, t = machine.params["g"], machine.params["t"]
    reader = machine.stream.blocks[0].readers[0]
    scale, shift = vectors.add(1 / g), vectors.add(-t / g)
    folded = edited(machine, "a", FoldReader(reader, Gain("g"), Gain("t")))
    assert folded.stream.blocks[0].readers == (Linear("up.weight", 1, "up.bias"),)
    assert folded.stream.blocks[0].sites[0].readers == folded.stream.blocks[0].readers
    assert not same(machine, folded)
    assert same(machine, edited(folded, "a", FoldReader(reader, scale, shift), vectors=vectors))
    assert "up.bias" not in machine.params  # pure


def test_scale_writer_and_affine_at_out_say_the_same() -> None:
    machine, vectors = toy(), Vectors()
    scale = vectors.add(np.arange(1.0, 6.0))
    writer = machine.stream.blocks[0].writers[0]
    scaled = edited(machine, "a", ScaleWriter(writer, scale), vectors=vectors)
    assert same(scaled, edited(machine, "a", Affine(Where.OUT, scale), vectors=vectors))
    assert not same(scaled, machine)


def test_affine_at_in_stands_after_the_in_norm() -> None:
    machine = toy()
    bare = SetNorm(Where.IN, replace(machine.stream.blocks[0].sites[0].norm, gamma=None, beta=None))
    assert same(machine, edited(machine, "a", bare, Affine(Where.IN, Gain("g"), Gain("t"))))
    assert not same(machine, edited(machine, "a", bare))


def test_affine_at_post_stands_on_the_skip_alone() -> None:
    """x' = a * x + F(x): the skip's affine is the block's scale when it is one number."""
    machine, vectors = toy(), Vectors()
    on_skip = edited(machine, "b", Affine(Where.POST, vectors.add(np.full(5, 3.0))), vectors=vectors)
    scaled = replace(machine.stream.blocks[1], scale=3.0)
    stream = replace(machine.stream, blocks=(machine.stream.blocks[0], scaled))
    assert same(on_skip, replace(machine, stream=stream))
    parallel = invent(stream_of(CASES["parallel"][0]), 0)
    with pytest.raises(ValueError, match="the first of them speaks for it"):
        edited(parallel, "b", Affine(Where.POST))


def test_set_norm_stores_gains_in_the_norms_own_convention() -> None:
    machine, vectors = toy(), Vectors()
    gain = vectors.add(np.arange(1.0, 6.0))
    plain = edited(machine, "a", SetNorm(Where.OUT, Norm(Kind.RMS, 0.1, "a.gain"), gain), vectors=vectors)
    one = edited(machine, "a", SetNorm(Where.OUT, Norm(Kind.RMS, 0.1, "a.gain", plus_one=True), gain), vectors=vectors)
    unnamed = edited(machine, "a", SetNorm(Where.OUT, Norm(Kind.RMS, 0.1), gain), vectors=vectors)
    np.testing.assert_allclose(one.params["a.gain"] + 1, plain.params["a.gain"])
    assert same(plain, one)
    assert same(plain, unnamed)
    assert unnamed.stream.blocks[0].sites[1].norm.gamma == "a.out.gamma"
    kept = edited(plain, "a", SetNorm(Where.OUT, Norm(Kind.RMS, 0.1, "a.gain")))
    assert same(kept, plain)


def test_set_norm_puts_sites_in_dataflow_order_and_takes_them_away() -> None:
    machine = toy()
    bare = edited(machine, "a", SetNorm(Where.IN, None))
    assert bare.stream.blocks[0].placement == "none"
    assert bare.stream.blocks[0].readers == machine.stream.blocks[0].readers
    norm = Norm(Kind.RMS, 0.1)
    full = edited(bare, "a", *(SetNorm(where, norm) for where in (Where.POST, Where.OUT, Where.IN)))
    assert [s.where for s in full.stream.blocks[0].sites] == [Where.IN, Where.OUT, Where.POST]
    assert full.stream.blocks[0].sites[0].readers == machine.stream.blocks[0].readers
    with pytest.raises(ValueError, match="b has no out norm to remove"):
        edited(machine, "b", SetNorm(Where.OUT, None))
    with pytest.raises(ValueError, match="no block 'c'"):
        edited(machine, "c", SetNorm(Where.OUT, norm))


def test_values_are_read_before_the_first_edit() -> None:
    """Two sites of one 1 + w gain may both be rewritten: w becomes 1 + w once."""
    machine = invent(
        stream_of(TOY.replace("layer(eps=0.2)", "layer(eps=0.2 gamma=1+@g)").replace("gamma=@g ", "gamma=1+@g ")), 0
    )
    edits = []
    for block in machine.stream.blocks:
        norm = block.sites[0].norm
        beta = Gain(norm.beta) if norm.beta else None
        edits.append(Edit(block.name, (SetNorm(Where.IN, replace(norm, plus_one=False), Gain("g", True), beta),)))
    assert same(machine, apply(machine, Proposal(tuple(edits))))


POST = """\
stream s width=5
  source @E:1(table)
  embedding layer(eps=0.3 gamma=@ge) -> @up:1 @up2:1
  block a mlp post group=0
    post   layer(eps=0.1 gamma=@g beta=@t) -> @q:1
    reads  @up:1
    writes @down:0
  block b mlp post group=0
    post   layer(eps=0.1 gamma=@g beta=@t) -> @q:1
    reads  @up2:1
    writes @down2:0
  block c attention post
    post   layer(eps=0.2 gamma=@h beta=@u) -> @head:1
    reads  @q:1
    writes @o:0
"""


def test_sums_keep_execution_order() -> None:
    assert [[b.name for b in group] for group in sums(stream_of(POST))] == [["a", "b"], ["c"]]
