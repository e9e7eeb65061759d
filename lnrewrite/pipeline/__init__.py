"""Pipelines of passes: their text, the run loop, what it reports; and what a pass sees of it."""

from .driver import Pipeline, Result
from .presets import PRESETS
from .protocols import Batch, Context, Model, Pass, Samples

__all__ = ["PRESETS", "Batch", "Context", "Model", "Pass", "Pipeline", "Result", "Samples"]
