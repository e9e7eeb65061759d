"""Compare two norms in what no weight makes up for: their kinds, and their eps."""

from __future__ import annotations

import math

from ..ir import Kind, Norm
from .host import Misfit


def same_kind(ours: Norm, theirs: Norm, where: str) -> None:
    """Raise Misfit where two norms are of different kinds."""
    if ours.kind is not theirs.kind:
        swaps = (ours.kind, theirs.kind) == (Kind.LAYER, Kind.RMS)
        hint = " (the pass layernorm-to-rmsnorm makes it rms, exactly)" if swaps else ""
        raise Misfit(f"the norms of {where} are {ours.kind}, and the host's {theirs.kind}{hint}")


def size_for(ours: Norm, theirs: Norm, where: str) -> float:
    """Return what an out norm's branch is to be multiplied by, so that the host's eps does what the source's does.

    N_e(f) = N_{e c^2}(c f), exactly. Raises Misfit where no such c is.
    """
    same_kind(ours, theirs, where)
    if ours.eps == theirs.eps:
        return 1.0
    if not (ours.eps > 0 and theirs.eps > 0):
        raise Misfit(f"the norm at the end of {where} has eps {ours.eps:g}, and the host's {theirs.eps:g}")
    return math.sqrt(theirs.eps / ours.eps)


def same_norm(ours: Norm, theirs: Norm, where: str) -> None:
    """Raise Misfit where two norms differ in more than gain and bias."""
    same_kind(ours, theirs, where)
    if abs(ours.eps - theirs.eps) > 1e-6 * max(ours.eps, theirs.eps):
        raise Misfit(f"a norm of {where} has eps {ours.eps:g}, and the host has {theirs.eps:g} for all its norms")
