"""Run a piece of a graph: one value, and of all others only those that it is computed from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn

Call = Callable[[fx.Node, Any, Any], Any]
"""Gives what a node's operator makes of arguments and keywords."""


def plainly(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Call a node's operator as it stands."""
    return node.target(*args, **kwargs)  # type: ignore[operator]  # a call_function's target is callable


def attribute(module: nn.Module, node: fx.Node) -> Any:
    """Return what a get_attr node names in a module."""
    return attrgetter(str(node.target))(module)


def valued(end: fx.Node, held: Mapping[fx.Node, Any], leaf: Callable[[fx.Node], Any], call: Call = plainly) -> Any:
    """Return a node's value, without gradients. held: values that are known. leaf: gives inputs and attributes."""
    known = dict(held)

    def value(node: fx.Node) -> Any:
        if node not in known:
            if node.op in ("placeholder", "get_attr"):
                known[node] = leaf(node)
            else:
                known[node] = call(node, *fx.map_arg((node.args, node.kwargs), value))
        return known[node]

    with torch.no_grad():
        return value(end)
