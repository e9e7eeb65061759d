"""Capture a forward that reads Python values out of data: one path of it, on which the captured program insists.

torch.export cannot follow an `if` on data. The module is run once as it is, and what it reads (truth values, numbers,
lists) is remembered; while it is traced the same values are read again, and the graph asserts that they hold. Inputs
that read others then fail with the line that read them, and the graph says by itself what was fixed in it. (What
torch.export.draft_export goes by is not what the example inputs give: it takes a true tensor for false.)
"""

from __future__ import annotations

import linecache
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from ...compat.torch import assert_true, sizes_of
from ...errors import Code, LnrewriteError, words
from .computing import attribute, valued

G = TypeVar("G", bound=fx.GraphModule)
FIXED = "fixed path: "
TORCHS = "Runtime assertion failed"  # of a graph that torch.export specialised
ASSERT = torch.ops.aten._assert_async.msg
ITEM = torch.Tensor.item
BOOL = torch.Tensor.__bool__
READS: dict[Callable[..., object], Callable[..., object]] = {
    **{f: f for f in (BOOL, ITEM, torch.Tensor.tolist, torch.Tensor.numpy)},
    **{f: f for f in (torch.Tensor.__int__, torch.Tensor.__index__, torch.Tensor.__float__)},
    assert_true: BOOL,
}
SIZES, LARGEST = (1, 2, 7, 40, 129, 1025, 4097, 16385, 65537, 131073), 1 << 22
"""Sizes at which what sizes decide is tried, on inputs of as many numbers at most."""
CLOSE = 1e-4
"""How close a number must be to one that was read: the same model in another precision reads nearly the same."""


class Reads(TorchFunctionMode):
    """Remember what is read out of tensors; entered again after `replay`, answer the same and assert it."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[tuple[str, str], list[object]] = {}
        self.seen: Counter[tuple[str, str]] | None = None

    def replay(self) -> Self:
        """Answer from now on with what was remembered, each line from its first value on."""
        self.seen = Counter()
        return self

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func not in READS or not isinstance(args[0], torch.Tensor):
            return func(*args, **(kwargs or {}))
        return self.read(READS[func], args[0], _line())

    def read(self, func: Callable[..., object], tensor: torch.Tensor, where: str) -> object:
        """Return what a line reads: a single number of floating point as a tensor, which can be followed further."""
        if func is torch.Tensor.tolist:
            return [self.read(func, t, where) for t in tensor] if tensor.dim() else self.read(ITEM, tensor, where)
        if func is ITEM and tensor.is_floating_point():
            return tensor.detach().reshape(()).double()
        key = func.__name__, where
        if self.seen is None:
            self.values.setdefault(key, []).append(func(tensor.detach()))
            return self.values[key][-1]
        if key not in self.values:  # what only tracing reads
            return func(tensor)
        values = self.values[key]
        value = values[self.seen[key] % len(values)]  # a forward may be traced more than once
        self.seen[key] += 1
        held = _holds(tensor.detach(), value)
        ASSERT(held.cpu(), f"{where} was {' '.join(repr(value).split()):.60}")
        return value


def _holds(tensor: torch.Tensor, value: object) -> torch.Tensor:
    """Return whether a tensor reads as a value, as a tensor."""
    if isinstance(value, bool):
        return (tensor != 0).reshape(()) if value else (tensor == 0).reshape(())
    if isinstance(value, (int, float)):
        tensor = tensor.reshape(())
    wanted = torch.as_tensor(value, device=tensor.device).to(tensor.dtype)
    return (torch.isclose(tensor, wanted, CLOSE, CLOSE, True) if tensor.is_floating_point() else tensor == wanted).all()


def _line() -> str:
    """Return the line of the model's own code that is running, and its place; behind `FIXED` where it chooses."""
    frame, torch_itself = sys._getframe(2), str(Path(torch.__file__).parent)
    while frame.f_back and frame.f_code.co_filename.startswith((torch_itself, __file__)):
        frame = frame.f_back
    name, number = frame.f_code.co_filename, frame.f_lineno
    line, after = (linecache.getline(name, n).strip() for n in (number, number + 1))
    checks = line.startswith(("assert ", "torch._assert(")) or after.startswith("raise ")  # the model fails there too
    return f"{'' if checks else FIXED}`{line:.80}` ({Path(name).name}:{number})"


def read_by(module: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> Reads:
    """Run a module and return what it reads; nothing where it does not run."""
    reads = Reads()
    try:
        with reads:
            module(*args, **kwargs)
    except Exception:  # on the meta device, or what is read has to be a number
        reads.values.clear()
    return reads


def on_any_path(trace: Callable[[], G], forward: Callable[..., object], inputs: Mapping[str, object]) -> G:
    """Trace a forward as it is or, where that fails, on the path that its data take.

    Raises what tracing it as it is raises.
    """
    try:
        return trace()
    except Exception:
        if not (reads := read_by(forward, (), inputs)).values:
            raise
        with suppress(Exception):
            with reads.replay():
                captured = trace()
            drop_settled(captured)
            return captured
        raise


def mark(module: fx.GraphModule, text: str) -> None:
    """Mark in a graph that something was fixed which no assertion of it tells."""
    with module.graph.inserting_before(module.graph.output_node()):
        true = module.graph.call_function(torch.ops.aten.full.default, ([], True), {"dtype": torch.bool})
        module.graph.call_function(ASSERT, (true, FIXED + text))
    true.meta["val"] = torch.tensor(True)
    module.recompile()


def drop_settled(module: fx.GraphModule) -> None:
    """Drop assertions of what the weights alone decide; what sizes of inputs decide is no choice if it holds at all."""
    varies: set[fx.Node] = set()
    by_data: set[fx.Node] = set()
    for node in module.graph.nodes:
        for found in (varies, by_data):
            if node.op == "placeholder" or any(source in found for source in node.all_input_nodes):
                found.add(node)
        if node.target is torch.ops.aten.sym_size.int:
            by_data.discard(node)
        if _is_fixed(node) and node not in varies:
            module.graph.erase_node(node)
        elif _is_fixed(node) and node not in by_data and _at_all_sizes(module, node):
            node.args = (node.args[0], str(node.args[1]).removeprefix(FIXED))
    module.graph.eliminate_dead_code(lambda node: node.op == "get_attr" or node.is_impure())
    module.recompile()


def _at_all_sizes(module: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether an assertion that the sizes of inputs decide holds at all that are tried, one by one."""
    condition = node.args[0]
    assert isinstance(condition, fx.Node)
    values = (n.meta.get("val") for n in node.graph.find_nodes(op="placeholder"))
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    names = {size for tensor in tensors for size in sizes_of(tensor) if isinstance(size, str)}
    for name, size in product(names, SIZES):
        with suppress(Exception):  # sizes that do not go together
            if not valued(condition, {}, _zeros(module, {**dict.fromkeys(names, 3), name: size})):
                return False
    return True


def _zeros(module: fx.GraphModule, sizes: Mapping[str, int]) -> Callable[[fx.Node], Any]:
    """Give inputs that are zeros of some sizes, and attributes as they are."""

    def leaf(node: fx.Node) -> Any:
        if node.op == "get_attr":
            return attribute(module, node)
        like = node.meta["val"]
        shape = [size if isinstance(size, int) else sizes[size] for size in sizes_of(like)]
        if math.prod(shape) > LARGEST:
            raise ValueError("too large")
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    return leaf


def _is_fixed(node: fx.Node) -> bool:
    return node.target is ASSERT and str(node.args[1]).startswith(FIXED)


def other_path(error: BaseException) -> str:
    """Return what was fixed where an error says that inputs take another path; else nothing."""
    text = words(error).partition("\n")[0]
    return text if text.startswith(TORCHS) else text.partition(FIXED)[2]


def elsewhere(what: str, path: str) -> LnrewriteError:
    """Return the error of inputs that take another path than the captured one."""
    why = f"it takes another path than the captured one, where {path}"
    return LnrewriteError(
        Code.LN033, what, why, "give data that take the captured path, or capture the other one with --input"
    )


def fixed_paths(graph: fx.Graph) -> tuple[str, ...]:
    """Return what was fixed in a captured graph, in the order of its assertions, each once."""
    texts = (str(node.args[1]).removeprefix(FIXED) for node in graph.nodes if _is_fixed(node))
    return tuple(dict.fromkeys(texts))
