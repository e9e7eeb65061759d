"""The operators of ONNX as functions in torch, so that a piece of an ONNX graph has gradients.

A function's parameters are an operator's inputs, those by keyword alone its attributes, of ONNX's defaults: a node with
others, or with more results, is not taken. Sizes and indices are tensors of integers, as they are in ONNX.
What ONNX itself defines by other operators (Attention, RotaryEmbedding, Celu ...) need not stand here: see `mirror.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence

import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor

from . import torch_attention as attention
from .norms import CONTRIB, LAYER, RMS, STANDARD_RMS
from .ops import STANDARD

Function = Callable[..., object]
Ints = Tensor | Sequence[int] | None


def taken(node: ir.Node, opset: int) -> Function | None:
    """Return what computes a node of a model of that opset in torch, None where nothing here does."""
    name = node.op_type
    found = (TABLE if node.domain in STANDARD else OTHERS if node.domain == CONTRIB else {}).get(name)
    read = [i for i, value in enumerate(node.outputs) if value.uses() or value.is_graph_output()]
    if found is None or opset < SINCE.get(name, 1) or max(read, default=0) >= RESULTS.get(name, 1):
        return None
    only, known = ONLY.get(name, {}), attributes(found)
    held = {n: a.value for n, a in node.attributes.items()}
    return found if all(only[n] == value if n in only else n in known for n, value in held.items()) else None


def attributes(function: Function) -> frozenset[str]:
    """Return the attributes that a function of this file takes, by name; torch's own take none."""
    if not _ours(function):
        return frozenset()
    parameters = inspect.signature(function).parameters.values()
    return frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


def _ours(function: Function) -> bool:
    return inspect.isfunction(function) and function.__module__ in {__name__, attention.__name__}


def ints(value: Ints) -> list[int]:
    """Return sizes, axes or indices as a list; an empty one where there are none."""
    return value.reshape(-1).tolist() if isinstance(value, Tensor) else list(value or ())


def alike(xs: Sequence[Tensor]) -> Tensor:
    """Return values of one shape, to which they are broadcast, along a new first axis."""
    return torch.stack(torch.broadcast_tensors(*xs))


def reduction(how: Callable[[Tensor, tuple[int, ...], bool], Tensor]) -> Function:
    """Return a reduction over the axes of an attribute, or of an input; none at all are all."""

    def reduce(
        x: Tensor, at: Ints = None, *, axes: Ints = None, keepdims: int = 1, noop_with_empty_axes: int = 0
    ) -> Tensor:
        over = tuple(ints(at if axes is None else axes))
        if not x.dim() or (noop_with_empty_axes and not over):  # each number by itself
            return how(x.unsqueeze(0), (0,), False).to(x.dtype)
        return how(x, over or tuple(range(x.dim())), bool(keepdims)).to(x.dtype)

    return reduce


def product(x: Tensor, axes: Iterable[int], keep: bool) -> Tensor:
    for axis in sorted((a % x.dim() for a in axes), reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


def unsqueeze(x: Tensor, at: Ints = None, *, axes: Ints = None) -> Tensor:
    found = ints(at if axes is None else axes)
    for axis in sorted(a % (x.dim() + len(found)) for a in found):
        x = x.unsqueeze(axis)
    return x


def squeeze(x: Tensor, at: Ints = None, *, axes: Ints = None) -> Tensor:
    return x.squeeze() if at is None and axes is None else x.squeeze(tuple(ints(at if axes is None else axes)))


def clip(
    x: Tensor, low: Tensor | None = None, high: Tensor | None = None, *, min: float | None = None,
    max: float | None = None,
) -> Tensor:  # fmt: skip
    low, high = (b if n is None else x.new_tensor(n) for b, n in ((low, min), (high, max)))
    return x if low is None and high is None else torch.clamp(x, low, high)


def dropout(
    x: Tensor, rate: Tensor | None = None, training: Tensor | None = None, *, ratio: float = 0.5, seed: int = 0
) -> Tensor:
    if training is not None and bool(training):
        raise NotImplementedError("Dropout drops, in training mode")
    return x


def cumulated(x: Tensor, axis: Tensor, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    at = int(axis)
    x = x.flip(at) if reverse else x
    y = x.cumsum(at) - x if exclusive else x.cumsum(at)
    return (y.flip(at) if reverse else y).to(x.dtype)


def top_k(x: Tensor, k: Tensor, *, axis: int = -1, largest: int = 1, sorted: int = 1) -> tuple[Tensor, ...]:
    values, at = torch.sort(x, dim=axis, descending=bool(largest), stable=True)
    return values.narrow(axis, 0, int(k)), at.narrow(axis, 0, int(k))


def gemm(
    a: Tensor, b: Tensor, c: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0, transA: int = 0,
    transB: int = 0,
) -> Tensor:  # fmt: skip
    y = alpha * ((a.T if transA else a) @ (b.T if transB else b))
    return y if c is None else y + beta * c


def padded(
    x: Tensor, kernel: Sequence[int], steps: Sequence[int], gaps: Sequence[int], pads: Ints, auto: str, value: float
) -> Tensor:
    """Return what a window of that size is to be moved over."""
    around: list[int] = []
    ends = ints(pads) if auto == "NOTSET" else []
    for i in reversed(range(len(kernel))):
        before, behind = (ends[i], ends[len(kernel) + i]) if ends else (0, 0)
        if auto.startswith("SAME"):
            size = x.shape[2 + i]
            lacking = max(0, (-(-size // steps[i]) - 1) * steps[i] + (kernel[i] - 1) * gaps[i] + 1 - size)
            behind = lacking // 2 if auto == "SAME_LOWER" else lacking - lacking // 2
            before = lacking - behind
        around += [before, behind]
    return F.pad(x, around, value=value)


def conv(
    x: Tensor, w: Tensor, b: Tensor | None = None, *, auto_pad: str = "NOTSET", dilations: Sequence[int] = (),
    group: int = 1, kernel_shape: Ints = None, pads: Ints = None, strides: Sequence[int] = (),
) -> Tensor:  # fmt: skip
    one = (1,) * (w.dim() - 2)
    steps, gaps = strides or one, dilations or one
    x = padded(x, w.shape[2:], steps, gaps, pads, auto_pad, 0.0)
    return (F.conv1d, F.conv2d, F.conv3d)[len(one) - 1](x, w, b, steps, 0, gaps, group)


def max_pool(
    x: Tensor, *, kernel_shape: tuple[int, ...], auto_pad: str = "NOTSET", dilations: tuple[int, ...] = (),
    pads: Ints = None, strides: tuple[int, ...] = (),
) -> Tensor:  # fmt: skip
    one = (1,) * len(kernel_shape)
    steps, gaps = strides or one, dilations or one
    x = padded(x, kernel_shape, steps, gaps, pads, auto_pad, -torch.inf)
    return (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(one) - 1](x, kernel_shape, steps, 0, gaps)


def average_pool(
    x: Tensor, *, kernel_shape: tuple[int, ...], auto_pad: str = "NOTSET", count_include_pad: int = 0,
    pads: Ints = None, strides: tuple[int, ...] = (),
) -> Tensor:  # fmt: skip
    one = (1,) * len(kernel_shape)
    run = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(one) - 1]
    y, many = (
        run(padded(v, kernel_shape, strides or one, one, pads, auto_pad, 0.0), kernel_shape, strides or one)
        for v in (x, torch.ones_like(x[:1, :1]))
    )
    return y if count_include_pad else y / many


def layer_norm(
    x: Tensor, gain: Tensor, bias: Tensor | None = None, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    y = F.layer_norm(x, x.shape[axis:], eps=epsilon) * gain
    return y if bias is None else y + bias


def rms_norm(x: Tensor, gain: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1) -> Tensor:
    return F.rms_norm(x, x.shape[axis:], eps=epsilon) * gain


def batch_norm(
    x: Tensor, gain: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, *, epsilon: float = 1e-5,
    momentum: float = 0.9,
) -> Tensor:  # fmt: skip
    return F.batch_norm(x, mean, variance, gain, bias, False, 0.0, epsilon)


def softmax(x: Tensor, *, axis: int | None = None, opset: int) -> Tensor:
    if opset >= 13:
        return x.softmax(-1 if axis is None else axis)
    return x.flatten(1 if axis is None else axis).softmax(-1).reshape(x.shape)  # over all axes from that on


def reshape(x: Tensor, to: Tensor, *, allowzero: int = 0) -> Tensor:
    return x.reshape([n if n or allowzero else x.shape[i] for i, n in enumerate(ints(to))])


def split(
    x: Tensor, at: Ints = None, *, axis: int = 0, num_outputs: int = 0, split: Ints = None, results: int
) -> tuple[Tensor, ...]:
    sizes = ints(at if split is None else split)
    return torch.split(x, sizes or -(-x.shape[axis] // (num_outputs or results)), axis)


def slices(
    x: Tensor, first: Ints = None, last: Ints = None, at: Ints = None, by: Ints = None, *, starts: Ints = None,
    ends: Ints = None, axes: Ints = None,
) -> Tensor:  # fmt: skip
    low, high, steps = ints(first if starts is None else starts), ints(last if ends is None else ends), ints(by)
    for i, axis in enumerate(ints(at if axes is None else axes) or range(len(low))):
        part = slice(low[i], high[i], steps[i] if steps else 1)
        if part.step > 0:
            x = x[(*[slice(None)] * (axis % x.dim()), part)]
        else:
            x = x.index_select(axis, torch.tensor(range(x.shape[axis])[part], dtype=torch.int64))
    return x


def pad(x: Tensor, pads: Tensor, value: Tensor | None = None, at: Ints = None, *, mode: str = "constant") -> Tensor:
    ends, axes = ints(pads), [a % x.dim() for a in ints(at)] if at is not None else range(x.dim())
    for before, behind, axis in zip(ends, ends[len(ends) // 2 :], axes, strict=False):
        size, places = x.shape[axis], torch.arange(-before, x.shape[axis] + behind)
        if mode == "constant":
            around = [0, 0] * (x.dim() - 1 - axis) + [before, behind]
            x = F.pad(x, around, value=0 if value is None else value.item())
        elif before or behind:
            mirrored = size - 1 - (places % max(1, 2 * size - 2) - (size - 1)).abs()
            known = {"edge": places.clamp(0, size - 1), "reflect": mirrored, "wrap": places % size}
            x = x.index_select(axis, known[mode])
    return x


TABLE: dict[str, Function] = {
    "Abs": torch.abs, "Neg": torch.neg, "Exp": torch.exp, "Log": torch.log, "Sqrt": torch.sqrt, "Erf": torch.erf,
    "Reciprocal": torch.reciprocal, "Sin": torch.sin, "Cos": torch.cos, "Tan": torch.tan, "Tanh": torch.tanh,
    "Atan": torch.atan, "Sigmoid": torch.sigmoid, "Floor": torch.floor, "Ceil": torch.ceil, "Round": torch.round,
    "Sign": torch.sign, "IsNaN": torch.isnan, "IsInf": torch.isinf, "Relu": torch.relu, "Softplus": F.softplus,
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "MatMul": torch.matmul, "Where": torch.where,
    "BitwiseAnd": torch.bitwise_and, "BitwiseOr": torch.bitwise_or, "BitwiseNot": torch.bitwise_not,
    "Not": torch.logical_not, "And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor,
    "Equal": torch.eq, "Less": torch.lt, "Greater": torch.gt, "LessOrEqual": torch.le, "GreaterOrEqual": torch.ge,
    "Div": lambda x, y: x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc"),
    "Pow": lambda x, y: torch.pow(x, y).to(x.dtype),
    "Mod": lambda x, y, *, fmod=0: (torch.fmod if fmod else torch.remainder)(x, y),
    "Max": lambda *xs: alike(xs).amax(0), "Min": lambda *xs: alike(xs).amin(0), "Sum": lambda *xs: alike(xs).sum(0),
    "Identity": lambda x: x, "Dropout": dropout, "Clip": clip,
    "Cast": lambda x, *, to, saturate=1, round_mode="up": x.to(to),
    "CastLike": lambda x, y, *, saturate=1, round_mode="up": x.to(y.dtype),
    "PRelu": lambda x, slope: torch.where(x < 0, x * slope, x),
    "LeakyRelu": lambda x, *, alpha=0.01: F.leaky_relu(x, alpha), "Elu": lambda x, *, alpha=1.0: F.elu(x, alpha),
    "HardSigmoid": lambda x, *, alpha=0.2, beta=0.5: (alpha * x + beta).clamp(0, 1),
    "Gelu": lambda x, *, approximate="none": F.gelu(x, approximate=approximate),
    "ReduceMean": reduction(torch.mean), "ReduceSum": reduction(torch.sum), "ReduceProd": reduction(product),
    "ReduceMax": reduction(torch.amax), "ReduceMin": reduction(torch.amin),
    "ReduceL1": reduction(lambda x, axes, keep: x.abs().sum(axes, keep)),
    "ReduceL2": reduction(lambda x, axes, keep: x.square().sum(axes, keep).sqrt()),
    "ReduceSumSquare": reduction(lambda x, axes, keep: x.square().sum(axes, keep)),
    "ArgMax": lambda x, *, axis=0, keepdims=1: x.argmax(axis, keepdim=bool(keepdims)), "TopK": top_k,
    "CumSum": cumulated, "Gemm": gemm, "Einsum": lambda *xs, equation: torch.einsum(equation, *xs),
    "Conv": conv, "MaxPool": max_pool, "AveragePool": average_pool,
    "GlobalAveragePool": lambda x: x.mean(tuple(range(2, x.dim())), keepdim=True),
    LAYER: layer_norm, RMS: rms_norm, STANDARD_RMS: rms_norm, "BatchNormalization": batch_norm, "Softmax": softmax,
    "LogSoftmax": lambda x, *, axis=-1: x.log_softmax(axis),
    "InstanceNormalization": lambda x, w, b, *, epsilon=1e-5: F.group_norm(x, x.shape[1], w, b, epsilon),
    "GroupNormalization": lambda x, w, b, *, num_groups, epsilon=1e-5: F.group_norm(x, num_groups, w, b, epsilon),
    "LpNormalization": lambda x, *, axis=-1, p=2: torch.nan_to_num(x / x.norm(p, axis, keepdim=True)),
    "Shape": lambda x, *, start=0, end=None: torch.tensor(x.shape[start:end], dtype=torch.int64),
    "Size": lambda x: torch.tensor(x.numel()), "Reshape": reshape, "Squeeze": squeeze, "Unsqueeze": unsqueeze,
    "Flatten": lambda x, *, axis=1: x.reshape(x.shape[:axis].numel(), x.shape[axis:].numel()),
    "Transpose": lambda x, *, perm=None: x.permute(perm or tuple(range(x.dim()))[::-1]),
    "Concat": lambda *xs, axis: torch.cat(xs, axis), "Split": split, "Slice": slices, "Pad": pad,
    "Gather": lambda x, at, *, axis=0: x[(*[slice(None)] * (axis % x.dim()), at.long())],
    "GatherElements": lambda x, at, *, axis=0: x.gather(axis, at.long() % x.shape[axis]),
    "GatherND": lambda x, at: x[at.long().unbind(-1)],
    "ScatterND": lambda x, at, values: x.index_put(at.unbind(-1), values),
    "ScatterElements": lambda x, at, values, *, axis=0: x.scatter(axis, at.long() % x.shape[axis], values),
    "Expand": lambda x, to: x.expand(torch.broadcast_shapes(x.shape, ints(to))),
    "Tile": lambda x, times: x.repeat(ints(times)), "NonZero": lambda x: x.nonzero().T,
    "ConstantOfShape": lambda to, *, value=0.0, dtype=torch.float32: torch.full(ints(to), value, dtype=dtype),
    "Range": lambda a, b, step, *, stash_type=1: torch.arange(a.item(), b.item(), step.item(), dtype=a.dtype),
    "Trilu": lambda x, k=None, *, upper=1: (torch.triu if upper else torch.tril)(x, 0 if k is None else int(k)),
}  # fmt: skip
"""ONNX's own operators."""
OTHERS: dict[str, Function] = {
    "Gelu": lambda x: F.gelu(x), "BiasGelu": lambda x, bias: F.gelu(x + bias),
    "FastGelu": lambda x, bias=0.0: F.gelu(x + bias, approximate="tanh"),
    "QuickGelu": lambda x, *, alpha=1.702: x * torch.sigmoid(alpha * x),
    "MultiHeadAttention": attention.multi_head_attention, "GroupQueryAttention": attention.group_query_attention,
    "RotaryEmbedding": attention.rotary_embedding, "MatMulNBits": attention.matmul_nbits,
    "FusedMatMul": lambda a, b, *, alpha=1.0, transA=0, transB=0: (
        alpha * torch.matmul(a.mT if transA else a, b.mT if transB else b)
    ),
}  # fmt: skip
"""Operators of ONNX Runtime."""
for name, function in (*TABLE.items(), *OTHERS.items()):
    if inspect.isfunction(function) and _ours(function):
        function.__name__ = name  # what torch.fx writes for it
RESULTS = {"Split": 1 << 30, "TopK": 2, "MultiHeadAttention": 3, "GroupQueryAttention": 3}
"""How many results are computed, where it is not one."""
SINCE = {"BatchNormalization": 7, "GroupNormalization": 21, "LogSoftmax": 13, "PRelu": 7, "Pad": 11, "TopK": 10}
"""From which opset on an operator is taken, which meant, or took, something else before."""
ONLY: dict[str, dict[str, object]] = {
    "MaxPool": {"ceil_mode": 0, "storage_order": 0}, "AveragePool": {"ceil_mode": 0}, "GatherND": {"batch_dims": 0},
    "ArgMax": {"select_last_index": 0}, "FusedMatMul": {"transBatchA": 0, "transBatchB": 0},
    "BatchNormalization": {"training_mode": 0, "spatial": 1}, "ScatterND": {"reduction": "none"},
    "ScatterElements": {"reduction": "none"},
    "GroupQueryAttention": {"qk_output": 0, "k_quant_type": "NONE", "v_quant_type": "NONE", "kv_cache_bit_width": 0},
    "RotaryEmbedding": {"is_packed_batching": 0}, "MatMulNBits": {"weight_prepacked": 0},
}  # fmt: skip
"""Attributes that are taken at one value alone."""
