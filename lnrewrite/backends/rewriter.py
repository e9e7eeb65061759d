"""Carry a proposal's edits out on a graph: `Rewriter` decides what is done, for any backend; an `Editor` does it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Generic, NoReturn, assert_never

import numpy as np

from ..detect.graph import OpGraph
from ..detect.proving import unit
from ..ir import (
    Affine,
    Array,
    Block,
    Bypass,
    Center,
    DropScale,
    Edit,
    FoldReader,
    Freeze,
    Gain,
    Kind,
    Linear,
    Norm,
    Normalize,
    Number,
    Proposal,
    ScaleWriter,
    SetNorm,
    Site,
    Size,
    Stream,
    Untie,
    Value,
    Where,
)
from .editor import Editor, Handle, fail
from .operands import Operands
from .values import Floats
from .wiring import Wiring

WRITTEN = {Kind.LAYER, Kind.RMS, Kind.CRMS}


class Rewriter(Generic[Handle]):
    """Edit one graph through an editor; `graph` is its view before the edits, `vectors` what the edits point to."""

    def __init__(self, editor: Editor[Handle], graph: OpGraph, vectors: Mapping[str, Array]) -> None:
        self.editor, self.view = editor, graph
        self.operands, self.wiring = Operands(editor, vectors), Wiring(editor, graph)
        self.biases: dict[str, str] = {}
        self.sizes: dict[str, Handle] = {}
        self.divided: dict[tuple[str, Handle], Handle] = {}

    def carry_out(self, proposals: Sequence[tuple[Stream, Proposal]], label: str) -> int:
        """Carry out all edits of all streams, drop what they leave without a use, and return how many there were."""
        self.operands.remember(edit for _, proposal in proposals for edit in proposal.edits)
        for stream, proposal in proposals:
            for edit in proposal.edits:
                self.apply(stream, edit, label)
        self.finish()
        return sum(len(proposal.edits) for _, proposal in proposals)

    def apply(self, stream: Stream, edit: Edit, label: str) -> None:
        """Carry out one edit of one stream; `label` is stamped on every node that it makes."""
        block = next((b for b in stream.blocks if b.name == edit.target), None)
        self.operands.remember((edit,))
        self.editor.label = f"{label}:{edit.target}"
        for operation in edit.operations:
            match operation:
                case SetNorm():
                    self.set_norm(stream, block, operation)
                case FoldReader():
                    self.fold(operation)
                case ScaleWriter():
                    self.scale(operation)
                case Affine(where=Where.EMBEDDING):
                    self.begin(stream, operation)
                case Affine() if block is not None:
                    self.affine(stream, block, operation)
                case DropScale() if block is not None:
                    self.drop(block, operation)
                case Normalize():
                    self.normalize(operation)
                case Untie():
                    linear = operation.linear
                    self.editor.untie(self.editor.value(linear.node), linear.param, f"{linear.param}_untied")
                case Freeze():
                    self.freeze(operation)
                case Bypass():
                    self.stand_in(operation.node, operation.kept)
                case Affine() | DropScale():
                    self.fail("unknown block")
                case _:
                    assert_never(operation)

    def finish(self) -> None:
        """Drop what the edits left without a use."""
        self.editor.finish()

    def fail(self, why: str) -> NoReturn:
        fail(self.editor.label, why)

    # ---- operations ----

    def set_norm(self, stream: Stream, block: Block | None, op: SetNorm) -> None:
        """Put a norm at a site, replace the one that is there, or remove it."""
        ends = {Where.EMBEDDING: stream.embedding, Where.FINAL: stream.final}
        site = block.at(op.where, op.index) if block else ends[op.where]
        owner = block.name if block else stream.name
        if site is not None:
            self.replace_norm(owner, site, op)
            return
        if op.norm is None:
            self.fail(f"it has no {op.where} norm to remove")
        ways = {Where.IN: self.wiring.entrance, Where.INNER: self.wiring.ahead, Where.OUT: self.wiring.end}
        if block and op.where in ways:
            uses = ways[op.where](block)
            node = self.norm(uses[0].operand, op.norm, op, owner)
            self.wiring.redirect(uses, node)
            self.wiring.chained[owner, op.where] = node
        else:
            name = stream.source if op.where is Where.EMBEDDING else block.anchor.total if block else stream.last
            value = self.wiring.stand(name)
            uses = self.editor.readers(value)
            node = self.norm(value, op.norm, op, owner)
            self.wiring.redirect(uses, node)
            self.wiring.supersede(name, value, node)

    def replace_norm(self, owner: str, site: Site, op: SetNorm) -> None:
        """Put another norm, or none, between a site's input and its consumers."""
        if site.norm.kind not in WRITTEN and op.norm == site.norm.bare:
            self.bare(site)
            return
        output, source = self.wiring.stand(site.origin[-1]), self.wiring.stand(site.origin[0])
        uses = self.editor.readers(output)
        node = source if op.norm is None else self.norm(source, op.norm, op, owner, at=output)
        self.wiring.redirect(uses, node)
        self.wiring.supersede(site.origin[-1], output, node)
        if op.where in (Where.IN, Where.OUT):
            self.wiring.chained[owner, op.where] = node

    def bare(self, site: Site) -> None:
        """Leave out the gain and the bias of a norm that is spelled out, and stays so."""
        named = {name for name in (site.norm.gamma, site.norm.beta) if name}
        held = [op.name for op in self.view if op.name in named or op.attrs.get("param") in named]
        for op in self.view.between(site.origin[0], site.origin[-1]):
            constant = [n for n in op.data if n in self.view.constant]
            if op.kind in {"mul", "add"} and any(self.view.reaches(name, n) for name in held for n in constant):
                self.stand_in(op.name, self.computed(op.name))

    def norm(self, x: Handle, norm: Norm, op: SetNorm, owner: str, at: Handle | None = None) -> Handle:
        """Insert a norm of `x` right behind it (or behind `at`), with the gain and bias that the operation gives."""
        if norm.kind not in WRITTEN:
            self.fail(f"a {norm.kind} norm cannot be written")
        name = f"{owner}.norm_{op.where}"
        gamma = self.gain(norm.gamma, norm.plus_one, op.gamma, f"{name}.weight", x)
        beta = self.gain(norm.beta, False, op.beta, f"{name}.bias", x)
        return self.editor.norm(name, x, replace(norm, gamma=gamma, beta=beta), x if at is None else at)

    def gain(self, named: str | None, plus_one: bool, value: Value | None, fresh: str, x: Handle) -> str | None:
        """Return the name of a norm's gain or bias: the parameter it names, set to `value`, or a new one."""
        if value is None or value == Gain(str(named), plus_one):
            return named
        values = self.operands.array(value) - plus_one
        if named is not None and self.editor.has(named) and self.view.uses.get(named, 0) <= 1:
            self.editor.transform(named, None, lambda _: values)
            return named
        return self.create(fresh, values, x)

    def affine(self, stream: Stream, block: Block, op: Affine) -> None:
        """Insert scale * u + shift on the branch's reads, its end, the skip's edge, or behind the sum."""
        if op.before and op.where is Where.POST:
            self.behind(stream, block.anchor.total, op, f"{block.name}.affine_sum", block.anchor.axis)
            return
        uses = {Where.IN: self.wiring.entrance, Where.OUT: self.wiring.end}.get(op.where, self.wiring.skip)(block)
        place, site = "skip" if op.where is Where.POST else op.where, block.at(op.where)
        axis = site.norm.axis if site and op.where is Where.IN else block.anchor.axis
        node = self.affine_of(stream, uses[0].operand, op, f"{block.name}.affine_{place}", axis)
        self.wiring.redirect(uses, node)
        self.wiring.chained[block.name, op.where] = node

    def affine_of(self, stream: Stream, x: Handle, op: Affine, name: str, axis: int) -> Handle:
        """Return scale * x + shift, over the channels at `axis`, right behind `x`."""
        if isinstance(op.scale, Center):
            return self.editor.center(x, axis)
        if isinstance(op.scale, Size):
            return self.sized(stream, x, op.scale)
        behind = [1] * (-axis - 1)
        fixed = float(op.scale.value) if isinstance(op.scale, Number) else None
        given = {"scale": op.scale if fixed is None else None, "shift": op.shift}
        arrays = {key: self.operands.array(value) for key, value in given.items() if value is not None}
        names = {
            key: self.create(f"{name}.{key}", array.reshape(*array.shape, *behind) if array.ndim else array, x)
            for key, array in arrays.items()
        }
        return self.editor.affine(x, names.get("scale", fixed), names.get("shift"))

    def sized(self, stream: Stream, x: Handle, by: Size) -> Handle:
        """Return x * S, or x / S, which all that divide one value by one size share."""
        if not by.inverse:
            return self.editor.times(x, self.size(stream, by), False)
        if (by.of, x) not in self.divided:
            self.divided[by.of, x] = self.editor.times(x, self.size(stream, by), True)
        return self.divided[by.of, x]

    def size(self, stream: Stream, size: Size) -> Handle:
        """Return S = S' s(y / S') / c, computed once, right behind y / S'."""
        if size.of not in self.sizes:
            site = next((b.at(Where.POST) for b in stream.blocks if b.name == size.of), stream.embedding)
            if site is None:
                self.fail(f"there is no norm behind {size.of}")
            y, before = self.wiring.stand(site.origin[0]), size.before
            z = self.sized(stream, y, replace(before, inverse=True)) if before else y
            made = self.editor.size(z, size.norm, size.usual)
            self.sizes[size.of] = self.editor.times(made, self.size(stream, before), False) if before else made
        return self.sizes[size.of]

    def begin(self, stream: Stream, op: Affine) -> None:
        """Insert scale * x + shift where a stream starts, or before its embedding norm."""
        name, axis = stream.source, stream.blocks[0].anchor.axis
        if op.before and stream.embedding:
            name, axis = stream.embedding.origin[0], stream.embedding.norm.axis
        self.behind(stream, name, op, f"{stream.name}.affine_source", axis)

    def behind(self, stream: Stream, name: str, op: Affine, title: str, axis: int) -> None:
        """Insert scale * x + shift where a value is made, for all that reads it."""
        old = self.wiring.stand(name)
        uses = self.editor.readers(old)
        new = self.affine_of(stream, old, op, title, axis)
        self.wiring.redirect(uses, new)
        self.wiring.supersede(name, old, new)

    def drop(self, block: Block, op: DropScale) -> None:
        """Make what reads a factor's product read what the factor scales."""
        if op.scale is None:
            on_skip = list(self.skipped(block))
            if all(self.view[name].kind in {"mul", "div"} for name, _ in on_skip):
                self.wiring.redirect(self.wiring.skip(block), self.wiring.stand(block.anchor.state))
                return
            for name, source in on_skip:  # shapes, casts stay
                if self.view[name].kind in {"mul", "div"}:
                    self.stand_in(name, source)
            return
        self.stand_in(op.scale.node, self.computed(op.scale.node))

    def skipped(self, block: Block) -> Iterator[tuple[str, str]]:
        """Yield what a block's skip goes through on its way from the state, the last first, each with its operand."""
        name = block.anchor.skip
        while name != block.anchor.state:
            source = self.computed(name)
            yield name, source
            name = source

    def computed(self, name: str) -> str:
        """Return what an op is applied to: its first operand that is no constant."""
        return next(n for n in self.view[name].data if n not in self.view.constant)

    def stand_in(self, name: str, source: str) -> None:
        """Let what reads one value read another."""
        old, new = self.wiring.stand(name), self.wiring.stand(source)
        self.wiring.redirect(self.editor.readers(old), new)
        self.wiring.supersede(name, old, new)

    def freeze(self, op: Freeze) -> None:
        """Store what computes a weight gives, and let its readers read that."""
        values, old = self.editor.worked_out(op.node), self.editor.value(op.node)
        first = next(n for n in self.view.parameters if self.view.reaches(n, op.node))
        name = self.create(f"{self.view[first].attrs['param']}_frozen", values, old)
        self.wiring.redirect(self.editor.readers(old), self.editor.parameter(name, old))

    def normalize(self, op: Normalize) -> None:
        """E <- gamma * norm(E) + beta, row by row."""
        norm = op.norm
        gamma = self.operands.array(Gain(norm.gamma, norm.plus_one)) if norm.gamma else np.ones(())
        beta = self.operands.array(Gain(norm.beta)) if norm.beta else np.zeros(())

        table = op.table
        self.editor.transform(table.param, table.axis, lambda rows: gamma * unit(norm.kind, rows, norm.eps) + beta)

    def fold(self, op: FoldReader) -> None:
        """W <- W diag(scale), or W scale for a matrix; c <- c + W_old shift."""
        reader = op.reader
        if op.shift is not None:
            spread, held = self.operands.spread, self.editor.rows(reader.param, reader.axis)
            parts = [(rows @ spread(op.shift, rows.shape[-1])).reshape(len(rows), -1) for rows in held]
            self.add_bias(reader, np.concatenate(parts).sum(1))
        if op.scale is not None:
            self.editor.transform(reader.param, reader.axis, self.operands.change(op.scale, transposed=True))

    def scale(self, op: ScaleWriter) -> None:
        """W <- scale W, c <- scale c + shift; a vector is a diagonal matrix, and stands for each head's channels."""
        writer, by = op.writer, self.operands.change(op.scale)
        self.editor.transform(writer.param, writer.axis, by)
        if bias := self.bias(writer):
            self.editor.transform(bias, None, by)
        if op.shift is not None:
            channels = next(self.editor.rows(writer.param, writer.axis)).shape[-1]
            self.add_bias(writer, self.operands.spread(op.shift, channels))

    # ---- parameters ----

    def bias(self, linear: Linear) -> str | None:
        """Return a linear map's bias, one that an edit made included."""
        return linear.bias or self.biases.get(linear.node)

    def add_bias(self, linear: Linear, shift: Floats) -> None:
        """Add to a linear's bias [out], which is made where there is none."""
        if bias := self.bias(linear):
            self.editor.transform(bias, None, lambda flat: flat + shift)
            return
        old = self.editor.value(linear.node)
        whole = linear.param.removesuffix(".weight")
        bias = self.create(f"{whole}{'_' if whole == linear.param else '.'}bias", shift, old)
        self.biases[linear.node] = bias
        self.wiring.supersede(linear.node, old, self.editor.attach(old, bias))

    def create(self, name: str, values: Floats, like: Handle) -> str:
        return self.editor.create(name.replace("@", "_"), values, like)
