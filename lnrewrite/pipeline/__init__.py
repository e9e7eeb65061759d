"""Pipelines of passes: their text, the run loop, what it reports; and what a pass sees of it."""

from .driver import PRESETS, Batch, Context, Pipeline, Result, Samples

__all__ = ["PRESETS", "Batch", "Context", "Pipeline", "Result", "Samples"]
