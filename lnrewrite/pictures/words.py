"""Say in plain words what figures mean: what is normal, what is not, and what was found here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, isfinite
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..probing.figures import BlockFigures, Probe, State, StreamFigures

BF16 = 1 / 256
"""The steps of bf16, by a number's size, at their finest."""

WHAT = {
    "variance": (
        "How far the channels of a token lie apart. Nothing shrinks what pre and peri blocks add, so a line that "
        "grows is normal: about linear behind peri blocks, faster behind pre ones, often with one jump among the "
        "first. Behind post norms it is flat. One block that makes it a hundred times larger is not: look for massive "
        "activations."
    ),
    "rms": (
        "The root mean square of all its numbers, which is about what a norm divides by. Where it grows, later blocks "
        "count for less, unless they add more."
    ),
    "branch_ratio": (
        "The first blocks often add more than there is (above 1); deep in a pre stream 0.1 to 0.5 is normal, and "
        "falls as the state grows. A block below 1/256 adds less than the steps that bf16 has at the state's size: "
        "part of it is lost in rounding."
    ),
    "size_cv": (
        "How much tokens differ in size: 0 where all are alike. A conversion puts constants where a norm divided each "
        "token by its own size, so this spread is what it gets wrong before it is healed. Up to 0.2 is usual; near 1 "
        "a few tokens, often the first, are far larger than the rest."
    ),
    "kurtosis": (
        "3 is what a normal distribution has. Tens are usual deep in language models: a few channels then hold most "
        "of a token's size, and 8 and 4 bits lose accuracy by them. `rotate-stream` spreads them over all channels, "
        "exactly."
    ),
    "max_abs": (
        "fp16 ends at 65504, and a state beyond it turns infinite; bf16 reaches as far as fp32, but a number of size "
        "x has steps of about x/256, so that a channel at 1,000 moves by 4 or not at all. `rescale-stream` divides "
        "the stream by a constant, exactly."
    ),
    "influence": (
        "1 - the cosine between the states before and behind a block's sum (arXiv 2403.03853): 0 where the block does "
        "not turn the state. Usual is 0.02 to 0.2 in the middle of a deep model, more at its ends. The lowest cost "
        "least to drop; measure it before you do."
    ),
    "angular": (
        "Each cell is a run of sums: how far the state turns from its start to its end, where 0.5 is a right angle "
        "(arXiv 2403.17887). Dark cells high up are long runs that do little, and candidates to drop whole."
    ),
    "gradient_norm": (
        "Within a factor of ten over the depth, training reaches all blocks alike. Post models fall toward the input, "
        "pre models toward the end, peri ones are most even; a factor of hundreds is why runs need warmup, or "
        "diverge."
    ),
    "sink": (
        "The share of attention on the first position, mean over heads and over the positions that see more than it. "
        "0.3 to 0.8 in middle and deep layers is normal for large language models (arXiv 2309.17453): heads that have "
        "nothing to say look there. A cache that drops the first token breaks such a model."
    ),
    "expected_error": (
        "How far converting each block with constants alone is expected to turn the state behind it, in radians: "
        "0 is exact, 1.57 a right angle. It follows from sizes: how much tokens differ, and how much of the state "
        "the branch is. Blocks that stand out are those to leave as they are, or to heal."
    ),
    "massive": (
        "An activation is massive beyond 100 and 1,000 times the median of its state (arXiv 2402.17762). In large "
        "language models a few, always in the same channels and at the first or at punctuation tokens, are normal: "
        "they work as biases. They are in the way of 8 bits, of fp16, and of conversions that put constants for "
        "sizes."
    ),
    "outliers": (
        "By RMS: the largest number, which sets the steps of 8 bits, by the root mean square of all. Numbers spread "
        "evenly over the channels reach 4 to 7 times that, and rounding loses about 0.7% with one scale for each "
        "token, 1% to 2% with one for the tensor, which models hardly feel. Tens of times, as large language models "
        "often have, are in the way of 8 bits: the loss told here is that of all channels together, and the other "
        "channels lose far more of what they hold. The preset `quantize` of `opt` spreads outliers over all channels, "
        "exactly."
    ),
    "gains": (
        "What norms multiply by: a gain of 1 changes nothing, and a stored 1 + w counts as what it multiplies by. One "
        "channel far above the others makes an outlier; an exact `fold-affine` moves gains and biases into the weights "
        "that read them."
    ),
}


def figure(value: float | None) -> str:
    """Write a figure in three digits; nothing for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def of_states(stream: StreamFigures, key: str) -> str:
    """Say what a figure of the states does over the depth."""
    held = [(s, v) for s in stream.states if (v := known(getattr(s, key))) is not None]
    if not held:
        return ""
    (_, first), (_, last) = held[0], held[-1]
    if key in ("variance", "rms"):
        times = f", {figure(last / first)} times" if first > 0 and last > 0 else ""
        return f"From {figure(first)} to {figure(last)}{times}{_step(held)}."
    top, value = max(held, key=lambda row: row[1])
    if key != "max_abs":
        return f"Most {figure(value)}, {behind(top)}."
    steps = f" In bf16 it moves in steps of about {figure(value * BF16)}." if value else ""
    return f"Most {figure(value)}, {behind(top)}, channel {top.channel}.{steps}"


def _step(held: Sequence[tuple[State, float]]) -> str:
    """Say where a figure grows most from one state to the next."""
    steps = [(b / a, s) for (_, a), (s, b) in zip(held, held[1:], strict=False) if a > 0]
    times, where = max(steps, key=lambda row: row[0], default=(0.0, None))
    return f"; the largest step is {figure(times)} times, {behind(where)}" if where and times > 2 else ""


def of_blocks(stream: StreamFigures, key: str) -> str:
    """Say which blocks stand out in a figure."""
    held = [(v, b) for b in stream.blocks if (v := known(getattr(b, key))) is not None]
    if not held:
        return ""
    (high, top), (low, least) = max(held, key=lambda row: row[0]), min(held, key=lambda row: row[0])
    said = f"Most {figure(high)} at {top.name}, least {figure(low)} at {least.name}."
    if key == "influence":
        return f"Dropping would cost least: {_listed(sorted(held, key=lambda row: row[0])[:3])}."
    if key == "gradient_norm" and low > 0:
        return f"The largest is {figure(high / low)} times the smallest. {said}"
    if key == "branch_ratio" and (lost := [b.name for v, b in held if v < BF16]):
        return f"{said} Below 1/256: {', '.join(lost[:4])}{' and more' if len(lost) > 4 else ''}."
    return said


def of_runs(stream: StreamFigures) -> str:
    """Say which runs of sums turn the state least."""
    said = []
    for many in (1, 2, 4, 8, 16):
        row = stream.angular_distance[many - 1] if many <= len(stream.angular_distance) // 2 else ()
        held = [(v, start) for start, each in enumerate(row) if (v := known(each)) is not None]
        if held:
            value, start = min(held)
            said.append(f"{_run(stream, start, many)} ({figure(value)})")
    return f"Dropping would cost least: {'; '.join(said)}." if said else ""


def _run(stream: StreamFigures, start: int, many: int) -> str:
    """Name a run of sums, by the last block of the first and of the last of them."""
    names = [s.after or "" for s in stream.states[start + 1 : start + many + 1]]
    return names[0] if many == 1 else f"{many} sums, {names[0]} to {names[-1]}"


def of_conversions(blocks: Sequence[BlockFigures]) -> str:
    """Say for each placement what converting is expected to cost; alike ones together."""
    said: dict[str, list[str]] = {}
    for placement in dict.fromkeys(p for b in blocks for p in b.expected_error):
        held = [(v, b) for b in blocks if (v := known(b.expected_error.get(placement))) is not None]
        if held:
            value, worst = max(held, key=lambda row: row[0])
            mean = sum(v for v, _ in held) / len(held)
            most = f", most {figure(value)} at {worst.name}" if value else ""
            said.setdefault(f"{figure(mean)} radians a block{most}", []).append(placement)
    return "; ".join(f"to {' or '.join(placements)}: {words}" for words, placements in said.items())


def of_fp16(probe: Probe) -> tuple[bool, str]:
    """Say whether all numbers fit into fp16, and how well."""
    room = probe.fp16.headroom
    top = f"the largest number that a linear map or a stream holds is {figure(probe.fp16.max_abs)} (at {probe.fp16.at})"
    if room is None:
        return True, "fp16: every number is 0."
    if room <= 1:
        return False, f"fp16 overflows: {top}, and fp16 ends at 65504. `rescale-stream` divides the stream exactly."
    near = "; that is close: other data may pass it" if room < 4 else ""
    return room >= 4, f"fp16 fits: {top}, and fp16 has room for {figure(room)} times that{near}."


def of_massive(probe: Probe) -> tuple[bool, str]:
    """Say whether there are massive activations."""
    if not probe.massive:
        return True, "No activation is massive (beyond 100 and 1,000 times the median)."
    top = max(probe.massive, key=lambda each: abs(each.value))
    where = f"behind {top.after}" if top.after else "in the source"
    channels = len({each.channel for each in probe.massive})
    return False, f"Massive activations in {channels} channel(s): the largest is {figure(top.value)}, {where}."


def of_outliers(probe: Probe) -> str:
    """Say where the largest number stands out farthest; nothing where no linear map is known to read."""
    if not probe.outliers:
        return ""
    top = probe.worst()[0]
    return (
        f"Of what linear maps read, the largest number stands out most at {top.at}: {figure(top.ratio)} times the RMS, "
        f"in channel {top.channel}. 8 bits lose {top.int8_token:.2%} there with a scale for each token."
    )


def glance(probe: Probe) -> list[tuple[bool | None, str]]:
    """Return what to know at a glance: whether it is fine, None where that is not the question, and the words."""
    rows: list[tuple[bool | None, str]] = [of_fp16(probe), of_massive(probe)]
    rows += [(None, words)] if (words := of_outliers(probe)) else []
    for stream in probe.streams:
        of = f"{stream.name}: " if len(probe.streams) > 1 else ""
        goes, least = of_states(stream, "variance"), of_blocks(stream, "influence")
        rows += [(None, capital(f"{of}the variance of the state goes f{goes[1:]}"))] if goes else []
        rows += [(None, capital(f"{of}d{least[1:]}"))] if least else []
    converted = of_conversions([b for s in probe.streams for b in s.blocks])
    if converted:
        rows.append((None, f"Converting with constants is expected to turn the state, {converted}."))
    return rows


def capital(words: str) -> str:
    """Begin a sentence."""
    return words[:1].upper() + words[1:]


def behind(state: State) -> str:
    """Say where a state is."""
    return f"behind {state.after}" if state.after is not None else "at the source"


def known(value: float | None) -> float | None:
    """Return a figure that is a number."""
    return value if value is not None and isfinite(value) and abs(value) < inf else None


def _listed(rows: Iterable[tuple[float, BlockFigures]]) -> str:
    return ", ".join(f"{block.name} ({figure(value)})" for value, block in rows)
