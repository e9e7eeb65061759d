"""Edit a captured torch.fx graph: new parameters beside their block, nothing else touched."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import chain, count
from typing import Any

import torch
from torch import fx

from ...compat.torch import OpOverload
from ...errors import Code, LnrewriteError
from ...ir import Kind, Norm
from ..editor import Use
from ..values import CHUNK, Change, Floats
from .lift import SPREADS
from .module import CapturedModule, register, stored
from .pieces import Piece
from .widened import worked_out

aten = torch.ops.aten
BIASED = {
    aten.linear.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.conv1d.padding,
    aten.conv2d.padding, aten.conv3d.padding, aten.convolution.default,
}  # fmt: skip
"""Linear maps that take a bias as their third argument."""


class FxEditor:
    """Edit one captured module in place; see `backends.editor.Editor`."""

    def __init__(self, module: CapturedModule) -> None:
        self.module, self.graph, self.label = module, module.graph, ""
        self.nodes = {n.name: n for n in module.graph.nodes}
        self.used = {str(n.target) for n in module.graph.nodes if n.op == "get_attr"}

    def value(self, name: str) -> fx.Node:
        """Return the node that had this name before the first edit; of one with several results, the first."""
        node = self.nodes[name]
        if isinstance(node.meta.get("val"), (tuple, list)):
            return next(u for u in node.users if u.target is operator.getitem and u.args[1] == 0)
        return node

    def readers(self, value: fx.Node) -> list[Use[fx.Node]]:
        """Return a use for each node that reads `value`; one of several statistics goes by their names too."""
        return [
            Use(value, (user.name, *(u.name for u in user.users if user.target in SPREADS)), user)
            for user in value.users
        ]

    def redirect(self, use: Use[fx.Node], new: fx.Node) -> None:
        """Make one reader read `new`."""
        use.slot.replace_input_with(use.operand, new)

    def norm(self, name: str, x: fx.Node, norm: Norm, at: fx.Node) -> fx.Node:
        """Return a new norm of `x` over its channels, behind `at`: torch's operators take the last axis."""
        if norm.over:
            x = at = self.norm(f"{name}.over", x, norm.over, at)
        width = x.meta["val"].shape[norm.axis]
        with self.after(at):
            weight, bias = self.flat(norm.gamma, width), self.flat(norm.beta, width)
            gain = self.call(aten.add.Scalar, (weight, 1.0), weight) if weight and norm.plus_one else weight
            value = self.turned(x, norm.axis)
            if norm.kind is Kind.LAYER:
                made = self.call(aten.layer_norm.default, (value, [width], gain, bias, norm.eps), value)
            elif norm.kind is Kind.RMS:
                made = self.call(aten.rms_norm.default, (value, [width], gain, norm.eps), value)
            else:
                made = self.compressed(value, norm.eps)
                made = self.call(aten.mul.Tensor, (made, gain), value) if gain else made
            end = made if norm.kind is Kind.LAYER or bias is None else self.call(aten.add.Tensor, (made, bias), value)
            end = self.turned(end, norm.axis)
        entry = made if value is x else value
        if norm.kind is not Kind.CRMS:  # which is no one operator: a module in Python does not take it
            Piece.norm(name, norm, width, entry, {"weight": weight, "bias": bias}).record(end)
        return end

    def compressed(self, x: fx.Node, eps: float) -> fx.Node:
        """Return a new x / sqrt((sum x^2 + (sum x)^2) / (n + 1) + eps) over the last axis of n channels."""
        square = self.call(aten.mul.Tensor, (x, x), x)
        both = [self.mean(value, -1, aten.sum.dim_IntList) for value in (square, x)]
        again = self.call(aten.mul.Tensor, (both[1], both[1]), both[1])
        total = self.call(aten.add.Tensor, (both[0], again), again)
        total = self.call(aten.div.Tensor, (total, x.meta["val"].shape[-1] + 1), total)
        size = self.call(aten.sqrt.default, (self.call(aten.add.Scalar, (total, eps), total),), total)
        return self.call(aten.div.Tensor, (x, size), x)

    def affine(self, x: fx.Node, scale: str | float | None, shift: str | None) -> fx.Node:
        """Return a new scale * x + shift, right behind `x`."""
        node = x
        with self.after(x):
            if isinstance(scale, float):
                node = self.call(aten.mul.Tensor, (node, scale), x)
                Piece.times(scale, x, node).record(node)
            elif factor := self.vector(scale):
                node = self.call(aten.mul.Tensor, (node, factor), x)
                Piece.affine("scale", factor, node).record(node)
            if term := self.vector(shift):
                node = self.term(node, term, x)
        return node

    def term(self, x: fx.Node, term: fx.Node, like: fx.Node) -> fx.Node:
        """Return a new x + term."""
        total = self.call(aten.add.Tensor, (x, term), like)
        Piece.affine("shift", term, total).record(total)
        return total

    def center(self, x: fx.Node, axis: int) -> fx.Node:
        """Return a new x - mean(x) over an axis, right behind `x`."""
        with self.after(x):
            end = self.call(aten.sub.Tensor, (x, self.mean(x, axis)), x)
        Piece.center(x, axis, end).record(end)
        return end

    def size(self, x: fx.Node, norm: Norm, usual: float) -> fx.Node:
        """Return what a norm divides `x` by, over `usual`; in float32 where `x` is narrower, right behind `x`."""
        kept = x.meta["val"].dtype
        value = self.cast(x, torch.float32) if kept.itemsize < torch.float32.itemsize else x
        value = self.center(value, norm.axis) if norm.kind is Kind.LAYER else value
        with self.after(value):
            square = self.call(aten.mul.Tensor, (value, value), value)
            mean = self.mean(square, norm.axis)
            root = self.call(aten.sqrt.default, (self.call(aten.add.Scalar, (mean, norm.eps), mean),), mean)
            root = root if usual == 1 else self.call(aten.div.Tensor, (root, usual), root)
        return root if value.meta["val"].dtype is kept else self.cast(root, kept)

    def times(self, x: fx.Node, by: fx.Node, inverse: bool) -> fx.Node:
        """Return a new x * by, or x / by, right behind `x`."""
        with self.after(x):
            return self.call(aten.div.Tensor if inverse else aten.mul.Tensor, (x, by), x)

    def untie(self, linear: fx.Node, param: str, fresh: str) -> None:
        """Make one node read its own copy of a parameter, under another name that the parameter has or a new one."""
        tensor = self.module.get_parameter(param)
        tied = [n for n, p in self.module.named_parameters(remove_duplicate=False) if p is tensor and n != param]
        owner = [path for path, _ in (linear.meta.get("nn_module_stack") or {}).values()]
        name = min(tied, key=lambda n: n.rpartition(".")[0] not in owner, default=None) or self.fresh(fresh)
        path = next(path for path in map(_origins, linear.all_input_nodes) if self.holds(path[-1], tensor))
        for node in self.graph.find_nodes(op="get_attr", target=name):
            node.target = param
        register(self.module, name, torch.nn.Parameter(tensor.detach().clone(), tensor.requires_grad))
        with self.graph.inserting_before(linear):
            copy = self.graph.get_attr(name)
            copy.meta["val"] = self.module.get_parameter(name).detach()
            for old, source in zip(path[-2::-1], path[:0:-1], strict=True):
                copy = self.graph.node_copy(old, {source: copy}.get)
        linear.replace_input_with(path[0], copy)

    def holds(self, node: fx.Node, tensor: torch.Tensor) -> bool:
        """Return whether a node gets this parameter."""
        name = str(node.target)
        return node.op == "get_attr" and self.has(name) and self.module.get_parameter(name) is tensor

    def attach(self, linear: fx.Node, bias: str) -> fx.Node:
        """Give a linear map its bias: as an argument where it takes one, added behind it elsewhere."""
        with self.graph.inserting_before(linear):
            term = self.vector(bias)
        assert term is not None
        if linear.target in BIASED:
            linear.args = (*linear.args[:2], term, *linear.args[3:])
            return linear
        uses = self.readers(linear)
        with self.after(linear):
            total = self.term(linear, term, linear)
        for use in uses:
            self.redirect(use, total)
        return total

    def has(self, param: str) -> bool:
        """Return whether there is a parameter of that name."""
        try:
            self.module.get_parameter(param)
        except AttributeError:
            return False
        return True

    def holds_value(self, param: str) -> bool:
        """Return whether there is a parameter or a buffer of that name."""
        return stored(self.module, param) is not None

    def parameter(self, param: str, at: fx.Node) -> fx.Node:
        """Return a node that gets a parameter, right behind `at`."""
        with self.after(at):
            node = self.vector(param)
        assert node is not None
        return node

    def tensor(self, param: str) -> torch.Tensor:
        """Return a parameter, or a buffer: stored statistics, positions that are computed once."""
        tensor = stored(self.module, param)
        assert tensor is not None
        return tensor

    def read(self, param: str) -> Floats:
        """Return a parameter's present values."""
        return numpy_of(self.tensor(param))

    def rows(self, param: str, axis: int) -> Iterator[Floats]:
        """Yield a parameter's present values [..., size of axis]."""
        return map(numpy_of, pieces_of(self.tensor(param), axis))

    def worked_out(self, name: str) -> Floats:
        """Return the value of a node that parameters alone decide."""
        return numpy_of(worked_out(self.module, name))

    def transform(self, param: str, axis: int | None, change: Change) -> None:
        """Replace a parameter's values in place, piece by piece."""
        with torch.no_grad():
            for piece in pieces_of(self.tensor(param), axis):
                piece.copy_(torch.from_numpy(change(numpy_of(piece)).reshape(piece.shape)))

    def create(self, name: str, values: Floats, like: fx.Node) -> str:
        """Register a new parameter near `name`, in the dtype of `like` and on the device of the others."""
        device = next((p.device for p in self.module.parameters()), torch.device("cpu"))
        name, dtype = self.fresh(name), like.meta["val"].dtype
        register(self.module, name, torch.nn.Parameter(torch.from_numpy(values).to(device, dtype, copy=True)))
        return name

    def fresh(self, name: str) -> str:
        """Return the name, or one like it, that no parameter has."""
        taken = {n for n, _ in self.module.named_parameters(remove_duplicate=False)}
        return next(n for n in chain([name], (f"{name}_{i}" for i in count(2))) if n not in taken)

    def finish(self) -> None:
        """Drop dead nodes, and the parameters that only they read; make the module's code again."""
        self.graph.eliminate_dead_code()
        self.graph.lint()
        targets = {str(n.target) for n in self.graph.nodes if n.op == "get_attr"}
        alive = {id(self.module.get_parameter(t)) for t in targets if self.has(t)}
        for name in sorted(self.used - targets):
            if self.has(name) and id(self.module.get_parameter(name)) not in alive:
                path, _, leaf = name.rpartition(".")
                delattr(self.module.get_submodule(path), leaf)
        self.module.recompile()

    # ---- nodes ----

    def after(self, node: fx.Node) -> Any:
        return self.graph.inserting_before(node.next)

    def vector(self, name: str | None) -> fx.Node | None:
        """Return a new node that gets a parameter, or the node of that name that computes a vector."""
        if name is None or not self.holds_value(name):
            return None if name is None else self.nodes[name]
        node = self.graph.get_attr(name)
        node.meta["val"] = self.tensor(name).detach()
        return node

    def flat(self, name: str | None, width: int) -> fx.Node | None:
        """Return what `vector` does, one number per channel whatever form it is stored in, one number for all too."""
        node = self.vector(name)
        if node is None or node.meta["val"].shape == (width,):
            return node
        held = node.meta["val"]
        if held.numel() == 1:
            node, held = self.call(aten.reshape.default, (node, [1]), node), held.reshape(1).expand(width)
            flat = self.call(aten.expand.default, (node, [width]), node)
        else:
            flat, held = self.call(aten.reshape.default, (node, [width]), node), held.reshape(width)
        flat.meta["val"] = held
        return flat

    def turned(self, x: fx.Node, axis: int) -> fx.Node:
        """Return a value whose axis, counted from the end, has changed places with the last."""
        if axis == -1:
            return x
        node = self.call(aten.transpose.int, (x, axis, -1), x)
        node.meta["val"] = x.meta["val"].transpose(axis, -1)
        return node

    def mean(self, x: fx.Node, axis: int, operator: OpOverload = aten.mean.dim) -> fx.Node:
        """Return the mean over an axis, or its sum, which stays as one."""
        node = self.call(operator, (x, [axis], True), x)
        node.meta["val"] = x.meta["val"].narrow(axis, 0, 1)
        return node

    def cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Return a value in another dtype, right behind `x`."""
        with self.after(x):
            node = self.call(aten._to_copy.default, (x,), x)
        node.kwargs, node.meta["val"] = {"dtype": dtype}, x.meta["val"].to(dtype)
        return node

    def call(self, target: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = like.meta["val"]
        node.meta["nn_module_stack"] = like.meta.get("nn_module_stack", {})
        node.meta["custom"] = {**like.meta.get("custom", {}), "lnrewrite": self.label}
        return node


def _origins(node: fx.Node) -> list[fx.Node]:
    """Return a node and what it is made from, while that is one node."""
    path = [node]
    while path[-1].op == "call_function" and len(path[-1].all_input_nodes) == 1:
        path.append(path[-1].all_input_nodes[0])
    return path


def pieces_of(parameter: torch.Tensor, axis: int | None) -> Iterator[torch.Tensor]:
    """Yield views [..., size of axis] of at most about `CHUNK` numbers that make up a parameter; None: one, flat."""
    values = parameter.detach()
    if not values.numel():
        return
    if axis is None or values.dim() == 1:
        yield values.view(-1) if axis is None else values.view(1, -1)
        return
    rows = values.movedim(axis, -1)
    yield from rows.split(max(1, CHUNK * len(rows) // max(rows.numel(), 1)))


def numpy_of(tensor: torch.Tensor) -> Floats:
    """Return a tensor's numbers. Raises LnrewriteError LN026 where it holds none."""
    if tensor.is_meta:
        why = "the model is on the meta device and holds no numbers"
        raise LnrewriteError(Code.LN026, "editing", why, "load its weights first; inspecting and planning work without")
    return tensor.detach().double().cpu().numpy()
