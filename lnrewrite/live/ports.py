"""Where a module's values can be reached from outside its code: what its children take and give, and its own sums.

A live module keeps its Python; only at three kinds of places can something be put between what a graph shows: where a
value enters a child, where it leaves one, and at an operation that a forward spells out.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType

import torch
from torch import fx, nn

from ..backends.torch.contexts import dry, evaluating, quiet, unchanged
from ..backends.torch.module import Args, Called, Kwargs
from ..compat.torch import TreeSpec, operator_name, pytree
from ..detect.graph import OpGraph
from ..recipe.runtime import digest_of, operations, source_of

SPELT = {"add": ("add", "add_"), "sub": ("sub", "sub_"), "mul": ("mul", "mul_"), "div": ("div", "div_")}
SIGNS = {"add": ast.Add, "sub": ast.Sub, "mul": ast.Mult, "div": ast.Div}


@dataclass(frozen=True)
class Child:
    """Hold one child's only call: what enters it and what leaves it, each with the graph's name of the value.

    `takes` are (parameter of its forward, position), `gives` the key in its output: None, an index or a name.
    """

    path: str
    takes: tuple[tuple[tuple[str, int], str], ...]
    gives: tuple[tuple[int | str | None, str], ...]


@dataclass(frozen=True)
class Spot:
    """Name an operation of a forward: the module, the source's digest, and the operation's place and text in it."""

    path: str
    digest: str
    index: int
    text: str


def children(module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[str, ...]:
    """Return the paths of the children that a run calls once, with tensors only, but for switches and fractions."""
    names = {m: n for n, m in module.named_modules() if n}
    calls: dict[nn.Module, int] = {}
    plain: dict[nn.Module, bool] = {}

    def seen(child: nn.Module, args: Args, kwargs: Kwargs, output: object) -> None:
        leaves = pytree.tree_leaves((args, kwargs, output))
        calls[child] = calls.get(child, 0) + 1
        plain[child] = all(v is None or isinstance(v, (torch.Tensor, bool, float)) for v in leaves)

    handles = [child.register_forward_hook(seen, with_kwargs=True) for child in names]
    try:
        with evaluating(module), unchanged(module), quiet(), dry(module):
            module(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(names[m] for m, times in calls.items() if times == 1 and plain[m])


class Ports:
    """Find where values of a captured graph can be reached in the module that it was captured from."""

    def __init__(self, module: nn.Module, graph: fx.Graph, view: OpGraph, calls: Iterable[Called]) -> None:
        self.module, self.view = module, view
        self.nodes = {n.name: n for n in graph.nodes}
        self.calls = [self.child(seen) for seen in calls]
        self.stacks = {n.name: _stack(n) for n in graph.nodes}
        self.once = {c.path for c in self.calls} | {""}

    def root(self, name: str) -> str:
        """Return the value that a name stands for, no-op copies looked through."""
        return self.view.alias.get(name, name)

    def child(self, seen: Called) -> Child:
        """Read what entered and left a child: its inputs by parameter, its outputs by key."""
        names = list(inspect.signature(self.module.get_submodule(seen.path).forward).parameters)
        args, kwargs = seen.in_spec.children()
        given = iter(seen.inputs)
        takes: list[tuple[tuple[str, int], str]] = []
        for index, value in enumerate(_each(args, given)):
            if value is not None:
                takes.append(((names[index] if index < len(names) else "", index), self.root(value)))
        for name, value in zip(kwargs.context or [], _each(kwargs, given), strict=True):
            if value is not None:
                takes.append(((name, names.index(name) if name in names else len(names)), self.root(value)))
        spec, gives = seen.out_spec, iter(seen.outputs)
        if spec.is_leaf():
            keys: list[int | str | None] = [None]
            values = list(gives)
        else:
            named = spec.context if isinstance(spec.context, list) and spec.type not in (tuple, list) else None
            values = list(_each(spec, gives))
            keys = list(named or range(len(values)))
        outputs = zip(keys, values, strict=True)
        return Child(seen.path, tuple(takes), tuple((key, self.root(v)) for key, v in outputs if v is not None))

    def inside(self, path: str, name: str) -> bool:
        """Return whether a node was made while a child ran."""
        return path in self.stacks[name]

    def times(self, path: str) -> int:
        """Return how often a child is called, under all of its names."""
        names = {m: n for n, m in self.module.named_modules()}
        paths = {n: names[m] for n, m in self.module.named_modules(remove_duplicate=False)}
        stacks = [n.meta.get("nn_module_stack") or {} for n in self.nodes.values()]
        keys = {key: str(p).partition("@")[0] for stack in stacks for key, (p, _) in stack.items()}
        return sum(paths.get(p) == paths[path] for p in keys.values()) if path in paths else 0

    def owner(self, name: str) -> str:
        """Return the path of the module whose own forward made a node."""
        return self.stacks[name][-1] if self.stacks[name] else ""

    def giving(self, name: str, outside: Iterable[str]) -> list[Child]:
        """Return the children that give a value, where all nodes `outside` are outside of them; outermost first."""
        wanted = list(outside)
        return [
            c
            for c in self.calls
            if any(n == name for _, n in c.gives) and not any(self.inside(c.path, o) for o in wanted)
        ]

    def taking(self, name: str) -> list[Child]:
        """Return the children that a value enters, outermost first."""
        return [c for c in self.calls if any(n == name for _, n in c.takes)]

    def spot(self, name: str) -> Spot | None:
        """Return the operation of a forward that makes a node, or None where it is not told apart."""
        node, path = self.nodes[name], self.owner(name)
        kind = _kind(node)
        if kind is None or path not in self.once:
            return None
        cls = type(self.module.get_submodule(path))
        try:
            function, source = source_of(cls)
            first = inspect.getsourcelines(function)[1]
            tree = ast.parse(source)
        except (OSError, TypeError, SyntaxError):
            return None
        line = _line(node, function)
        if line is None:
            return None
        alike = [
            n
            for n, other in self.nodes.items()
            if self.stacks[n] == self.stacks[name] and _kind(other) == kind and _line(other, function) == line
        ]
        ops = operations(tree)
        there = [i for i, op in enumerate(ops) if op.lineno + first - 1 == line and _spells(op, kind)]
        if len(there) != len(alike):
            return None
        index = there[alike.index(name)]
        return Spot(path, digest_of(source), index, ast.unparse(ops[index]))

    def side(self, spot: Spot, name: str, operand: str) -> str | None:
        """Return on which side of an operation an operand stands: as the graph's node has it."""
        inputs = [self.root(n.name) for n in self.nodes[name].args if isinstance(n, fx.Node)]
        if inputs.count(operand) != 1 or len(inputs) != 2:
            return None
        return ("left", "right")[inputs.index(operand)]


def submodule(module: nn.Module, path: str) -> nn.Module | None:
    """Return the submodule at a path, None where there is none."""
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def has_path(module: nn.Module, path: str) -> bool:
    """Return whether a module holds anything at a path."""
    parent, _, leaf = path.rpartition(".")
    found = submodule(module, parent)
    return found is not None and hasattr(found, leaf)


def _each(spec: TreeSpec, leaves: Iterator[str | None]) -> Iterator[str | None]:
    """Yield each child of a tree of values, None where it is no tensor but a tree itself."""
    for child in spec.children():
        held = [next(leaves) for _ in range(child.num_leaves)]
        yield held[0] if child.is_leaf() else None


def _stack(node: fx.Node) -> tuple[str, ...]:
    entries = node.meta.get("nn_module_stack") or {}
    paths = {k: v for k, v in entries.items() if not k.startswith("_")}
    return tuple(str(v[0]).partition("@")[0] for v in paths.values())


def _kind(node: fx.Node) -> str | None:
    name = operator_name(node.target) if node.op == "call_function" else ""
    return name if name in SIGNS else None


def _line(node: fx.Node, function: FunctionType) -> int | None:
    """Return the line of a function at which a node was made, where the function itself made it."""
    frames = re.findall(r'File "(.*?)", line (\d+), in ', node.stack_trace or "")
    if not frames:
        return None
    file, line = frames[-1]
    code = function.__code__
    lines = [n for _, _, n in code.co_lines() if n is not None]
    inside = file == code.co_filename and lines and min(lines) <= int(line) <= max(lines)
    return int(line) if inside else None


def _spells(op: ast.AST, kind: str) -> bool:
    """Return whether an expression is an operation of that kind."""
    if isinstance(op, (ast.BinOp, ast.AugAssign)):
        return isinstance(op.op, SIGNS[kind])
    called = op.func if isinstance(op, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr in SPELT[kind]
