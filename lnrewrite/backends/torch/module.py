"""A captured model as a living module: called as the original was, trained and saved like any other."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import fx
from torch.export import ExportedProgram, ModuleCallSignature
from torch.export.graph_signature import ArgumentSpec, TensorArgument

from ...compat.torch import TreeSpec, input_tree, operator_name, pytree, schema_of, set_trees, sizes_of
from ...ir.inputs import Input, content_of
from ...recipe.runtime import holder_of
from .functional import functional, respell
from .sums import gather

DROPOUT = torch.ops.aten.dropout.default
CLONE = torch.ops.aten.clone.default
SIGNATURE = "lnrewrite"
"""The name under which a captured module's `meta` holds its signature."""
Args = tuple[object, ...]
Kwargs = dict[str, object]
"""What a module is called with."""
COPIES = {"to", "contiguous", "detach", "alias"}
VIEWS = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default}


@dataclass(frozen=True)
class Signature:
    """Describe how the original was called and what of it was captured.

    names: the parameters of its forward. positional, keywords: the captured inputs in order, constants left out.
    constants: inputs that were not tensors; a call may repeat them and cannot change them. frozen: what train()
    cannot switch, in words, or empty.
    """

    names: tuple[str, ...]
    positional: tuple[str, ...]
    keywords: tuple[str, ...]
    constants: Mapping[str, object]
    frozen: str = ""


class CapturedModule(fx.GraphModule):
    """Run a captured graph under the original's parameter names and calling convention.

    It has no attributes of its own that the original's state could be named like: `signature`, which is one for those
    who look at a module, gives way to a state of that name. What is asked of a captured module are functions:
    `signature_of`, `leaves_of`, `written_by`.
    """

    signature: Signature

    def __getattr__(self, name: str) -> Any:
        """Return state by its name; how this module wants to be called, where no state is named `signature`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "signature" and SIGNATURE in vars(self).get("meta", {}):
                return signature_of(self)
            raise

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the model: positional and keyword inputs as the original took them, constants may be left out."""
        s = signature_of(self)
        given = {**dict(zip(s.names, args, strict=False)), **kwargs}
        wanted = (*s.positional, *s.keywords)
        captured = f"this model was captured with {', '.join(wanted)}"
        for name, value in given.items():
            if name not in wanted and not _repeats(s.constants.get(name), value):
                raise TypeError(f"{name}={value!r:.40} was not captured; {captured}")
        if missing := [n for n in wanted if n not in given]:
            raise TypeError(f"missing input {', '.join(missing)}; {captured}")
        _check_sizes(self, pytree.tree_leaves([given[n] for n in wanted]))
        return super().__call__(*(given[n] for n in s.positional), **{n: given[n] for n in s.keywords})

    def train(self, mode: bool = True) -> Self:
        """Switch dropout on or off; warn once where the captured mode cannot follow."""
        frozen = signature_of(self).frozen if mode else ""
        if frozen and not self.meta.get("warned"):
            self.meta["warned"] = True
            warnings.warn(f"train(): {frozen} keeps the mode it was captured in (eval)", stacklevel=2)
        for module in self.modules():
            module.training = mode
        nodes = [n for n in self.graph.nodes if n.target is DROPOUT and n.args[2] is not mode]
        for node in nodes:
            node.args = (*node.args[:2], mode)
        if nodes:
            self.recompile()
        return self


def signature_of(module: CapturedModule) -> Signature:
    """Return how a captured module wants to be called."""
    found: Signature = module.meta[SIGNATURE]
    return found


def leaves_of(module: CapturedModule) -> list[Input | None]:
    """Describe the tensors that a captured graph takes, in their order; None for what is not a tensor."""
    nodes = module.graph.find_nodes(op="placeholder")
    return [input_of(node.name, node.meta.get("val")) for node in nodes]


def written_by(module: CapturedModule) -> list[str]:
    """Return the names of the buffers that a captured graph writes: what it counts, or remembers."""
    writes = [n.args[0] for n in module.graph.nodes if (schema := schema_of(n.target)) and schema.is_mutable]
    return [str(n.target) for n in writes if isinstance(n, fx.Node) and n.op == "get_attr"]


def _check_sizes(module: CapturedModule, values: Sequence[object]) -> None:
    """Raise ValueError where an input has another size than the captured one along an axis that is fixed."""
    for like, value in zip(leaves_of(module), values, strict=False):
        if like is not None and isinstance(value, torch.Tensor) and like.misfit(value.shape):
            raise ValueError(f"{like.name} has shape {list(value.shape)}; the model was captured with {like}")


def input_of(name: str, like: object) -> Input | None:
    """Describe a captured input, whose free sizes are symbols; None for what is not a tensor."""
    if not isinstance(like, torch.Tensor):
        return None
    dims = sizes_of(like)
    dtype = str(like.dtype).removeprefix("torch.")
    return Input(name, dtype, dims, tuple(d if isinstance(d, int) else 0 for d in dims), content_of(name, dtype))


def _repeats(constant: object, value: object) -> bool:
    return value is None or (not isinstance(value, torch.Tensor) and bool(value == constant))


def unlift(program: ExportedProgram, names: tuple[str, ...], frozen: str = "") -> CapturedModule:
    """Turn an exported program (eval mode) into a functional graph module with the original's parameters.

    The graph is decomposed no further than functional ATen; dropouts of eval mode stay, so that train() can use them.
    The program is used up.
    """
    rates = {n.name: n.args[1] for n in program.graph.nodes if n.target is DROPOUT}
    calls = _take_calls(program)
    plain = functional(program)
    module = plain.module(check_guards=False)
    for node in module.graph.nodes:
        rate = _dropout_rate(node, rates)
        if rate is not None:
            node.target, node.args, node.kwargs = DROPOUT, (node.args[0], rate, False), {}
        if node.target in VIEWS:  # edits, and dropouts that copy nothing, change the strides that a view relies on
            node.target = torch.ops.aten.reshape.default
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            module.graph.erase_node(node)
    respell(module.graph)
    gather(module)
    signature = _drop_constants(module, names, frozen)
    captured = CapturedModule(module, module.graph, "CapturedModule")
    captured.meta.update(module.meta)
    captured.meta[SIGNATURE] = signature
    captured.meta["calls"] = _renamed(calls, program.graph, module.graph if plain is program else plain.graph)
    _share_ties(module, captured)
    for m in captured.modules():
        m.training = False
    return captured


@dataclass(frozen=True)
class Called:
    """Hold what entered and left a submodule: trees of values, and their names in the graph (None: no tensor there)."""

    path: str
    in_spec: TreeSpec
    out_spec: TreeSpec
    inputs: tuple[str | None, ...]
    outputs: tuple[str | None, ...]


def _take_calls(program: ExportedProgram) -> list[tuple[str, ModuleCallSignature]]:
    """Take the signatures of submodules out of a program: decomposing it fails where it loses a name they hold.

    Those that torch left empty are not returned: where modules are shared, it calls those that a forward reaches by a
    slice of a ModuleList by names of the slice.
    """
    entries = [e for e in program.module_call_graph if e.fqn and e.signature and "@" not in e.fqn]
    found = [(e.fqn, e.signature) for e in entries if _is_filled(e.signature)]
    for entry in entries:
        entry.signature = None
    return found


def _is_filled(signature: ModuleCallSignature) -> bool:
    """Return whether a signature names each value of its trees."""
    held = len(signature.inputs), len(signature.outputs)
    return held == (signature.in_spec.num_leaves, signature.out_spec.num_leaves)


def _renamed(calls: list[tuple[str, ModuleCallSignature]], before: fx.Graph, after: fx.Graph) -> tuple[Called, ...]:
    """Name the values of submodules' signatures as a functional graph does, which drops copies that copy nothing."""
    now = {n.meta["from_node"][-1].name if n.meta.get("from_node") else n.name: n.name for n in after.nodes}
    for node in before.nodes:
        if node.name not in now and node.op == "call_function" and operator_name(node.target) in COPIES:
            now[node.name] = now.get(node.args[0].name, "")

    def names(arguments: Iterable[ArgumentSpec]) -> tuple[str | None, ...]:
        return tuple(now.get(a.name) or None if isinstance(a, TensorArgument) else None for a in arguments)

    return tuple(Called(path, s.in_spec, s.out_spec, names(s.inputs), names(s.outputs)) for path, s in calls)


def _dropout_rate(node: fx.Node, rates: Mapping[str, float]) -> float | None:
    """Return the rate of the dropout that a copy stands for, by the node's provenance."""
    if node.target is not CLONE:
        return None
    origin = node.meta.get("from_node")
    while origin:
        source = origin[-1]
        if "dropout" in str(source.target) and source.name in rates:
            return float(rates[source.name])
        origin = source.from_node
    return None


def _drop_constants(module: fx.GraphModule, names: tuple[str, ...], frozen: str) -> Signature:
    """Take inputs that are no tensors out of the graph and its calling convention."""
    placeholders = iter([n for n in module.graph.nodes if n.op == "placeholder"])
    args_spec, kwargs_spec = input_tree(module).children()
    constants: dict[str, object] = {}

    def keeps(name: str, spec: TreeSpec) -> bool:
        nodes = [next(placeholders) for _ in range(spec.num_leaves)]
        if nodes and any(isinstance(n.meta.get("val"), torch.Tensor) for n in nodes):
            return True
        constants[name] = nodes[0].meta.get("val") if len(nodes) == 1 else None
        for node in nodes:
            node.replace_all_uses_with(node.meta.get("val"), propagate_meta=False)  # type: ignore[arg-type]
            module.graph.erase_node(node)
        return False

    names = names or tuple(f"args_{i}" for i in range(args_spec.num_children))
    positional = [(n, s) for n, s in zip(names, args_spec.children(), strict=False) if keeps(n, s)]
    keywords = [(n, s) for n, s in zip(kwargs_spec.context or [], kwargs_spec.children(), strict=True) if keeps(n, s)]
    in_spec = TreeSpec(
        tuple, None, [pytree.treespec_tuple([s for _, s in positional]), pytree.treespec_dict(dict(keywords))]
    )
    kept = tuple(n for n, _ in positional), tuple(n for n, _ in keywords)
    set_trees(module, names=[*kept[0], *kept[1]], inputs=in_spec)
    return Signature(names, *kept, constants, frozen)


def _share_ties(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Give `target` every other name under which `source` holds a parameter that it has: ties keep their names."""
    held = {id(p) for p in target.parameters()}
    present = {n for n, _ in target.named_parameters(remove_duplicate=False)}
    for name, parameter in source.named_parameters(remove_duplicate=False):
        if id(parameter) in held and name not in present:
            register(target, name, parameter)


def stored(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    """Return the parameter or buffer under a dotted name, or None where there is none."""
    path, _, leaf = name.rpartition(".")
    try:
        found = getattr(module.get_submodule(path), leaf)
    except AttributeError:
        return None
    return found if isinstance(found, torch.Tensor) else None


def output_at(module: CapturedModule, number: int | None) -> str:
    """Return the name of the node that gives the output of a number; empty where there is none."""
    nodes = pytree.tree_leaves(module.graph.output_node().args[0])
    found = None if number is None else nodes[number]
    return found.name if isinstance(found, fx.Node) else ""


def register(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
    """Register a parameter under a dotted name, making the containers on its way."""
    holder, leaf = holder_of(module, name)
    holder.register_parameter(leaf, parameter)


def home(module: torch.nn.Module) -> torch.device | None:
    """Return the device of all of a module's parameters and buffers; None where there are many, or none."""
    found = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    return found.pop() if len(found) == 1 else None


def brought(values: Any, module: torch.nn.Module) -> Any:
    """Return values with their tensors where a module's are."""
    place = home(module)
    if place is None or place.type == "meta":
        return values
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(place), values)


def copied(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Return a copy of a module on a device, itself where it is there; its own device needs no room for two."""
    if home(module) in (device, None):
        return module
    made: dict[int, Any] = {id(b): b.to(device) for b in module.buffers()}
    made |= {id(p): torch.nn.Parameter(p.detach().to(device), p.requires_grad) for p in module.parameters()}
    return copy.deepcopy(module, made)


def move(module: CapturedModule, device: torch.device) -> None:
    """Make a graph put on a device what it makes of nothing: ranges, masks, constants."""
    for node in module.graph.nodes:
        if node.op == "call_function":
            args, kwargs = (_on(value, device) for value in (node.args, node.kwargs))
            if (args, kwargs) != (node.args, node.kwargs):
                node.args, node.kwargs = args, kwargs
    module.recompile()


def _on(value: Any, device: torch.device) -> Any:
    return fx.node.map_aggregate(value, lambda v: device if isinstance(v, torch.device) else v)
