"""The neutral names of ATen operators, and how their arguments become operands and attributes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Normalised = tuple[str, tuple[Any, ...], dict[str, Any]]
Rule = Callable[[list[Any], dict[str, Any]], Normalised]

ALIAS = {
    "alias", "clone", "contiguous", "detach", "lift_fresh", "lift_fresh_copy", "lift", "detach_copy", "alias_copy",
    "view_as_real_copy", "expand_as_self",
}  # fmt: skip
RESHAPE = {
    "view", "_unsafe_view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_copy", "reshape_as",
    "view_as",
}  # fmt: skip
SAME = {
    "add", "sub", "mul", "div", "neg", "pow", "sqrt", "rsqrt", "reciprocal", "abs", "exp", "clamp", "clamp_min",
    "maximum", "square", "sigmoid", "tanh", "rsub",
}  # fmt: skip


def _reduce(kind: str) -> Rule:
    def rule(args: list[Any], kw: dict[str, Any]) -> Normalised:
        dims = args[1] if len(args) > 1 else kw.get("dim")
        keep = args[2] if len(args) > 2 else kw.get("keepdim", False)
        return kind, (args[0],), {"axes": _dims(dims), "keepdim": bool(keep)}

    return rule


def _spread(kind: str) -> Rule:
    def rule(args: list[Any], kw: dict[str, Any]) -> Normalised:
        dims = args[1] if len(args) > 1 else kw.get("dim")
        correction = kw.get("correction", 1)
        if len(args) > 2 and isinstance(args[2], bool):
            correction = int(args[2])
        keep = kw.get("keepdim", args[3] if len(args) > 3 else False)
        correction = 1 if correction is None else correction
        return kind, (args[0],), {"axes": _dims(dims), "keepdim": bool(keep), "correction": correction}

    return rule


def _dims(dims: Any) -> tuple[int, ...] | None:
    if dims is None:
        return None
    return (dims,) if isinstance(dims, int) else tuple(dims)


def _vector_norm(args: list[Any], kw: dict[str, Any]) -> Normalised:
    order = args[1] if len(args) > 1 else kw.get("ord", 2)
    dims = args[2] if len(args) > 2 else kw.get("dim")
    keep = args[3] if len(args) > 3 else kw.get("keepdim", False)
    return "vector_norm", (args[0],), {"ord": order, "axes": _dims(dims), "keepdim": bool(keep)}


def _linalg_norm(args: list[Any], kw: dict[str, Any]) -> Normalised:
    """Describe one over a single axis, which is a vector's; over two it is a matrix's."""
    kind, inputs, attrs = _vector_norm(args, kw)
    alone = len(attrs["axes"] or ()) == 1
    return (kind if alone else "linalg_norm"), inputs, attrs | {"ord": 2 if attrs["ord"] is None else attrs["ord"]}


def _layer_norm(args: list[Any], kw: dict[str, Any]) -> Normalised:
    x, shape, w, b, eps = (args + [None] * 5)[:5]
    return "layer_norm", (x, w, b), {"axes": len(shape), "eps": 1e-5 if eps is None else eps}


def _rms_norm(args: list[Any], kw: dict[str, Any]) -> Normalised:
    x, shape, w, eps = (args + [None] * 4)[:4]
    default = 2**-52 if str(x.meta["val"].dtype) == "torch.float64" else 2**-23  # half precision has float32's too
    return "rms_norm", (x, w, None), {"axes": len(shape), "eps": default if eps is None else eps}


def _batch_norm(args: list[Any], kw: dict[str, Any]) -> Normalised:
    return "batch_norm", tuple(args[:5]), {"eps": args[7]}


def _native_batch_norm(args: list[Any], kw: dict[str, Any]) -> Normalised:
    return "batch_norm", tuple(args[:5]), {"eps": args[-1]}


def _group_norm(args: list[Any], kw: dict[str, Any]) -> Normalised:
    x, groups, w, b, eps = (args + [None] * 5)[:5]
    return "group_norm", (x, w, b), {"groups": groups, "eps": 1e-5 if eps is None else eps}


def _instance_norm(args: list[Any], kw: dict[str, Any]) -> Normalised:
    """Describe one by statistics of the input; by stored ones it is a batch norm."""
    stored = not args[5]
    return ("batch_norm" if stored else "instance_norm"), tuple(args[: 5 if stored else 3]), {"eps": args[7]}


def _convolution(args: list[Any], kw: dict[str, Any]) -> Normalised:
    x, w, b = (args + [None] * 3)[:3]
    padding, groups = (args[4] if len(args) > 4 else 0), (args[6] if len(args) > 6 else 1)
    padded = padding != "valid" and (isinstance(padding, str) or any(p for p in _dims(padding) or ()))
    return "conv", (x, w, b), {"padded": bool(padded), "groups": groups}


def _convolution_general(args: list[Any], kw: dict[str, Any]) -> Normalised:
    x, w, b, _, padding, _, transposed, _, groups = args[:9]
    kind = "conv_transpose" if transposed else "conv"
    return kind, (x, w, b), {"padded": any(padding), "groups": groups}


def _permute(args: list[Any], kw: dict[str, Any]) -> Normalised:
    return "permute", (args[0],), {"order": tuple(args[1])}


def _transpose(args: list[Any], kw: dict[str, Any]) -> Normalised:
    return "permute", (args[0],), {"swap": (args[1], args[2])}


def _t(args: list[Any], kw: dict[str, Any]) -> Normalised:
    return "permute", (args[0],), {"swap": (-2, -1)}


def _first(kind: str, **attrs: Any) -> Rule:
    def rule(args: list[Any], kw: dict[str, Any]) -> Normalised:
        return kind, (args[0],), dict(attrs)

    return rule


def _addmm(args: list[Any], kw: dict[str, Any]) -> Normalised:
    return "matmul", (args[1], args[2], args[0]), {}


def _slice(args: list[Any], kw: dict[str, Any]) -> Normalised:
    return "slice", (args[0],), {"axis": args[1] if len(args) > 1 else 0}


def _select(args: list[Any], kw: dict[str, Any]) -> Normalised:
    return "slice", (args[0],), {"axis": args[1], "drop": True, "at": args[2]}


def _index(args: list[Any], kw: dict[str, Any]) -> Normalised:
    indices = args[1]
    axes = tuple(i for i, index in enumerate(indices) if index is not None)
    return "gather", (args[0],), {"axes": axes}


def _index_select(args: list[Any], kw: dict[str, Any]) -> Normalised:
    return "gather", (args[0],), {"axes": (args[1],)}


def _gather(args: list[Any], kw: dict[str, Any]) -> Normalised:
    """Name torch.gather, which picks each element by its own index, apart from picking whole slices."""
    return "gather_elements", (args[0], args[2]), {}


def _repeat_interleave(args: list[Any], kw: dict[str, Any]) -> Normalised:
    axis = args[2] if len(args) > 2 else kw.get("dim")
    return ("repeat_interleave", (args[0],), {}) if axis is None else ("gather", (args[0],), {"axes": (axis,)})


def _clamp(args: list[Any], kw: dict[str, Any]) -> Normalised:
    low = args[1] if len(args) > 1 else kw.get("min")
    high = args[2] if len(args) > 2 else kw.get("max")
    return ("clamp_min", (args[0], low), {}) if high is None else ("clamp", (args[0], low, high), {})


def _scaled(kind: str) -> Rule:
    def rule(args: list[Any], kw: dict[str, Any]) -> Normalised:
        alpha = kw.get("alpha", args[2] if len(args) > 2 else 1)
        return (kind if alpha == 1 else f"{kind}_alpha"), tuple(args[:2]), {}

    return rule


RULES: dict[str, Rule] = {
    "mean": _reduce("mean"), "sum": _reduce("sum"), "var": _spread("var"), "std": _spread("std"),
    "linalg_vector_norm": _vector_norm, "norm": _vector_norm, "linalg_norm": _linalg_norm,
    "layer_norm": _layer_norm,
    "native_layer_norm": _layer_norm, "rms_norm": _rms_norm, "batch_norm": _batch_norm, "group_norm": _group_norm,
    "instance_norm": _instance_norm, "_native_batch_norm_legit_no_training": _native_batch_norm,
    "conv1d": _convolution, "conv2d": _convolution, "conv3d": _convolution, "convolution": _convolution_general,
    "permute": _permute, "transpose": _transpose, "t": _t, "expand": _first("expand"), "expand_as": _first("expand"),
    "_to_copy": _first("cast"), "to": _first("cast"), "type_as": _first("cast"), "addmm": _addmm,
    "slice": _slice, "narrow": _slice, "select": _select, "index": _index, "index_select": _index_select,
    "repeat_interleave": _repeat_interleave, "gather": _gather,
    "clamp": _clamp, "add": _scaled("add"), "sub": _scaled("sub"), "roll": _first("roll"), "flip": _first("flip"),
    "constant_pad_nd": _first("pad"), "pad": _first("pad"), "native_dropout": _first("dropout"),
    "zeros_like": lambda a, k: ("const", (), {}), "ones_like": lambda a, k: ("const", (), {}),
    "full_like": lambda a, k: ("const", (), {}), "new_ones": lambda a, k: ("const", (), {}),
    "new_zeros": lambda a, k: ("const", (), {}), "new_full": lambda a, k: ("const", (), {}),
    "empty_like": lambda a, k: ("const", (), {}),
}  # fmt: skip


def normalise(name: str, args: list[Any], kwargs: dict[str, Any]) -> Normalised:
    """Return (neutral kind, operands, attributes) of a call of the ATen operator `name` (without overload).

    Operands are nodes or numbers; shape-only arguments are left out. An operator without a rule keeps its own name
    and every argument that is a node.
    """
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    if name in ALIAS:
        return "alias", (args[0],), {}
    if name == "dropout":  # the picture is the same in train and in eval mode
        return "alias", (args[0],), {}
    if name in RESHAPE:
        return "reshape", (args[0],), {}
    if name in RULES:
        return RULES[name](args, kwargs)
    return name, tuple(args), ({} if name in SAME else dict(kwargs))
