"""One network in a run: cut into parts behind its sums, sharded over all processes, and filled piece by piece.

Where many processes train, no process holds it whole at any time: its parameters are made without memory, sharded, and
each process reads its own rows of them. One process alone borrows the tensors of a program that has them in memory, and
copies what it trains.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..backends.inputs import Tensors
from ..backends.torch.feeding import flat_inputs
from ..backends.torch.widened import in_float32, raised
from ..errors import Code, LnrewriteError
from ..models.program import Program
from .distributed import World, local
from .sources import inputs_of
from .tapers import Taper
from .view import View, ViewOutput

PIECE = 1 << 20
"""How many numbers are read at a time."""


@dataclass
class Participant:
    """Hold one network in a run: the program that its values come from, and the view of it that is run and trained.

    The view is in float32 where the program holds half precision: a small step would round to none there, and of small
    gradients the squares. bf16: run under autocast and, where it is sharded, gathered and reduced in bfloat16.
    borrowed: the parameters that are the program's own tensors.
    """

    program: Program
    view: View
    world: World
    bf16: bool = False
    borrowed: frozenset[str] = frozenset()
    _asking: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, program: Program, world: World, bf16: bool = False, tapers: Sequence[Taper] = ()) -> Self:
        """Take a program in. Raises LnrewriteError LN024 where a value is NaN or infinite."""
        if world.size > 1 or program.empty:
            found = cls.bare(program, world, bf16, tapers)
            found.fill()
            return found
        view = View(program, tapers, in_float32(program.remade(lambda _, p: p.detach()).module())).to(world.device)
        borrowed = frozenset(() if program.narrow else (n for n, _ in program.module().named_parameters()))
        return cls(program, view, world, bf16, borrowed)

    @classmethod
    def bare(cls, program: Program, world: World, bf16: bool = False, tapers: Sequence[Taper] = ()) -> Self:
        """Return a program sharded, in memory that nothing has been written to."""
        bare = program.remade(lambda _, p: p.detach().to("meta"), world.device)
        view = View(program, tapers, in_float32(bare.module()))
        buffers = dict(view.named_buffers())
        world.shard(view, view.parts, bf16)
        view.to_empty(device=world.device)
        with torch.no_grad():
            for name, buffer in view.named_buffers():
                buffer.copy_(buffers[name])
        return cls(program, view, world, bf16)

    def fill(self) -> None:
        """Read this process's rows of every parameter."""
        wrong = ""
        with torch.no_grad():
            for name, parameter in self.named.items():
                here = local(parameter)
                mine = self.world.piece(len(parameter) if parameter.dim() else 1)
                step = max(1, PIECE * (mine.stop - mine.start) // max(1, here.numel()))
                for start in range(mine.start, mine.stop, step):
                    rows = slice(start, min(start + step, mine.stop))
                    place = here[start - mine.start : rows.stop - mine.start] if here.dim() else here
                    place.copy_(self.program.rows(name, rows))
                if here.is_floating_point() and not torch.isfinite(here).all():
                    wrong = wrong or name
        if bad := next(filter(None, self.world.gathered(wrong)), None):
            remedy = "repair or re-download the weights"
            raise LnrewriteError(Code.LN024, bad, "it holds NaN or infinite values", remedy)

    @cached_property
    def narrow(self) -> bool:
        """Return whether the program holds half precision, and so the view does not."""
        return self.program.narrow

    @property
    def named(self) -> dict[str, nn.Parameter]:
        """Return the parameters by the names that the program has for them, of tied ones the first."""
        return {self.view.origin(name): parameter for name, parameter in self.view.named_parameters()}

    def find(self, name: str) -> nn.Parameter | None:
        """Return the parameter that the program knows by any name, None where it has none."""
        return self.named.get(self.view.first(name) or name)

    def moved(self, name: str) -> Tensor:
        """Return how far training has taken this process's rows of a parameter from the program's."""
        parameter = self.named[self.view.first(name) or name]
        rows = self.world.piece(len(parameter)) if parameter.dim() else slice(1)
        here = local(parameter).detach()
        return here - self.program.rows(name, rows).to(here)

    def run(self, batch: Tensors) -> ViewOutput:
        """Run the view on a batch."""
        low = torch.autocast(self.world.device.type, torch.bfloat16) if self.bf16 else nullcontext()
        given = flat_inputs(self.program.module(), inputs_of(batch))
        with low:
            found: ViewOutput = self.view(*raised(given) if self.narrow else given)
        return found

    def outputs(self, batch: Tensors) -> object:
        """Return what the network gives for a batch, without gradients, wherever that lies."""
        with torch.no_grad():
            return self.run(self.world.here(batch)).outputs

    def train(self, names: Collection[str]) -> list[tuple[str, nn.Parameter]]:
        """Say which parameters are trained, and return them; the rest takes no gradient, and stays borrowed."""

        def mark() -> None:
            for name, parameter in self.named.items():
                parameter.requires_grad_(name in names)

        for module in self.view.modules():
            if isinstance(module, FSDPModule):  # what it gathers to compute with are parameters of their own
                module.unshard()
                mark()
                module.reshard()
        mark()
        found = [(name, p) for name, p in self.named.items() if p.requires_grad]
        for name, parameter in found:
            if name in self.borrowed:
                parameter.data = parameter.data.clone()
        self.borrowed -= {name for name, _ in found}
        return found

    def settle(self) -> None:
        """Round the parameters to the dtypes in which the program stores them: what is measured is what is written."""
        with torch.no_grad():
            for name, parameter in self.named.items():
                here = local(parameter)
                here.copy_(here.to(self.program.dtype(name)))

    def made(self) -> Program:
        """Return the program with the values of the view, in memory of its own.

        One that lies on the disk has them only where one process trained it alone.
        """
        if self.world.size > 1 and self.program.empty:
            return self.program
        held = self.named

        def value(name: str, was: Tensor) -> Tensor:
            found = held.get(name)
            if found is None or name in self.borrowed:
                return was.detach().clone()
            whole = self._gathered(found)
            return whole if was.is_meta else whole.to(was.device, was.dtype)

        if not self.program.empty:
            return self.program.remade(value)
        found = self.program.remade(value, self.world.device)
        found.module().to(self.world.device)
        return found

    def whole(self, name: str) -> Tensor:
        """Return a parameter whole, to the first process while the others `help`, one at a time."""
        with self._asking:
            return self._gathered(self.named[self.world.agreed(name)])

    def help(self, work: Callable[[], None]) -> None:
        """Do work in the first process, which may ask for `whole` parameters; the others have nothing else to do."""
        if self.world.first:
            try:
                work()
            finally:
                self.world.agreed("")
        else:
            while name := self.world.agreed(""):
                self._gathered(self.named[name])

    @staticmethod
    def _gathered(parameter: Tensor) -> Tensor:
        found = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        return found.detach()


def sizes_of(held: Mapping[str, Tensor], world: World) -> dict[str, float]:
    """Return the norm of each of some parameters, which may be sharded."""
    parts = [(local(p).detach(), torch.promote_types(p.dtype, torch.float32)) for p in held.values()]
    squares = [torch.linalg.vector_norm(p, dtype=high).square() for p, high in parts]
    total = world.sum(torch.stack(squares)).sqrt().tolist() if squares else []
    return dict(zip(held, total, strict=True))


def alike(pairs: Sequence[tuple[Tensor, Tensor]], world: World) -> list[bool]:
    """Return whether the two of each pair are equal; they may be sharded."""
    apart = [one.shape != two.shape or not torch.equal(local(one), local(two)) for one, two in pairs]
    return (world.sum(torch.tensor(apart, dtype=torch.int64)) == 0).tolist()
