"""Run a captured graph in float64 with its parameters as they are stored: each is widened where it is read.

No copy of the weights is made: one widened parameter lives as long as the operator that reads it, in room that the
next one of its size takes over (to ask the system for fresh memory takes eight times as long as to widen).
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.fx.node import Argument, Target
from torch.overrides import TorchFunctionMode

from ...compat.torch import pytree, tensors_in
from .module import CapturedModule

Read = Callable[[str], torch.Tensor]
T = TypeVar("T", bound=nn.Module)
CHUNK = 1 << 20
HALVES = (torch.float16, torch.bfloat16)
LOW = (torch.float32, *HALVES)


def is_narrow(module: nn.Module) -> bool:
    """Return whether a module holds parameters in half precision."""
    return any(p.dtype in HALVES for p in module.parameters())


class Widened(fx.Interpreter):
    """Interpret a captured module in float64 or, with `wide` false, as it is stored.

    jitter: move every number of a parameter by up to half its last bit, by a whole one where nothing is widened. read:
    return a parameter's values by name, for a module that was captured on the meta device.
    """

    def __init__(
        self, module: CapturedModule, wide: bool = True, jitter: bool = False, read: Read | None = None
    ) -> None:
        super().__init__(module)
        self.wide, self.jitter, self.read = wide, jitter, read
        self.rooms: dict[int, list[torch.Tensor]] = {}
        self.taken: list[torch.Tensor] = []

    def run_node(self, n: fx.Node) -> object:
        """Run one node; the room of what it read is free then, unless its value lies there: a view."""
        value = super().run_node(n)
        if self.taken:
            held = {t.untyped_storage().data_ptr() for t in tensors_in(value)}
            for room in self.taken:
                if room.untyped_storage().data_ptr() not in held:
                    self.rooms.setdefault(room.numel(), []).append(room)
            self.taken.clear()
        return value

    def map_nodes_to_values(self, args: Argument, n: fx.Node) -> Argument:
        """Return what a node reads: parameters as they are meant here, for as long as it reads them."""

        def load(node: fx.Node) -> Any:
            value = self.env[node]
            return self._parameter(str(node.target), value) if node.op == "get_attr" else value

        return fx.map_arg(args, load)

    def _parameter(self, name: str, value: nn.Module | torch.Tensor) -> nn.Module | torch.Tensor:
        """Return a parameter in float64, and a graph that an operator calls with its casts widened."""
        if isinstance(value, nn.Module):
            return in_float64(value) if self.wide else value
        if self.read is not None and value.is_meta:
            value = self.read(name)
        if not value.is_floating_point():
            return doubled(value) if self.wide else value
        bit = torch.finfo(value.dtype).eps
        value = self._double(value.detach()) if self.wide else value.detach()
        return _jittered(value, bit if self.wide else 2 * bit, zlib.crc32(name.encode())) if self.jitter else value

    def _double(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor in float64, in room that is free where it is large."""
        if value.numel() < CHUNK // 16 or value.dtype is torch.float64:
            return value.double()
        free = self.rooms.get(value.numel())
        room = free.pop() if free else torch.empty(value.numel(), dtype=torch.float64, device=value.device)
        self.taken.append(room)
        return room.view(value.shape).copy_(value)

    def call_function(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Argument]) -> object:
        """Call an operator; casts to fewer bits go to float64 instead, and what is made where no weights are, here."""
        args, kwargs = pytree.tree_map(self._meant, (args, kwargs))
        return super().call_function(target, args, kwargs)

    def _meant(self, value: object) -> object:
        if self.read is not None and isinstance(value, torch.device) and value.type == "meta":
            return torch.device("cpu")
        return widest(value) if self.wide else value


def worked_out(module: CapturedModule, name: str, read: Read | None = None) -> torch.Tensor:
    """Return the value in float64 of a node that stored numbers alone decide, by running what computes it.

    read: return a parameter's values by name, for a module that was captured on the meta device.
    """
    end = next(node for node in module.graph.nodes if node.name == name)
    needed, runs = {end}, Widened(module, read=read)
    for node in reversed(module.graph.nodes):
        needed.update(node.all_input_nodes if node in needed else ())
    with torch.no_grad():
        for node in (n for n in module.graph.nodes if n in needed):
            runs.env[node] = runs.run_node(node)
    value: torch.Tensor = runs.env[end]
    return read(str(end.target)) if read and end.op == "get_attr" else value


def _jittered(value: torch.Tensor, bit: float, seed: int) -> torch.Tensor:
    """Return a tensor with each number moved by up to `bit` / 2 of itself, made piece by piece for memory."""
    draw, moved = torch.Generator().manual_seed(seed), value.clone(memory_format=torch.contiguous_format)
    for piece in moved.view(-1).split(CHUNK):
        piece.add_(piece * (torch.rand(piece.shape, generator=draw).to(piece) - 0.5), alpha=bit)
    return moved


def widest(value: object, to: torch.dtype = torch.float64) -> object:
    """Return `to` for a dtype of fewer bits, and anything else as it is."""
    if value is torch.complex64 and to is torch.float64:
        return torch.complex128
    return to if any(value is low for low in LOW) else value


def doubled(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor of numbers with a fraction in float64 or complex128, any other as it is."""
    if value.is_complex():
        return value.to(torch.complex128)
    return value.double() if value.is_floating_point() else value


def in_float64(module: nn.Module) -> nn.Module:
    """Return a copy of a module in float64 and eval mode, the casts that its graph spells out widened too."""
    return widened(module, torch.float64)


def in_float32(module: T) -> T:
    """Return a copy in float32 of a module that holds half precision, and any other as it is."""
    return widened(module, torch.float32) if is_narrow(module) else module


def raised(values: Iterable[object]) -> list[object]:
    """Return what a module was called with in half precision as one that is `in_float32` takes it."""
    return [v.float() if isinstance(v, torch.Tensor) and v.dtype in HALVES else v for v in values]


def widened(module: T, to: torch.dtype) -> T:
    """Return a copy of a module in float64 or float32 and eval mode, its graph's casts to fewer bits widened too."""
    made = copy.deepcopy(module).eval()
    made = made.double() if to is torch.float64 else made.float()  # `to` would drop imaginary parts
    if to is torch.float64:
        for held in (t for t in (*made.parameters(), *made.buffers()) if t.is_complex()):
            held.data = doubled(held.data)
    if isinstance(made, fx.GraphModule):
        for node in made.graph.nodes:
            node.args, node.kwargs = pytree.tree_map(lambda v: widest(v, to), (node.args, dict(node.kwargs)))
        made.recompile()
    return made


class Float64(TorchFunctionMode):
    """Make casts to lower precision inside a model go to float64 instead: libraries cast inside norms and softmax."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func in (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16):
            func = torch.Tensor.double
        return func(*map(widest, args), **{k: widest(v) for k, v in (kwargs or {}).items()})
