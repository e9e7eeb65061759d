"""Describe what a pipeline did: the JSON of `convert`, `opt` and `export`, and a page for a person to read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ..errors import Code, Refusal
from ..ir import Exactness
from ..layout import aligned, wrapped
from .results import Drift, Json, Proof

_MEANING = {
    Exactness.STRUCTURAL: "the same operations",
    Exactness.ALGEBRAIC: "equal over the real numbers",
    Exactness.ASYMPTOTIC: "equal as eps goes to 0",
    Exactness.CALIBRATED: "close on sample data, not equal",
    Exactness.LEARNED: "needs training to be close",
}
_SHOWN = 8  # rows of a long list that str() prints; to_dict() holds all


@dataclass(frozen=True, slots=True)
class Step:
    """Report one pass: `edits` as the backend found them applied, `refused` rows, wall-clock seconds."""

    text: str
    edits: int
    refused: int
    seconds: float

    def to_dict(self) -> Json:
        """Return the row as JSON reports show it."""
        return {"pass": self.text, "edits": self.edits, "refused": self.refused, "seconds": round(self.seconds, 4)}


@dataclass(frozen=True, slots=True)
class Expected:
    """Describe, before an edit, the relative squared error that it should cause at its own site, and why."""

    site: str
    error: float | None
    note: str = ""

    def to_dict(self) -> Json:
        """Return the row as JSON reports show it."""
        return {"site": self.site, "expected": self.error, "note": self.note}


@dataclass(frozen=True, slots=True)
class Skipped:
    """Name a site that a pass does not speak of."""

    step: str
    site: str
    why: str

    def to_dict(self) -> dict[str, str]:
        """Return the row as JSON reports show it."""
        return {"pass": self.step, "site": self.site, "why": self.why}


@dataclass(frozen=True, slots=True)
class Form:
    """Name the operator that a norm was written as in an exported model, and why that one."""

    site: str
    form: str
    why: str

    def to_dict(self) -> dict[str, str]:
        """Return the row as JSON reports show it."""
        return {"site": self.site, "form": self.form, "why": self.why}


@dataclass(frozen=True, slots=True)
class Fitted:
    """Report the branches of one sum whose parameters were fitted to data.

    Errors are squared, on data that was not fitted on, in units of what the original's branch adds. `weights` maps each
    parameter that moved to |W - W0| over the larger of |W| and |W0|; `why` says what hindered the fit. The row without
    blocks is the training of all together: its errors are those of the states, relative, the mean over sums, with a
    share of the divergence of the logits where the model has some.
    """

    blocks: tuple[str, ...]
    before: float
    after: float
    weights: Mapping[str, float]
    why: str = ""

    def to_dict(self) -> Json:
        """Return the row as JSON reports show it."""
        return {
            "blocks": list(self.blocks),
            "before": self.before,
            "after": self.after,
            "weights": [{"name": name, "moved": moved} for name, moved in self.weights.items()],
            "why": self.why,
        }


def unknown_norms(refusals: Iterable[Refusal]) -> tuple[str, ...]:
    """Return what works as a norm in a model and is none that is known, for norms may now stand beside it."""
    rows = [r for r in refusals if r.code == Code.LN205]
    if not rows:
        return ()
    named = "; ".join([f"{r.site}: {r.why}" for r in rows[:3]] + ["and so on"] * (len(rows) > 3))
    return (
        f"{len(rows)} values are normalized by no norm that lnrewrite knows (LN205): no pass looks at these, {named}",
    )


@dataclass(frozen=True, slots=True)
class Report:
    """Hold all that is known of one run of a pipeline; `str()` is for people, `to_dict()` for programs.

    `measured` compares the outputs before and after on sample data (None where the rewrite claims to be exact);
    `exact_error` is how far exact passes moved them, relative to the largest (None where none edited, or nothing was
    run); `notes` are plain sentences about what the figures rest on; `output` is the path written, if any;
    `fixed_paths` what a capture fixed that the model chooses by its data (the notes say so); `fitted` the branches
    whose weights were fitted to data. An export adds `norms`, one row for each, and `proved`, the comparison of the
    file with its source.
    """

    pipeline: str
    exactness: Exactness
    steps: tuple[Step, ...]
    placement_before: str
    placement_after: str
    measured: Drift | None = None
    refusals: tuple[Refusal, ...] = ()
    not_applicable: tuple[Skipped, ...] = ()
    sites: tuple[Expected, ...] = ()
    notes: tuple[str, ...] = ()
    output: str | None = None
    fixed_paths: tuple[str, ...] = ()
    norms: tuple[Form, ...] | None = None
    proved: Proof | None = None
    fitted: tuple[Fitted, ...] = ()
    exact_error: float | None = None

    @property
    def drift(self) -> Json | None:
        """Return what was measured, as JSON reports show it."""
        return None if self.measured is None else self.measured.to_dict()

    @property
    def proof(self) -> Json | None:
        """Return what was proved of the file, as `export --json` shows it."""
        return None if self.proved is None else self.proved.to_dict()

    @property
    def edits(self) -> int:
        """Return how many edits were applied in all."""
        return sum(step.edits for step in self.steps)

    def to_dict(self) -> Json:
        """Return the JSON object of `convert --json`."""
        rows = None if self.norms is None else [row.to_dict() for row in self.norms]
        exported = {} if rows is None else {"norms": rows, "proof": self.proof}
        return {
            "output": self.output,
            "pipeline": self.pipeline,
            "exactness": str(self.exactness),
            "steps": [step.to_dict() for step in self.steps],
            "placement_before": self.placement_before,
            "placement_after": self.placement_after,
            "exact_error": self.exact_error,
            "drift": self.drift,
            "sites": [site.to_dict() for site in self.sites],
            "fitted": [row.to_dict() for row in self.fitted],
            "refusals": [refusal.to_dict() for refusal in self.refusals],
            "not_applicable": [row.to_dict() for row in self.not_applicable],
            "notes": list(self.notes),
            "fixed_paths": list(self.fixed_paths),
            **exported,
        }

    def __str__(self) -> str:
        return "\n".join(wrapped(self._lines()))

    def _lines(self) -> Iterator[str]:
        if self.output:
            yield f"written    {self.output}"
        moved = f"{self.placement_before} -> {self.placement_after}"
        yield f"placement  {moved if self.placement_before != self.placement_after else self.placement_after}"
        yield f"exactness  {self.exactness}: {_MEANING[self.exactness]}"
        if self.exact_error is not None:
            yield f"proved     largest error {self.exact_error:.2g} of the largest output"
        yield ""
        if rows := [(s.text, str(s.edits), str(s.refused), f"{s.seconds:.2f}") for s in self.steps]:
            yield from aligned(("pass", "edits", "refused", "seconds"), rows, ("pass",), "  ")
        if self.measured is not None:
            yield ""
            yield f"drift      {self.measured}"
        if self.sites:
            yield ""
            yield from self._expected()
        if self.fitted:
            yield ""
            yield from self._fitted()
        if self.norms is not None:
            yield from self._forms()
        for note in self.notes:
            yield ""
            yield f"note: {note}"
        if self.refusals:
            yield ""
            yield f"refused: {len(self.refusals)}"
            yield from _some(f"  {refusal}" for refusal in self.refusals)
        if self.not_applicable:
            yield ""
            yield f"not applicable: {len(self.not_applicable)}"
            yield from self._skipped()

    def _forms(self) -> Iterator[str]:
        """Yield a line for each form and each reason, with the number of norms; those left decomposed by name."""
        assert self.norms is not None
        apart = [row for row in self.norms if row.form == "decomposed"]
        counts = Counter((row.form, row.why) for row in self.norms if row not in apart)
        rows = [(f"{count} x {form}", why) for (form, why), count in counts.most_common()]
        yield from aligned(("norms", "note"), rows, ("norms", "note"), "  ") if rows else ()
        if apart:
            yield f"  {len(apart)} left decomposed"
            yield from _some(f"    {row.site}: {row.why}" for row in apart)
        if self.proved is not None:
            shapes = ", ".join("x".join(map(str, shape)) for shape in self.proved.found.shapes_tried)
            yield ""
            yield f"proved     largest error {self.proved.found.max_rel:.2g} of the largest output, on inputs {shapes}"

    def _skipped(self) -> Iterator[str]:
        """Yield a line for each pass and each reason, with the number of sites, or the one site."""
        sites = dict[tuple[str, str], list[str]]()
        for row in self.not_applicable:
            sites.setdefault((row.step, row.why), []).append(row.site)
        rows = [(step, found[0] if len(found) == 1 else str(len(found)), why) for (step, why), found in sites.items()]
        yield from aligned(("pass", "sites", "why"), rows, ("pass", "sites", "why"), "  ")

    def _expected(self) -> Iterator[str]:
        worst = sorted(self.sites, key=lambda s: -(s.error if s.error is not None else -1.0))
        yield "expected before the edit: the relative squared error at each site, the largest first"
        rows = [(s.site, "exact" if s.error is None else f"{s.error:.2e}", s.note) for s in worst[:_SHOWN]]
        yield from aligned(("site", "error", "note"), rows, ("site", "note"), "  ")
        if len(worst) > _SHOWN:
            yield f"  and {len(worst) - _SHOWN} more"

    def _fitted(self) -> Iterator[str]:
        """Yield a line for each sum whose branches were fitted, the worst ones first."""
        yield "fitted to the data, block by block: the squared error on held-out data, and how far the weights moved"
        worst = sorted((row for row in self.fitted if row.blocks), key=lambda row: -row.after)
        rows = []
        for row in worst[:_SHOWN]:
            most = max(row.weights, key=lambda name: row.weights[name], default="")
            moved = f"{row.weights[most]:.0%} {most}" if most else row.why or "as they were"
            rows.append((" ".join(row.blocks), f"{row.before:.2e}", f"{row.after:.2e}", moved))
        yield from aligned(("blocks", "before", "after", "moved most"), rows, ("blocks", "moved most"), "  ")
        if len(worst) > _SHOWN:
            yield f"  and {len(worst) - _SHOWN} more"
        for row in self.fitted:
            if not row.blocks:
                yield f"  then all together: error {row.before:.2e} -> {row.after:.2e}"


def _some(rows: Iterable[str]) -> Iterator[str]:
    """Yield the first rows of a long list, and how many more there are."""
    every = list(rows)
    yield from every[:_SHOWN]
    if len(every) > _SHOWN:
        yield f"  and {len(every) - _SHOWN} more"
