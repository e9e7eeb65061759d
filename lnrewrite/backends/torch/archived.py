"""Say whether a .pt2 can hold a captured model, so that torch alone reads it again, and make its outputs plain."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import fx

from ...compat.torch import TreeSpec, input_tree, output_tree, pytree, set_trees
from ...errors import Code, LnrewriteError, told
from .module import CapturedModule

PLAIN = {dict, list, tuple, OrderedDict}
LARGEST = 1 << 28
"""A file is read again before it takes its place where its weights are no more bytes."""


def with_plain_outputs(module: CapturedModule) -> CapturedModule:
    """Return the module giving plain dicts and tuples where it gave classes, so that torch alone can load it."""
    spec = output_tree(module)
    if spec is not None and (plain := _plain(spec)) != spec:
        set_trees(module, outputs=plain)
        module.recompile()
    return module


def _plain(spec: TreeSpec) -> TreeSpec:
    """Return a tree with dicts for classes with named fields, tuples for named tuples; as it is where it is neither."""
    if spec.is_leaf():
        return spec
    children, kind, context = [_plain(child) for child in spec.children()], spec.type, spec.context
    if kind in PLAIN:
        return TreeSpec(kind, context, children)
    if pytree.is_namedtuple_class(context) or isinstance(kind, type) and issubclass(kind, tuple):
        return pytree.treespec_tuple(children)
    fields = context[0] if isinstance(context, list) and context and isinstance(context[0], list) else context
    if isinstance(fields, list) and len(fields) == len(children):
        return pytree.treespec_dict(dict(zip(fields, children, strict=True)))
    return TreeSpec(kind, context, children)


def check_archivable(module: CapturedModule, target: str) -> None:
    """Raise LnrewriteError LN025 where a .pt2 of a captured model could not be written, or not be read again."""
    spec = output_tree(module)
    outputs = _plain(spec) if spec is not None else None
    for tree, what in ((input_tree(module), "inputs"), (outputs, "outputs")):
        if tree is not None:
            try:
                pytree.treespec_dumps(tree)
            except Exception as error:  # of classes that torch is not told how to write
                why = f"its {what} are of a class that torch.export cannot write: {told(error):.160}"
                raise _refused(target, why, "dicts, lists and tuples") from error
    leaves = pytree.tree_leaves(module.graph.output_node().args[0])
    named = pytree.tree_unflatten(leaves, outputs) if outputs is not None else leaves
    for path, leaf in pytree.tree_flatten_with_path(named)[0]:
        if not isinstance(leaf, (fx.Node, int, float, type(None))):
            why = f"it returns {leaf!r:.40} (a {type(leaf).__name__}) at output{pytree.keystr(path)}"
            raise _refused(target, f"{why}, which torch.export writes and cannot read again", "tensors and numbers")


def _refused(target: str, why: str, instead: str) -> LnrewriteError:
    return LnrewriteError(Code.LN025, target, why, f"let the module's forward take and return {instead} alone")


def check_written(path: str, module: CapturedModule, target: str) -> None:
    """Raise LnrewriteError LN025 where torch.export does not read a file that it has just written; not a large one."""
    if sum(t.nbytes for t in (*module.parameters(), *module.buffers())) > LARGEST:
        return
    try:
        torch.export.load(path)
    except Exception as error:  # of whatever its reader does not take
        why = f"torch.export cannot read what it wrote: {told(error):.160}"
        raise LnrewriteError(Code.LN025, target, why, "write an .onnx file, or use the module (lnr.convert)") from error
