"""Pipelines of passes: their text, the run loop, what it reports; and what a pass sees of it."""

from .base import Pass
from .driver import Pipeline, Result
from .presets import PRESETS
from .protocols import Batch, Context, Model, Proposer, Samples

__all__ = ["PRESETS", "Batch", "Context", "Model", "Pass", "Pipeline", "Proposer", "Result", "Samples"]
