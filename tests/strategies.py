"""Random residual networks for hypothesis, and how the tests run a pass on one with the reference machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
from hypothesis import strategies as st

from lnrewrite.pipeline import Context
from lnrewrite.plan import Refusal
from lnrewrite.ref import Machine, invent
from lnrewrite.stream import Block, Kind, Linear, Network, Norm, Placement, Site, Stream, Where

EPS = st.floats(1e-12, 1e-2)
SITES = {
    Placement.PRE: (Where.IN,),
    Placement.POST: (Where.POST,),
    Placement.PERI: (Where.IN, Where.OUT),
    Placement.OUTPUT: (Where.OUT,),
    Placement.INNER: (Where.INNER,),
    Placement.NONE: (),
}

# ---- networks that run ----


@st.composite
def norms(draw: Any, name: str, affine: bool | None = None) -> Norm:
    """Draw a layer or rms norm whose parameters, where it has any, are called after `name`."""
    kind = draw(st.sampled_from((Kind.LAYER, Kind.RMS)))
    gain, bias = (draw(st.booleans()) if affine is None else affine for _ in range(2))
    plus_one = gain and draw(st.booleans())
    return Norm(kind, draw(EPS), f"{name}.weight" if gain else None, f"{name}.bias" if bias else None, plus_one)


@st.composite
def _linears(draw: Any, name: str, axis: int, most: int) -> tuple[Linear, ...]:
    """Draw linears; PyTorch's layout, where readers hold the channels in axis 1 and writers in axis 0, or the other."""
    names = [f"{name}{i}.weight" for i in range(draw(st.integers(1, most)))]
    return tuple(
        Linear(
            n, axis if draw(st.booleans()) else 1 - axis, n.replace("weight", "bias") if draw(st.booleans()) else None
        )
        for n in names
    )


@st.composite
def _block(draw: Any, name: str, placement: Placement, group: int | None) -> Block:
    """Draw one block: norms for its placement, and now and then a Sub-LN norm or a tap."""
    readers, writers = draw(_linears(f"{name}.r", 1, 3)), draw(_linears(f"{name}.w", 0, 2))
    wheres = [*SITES[placement]]
    if draw(st.integers(0, 3)) == 0 and Where.INNER not in wheres:
        wheres.insert(wheres.index(Where.OUT) if Where.OUT in wheres else len(wheres), Where.INNER)
    sites = []
    for where in wheres:
        norm = draw(norms(f"{name}.{where}"))
        taps = (f"{name}.tap",) if draw(st.integers(0, 7)) == 0 else ()
        inner = tuple(Linear(w.param, 1 - w.axis, w.bias) for w in writers)
        sites.append(Site(where, norm, {Where.IN: readers, Where.INNER: inner}.get(where, ()), taps))
    kind = draw(st.sampled_from(("attention", "mlp", "other")))
    scale = draw(st.sampled_from((1.0, 1.0, 1.5)))
    return Block(name, kind, tuple(sites), readers, writers, group, scale)


@st.composite
def _sum(draw: Any, index: int, placements: tuple[Placement, ...]) -> list[Block]:
    """Draw one block, or two of one sum that may share their in norm and must share their trunk norm."""
    placement = draw(st.sampled_from(placements))
    first = draw(_block(f"{index}.a", placement, None))
    if draw(st.integers(0, 2)):
        return [first]
    second = draw(_block(f"{index}.b", placement, None))
    readers = first.readers + second.readers
    trunk = [s for s in first.sites if s.where is Where.POST]
    shared = [s for s in first.sites if s.where is Where.IN and draw(st.booleans())]
    shared = [Site(s.where, s.norm, readers, s.taps) for s in shared]

    def joined(block: Block) -> Block:
        gone = {Where.POST, *(s.where for s in shared)}
        sites = (*shared, *(s for s in block.sites if s.where not in gone), *trunk)
        return Block(block.name, block.kind, sites, block.readers, block.writers, index, first.scale)

    return [joined(first), joined(second)]


@st.composite
def streams(draw: Any, placements: tuple[Placement, ...] = tuple(Placement)) -> Stream:
    """Draw a stream of one to four sums; some readers are tied, and the head may be tied to the source."""
    blocks = [b for i in range(draw(st.integers(1, 4))) for b in draw(_sum(i, placements))]
    if len(blocks) > 1 and draw(st.integers(0, 3)) == 0:
        blocks = _tie(blocks)
    tied = draw(st.booleans())
    head = (Linear("wte.weight", 1, shared=True) if tied else Linear("head.weight", 1),)
    final = Site(Where.FINAL, draw(norms("ln_f")), head) if draw(st.booleans()) else None
    if final is None:  # the last trunk norm, where there is one, is what the head reads
        sites = tuple(Site(s.where, s.norm, head, s.taps) if s.where is Where.POST else s for s in blocks[-1].sites)
        partners = [b for b in blocks if b.parallel_group is not None and b.parallel_group == blocks[-1].parallel_group]
        for block in partners or blocks[-1:]:
            kept = tuple(s for s in block.sites if s.where is not Where.POST)
            trunk = tuple(s for s in sites if s.where is Where.POST)
            blocks[blocks.index(block)] = _replace(block, sites=kept + trunk)
    embedding = Site(Where.EMBEDDING, draw(norms("ln_e"))) if draw(st.integers(0, 3)) == 0 else None
    taps = ("hidden",) if draw(st.integers(0, 3)) == 0 else ()
    sources = ("wte.weight", "wpe.weight")[: draw(st.integers(1, 2))]
    return Stream("toy", draw(st.integers(3, 8)), tuple(blocks), sources, embedding, final, taps)


def _tie(blocks: list[Block]) -> list[Block]:
    """Let the last block use the first one's first reader, and mark both."""
    old, source = blocks[-1].readers[0], blocks[0].readers[0]
    tied = Linear(source.param, source.axis, source.bias, shared=True)

    def mark(linear: Linear) -> Linear:
        return tied if linear in (old, source) else linear

    def marked(block: Block) -> Block:
        sites = tuple(Site(s.where, s.norm, tuple(map(mark, s.readers)), s.taps) for s in block.sites)
        return _replace(block, sites=sites, readers=tuple(map(mark, block.readers)))

    return [marked(b) for b in blocks]


def _replace(block: Block, **fields: Any) -> Block:
    keep = {n: getattr(block, n) for n in ("name", "kind", "sites", "readers", "writers", "parallel_group", "scale")}
    return Block(**(keep | fields))


def machines(**options: Any) -> st.SearchStrategy[Machine]:
    """Draw a stream with random parameters, some gains of all ones (or zeros) among them."""
    return st.builds(_invent, streams(**options), st.integers(0, 2**31), st.booleans())


def _invent(stream: Stream, seed: int, plain: bool) -> Machine:
    machine = invent(stream, seed)
    if not plain:
        return machine
    chosen = np.random.default_rng(seed)
    params = dict(machine.params)
    for _, site in stream.sites():
        gamma, beta = site.norm.gamma, site.norm.beta
        if gamma and chosen.integers(2):
            params[gamma] = np.full_like(params[gamma], 1.0 - site.norm.plus_one)
        if beta and chosen.integers(2):
            params[beta] = np.zeros_like(params[beta])
    return Machine(stream, params)


def context(machine: Machine, network: Network | None = None) -> Context:
    """Let a pass look at a machine as at a program."""

    def samples() -> NoReturn:
        raise AssertionError("an exact pass asks for no samples")

    def holds(value: float) -> Callable[[str], bool]:
        return lambda param: bool(np.all(machine.params[param] == value))

    return Context(network or Network((machine.stream,)), samples, holds(1.0), holds(0.0), machine.params.__getitem__)


def assert_same(a: Machine, b: Machine, rtol: float = 1e-9) -> None:
    """Check that two machines have the same outputs, to `rtol` of each output's largest value."""
    left, right = a.run(), b.run()
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_allclose(right[name], value, rtol=rtol, atol=rtol * np.abs(value).max(), err_msg=name)


# ---- pictures of any content, for the text form ----

_words = st.one_of(
    st.text(max_size=6), st.sampled_from(["h.0", "a:0", "taps", "-", "", 'a"b', "a b\n", "onnx::W_1", "\\"])
)
_floats = st.floats(allow_nan=False, allow_infinity=False)
_any_linear = st.builds(Linear, _words, st.integers(-2, 3), st.none() | _words, st.booleans(), st.booleans())


@st.composite
def _any_norm(draw: Any) -> Norm:
    gamma = draw(st.none() | _words)
    one, computed = (draw(st.booleans()) if gamma else False for _ in range(2))
    eps = draw(st.floats(0, allow_infinity=False))
    return Norm(draw(st.sampled_from(Kind)), eps, gamma, draw(st.none() | _words), one, computed)


def _any_site(*wheres: Where) -> st.SearchStrategy[Site]:
    linears, names = (st.lists(s, max_size=3).map(tuple) for s in (_any_linear, _words))
    return st.builds(Site, st.sampled_from(wheres), _any_norm(), linears, names)


@st.composite
def _any_block(draw: Any) -> Block:
    sites = tuple(draw(st.lists(_any_site(Where.IN, Where.OUT, Where.POST, Where.INNER), max_size=4)))
    linears = st.lists(_any_linear, max_size=3).map(tuple)
    implied = next((s.readers for s in sites if s.where is Where.IN), ())
    readers = implied if draw(st.booleans()) else draw(linears)
    group = draw(st.none() | st.integers())
    return Block(draw(_words), draw(_words), sites, readers, draw(linears), group, draw(_floats), draw(_words))


@st.composite
def _any_stream(draw: Any) -> Stream:
    blocks = draw(st.lists(_any_block(), max_size=3, unique_by=lambda b: b.name))
    names = st.lists(_words, max_size=3).map(tuple)
    ends = [draw(st.none() | _any_site(where)) for where in (Where.EMBEDDING, Where.FINAL)]
    return Stream(draw(_words), draw(st.integers(1)), tuple(blocks), draw(names), *ends, draw(names))


def networks() -> st.SearchStrategy[Network]:
    """Draw networks of any content at all; they need not make sense, only survive being written and read."""
    refusals = st.builds(Refusal, _words, _words, _words, _words)
    parts = (_any_stream(), _any_site(*Where), refusals)
    return st.builds(Network, *(st.lists(part, max_size=2).map(tuple) for part in parts))
