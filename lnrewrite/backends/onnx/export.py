"""Translate a captured module into ONNX, every recognised norm one operator, never taken apart and matched again."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes import common
from onnxscript.optimizer import fold_constants
from onnxscript.rewriter import RewriteRuleSet
from onnxscript.rewriter.rules.common import squeeze_reshape_1d_rule, unsqueeze_unsqueeze_rule
from torch import fx

from ...compat.torch import TreeSpec, input_tree, output_tree, pytree
from ...detect.match import NormMatch
from ...errors import Code, LnrewriteError, UsageError
from ...ir import Kind, Norm
from ..torch.capture import export_again
from ..torch.contexts import quiet
from ..torch.fixed import ASSERT
from ..torch.lift import lift, parameter_names
from ..torch.module import Args, CapturedModule, Kwargs, register, signature_of, stored
from .attention import attention, sees, unhidden
from .heads import is_whole
from .norms import ONES, OPERATORS, SITE, attributes
from .pairs import write_pairs
from .shapes import infer_shapes

OPSET, OPSETS = 18, range(18, 26)
"""The opset that is written where none is asked for, and those that torch.onnx writes."""
AXES = ("batch", "sequence")
OTHER_OPSET = "see `lnrewrite explain LN501`; try another --opset"
aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default
SHAPING = RewriteRuleSet([squeeze_reshape_1d_rule, unsqueeze_unsqueeze_rule])
"""What torch's sizes and indices become in two steps, in one."""
TIDYING = (
    common.IdentityEliminationPass(), common.CommonSubexpressionEliminationPass(), common.RemoveUnusedNodesPass(),
    common.OutputFixPass(),
)  # fmt: skip
COPIES = {aten.reshape.default, aten.clone.default}


def to_onnx(
    module: CapturedModule,
    args: Args,
    kwargs: Kwargs,
    norms: Mapping[str, NormMatch],
    sites: Mapping[str, str],
    opset: int = OPSET,
    prepare: Callable[[CapturedModule], object] | None = None,
) -> ir.Model:
    """Return a captured module as ONNX: inputs, outputs and parameters under their own names, dynamic axes kept.

    norms: the matches of `Detection`, by output node; those of kind layer and rms over the last axis become
    LayerNormalization and SimplifiedLayerNormalization, in the dtype of what they normalise. sites: their names for
    people. prepare: what else is to be written otherwise, in place, in the copy that is translated. Parameters are
    shared with the module, not copied. Raises LnrewriteError LN501 where torch.onnx fails,
    LN503 for an opset that it does not write.
    """
    if opset not in OPSETS:
        why = f"opsets {OPSETS[0]} to {OPSETS[-1]} can be written"
        raise UsageError(Code.LN503, f"opset {opset}", why, f"give --opset {OPSET}")
    with quiet():
        semantic = _Semantic(module)
        for output, found in norms.items():
            semantic.norm(found, sites.get(output, output))
        if prepare is not None:
            prepare(semantic.module)
        semantic.attend(opset)
        try:
            program = export_again(semantic.finish(), args, kwargs)
            exported = torch.onnx.export(program, dynamo=True, optimize=False, opset_version=opset, verbose=False)
        except Exception as error:  # torch.onnx and the translations that it calls may raise anything
            raise LnrewriteError(Code.LN501, "the model", _reason(error), OTHER_OPSET) from error
        assert exported is not None
        model = exported.model
        if model.opset_imports[""] != opset:
            raise LnrewriteError(
                Code.LN503, f"opset {opset}", "onnxscript cannot convert to it", f"give --opset {OPSET}"
            )
        try:
            _clean(model, semantic.module)
        except RuntimeError as error:  # an evaluator of onnxscript that fails on an operator
            raise LnrewriteError(Code.LN501, "the model", str(error), OTHER_OPSET) from error
        _name(model, module)
        exported.rename_axes(_axes(model))
        infer_shapes(model)
    return model


def _reason(error: BaseException) -> str:
    """Return the first line of what lies at the root of an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def norm_operator(
    x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, operator: str, eps: float, site: str
) -> torch.Tensor:
    """Represent a norm operator of ONNX in a graph that is traced: it has a shape and no values."""
    inputs = (x, scale) if bias is None else (x, scale, bias)
    made = torch.onnx.ops.symbolic(
        operator, inputs, {**attributes(eps)}, dtype=x.dtype, shape=x.shape, metadata_props={SITE: site}
    )
    return made.to(x.device)


class _Semantic:
    """Rewrite a copy of a captured module, which shares its parameters, so that torch.onnx says what we mean.

    Norms become calls of `norm_operator`; attention becomes `attention` where ONNX has no operator that is right.
    """

    def __init__(self, module: CapturedModule) -> None:
        self.graph = copy.deepcopy(module.graph)
        first = parameter_names(module)
        for node in self.graph.find_nodes(op="get_attr"):
            node.target = first.get(str(node.target), node.target)  # tied parameters are one initializer
        self.module = CapturedModule(module, self.graph)
        self.view = lift(module)
        self.nodes = {n.name: n for n in self.graph.nodes}

    def finish(self) -> CapturedModule:
        """Drop what the norms were computed with, assertions and slices of all; return the module in eval mode."""
        for node in filter(is_whole, self.graph.nodes):
            node.replace_all_uses_with(node.all_input_nodes[0])
        for node in self.graph.find_nodes(op="call_function", target=ASSERT):
            self.graph.erase_node(node)
        write_pairs(self.graph)
        self.graph.eliminate_dead_code()
        self.module.recompile()
        return self.module.eval()

    def norm(self, found: NormMatch, site: str) -> None:
        """Put a norm's operator where the norm ends; one whose gain depends on the inputs stays as it is."""
        norm = found.norm
        if norm.kind not in OPERATORS or found.axis != -1:
            return
        try:
            end = self.tensor(found.output)
            x = _narrow(self.tensor(found.source), end)
            scale, bias = self.scale(norm, x), self.bias(norm, x)
        except LookupError:
            return
        inside = norm.kind is Kind.LAYER and bias
        with self.graph.inserting_before(end.next):
            vectors = [self.graph.get_attr(name) if name else None for name in (scale, bias)]
            call = (x, vectors[0], vectors[1] if inside else None, OPERATORS[norm.kind], float(norm.eps), site)
            node = self.graph.call_function(norm_operator, call)
            if bias and not inside:
                node = self.graph.call_function(aten.add.Tensor, (node, vectors[1]))
            if (dtype := end.meta["val"].dtype) != x.meta["val"].dtype:
                node = self.graph.call_function(aten._to_copy.default, (node,), {"dtype": dtype})
        node.meta["val"] = end.meta["val"]
        end.replace_all_uses_with(node)
        self.nodes[found.output] = node

    def attend(self, opset: int) -> None:
        """Write attention out where the opset, or ONNX Runtime, has no operator for what is attended to."""
        for node in self.graph.find_nodes(op="call_function", target=SDPA):
            q, k = (n.meta["val"] for n in node.args[:2])
            mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
            grouped = q.dim() == 4 and q.shape[1] != k.shape[1]
            spread = mask is not None and "1" in map(str, mask.meta["val"].shape[-2:])
            plain = q.dim() == 4 and grouped == node.kwargs.get("enable_gqa", False) and not spread
            if plain and opset >= 23:
                continue
            node.target = attention
            if mask is not None and self.view.alias.get(mask.name, mask.name) not in self.view.constant:
                self.unhide(node, mask)

    def unhide(self, node: fx.Node, mask: fx.Node) -> None:
        """Zero what attention gives for rows that see nothing: behind the merging of heads, which fusions take too."""
        end, turned, common = node, False, mask.meta["val"].shape[-3:-2] == (1,)
        heads, depth = node.meta["val"].shape[1], node.meta["val"].shape[-1]
        while common and len(end.users) == 1:
            user = next(iter(end.users))
            before, after = end.meta["val"].shape, _shape(user)
            turns = not turned and user.target is aten.transpose.int and user.args[1:] == (1, 2)
            merged = [before, (*before[:2], heads * depth)] if turned else [before]
            if not turns and not (user.target in COPIES and str(list(after)) in [str(list(m)) for m in merged]):
                break
            end, turned = user, turned or turns
        with self.graph.inserting_after(end):
            seeing = self.graph.call_function(sees, (mask,))
        with self.graph.inserting_after(seeing):
            guarded = self.graph.call_function(unhidden, (end, seeing, turned))
        guarded.meta["val"] = end.meta["val"]
        end.replace_all_uses_with(guarded, delete_user_cb=lambda user: user is not guarded)

    def tensor(self, name: str) -> fx.Node:
        """Return the node of a value, the first item where it is a tuple. Raise LookupError where nothing reads it."""
        node = self.nodes[name]
        if isinstance(node.meta["val"], torch.Tensor):
            return node
        return [user for user in node.users if user.args[1:] == (0,)][0]

    def scale(self, norm: Norm, x: fx.Node) -> str:
        """Return the name of the parameter that holds a norm's gain [width]."""
        width = x.meta["val"].shape[-1]
        if norm.gamma is None:
            return self.vector(f"{ONES}.{width}", torch.ones(width), x)
        if norm.computed:
            return self.vector(f"{norm.gamma}_gain", self.value(self.nodes[norm.gamma]), x)
        if norm.plus_one:
            return self.vector(f"{norm.gamma}_plus_one", 1 + self.held(norm.gamma).double(), x)
        return self.vector(norm.gamma, self.held(norm.gamma), x)

    def bias(self, norm: Norm, x: fx.Node) -> str | None:
        """Return the name of the parameter that holds a norm's bias [width], if it has one."""
        return self.vector(norm.beta, self.held(norm.beta), x) if norm.beta else None

    def held(self, name: str) -> torch.Tensor:
        """Return a parameter or buffer by name. Raise LookupError where there is none."""
        found = stored(self.module, name)
        if found is None:
            raise LookupError(name)
        return found.detach()

    def value(self, node: Any) -> Any:
        """Compute a node from parameters alone. Raise LookupError where it needs the inputs."""
        if node.op == "get_attr":
            return self.held(str(node.target))
        if node.op != "call_function":
            raise LookupError(node.name)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.value)
        return node.target(*args, **kwargs)

    def vector(self, name: str, tensor: torch.Tensor, x: fx.Node) -> str:
        """Return the name of a parameter [width] of these values in the dtype of `x`: `name`, or a new one like it."""
        like = x.meta["val"]
        flat = tensor.detach().to(like.dtype).flatten().expand(like.shape[-1])
        for number in itertools.count(1):
            fresh = name if number == 1 else f"{name}_{number}"
            try:
                held = self.held(fresh)
            except LookupError:
                register(self.module, fresh, torch.nn.Parameter(flat.contiguous().to(like.device), requires_grad=False))
                return fresh
            if held.shape == flat.shape and held.dtype == flat.dtype and torch.equal(held, flat):
                return fresh
        raise AssertionError


def _shape(node: fx.Node) -> tuple[int | torch.SymInt, ...]:
    """Return the shape of a node's value, nothing where that is no tensor."""
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _narrow(x: fx.Node, end: fx.Node) -> fx.Node:
    """Return what a norm's input was widened from, where its value has that dtype again: the operator widens inside."""
    if x.target is aten._to_copy.default and isinstance(before := x.args[0], fx.Node):
        narrow, wide = before.meta["val"].dtype, x.meta["val"].dtype
        if narrow == end.meta["val"].dtype and narrow.is_floating_point and narrow.itemsize < wide.itemsize:
            return before
    return x


def _clean(model: ir.Model, module: CapturedModule) -> None:
    """Fold what is constant, but no parameter: detection and edits shall find each under its own name and axes."""
    parameters = {name for name, _ in module.named_parameters()}
    kept = parameters | {name for name, _ in module.named_buffers()}

    def should_fold(node: ir.Node) -> bool | None:
        return False if any(v is not None and v.name in parameters for v in node.inputs) else None

    fold_constants(model, onnx_shape_inference=True, should_fold=should_fold)
    SHAPING.apply_to_model(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    shared: dict[object, ir.Value] = {}
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.size <= 16 and value.name not in kept and not value.is_graph_output():
            first = shared.setdefault((tensor.dtype, tensor.shape.numpy(), tensor.tobytes()), value)
            value.replace_all_uses_with(first)
    for tidy in TIDYING:
        tidy(model)
    values = [v for node in model.graph for v in node.outputs]
    for held in (model, model.graph, *model.graph, *values, *model.graph.inputs, *model.graph.initializers.values()):
        site = held.metadata_props.get(SITE)
        held.metadata_props.clear()  # where the exporter was called from
        if site:
            held.metadata_props[SITE] = held.name = held.outputs[0].name = site


def _name(model: ir.Model, module: CapturedModule) -> None:
    """Name inputs as the original's arguments, and outputs by their keys."""
    s, spec_out = signature_of(module), output_tree(module)
    specs = [spec for side in input_tree(module).children() for spec in side.children()]
    arguments = zip((*s.positional, *s.keywords), specs, strict=True)
    taken = [name for argument, spec in arguments for name in _leaves(spec, argument)]
    placeholders = list(module.graph.find_nodes(op="placeholder"))
    given = [] if spec_out is None else list(_leaves(spec_out))
    results = pytree.arg_tree_leaves(*module.graph.output_node().args)
    for values, names, nodes in ((model.graph.inputs, taken, placeholders), (model.graph.outputs, given, results)):
        kept = [n for n, node in zip(names, nodes, strict=True) if isinstance(node, fx.Node) and _valued(node)]
        for value, name in zip(values, kept, strict=True):
            value.name = name
    common.NameFixPass()(model)


def _leaves(spec: TreeSpec, name: str = "") -> Iterator[str]:
    """Name the leaves of what a module takes or gives by their keys, or `output_` and positions where there is none."""
    if spec.is_leaf():
        yield name or "output_0"
        return
    keyed = isinstance(spec.context, list) and len(spec.context) == spec.num_children
    for key, child in zip(spec.context if keyed else range(spec.num_children), spec.children(), strict=True):
        yield from _leaves(child, f"{name or 'output'}_{key}" if name or not keyed else str(key))


def _valued(node: fx.Node) -> bool:
    """Return whether a node holds a value that ONNX has a place for."""
    return node.meta.get("val") is not None


def _axes(model: ir.Model) -> dict[str | ir.SymbolicDim, str]:
    """Return names for the dynamic axes of the inputs: the first is the batch, the second the sequence."""
    names: dict[str | ir.SymbolicDim, str] = {}
    for value in model.graph.inputs:
        for axis, size in enumerate(value.shape or ()):
            if isinstance(size, ir.SymbolicDim) and str(size.value).isidentifier() and size.value not in names:
                name = AXES[axis] if axis < len(AXES) else f"{value.name}_{axis}"
                names[str(size.value)] = f"{value.name}_{name}" if name in names.values() else name
    return names
