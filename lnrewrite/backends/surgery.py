"""Carry a proposal's edits out on a graph: `Surgery` decides what is done, for any backend; an `Editor` does it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NoReturn, Protocol, TypeVar, assert_never

import numpy as np

from ..detect.arithmetic import evaluate
from ..detect.graph import OpGraph
from ..detect.proving import unit
from ..errors import Code, LnrewriteError
from ..ir import (
    Affine,
    Array,
    Block,
    Centre,
    DropScale,
    Edit,
    FoldReader,
    Freeze,
    Gain,
    Kind,
    Linear,
    Norm,
    Normalise,
    Number,
    Proposal,
    Rotation,
    ScaleWriter,
    SetNorm,
    Site,
    Stream,
    Untie,
    Value,
    Where,
)
from .values import Change, Floats, centring, multiplying, rotating

Handle = TypeVar("Handle")


@dataclass(frozen=True, slots=True)
class Edge(Generic[Handle]):
    """Record that something reads `operand`: the names under which the view knows the reader, and the slot."""

    operand: Handle
    consumers: tuple[str, ...]
    slot: Any


class Editor(Protocol[Handle]):
    """Edit one graph in place. Values are opaque handles, parameters are named; `label` is stamped on new nodes.

    New parameters take the dtype of `like`.
    """

    label: str

    def value(self, name: str) -> Handle:
        """Return the value that had this name in the graph before the first edit."""

    def readers(self, value: Handle) -> list[Edge[Handle]]:
        """Return every use that a value has now; the graph's own output is the consumer `output`."""

    def redirect(self, edge: Edge[Handle], new: Handle) -> None:
        """Make one reader read `new`. The graph's outputs keep their names and dtypes."""

    def norm(self, name: str, x: Handle, norm: Norm, at: Handle) -> Handle:
        """Return a new norm of `x` over the norm's axis; its gamma and beta name parameters or computed vectors.

        It stands where `at` is known, and with that what a computed gain is computed from.
        """

    def affine(self, x: Handle, scale: str | None, shift: str | None) -> Handle:
        """Return a new scale * x + shift, either of which may be left out; they broadcast to `x`."""

    def centre(self, x: Handle, axis: int) -> Handle:
        """Return a new x minus its mean over an axis, which stands right behind `x`."""

    def untie(self, linear: Handle, param: str, fresh: str) -> None:
        """Make one node read a copy of a parameter, under that name or one like it, in its place."""

    def attach(self, linear: Handle, bias: str) -> Handle:
        """Add a bias to a linear map that has none and return what is its output then, with all readers."""

    def has(self, param: str) -> bool:
        """Return whether there is a parameter of that name."""

    def holds_value(self, param: str) -> bool:
        """Return whether there is a parameter of that name, or stored numbers that nobody trains."""

    def read(self, param: str) -> Floats:
        """Return a parameter's present values."""

    def rows(self, param: str, axis: int) -> Iterator[Floats]:
        """Yield a parameter's present values piece by piece along its other axes: [..., size of axis]."""

    def transform(self, param: str, axis: int | None, change: Change) -> None:
        """Replace values by change(values), sooner or later: `change` sees [..., size of axis] or, for None, all flat.

        It may be called for pieces along the other axes, and its result is stored in the parameter's own dtype.
        """

    def create(self, name: str, values: Floats, like: Handle) -> str:
        """Make a parameter, under that name or, where it is taken, one like it; return the name."""

    def parameter(self, param: str, at: Handle) -> Handle:
        """Return the value of a parameter, to be read behind `at`."""

    def finish(self) -> None:
        """Drop what no longer has a use: nodes, and parameters that only they read."""


class Surgery(Generic[Handle]):
    """Edit one graph through an editor; `graph` is its view before the edits, `vectors` what the edits point to.

    `standing` holds what stands for an original value now, `chained` what a block's edge carries after an edit there.
    """

    def __init__(self, editor: Editor[Handle], graph: OpGraph, vectors: Mapping[str, Array]) -> None:
        self.editor, self.view, self.vectors = editor, graph, vectors
        self.standing: dict[str, Handle] = {}
        self.chained: dict[tuple[str, Where], Handle] = {}
        self.biases: dict[str, str] = {}
        self.gains: dict[str, Floats] = {}
        self.copies: dict[str, list[str]] = {}
        for name, root in graph.alias.items():
            self.copies.setdefault(root, []).append(name)

    def carry_out(self, proposals: Sequence[tuple[Stream, Proposal]], label: str) -> int:
        """Carry out all edits of all streams, drop what they leave without a use, and return how many there were."""
        self.remember(edit for _, proposal in proposals for edit in proposal.edits)
        for stream, proposal in proposals:
            for edit in proposal.edits:
                self.apply(stream, edit, label)
        self.finish()
        return sum(len(proposal.edits) for _, proposal in proposals)

    def remember(self, edits: Iterable[Edit]) -> None:
        """Read the gains and biases that edits speak of: they mean the values from before the first edit."""
        for operation in (o for edit in edits for o in edit.operations):
            values = [getattr(operation, key, None) for key in ("gamma", "beta", "scale", "shift")]
            names = [value.param for value in values if isinstance(value, Gain)]
            if isinstance(operation, Normalise):
                names += [name for name in (operation.norm.gamma, operation.norm.beta) if name]
            new = [name for name in names if name not in self.gains and self.editor.holds_value(name)]
            self.gains |= {name: self.editor.read(name) for name in new}

    def apply(self, stream: Stream, edit: Edit, label: str) -> None:
        """Carry out one edit of one stream; `label` is stamped on every node that it makes."""
        block = next((b for b in stream.blocks if b.name == edit.target), None)
        self.remember((edit,))
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
                    self.affine(block, operation)
                case DropScale() if block is not None:
                    self.drop(block, operation)
                case Normalise():
                    self.normalise(operation)
                case Untie():
                    linear = operation.linear
                    self.editor.untie(self.editor.value(linear.node), linear.param, f"{linear.param}_untied")
                case Freeze():
                    self.freeze(operation)
                case Affine() | DropScale():
                    self.fail("there is no block of that name")
                case _:
                    assert_never(operation)

    def finish(self) -> None:
        """Drop what the edits left without a use."""
        self.editor.finish()

    def fail(self, why: str) -> NoReturn:
        raise LnrewriteError(Code.LN301, self.editor.label, why, "report this with the model")

    # ---- where things are ----

    def stand(self, name: str) -> Handle:
        """Return what stands for an original value now."""
        return self.standing[name] if name in self.standing else self.editor.value(name)

    def edges(self, name: str, wanted: Collection[str], held: Handle | None = None) -> list[Edge[Handle]]:
        """Return the edges by which the consumers `wanted` take an original value, no-op copies looked through."""
        copies = [self.editor.value(copy) for copy in self.copies.get(name, ())]
        values = [self.stand(name) if held is None else held, *copies]
        found = [e for v in values for e in self.editor.readers(v) if not set(e.consumers).isdisjoint(wanted)]
        return found or self.fail(f"nothing that the plan speaks of reads {name}")

    def entrance(self, block: Block) -> list[Edge[Handle]]:
        """Return the edges by which a branch reads its stream, or what its in norm made: whatever stands there now."""
        site, anchor = block.at(Where.IN), block.anchor
        name = site.origin[-1] if site else anchor.state
        region = {o.name for o in self.view.between(anchor.state, anchor.branch)}
        wanted = region.intersection(self.view.users[name])
        return self.edges(name, wanted, self.chained.get((block.name, Where.IN)))

    def end(self, block: Block) -> list[Edge[Handle]]:
        """Return the edge by which a branch's value enters its sum now."""
        return self.edges(block.anchor.branch, {block.anchor.add}, self.chained.get((block.name, Where.OUT)))

    def skip(self, block: Block) -> list[Edge[Handle]]:
        """Return the edge by which a block's sum takes its skip."""
        names, todo = set(), [block.anchor.total]
        while todo:
            name = todo.pop()
            names.add(name)
            terms = [n for n in self.view[name].data if n != block.anchor.skip and n not in names]
            todo += [n for n in terms if self.view[n].kind == "add"]
        return self.edges(block.anchor.skip, names)

    def redirect(self, edges: list[Edge[Handle]], new: Handle) -> None:
        for edge in edges:
            self.editor.redirect(edge, new)

    def supersede(self, name: str, old: Handle, new: Handle) -> None:
        """Make `new` stand wherever `old` stood, for the original value `name` among them."""
        self.standing.setdefault(name, old)
        self.standing.update({k: new for k, v in self.standing.items() if v is old})
        self.chained.update({k: new for k, v in self.chained.items() if v is old})

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
            self.fail(f"there is no {op.where} norm to remove")
        if block and op.where in (Where.IN, Where.OUT):
            edges = self.entrance(block) if op.where is Where.IN else self.end(block)
            node = self.norm(edges[0].operand, op.norm, op, owner)
            self.redirect(edges, node)
        else:
            name = stream.source if op.where is Where.EMBEDDING else block.anchor.total if block else stream.last
            value = self.stand(name)
            edges = self.editor.readers(value)
            node = self.norm(value, op.norm, op, owner)
            self.redirect(edges, node)
            self.supersede(name, value, node)
        self.chained[owner, op.where] = node

    def replace_norm(self, owner: str, site: Site, op: SetNorm) -> None:
        """Put another norm, or none, between a site's input and its consumers."""
        output, source = self.stand(site.origin[-1]), self.stand(site.origin[0])
        edges = self.editor.readers(output)
        node = source if op.norm is None else self.norm(source, op.norm, op, owner, at=output)
        self.redirect(edges, node)
        self.supersede(site.origin[-1], output, node)
        self.chained[owner, op.where] = node

    def norm(self, x: Handle, norm: Norm, op: SetNorm, owner: str, at: Handle | None = None) -> Handle:
        """Insert a norm of `x` right behind it (or behind `at`), with the gain and bias that the operation gives."""
        if norm.kind not in {Kind.LAYER, Kind.RMS}:
            self.fail(f"a {norm.kind} norm cannot be written")
        name = f"{owner}.norm_{op.where}"
        gamma = self.gain(norm.gamma, norm.plus_one, op.gamma, f"{name}.weight", x)
        beta = self.gain(norm.beta, False, op.beta, f"{name}.bias", x)
        return self.editor.norm(name, x, replace(norm, gamma=gamma, beta=beta), x if at is None else at)

    def gain(self, named: str | None, plus_one: bool, value: Value | None, fresh: str, x: Handle) -> str | None:
        """Return the name of a norm's gain or bias: the parameter it names, set to `value`, or a new one."""
        if value is None or value == Gain(str(named), plus_one):
            return named
        values = self.value(value) - plus_one
        if named is not None and self.editor.has(named) and self.view.uses.get(named, 0) <= 1:
            self.editor.transform(named, None, lambda _: values)
            return named
        return self.create(fresh, values, x)

    def affine(self, block: Block, op: Affine) -> None:
        """Insert scale * u + shift on the branch's reads, its end, or the skip's edge."""
        edges = {Where.IN: self.entrance, Where.OUT: self.end}.get(op.where, self.skip)(block)
        place, site = "skip" if op.where is Where.POST else op.where, block.at(op.where)
        axis = site.norm.axis if site and op.where is Where.IN else block.anchor.axis
        node = self.affine_of(edges[0].operand, op, f"{block.name}.affine_{place}", axis)
        self.redirect(edges, node)
        if op.where is not Where.POST:
            self.chained[block.name, op.where] = node

    def affine_of(self, x: Handle, op: Affine, name: str, axis: int) -> Handle:
        """Return scale * x + shift, over the channels at `axis`, right behind `x`."""
        if isinstance(op.scale, Centre):
            return self.editor.centre(x, axis)
        behind = [1] * (-axis - 1)
        given = {"scale": op.scale, "shift": op.shift}
        arrays = {key: self.value(value) for key, value in given.items() if value is not None}
        names = {
            key: self.create(f"{name}.{key}", array.reshape(*array.shape, *behind) if array.ndim else array, x)
            for key, array in arrays.items()
        }
        return self.editor.affine(x, names.get("scale"), names.get("shift"))

    def begin(self, stream: Stream, op: Affine) -> None:
        """Insert scale * x + shift where a stream starts, or before its embedding norm."""
        name, axis = stream.source, stream.blocks[0].anchor.axis
        if op.before and stream.embedding:
            name, axis = stream.embedding.origin[0], stream.embedding.norm.axis
        old = self.stand(name)
        edges = self.editor.readers(old)
        new = self.affine_of(old, op, f"{stream.name}.affine_source", axis)
        self.redirect(edges, new)
        self.supersede(name, old, new)

    def drop(self, block: Block, op: DropScale) -> None:
        """Make what reads a factor's product read what the factor scales."""
        if op.scale is None:
            self.redirect(self.skip(block), self.stand(block.anchor.state))
            return
        name = op.scale.node
        source = next(n for n in self.view[name].data if n not in self.view.constant)
        old, new = self.stand(name), self.stand(source)
        self.redirect(self.editor.readers(old), new)
        self.supersede(name, old, new)

    def freeze(self, op: Freeze) -> None:
        """Run what computes a weight, in float64, and let its readers read the result."""
        values, old = evaluate(self.view, op.node, self.editor.read), self.editor.value(op.node)
        first = next(n for n in self.view.parameters if self.view.reaches(n, op.node))
        name = self.create(f"{self.view[first].attrs['param']}_frozen", values, old)
        self.redirect(self.editor.readers(old), self.editor.parameter(name, old))

    def normalise(self, op: Normalise) -> None:
        """E <- gamma * norm(E) + beta, row by row."""
        norm = op.norm
        gamma = self.value(Gain(norm.gamma, norm.plus_one)) if norm.gamma else np.ones(())
        beta = self.value(Gain(norm.beta)) if norm.beta else np.zeros(())

        table = op.table
        self.editor.transform(table.param, table.axis, lambda rows: gamma * unit(norm.kind, rows, norm.eps) + beta)

    def fold(self, op: FoldReader) -> None:
        """W <- W diag(scale), or W scale for a matrix; c <- c + W_old shift."""
        reader = op.reader
        if op.shift is not None:
            shift = self.value(op.shift)
            parts = [(rows @ shift).reshape(len(rows), -1) for rows in self.editor.rows(reader.param, reader.axis)]
            self.add_bias(reader, np.concatenate(parts).sum(1))
        if op.scale is not None:
            self.editor.transform(reader.param, reader.axis, self.along(op.scale, transposed=True))

    def scale(self, op: ScaleWriter) -> None:
        """W <- scale W, c <- scale c + shift; a vector is a diagonal matrix, and stands for each head's channels."""
        writer, by = op.writer, self.along(op.scale)
        self.editor.transform(writer.param, writer.axis, by)
        if bias := self.bias(writer):
            self.editor.transform(bias, None, by)
        if op.shift is not None:
            shift, channels = self.value(op.shift), next(self.editor.rows(writer.param, writer.axis)).shape[-1]
            self.add_bias(writer, np.tile(shift, channels // shift.size))

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
        self.supersede(linear.node, old, self.editor.attach(old, bias))

    def create(self, name: str, values: Floats, like: Handle) -> str:
        return self.editor.create(name.replace("@", "_"), values, like)

    def value(self, value: Value) -> Floats:
        """Return a vector or a matrix in float64; a parameter's is the one from before the first edit."""
        match value:
            case Gain(param, plus_one):
                return self.gains[param] + float(plus_one)
            case Number(number):
                return np.asarray(number)
            case Centre() | Rotation():
                self.fail(f"{value} has no vector")
            case _:
                return np.asarray(self.vectors[value.digest], dtype=np.float64)

    def along(self, value: Value, transposed: bool = False) -> Change:
        """Return what multiplies each row [..., channels] by a value's matrix, or by its transpose."""
        match value:
            case Centre(width):
                return centring(width)
            case Rotation():
                return rotating(value.transposed if transposed else value)
            case _:
                matrix = self.value(value)
                return multiplying(matrix.T if transposed and matrix.ndim > 1 else matrix)
