"""Several graphs of one network: one is measured on data, the others take over what it told, so that all change alike.

A decoder in two files, for the prompt and for what follows it, holds every weight twice. Fitted to data each by itself,
the two would no longer be one model. What a pass proposes follows from a graph's picture, its values and what was
measured; so graphs of the same picture and values that are told the same change in the same way, number for number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from hashlib import sha256
from typing import Any, NoReturn, Self

import onnx_ir as ir

from ..detect.arithmetic import Floats
from ..errors import Code, LnrewriteError
from ..ir import Network
from ..pipeline.protocols import Bases, Batch, Samples
from ..pipeline.report import Fitted
from ..pipeline.results import Drift
from .onnx_program import OnnxProgram


@dataclass
class Tape:
    """Hold what one graph was asked and told, in order; names are left out, for in another graph they are others."""

    network: Network
    digests: list[str]
    told: list[tuple[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, program: OnnxProgram) -> Self:
        """Begin with a graph as it is: its picture, and what its parameters hold."""
        return cls(program.network, [_digest(program, name) for name in _names(program.network)])

    def again(self, program: OnnxProgram) -> Tape:
        """Return what another graph of the same network is told.

        Raises LnrewriteError LN034 where it is none.
        """
        if _shape(self.network) != _shape(program.network):
            _other("it holds graphs of different networks")
        if self.digests != [_digest(program, name) for name in _names(program.network)]:
            _other("the weights of its graphs differ")
        return Tape(self.network, self.digests, list(self.told))

    def next(self, question: str) -> Any:
        """Return the next answer. Raises LnrewriteError LN034 where another question was put."""
        if not self.told or self.told[0][0] != question:
            _other("its graphs do not take the same edits")
        return self.told.pop(0)[1]


class Twin(OnnxProgram):
    """Keep the tape through edits."""

    tape: Tape

    @classmethod
    def on(cls, program: OnnxProgram, tape: Tape) -> Self:
        """Return a program that reads or writes a tape."""
        made = program.become(cls)
        made.tape = tape
        return made

    def _as(self, model: ir.Model, done: tuple[str, ...]) -> Self:
        made = super()._as(model, done)
        made.tape = self.tape
        return made

    def peaks(self, batches: Sequence[Batch]) -> Mapping[str, float]:
        """Raise LnrewriteError LN034: every value of a graph is asked for, and those of two graphs are others."""
        _other("a pass looks at the largest number of every value, and its graphs have different ones")


class Leader(Twin):
    """Answer questions by data, and keep the answers."""

    def samples(self, batches: Sequence[Batch]) -> Mapping[str, Samples]:
        """Return what each block saw and did."""
        found = super().samples(batches)
        self.tape.told.append(("samples", list(found.values())))
        return found

    def recorded(self, batches: Sequence[Batch], axes: Mapping[str, int]) -> Mapping[str, Floats]:
        """Return values of the graph."""
        found = super().recorded(batches, axes)
        self.tape.told.append(("recorded", [found[name] for name in axes]))
        return found

    def fitted(
        self, original: OnnxProgram, blocks: Bases, fit: Sequence[Batch], held: Sequence[Batch]
    ) -> tuple[Self, tuple[Fitted, ...], tuple[str, ...]]:
        """Fit branches to data."""
        made, rows, notes = super().fitted(original, blocks, fit, held)
        changed = {name for row in rows for name in row.weights}
        if left := changed - set(_names(made.network)):
            _other(f"fitting changed {', '.join(sorted(left))}, which is not in the picture of its graphs")
        values = [_stored(made, name) if name in changed else None for name in _names(made.network)]
        self.tape.told.append(("fitted", (values, rows, notes)))
        return made, rows, notes

    def drift(self, other: Self, batches: Sequence[Batch], held_out: bool) -> Drift:
        """Compare outputs."""
        found = super().drift(other, batches, held_out)
        self.tape.told.append(("drift", found))
        return found


class Follower(Twin):
    """Answer as another graph of the network did."""

    def samples(self, batches: Sequence[Batch]) -> Mapping[str, Samples]:
        """Return what each block saw and did in the other graph."""
        return dict(zip((block.name for block in self.network.blocks), self.tape.next("samples"), strict=True))

    def recorded(self, batches: Sequence[Batch], axes: Mapping[str, int]) -> Mapping[str, Floats]:
        """Return values of the other graph."""
        return dict(zip(axes, self.tape.next("recorded"), strict=True))

    def fitted(
        self, original: OnnxProgram, blocks: Bases, fit: Sequence[Batch], held: Sequence[Batch]
    ) -> tuple[Self, tuple[Fitted, ...], tuple[str, ...]]:
        """Take over what was fitted."""
        values, rows, notes = self.tape.next("fitted")
        for name, value in zip(_names(self.network), values, strict=True):
            if value is not None:
                self.model.graph.initializers[name].const_value = ir.tensor(value, name=name)
        return self._as(self.model, self.done), rows, notes

    def drift(self, other: Self, batches: Sequence[Batch], held_out: bool) -> Drift:
        """Return how far the other graph's outputs moved."""
        found: Drift = self.tape.next("drift")
        return found


HOLDS = frozenset({"param", "bias", "gamma", "beta", "mean", "variance", "by"})
"""The fields of a picture that name what a graph holds."""


def _walked(found: object, at: str = "") -> Iterator[tuple[str, object]]:
    """Yield every value of a picture with the field that it stands in, in one order for all pictures."""
    if is_dataclass(found):
        for each in fields(found):
            if each.compare and each.name != "refusals":
                yield from _walked(getattr(found, each.name), each.name)
    elif isinstance(found, tuple):
        yield at, len(found)
        for item in found:
            yield from _walked(item, at)
    else:
        yield at, found


def _names(network: Network) -> list[str]:
    """Return the names of what a graph holds, in the order of its picture."""
    return [value for at, value in _walked(network) if at in HOLDS and isinstance(value, str)]


def _shape(network: Network) -> list[tuple[str, object]]:
    """Return a picture without names."""
    return [(at, "" if type(value) is str else value) for at, value in _walked(network)]


def _stored(program: OnnxProgram, name: str) -> Any:
    """Return a parameter as the graph stores it."""
    value = program.model.graph.initializers[name].const_value
    assert value is not None, name
    return value.numpy()


def _digest(program: OnnxProgram, name: str) -> str:
    """Return what tells the values of a parameter from others."""
    try:
        values = program.values(name)
    except LnrewriteError:  # of what depends on data, the place alone
        return ""
    return sha256(repr(values.shape).encode() + values.tobytes()).hexdigest()


def _other(why: str) -> NoReturn:
    remedy = "convert the checkpoint that they were exported from, and export it; or name one of the files"
    raise LnrewriteError(Code.LN034, "the folder", why, remedy)
