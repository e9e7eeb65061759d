"""What runs of two models found: whether they agree, how far one moved, and what a proof saw; `to_dict` is the JSON."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Json = dict[str, Any]
"""A JSON object: what reports are made of for programs."""


class Verdict(StrEnum):
    """Name what a comparison found: equal bit by bit, within its tolerance, or different."""

    EQUAL = "equal"
    WITHIN = "within"
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Hold how far one model's outputs are from another's on the same inputs.

    max_abs: the largest |a - b|. max_rel: that over the largest |a|. shapes_tried: of the first input of each batch.
    dtype: what both were computed in. kernels: how far lnrewrite's kernels are from their definitions, where a file
    holds such operators and they are built. notes: what a user should know about the two models.
    """

    verdict: Verdict
    max_abs: float
    max_rel: float
    cosine: float
    shapes_tried: tuple[tuple[int, ...], ...]
    dtype: str
    kernels: Comparison | None = None
    notes: tuple[str, ...] = ()

    @property
    def differs(self) -> bool:
        """Return whether the two are further apart than is allowed."""
        return self.verdict is Verdict.DIFFERENT

    def figures(self) -> Json:
        """Return the numbers as JSON reports show them."""
        return {
            "verdict": str(self.verdict),
            "max_abs": self.max_abs,
            "max_rel": self.max_rel,
            "cosine": self.cosine,
            "shapes_tried": [list(shape) for shape in self.shapes_tried],
            "dtype": self.dtype,
        }

    def to_dict(self) -> Json:
        """Return the JSON object of `verify --json`."""
        kernels = {} if self.kernels is None else {"kernels": self.kernels.figures()}
        return {**self.figures(), **kernels, "notes": list(self.notes)}


@dataclass(frozen=True, slots=True)
class Proof:
    """Hold the comparison of a written file with its program, and what to know about how the file ran."""

    found: Comparison
    notes: tuple[str, ...] = ()

    def to_dict(self) -> Json:
        """Return the object `proof` of `export --json`."""
        return self.found.figures()


@dataclass(frozen=True, slots=True)
class Gap:
    """Hold how far outputs are from others that they are to equal, relative to the largest.

    rounding: whether the rounding of the weights as they are stored explains it.
    """

    error: float
    rounding: bool = False

    @property
    def unexplained(self) -> float:
        """Return the error, 0 where rounding explains it."""
        return 0.0 if self.rounding else self.error


@dataclass(frozen=True, slots=True)
class Drift:
    """Hold how far a rewrite moved a model's outputs on sample data; None for a figure that its outputs do not give.

    held_out: whether nothing was fitted on the data; None where that is not known. samples: batches that were measured;
    off_path: batches that were not, for the result takes another path on them. relative_error: |a - b| / |a|, and
    cosine, over all outputs together. kl: nats for each row of the logits. top1_agreement: the share of rows with the
    same largest logit. data: what the data are called.
    """

    held_out: bool | None
    samples: int
    relative_error: float | None = None
    cosine: float | None = None
    kl: float | None = None
    top1_agreement: float | None = None
    off_path: int = 0
    data: str | None = None

    def to_dict(self) -> Json:
        """Return the object `drift` of JSON reports."""
        return {
            **({} if self.data is None else {"data": self.data}),
            "held_out": self.held_out,
            "samples": self.samples,
            **({"off_path": self.off_path} if self.off_path else {}),
            "relative_error": self.relative_error,
            "cosine": self.cosine,
            "kl": self.kl,
            "top1_agreement": self.top1_agreement,
        }

    def __str__(self) -> str:
        figures = (
            ("relative error", self.relative_error),
            ("cosine", self.cosine),
            ("KL", self.kl),
            ("top-1 agreement", self.top1_agreement),
        )
        held = {True: "held out, ", False: "the data of the fit, ", None: ""}[self.held_out]
        known = ", ".join(f"{name} {figure:.4g}" for name, figure in figures if figure is not None)
        return f"{known} ({self.data} data, {held}{self.samples} samples)"
