"""Carry edits out on the reference machine: one small rule for each operation, from its docstring in ir/ alone.

Values become dense arrays here, whatever the backends do instead: a rotation is a matrix of the size of its channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, assert_never, cast

import numpy as np

from ..ir import (
    Affine,
    Block,
    Bypass,
    Center,
    DropScale,
    FoldReader,
    Freeze,
    Gain,
    Linear,
    Norm,
    Normalize,
    Number,
    Operation,
    Proposal,
    Rotation,
    ScaleWriter,
    SetNorm,
    Site,
    Size,
    Stream,
    Untie,
    Value,
    Where,
    sums,
)
from .machine import Floats, Inserted, Machine, fit, invent, matrix, normalize, trunk_norms

__all__ = ["Floats", "Machine", "apply", "fit", "invent", "normalize", "orthogonal"]

Resolve = Callable[[Value, int], Floats]
"""Gives a value's array for so many channels: a vector, or a matrix where it mixes channels."""

_FLOW = (Where.EMBEDDING, Where.IN, Where.INNER, Where.OUT, Where.POST, Where.FINAL)


def apply(machine: Machine, proposal: Proposal) -> Machine:
    """Carry a proposal's edits out in order and return the new machine; the old one is unchanged.

    Every `Value` is read before the first edit, so that an edit's order does not matter to what it is worth. Raises
    ValueError for an edit that does not fit the stream.
    """

    def resolve(value: Value, channels: int) -> Floats:
        match value:
            case Gain(param, plus_one):
                return np.asarray(before[param] + plus_one)
            case Number(number):
                return np.full(channels, number)
            case Center(width, left):
                held = np.eye(width) - (1 - left) / width
                return np.asarray(np.kron(np.eye(channels // width), held), dtype=np.float64)
            case Rotation():
                return np.asarray(np.kron(np.eye(channels // value.block), orthogonal(value)), dtype=np.float64)
            case pointer:
                return np.asarray(cast(Any, proposal.vectors[pointer.digest]), dtype=np.float64)

    before = machine.params
    for edit in proposal.edits:
        for operation in edit.operations:
            machine = _operate(machine, edit.target, operation, resolve)
    machine.stream.verify()
    return machine


def orthogonal(rotation: Rotation) -> Floats:
    """Return a rotation's matrix on one run of channels."""
    random, n = np.random.default_rng(rotation.seed), rotation.block
    if rotation.kind == "hadamard":
        whole = np.ones((1, 1))
        while len(whole) < n:
            whole = np.block([[whole, whole], [whole, -whole]])
        q = whole / np.sqrt(n) * np.where(random.integers(0, 2, n) == 1, 1.0, -1.0)
    else:
        q, r = np.linalg.qr(random.normal(size=(n, n)))
        q = q * np.sign(np.diag(r))
    return np.asarray(q.T if rotation.back else q)


def _operate(machine: Machine, target: str, operation: Operation, resolve: Resolve) -> Machine:
    match operation:
        case SetNorm():
            return _set_norm(machine, target, operation, resolve)
        case FoldReader():
            return _fold_reader(machine, operation, resolve)
        case ScaleWriter():
            return _scale_writer(machine, operation, resolve)
        case Affine():
            return _affine(machine, target, operation, resolve)
        case DropScale():
            return _drop_scale(machine, target, operation)
        case Normalize(table, norm):
            rows = np.moveaxis(machine.params[table.param], table.axis, -1)
            made = np.moveaxis(normalize(norm, rows, machine.params), -1, table.axis)
            return replace(machine, params={**machine.params, table.param: made})
        case Untie(linear):
            name = f"{linear.param}_untied"
            stream = _linears(machine.stream, lambda r: replace(r, param=name, uses=1) if r == linear else r)
            left = linear.uses - 1
            stream = _linears(stream, lambda r: replace(r, uses=left) if r.param == linear.param else r)
            return replace(machine, stream=stream, params={**machine.params, name: machine.params[linear.param]})
        case Freeze() | Bypass():  # the machine computes no weights and has no gates
            return machine
        case _:
            assert_never(operation)


def _affine(machine: Machine, target: str, edit: Affine, resolve: Resolve) -> Machine:
    if edit.where is Where.POST and target not in {g[-edit.before].name for g in sums(machine.stream)}:
        raise ValueError(f"{target}: blocks of one sum share a skip; the first of them speaks for it")
    here, width = (target, f"{'before ' * edit.before}{edit.where}"), machine.stream.width
    size = edit.scale if isinstance(edit.scale, Size) else None
    scale = None if edit.scale is None or isinstance(edit.scale, Size) else resolve(edit.scale, width)
    made = Inserted(scale, None if edit.shift is None else resolve(edit.shift, width), size)
    return replace(machine, affines={**machine.affines, here: (*machine.affines.get(here, ()), made)})


def _drop_scale(machine: Machine, target: str, edit: DropScale) -> Machine:
    block = next(b for b in machine.stream.blocks if b.name == target)
    if edit.scale is None:
        group = next(g for g in sums(machine.stream) if block in g)
        bare = [replace(b, scale=1.0, scales=tuple(s for s in b.scales if s.at != "skip")) for b in group]
        return replace(machine, stream=_swap(machine.stream, bare))
    if edit.scale not in block.scales:
        raise ValueError(f"{target} has no factor {edit.scale}")
    kept = list(block.scales)
    kept.remove(edit.scale)
    return replace(machine, stream=_swap(machine.stream, [replace(block, scales=tuple(kept))]))


def _set_norm(machine: Machine, target: str, edit: SetNorm, resolve: Resolve) -> Machine:
    """Put, change or remove a norm. Its gain starts at `gamma`, whatever the stored form; None leaves it."""
    stream, norm, params, width = machine.stream, edit.norm, dict(machine.params), machine.stream.width
    block = next((b for b in stream.blocks if b.name == target), None)
    held = block.at(edit.where, edit.index) if block else None
    if norm is None and held and edit.where is Where.INNER and held.writers:
        bared = (*machine.bared.get(target, ()), held)
        machine = replace(machine, bared={**machine.bared, target: bared})
    if norm is not None:
        if edit.gamma and norm.gamma is None:
            norm = replace(norm, gamma=f"{target}.{edit.where}.gamma")
        if edit.beta and norm.beta is None:
            norm = replace(norm, beta=f"{target}.{edit.where}.beta")
        if norm.gamma is not None and edit.gamma is not None:
            params[norm.gamma] = resolve(edit.gamma, width) - norm.plus_one
        if norm.beta is not None and edit.beta is not None:
            params[norm.beta] = resolve(edit.beta, width)
    return replace(machine, stream=_put(stream, target, edit, norm), params=params)


def _put(stream: Stream, target: str, edit: SetNorm, norm: Norm | None) -> Stream:
    where = edit.where
    if where in (Where.EMBEDDING, Where.FINAL):
        held = stream.final if where is Where.FINAL else stream.embedding
        site = _site(stream, None, where, norm, held)
        if where is Where.FINAL and held and not site:
            return replace(stream, final=None, readers=held.readers)
        return replace(stream, final=site) if where is Where.FINAL else replace(stream, embedding=site)
    block = next((b for b in stream.blocks if b.name == target), None)
    if block is None:
        raise ValueError(f"the stream has no block {target!r}")
    held = block.at(where, edit.index)
    if not (held or norm):
        if where is Where.POST and block.parallel_group is not None:  # one norm, gone with the sum's other block
            return stream
        raise ValueError(f"{target} has no {where} norm to remove")
    if held and not norm and where is Where.POST and not stream.final and block in sums(stream)[-1]:
        stream = replace(stream, readers=held.readers)  # they read the bare sum now
    site = _site(stream, block, where, norm, held)
    sites = [site if s is held else s for s in block.sites] if held else [*block.sites, site]
    kept = sorted((s for s in sites if s), key=lambda s: _FLOW.index(s.where))
    stated = [b for b in stream.blocks if where is Where.POST and held in b.sites and b.parallel_group is not None]
    others = [replace(b, sites=tuple(n for s in b.sites if (n := site if s == held else s))) for b in stated]
    return _swap(stream, [*others, replace(block, sites=tuple(kept))])


def _site(stream: Stream, block: Block | None, where: Where, norm: Norm | None, held: Site | None) -> Site | None:
    if norm is None:
        return None
    return replace(held, norm=norm) if held else Site(where, norm, _consumers(stream, block, where))


def _consumers(stream: Stream, block: Block | None, where: Where) -> tuple[Linear, ...]:
    """Return the readers that a norm newly put here would have."""
    groups = sums(stream)
    if where in (Where.IN, Where.INNER) and block:
        return block.readers if where is Where.IN else block.writers
    if where is Where.FINAL and groups:
        return next((s.readers for _, s in reversed(trunk_norms(groups[-1]))), ())
    if where in (Where.POST, Where.EMBEDDING):
        here = next((i + 1 for i, group in enumerate(groups) if block in group), 0)
        return tuple(r for g in groups[here : here + 1] for b in g if not b.at(Where.IN) for r in b.readers)
    return ()


def _fold_reader(machine: Machine, edit: FoldReader, resolve: Resolve) -> Machine:
    """W <- W diag(scale), c <- c + W_old shift; a reader without a bias gets one."""
    reader, stream, params = edit.reader, machine.stream, dict(machine.params)
    weight = params[reader.param]
    channels = weight.shape[reader.axis]
    if edit.shift is not None:
        bias = reader.bias or reader.param.removesuffix(".weight") + ".bias"
        stream = _linears(stream, lambda r: replace(r, bias=r.bias or bias) if r.param == reader.param else r)
        moved = matrix(weight, reader.axis) @ np.broadcast_to(resolve(edit.shift, channels), channels)
        params[bias] = params.get(bias, np.zeros(moved.shape)) + moved.reshape(params.get(bias, moved).shape)
    if edit.scale is not None:
        params[reader.param] = _along(weight, reader.axis, resolve(edit.scale, channels).T)
    return replace(machine, stream=stream, params=params)


def _scale_writer(machine: Machine, edit: ScaleWriter, resolve: Resolve) -> Machine:
    """W <- scale W, c <- scale c + shift; a writer without a bias gets one where there is a shift."""
    writer, stream, params = edit.writer, machine.stream, dict(machine.params)
    weight = params[writer.param]
    channels = weight.shape[writer.axis]
    scale = resolve(edit.scale, channels)
    params[writer.param] = _along(weight, writer.axis, scale)
    if writer.bias is not None:
        params[writer.bias] = _along(params[writer.bias], -1, scale)
    if edit.shift is not None:
        bias, shift = writer.bias or writer.param.removesuffix(".weight") + ".bias", resolve(edit.shift, channels)
        stream = _linears(stream, lambda w: replace(w, bias=w.bias or bias) if w.param == writer.param else w)
        params[bias] = params.get(bias, np.zeros(shift.shape)) + shift
    return replace(machine, stream=stream, params=params)


def _swap(stream: Stream, blocks: Iterable[Block]) -> Stream:
    new = {b.name: b for b in blocks}
    return replace(stream, blocks=tuple(new.get(b.name, b) for b in stream.blocks))


def _along(weight: Floats, axis: int, scale: Floats) -> Floats:
    """Multiply each vector along an axis by a diagonal (vector) or a matrix from the left."""
    rows = np.moveaxis(weight, axis, -1)
    return np.moveaxis(rows @ scale.T if scale.ndim > 1 else rows * scale, -1, axis)


def _linears(stream: Stream, change: Callable[[Linear], Linear]) -> Stream:
    """Rewrite every mention of a linear map in a stream."""

    def site(held: Site) -> Site:
        return replace(held, readers=many(held.readers), writers=many(held.writers))

    def many(linears: Iterable[Linear]) -> tuple[Linear, ...]:
        return tuple(map(change, linears))

    def block(held: Block) -> Block:
        sites = tuple(map(site, held.sites))
        pairs = [replace(p, producers=many(p.producers), consumers=many(p.consumers)) for p in held.scale_pairs]
        held = replace(held, sites=sites, scale_pairs=tuple(pairs))
        return replace(held, readers=many(held.readers), writers=many(held.writers))

    return replace(
        stream,
        sources=many(stream.sources),
        readers=many(stream.readers),
        blocks=tuple(map(block, stream.blocks)),
        embedding=stream.embedding and site(stream.embedding),
        final=stream.final and site(stream.final),
    )
