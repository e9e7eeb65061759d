"""Carry a proposal's edits out on a captured graph: new parameters beside their block, nothing else touched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, assert_never

import torch
from torch import fx

from ..diagnostics import LnrewriteError
from ..opgraph import OpGraph
from ..plan import Affine, Array, Edit, FoldReader, Gain, ScaleWriter, SetNorm, Value, Vector
from ..stream import Block, Kind, Linear, Norm, Site, Stream, Where
from .captured import CapturedModule, register
from .lift import parameter_names

aten = torch.ops.aten
NAMES = {Where.IN: "in", Where.OUT: "out", Where.POST: "post", Where.EMBEDDING: "embedding", Where.FINAL: "final"}


class Surgery:
    """Edit one captured module in place; `graph` is its view before the edits, `vectors` what the edits point to."""

    def __init__(self, module: CapturedModule, graph: OpGraph, vectors: Mapping[str, Array]) -> None:
        self.module, self.view, self.vectors = module, graph, vectors
        self.nodes = {n.name: n for n in module.graph.nodes}
        self.standing: dict[str, fx.Node] = {}
        self.chained: dict[tuple[str, Where], fx.Node] = {}
        self.before: dict[str, torch.Tensor] = {}
        self.first = parameter_names(module)
        self.aliases: dict[str, list[str]] = {}
        for name, root in graph.alias.items():
            self.aliases.setdefault(root, []).append(name)

    def apply(self, stream: Stream, edit: Edit, label: str) -> None:
        """Carry out one edit of one stream; `label` is stamped on every node that it makes."""
        block = next((b for b in stream.blocks if b.name == edit.target), None)
        self.label = f"{label}:{edit.target}"
        for operation in edit.operations:
            match operation:
                case SetNorm():
                    self.set_norm(stream, block, operation)
                case FoldReader():
                    self.fold(operation)
                case ScaleWriter():
                    self.scale(operation)
                case Affine():
                    self.affine(self.need(block, edit), operation)
                case _:
                    assert_never(operation)

    def need(self, block: Block | None, edit: Edit) -> Block:
        if block is None:
            raise LnrewriteError("LN301", edit.target, "there is no block of that name", "report this with the model")
        return block

    def finish(self, used: set[str]) -> None:
        """Drop what no longer has a use: dead nodes, and the parameters (of `used`) that only they read."""
        self.module.graph.eliminate_dead_code()
        self.module.graph.lint()
        targets = {str(n.target) for n in self.module.graph.nodes if n.op == "get_attr"}
        alive = {id(self.module.get_parameter(t)) for t in targets if self.is_parameter(t)}
        for name in sorted(used - targets):
            if self.is_parameter(name) and id(self.module.get_parameter(name)) not in alive:
                path, _, leaf = name.rpartition(".")
                delattr(self.module.get_submodule(path), leaf)
        self.module.recompile()

    def is_parameter(self, name: str) -> bool:
        try:
            self.module.get_parameter(name)
        except AttributeError:
            return False
        return True

    # ---- where things are ----

    def stand(self, name: str) -> fx.Node:
        """Return the node that stands for an original value now."""
        return self.standing.get(name) or self.nodes[name]

    def consumers(self, name: str) -> list[tuple[fx.Node, fx.Node]]:
        """Return (user, the operand it reads) for a value, its no-op copies looked through."""
        copies = [self.nodes[a] for a in self.aliases.get(name, [])]
        return [(u, n) for n in [self.stand(name), *copies] for u in list(n.users) if u not in copies]

    def reads(self, block: Block) -> list[tuple[fx.Node, fx.Node]]:
        """Return the edges by which a branch reads its stream."""
        region = {o.name for o in self.view.between(block.anchor.state, block.anchor.branch)}
        return [(u, n) for u, n in self.consumers(block.anchor.state) if u.name in region]

    def read_now(self, block: Block) -> list[tuple[fx.Node, fx.Node]]:
        """Return the edges by which a branch reads what its in norm made, whether or not that norm still stands."""
        site = block.at(Where.IN)
        if site is None:
            return self.reads(block)
        region = {o.name for o in self.view.between(block.anchor.state, block.anchor.branch)}
        users = [u for u in self.view.users[site.origin[-1]] if u in region]
        made = {self.stand(site.origin[-1]), *(self.nodes[a] for a in self.aliases.get(site.origin[-1], []))}
        return [(self.nodes[u], n) for u in users for n in self.nodes[u].all_input_nodes if n in made]

    def skip(self, block: Block) -> list[tuple[fx.Node, fx.Node]]:
        """Return the edge by which a block's sum takes its skip."""
        names, todo = set(), [block.anchor.total]
        while todo:
            name = todo.pop()
            names.add(name)
            todo += [
                n
                for n in self.view[name].data
                if n != block.anchor.skip and self.view[n].kind == "add" and n not in names
            ]
        return [(u, n) for u, n in self.consumers(block.anchor.skip) if u.name in names]

    # ---- operations ----

    def set_norm(self, stream: Stream, block: Block | None, op: SetNorm) -> None:
        ends = {Where.EMBEDDING: stream.embedding, Where.FINAL: stream.final}
        site = block.at(op.where) if block else ends[op.where]
        if site is not None:
            self.replace_norm(block.name if block else stream.name, site, op)
            return
        if op.norm is None:
            raise LnrewriteError("LN301", self.label, f"there is no {op.where} norm to remove", "report this")
        owner = block.name if block else stream.name
        if op.where is Where.OUT and block:
            branch = self.chained.get((owner, Where.OUT)) or self.operand(block)
            node = self.norm(branch, op, owner)
            self.nodes[block.anchor.add].replace_input_with(branch, node)
        elif op.where is Where.IN and block:
            edges = self.reads(block)
            node = self.norm(edges[0][1], op, owner)
            for user, operand in edges:
                user.replace_input_with(operand, node)
        else:
            name = stream.source if op.where is Where.EMBEDDING else block.anchor.total if block else stream.last
            value = self.stand(name)
            node = self.norm(value, op, owner)
            value.replace_all_uses_with(node, delete_user_cb=lambda user: user is not node, propagate_meta=False)
            self.standing[name] = node
        self.chained[owner, op.where] = node

    def operand(self, block: Block) -> fx.Node:
        """Return the node by which a branch's value enters its sum now."""
        add = self.nodes[block.anchor.add]
        held = [n for u, n in self.consumers(block.anchor.branch) if u is add]
        return self.chained.get((block.name, Where.OUT)) or held[0]

    def replace_norm(self, owner: str, site: Site, op: SetNorm) -> None:
        output = self.stand(site.origin[-1])
        source = self.stand(site.origin[0])
        node = source if op.norm is None else self.norm(source, op, owner, at=output)
        output.replace_all_uses_with(node, delete_user_cb=lambda user: user is not node, propagate_meta=False)
        self.standing[site.origin[-1]] = node
        self.chained[owner, op.where] = node

    def norm(self, x: fx.Node, op: SetNorm, owner: str, at: fx.Node | None = None) -> fx.Node:
        """Insert a norm of `x` right behind it (or behind `at`)."""
        norm = op.norm
        assert norm is not None
        if norm.kind not in {Kind.LAYER, Kind.RMS}:
            raise LnrewriteError("LN301", self.label, f"a {norm.kind} norm cannot be written", "report this")
        with self.after(at or x):
            width = x.meta["val"].shape[-1]
            weight = self.gain(norm, op.gamma, f"{owner}.norm_{NAMES[op.where]}.weight", norm.gamma, x)
            if norm.kind is Kind.RMS:
                return self.call(aten.rms_norm.default, (x, [width], weight, norm.eps), x)
            bias = self.gain(
                replace(norm, plus_one=False), op.beta, f"{owner}.norm_{NAMES[op.where]}.bias", norm.beta, x
            )
            return self.call(aten.layer_norm.default, (x, [width], weight, bias, norm.eps), x)

    def gain(self, norm: Norm, value: Value | None, fresh: str, named: str | None, x: fx.Node) -> fx.Node | None:
        """Return the node of a norm's gain or bias: the parameter it names, set to `value`, or a new one."""
        if value is None and named is None:
            return None
        exists = named is not None and self.is_parameter(named)
        if value is not None and value != Gain(str(named), norm.plus_one):
            tensor = self.value(value)
            if norm.plus_one:
                tensor = tensor - 1
            if exists and named and self.view.uses.get(self.first.get(named, named), 0) <= 1:
                self.write(named, tensor)
            else:
                named = self.parameter(fresh, tensor, x)
        node = self.get(str(named))
        if norm.plus_one:
            node = self.call(aten.add.Scalar, (node, 1.0), node)
        return node

    def affine(self, block: Block, op: Affine) -> None:
        """Insert scale * u + shift on the branch's reads, its end, or the skip's edge."""
        if op.where is Where.IN:
            edges = self.read_now(block)
        elif op.where is Where.OUT:
            edges = [(self.nodes[block.anchor.add], self.operand(block))]
        else:
            edges = self.skip(block)
        if not edges:
            raise LnrewriteError(
                "LN301", self.label, f"nothing reads the {op.where} edge", "report this with the model"
            )
        x = edges[0][1]
        with self.after(x):
            node = self.scaled(x, op, f"{block.name}.{NAMES[op.where] if op.where is not Where.POST else 'skip'}")
        for user, operand in edges:
            user.replace_input_with(operand, node)
        if op.where is not Where.POST:
            self.chained[block.name, op.where] = node

    def scaled(self, x: fx.Node, op: Affine, name: str) -> fx.Node:
        node = x
        if op.scale is not None:
            scale = self.get(self.parameter(f"{name}_scale", self.value(op.scale), x))
            node = self.call(aten.mul.Tensor, (node, scale), x)
        if op.shift is not None:
            shift = self.get(self.parameter(f"{name}_shift", self.value(op.shift), x))
            node = self.call(aten.add.Tensor, (node, shift), x)
        return node

    def fold(self, op: FoldReader) -> None:
        """W <- W diag(scale), c <- c + W_old shift."""
        reader = op.reader
        weight = self.module.get_parameter(reader.param).detach().double()
        if op.shift is not None:
            moved = torch.tensordot(weight.movedim(reader.axis, -1), self.value(op.shift).to(weight.device), dims=1)
            self.add_bias(reader, moved.flatten(1).sum(1) if moved.dim() > 1 else moved)
        if op.scale is not None:
            self.write(reader.param, self.seen_through(weight, reader.axis, self.value(op.scale)))

    def add_bias(self, reader: Linear, shift: torch.Tensor) -> None:
        """Add to a linear's bias [out], which is made where there is none."""
        if reader.bias:
            self.write(reader.bias, self.module.get_parameter(reader.bias).detach().double() + shift)
            return
        node = self.nodes[reader.node]
        whole = reader.param.endswith(".weight")
        fresh = f"{reader.param.removesuffix('.weight')}.bias" if whole else f"{reader.param}_bias"
        name = self.parameter(fresh, shift.flatten(), node)
        with self.module.graph.inserting_before(node):
            bias = self.get(name)
        if node.target in {aten.linear.default, aten.conv1d.default, aten.conv2d.default}:
            node.args = (*node.args[:2], bias, *node.args[3:])
            return
        with self.after(node):
            total = self.call(aten.add.Tensor, (node, bias), node)
        node.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total, propagate_meta=False)

    def scale(self, op: ScaleWriter) -> None:
        """W <- diag(scale) W, c <- scale * c + shift."""
        writer, scale = op.writer, self.value(op.scale)
        weight = self.module.get_parameter(writer.param).detach().double()
        self.write(writer.param, self.along(weight, writer.axis, scale))
        if writer.bias:
            bias = self.module.get_parameter(writer.bias).detach().double()
            self.write(writer.bias, bias * scale.to(bias.device))
        if op.shift is not None:
            self.add_bias(writer, self.value(op.shift))

    # ---- parameters and nodes ----

    @classmethod
    def seen_through(cls, weight: torch.Tensor, axis: int, scale: torch.Tensor) -> torch.Tensor:
        """Return W diag(scale), or W scale for a matrix, along the axis that is contracted."""
        if scale.dim() < 2:
            return cls.along(weight, axis, scale)
        return torch.tensordot(weight.movedim(axis, -1), scale.to(weight.device), dims=1).movedim(-1, axis)

    @staticmethod
    def along(weight: torch.Tensor, axis: int, scale: torch.Tensor) -> torch.Tensor:
        shape = [1] * weight.dim()
        shape[axis] = -1
        return weight * scale.to(weight.device).reshape(shape)

    def value(self, value: Value) -> torch.Tensor:
        """Return a value in float64; a parameter's is the one from before the first edit."""
        if isinstance(value, Vector):
            return torch.from_numpy(self.vectors[value.digest]).double()  # type: ignore[arg-type]
        tensor = self.before.get(value.param, self.module.get_parameter(value.param))
        return tensor.detach().double() + float(value.plus_one)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        parameter = self.module.get_parameter(name)
        self.before.setdefault(name, parameter.detach().clone())
        with torch.no_grad():
            parameter.copy_(tensor.reshape(parameter.shape))

    def parameter(self, name: str, tensor: torch.Tensor, beside: fx.Node) -> str:
        """Register a new parameter near `name`, in the dtype and on the device of the values it meets."""
        like: Any = beside.meta["val"]
        device = next((p.device for p in self.module.parameters()), torch.device("cpu"))
        name = name.replace("@", "_")
        taken = {n for n, _ in self.module.named_parameters(remove_duplicate=False)}
        path, _, leaf = name.rpartition(".")
        count = 1
        while f"{path}.{leaf}" in taken:
            count += 1
            leaf = f"{name.rpartition('.')[2]}_{count}"
        register(self.module, f"{path}.{leaf}", torch.nn.Parameter(tensor.to(device=device, dtype=like.dtype).clone()))
        return f"{path}.{leaf}"

    def after(self, node: fx.Node) -> Any:
        return self.module.graph.inserting_before(node.next)

    def get(self, name: str) -> fx.Node:
        node = self.module.graph.get_attr(name)
        node.meta["val"] = self.module.get_parameter(name).detach()
        return node

    def call(self, target: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
        node = self.module.graph.call_function(target, args)
        node.meta["val"] = like.meta["val"]
        node.meta["nn_module_stack"] = like.meta.get("nn_module_stack", {})
        node.meta["custom"] = {**like.meta.get("custom", {}), "lnrewrite": self.label}
        return node
