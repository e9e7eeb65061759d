"""The reference machine: run a stream's picture in fp64 with toy branches, and carry edits out on it.

It is the independent oracle of every graph backend, so it knows nothing of graphs: what it does follows from the
docstrings of `ir/` (network, parts, edits) alone. A stream starts from its sources (tables [tokens, width], summed) and

    u  = in norms of x, in order          h  = tanh(readers(u)), mixed over earlier tokens by attention
    f  = out norms of writers(inner(h))   x' = post norms of scale * x + what is added + the f of the blocks of one sum

with constant factors where the picture has them, and something nonlinear at each barrier. Whatever leaves the
stream is an output: what the head's readers make of the last state, what each tap and exit sees. Two machines are
equal where their outputs are. `ref.py` carries edits out on a machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..ir import Block, Kind, Linear, Norm, Side, Site, Size, Stream, Where, site_name, sums

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Inserted:
    """Hold one `Affine` edit with its numbers: u -> scale * u + shift; scale may be a matrix, or a `Size` it was."""

    scale: Floats | None
    shift: Floats | None
    size: Size | None = None

    def __call__(self, u: Floats) -> Floats:
        """Apply it to [tokens, channels]."""
        if self.scale is not None:
            u = u @ self.scale.T if self.scale.ndim > 1 else u * self.scale
        return u if self.shift is None else u + self.shift


@dataclass(frozen=True)
class Machine:
    """Hold a stream, the values of its parameters, and what edits put where the picture has no word for it.

    `affines` are inserted affines by (target, where), (target, "before" and where) those ahead of a norm; `bared`
    are, by block, inner norms of linears of their own that were removed: what they read goes on as it is. `sums` are
    what the last run saw of each block's sum, and of what the stream starts from: tokens have their sizes from them.
    """

    stream: Stream
    params: Mapping[str, Floats]
    affines: Mapping[tuple[str, str], tuple[Inserted, ...]] = field(default_factory=dict)
    bared: Mapping[str, tuple[Site, ...]] = field(default_factory=dict)
    sums: dict[str, Floats] = field(default_factory=dict, compare=False, repr=False)

    def run(self) -> dict[str, Floats]:
        """Run the stream and return its outputs: `logits` (or the last `state`), and what each tap sees."""
        stream, seen = self.stream, dict[str, Floats]()
        state = np.sum([self._source(s) for s in sources(stream)], axis=0)
        if stream.opaque:
            state = state + np.cos(np.arange(state.size)).reshape(state.shape)
        start = f"{stream.name}.embedding"
        state = self.sums[start] = self._insert(start, "before embedding", state)
        state = self._end(start, stream.embedding, Where.EMBEDDING, state, seen)
        for group in sums(stream):
            skip = group[0].scale * self._scale(group[0], "skip", state)
            skip = self._insert(group[0].name, Where.POST, skip) + self._added(group[0], state)
            last = group[-1].name
            state = self.sums[last] = skip + np.sum([self._branch(block, state, seen) for block in group], axis=0)
            state = self._insert(last, "before post", state)
            for name, site in trunk_norms(group):
                state = self._norm(name, site, state, seen)
            state = self._scale(group[-1], "trunk", state)
            if any(block.barrier(Side.CARRIED) for block in group):
                state = np.tanh(state)
            if stream.taps:
                seen[f"{group[-1].name} state"] = state
        last = state
        state = self._end(f"{stream.name}.final", stream.final, Where.FINAL, state, seen)
        head = self._head()
        seen["logits" if head else "state"] = self._contract(head, state) if head else state
        seen.update(dict.fromkeys(stream.exits, last))
        return seen

    def _end(self, target: str, site: Site | None, where: Where, state: Floats, seen: dict[str, Floats]) -> Floats:
        state = self._norm(target, site, state, seen) if site else state
        return self._insert(target, where, state)

    def _branch(self, block: Block, state: Floats, seen: dict[str, Floats]) -> Floats:
        u = self._insert(block.name, "before in", state)
        for site in (s for s in block.sites if s.where is Where.IN):
            u = self._norm(site_name(block, site), site, u, seen)
        u = self._insert(block.name, Where.IN, self._scale(block, "read", u))
        hidden = np.tanh(self._contract(block.readers, u))
        if block.barrier(Side.READ) or block.barrier(Side.RAW):
            hidden = hidden + fit(np.tanh(state if block.barrier(Side.RAW) else u), hidden.shape[1])
        if block.kind == "attention":
            hidden = hidden + np.cumsum(hidden, axis=0) / np.arange(1, len(hidden) + 1)[:, None]
        beside = np.sin(hidden) if block.barrier(Side.WRITTEN) else np.zeros((len(hidden), 1))
        written = {w.param for w in block.writers}
        beside_norms = [s for s in block.sites if s.where is Where.INNER and s.writers]
        aside = [self._norm(site_name(block, s), s, self._made(s, hidden), seen) for s in beside_norms]
        aside += [self._made(s, hidden) for s in self.bared.get(block.name, ())]
        hidden = hidden + np.sum([fit(x, hidden.shape[1]) for x in aside], axis=0) if aside else hidden
        for site in (s for s in block.sites if s.where is Where.INNER and not s.writers):
            if site.readers:
                hidden = fit(hidden, self.params[site.readers[0].param].shape[site.readers[0].axis])
            hidden = self._norm(site_name(block, site), site, hidden, seen)
            if not written.issuperset(r.param for r in site.readers):
                hidden = np.tanh(self._contract(site.readers, hidden))
        for pair in block.scale_pairs:
            made = np.sum([self._write(w, hidden) for w in pair.producers], axis=0)
            hidden = made if pair.run else np.maximum(made, 0)
        branch = np.sum([self._write(w, hidden) for w in block.writers], axis=0)
        branch = branch + fit(beside, branch.shape[1])
        branch = self._scale(block, "written", branch)
        for site in (s for s in block.sites if s.where is Where.OUT):
            branch = self._norm(site_name(block, site), site, branch, seen)
        return self._insert(block.name, Where.OUT, self._scale(block, "branch", branch))

    def _added(self, block: Block, state: Floats) -> Floats:
        """Return what the block's sum adds beside skip and branches."""
        terms = [self._source(w) for w in block.added]
        terms += [np.cos(np.arange(state.size)).reshape(state.shape)] if block.barrier(Side.ADDED) else []
        return np.asarray(np.sum(terms, axis=0)) if terms else np.zeros_like(state)

    def _made(self, site: Site, hidden: Floats) -> Floats:
        return np.asarray(np.sum([self._write(w, hidden) for w in site.writers], axis=0))

    def _source(self, source: Linear) -> Floats:
        """Return what a source adds: a table's rows, or a linear map's value of some fixed input."""
        if source.table:
            return np.moveaxis(self.params[source.param], source.axis, -1)
        given = np.sin(np.arange(5 * 6)).reshape(5, 6)
        return self._write(source, given)

    def _scale(self, block: Block, at: str, x: Floats) -> Floats:
        for scale in block.scaled(at):
            by = self.params[scale.by] if isinstance(scale.by, str) else scale.by
            x = x / by if scale.inverse else x * by
        return x

    def _norm(self, name: str, site: Site, x: Floats, seen: dict[str, Floats]) -> Floats:
        u = normalize(site.norm, x, self.params)
        for tap in site.taps:
            key = f"{name.rstrip('0123456789')} -> {tap}"
            seen[key + "'" * sum(k.startswith(key) for k in seen)] = u
        return u

    def _insert(self, target: str, where: str, x: Floats) -> Floats:
        for affine in self.affines.get((target, where), ()):
            x = affine(x) if affine.size is None else self._sized(x, affine.size)
        return x

    def _sized(self, x: Floats, by: Size) -> Floats:
        """Return x * S, or x / S."""
        return x / self._size(by) if by.inverse else x * self._size(by)

    def _size(self, size: Size) -> Floats:
        """Return S = S' s(y / S') / c [tokens, 1]."""
        before = self._size(size.before) if size.before else np.ones(1)
        z = self.sums[size.of] / before
        z = z - z.mean(-1, keepdims=True) if size.norm.kind is Kind.LAYER else z
        return np.asarray(before * np.sqrt(np.mean(z * z, -1, keepdims=True) + size.norm.eps) / size.usual)

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
        return last[-1][1].readers if last else self.stream.readers


def sources(stream: Stream) -> tuple[Linear, ...]:
    """Return what the stream starts from; a table named `state` where the picture names nothing."""
    return stream.sources or (Linear("state", 1, table=True),)


def normalize(norm: Norm, x: Floats, params: Mapping[str, Floats]) -> Floats:
    """Compute a norm over the last axis, as `Kind` defines it; batch and group norms have no such meaning."""
    u: Floats
    x = normalize(norm.over, x, params) if norm.over else x
    match norm.kind:
        case Kind.LAYER:
            u = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + norm.eps)
        case Kind.RMS:
            u = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + norm.eps)
        case Kind.STD:
            centered, unbiased = x - x.mean(-1, keepdims=True), norm.variant > 0
            size = np.sqrt(x.var(-1, keepdims=True, ddof=unbiased) + norm.eps * (norm.variant == 2))
            u = centered / (size + norm.eps * (norm.variant < 2))
        case Kind.L2:
            size = np.sqrt(np.sum(x * x, -1, keepdims=True))
            u = x / (np.maximum(size, norm.eps), size + norm.eps, np.sqrt(size**2 + norm.eps))[norm.variant]
        case Kind.CRMS:
            total = np.sum(x * x, -1, keepdims=True) + np.sum(x, -1, keepdims=True) ** 2
            u = x / np.sqrt(total / (x.shape[-1] + 1) + norm.eps)
        case Kind.CENTERED:
            u = x - x.mean(-1, keepdims=True)
        case Kind.BATCH if norm.mean and norm.variance:
            u = (x - params[norm.mean]) / np.sqrt(params[norm.variance] + norm.eps)
        case Kind.POWER if norm.variance:
            u = x / np.sqrt(params[norm.variance] + norm.eps)
        case other:
            raise ValueError(f"the reference machine cannot run a {other} norm: its statistics are not the channels'")
    u = u * norm.factor
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

    Default-initialized gains (1) and biases (0) would hide every wrong fold.
    """
    drawn = _Draw(np.random.default_rng(seed), stream.width, tokens, hidden)
    for source in sources(stream):
        drawn.source(source)
    for block in stream.blocks:
        drawn.block(block)
    for _, site in stream.sites():
        drawn.site(site)
    for reader in stream.readers:
        drawn.linear(reader, stream.width)
    return Machine(stream, drawn.params)


@dataclass
class _Draw:
    """Draw parameters at random, each name once, in the order in which they are asked for."""

    random: np.random.Generator
    width: int
    tokens: int
    hidden: int
    params: dict[str, Floats] = field(default_factory=dict)

    def values(self, name: str | None, *shape: int) -> None:
        """Draw a parameter's values, unless it has some."""
        if name is not None and name not in self.params:
            self.params[name] = self.random.normal(size=shape)

    def linear(self, linear: Linear, channels: int) -> None:
        """Draw a linear map from, or to, so many channels."""
        shape = (channels, self.hidden) if linear.axis in (0, -2) else (self.hidden, channels)
        self.values(linear.param, *shape)
        self.values(linear.bias, len(matrix(self.params[linear.param], linear.axis)))

    def source(self, source: Linear) -> None:
        """Draw what starts a stream: a table of the tokens' rows, or a linear map."""
        if source.table:
            self.values(source.param, self.tokens, self.width)
        else:
            self.writer(source)

    def writer(self, writer: Linear) -> None:
        """Draw a linear map that writes to the stream."""
        self.values(writer.bias, self.width)
        self.linear(writer, self.width)

    def block(self, block: Block) -> None:
        """Draw what a block's edges, scale pairs and factors hold."""
        for table in block.added:
            self.values(table.param, self.tokens, self.width)
        for reader in block.readers:
            self.linear(reader, self.width)
        for writer in block.writers:
            self.writer(writer)
        for producer in (producer for pair in block.scale_pairs for producer in pair.producers):
            self.values(producer.bias, self.hidden)
            self.values(producer.param, self.hidden, self.hidden)
        for scale in block.scales:
            if isinstance(scale.by, str):
                self.values(scale.by, self.width if scale.vector else 1)

    def site(self, site: Site) -> None:
        """Draw a norm's gain, bias and stored statistics, and what reads and writes it."""
        channels = self.hidden if site.where is Where.INNER else self.width
        norm: Norm | None = site.norm
        while norm:
            for name in (norm.gamma, norm.beta, norm.mean):
                self.values(name, channels)
            if norm.variance:
                self.params[norm.variance] = self.random.uniform(0.5, 2.0, channels)
            norm = norm.over
        for each in (*site.readers, *site.writers):
            self.linear(each, channels)
        for writer in site.writers:
            self.values(writer.bias, channels)
