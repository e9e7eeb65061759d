"""What lnrewrite needs of torch and torch has no public name for, in 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.conv import _ConvNd as Convolution
from torch.utils import _pytree as pytree
from torch.utils._pytree import TreeSpec

__all__ = [
    "BatchNorm",
    "COMPILED",
    "Convolution",
    "GRAPH_ATTRIBUTES",
    "FakeTensorMode",
    "OpOverload",
    "TreeSpec",
    "allowed_globals",
    "assert_true",
    "closing_maps",
    "get_layout",
    "guards",
    "input_tree",
    "operator_name",
    "output_tree",
    "pytree",
    "record_offsets",
    "schema_of",
    "set_trees",
    "slots",
    "storage_info",
    "tensors_in",
]

COMPILED = "_orig_mod"
"""The name under which torch.compile keeps the module that it wraps."""

assert_true: Callable[..., object] = torch._assert
"""The assertion that tracing follows."""


GRAPH_ATTRIBUTES = {*dir(fx.GraphModule(nn.Module(), fx.Graph()))} - {*dir(nn.Module())} | {
    "_in_spec",
    "_out_spec",
    "range_constraints",
    "validate_inputs",
}
"""What an exported graph module has itself, so that nothing that it holds can be called the same."""


# ---- operators ----


def schema_of(target: object) -> torch.FunctionSchema | None:
    """Return the schema of an operator's overload; None for any other callable."""
    return target._schema if isinstance(target, OpOverload) else None


def operator_name(target: object) -> str:
    """Return the name of an operator, namespace and overload left out; of another callable, its own; else nothing."""
    schema = schema_of(target)
    return str(getattr(target, "__name__", "")) if schema is None else schema.name.partition("::")[2]


@contextmanager
def closing_maps() -> Iterator[None]:
    """Leave the dimensions that torch.vmap maps over as they were: tracing one that fails forgets to close it."""
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)


def guards(module: fx.GraphModule) -> tuple[Any, ...]:
    """Return what an export took for granted of the sizes of its inputs: relations of sympy, over their symbols."""
    values = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    sizes: list[Any] = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
    found: Any = next((size.node.shape_env for size in sizes if isinstance(size, torch.SymInt)), None)
    return tuple(dict.fromkeys(guard.expr for guard in found.guards)) if found else ()


# ---- values that nest ----


def tensors_in(tree: object) -> list[torch.Tensor]:
    """Return the tensors in lists, tuples, dicts and classes that torch knows, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def sizes_of(value: torch.Tensor) -> tuple[int | str, ...]:
    """Return a traced tensor's sizes: numbers, and names of those that are free."""
    return tuple(size if isinstance(size, int) else str(size) for size in value.shape)


def input_tree(module: fx.GraphModule) -> TreeSpec:
    """Return how a captured module's inputs nest: a pair of args and kwargs."""
    return _trees(module).in_spec


def output_tree(module: fx.GraphModule) -> TreeSpec | None:
    """Return how a captured module's outputs nest."""
    return _trees(module).out_spec


def set_trees(
    module: fx.GraphModule,
    *,
    names: list[str] | None = None,
    inputs: TreeSpec | None = None,
    outputs: TreeSpec | None = None,
) -> None:
    """Change how a captured module's inputs nest, and their names, or how its outputs nest."""
    old, held = _trees(module), module.graph._codegen
    assert isinstance(held, _PyTreeCodeGen)
    held.pytree_info = _PyTreeInfo(names or old.orig_args, inputs or old.in_spec, outputs or old.out_spec)


def _trees(module: fx.GraphModule) -> _PyTreeInfo:
    held = module.graph._codegen
    assert isinstance(held, _PyTreeCodeGen)
    return held.pytree_info


# ---- modules ----


def slots(module: nn.Module) -> Mapping[str, nn.Parameter | None]:
    """Return a module's own parameters by name, those among them that it was made without."""
    return module._parameters


# ---- files ----


def allowed_globals() -> frozenset[str]:
    """Return the names that `torch.load(weights_only=True)` allows by default."""
    from torch._weights_only_unpickler import _get_allowed_globals

    return frozenset(_get_allowed_globals())


def record_offsets(stream: IO[bytes]) -> dict[str, int]:
    """Return where each member of a zip archive begins, as torch's own reader finds them. Raises RuntimeError."""
    reader = torch._C.PyTorchFileReader(stream)
    return {name: reader.get_record_offset(name) for name in reader.get_all_records()}  # type: ignore[attr-defined]


get_layout: Callable[[str], torch.layout] = torch.serialization._get_layout
"""What a pickle calls for the layout of a tensor."""


def storage_info() -> type[Any]:
    """Return the class of the rows by which the index of a distributed checkpoint says where a tensor lies."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo
