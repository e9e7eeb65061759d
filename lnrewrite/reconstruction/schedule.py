"""How a learning rate goes over a training."""


def share(step: int, steps: int, warmup: int) -> float:
    """Return the share of the rate at a step of `steps`, counted from 0: it rises, and falls evenly to nothing."""
    return min(1.0, (step + 1) / max(1, warmup)) * (1 - step / steps)
