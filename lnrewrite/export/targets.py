"""The forms that a norm can have in ONNX, and what each costs on a target: data alone, with where it comes from.

A cost is a time relative to a residual add followed by the norm's own operator: the median over 1 to 512 tokens of 256
to 2048 channels, on a GPU over 1 to 16,384 tokens of 768 to 8192 channels. Where a whole network takes as long with
either, it is 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from ..backends.onnx.norms import EXPERTS, GROUPED, HEADED, LAYER, NORMED, PACKED, RMS, SKIP, UNBIASED

DECOMPOSED = "decomposed"

MEASURED = "measured on one CPU core with ORT 1.31: python examples/measure_forms.py"
WITHIN = "alone 2.1, but 1.0 to 1.1 with a product behind each: python examples/measure_forms.py --products"
OLDER = "measured on one CPU core with ORT 1.28"
ON_GPU = "measured on an H200 with ORT 1.31: python examples/gpu/boundary.py, columns pre and apart"
READ = "read from the CUDA provider's kernels of ORT 1.31, not measured"


NO_CUDA_KERNEL = frozenset({
    "Acos", "Acosh", "ArgMax", "ArgMin", "Asin", "Asinh", "Atan", "Atanh", "BitShift", "BitwiseAnd", "BitwiseNot",
    "BitwiseOr", "BitwiseXor", "Col2Im", "ConvInteger", "Cosh", "CumProd", "DFT", "Det", "Hardmax", "MaxRoiPool",
    "MelWeightMatrix", "Multinomial", "QLinearConv", "QLinearMatMul", "STFT", "Sinh", "SplitToSequence", "Tan",
    "Unique",
})  # fmt: skip
"""Standard operators on numbers that have no function body and whose names ORT 1.31.1's CUDA provider does not hold, or
for versions before 12 alone (ArgMax, ArgMin)."""


KERNELS = {
    ("cpu", "fp32"): (GROUPED, HEADED, EXPERTS), ("cuda", "fp32"): (HEADED, PACKED, EXPERTS),
    ("cpu", "fp16"): (GROUPED, HEADED, EXPERTS), ("cuda", "fp16"): (GROUPED, UNBIASED, NORMED, HEADED, PACKED, EXPERTS),
    ("cpu", "bf16"): (GROUPED,), ("cuda", "bf16"): (GROUPED, UNBIASED, NORMED, EXPERTS),
}  # fmt: skip
"""The kernels of attention and of experts that ONNX Runtime has for a target and type."""
SINCE = {EXPERTS: (1, 28), NORMED: (1, 28), UNBIASED: (1, 23)}
"""Versions before which kernels compute something else: a gate's factors were numbers of their own, heads were not
normed, a window had one token more (microsoft/onnxruntime#25927)."""


def release(ort: str) -> tuple[int, int]:
    """Return the first two numbers of a version of ONNX Runtime, such as "1.31.1"."""
    major, minor = ort.split(".")[:2]
    return int(major), int(minor)


def first(kernel: str) -> str:
    """Return the first version of ONNX Runtime that has a kernel as it is meant here, as a word."""
    return ".".join(map(str, SINCE[kernel]))


def kernels(target: str, dtype: str, ort: str) -> tuple[str, ...]:
    """Return the kernels that a version of ONNX Runtime has for a target and type."""
    return tuple(name for name in KERNELS.get((target, dtype), ()) if SINCE.get(name, (0, 0)) <= release(ort))


@dataclass(frozen=True, slots=True)
class Cost:
    """Describe what a form costs for these types and ranks (empty: any), between two versions of ONNX Runtime."""

    form: str
    cost: float
    source: str
    dtypes: frozenset[str] = frozenset()
    ranks: frozenset[int] = frozenset()
    since: tuple[int, int] = (0, 0)
    before: tuple[int, int] = (99, 0)

    def holds(self, dtype: str, rank: int, ort: tuple[int, int]) -> bool:
        """Return whether this row speaks of such a norm on such a version."""
        fits = (not self.dtypes or dtype in self.dtypes) and (not self.ranks or rank in self.ranks)
        return fits and self.since <= ort < self.before


@dataclass(frozen=True, slots=True)
class Target:
    """Describe a target: whether it runs ONNX Runtime's own operators, and its table.

    A Skip* form that no row names is not used: nothing says that it runs there.
    """

    name: str
    contrib: bool
    costs: tuple[Cost, ...] = ()

    def cost(self, form: str, dtype: str, rank: int, ort: tuple[int, int]) -> Cost:
        """Return the row of a form; the first that holds."""
        rows = (row for row in self.costs if row.form == form and row.holds(dtype, rank, ort))
        return next(rows, Cost(form, inf, "the target does not run it there"))


_RANKS = frozenset({2, 3})
TARGETS = {
    target.name: target
    for target in (
        Target("generic", False),
        Target("tensorrt", False),
        Target(
            "cpu",
            True,
            (
                Cost(SKIP[LAYER], 8.4, MEASURED, ranks=_RANKS, since=(1, 30)),
                Cost(SKIP[RMS], 1.0, WITHIN, ranks=_RANKS, since=(1, 30)),
                Cost(SKIP[LAYER], 0.85, OLDER, ranks=_RANKS, before=(1, 30)),
                Cost(SKIP[RMS], 0.85, OLDER, ranks=_RANKS, before=(1, 30)),
            ),
        ),
        Target(
            "cuda",
            True,
            (
                Cost(SKIP[LAYER], 0.38, ON_GPU, frozenset({"float16"}), _RANKS, since=(1, 27)),
                Cost(SKIP[RMS], 0.58, ON_GPU, frozenset({"float16"}), _RANKS, since=(1, 27)),
                Cost(SKIP[RMS], 0.46, ON_GPU, frozenset({"bfloat16"}), _RANKS),
                Cost(SKIP[LAYER], 0.8, READ, frozenset({"float32", "bfloat16"}), _RANKS),
                Cost(SKIP[RMS], 0.8, READ, frozenset({"float32"}), _RANKS),
            ),
        ),
    )
}
