"""The neutral names of ATen operators, and how their arguments become operands and attributes.

A rule is a function of the arguments that it accounts for, by the names of the operator's schema. A call that gives
any other argument something else than its default means something else: it keeps the operator's own name, marked, and
nothing is known of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from inspect import signature

from torch import fx

from ...compat.torch import operator_name, schema_of, sizes_of

Neutral = tuple[str, tuple[object, ...], dict[str, object]]
Operand = fx.Node | float | None
Dims = int | Sequence[int] | None
Size = int | fx.Node | None
"""A size or an index, which a dynamic shape makes a node."""
Rule = Callable[..., Neutral]

RESHAPE = {
    "view", "_unsafe_view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_copy", "reshape_as",
    "view_as",
}  # fmt: skip
ALIAS = {
    "alias", "clone", "contiguous", "detach", "lift_fresh", "lift_fresh_copy", "lift", "detach_copy", "alias_copy",
    "dropout",  # the picture is the same in train and in eval mode
}  # fmt: skip
CONSTANT = {"zeros_like", "ones_like", "full_like", "new_ones", "new_zeros", "new_full", "empty_like"}
NUMERIC = {"dtype", "layout", "device", "pin_memory", "non_blocking", "memory_format", "copy", "implicit"}
"""Arguments that say how a result is stored, not what it is."""


class Same:
    """The rule of an operator that is a function of these arguments alone."""

    def __init__(self, kind: str, *names: str) -> None:
        self.kind, self.names = kind, names

    def __call__(self, /, **given: object) -> Neutral:
        return self.kind, tuple(given[n] for n in self.names if n in given), {}


def _first(kind: str) -> Rule:
    """Return the rule of an operator whose other arguments say how its first one is laid out or stored."""

    def rule(self: Operand = None, input: Operand = None, **how: object) -> Neutral:
        return kind, (input if self is None else self,), {}

    return rule


def _constant(**how: object) -> Neutral:
    return "const", (), {}


def _reduce(kind: str) -> Rule:
    def rule(self: fx.Node, dim: Dims = None, keepdim: bool = False) -> Neutral:
        return kind, (self,), {"axes": _dims(dim), "keepdim": keepdim}

    return rule


def _spread(kind: str) -> Rule:
    def rule(
        self: fx.Node, dim: Dims = None, unbiased: bool = True, correction: int | None = None, keepdim: bool = False
    ) -> Neutral:
        correction = int(unbiased) if correction is None else correction
        return kind, (self,), {"axes": _dims(dim), "keepdim": keepdim, "correction": correction}

    return rule


def _dims(dims: Dims) -> tuple[int, ...] | None:
    if isinstance(dims, int):
        return (dims,)
    return tuple(dims) if dims else None


def _vector_norm(self: fx.Node, ord: object = 2, p: object = None, dim: Dims = None, keepdim: bool = False) -> Neutral:
    return "vector_norm", (self,), {"ord": ord if p is None else p, "axes": _dims(dim), "keepdim": keepdim}


def _linalg_norm(self: fx.Node, ord: object = None, dim: Dims = None, keepdim: bool = False) -> Neutral:
    """Describe one over a single axis, which is a vector's; over two it is a matrix's."""
    kind = "vector_norm" if len(_dims(dim) or ()) == 1 else "linalg_norm"
    return kind, (self,), {"ord": 2 if ord is None else ord, "axes": _dims(dim), "keepdim": keepdim}


def _layer_norm(
    input: fx.Node, normalized_shape: Sequence[int], weight: Operand, bias: Operand, eps: float, **how: object
) -> Neutral:
    return "layer_norm", (input, weight, bias), {"axes": len(normalized_shape), "eps": eps}


def _rms_norm(input: fx.Node, normalized_shape: Sequence[int], weight: Operand, eps: float | None) -> Neutral:
    default = 2**-52 if str(input.meta["val"].dtype) == "torch.float64" else 2**-23  # half precision has float32's too
    return "rms_norm", (input, weight, None), {"axes": len(normalized_shape), "eps": default if eps is None else eps}


def _batch_norm(
    input: fx.Node, weight: Operand, bias: Operand, eps: float, training: bool = False, **how: object
) -> Neutral:
    stored = how["running_mean"], how["running_var"]
    return ("batch_norm!" if training else "batch_norm"), (input, weight, bias, *stored), {"eps": eps}


def _group_norm(input: fx.Node, num_groups: int, weight: Operand, bias: Operand, eps: float, **how: object) -> Neutral:
    return "group_norm", (input, weight, bias), {"groups": num_groups, "eps": eps}


def _instance_norm(
    input: fx.Node, weight: Operand, bias: Operand, eps: float, use_input_stats: bool, **how: object
) -> Neutral:
    """Describe one by statistics of the input; by stored ones it is a batch norm."""
    if use_input_stats:
        return "instance_norm", (input, weight, bias), {"eps": eps}
    return _batch_norm(input, weight, bias, eps, False, **how)


def _convolution(
    input: fx.Node,
    weight: Operand,
    bias: Operand,
    padding: Sequence[int] | str,
    groups: int,
    transposed: bool = False,
    **how: object,
) -> Neutral:
    padded = padding != "valid" and (isinstance(padding, str) or any(_dims(padding) or ()))
    kind = "conv_transpose" if transposed else "conv"
    return kind, (input, weight, bias), {"padded": padded, "groups": groups}


def _conv_transpose(
    input: fx.Node, weight: Operand, bias: Operand, padding: Sequence[int], groups: int, **how: object
) -> Neutral:
    return _convolution(input, weight, bias, padding, groups, transposed=True)


def _permute(self: fx.Node, dims: Sequence[int]) -> Neutral:
    return "permute", (self,), {"order": tuple(dims)}


def _transpose(self: fx.Node, dim0: int = -2, dim1: int = -1) -> Neutral:
    return "permute", (self,), {"swap": (dim0, dim1)}


def _turned_vector(self: fx.Node) -> Neutral:
    """Describe x.t(): of a vector it is the vector."""
    return _transpose(self) if _rank(self) == 2 else ("alias", (self,), {})


def _addmm(self: fx.Node, mat1: Operand, mat2: Operand) -> Neutral:
    return "matmul", (mat1, mat2, self), {}


def _slice(self: fx.Node, dim: int = 0, start: Size = None, end: Size = None, step: Size = 1) -> Neutral:
    known = all(v is None or isinstance(v, int) for v in (start, end, step))
    return "slice", (self,), {"axis": dim, **({"cut": (start, end, step)} if known else {})}


def _narrow(self: fx.Node, dim: int, start: Size, length: Size) -> Neutral:
    if not (isinstance(start, int) and isinstance(length, int)):
        return "slice", (self,), {"axis": dim}
    to_the_end = start < 0 and start + length == 0
    return _slice(self, dim, start, None if to_the_end else start + length)


def _select(self: fx.Node, dim: int, index: Size) -> Neutral:
    return "slice", (self,), {"axis": dim, "drop": True, "at": index}


def _index(self: fx.Node, indices: Sequence[fx.Node | None]) -> Neutral:
    """Describe x[i, :, mask]: a mask stands for as many axes as it has."""
    axes, at = list[int](), 0
    for index in indices:
        taken = 1 if index is None or "bool" not in str(index.meta["val"].dtype) else _rank(index)
        axes += [] if index is None else range(at, at + taken)
        at += taken
    return _picked(self, tuple(axes), *indices)


def _index_select(self: fx.Node, dim: int, index: fx.Node) -> Neutral:
    return _picked(self, (dim % max(1, _rank(self)),), index)


def _picked(self: fx.Node, axes: tuple[int, ...], *indices: fx.Node | None) -> Neutral:
    """Describe picking by indices, which are no operands; rows of a table that data name are an embedding."""
    if axes == (0,) and _rank(self) == 2 and self.op == "get_attr":
        return "embedding", (self, indices[0]), {}
    return "gather", (self,), {"axes": axes}


def _gather(self: fx.Node, dim: int, index: fx.Node) -> Neutral:
    """Name torch.gather, which picks each element by its own index, apart from picking whole slices.

    An index that was expanded over the channels picks whole tokens (mixture-of-depths).
    """
    source = index.args[0] if operator_name(index.target) == "expand" else None
    if _rank(self) == 3 and dim in (1, -2) and isinstance(source, fx.Node) and sizes_of(source.meta["val"])[-1] == 1:
        return "gather", (self,), {"axes": (1,)}
    return "gather_elements", (self, index), {}


def _repeat_interleave(repeats: Operand, self: fx.Node | None = None, dim: int | None = None, **how: object) -> Neutral:
    if self is None or dim is None:
        return "repeat_interleave", (self, repeats), {}
    return "gather", (self,), {"axes": (dim % max(1, _rank(self)),)}


def _clamp(self: fx.Node, min: Operand = None, max: Operand = None) -> Neutral:
    return ("clamp_min", (self, min), {}) if max is None else ("clamp", (self, min, max), {})


def _einsum(equation: str, tensors: Sequence[fx.Node]) -> Neutral:
    return "einsum", tuple(tensors), {"equation": equation}


def _vecdot(x: fx.Node, y: fx.Node, dim: int = -1) -> Neutral:
    return "vecdot", (x, y), {"axis": dim}


def _turned(kind: str) -> Rule:
    """Return the rule of an operator that moves elements along some axes; along all of them, flattened, if none."""

    def rule(self: fx.Node, dims: Sequence[int] = (), shifts: object = None) -> Neutral:
        rank = _rank(self)
        return (kind, (self,), {"axes": tuple(d % rank for d in dims)}) if dims else (f"{kind}_flat", (self,), {})

    return rule


def _pad(self: fx.Node, pad: Sequence[Size], value: Operand = 0, mode: str = "constant") -> Neutral:
    rank = _rank(self)
    axes = tuple(rank - 1 - i // 2 for i, n in enumerate(pad) if not isinstance(n, int) or n)
    return ("pad_value" if mode == "constant" and value else "pad"), (self,), {"axes": tuple(dict.fromkeys(axes))}


def _rank(node: fx.Node) -> int:
    return int(node.meta["val"].dim())


BINARY = ("add", "sub", "mul", "div", "maximum", "hypot", "rsub")
UNARY = ("neg", "sqrt", "rsqrt", "reciprocal", "abs", "exp", "log", "square", "sigmoid", "tanh")
RULES: dict[str, Rule] = {
    **{name: Same(name, "self", "other") for name in BINARY},
    **{name: Same(name, "self") for name in UNARY},
    **dict.fromkeys(RESHAPE, _first("reshape")), **dict.fromkeys(ALIAS, _first("alias")),
    **dict.fromkeys(CONSTANT, _constant), **dict.fromkeys(("_to_copy", "to", "type_as"), _first("cast")),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), _convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _conv_transpose),
    "pow": Same("pow", "self", "exponent"), "clamp_min": Same("clamp_min", "self", "min"), "clamp": _clamp,
    "mean": _reduce("mean"), "sum": _reduce("sum"), "var": _spread("var"), "std": _spread("std"),
    "linalg_vector_norm": _vector_norm, "norm": _vector_norm, "linalg_norm": _linalg_norm,
    "layer_norm": _layer_norm,
    "native_layer_norm": _layer_norm, "rms_norm": _rms_norm, "batch_norm": _batch_norm, "group_norm": _group_norm,
    "instance_norm": _instance_norm, "_native_batch_norm_legit_no_training": _batch_norm,
    "permute": _permute, "transpose": _transpose, "t": _turned_vector, "expand": _first("expand"),
    "expand_as": _first("expand"), "addmm": _addmm, "slice": _slice, "narrow": _narrow, "select": _select,
    "index": _index, "index_select": _index_select, "repeat_interleave": _repeat_interleave, "gather": _gather,
    "roll": _turned("roll"), "flip": _turned("flip"), "constant_pad_nd": _pad, "pad": _pad,
    "native_dropout": _first("dropout"), "einsum": _einsum, "linalg_vecdot": _vecdot,
}  # fmt: skip


@cache
def _reads(rule: Rule) -> tuple[frozenset[str], bool]:
    """Return the arguments that a rule accounts for, and whether the others make no difference."""
    if isinstance(rule, Same):
        return frozenset(rule.names), False
    names = signature(rule).parameters
    return frozenset(names), "how" in names


def neutral(target: object, args: tuple[object, ...], kwargs: dict[str, object]) -> Neutral:
    """Return (neutral kind, operands, attributes) of a call.

    Operands are nodes or numbers; shape-only arguments are left out. A call that no rule accounts for keeps the
    operator's name and every argument.
    """
    name, schema = operator_name(target) or str(target), schema_of(target)
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    own: Neutral = (name, (*args, *kwargs.values()), {})
    rule = RULES.get(name) if schema is not None and schema.name.startswith("aten::") else None
    if rule is None or schema is None:
        return own
    defaults = {a.name: a.default_value for a in schema.arguments}
    given = defaults | dict(zip(defaults, args, strict=False)) | kwargs
    reads, free = _reads(rule)
    if not free and any(given[k] != defaults[k] for k in given.keys() - reads - NUMERIC):
        return (f"{name}!", *own[1:])
    return rule(**(given if free else {k: v for k, v in given.items() if k in reads}))
