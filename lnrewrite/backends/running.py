"""What runs: a model as those see it that compare, prove and measure it, whatever it is held as."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from ..compat.torch import pytree, tensors_in
from ..errors import Code, LnrewriteError
from ..pipeline.protocols import Batch
from .outputs import Outputs, real
from .torch.contexts import quiet, unchanged
from .torch.module import brought
from .torch.widened import Float64, doubled, in_float64


class Runnable(ABC):
    """Run a model on batches. Programs and ONNX modules are such; `as_runnable` makes one of any torch module.

    precision: what the numbers of `in_float64()` are computed in, `float32` where a kernel for float64 lacks.
    """

    precision = "float64"

    @property
    def notes(self) -> Sequence[str]:
        """Return what a user should know about the model."""
        return ()

    @property
    def traced(self) -> bool:
        """Return whether this is a graph of torch, whose constants were computed when it was captured."""
        return False

    @property
    def kernels(self) -> Runnable | None:
        """Return the model run by lnrewrite's kernels; None where it holds no operators of it, or none are built."""
        return None

    @property
    def in_half(self) -> bool:
        """Return whether the model computes in half precision."""
        return False

    @abstractmethod
    def call(self, batch: Batch) -> object:
        """Return what the model gives for a batch: its tree of outputs, without gradients."""

    @abstractmethod
    def in_float64(self) -> Runnable:
        """Return a copy that computes in float64, in eval mode, or as near to that as its `precision` says."""

    def run(self, batch: Batch) -> Outputs:
        """Return the floating point tensors that the model gives for a batch, in order."""
        return floats(self.call(batch))

    def trials(self, seed: int) -> Sequence[Batch]:
        """Return inputs to compare by, of two sizes. Raises LnrewriteError LN402 where none can be made up."""
        raise incomparable("a module alone does not describe its inputs; give inputs=[...]")


@dataclass(frozen=True, eq=False)
class TorchRunnable(Runnable):
    """Run a torch module as it is or, `wide`, with what it is given, and what it casts, in float64."""

    module: nn.Module
    wide: bool = False

    @property
    def traced(self) -> bool:
        """Return whether this is a graph of torch, whose constants were computed when it was captured."""
        return isinstance(self.module, fx.GraphModule)

    def call(self, batch: Batch) -> object:
        """Return what the module gives for a batch."""
        batch = brought(batch, self.module)
        if self.wide:
            batch = pytree.tree_map_only(Tensor, doubled, batch)
        with unchanged(self.module), quiet(), Float64() if self.wide else nullcontext():
            return self.module(**batch) if isinstance(batch, Mapping) else self.module(*batch)

    def in_float64(self) -> Runnable:
        """Return a copy in float64 and eval mode, its casts widened."""
        return TorchRunnable(in_float64(self.module), True)


def as_runnable(model: Runnable | nn.Module) -> Runnable:
    """Return a model itself where it runs, and a torch module as a runnable. Raises LnrewriteError LN402 for others."""
    if isinstance(model, Runnable):
        return model
    if not isinstance(model, nn.Module):
        why = f"{type(model).__name__} is neither a program nor a module; lnrewrite.load opens a path"
        raise incomparable(why)
    return TorchRunnable(model)


def floats(outputs: object) -> Outputs:
    """Return the floating point tensors of a tree of outputs, in order."""
    return real(tensors_in(outputs))


def numbers(outputs: object) -> Outputs:
    """Return the tensors of a tree of outputs, in order, complex ones as pairs of real numbers."""
    return [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors_in(outputs)]


def incomparable(why: str) -> LnrewriteError:
    """Return the error for two models that cannot be compared."""
    return LnrewriteError(
        Code.LN402, "verify", f"the models cannot be compared: {why}", "give models with the same inputs"
    )
