"""Describe what a healing run did: the JSON of `heal`, a page for a person, and a picture of its losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from ..layout import aligned
from ..pipeline.results import Drift, Json

MEASURES = ("mean", "median", "p999")
COLORS = {"local": "#888888", "global": "#1f6fb4", "control": "#d0701e"}
WIDE, HIGH, EDGE = 760, 320, 48


@dataclass(frozen=True, slots=True)
class HealingReport:
    """Hold the figures of one run; `str()` is for people, `to_dict()` for programs.

    `losses` maps teacher, converted, healed and control to mean, median and p999 of the held-out losses, in nats where
    there is a task, else relative squared errors of the outputs. `gap` is healed minus control (minus teacher where
    there is no control), of the means; `gap_to_teacher` healed minus teacher; each with its standard error over the
    held-out windows, None where there is only one. `rates` holds the learning rates of student and control (`Rates`).
    `tokens` is what the student learned from, trials included.
    """

    placement_before: str
    placement_after: str
    unit: str
    targets: int
    losses: Mapping[str, Mapping[str, float]]
    trained: Json
    recipe: Json
    rates: Mapping[str, Json]
    tokens: int
    seconds: float
    drift: Drift
    gap: float
    gap_standard_error: float | None
    gap_to_teacher: float
    gap_to_teacher_standard_error: float | None
    notes: tuple[str, ...] = ()
    output: str | None = None
    run: str | None = None

    def to_dict(self) -> Json:
        """Return the JSON object of `heal --json`."""
        return {
            "output": self.output,
            "run": self.run,
            "exactness": "learned",
            "placement_before": self.placement_before,
            "placement_after": self.placement_after,
            "unit": self.unit,
            "targets": self.targets,
            "losses": {name: dict(row) for name, row in self.losses.items()},
            "gap": self.gap,
            "gap_standard_error": self.gap_standard_error,
            "gap_to_teacher": self.gap_to_teacher,
            "gap_to_teacher_standard_error": self.gap_to_teacher_standard_error,
            "trained": dict(self.trained),
            "recipe": dict(self.recipe),
            "rates": {name: dict(row) for name, row in self.rates.items()},
            "tokens": self.tokens,
            "seconds": round(self.seconds, 2),
            "drift": self.drift.to_dict(),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        rows = [(name, *(f"{row[m]:.4f}" for m in MEASURES)) for name, row in self.losses.items()]
        table = aligned(("", *MEASURES), rows, ("",))
        gaps = [("gap", self.gap, self.gap_standard_error, "control")] if "control" in self.losses else []
        gaps.append(
            ("" if gaps else "gap", self.gap_to_teacher, self.gap_to_teacher_standard_error, "the teacher as it was")
        )
        t = self.trained
        lines = [
            f"placement  {self.placement_before} -> {self.placement_after}",
            f"trained    {t['parameters']:,} of {t['of']:,} parameters ({t['which']})",
            f"            on {self.tokens:,} tokens, {self.seconds:.0f} s in all",
            *(
                f"{label:10} {_spelled(row)}"
                for label, row in zip(("rates", "  control"), self.rates.values(), strict=False)
            ),
            *(
                f"{name:10} {_with_error(gap, error)} {self.unit}, healed against {other}"
                for name, gap, error, other in gaps
            ),
            "",
            f"held-out loss, {self.unit}, {self.targets:,} targets",
            *table,
        ]
        if self.output:
            lines.insert(0, f"written    {self.output}")
        if self.run:
            lines += ["", f"log and picture: {self.run}"]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _spelled(rates: Json) -> str:
    chosen = f"from {rates['trials']} trials on {rates['tokens']:,} tokens of it" if rates["trials"] else "not tried"
    return f"{rates['lr']:.1e}, gains {rates['lr'] * rates['gain_lr']:.1e}: {chosen}"


def _with_error(gap: float, error: float | None) -> str:
    return f"{gap:+.4f}" if error is None else f"{gap:+.4f} ± {error:.4f}"


def picture(rows: Sequence[Json], title: str) -> str:
    """Return an HTML page with the loss of every phase over its steps, as SVG; needs nothing to show it."""
    lines, legend = [], []
    values = sorted(row["loss"] for row in rows) or [0.0, 1.0]
    low, high = values[0], values[int(0.99 * (len(values) - 1))]
    last = max((row["step"] for row in rows), default=1)
    across, up = (WIDE - 2 * EDGE) / max(1, last), (HIGH - 2 * EDGE) / max(high - low, 1e-9)
    for index, phase in enumerate(dict.fromkeys(row["phase"] for row in rows)):
        points = " ".join(
            f"{EDGE + row['step'] * across:.1f},{HIGH - EDGE - (min(row['loss'], high) - low) * up:.1f}"
            for row in rows if row["phase"] == phase
        )  # fmt: skip
        color = COLORS.get(phase, "#444444")
        lines.append(f'<polyline fill="none" stroke="{color}" points="{points}"/>')
        legend.append(f'<text x="{EDGE + 90 * index}" y="20" fill="{color}">{escape(phase)}</text>')
    ends = [f'<text x="4" y="{EDGE}">{high:.3f}</text>', f'<text x="4" y="{HIGH - EDGE}">{low:.3f}</text>']
    ends.append(f'<text x="{WIDE - 2 * EDGE}" y="{HIGH - 16}">step {last}</text>')
    body = "".join([*legend, *ends, *lines])
    size, font = f'width="{WIDE}" height="{HIGH}"', 'font-family="sans-serif" font-size="12"'
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>'
    head = f'<!doctype html><meta charset="utf-8"><title>{escape(title)}</title><h1>{escape(title)}</h1>'
    return f"{head}{frame}{body}</svg>\n"
