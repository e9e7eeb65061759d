"""Random residual networks for hypothesis, and how the tests run a pass on one with the reference machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
from hypothesis import strategies as st

from lnrewrite.errors import Code, Refusal
from lnrewrite.ir import (
    Barrier,
    Block,
    Kind,
    Linear,
    Network,
    Norm,
    Placement,
    Scale,
    ScalePair,
    Side,
    Site,
    Stream,
    Where,
)
from lnrewrite.pipeline import Context
from lnrewrite.testing.reference import Machine, invent

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
    over = draw(norms(f"{name}.under", draw(st.sampled_from((False, None))))) if draw(st.integers(0, 7)) == 0 else None
    names = (f"{name}.weight" if gain else None, f"{name}.bias" if bias else None)
    return Norm(kind, draw(EPS), *names, plus_one, over=over)


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
    """Draw one block: norms for its placement, now and then a Sub-LN norm, a tap, constant factors, a closed edge."""
    readers, writers = draw(_linears(f"{name}.r", 1, 3)), draw(_linears(f"{name}.w", 0, 2))
    wheres = [*SITES[placement]]
    if draw(st.integers(0, 3)) == 0 and Where.INNER not in wheres:
        wheres.insert(wheres.index(Where.OUT) if Where.OUT in wheres else len(wheres), Where.INNER)
    sites = []
    for where in wheres:
        norm = draw(norms(f"{name}.{where}"))
        if where is Where.POST and draw(st.integers(0, 3)) == 0:
            norm = replace(norm, kind=Kind.BATCH, over=None, mean=f"{name}.mean", variance=f"{name}.variance")
        taps = (f"{name}.tap",) if draw(st.integers(0, 7)) == 0 else ()
        inner = tuple(Linear(w.param, 1 - w.axis, w.bias) for w in writers)
        known = {Where.IN: readers, Where.INNER: inner}.get(where, ())
        sites.append(Site(where, norm, known, taps, width=6 if where is Where.INNER else 0))
    kind = draw(st.sampled_from(("attention", "mlp", "other")))
    scale = draw(st.sampled_from((1.0, 1.0, 1.5)))
    if Where.OUT in wheres and draw(st.booleans()):
        sites[-1] = replace(sites[-1], writers=())
    if kind == "attention" and draw(st.integers(0, 3)) == 0:
        own = Linear(f"{name}.q_norm_of.weight", 0, f"{name}.q_norm_of.bias")
        norm = draw(norms(f"{name}.q_norm"))
        if draw(st.booleans()):
            stored = {"mean": f"{name}.q_norm.mean", "variance": f"{name}.q_norm.variance"}
            norm = replace(norm, kind=Kind.BATCH, over=None, **stored)
        taps = () if norm.kind is Kind.BATCH else ("off the main path",)
        sites.insert(0, Site(Where.INNER, norm, (), taps, (own,), 6))
    at = ["trunk", "skip", "written", *["read"] * (Where.IN in wheres), *["branch"] * (Where.OUT in wheres)]
    chosen = [w for w in at if draw(st.integers(0, 5)) == 0]
    scales = tuple(draw(_scale(f"{name}.{w}", w)) for w in chosen)
    if any(s.at == "read" for s in scales):
        sites = [replace(s, taps=()) if s.where is Where.IN else s for s in sites]
        inexact = {r: replace(r, exact=False) for r in readers}
        readers = tuple(inexact.values())
        sites = [replace(s, readers=tuple(inexact.get(r, r) for r in s.readers)) for s in sites]
    side = draw(st.sampled_from((*[None] * 20, Side.WRITTEN, Side.READ, Side.CARRIED, Side.ADDED)))
    if any(s.where is Where.OUT and s.taps for s in sites):
        side = Side.ENDS
    if side is Side.READ and any(s.at == "read" for s in scales):
        side = None
    if side is Side.READ:
        sites = [replace(s, taps=("pool",)) if s.where is Where.IN else s for s in sites]
    pairs = ()
    if draw(st.integers(0, 3)) == 0 and not any(s.where is Where.INNER and s.readers for s in sites):
        consumers = tuple(Linear(w.param, 1 - w.axis, w.bias) for w in writers)
        bias = f"{name}.arm.bias" if draw(st.booleans()) else None
        pairs = (ScalePair((Linear(f"{name}.arm.weight", 0, bias),), consumers, draw(st.sampled_from((0, 2)))),)
    added = (Linear(f"{name}.added", 1, table=True),) if draw(st.integers(0, 9)) == 0 else ()
    barriers = (Barrier(side, "pool"),) if side else ()
    return Block(name, kind, tuple(sites), readers, writers, group, scale, scales, added, barriers, pairs)


@st.composite
def _scale(draw: Any, name: str, at: str) -> Scale:
    """Draw a constant factor: a number, or one number or a vector of parameters."""
    by = draw(st.sampled_from((2.0, 0.3, -1.5, f"{name}.scale")))
    return Scale(at, by, isinstance(by, str) and at != "read" and draw(st.booleans()), draw(st.booleans()))


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
    seen = tuple(t for s in second.sites if s.where is Where.IN for t in s.taps)
    shared = [Site(s.where, s.norm, readers, (*s.taps, *seen)) for s in shared]

    def joined(block: Block) -> Block:
        gone = {Where.POST, *(s.where for s in shared)}
        sites = (*shared, *(s for s in block.sites if s.where not in gone), *trunk)
        scales = tuple(s for s in block.scales if not (shared and s.at == "read"))
        return replace(block, sites=sites, parallel_group=index, scale=first.scale, scales=scales)

    head = joined(first)
    after = joined(second)
    after = replace(after, scales=tuple(s for s in after.scales if s.at != "skip"), added=())
    return [replace(head, scales=tuple(s for s in head.scales if s.at != "trunk")), after]


@st.composite
def streams(draw: Any, placements: tuple[Placement, ...] = tuple(Placement)) -> Stream:
    """Draw a stream of one to four sums; some readers are tied, and the head may be tied to the source."""
    blocks = [b for i in range(draw(st.integers(1, 4))) for b in draw(_sum(i, placements))]
    if len(blocks) > 1 and draw(st.integers(0, 3)) == 0:
        blocks = _tie(blocks)
    tied = draw(st.booleans())
    head = (Linear("wte.weight", 1, uses=2) if tied else Linear("head.weight", 1),)
    final = Site(Where.FINAL, draw(norms("ln_f")), head) if draw(st.booleans()) else None
    if final is None:  # the last trunk norm, where there is one, is what the head reads
        last = blocks[-1]
        partners = [b for b in blocks if b.parallel_group is not None and b.parallel_group == last.parallel_group]
        behind = tuple(replace(r, exact=not last.scaled("trunk")) for r in head)
        through = ("gelu",) if any(b.barrier(Side.CARRIED) for b in partners or [last]) else ()
        trunk = tuple(
            replace(s, readers=() if through else behind, taps=s.taps + through)
            for s in last.sites
            if s.where is Where.POST
        )
        for block in partners or [last]:
            kept = tuple(s for s in block.sites if s.where is not Where.POST)
            blocks[blocks.index(block)] = replace(block, sites=kept + trunk)
    embedding = Site(Where.EMBEDDING, draw(norms("ln_e"))) if draw(st.integers(0, 3)) == 0 else None
    seen = any(s.where is Where.POST and s.taps for b in blocks for s in b.sites)
    taps = ("hidden",) if seen or draw(st.integers(0, 3)) == 0 else ()
    sources = (Linear("wte.weight", 1, uses=1 + tied, table=True), Linear("wpe.weight", 1, table=True))
    sources = sources[: draw(st.integers(1, 2))]
    bare = not final and not any(s.where is Where.POST for s in blocks[-1].sites)
    ends = {"readers": head if bare else (), "exits": ("pool",) if draw(st.integers(0, 5)) == 0 else ()}
    opaque = draw(st.sampled_from(("", "", "", "gelu")))
    width = draw(st.integers(3, 8))
    return Stream("toy", width, tuple(blocks), sources, opaque, embedding, final, taps, **ends)


def _tie(blocks: list[Block]) -> list[Block]:
    """Make the last block use the first one's first reader, and mark both."""
    old, source = blocks[-1].readers[0], blocks[0].readers[0]
    tied = Linear(source.param, source.axis, source.bias, uses=2)

    def mark(linear: Linear) -> Linear:
        return tied if linear in (old, source) else linear

    def marked(block: Block) -> Block:
        sites = tuple(replace(s, readers=tuple(map(mark, s.readers))) for s in block.sites)
        return replace(block, sites=sites, readers=tuple(map(mark, block.readers)))

    return [marked(b) for b in blocks]


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
    """Make a pass look at a machine as at a program."""

    def samples() -> NoReturn:
        raise AssertionError("an exact pass asks for no samples")

    def holds(value: float) -> Callable[[str], bool]:
        return lambda param: bool(np.all(machine.params[param] == value))

    ask = (holds(1.0), holds(0.0), machine.params.__getitem__)
    shapes = {name: array.shape for name, array in machine.params.items()}
    return Context(network or Network((machine.stream,)), samples, *ask, shape=shapes.__getitem__)


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
_any_linear = st.builds(
    Linear, _words, st.integers(-2, 3), st.none() | _words, st.integers(1, 9), st.booleans(), st.booleans()
)


@st.composite
def _any_scale(draw: Any) -> Scale:
    by = draw(_floats | _words)
    marks = [draw(st.booleans()) for _ in range(3)]
    return Scale(draw(st.sampled_from(("read", "written", "skip", "trunk"))), by, *marks[:2], marks[2] and isinstance(by, str))


@st.composite
def _any_norm(draw: Any) -> Norm:
    gamma = draw(st.none() | _words)
    one, computed = (draw(st.booleans()) if gamma else False for _ in range(2))
    eps = draw(st.floats(0, allow_infinity=False))
    rest = [draw(st.none() | _words) for _ in range(3)]
    over = draw(_any_norm()) if draw(st.integers(0, 5)) == 0 else None
    kind, axis = draw(st.sampled_from(Kind)), draw(st.sampled_from((-1, -3)))
    return Norm(kind, eps, gamma, rest[0], one, computed, *rest[1:], axis=axis, over=over)


def _any_site(*wheres: Where) -> st.SearchStrategy[Site]:
    linears, names = (st.lists(s, max_size=3).map(tuple) for s in (_any_linear, _words))
    return st.builds(Site, st.sampled_from(wheres), _any_norm(), linears, names, linears, st.integers(0, 99))


@st.composite
def _any_block(draw: Any) -> Block:
    sites = tuple(draw(st.lists(_any_site(Where.IN, Where.OUT, Where.POST, Where.INNER), max_size=4)))
    linears = st.lists(_any_linear, max_size=3).map(tuple)
    implied = next((s.readers for s in sites if s.where is Where.IN), ())
    readers = implied if draw(st.booleans()) else draw(linears)
    group = draw(st.none() | st.integers())
    scales = tuple(draw(st.lists(_any_scale(), max_size=2)))
    pairs = tuple(draw(st.lists(st.builds(ScalePair, linears, linears, st.integers(0, 9)), max_size=2)))
    barriers = st.lists(st.builds(Barrier, st.sampled_from(Side), _words), max_size=2).map(tuple)
    ends = (scales, draw(linears), draw(barriers), pairs)
    return Block(draw(_words), draw(_words), sites, readers, draw(linears), group, draw(_floats), *ends)


@st.composite
def _any_stream(draw: Any) -> Stream:
    blocks = draw(st.lists(_any_block(), max_size=3, unique_by=lambda b: b.name))
    names = st.lists(_words, max_size=3).map(tuple)
    ends = [draw(st.none() | _any_site(where)) for where in (Where.EMBEDDING, Where.FINAL)]
    linears = st.lists(_any_linear, max_size=3).map(tuple)
    start = (draw(linears), draw(_words))
    rest = (draw(names), draw(linears), draw(names))
    return Stream(draw(_words), draw(st.integers(1)), tuple(blocks), *start, *ends, *rest)


def networks() -> st.SearchStrategy[Network]:
    """Draw networks of any content at all; they need not make sense, only survive being written and read."""
    refusals = st.builds(Refusal, st.sampled_from(Code), _words, _words, _words)
    parts = (_any_stream(), _any_site(*Where), refusals)
    return st.builds(Network, *(st.lists(part, max_size=2).map(tuple) for part in parts))
