"""A neutral view of an operator graph: what both backends lift into and detection looks at.

It is a view with few fields, not an intermediate representation: nothing is edited here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

Operand = str | float | int | bool | None

# Operators that hand their first input on unchanged in value, channel by channel.
SHAPE = frozenset({"reshape", "permute", "expand", "slice", "roll", "pad", "flip"})
CASTS = frozenset({"cast"})
RANDOM = frozenset({"input", "rand", "randn", "rand_like", "randn_like", "bernoulli", "dropout", "randint"})


@dataclass(frozen=True, slots=True)
class Op:
    """Describe one node: a neutral `kind`, operands (node names or scalars), attributes, shape (str: symbolic)."""

    name: str
    kind: str
    inputs: tuple[Operand, ...] = ()
    attrs: Mapping[str, object] = field(default_factory=dict)
    shape: tuple[int | str, ...] | None = None
    dtype: str = ""

    @property
    def data(self) -> tuple[str, ...]:
        """Return the operands that are nodes."""
        return tuple(i for i in self.inputs if isinstance(i, str))

    @property
    def axes(self) -> tuple[int, ...] | None:
        """Return the axes that a reduction, a roll, a pad or a gather works over; None where it names none."""
        axes = self.attrs.get("axes")
        return tuple(axes) if isinstance(axes, (tuple, list)) else None

    def number(self, name: str) -> float:
        """Return an attribute that is a number. Raises TypeError where it is not one."""
        value = self.attrs[name]
        if not isinstance(value, (int, float)):
            raise TypeError(f"the {name} of {self.name} is {value!r}, not a number")
        return value

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return an attribute that is a list of whole numbers. Raises TypeError where it is not one."""
        value = self.attrs[name]
        if not isinstance(value, (tuple, list)):
            raise TypeError(f"the {name} of {self.name} is {value!r}, not a list")
        return tuple(value)


class OpGraph:
    """Hold ops in topological order, aliases collapsed: `alias[name]` is the value a no-op stands for.

    `fixed` are the nodes that stored floating point numbers alone decide: no input, no size of one, no chance.
    """

    def __init__(
        self,
        ops: Mapping[str, Op],
        alias: Mapping[str, str],
        outputs: tuple[str, ...],
        fixed: frozenset[str] = frozenset(),
    ) -> None:
        self.ops, self.alias, self.outputs, self.fixed = dict(ops), dict(alias), outputs, fixed
        self.index = {name: i for i, name in enumerate(self.ops)}

    def __getitem__(self, name: str) -> Op:
        return self.ops[name]

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops.values())

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return the nodes in order."""
        return tuple(self.ops)

    @cached_property
    def users(self) -> dict[str, tuple[str, ...]]:
        """Map each node to the ops that read it, in order; a graph output counts as the user `output`."""
        found: dict[str, list[str]] = {name: [] for name in self.ops}
        for op in self:
            for name in dict.fromkeys(op.data):
                found[name].append(op.name)
        for name in self.outputs:
            found[name].append("output")
        return {k: tuple(v) for k, v in found.items()}

    def reader(self, name: str) -> Op | None:
        """Return the one op that reads a value; None where there are more, or it is an output of the graph."""
        users = self.users[name]
        return self.ops[users[0]] if len(users) == 1 and users[0] != "output" else None

    @cached_property
    def leaves(self) -> dict[str, str]:
        """Map each node that is computed from nothing and read once to what reads it."""
        return {op.name: self.users[op.name][0] for op in self if not op.data and len(self.users[op.name]) == 1}

    @cached_property
    def chains(self) -> tuple[dict[str, int], list[int]]:
        """Return the chain that each node but a leaf stands in, and for each chain the bitset of those before it.

        A chain is a run of nodes of which each is read by the next alone; what else the next reads are leaves. Only a
        chain's last node is read by other chains, so that ancestors are bits of chains: few, however long the graph.
        """
        place: dict[str, int] = {}
        before: list[int] = []
        for op in self:
            if op.name in self.leaves:
                continue
            read = [name for name in dict.fromkeys(op.data) if name not in self.leaves]
            if len(read) == 1 and len(self.users[read[0]]) == 1:
                place[op.name] = place[read[0]]
                continue
            bits = 0
            for name in read:
                bits |= before[place[name]] | 1 << place[name]
            place[op.name] = len(before)
            before.append(bits)
        return place, before

    def reaches(self, start: str, end: str) -> bool:
        """Return whether `end` is computed from `start` (a node reaches itself)."""
        if start == end or end in self.leaves:
            return start == end
        start = self.leaves.get(start, start)
        place, before = self.chains
        if start not in place:  # the graph's output
            return False
        if place[start] == place[end]:
            return self.index[start] <= self.index[end]
        return bool(before[place[end]] >> place[start] & 1)

    def between(self, start: str, end: str) -> list[Op]:
        """Return the ops on the paths from `start` (left out) to `end` (included), in order."""
        names = self.names[self.index[start] + 1 : self.index[end] + 1]
        return [self.ops[n] for n in names if self.reaches(n, end) and self.reaches(start, n)]

    @cached_property
    def learned(self) -> frozenset[str]:
        """Return the nodes that are parameters or computed from any."""
        found: set[str] = set()
        for op in self:
            if op.kind == "param" or not found.isdisjoint(op.data):
                found.add(op.name)
        return frozenset(found)

    @cached_property
    def constant(self) -> frozenset[str]:
        """Return the nodes computed from parameters, constants and sizes alone."""
        found: set[str] = set()
        for op in self:
            if op.kind not in RANDOM and all(n in found for n in op.data):
                found.add(op.name)
        return frozenset(found)

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Return the parameter nodes."""
        return tuple(op.name for op in self if op.kind == "param")

    @cached_property
    def uses(self) -> dict[str, int]:
        """Count how often each parameter is read."""
        found: dict[str, int] = {}
        for op in self:
            if op.kind == "param":
                name = str(op.attrs["param"])
                found[name] = found.get(name, 0) + len(self.users[op.name])
        return found

    def width(self, name: str, axis: int = -1) -> int:
        """Return the size of an axis where it is a number, else 0."""
        shape = self.ops[name].shape
        if not shape or not -len(shape) <= axis < len(shape):
            return 0
        size = shape[axis]
        return size if isinstance(size, int) else 0

    def is_channel_vector(self, name: Operand, width: int, axis: int = -1) -> bool:
        """Return whether a value is one number per channel of an axis, computed from parameters alone."""
        if not isinstance(name, str) or name not in self.constant or width < 2:
            return False
        shape = self.ops[name].shape or ()
        place = len(shape) + axis
        return place >= 0 and all(d == (width if i == place else 1) for i, d in enumerate(shape))

    def is_scalar(self, name: Operand) -> bool:
        """Return whether an operand is one number for the whole tensor, known without the model's inputs."""
        if not isinstance(name, str):
            return isinstance(name, (int, float)) and not isinstance(name, bool)
        return name in self.constant and all(d == 1 for d in self.ops[name].shape or ())


def unchanged(op: Op, source: Op) -> bool:
    """Return whether a cast, expand, reshape or slice hands its source on as it is."""
    alike = op.dtype == source.dtype and op.shape == source.shape is not None
    return alike and op.kind in {"cast", "expand", "reshape", "slice"}
