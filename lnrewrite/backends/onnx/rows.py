"""Tell grouped-query attention by numbers what a mask hides, where it hides no more than numbers can say.

    y = GroupQueryAttention(.., mask)  every row has as many keys as the cache and the new tokens; a bias hides some
      -> y = GroupQueryAttention(..)   a row has as many keys as attention_mask shows, each token sees those before it

A row's keys are its first ones then: padding on the left of a prompt is moved behind it where tokens enter, and back
where logits leave. What is computed of one token alone does not see that; attention counts the tokens that it shows;
what else would count them (positions that are no input, a mask that something else reads) keeps the bias. A mask that
hides tokens between others, or that hides later what it has shown, needs the bias too, and is not taken here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from ...compat.torch import operator_name
from .kernel_calls import attend, lengths, padding

aten = torch.ops.aten
BIAS = 9
"""Where a call of `attend` has its bias."""
HEADS = {"linear", "mm", "matmul", "add", "sub", "mul", "div", "tanh", "clone", "slice", "to", "_to_copy"}
"""What may stand between a decoder's last state and its logits."""
COUNTING = ("arange", "cumsum")
"""What positions are made with that are no input."""


def count_rows(graph: fx.Graph, ids: fx.Node, mask: fx.Node, positions: fx.Node | None) -> None:
    """Drop the biases of a decoder's attentions, in place, if all of them can be told by numbers."""
    calls = graph.find_nodes(op="call_function", target=attend)
    if not calls or any(call.args[BIAS].target is not padding for call in calls):
        return
    read, counted = _read(graph), graph.find_nodes(op="call_function", target=lengths)
    asked = [user for user in mask.users if user in read and user.target is not aten.sym_size.int]
    if asked != counted or any(operator_name(node.target) in COUNTING for node in read if node.op == "call_function"):
        return
    for call in calls:
        call.update_arg(BIAS, None)
    for node in counted:
        node.target = own_lengths
    _move(graph, ids, mask, positions)


def _read(graph: fx.Graph) -> set[fx.Node]:
    """Return what a graph's outputs are computed of, if attentions read no bias."""
    left, seen = graph.find_nodes(op="output"), set[fx.Node]()
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            bias = node.args[BIAS] if node.target is attend else None
            left += [given for given in node.all_input_nodes if given is not bias]
    return seen


def _move(graph: fx.Graph, ids: fx.Node, mask: fx.Node, positions: fx.Node | None) -> None:
    """Let all that is computed of tokens see padding on the left behind them, and give logits back in their places."""
    inputs = graph.find_nodes(op="placeholder")
    for given in (ids, positions) if positions else (ids,):
        users = [user for user in given.users if user.target not in (own_lengths, aten.sym_size.int)]
        with graph.inserting_after(inputs[-1]):
            moved = graph.call_function(together, (given, mask))
        moved.meta["val"] = given.meta["val"]
        for user in users:
            user.replace_input_with(given, moved)
    (end,) = graph.find_nodes(op="output")
    state, user = _before_head(end.args[0][0], end)
    with graph.inserting_before(user):
        back = graph.call_function(spread, (state, mask))
    back.meta["val"] = state.meta["val"]
    user.replace_input_with(state, back)


def _before_head(state: fx.Node, user: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return what logits are computed of, token by token, and by what: the narrowest in a row of nodes before them."""
    found = state, user
    leading = [str(d) for d in state.meta["val"].shape[:2]]
    while True:
        given = [n for n in state.all_input_nodes if [str(d) for d in _shape(n)[:2]] == leading and len(_shape(n)) == 3]
        if len(given) != 1 or operator_name(state.target) not in HEADS:
            return found
        state, user = given[0], state
        if _shape(state)[2] < _shape(found[0])[2]:
            found = state, user


def _shape(node: fx.Node) -> Sequence[int]:
    value = node.meta.get("val")
    return value.shape if isinstance(value, Tensor) else ()


def own_lengths(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `lengths` returns where each row has as many keys as its mask shows, and no fewer than are new."""
    last = mask.sum(1).clamp(min=ids.shape[1]) - 1
    return last.to(torch.int32), torch.full((), mask.shape[1], dtype=torch.int32, device=ids.device)


def together(x: Tensor, mask: Tensor) -> Tensor:
    """Return what is said of new tokens, x [batch, new], with the padding of a prompt on the left moved behind them."""
    return _turned(x, mask, 1)


def spread(x: Tensor, mask: Tensor) -> Tensor:
    """Return x [batch, new, width] of tokens that were moved as `together` does it, in their own order again."""
    return _turned(x, mask, -1)


def _turned(x: Tensor, mask: Tensor, sign: int) -> Tensor:
    """Return x [batch, new, ..] with rows turned to the left by their padding among the new tokens, or back (-1).

    Rows with a cache show all new tokens: nothing of them moves. It is written in what ONNX Runtime has for integers on
    CUDA, and replays: no index of a maximum, no index of two axes.
    """
    rows, new = x.shape[:2]
    shown = mask[:, mask.shape[1] - new :] * torch.arange(new, 0, -1, device=mask.device)
    places = torch.arange(new, device=mask.device) - sign * shown.amax(1, keepdim=True)
    places = torch.remainder(places, torch.full((), new, dtype=mask.dtype, device=mask.device))
    places = places + new * torch.arange(rows, device=mask.device)[:, None]
    return x.flatten(0, 1).index_select(0, places.flatten()).unflatten(0, (rows, new))
