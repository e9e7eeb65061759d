"""How a learning rate goes over a training."""

from __future__ import annotations

import math


def share(step: int, steps: int, warmup: int) -> float:
    """Return the share of the rate at a step of `steps`, counted from 0: it rises, then falls as a cosine to 1/50."""
    return min(1.0, (step + 1) / max(1, warmup)) * (0.02 + 0.49 * (1 + math.cos(math.pi * step / steps)))
