"""The neutral names of ATen operators, and how their arguments become operands and attributes.

A rule is a function of the arguments that it accounts for, by the names of the operator's schema. A call that gives
any other argument something else than its default means something else: it keeps the operator's own name, marked, and
nothing is known of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any

from ...compat.torch import operator_name, schema_of

Normalised = tuple[str, tuple[Any, ...], dict[str, Any]]
Rule = Callable[..., Normalised]

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


def _same(kind: str, *names: str) -> Rule:
    """Return the rule of an operator that is a function of these arguments alone."""

    def rule(**given: Any) -> Normalised:
        return kind, tuple(given[n] for n in names if n in given), {}

    rule.reads = frozenset(names)  # type: ignore[attr-defined]  # its signature does not tell them
    return rule


def _first(kind: str) -> Rule:
    """Return the rule of an operator whose other arguments say how its first one is laid out or stored."""

    def rule(self: Any = None, input: Any = None, **how: Any) -> Normalised:
        return kind, (input if self is None else self,), {}

    return rule


def _constant(**how: Any) -> Normalised:
    return "const", (), {}


def _reduce(kind: str) -> Rule:
    def rule(self: Any, dim: Any = None, keepdim: bool = False) -> Normalised:
        return kind, (self,), {"axes": _dims(dim), "keepdim": keepdim}

    return rule


def _spread(kind: str) -> Rule:
    def rule(
        self: Any, dim: Any = None, unbiased: bool = True, correction: Any = None, keepdim: bool = False
    ) -> Normalised:
        correction = int(unbiased) if correction is None else correction
        return kind, (self,), {"axes": _dims(dim), "keepdim": keepdim, "correction": correction}

    return rule


def _dims(dims: Any) -> tuple[int, ...] | None:
    if isinstance(dims, int):
        return (dims,)
    return tuple(dims) if dims else None


def _vector_norm(self: Any, ord: Any = 2, p: Any = None, dim: Any = None, keepdim: bool = False) -> Normalised:
    return "vector_norm", (self,), {"ord": ord if p is None else p, "axes": _dims(dim), "keepdim": keepdim}


def _linalg_norm(self: Any, ord: Any = None, dim: Any = None, keepdim: bool = False) -> Normalised:
    """Describe one over a single axis, which is a vector's; over two it is a matrix's."""
    kind = "vector_norm" if len(_dims(dim) or ()) == 1 else "linalg_norm"
    return kind, (self,), {"ord": 2 if ord is None else ord, "axes": _dims(dim), "keepdim": keepdim}


def _layer_norm(input: Any, normalized_shape: Any, weight: Any, bias: Any, eps: float, **how: Any) -> Normalised:
    return "layer_norm", (input, weight, bias), {"axes": len(normalized_shape), "eps": eps}


def _rms_norm(input: Any, normalized_shape: Any, weight: Any, eps: float | None) -> Normalised:
    default = 2**-52 if str(input.meta["val"].dtype) == "torch.float64" else 2**-23  # half precision has float32's too
    return "rms_norm", (input, weight, None), {"axes": len(normalized_shape), "eps": default if eps is None else eps}


def _batch_norm(input: Any, weight: Any, bias: Any, eps: float, training: bool = False, **how: Any) -> Normalised:
    stored = how["running_mean"], how["running_var"]
    return ("batch_norm!" if training else "batch_norm"), (input, weight, bias, *stored), {"eps": eps}


def _group_norm(input: Any, num_groups: int, weight: Any, bias: Any, eps: float, **how: Any) -> Normalised:
    return "group_norm", (input, weight, bias), {"groups": num_groups, "eps": eps}


def _instance_norm(input: Any, weight: Any, bias: Any, eps: float, use_input_stats: bool, **how: Any) -> Normalised:
    """Describe one by statistics of the input; by stored ones it is a batch norm."""
    if use_input_stats:
        return "instance_norm", (input, weight, bias), {"eps": eps}
    return _batch_norm(input, weight, bias, eps, **how)


def _convolution(
    input: Any, weight: Any, bias: Any, padding: Any, groups: int, transposed: bool = False, **how: Any
) -> Normalised:
    padded = padding != "valid" and (isinstance(padding, str) or any(_dims(padding) or ()))
    kind = "conv_transpose" if transposed else "conv"
    return kind, (input, weight, bias), {"padded": padded, "groups": groups}


def _permute(self: Any, dims: Any) -> Normalised:
    return "permute", (self,), {"order": tuple(dims)}


def _transpose(self: Any, dim0: int = -2, dim1: int = -1) -> Normalised:
    return "permute", (self,), {"swap": (dim0, dim1)}


def _turned_vector(self: Any) -> Normalised:
    """Describe x.t(): of a vector it is the vector."""
    return _transpose(self) if _rank(self) == 2 else ("alias", (self,), {})


def _addmm(self: Any, mat1: Any, mat2: Any) -> Normalised:
    return "matmul", (mat1, mat2, self), {}


def _slice(self: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Normalised:
    known = all(v is None or isinstance(v, int) for v in (start, end, step))
    return "slice", (self,), {"axis": dim, **({"cut": (start, end, step)} if known else {})}


def _narrow(self: Any, dim: int, start: Any, length: Any) -> Normalised:
    if not (isinstance(start, int) and isinstance(length, int)):
        return "slice", (self,), {"axis": dim}
    to_the_end = start < 0 and start + length == 0
    return _slice(self, dim, start, None if to_the_end else start + length)


def _select(self: Any, dim: int, index: Any) -> Normalised:
    return "slice", (self,), {"axis": dim, "drop": True, "at": index}


def _index(self: Any, indices: Any) -> Normalised:
    """Describe x[i, :, mask]: a mask stands for as many axes as it has."""
    axes, at = list[int](), 0
    for index in indices:
        taken = 1 if index is None or "bool" not in str(index.meta["val"].dtype) else _rank(index)
        axes += [] if index is None else range(at, at + taken)
        at += taken
    return _picked(self, tuple(axes), *indices)


def _index_select(self: Any, dim: int, index: Any) -> Normalised:
    return _picked(self, (dim % max(1, _rank(self)),), index)


def _picked(self: Any, axes: tuple[int, ...], *indices: Any) -> Normalised:
    """Describe picking by indices, which are no operands; rows of a table that data name are an embedding."""
    if axes == (0,) and _rank(self) == 2 and self.op == "get_attr":
        return "embedding", (self, indices[0]), {}
    return "gather", (self,), {"axes": axes}


def _gather(self: Any, dim: int, index: Any) -> Normalised:
    """Name torch.gather, which picks each element by its own index, apart from picking whole slices."""
    return "gather_elements", (self, index), {}


def _repeat_interleave(repeats: Any, self: Any = None, dim: Any = None, **how: Any) -> Normalised:
    if self is None or dim is None:
        return "repeat_interleave", (self, repeats), {}
    return "gather", (self,), {"axes": (dim % max(1, _rank(self)),)}


def _clamp(self: Any, min: Any = None, max: Any = None) -> Normalised:
    return ("clamp_min", (self, min), {}) if max is None else ("clamp", (self, min, max), {})


def _turned(kind: str) -> Rule:
    """Return the rule of an operator that moves elements along some axes; along all of them, flattened, if none."""

    def rule(self: Any, dims: Any = (), shifts: Any = None) -> Normalised:
        rank = _rank(self)
        return (kind, (self,), {"axes": tuple(d % rank for d in dims)}) if dims else (f"{kind}_flat", (self,), {})

    return rule


def _pad(self: Any, pad: Any, value: Any = 0, mode: str = "constant") -> Normalised:
    rank = _rank(self)
    axes = tuple(rank - 1 - i // 2 for i, n in enumerate(pad) if not isinstance(n, int) or n)
    return ("pad_value" if mode == "constant" and value else "pad"), (self,), {"axes": tuple(dict.fromkeys(axes))}


def _rank(node: Any) -> int:
    return int(node.meta["val"].dim())


BINARY = ("add", "sub", "mul", "div", "maximum", "rsub")
UNARY = ("neg", "sqrt", "rsqrt", "reciprocal", "abs", "exp", "square", "sigmoid", "tanh")
RULES: dict[str, Rule] = {
    **{name: _same(name, "self", "other") for name in BINARY},
    **{name: _same(name, "self") for name in UNARY},
    **dict.fromkeys(RESHAPE, _first("reshape")), **dict.fromkeys(ALIAS, _first("alias")),
    **dict.fromkeys(CONSTANT, _constant), **dict.fromkeys(("_to_copy", "to", "type_as"), _first("cast")),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), _convolution),
    "pow": _same("pow", "self", "exponent"), "clamp_min": _same("clamp_min", "self", "min"), "clamp": _clamp,
    "mean": _reduce("mean"), "sum": _reduce("sum"), "var": _spread("var"), "std": _spread("std"),
    "linalg_vector_norm": _vector_norm, "norm": _vector_norm, "linalg_norm": _linalg_norm,
    "layer_norm": _layer_norm,
    "native_layer_norm": _layer_norm, "rms_norm": _rms_norm, "batch_norm": _batch_norm, "group_norm": _group_norm,
    "instance_norm": _instance_norm, "_native_batch_norm_legit_no_training": _batch_norm,
    "permute": _permute, "transpose": _transpose, "t": _turned_vector, "expand": _first("expand"),
    "expand_as": _first("expand"), "addmm": _addmm, "slice": _slice, "narrow": _narrow, "select": _select,
    "index": _index, "index_select": _index_select, "repeat_interleave": _repeat_interleave, "gather": _gather,
    "roll": _turned("roll"), "flip": _turned("flip"), "constant_pad_nd": _pad, "pad": _pad,
    "native_dropout": _first("dropout"),
}  # fmt: skip


@cache
def _reads(rule: Rule) -> tuple[frozenset[str], bool]:
    """Return the arguments that a rule accounts for, and whether the others make no difference."""
    names = signature(rule).parameters
    return getattr(rule, "reads", frozenset(names)), "how" in names


def normalise(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Normalised:
    """Return (neutral kind, operands, attributes) of a call.

    Operands are nodes or numbers; shape-only arguments are left out. A call that no rule accounts for keeps the
    operator's name and every argument.
    """
    name, schema = operator_name(target) or str(target), schema_of(target)
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    own: Normalised = (name, (*args, *kwargs.values()), {})
    rule = RULES.get(name) if schema is not None and schema.name.startswith("aten::") else None
    if rule is None or schema is None:
        return own
    defaults = {a.name: a.default_value for a in schema.arguments}
    given = defaults | dict(zip(defaults, args, strict=False)) | kwargs
    reads, free = _reads(rule)
    if not free and any(given[k] != defaults[k] for k in given.keys() - reads - NUMERIC):
        return (f"{name}!", *own[1:])
    return rule(**(given if free else {k: v for k, v in given.items() if k in reads}))
