"""A residual branch: what lies between a trunk value and the add, the norms at its two ends, and what it computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from .graph import Op, OpGraph
from .joins import WEIGHTED, Join
from .match import NormMatch
from .normed import NormedGraph

CONVOLUTIONS = frozenset({"conv", "conv_transpose"})
ROUTERS = frozenset({"topk", "one_hot", "histc", "bincount"})


@dataclass(frozen=True, eq=False)
class Branch:
    """Hold one residual branch: `end` is computed from the trunk value `root` and enters the sum at `add`."""

    view: NormedGraph
    root: str
    end: str
    add: str

    @cached_property
    def ops(self) -> list[Op]:
        """Return the ops from the root (left out) to the end, in order."""
        return self.view.graph.between(self.root, self.end)

    @cached_property
    def region(self) -> frozenset[str]:
        """Return the nodes of the branch."""
        return frozenset(op.name for op in self.ops)

    @cached_property
    def kind(self) -> str:
        """Return what the branch computes: attention, moe, ssm, conv, mlp or other."""
        return branch_kind(self.view.graph, self.ops)

    @cached_property
    def entries(self) -> list[NormMatch]:
        """Return the norms of the branch that read the root, straight or through casts, shapes and scales."""
        graph, found = self.view.graph, list[NormMatch]()
        for norm in self.view.within(self.root, self.end):
            if not graph.reaches(norm.output, self.end) or not graph.reaches(self.root, norm.source):
                continue
            name = norm.source
            while name != self.root and (step := self.view.before(name)):
                name = step
            if name == self.root:
                found.append(norm)
        return found

    @cached_property
    def exit(self) -> NormMatch | None:
        """Return the norm that the branch ends in, seen through casts, shapes, scales and gates."""
        graph, name = self.view.graph, str(self.end)
        while name != self.root:
            if name in self.view.norms:
                found = self.view.norms[name]
                held = graph.between(self.root, found.source) if graph.reaches(self.root, found.source) else []
                return found if any(o.kind in WEIGHTED or not o.data for o in held) or len(held) > 4 else None
            op = graph[name]
            gate = [n for n in op.data if n not in graph.constant and graph.reaches(self.root, n)]
            step = self.view.before(name) or (gate[0] if op.kind == "mul" and len(gate) == 1 else None)
            if not step:
                return None
            name = step
        return None

    @property
    def holds_norm(self) -> bool:
        """Return whether a norm lies on a path from the root to the end."""
        reaches = self.view.graph.reaches
        return any(o != self.root and reaches(self.root, o) and reaches(o, self.end) for o in self.view.norms)

    @property
    def parameters(self) -> set[str]:
        """Return the weights of the branch's linear ops, straight or through constant ops as a split or a transpose."""
        graph, found = self.view.graph, set[str]()
        for op in self.ops:
            todo = [] if op.name in self.view.inside or op.kind not in WEIGHTED else list(op.data)
            while todo:
                held = graph[todo.pop()]
                if held.name in graph.constant and held.name not in self.region | {self.root}:
                    todo += held.data
                    found |= {str(held.attrs["param"])} if held.kind == "param" else set()
        return found


def branches_of(view: NormedGraph, join: Join) -> tuple[Branch, ...]:
    """Return the branches of a residual sum."""
    return tuple(Branch(view, join.root, end, add) for end, add in join.branches)


def branch_kind(graph: OpGraph, ops: Sequence[Op]) -> str:
    """Return what a branch computes, by its operators: attention, moe, ssm, conv, mlp or other."""
    kinds = Counter(o.kind for o in ops)
    soft = any(k in kinds for k in ("softmax", "_softmax", "_safe_softmax"))
    products = [o for o in ops if o.kind in {"matmul", "bmm", "einsum"} and len(o.data) > 1]
    stored = graph.constant - {o.name for o in ops}  # what a branch computes from stored latents is data to it
    data = [o for o in products if all(n not in stored for n in o.data[:2])]
    if "scaled_dot_product_attention" in kinds or (soft and len(data) >= 2):
        return "attention"
    if any(k in kinds for k in ROUTERS):
        return "moe"
    wide = any(o.kind in CONVOLUTIONS and any(k != 1 for k in (graph[o.data[1]].shape or ())[2:]) for o in ops)
    if "cumsum" in kinds or (wide and ("softplus" in kinds or "exp" in kinds)):
        return "ssm"
    if wide:
        return "conv"
    return "mlp" if "linear" in kinds or products or CONVOLUTIONS & kinds.keys() else "other"
