"""Write operators on complex numbers that torch.onnx lacks as the same ones on pairs of real numbers.

Rotary embeddings are often products of complex numbers (`view_as_complex(q) * freqs_cis.unsqueeze(1)`). torch.onnx
holds complex numbers as reals with one more axis, of 2, at the end; it translates the products, and few of the
operators that only arrange numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch.fx.node import Argument, Target

aten = torch.ops.aten
ARRANGE: dict[Target, Callable[..., tuple[Argument, ...]]] = {
    aten.unsqueeze.default: lambda rank, axis: (axis % (rank + 1),),
    aten.select.int: lambda rank, axis, at: (axis % rank, at),
    aten.expand.default: lambda rank, sizes: ([*sizes, -1],),
    aten.repeat.default: lambda rank, times: ([*times, 1],),
    aten.index.Tensor: lambda rank, indices: (indices,),
}
"""The arguments for the pairs, by the number of axes and the arguments for the numbers."""


def write_pairs(graph: fx.Graph) -> None:
    """Arrange pairs of real numbers where complex numbers are arranged, in place."""
    for node in [n for target in ARRANGE for n in graph.find_nodes(op="call_function", target=target)]:
        value, made = node.args[0].meta["val"], node.meta["val"]
        if value.is_complex():
            with graph.inserting_before(node):
                pairs = graph.call_function(aten.view_as_real.default, (node.args[0],))
                moved = graph.call_function(node.target, (pairs, *ARRANGE[node.target](value.dim(), *node.args[1:])))
                whole = graph.call_function(aten.view_as_complex.default, (moved,))
            whole.meta["val"] = made
            node.replace_all_uses_with(whole)
            graph.erase_node(node)
