"""An embedding norm for a post architecture that has none: one layer more, whose branches are zero.

With branches of zero a post layer norms its state twice. Two norms are one with another eps, and the tables that the
state comes from can be multiplied by a number, which moves eps again:

    N_e(N_e(x))  =  N_d(x) / sqrt(1 + e),  d = e^2 / (1 + e)          N_d(c x)  =  N_{d / c^2}(x)

so that c = sqrt(d / E) and a gain sqrt(1 + e) times as large make it the norm of eps E, exactly. It costs a layer's
time, and with it the head cannot share the table any more.
"""

from __future__ import annotations

import math

import torch

from ..ir import Block, Placement, Where
from .carrying import Carrier
from .host import Misfit
from .norms import same_kind
from .views import View


def wanted(source: View, host: View) -> bool:
    """Return whether a layer of the host is to stand in for the source's embedding norm."""
    post = {block.placement for view in (source, host) for block in view.stream.blocks} == {Placement.POST}
    return post and source.stream.embedding is not None and host.stream.embedding is None


def factor(source: View, host: View) -> float:
    """Return what the tables are to be multiplied by; 1 where no layer stands idle."""
    if not wanted(source, host):
        return 1.0
    norm, post = source.stream.embedding, host.stream.blocks[0].at(Where.POST)
    assert norm is not None and post is not None
    same_kind(norm.norm, post.norm, "the stream's embedding norm")
    if not (norm.norm.eps > 0 and post.norm.eps > 0):
        raise Misfit("its embedding norm has no eps")
    return post.norm.eps / math.sqrt((1 + post.norm.eps) * norm.norm.eps)


def carry(carrier: Carrier, layer: list[Block]) -> None:
    """Make the blocks of a layer of the host compute the source's embedding norm."""
    norm, view = carrier.source.stream.embedding, carrier.host
    assert norm is not None
    for block in layer:
        core = view.core(block)
        for name in (n for linear in (*core.readers, core.writer) for n in (linear.param, linear.bias) if n):
            carrier.put(name, torch.zeros(view.program.shape(name)))
    for block in layer:
        post = block.at(Where.POST)
        assert post is not None
        last = block is layer[-1]
        carrier.norm(norm, post, math.sqrt(1 + post.norm.eps)) if last else carrier.unit(post)
