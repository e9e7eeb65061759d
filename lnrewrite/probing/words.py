"""Lay a probe's figures out as text: a table of states and blocks for each stream."""

from __future__ import annotations

from collections.abc import Iterator

from ..ir.folding import shortened
from ..layout import aligned, wrapped
from .figures import Probe, StreamFigures

HEADER = ("behind", "rms", "variance", "cv", "kurtosis", "largest", "branch", "influence", "gradient", "sink")
OUTLIERS = ("read at", "by rms", "8 bits/token", "8 bits/tensor", "channel", "largest", "kurtosis")
_NAME, _WORST = 30, 5


def told(probe: Probe) -> str:
    """Return the table that `lnrewrite probe` prints, in at most 100 columns."""
    lines = [f"{probe.model} ({probe.format}, {probe.placement}), {probe.data} data, {probe.tokens:,} tokens"]
    for stream in probe.streams:
        lines += ["", f"stream {stream.name}, width {stream.width}", *aligned(HEADER, _rows(stream), HEADER[:1], "  ")]
    lines += [
        "",
        "rms, variance, cv (spread of the tokens' sizes), kurtosis, largest: of the state behind the block",
        "branch: what is added, by the state before; influence: 1 - cosine of the states around the sum",
    ]
    if probe.differentiated:
        lines.append(f"gradient: of {probe.differentiated}, by the block's own parameters")
    lines += [
        "",
        *_range(probe),
        *_expected(probe),
        *_massive(probe),
        *_outliers(probe),
        *(f"note: {note}" for note in probe.notes),
    ]
    return "\n".join(wrapped(lines))


def _rows(stream: StreamFigures) -> Iterator[tuple[str, ...]]:
    """Yield a row for each state, and before it one for each further block of its sum."""
    for state, blocks in stream.steps():
        figures = [_figure(v) for v in (state.rms, state.variance, state.size_cv, state.kurtosis, state.max_abs)]
        if not blocks:
            yield "(source)", *figures, "", "", "", ""
        for block in blocks:
            rest = (block.branch_ratio, block.influence, block.gradient_norm, block.sink)
            held = figures if block is blocks[-1] else [""] * 5
            yield shortened(block.name, _NAME), *held, *map(_figure, rest)


def _range(probe: Probe) -> Iterator[str]:
    top = probe.fp16
    if top.headroom is not None:
        fits = f"{top.headroom:.3g} times fit" if top.headroom > 1 else "does NOT fit"
        yield f"fp16: the largest number is {top.max_abs:.4g} (at {top.at}), which {fits} into 65504"


def _expected(probe: Probe) -> Iterator[str]:
    """Yield, for each placement, the block that converting is expected to move most."""
    blocks = [b for s in probe.streams for b in s.blocks if b.expected_error]
    for placement in dict.fromkeys(p for b in blocks for p in b.expected_error):
        held = [b for b in blocks if placement in b.expected_error]
        worst = max(held, key=lambda b: b.expected_error[placement])
        mean = sum(b.expected_error[placement] for b in held) / len(held)
        most = f"most {worst.expected_error[placement]:.2g} at {worst.name}"
        yield f"to {placement}, with constants: a block turns its state by {mean:.2g} (mean), {most}"


def _massive(probe: Probe) -> Iterator[str]:
    for each in sorted(probe.massive, key=lambda m: -abs(m.value))[:5]:
        where = f"behind {each.after}" if each.after else "in the source"
        times = "" if each.ratio is None else f", {each.ratio:,.0f} times the median"
        yield f"massive: {each.value:.4g} {where}, channel {each.channel}{times}"
    if len(probe.massive) > 5:
        yield f"massive: {len(probe.massive) - 5} more (--json lists all)"


def _outliers(probe: Probe) -> Iterator[str]:
    """Yield the table of what `quantize` is for: where the largest numbers stand out farthest."""
    rows = [
        (shortened(o.at, _NAME), _figure(o.ratio), f"{o.int8_token:.2%}", f"{o.int8_tensor:.2%}")
        + (str(o.channel), _figure(o.max_abs), _figure(o.kurtosis))
        for o in probe.worst()[:_WORST]
    ]
    if rows:
        most = f", the {_WORST} of {len(probe.outliers)} that stand out most" if len(probe.outliers) > _WORST else ""
        yield from ("", f"outliers of what linear maps read{most}")
        yield from aligned(OUTLIERS, rows, OUTLIERS[:1], "  ")
        yield "8 bits: what rounding loses with one scale a token, and with one a tensor; `opt --preset quantize` helps"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
