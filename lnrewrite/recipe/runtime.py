"""What a rewritten module is made of, and the recipe that makes it: torch and the standard library alone.

A recipe is a list of changes, as JSON holds them. `apply` carries it out on a module whose weights are loaded later::

    {"module": path, "as": [spec, ...]}                         put a piece (norm, affine, center) there, or nothing
    {"before": path, "at": [[name, index]], "by": [path, ...]}  what enters a module passes through pieces first
    {"after": path, "at": [key], "by": [path, ...]}             what leaves it passes through pieces (None: all of it)
    {"source": path, "digest": ..., "edits": [...]}             its forward with some sums and products changed
    {"bias": path, "size": n}                                   a linear map gets a bias
    {"untie": name}                                             a parameter gets a storage of its own

An edit of a forward names an expression by its place among the function's operations, in the order in which Python
evaluates them, and by its text: `result`, `left` and `right` are the pieces that a value passes through, `keep` the
operand that stands for the whole. A forward of another digest is refused. This file goes into the folders that
lnrewrite writes, so that they load without it.
"""

from __future__ import annotations
import __future__

import ast
import functools
import hashlib
import inspect
import json
import linecache
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Change = Mapping[str, Any]
"""A change of a recipe, or an edit of a forward, as JSON holds it."""

OPERATIONS = (ast.BinOp, ast.AugAssign, ast.Call)
"""What an edit of a forward may speak of."""

FUSED = {"activation_relu_or_gelu": 0, "use_nested_tensor": False}
"""What keeps torch's encoders from their kernels for inference, which read the norms' weights and call no children."""


# ---- pieces ----


class Norm(nn.Module):
    """weight * u + bias, u = (x - mean(x)) / sqrt(var(x) + eps) over an axis; `rms`: x / sqrt(mean(x^2) + eps).

    `plus_one`: the weight is stored less one.
    """

    def __init__(
        self, kind: str, width: int, eps: float, weight: bool, bias: bool, plus_one: bool = False, axis: int = -1
    ) -> None:
        super().__init__()
        self.kind, self.width, self.eps, self.plus_one, self.axis = kind, width, eps, plus_one, axis
        self.weight = nn.Parameter(torch.full((width,), 1.0 - plus_one)) if weight else None
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x) if self.axis == -1 else self.last(x.transpose(self.axis, -1)).transpose(self.axis, -1)

    def last(self, x: Tensor) -> Tensor:
        weight = self.weight + 1.0 if self.plus_one and self.weight is not None else self.weight
        if self.kind == "layer":
            return F.layer_norm(x, (self.width,), weight, self.bias, self.eps)
        y = F.rms_norm(x, (self.width,), None, self.eps)
        y = y if weight is None else y * weight
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"{self.kind}, {self.width}, eps={self.eps}" + ", plus_one" * self.plus_one


class RMSNorm(Norm):
    """weight * x / sqrt(mean(x^2) + eps), in a forward that says nothing else.

    A class of its own: servers look at one module of a class, and put their kernel for all. So does vLLM's transformers
    backend (transformers/fusers/rms_norm.py at 005af47), whose kernel takes the weight as it is stored.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.width,), self.weight, self.eps)


class Affine(nn.Module):
    """scale * x + shift, one number for each channel or one for all; either may be missing, or a scale be fixed."""

    def __init__(self, scale: Sequence[int] | float | None = None, shift: Sequence[int] | None = None) -> None:
        super().__init__()
        self.scale: float | nn.Parameter | None
        if scale is None or isinstance(scale, float):
            self.scale = scale
        else:
            self.scale = nn.Parameter(torch.ones(tuple(scale)))
        self.shift = None if shift is None else nn.Parameter(torch.zeros(tuple(shift)))

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.scale is None else x * self.scale
        return x if self.shift is None else x + self.shift


class Center(nn.Module):
    """x - mean(x) over an axis."""

    def __init__(self, axis: int = -1) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(self.axis, keepdim=True)


def norm(kind: str, width: int, eps: float, weight: bool, bias: bool, **how: Any) -> nn.Module:
    """Build a norm, of the class that says what it computes."""
    plain = kind == "rms" and not bias and not (weight and how.get("plus_one")) and how.get("axis", -1) == -1
    return (RMSNorm if plain else Norm)(kind, width, eps, weight, bias, **how)


PIECES: Mapping[str, Callable[..., nn.Module]] = {"norm": norm, "affine": Affine, "center": Center, "centre": Center}
"""What builds a piece; `centre` stands in older folders."""


def build(specs: Sequence[Change]) -> nn.Module:
    """Build one piece, several in a row, or what hands its input on."""
    made = [PIECES[spec["is"]](**{k: v for k, v in spec.items() if k != "is"}) for spec in specs]
    return made[0] if len(made) == 1 else nn.Sequential(*made) if made else nn.Identity()


# ---- hooks: they copy and pickle with their module ----

Place = tuple[nn.Module, str]
"""Where a piece is: its parent and its name there, so that another may take its place."""


class Before:
    """Send what enters a module under some names through pieces first; a value that enters twice goes through once."""

    def __init__(self, at: Sequence[tuple[str, int]], by: Sequence[Place]) -> None:
        self.at, self.by = at, list(by)

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        args, kwargs, old, new = list(args), dict(kwargs), None, None
        for name, index in self.at:
            value = kwargs[name] if name in kwargs else args[index] if index < len(args) else None
            if value is None:
                continue
            if value is not old:
                old, new = value, through(value, self.by)
            if name in kwargs:
                kwargs[name] = new
            else:
                args[index] = new
        return tuple(args), kwargs


class After:
    """Send what leaves a module, or the elements of it that have some keys, through pieces."""

    def __init__(self, at: Sequence[object], by: Sequence[Place]) -> None:
        self.at, self.by = at, list(by)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        for key in self.at:
            if key is None or isinstance(output, Tensor):
                output = through(output, self.by)
            elif isinstance(output, tuple):
                items = [through(v, self.by) if i == key else v for i, v in enumerate(output)]
                output = type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
            else:
                output[key] = through(output[key], self.by)
        return output


def through(value: Tensor, places: Sequence[Place]) -> Tensor:
    """Send a value through pieces, one after the other."""
    for parent, name in places:
        value = getattr(parent, name)(value)
    return value


# ---- forwards ----


def source_of(cls: type[nn.Module]) -> tuple[types.FunctionType, str]:
    """Return a class's own forward, decorators looked through, and its source. Raises OSError where there is none."""
    function = inspect.unwrap(cls.forward)
    return function, textwrap.dedent(inspect.getsource(function))


def digest_of(source: str) -> str:
    """Return 16 hex digits of the sha256 of a source, white space left out of account."""
    return hashlib.sha256(" ".join(source.split()).encode()).hexdigest()[:16]


def operations(tree: ast.AST) -> list[ast.expr | ast.AugAssign]:
    """Return a function's operations in the order in which Python evaluates them: operands before what they make."""
    found = [op for child in ast.iter_child_nodes(tree) for op in operations(child)]
    return [*found, tree] if isinstance(tree, OPERATIONS) else found


@functools.cache
def edited(cls: type[nn.Module], digest: str, edits: str) -> type:
    """Return the class with an edited forward; the same class for the same edits. Raises RuntimeError on a misfit."""
    function, source = source_of(cls)
    if digest_of(source) != digest:
        raise RuntimeError(
            f"{cls.__qualname__}.forward is not the one that this model was rewritten from: install the library's "
            "version that config.json names, or rewrite the original model again"
        )
    tree: Any = ast.parse(source)
    spots, rows = operations(tree), json.loads(edits)
    for edit in rows:
        if ast.unparse(spots[edit["spot"]]) != edit["text"]:
            raise RuntimeError(f"{cls.__qualname__}.forward holds no {edit['text']!r} where the edit expects it")
    changes = {id(spots[edit["spot"]]): edit for edit in rows}
    tree = ast.fix_missing_locations(_Editing(changes, tree.body[0].args.args[0].arg).visit(tree))
    inner = _compiled(function, tree.body[0], f"<lnrewrite {cls.__qualname__}.forward {digest} {digest_of(edits)}>")
    forward = _wrapped(cls.forward, function, inner)
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {"forward": forward, **names})


def _compiled(function: types.FunctionType, definition: ast.FunctionDef, name: str) -> types.FunctionType:
    """Compile a function's new definition with the globals and the enclosing values of the old; its source is kept."""
    free = dict(zip(function.__code__.co_freevars, (c.cell_contents for c in function.__closure__ or ()), strict=True))
    definition.decorator_list, definition.returns, given = [], None, definition.args
    given.defaults = [ast.Constant(None) for _ in given.defaults]  # they were evaluated once, as annotations were
    given.kw_defaults = [value and ast.Constant(None) for value in given.kw_defaults]
    for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if each is not None:
            each.annotation = None
    enclosing: Any = ast.parse(f"def enclosing({', '.join(free)}):\n    return {definition.name}")
    enclosing.body[0].body.insert(0, definition)
    text = ast.unparse(ast.fix_missing_locations(enclosing))
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    flags = function.__code__.co_flags & __future__.annotations.compiler_flag
    code = compile(text, name, "exec", flags=flags, dont_inherit=True)
    inner = next(c for c in code.co_consts if isinstance(c, types.CodeType))
    made: types.FunctionType = types.FunctionType(inner, function.__globals__)(**free)
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    made.__annotations__ = function.__annotations__
    return made


def _wrapped(outer: Any, function: types.FunctionType, new: types.FunctionType) -> types.FunctionType:
    """Return what decorators made of a function, with another function in its place: their closures hold it."""
    if outer is function:
        return new
    below = outer.__wrapped__
    held = _wrapped(below, function, new)
    cells = [types.CellType(held if _content(c) is below else _content(c)) for c in outer.__closure__ or ()]
    if not any(c.cell_contents is held for c in cells):
        raise RuntimeError(f"{outer.__qualname__} is decorated in a way that hides the function below")
    made = types.FunctionType(outer.__code__, outer.__globals__, outer.__name__, outer.__defaults__, tuple(cells))
    made.__kwdefaults__ = outer.__kwdefaults__
    made.__dict__.update(vars(outer), __wrapped__=held)
    return made


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is not bound yet
        return None


class _Editing(ast.NodeTransformer):
    """Edit a forward's operations; `me` is what it calls its module."""

    def __init__(self, changes: Mapping[int, Change], me: str) -> None:
        self.changes, self.me = changes, me

    def visit(self, node: ast.AST) -> Any:
        """Visit the operands first, then change the operation if an edit speaks of it."""
        edit = self.changes.get(id(node))
        node = self.generic_visit(node)
        if edit is None:
            return node
        target = None
        if isinstance(node, ast.AugAssign):
            target = node.target
            loaded = ast.Name(target.id) if isinstance(target, ast.Name) else target
            node = ast.BinOp(loaded, node.op, node.value)
        for side in ("left", "right"):
            if side in edit:
                held = Operand(node, side)
                held.set(self.through(held.get(), edit[side]))
        value: Any = Operand(node, edit["keep"]).get() if "keep" in edit else node
        value = self.through(value, edit.get("result", ()))
        return value if target is None else ast.Assign([target], value)

    def through(self, value: ast.expr, pieces: Sequence[str]) -> ast.expr:
        """Return the calls of pieces, one around the other; a path is followed from the module on."""
        for path in pieces:
            found = self.me
            for part in path.split("."):
                found = f"{found}.{part}" if part.isidentifier() else f"getattr({found}, {part!r})"
            value = ast.Call(ast.parse(found, mode="eval").body, [value], [])
        return value


class Operand:
    """Reach an operation's left or right operand: of a + b, torch.add(a, b), a.add(b)."""

    def __init__(self, node: ast.AST, side: str) -> None:
        first = side == "left"
        self.holder: object = node
        self.key: Any = side
        if isinstance(node, ast.Call):
            called = node.func
            of_torch = isinstance(called, ast.Attribute) and ast.unparse(called.value) == "torch"
            method = isinstance(called, ast.Attribute) and not of_torch
            place = int(not first and not method)
            self.holder, self.key = (called, "value") if method and first else (node.args, place)

    def get(self) -> Any:
        return self.holder[self.key] if isinstance(self.holder, list) else getattr(self.holder, self.key)

    def set(self, value: ast.expr) -> None:
        if isinstance(self.holder, list):
            self.holder[self.key] = value
        else:
            setattr(self.holder, self.key, value)


# ---- recipes ----


def apply(module: nn.Module, recipe: Sequence[Change]) -> None:
    """Change a module as a recipe says; new parameters hold ones and zeros until their values are loaded."""
    for change in recipe:
        if "module" in change:
            put(module, change["module"], build(change["as"]))
        elif "bias" in change:
            module.get_submodule(change["bias"]).bias = nn.Parameter(torch.zeros(change["size"]))
        elif "untie" in change:
            path, _, leaf = change["untie"].rpartition(".")
            holder = module.get_submodule(path)
            setattr(holder, leaf, nn.Parameter(getattr(holder, leaf).detach().clone()))
        elif "source" in change:
            holder = module.get_submodule(change["source"])
            cls: object = type(holder)
            holder.__class__ = edited(cls, change["digest"], json.dumps(change["edits"]))
        else:
            parts = [path.rpartition(".") for path in change["by"]]
            by = [(module.get_submodule(parent), name) for parent, _, name in parts]
            if "before" in change:
                hook = Before(change["at"], by)
                module.get_submodule(change["before"]).register_forward_pre_hook(hook, with_kwargs=True)
            else:
                module.get_submodule(change["after"]).register_forward_hook(After(change["at"], by))
        if "untie" not in change:
            unfuse(
                module, next(change[key] for key in ("module", "bias", "source", "before", "after") if key in change)
            )


def unfuse(module: nn.Module, path: str) -> None:
    """Make the modules on the way to a changed one call their children."""
    for part in ("", *path.split(".")):
        module = getattr(module, part) if part else module
        for name in FUSED.keys() & vars(module).keys():
            setattr(module, name, FUSED[name])


def put(module: nn.Module, path: str, piece: nn.Module) -> None:
    """Put a piece at a path, in the mode of its parent and in place of what is there."""
    parent, leaf = holder_of(module, path)
    setattr(parent, leaf, piece.train(parent.training))


def holder_of(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Return the module that holds a path's last part, and that part; containers on the way are made."""
    *way, leaf = path.split(".")
    for part in way:
        if not hasattr(module, part):
            module.add_module(part, nn.Module())
        module = getattr(module, part)
    return module, leaf
