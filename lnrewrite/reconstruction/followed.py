"""What a training of branches follows of the original, and how far from it a model is.

A student is taught by its teacher's states as in FitNets (1412.6550), which serves every model that has sums, and by
its logits where it has some (1503.02531).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..backends.hiding import Shown
from ..backends.torch.fused import compared
from ..pipeline.protocols import Batch
from .goals import Measure, ordinary, size

SCORES = 0.1
"""What the divergence of the logits, in nats, weighs beside the error of the states."""
FAR = 4
"""So many times the median of tokens' errors is far off: beyond, an error counts as its logarithm while training."""


@dataclass(frozen=True)
class Followed:
    """Hold the nodes of what is followed, each in the original and in the model that is made.

    states: the sums, and how their states are compared. scores: the logits, where both have some. shown: which tokens
    of the original's states count.
    """

    states: Sequence[tuple[str, str, Measure]]
    scores: tuple[str, str] | None
    shown: Shown

    @property
    def nodes(self) -> tuple[list[str], list[str]]:
        """Return the nodes in the original, and those in the other model."""
        every = [(one, other) for one, other, _ in self.states] + ([self.scores] if self.scores else [])
        return [one for one, _ in every], [other for _, other in every]

    def error(
        self, theirs: Sequence[Tensor], mine: Sequence[Tensor], batch: Batch, over: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return how far the values of the nodes are apart on one batch, `over` tokens: the mean of the states' errors.

        Where there are logits, with a share of their divergence. theirs: the values in the original. batch: as given.
        """
        rows = zip(self.states, theirs, mine, strict=False)
        here = [(m.on(self.shown, name, one, batch), one, other) for (name, _, m), one, other in rows]
        error = torch.stack([over(distance(measure, one, other)) for measure, one, other in here]).mean()
        if not self.scores:
            return error
        nats = compared(mine[-1], theirs[-1], None)[1][..., None].clamp_min(0)  # by rounding it is less
        return error + SCORES * over(self.shown.cut(self.states[-1][0], nats, batch).flatten())


def distance(measure: Measure, theirs: Tensor, mine: Tensor) -> Tensor:
    """Return how far states [..., width on the measure's axis] are apart, token by token: squared, relative."""
    wanted, found = measure(theirs), measure(measure.based(mine))
    return ((found - wanted) / size(wanted)).square().mean(-1)


def tamed(errors: Tensor) -> Tensor:
    """Return the mean over tokens, where those far off count little more for being further.

    A token that the model was hardly trained on may be off as far as it likes, and would rule over all others.
    """
    far = FAR * ordinary(errors).clamp_min(torch.finfo(errors.dtype).tiny)
    return (far * torch.log1p(errors / far)).mean()
