"""The reference machine: run a stream's picture in fp64 with toy branches, and carry edits out on it.

It is the independent oracle of every graph backend, so it knows nothing of graphs: what it does follows from the
docstrings of `stream.py` and `plan.py` alone. A stream starts from its sources (tables [tokens, width], summed) and

    u  = in norms of x, in order          h  = tanh(readers(u)), mixed over earlier tokens by attention
    f  = out norms of writers(inner(h))   x' = post norms of scale * x + sum of f over the blocks of one sum

Whatever leaves the stream is an output: what the head's readers make of the last state, what each tap sees. Two
machines are equal where their outputs are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from .plan import Affine, FoldReader, Gain, Operation, Proposal, ScaleWriter, SetNorm, Value
from .stream import Block, Kind, Linear, Norm, Site, Stream, Where, site_name

Floats = NDArray[np.float64]
Resolve = Callable[[Value | None], Floats | None]

_FLOW = (Where.EMBEDDING, Where.IN, Where.INNER, Where.OUT, Where.POST, Where.FINAL)


@dataclass(frozen=True)
class Inserted:
    """Hold one `Affine` edit with its numbers: u -> scale * u + shift."""

    scale: Floats | None
    shift: Floats | None

    def __call__(self, u: Floats) -> Floats:
        """Apply it to [tokens, channels]."""
        u = u if self.scale is None else u * self.scale
        return u if self.shift is None else u + self.shift


@dataclass(frozen=True)
class Machine:
    """Hold a stream, the values of its parameters, and what edits put where the picture has no word for it.

    `affines` are inserted affines by (target, where); `before` are norms that stand ahead of the embedding norm.
    """

    stream: Stream
    params: Mapping[str, Floats]
    affines: Mapping[tuple[str, Where], tuple[Inserted, ...]] = field(default_factory=dict)
    before: tuple[Site, ...] = ()

    def run(self) -> dict[str, Floats]:
        """Run the stream and return its outputs: `logits` (or the last `state`), and what each tap sees."""
        stream, seen = self.stream, dict[str, Floats]()
        state = np.sum([self.params[p] for p in sources(stream)], axis=0)
        for site in self.before:
            state = normalize(site.norm, state, self.params)
        state = self._end(f"{stream.name}.embedding", stream.embedding, Where.EMBEDDING, state, seen)
        for group in sums(stream):
            skip = self._insert(group[0].name, Where.POST, group[0].scale * state)
            state = skip + np.sum([self._branch(block, state, seen) for block in group], axis=0)
            for name, site in trunk_norms(group):
                state = self._norm(name, site, state, seen)
            if stream.taps:
                seen[f"{group[-1].name} state"] = state
        state = self._end(f"{stream.name}.final", stream.final, Where.FINAL, state, seen)
        head = self._head()
        seen["logits" if head else "state"] = self._contract(head, state) if head else state
        return seen

    def _end(self, target: str, site: Site | None, where: Where, state: Floats, seen: dict[str, Floats]) -> Floats:
        state = self._norm(target, site, state, seen) if site else state
        return self._insert(target, where, state)

    def _branch(self, block: Block, state: Floats, seen: dict[str, Floats]) -> Floats:
        u = state
        for site in (s for s in block.sites if s.where is Where.IN):
            u = self._norm(site_name(block, site), site, u, seen)
        hidden = np.tanh(self._contract(block.readers, self._insert(block.name, Where.IN, u)))
        if block.kind == "attention":
            hidden = hidden + np.cumsum(hidden, axis=0) / np.arange(1, len(hidden) + 1)[:, None]
        written = {w.param for w in block.writers}
        for site in (s for s in block.sites if s.where is Where.INNER):
            if site.readers:
                hidden = fit(hidden, self.params[site.readers[0].param].shape[site.readers[0].axis])
            hidden = self._norm(site_name(block, site), site, hidden, seen)
            if not written.issuperset(r.param for r in site.readers):
                hidden = np.tanh(self._contract(site.readers, hidden))
        branch = np.sum([self._write(w, hidden) for w in block.writers], axis=0)
        for site in (s for s in block.sites if s.where is Where.OUT):
            branch = self._norm(site_name(block, site), site, branch, seen)
        return self._insert(block.name, Where.OUT, branch)

    def _norm(self, name: str, site: Site, x: Floats, seen: dict[str, Floats]) -> Floats:
        u = normalize(site.norm, x, self.params)
        seen.update({f"{name} -> {tap}": u for tap in site.taps})
        return u

    def _insert(self, target: str, where: Where, x: Floats) -> Floats:
        for affine in self.affines.get((target, where), ()):
            x = affine(x)
        return x

    def _contract(self, readers: Iterable[Linear], u: Floats) -> Floats:
        parts = [u @ matrix(self.params[r.param], r.axis).T + self._bias(r) for r in readers]
        return np.concatenate(parts, axis=-1) if parts else u

    def _write(self, writer: Linear, hidden: Floats) -> Floats:
        weight = matrix(self.params[writer.param], writer.axis)
        return fit(hidden, len(weight)) @ weight + self._bias(writer)

    def _bias(self, linear: Linear) -> Floats:
        return self.params[linear.bias].reshape(-1) if linear.bias is not None else np.zeros(())

    def _head(self) -> tuple[Linear, ...]:
        if self.stream.final:
            return self.stream.final.readers
        last = trunk_norms(sums(self.stream)[-1]) if self.stream.blocks else []
        return last[-1][1].readers if last else ()


def sources(stream: Stream) -> tuple[str, ...]:
    """Return the tables that the stream starts from; one named `state` where the picture names none."""
    return stream.sources or ("state",)


def normalize(norm: Norm, x: Floats, params: Mapping[str, Floats]) -> Floats:
    """Compute a norm over the last axis, as `Kind` defines it; batch and group norms have no such meaning."""
    u: Floats
    match norm.kind:
        case Kind.LAYER:
            u = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + norm.eps)
        case Kind.RMS:
            u = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + norm.eps)
        case Kind.STD:
            u = (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + norm.eps)
        case Kind.L2:
            u = x / np.maximum(np.sqrt(np.sum(x * x, -1, keepdims=True)), norm.eps)
        case other:
            raise ValueError(f"the reference machine cannot run a {other} norm: its statistics are not the channels'")
    u = u * (params[norm.gamma] + norm.plus_one) if norm.gamma is not None else u
    return u + params[norm.beta] if norm.beta is not None else u


def matrix(weight: Floats, axis: int) -> Floats:
    """Return a linear map's weight as [everything else, channels]."""
    rows: Floats = np.moveaxis(weight, axis, -1).reshape(-1, weight.shape[axis])
    return rows


def fit(hidden: Floats, size: int) -> Floats:
    """Bring toy activations to `size` columns so that every one of them counts: pad with zeros, then fold and sum."""
    padded = np.pad(hidden, ((0, 0), (0, -hidden.shape[1] % size)))
    folded: Floats = padded.reshape(len(hidden), -1, size).sum(1)
    return folded


def sums(stream: Stream) -> list[list[Block]]:
    """Return the blocks in execution order, those that share one sum together."""

    def one_sum(numbered: tuple[int, Block]) -> tuple[int | None, int]:
        group = numbered[1].parallel_group
        return group, numbered[0] if group is None else 0

    return [[b for _, b in run] for _, run in groupby(enumerate(stream.blocks), key=one_sum)]


def trunk_norms(group: Iterable[Block]) -> list[tuple[str, Site]]:
    """Return (name, site) of the post norms of one sum; blocks of one sum that state the same norm mean one."""
    found: dict[Site, str] = {}
    for block in group:
        for site in block.sites:
            if site.where is Where.POST:
                found.setdefault(site, site_name(block, site))
    return [(name, site) for site, name in found.items()]


def invent(stream: Stream, seed: int, tokens: int = 5, hidden: int = 6) -> Machine:
    """Make a machine for a stream with random parameters, gains and biases among them, drawn from `seed`.

    Default-initialised gains (1) and biases (0) would hide every wrong fold.
    """
    random = np.random.default_rng(seed)
    params: dict[str, Floats] = {}

    def draw(name: str | None, *shape: int) -> None:
        if name is not None and name not in params:
            params[name] = random.normal(size=shape)

    def linear(linear: Linear, channels: int) -> None:
        draw(linear.param, *((channels, hidden) if linear.axis in (0, -2) else (hidden, channels)))
        draw(linear.bias, len(matrix(params[linear.param], linear.axis)))

    for source in sources(stream):
        draw(source, tokens, stream.width)
    for block in stream.blocks:
        for reader in block.readers:
            linear(reader, stream.width)
        for writer in block.writers:
            draw(writer.bias, stream.width)
            linear(writer, stream.width)
    for _, site in stream.sites():
        channels = hidden if site.where is Where.INNER else stream.width
        draw(site.norm.gamma, channels)
        draw(site.norm.beta, channels)
        for reader in site.readers:
            linear(reader, channels)
    return Machine(stream, params)


# edits: one small rule for each operation


def apply(machine: Machine, proposal: Proposal) -> Machine:
    """Carry a proposal's edits out in order and return the new machine; the old one is unchanged.

    Every `Value` is read before the first edit, so that an edit's order does not matter to what it is worth. Raises
    ValueError for an edit that does not fit the stream.
    """

    def resolve(value: Value | None) -> Floats | None:
        match value:
            case None:
                return None
            case Gain(param, plus_one):
                return before[param] + plus_one
            case pointer:
                return np.asarray(cast(Any, proposal.vectors[pointer.digest]), dtype=np.float64)

    before = machine.params
    for edit in proposal.edits:
        for operation in edit.operations:
            machine = _operate(machine, edit.target, operation, resolve)
    machine.stream.verify()
    return machine


def _operate(machine: Machine, target: str, operation: Operation, resolve: Resolve) -> Machine:
    match operation:
        case SetNorm():
            return _set_norm(machine, target, operation, resolve)
        case FoldReader(reader, scale, shift):
            return _fold_reader(machine, reader, resolve(scale), resolve(shift))
        case ScaleWriter(writer, scale, shift):
            return _scale_writer(machine, writer, resolve(scale), resolve(shift))
        case Affine(where, scale, shift):
            if where is Where.POST and target not in {group[0].name for group in sums(machine.stream)}:
                raise ValueError(f"{target}: blocks of one sum share a skip; the first of them speaks for it")
            here = (target, where)
            inserted = Inserted(resolve(scale), resolve(shift))
            return replace(machine, affines={**machine.affines, here: (*machine.affines.get(here, ()), inserted)})


def _set_norm(machine: Machine, target: str, edit: SetNorm, resolve: Resolve) -> Machine:
    """Put, change or remove a norm. Its gain starts at `gamma`, whatever the stored form; None leaves it."""
    stream, norm, params = machine.stream, edit.norm, dict(machine.params)
    if norm is not None:
        if edit.gamma and norm.gamma is None:
            norm = replace(norm, gamma=f"{target}.{edit.where}.gamma")
        if edit.beta and norm.beta is None:
            norm = replace(norm, beta=f"{target}.{edit.where}.beta")
        gamma, beta = resolve(edit.gamma), resolve(edit.beta)
        if norm.gamma is not None and gamma is not None:
            params[norm.gamma] = gamma - norm.plus_one
        if norm.beta is not None and beta is not None:
            params[norm.beta] = beta
    return replace(machine, stream=_put(stream, target, edit.where, norm), params=params)


def _put(stream: Stream, target: str, where: Where, norm: Norm | None) -> Stream:
    if where in (Where.EMBEDDING, Where.FINAL):
        held = stream.final if where is Where.FINAL else stream.embedding
        site = _site(stream, None, where, norm, held)
        return replace(stream, final=site) if where is Where.FINAL else replace(stream, embedding=site)
    block = next((b for b in stream.blocks if b.name == target), None)
    if block is None:
        raise ValueError(f"the stream has no block {target!r}")
    held = block.at(where)
    if not (held or norm):
        raise ValueError(f"{target} holds no {where} norm to remove")
    site = _site(stream, block, where, norm, held)
    sites = [site if s is held else s for s in block.sites] if held else [*block.sites, site]
    kept = sorted((s for s in sites if s), key=lambda s: _FLOW.index(s.where))
    return _swap(stream, [replace(block, sites=tuple(kept))])


def _site(stream: Stream, block: Block | None, where: Where, norm: Norm | None, held: Site | None) -> Site | None:
    if norm is None:
        return None
    return replace(held, norm=norm) if held else Site(where, norm, _consumers(stream, block, where))


def _consumers(stream: Stream, block: Block | None, where: Where) -> tuple[Linear, ...]:
    """Return the readers that a norm newly put here would have."""
    groups = sums(stream)
    if where is Where.IN and block:
        return block.readers
    if where is Where.FINAL and groups:
        return next((s.readers for _, s in reversed(trunk_norms(groups[-1]))), ())
    if where in (Where.POST, Where.EMBEDDING):
        here = next((i + 1 for i, group in enumerate(groups) if block in group), 0)
        return tuple(r for g in groups[here : here + 1] for b in g if not b.at(Where.IN) for r in b.readers)
    return ()


def _fold_reader(machine: Machine, reader: Linear, scale: Floats | None, shift: Floats | None) -> Machine:
    """W <- W diag(scale), c <- c + W_old shift; a reader without a bias gets one."""
    stream, params = machine.stream, dict(machine.params)
    weight = params[reader.param]
    if shift is not None:
        bias = reader.bias or reader.param.removesuffix(".weight") + ".bias"
        stream = _linears(stream, lambda r: replace(r, bias=r.bias or bias) if r.param == reader.param else r)
        moved = matrix(weight, reader.axis) @ np.broadcast_to(shift, weight.shape[reader.axis])
        params[bias] = params.get(bias, np.zeros(moved.shape)) + moved.reshape(params.get(bias, moved).shape)
    if scale is not None:
        params[reader.param] = _along(weight, reader.axis, scale)
    return replace(machine, stream=stream, params=params)


def _scale_writer(machine: Machine, writer: Linear, scale: Floats | None, shift: Floats | None) -> Machine:
    """W <- diag(scale) W, c <- scale * c + shift; a writer without a bias gets one where there is a shift."""
    stream, params = machine.stream, dict(machine.params)
    if scale is not None:
        params[writer.param] = _along(params[writer.param], writer.axis, scale)
        if writer.bias is not None:
            params[writer.bias] = params[writer.bias] * scale
    if shift is not None:
        bias = writer.bias or writer.param.removesuffix(".weight") + ".bias"
        stream = _linears(stream, lambda w: replace(w, bias=w.bias or bias) if w.param == writer.param else w)
        params[bias] = params.get(bias, np.zeros(shift.shape)) + shift
    return replace(machine, stream=stream, params=params)


def _swap(stream: Stream, blocks: Iterable[Block]) -> Stream:
    new = {b.name: b for b in blocks}
    return replace(stream, blocks=tuple(new.get(b.name, b) for b in stream.blocks))


def _along(weight: Floats, axis: int, scale: Floats) -> Floats:
    return np.moveaxis(np.moveaxis(weight, axis, -1) * scale, -1, axis)


def _linears(stream: Stream, change: Callable[[Linear], Linear]) -> Stream:
    """Rewrite every mention of a linear map in a stream."""

    def site(held: Site | None) -> Site | None:
        return held and replace(held, readers=tuple(map(change, held.readers)))

    def block(held: Block) -> Block:
        sites = tuple(replace(s, readers=tuple(map(change, s.readers))) for s in held.sites)
        return replace(
            held, sites=sites, readers=tuple(map(change, held.readers)), writers=tuple(map(change, held.writers))
        )

    return replace(
        stream,
        blocks=tuple(map(block, stream.blocks)),
        embedding=site(stream.embedding),
        final=site(stream.final),
    )
