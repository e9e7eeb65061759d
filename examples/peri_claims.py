"""State the claims of the Peri-LN paper as numbers with bounds, and answer them from the runs of `peri_paper.py`.

A claim is a number of each seed that has to lie between two bounds; it is answered yes where it does for every seed.
"Flat", "even" and "linear" leave a factor of two either way. Bounds were written down when losses of first halves had
been seen, and of Post-LN the first runs.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

ARMS = (
    *(("post", "whole"), ("pre", "whole"), ("peri", "whole"), ("output", "whole")),
    *(("pre", "second"), ("peri from pre", "second"), ("peri", "second")),
)
TWO = (0.5, 2.0)
"""What may still be called the same."""

Row = dict
Arm = tuple[str, str]


# ---- of one list by depth ----


def spread(values: Sequence[float]) -> float:
    """Return the largest over the smallest: 1 where all are the same."""
    return max(values) / min(values) if all(math.isfinite(v) and v > 0 for v in values) else math.nan


def halves(values: Sequence[float]) -> float:
    """Return what the second half of the depth adds over what the first adds: 1 for a line, 2**(L/2) for 2**depth."""
    middle = len(values) // 2
    first, second = values[middle] - values[0], values[-1] - values[middle]
    return second / first if first > 0 else math.nan


def straightness(values: Sequence[float]) -> float:
    """Return how much of the values' variance a line over depth explains: 1 for a line."""
    if not np.isfinite(values).all() or np.ptp(values) == 0:
        return math.nan
    return float(np.corrcoef(np.arange(len(values)), values)[0, 1] ** 2)


def exponential(values: Sequence[float]) -> float:
    """Return how much better a line explains the logarithms of values than the values: above 0 for a geometric row."""
    return straightness(np.log(values)) - straightness(values)


# ---- of one run ----


def failed(row: Row, frequencies: float) -> bool:
    """Tell whether training failed: not finite, risen again by a quarter of a nat, or no better than frequencies.

    frequencies: the loss of what knows how often each byte comes.
    """
    if not all(map(math.isfinite, (*row["curve"], row["loss"]))):
        return True
    return row["curve"][-1] > min(row["curve"]) + 0.25 or row["loss"] > 0.95 * frequencies


def largest(row: Row) -> float:
    """Return the largest activation of the trained model, of all states."""
    return max(row["end"]["largest"])


def massive(row: Row) -> float:
    """Return the largest ratio to the median of its state of an activation above 100, else 0; massive is above 1000."""
    sizes = zip(row["end"]["largest"], row["end"]["median"], strict=True)
    return max((big / median for big, median in sizes if big > 100), default=0.0)


# ---- of all runs ----


@dataclass(frozen=True)
class Runs:
    """Hold all runs by arm and rate, and find what is compared."""

    rows: list[Row]
    frequencies: float

    def of(self, arm: Arm, rate: float) -> list[Row]:
        """Return the runs of an arm at a rate, a row for each seed, in order."""
        found = [r for r in self.rows if (r["arm"], r["part"], r["lr"]) == (*arm, rate)]
        return sorted(found, key=lambda row: row["seed"])

    def rates(self) -> list[float]:
        """Return the grid."""
        return sorted({row["lr"] for row in self.rows if row["part"] == "whole"})

    def failures(self, arm: Arm, rate: float) -> int:
        """Return how many seeds fail."""
        return sum(failed(row, self.frequencies) for row in self.of(arm, rate))

    def best(self, arm: Arm) -> float:
        """Return the rate at which fewest seeds fail; of these the lowest loss on the text for choosing."""

        def order(rate: float) -> tuple[int, float]:
            loss = statistics.fmean(row["choosing"] for row in self.of(arm, rate))
            return self.failures(arm, rate), loss if math.isfinite(loss) else math.inf

        return min(self.rates(), key=order)

    def at_best(self, arm: Arm) -> list[Row]:
        """Return the runs of an arm at its best rate."""
        return self.of(arm, self.best(arm))

    def edge(self, arm: Arm) -> list[int]:
        """Return for each seed the place in the grid of the lowest rate that fails; behind the last where none does."""
        grid = self.rates()
        failing = [[failed(row, self.frequencies) for row in self.of(arm, rate)] for rate in grid]
        return [[*seed, True].index(True) for seed in zip(*failing, strict=True)]


@dataclass(frozen=True)
class Claim:
    """Hold a claim: a number of each seed, and between which bounds it has to lie."""

    about: str
    text: str
    number: str
    low: float
    high: float
    values: tuple[float, ...]

    @property
    def holding(self) -> int:
        """Return for how many seeds it holds; a number that is none holds for nobody."""
        return sum(self.low < value < self.high for value in self.values)

    @property
    def answer(self) -> str:
        """Return yes where it holds for every seed, else no."""
        return "yes" if self.holding == len(self.values) else "no"


POST, PRE, PERI, _, GOING_ON, CONVERTED, ALWAYS = ARMS


def claims(runs: Runs) -> list[Claim]:
    """Return all claims, those of the paper and those on what was converted, each at the best rate of its arm."""
    found: list[Claim] = []

    def ask(about: str, text: str, number: str, bounds: tuple[float, float], values: Sequence[float]) -> None:
        found.append(Claim(about, text, number, *bounds, tuple(map(float, values))))

    def each(arm: Arm, number: Callable[[Row], float]) -> list[float]:
        return [number(row) for row in runs.at_best(arm)]

    def over(one: Arm, other: Arm, number: Callable[[Row], float]) -> list[float]:
        return [a / b if b else math.nan for a, b in zip(each(one, number), each(other, number), strict=True)]

    def minus(one: Sequence[float], other: Sequence[float]) -> list[float]:
        return [a - b for a, b in zip(one, other, strict=True)]

    above_2, above_1, above_0 = (2.0, math.inf), (1.0, math.inf), (0.0, math.inf)
    about, halved, flat = "variance", "second half of depth over first", "largest over smallest"
    ask(about, "post is flat behind the layers", flat, (0.0, 2.0), each(POST, lambda r: spread(_var(r)[1:])))
    ask(about, "pre grows faster than linearly", halved, above_2, each(PRE, lambda r: halves(_var(r))))
    ask(about, "pre grows exponentially", "R² of log less R²", above_0, each(PRE, lambda r: exponential(_var(r))))
    ask(about, "peri grows about linearly", halved, TWO, each(PERI, lambda r: halves(_var(r))))
    ask(about, "pre grows more than peri", "ratio of growths", above_1, over(PRE, PERI, _growth))
    about, fall = "gradient at the start", "first layer over last"
    ask(about, "post falls toward the input", fall, (0.0, 0.5), each(POST, lambda r: _fall(r, "start")))
    ask(about, "pre rises toward the input", fall, above_2, each(PRE, lambda r: _fall(r, "start")))
    ask(about, "peri is even", flat, (0.0, 2.0), each(PERI, lambda r: spread(r["start"]["gradient"])))
    about = "gradient after training"
    for name, arm in (("post", POST), ("pre", PRE)):
        ask(about, f"{name} is less even than peri", "ratio of spreads", above_1, over(arm, PERI, _uneven))
    ask(about, "peri is even", flat, (0.0, 2.0), each(PERI, _uneven))
    about, steps = "failing by rate", "steps of the grid between"
    ask(about, "post fails before pre", steps, above_0, minus(runs.edge(PRE), runs.edge(POST)))
    ask(about, "pre fails before peri", steps, above_0, minus(runs.edge(PERI), runs.edge(PRE)))
    about = "largest activation"
    ask(about, "pre has larger ones than post", "ratio", above_1, over(PRE, POST, largest))
    ask(about, "pre has larger ones than peri", "ratio", above_1, over(PRE, PERI, largest))
    ask(about, "pre has massive ones", "over the median", (1000.0, math.inf), each(PRE, massive))
    about, nats = "loss", "nats per byte between"
    ask(about, "peri is better than pre", nats, above_0, minus(each(PRE, _loss), each(PERI, _loss)))
    ask(about, "pre is better than post", nats, above_0, minus(each(POST, _loss), each(PRE, _loss)))
    about = "converted at half-time"
    ask(about, "better than going on as pre", nats, above_0, minus(each(GOING_ON, _loss), each(CONVERTED, _loss)))
    ask(about, "better than peri throughout", nats, above_0, minus(each(ALWAYS, _loss), each(CONVERTED, _loss)))
    ask(about, "variance grows about linearly", halved, TWO, each(CONVERTED, lambda r: halves(_var(r))))
    ask(about, "variance grows less than as pre", "ratio of growths", above_1, over(GOING_ON, CONVERTED, _growth))
    ask(about, "gradients are more even than as pre", "ratio of spreads", above_1, over(GOING_ON, CONVERTED, _uneven))
    ask(about, "smaller largest activation than as pre", "ratio", above_1, over(GOING_ON, CONVERTED, largest))
    edges = minus(runs.edge(CONVERTED), runs.edge(GOING_ON))
    ask(about, "fails at higher rates than going on as pre", steps, above_0, edges)
    edges = minus(runs.edge(CONVERTED), runs.edge(ALWAYS))
    ask(about, "fails no earlier than peri throughout", steps, (-1.0, math.inf), edges)
    return found


def _var(row: Row) -> list[float]:
    return row["end"]["variance"]


def _growth(row: Row) -> float:
    return _var(row)[-1] / _var(row)[0]


def _fall(row: Row, when: str) -> float:
    return row[when]["gradient"][0] / row[when]["gradient"][-1]


def _uneven(row: Row) -> float:
    return spread(row["end"]["gradient"])


def _loss(row: Row) -> float:
    return row["loss"]


# ---- tables ----


def tables(runs: Runs) -> str:
    """Return the tables of the page, in Markdown."""
    claimed = [
        [c.about, c.text, c.number, _between(c), _over_seeds(c.values), f"{c.holding} of {len(c.values)}", c.answer]
        for c in claims(runs)
    ]
    heads = ["about", "claim", "number", "bounds", "mean (least, most)", "holds for", "answer"]
    parts = ["### Claims\n", _table(heads, claimed)]
    heads = ["", "best rate", "loss", "growth of the variance", "second half over first"]
    heads += ["gradient at the start, first layer over last", "gradient at the end, spread", "largest activation"]
    parts += ["### At the best rate of each\n", _table(heads, [_at_best(runs, arm) for arm in ARMS])]
    parts += ["### By rate\n"]
    for name, number in (("loss", _loss), ("largest activation", largest), ("growth of the variance", _growth)):
        heads = [f"{name} at", *(f"{rate:g}" for rate in runs.rates())]
        parts += [_table(heads, [_by_rate(runs, arm, number) for arm in ARMS])]
    first = [row for row in runs.rows if "converted" in row]
    sizes = [(row["loss"], row["converted"]["loss"]) for row in sorted(first, key=lambda row: row["seed"])]
    cells = [[str(seed), f"{a:.4f}", f"{b:.4f}", f"{b - a:+.4f}"] for seed, (a, b) in enumerate(sizes)]
    parts += ["### The conversion itself\n", _table(["seed", "pre at half-time", "converted", "change"], cells)]
    parts += [f"What knows the frequencies of bytes alone: {runs.frequencies:.4f} nats per byte.\n"]
    return "\n".join(parts)


def _at_best(runs: Runs, arm: Arm) -> list[str]:
    rows = runs.at_best(arm)
    numbers = (_growth, lambda r: halves(_var(r)), lambda r: _fall(r, "start"), _uneven, largest)
    told = [_over_seeds([number(row) for row in rows]) for number in numbers]
    return [label(arm), f"{runs.best(arm):g}", _over_seeds([_loss(row) for row in rows], 4), *told]


def _by_rate(runs: Runs, arm: Arm, number: Callable[[Row], float]) -> list[str]:
    cells = [label(arm)]
    for rate in runs.rates():
        values, count = [number(row) for row in runs.of(arm, rate)], runs.failures(arm, rate)
        failing = f", {count} fail" if count and number is _loss else ""
        cells.append(_over_seeds(values, 4 if number is _loss else 3) + failing)
    return cells


def label(arm: Arm) -> str:
    """Return how an arm is called in tables and figures."""
    names = {GOING_ON: "pre, going on", CONVERTED: "pre, then peri", ALWAYS: "peri, going on"}
    return names.get(arm, arm[0])


def _between(claim: Claim) -> str:
    if math.isinf(claim.high):
        return f"above {claim.low:g}"
    return f"below {claim.high:g}" if claim.low == 0 else f"{claim.low:g} to {claim.high:g}"


def _over_seeds(values: Sequence[float], digits: int = 3) -> str:
    mean = _told(statistics.fmean(values), digits)
    return f"{mean} ({_told(min(values), digits)}, {_told(max(values), digits)})" if len(values) > 1 else mean


def _told(value: float, digits: int) -> str:
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 10**digits else f"{value:#.{digits}g}".rstrip(".")


def _table(heads: list[str], cells: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
