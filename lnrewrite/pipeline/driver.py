"""Run pipelines of passes: propose, check that nothing was skipped, apply, report.

    canonicalize,place{to=peri norm=auto blocks=0-5;attention}

A pass sees a `Stream` and a `Context` and returns a `Proposal`; what it is applied to is any `Model`. Nothing here
knows torch or ONNX. `spelling.py` holds the text form of pipelines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, ClassVar, Generic, NoReturn, Protocol, Self, TypeVar

from .. import errors
from ..errors import LnrewriteError, Refusal, Refused
from ..ir.edits import Exactness, Proposal
from ..ir.network import Network, Norm, Stream, site_name
from ..ir.select import select
from .report import Expected, Report, Skipped, Step, unknown_norms
from .sounding import Proof, Unproved, Witness, sound
from .spec import parse, spell

PRESETS = {
    "exact": ("the two passes that change least", "canonicalize,fold-affine"),
    "inference": (
        "everything exact that makes inference cheaper",
        "fold-batchnorm,absorb-scales,fold-embedding-norm,merge-norms,canonicalize,fold-affine{final=true},"
        "layernorm-to-rmsnorm",
    ),
    "quantize": (
        "outlying channels spread before quantisation",
        "untie,fold-batchnorm,absorb-scales,fold-embedding-norm,merge-norms,canonicalize,fold-affine{final=true},"
        "layernorm-to-rmsnorm,rotate-stream",
    ),
    "fp16": ("values that overflow fp16", "absorb-scales,rescale-stream{fit=fp16}"),
}
"""What a preset is for, and the pipeline that it stands for."""

LARGE = 0.2
"""The relative error from which a report advises healing."""

Batch = Mapping[str, Any] | Sequence[Any]
"""One call's inputs: a mapping of keyword inputs, or a sequence of positional ones."""


# ---- what a pass is, and what it sees ----


class Pass(Protocol):
    """Propose edits to one stream: a frozen dataclass whose fields are its options; it never mutates anything.

    `name` is the kebab-case word in pipelines. `exactness` is what its edits claim, `needs_data` whether it looks at
    samples; both are class variables, or properties where they depend on the options. A pass may add `needs_blocks`:
    true refuses a model in which no block was found, with detection's reasons; without it such a model stays as it is.
    With `everywhere` it sees the norms on no stream too, as the inner norms of a stream of width 0 (`Network.rest`).
    """

    name: ClassVar[str]

    @property
    def exactness(self) -> Exactness: ...
    @property
    def needs_data(self) -> bool: ...
    def propose(self, stream: Stream, context: Context) -> Proposal:
        """Return whole edits, refusals and sites not spoken of, which together name every site and block."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class Samples:
    """Hold what one block saw and did on the calibration data: numpy arrays [tokens, channels].

    `state` is the trunk value that the block's skip starts from (for post-LN the trunk norm's output), `before` that
    trunk norm's input where there is one, `read` what the readers see, `written` the branch before its out norm,
    `branch` what is added, `total` the sum. All blocks of a stream hold the same tokens in the same rows.
    """

    state: Any
    before: Any
    read: Any
    written: Any
    branch: Any
    total: Any


@dataclass(frozen=True, eq=False, slots=True)
class Context:
    """Give a pass what lies beyond its stream; everything is a question, nothing can be changed through it.

    `samples()` runs the model on the calibration data, once, and returns block name -> `Samples`; `peaks()` the size of
    the largest number in each value of the graph, by node. `affine(start, end)` are a and s, per channel, of a piece of
    graph that computes a x + s. `is_ones(param)` and
    `is_zeros(param)` look at a parameter's values, `values(param)` returns them as a float64 array. `seed` is for a
    pass that draws random numbers.
    """

    network: Network
    samples: Callable[[], Mapping[str, Samples]]
    is_ones: Callable[[str], bool]
    is_zeros: Callable[[str], bool]
    values: Callable[[str], Any]
    seed: int = 0
    shape: Callable[[str], tuple[int, ...]] = lambda param: ()
    affine: Callable[[str, str], tuple[Any, Any]] = lambda start, end: (1.0, 0.0)
    peaks: Callable[[], Mapping[str, float]] = dict

    def gain(self, norm: Norm) -> Any:
        """Return what a norm multiplies by: a vector [width], 1 + gamma where it is stored so; a number without one."""
        return gain_of(norm, self.values)

    def selected(self, expression: str | None) -> frozenset[str]:
        """Return the names of the blocks that a `blocks=` option selects; None selects all."""
        return select(self.network, expression)


def gain_of(norm: Norm, values: Callable[[str], Any]) -> Any:
    """Return what a norm multiplies by, given a parameter's `values`: see `Context.gain`."""
    return norm.factor * (1.0 if norm.gamma is None else values(norm.gamma).reshape(-1) + norm.plus_one)


class Model(Protocol):
    """Say what `Pipeline.run` needs of a program; the program is never changed, `apply` returns another one."""

    @property
    def network(self) -> Network: ...
    @property
    def certified(self) -> Network:
        """Return the network as it holds on the model: tried, with barriers where it does not."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what a user should know about how the model was opened and captured."""
        ...

    @property
    def fixed_paths(self) -> tuple[str, ...]:
        """Return what the capture fixed that the model chooses by its data."""
        ...

    @property
    def narrow(self) -> bool:
        """Say whether weights are stored in fewer than 32 bits, so that edits are rounded."""
        ...

    def apply(self, edits: Sequence[tuple[Stream, Proposal]], label: str, *, consume: bool = False) -> tuple[Self, int]:
        """Carry the edits out and return the new program with their number; `consume` may use this one up."""
        ...

    def samples(self, batches: Sequence[Batch]) -> Mapping[str, Samples]:
        """Run the model on the batches and return what each block saw and did."""
        ...

    def peaks(self, batches: Sequence[Batch]) -> Mapping[str, float]:
        """Run the model on the batches and return the size of the largest number in each value of its graph."""
        ...

    def synthetic(self, seed: int) -> Sequence[Batch]:
        """Make up inputs that the model accepts."""
        ...

    def is_ones(self, param: str) -> bool: ...
    def is_zeros(self, param: str) -> bool: ...
    def values(self, param: str) -> Any: ...
    def shape(self, param: str) -> tuple[int, ...]: ...
    def affine(self, start: str, end: str) -> tuple[Any, Any]: ...
    def drift(self, other: Self, batches: Sequence[Batch], held_out: bool) -> dict[str, Any]:
        """Compare `other`'s outputs with this model's: the `drift` object of the contract, but for `data`."""
        ...

    def evidence(self, seed: int) -> Any | None:
        """Return what this model computes on made-up inputs of two sizes; None where it cannot be run."""
        ...

    def away(self, evidence: Any) -> float:
        """Return how far this model's outputs are from another's evidence, relative; 0 where rounding explains it."""
        ...


M = TypeVar("M", bound=Model)
T = TypeVar("T")


# ---- pipelines ----


@dataclass(frozen=True)
class Pipeline:
    """Hold passes in order; `Pipeline.parse(text)` makes one, `str()` gives the text back.

    >>> print(Pipeline.parse("canonicalize,fold-affine"))
    canonicalize,fold-affine
    """

    passes: tuple[Pass, ...]
    PRESETS: ClassVar[Mapping[str, str]] = {name: text for name, (_, text) in PRESETS.items()}
    """The pipelines that have a name, as text."""

    @classmethod
    def parse(cls, text: str) -> Pipeline:
        """Build the pipeline that `text` describes.

        Raises UsageError: LN001 unknown pass, LN002 text (with the column), LN003 option.
        """
        return cls(tuple(parse(text)))

    @classmethod
    def preset(cls, name: str) -> Pipeline:
        """Build the pipeline that a preset stands for. Raises UsageError LN001 for an unknown name."""
        if name not in PRESETS:
            errors.unknown("LN001", "preset", name, PRESETS)
        return cls.parse(PRESETS[name][1])

    def __str__(self) -> str:
        return ",".join(map(spell, self.passes))

    def run(
        self,
        program: M,
        calibrate: Iterable[Batch] | None = None,
        partial: bool = False,
        seed: int = 0,
        *,
        data: str | None = None,
        progress: Callable[[str], None] | None = None,
        consume: bool = False,
        verify: bool = True,
    ) -> Result[M]:
        """Run every pass on `program` and return the new program with a report; `program` itself stays as it is.

        What exact passes made is proved: run in float64 against what it was made of, at two batch sizes and lengths.
        Edits that do not hold up are found, left out and refused with LN404, as what cannot be edited is. `verify`:
        false leaves the proof out.

        `calibrate` is an iterable of inputs (dicts of keyword inputs, or tuples); the first three quarters fit, the
        rest measure the drift; None makes inputs up and says so. `data` is what the report calls them. With `partial`,
        sites that cannot be edited are listed; else the first pass that refuses raises `Refused`. `consume` lets exact
        passes edit `program` itself, which is of no use afterwards: its weights are in memory once, not twice; where
        the proof fails then `Unproved` (LN404) is raised, and a run without `consume` tells what it is.
        """
        say = progress or (lambda message: None)
        feed = _Feed(program, calibrate, seed, data)
        rounded, before = program.narrow, program.network
        consume = consume and not rounded and all(item.exactness < Exactness.CALIBRATED for item in self.passes)
        proof = Proof.AT_ENDS if verify else Proof.NONE
        try:
            current, done = self._steps(program, feed, partial, seed, say, consume, proof)
        except Unproved:
            if consume:
                raise
            say("the result does not compute what the model does: looking for the edit that is wrong")
            current, done = self._steps(program, feed, partial, seed, say, False, Proof.OF_EDITS)
        exactness = max((d.exactness for d in done if d.step.edits), default=Exactness.STRUCTURAL)
        drift = None
        if exactness >= Exactness.CALIBRATED or (rounded and current is not program):
            say("measuring the drift")
            drift = feed.drift(program, current)
            _finite(drift)
        return Result(current, self._report(before, current.network, exactness, done, drift, feed))

    def _steps(
        self, program: M, feed: _Feed, partial: bool, seed: int, say: Callable[[str], None], consume: bool, proof: Proof
    ) -> tuple[M, list[_Done]]:
        """Run the passes one after the other; prove what each stretch of exact ones, or each single edit, gave."""
        current, done, number = program, list[_Done](), 0
        for exact, stretch in groupby(self.passes, lambda item: item.exactness < Exactness.CALIBRATED):
            witness = Witness(seed, proof is Proof.OF_EDITS) if exact and proof is not Proof.NONE else None
            for item in stretch:
                say(f"{(number := number + 1)}/{len(self.passes)} {spell(item)}")
                network = current.network if exact or proof is Proof.NONE else current.certified
                used = consume or current is not program
                current, step = _step(item, current, network, feed, partial, seed, used, witness)
                done.append(step)
            if witness:
                witness.hear(current, str(self))
        return current, done

    def _report(
        self,
        before: Network,
        after: Network,
        exactness: Exactness,
        done: Sequence[_Done],
        drift: dict[str, Any] | None,
        feed: _Feed,
    ) -> Report:
        return Report(
            pipeline=str(self),
            exactness=exactness,
            steps=tuple(d.step for d in done),
            placement_before=before.placement,
            placement_after=after.placement,
            drift=drift,
            refusals=tuple(r for d in done for r in d.refusals),
            not_applicable=tuple(row for d in done for row in d.skipped),
            sites=tuple(row for d in done for row in d.expected),
            notes=(
                *feed.program.notes,
                *_blind(before),
                *_unproved(done),
                *_doubted(done),
                *_rounding(exactness, drift),
                *feed.notes(drift),
            ),
            fixed_paths=feed.program.fixed_paths,
        )


@dataclass(frozen=True)
class Result(Generic[M]):
    """Hold what a run gave: the rewritten `program`, and the `report` of what was done (it prints itself)."""

    program: M
    report: Report


# ---- the run ----


@dataclass(frozen=True)
class _Done:
    """Collect what one pass did."""

    step: Step
    exactness: Exactness
    refusals: tuple[Refusal, ...]
    skipped: tuple[Skipped, ...]
    expected: tuple[Expected, ...]
    unproved: bool
    network: Network


@dataclass
class _Feed:
    """Hold the calibration data, read when first asked for, in two parts: one to fit on, one to measure with."""

    program: Model
    given: Iterable[Batch] | None
    seed: int
    name: str | None

    @cached_property
    def batches(self) -> list[Batch]:
        """Read the data once, and refuse what cannot be inputs."""
        if self.given is None:
            return list(self.program.synthetic(self.seed))
        if isinstance(self.given, Mapping):
            self._refuse("this is one batch, not an iterable of batches")
        batches = list(self.given)
        if not batches:
            self._refuse("it holds no batch")
        for batch in batches:
            if not isinstance(batch, (Mapping, tuple, list)):
                self._refuse(f"a batch is a {type(batch).__name__}")
        return batches

    def _refuse(self, why: str) -> NoReturn:
        what = f"calibration data {self.name}" if self.name else "calibration data"
        raise LnrewriteError("LN022", what, why, "give a list of dicts of keyword inputs, or of tuples")

    @property
    def fit(self) -> list[Batch]:
        """Return the batches to fit on: the first three quarters, or the only one."""
        return self.batches[: max(1, len(self.batches) * 3 // 4)]

    def drift(self, before: M, after: M) -> dict[str, Any]:
        """Measure how far the outputs moved, on batches that nothing was fitted on where there are such."""
        rest = self.batches[len(self.fit) :]
        name = "synthetic" if self.given is None else self.name or "given"
        figures = before.drift(after, rest or self.batches, bool(rest))
        return {"data": name} | figures | {"data": name, "held_out": bool(rest)}

    def notes(self, drift: dict[str, Any] | None) -> tuple[str, ...]:
        """Say in plain words what the figures of this run rest on."""
        notes = []
        if self.given is None and "batches" in vars(self):
            chosen = ", of which those that take the captured path," if self.program.fixed_paths else ""
            notes.append(
                f"no calibration data were given, so gains and drift rest on synthetic inputs{chosen} and may be far "
                "from what real inputs give; give real ones with --calibrate DATA (calibrate=...)"
            )
        if drift and (drift["relative_error"] or 0) > LARGE:
            notes.append(
                f"the outputs moved by {drift['relative_error']:.0%}: constants stand where the model has one scalar "
                "for each token; heal the result by a short training on real data before use"
            )
        if drift and drift.get("off_path"):
            notes.append(
                f"on {drift['off_path']} more batches the result takes another path than was captured, and fails; "
                "they are not in the drift"
            )
        if drift and not drift["held_out"]:
            notes.append("there was one batch only, so the drift was measured on the data of the fit; give two or more")
        return tuple(notes)


def _step(
    item: Pass,
    current: M,
    network: Network,
    feed: _Feed,
    partial: bool,
    seed: int,
    consume: bool,
    witness: Witness | None,
) -> tuple[M, _Done]:
    """Run one pass over every stream of the current program's network; `consume` lets it edit that program itself.

    witness: knows what the program is to compute; one of each edit leaves out and refuses what does not keep it.
    """
    started = time.perf_counter()
    text = spell(item)
    samples, peaks = _once(item, current.samples, feed), _once(item, current.peaks, feed)
    ask = (current.is_ones, current.is_zeros, current.values)
    context = Context(network, samples, *ask, seed, current.shape, current.affine, peaks)
    proposals = []
    rest = (network.rest,) if getattr(item, "everywhere", False) and (network.elsewhere or network.computed) else ()
    for stream in (*network.streams, *rest):
        proposal = item.propose(stream, context)
        _check(text, stream, proposal)
        proposals.append((stream, proposal))
    refusals = tuple(r for _, p in proposals for r in p.refusals) or _unseen(item, network)
    if refusals and not partial:
        raise Refused(refusals)
    wanted = [(s, p) for s, p in proposals if p.edits and all(r.site != s.name for r in p.refusals)]
    if witness and wanted:
        witness.call(current)
        if witness.each and witness.evidence is not None:
            wanted, wrong = sound(current, wanted, text, witness.evidence)
            refusals += wrong
            if refusals and not partial:
                raise Refused(refusals)
    count = 0
    if wanted:
        try:
            current, count = current.apply(wanted, text, consume=consume)
        except LnrewriteError:
            raise
        except Exception as fault:  # of ours: an edit that has no place
            raise Unproved(text, f"carrying it out fails with {type(fault).__name__}: {fault}") from fault
    skipped = tuple(Skipped(item.name, site, why) for _, p in proposals for site, why in p.not_applicable)
    expected = tuple(
        Expected(e.target, e.expected, e.note) for _, p in wanted for e in p.edits if e.expected is not None or e.note
    )
    step = Step(text, count, len(refusals), time.perf_counter() - started)
    unproved = count > 0 and witness is not None and witness.evidence is None
    return current, _Done(step, item.exactness, refusals, skipped, expected, unproved, network)


def _finite(drift: Mapping[str, Any]) -> None:
    """Raise LnrewriteError LN405 where a conversion's outputs are no numbers."""
    error = drift["relative_error"]
    if error is not None and not error < float("inf"):
        why = "the outputs of the result are NaN or infinite on the data that it was measured on"
        raise LnrewriteError("LN405", "the result", why, "leave blocks out with blocks=..., and report this model")


def _once(item: Pass, run: Callable[[Sequence[Batch]], T], feed: _Feed) -> Callable[[], T]:
    """Return what runs the model on the data for one pass, at most once."""
    memory: list[T] = []

    def ask() -> T:
        if not item.needs_data:
            raise RuntimeError(f"{item.name} asks for samples but says that it needs no data")
        if not memory:
            memory.append(run(feed.fit))
        return memory[0]

    return ask


def _unseen(item: Pass, network: Network) -> tuple[Refusal, ...]:
    """Return detection's own refusals where it found no block and the pass cannot do without one."""
    if network.blocks or not getattr(item, "needs_blocks", False):
        return ()
    return tuple(r for r in network.refusals if isinstance(r, Refusal))


def _blind(network: Network) -> tuple[str, ...]:
    """Say that there was nothing to work on and why, and what works as a norm and is none that is known."""
    odd = unknown_norms(network.refusals)
    if network.blocks:
        return odd
    return (f"no residual block was found{''.join(f'; {reason}' for reason in network.refusals[-3:])}", *odd)


def _unproved(done: Sequence[_Done]) -> tuple[str, ...]:
    """Say that exact passes edited a model that could not be run."""
    if not any(d.unproved for d in done):
        return ()
    why = "the model holds no weights or takes no made-up inputs"
    return (f"what exact passes made was not run against the model: {why}; compare them with lnrewrite verify",)


def _doubted(done: Sequence[_Done]) -> tuple[str, ...]:
    """Say what of the picture did not hold where it was tried, so that a pass took it for a barrier."""
    found = (str(r) for d in done for r in d.network.refusals if isinstance(r, Refusal) and r.code == "LN208")
    return tuple(dict.fromkeys(found))


def _rounding(exactness: Exactness, drift: dict[str, Any] | None) -> tuple[str, ...]:
    """Say what the drift of an exact pipeline is: the rounding of what it stored."""
    if drift is None or exactness >= Exactness.CALIBRATED:
        return ()
    return ("the edits are exact; the drift is the rounding of weights that are stored in half precision",)


def _check(text: str, stream: Stream, proposal: Proposal) -> None:
    """Raise RuntimeError where a proposal skips a site silently, or edits what is not there: a fault of the pass."""
    ends = {f"{stream.name}.embedding": stream.embedding, f"{stream.name}.final": stream.final}
    sites = {block.name: {site_name(block, site) for site in block.sites} for block in stream.blocks}
    targets = {edit.target for edit in proposal.edits}
    if strange := sorted(targets - ends.keys() - sites.keys()):
        raise RuntimeError(f"{text} edits {strange[0]!r}, which is no block and no end of stream {stream.name!r}")
    named = targets | {r.site for r in proposal.refusals} | {site for site, _ in proposal.not_applicable}
    if stream.name in named:
        return
    for name, held in sites.items():
        if name not in named and not (held and held <= named):
            silent = min(held - named, default=name)
            raise RuntimeError(f"{text} says nothing of {silent!r}: a site is edited, refused or not applicable")
    for end, site in ends.items():
        if site and end not in named:
            raise RuntimeError(f"{text} says nothing of {end!r}: a site is edited, refused or not applicable")
