"""The text of pipelines, selections of blocks, and the run loop over a model that holds nothing but its picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lnrewrite.errors import LnrewriteError, Refusal, Refused, UsageError
from lnrewrite.ir import Block, Edit, Exactness, Kind, Network, Norm, Proposal, SetNorm, Site, Stream, Where
from lnrewrite.ir.select import select
from lnrewrite.layout import WIDTH
from lnrewrite.pipeline import Batch, Context, Pass, Pipeline, Samples
from lnrewrite.pipeline.results import Drift


@dataclass(frozen=True)
class Options:
    """Take one option of every type; do nothing."""

    name: ClassVar[str] = "options"
    exactness: ClassVar[Exactness] = Exactness.STRUCTURAL
    needs_data: ClassVar[bool] = False

    word: str = "x"
    count: int = 3
    max_error: float = 0.1
    hard: bool = False
    to: Literal["pre", "post", "peri"] = "pre"
    blocks: str | None = None
    limit: int | None = 7

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError("count must not be negative")

    def propose(self, stream: Stream, context: Context) -> Proposal:
        return Proposal(not_applicable=((stream.name, "nothing to do"),))


@dataclass(frozen=True)
class Needy(Options):
    """Need an option."""

    name: ClassVar[str] = "needy"
    steps: int = dataclasses.field(kw_only=True)


@dataclass(frozen=True)
class Bare:
    """Take no option, and propose what a test puts into `script`: stream name -> proposal."""

    name: ClassVar[str] = "bare"
    exactness: Exactness = dataclasses.field(default=Exactness.CALIBRATED, init=False)
    needs_data: ClassVar[bool] = True
    script: ClassVar[Callable[[Stream, Context], Proposal]]

    def propose(self, stream: Stream, context: Context) -> Proposal:
        return type(self).script(stream, context)


@dataclass(frozen=True)
class Demanding(Pass):
    """Propose nothing, and need a block."""

    name: ClassVar[str] = "demanding"
    exactness: ClassVar[Exactness] = Exactness.STRUCTURAL
    needs_blocks: ClassVar[bool] = True

    def plan(self, stream: Stream, context: Context) -> Proposal:
        return Proposal(otherwise="nothing is proposed")


OPTIONS, NEEDY, BARE = (f"{__name__}:{cls.__name__}" for cls in (Options, Needy, Bare))


def failure(call: Callable[[], object]) -> UsageError:
    with pytest.raises(UsageError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return caught.value


# ---- text ----


def test_canonical_text_leaves_defaults_out() -> None:
    text = f" {OPTIONS} {{to=peri   blocks=0-5;attention count=3 hard limit=none}} , {OPTIONS}{{max-error=1e-6}},{BARE}"
    pipeline = Pipeline.parse(text)
    assert pipeline.passes[0] == Options(to="peri", blocks="0-5;attention", hard=True, limit=None)
    assert str(pipeline) == (
        f"{OPTIONS}{{hard=true to=peri blocks=0-5;attention limit=none}},{OPTIONS}{{max-error=1e-06}},{BARE}"
    )


words = st.text("abcXYZ019;:%*.-/=,?[]_é", min_size=1)


@given(
    st.lists(
        st.builds(
            Options,
            word=st.just("") | words,
            count=st.integers(0, 2**63 - 1),
            max_error=st.floats(allow_nan=False, allow_infinity=False),
            hard=st.booleans(),
            to=st.sampled_from(["pre", "post", "peri"]),
            blocks=st.none() | words,
            limit=st.none() | st.integers(1 - 2**63, 2**63 - 1),
        ),
        min_size=1,
    )
)
def test_text_round_trip(passes: list[Options]) -> None:
    pipeline = Pipeline(tuple(passes))
    assert Pipeline.parse(str(pipeline)) == pipeline
    assert str(Pipeline.parse(str(pipeline))) == str(pipeline)


@pytest.mark.parametrize(
    ("text", "column", "why"),
    [
        ("", 1, "expected a pass name, found the end"),
        ("  ", 3, "found the end"),
        (f"{BARE},", len(BARE) + 2, "expected a pass name, found the end"),
        (f"{BARE};{BARE}", len(BARE) + 1, "expected ',' after"),
        (f"{BARE} {BARE}", len(BARE) + 2, "expected ',' after"),
        (f"{OPTIONS}{{to=peri", len(OPTIONS) + 1, "never closed"),
        (f"{OPTIONS}{{to=a{{b}}", len(OPTIONS) + 2, "expected option=value"),
        (f"{OPTIONS}{{=peri}}", len(OPTIONS) + 2, "expected option=value"),
        (f"{OPTIONS}{{count=1 count=2}}", len(OPTIONS) + 10, "given twice"),
        (f"{BARE},{{}}", len(BARE) + 2, "expected a pass name"),
        ("no-such-pass;", 13, "expected ',' after"),
    ],
)
def test_text_errors_name_the_column(text: str, column: int, why: str) -> None:
    error = failure(lambda: Pipeline.parse(text))
    assert (error.code, error.what) == ("LN002", f"pipeline column {column}")
    assert why in error.why


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{OPTIONS}{{too=peri}}", "did you mean to?"),
        (f"{OPTIONS}{{to=perry}}", "'perry' is not pre or post or peri; did you mean peri?"),
        (f"{OPTIONS}{{count=many}}", "'many' is not an integer"),
        (f"{OPTIONS}{{count=1.5}}", "'1.5' is not an integer"),
        (f"{OPTIONS}{{count}}", "it needs a value; write count=..."),
        (f"{OPTIONS}{{max-error=nan}}", "'nan' is not a finite number"),
        (f"{OPTIONS}{{hard=yes}}", "'yes' is not true or false"),
        (f"{OPTIONS}{{limit=x}}", "'x' is not an integer or none"),
        (f"{OPTIONS}{{count=-1}}", "count must not be negative"),
        (f"{BARE}{{to=peri}}", f"{BARE} takes no options"),
        (NEEDY, "it needs steps"),
    ],
)
def test_option_errors(text: str, message: str) -> None:
    error = failure(lambda: Pipeline.parse(text))
    assert error.code == "LN003"
    assert message in str(error)


def test_presets() -> None:
    error = failure(lambda: Pipeline.preset("exakt"))
    assert error.code == "LN001" and "did you mean exact?" in error.remedy


# ---- selections ----


def network(*kinds: str) -> Network:
    """Two streams over blocks enc.0, enc.1, ..., the last two in a decoder."""
    blocks = tuple(Block(f"h.{i}.{kind}", kind) for i, kind in enumerate(kinds))
    return Network((Stream("enc", 4, blocks[:-2]), Stream("dec", 4, blocks[-2:])))


EIGHT = network("attention", "mlp", "attention", "moe", "attention", "mlp", "attention", "other")


@pytest.mark.parametrize(
    ("expression", "indices"),
    [
        (None, range(8)),
        ("3", [3]),
        ("6-7", [6, 7]),
        ("6-99", [6, 7]),
        ("first:25%", [0, 1]),
        ("first:26%", [0, 1, 2]),
        ("last:2", [6, 7]),
        ("last:100%", range(8)),
        ("first:99", range(8)),
        ("attention", [0, 2, 4, 6]),
        ("mlp", [1, 3, 5]),
        ("0-1;mlp;h.7.*", [0, 1, 3, 5, 7]),
        ("h.4.attention", [4]),
        ("h.[0-1].*", [0, 1]),
        (" 0 ; 1", [0, 1]),
    ],
)
def test_select(expression: str | None, indices: Sequence[int]) -> None:
    assert select(EIGHT, expression) == {EIGHT.blocks[i].name for i in indices}


NOTHING = ["", "8", "5-4", "first:0", "first:x", "last:-1", "h.9.*", "0;nothing", "first:", "0,1"]


@pytest.mark.parametrize("expression", NOTHING)
def test_selecting_nothing_is_an_error(expression: str) -> None:
    assert failure(lambda: select(EIGHT, expression)).code == "LN004"


def test_a_wrong_block_name_is_suggested() -> None:
    assert "did you mean h.4.attention?" in failure(lambda: select(EIGHT, "h.4.atention")).remedy


# ---- the run ----


@dataclass(frozen=True)
class Machine:
    """Represent a program: streams whose norms `apply` replaces, and a log of what it was asked to run."""

    network: Network
    log: list[str]

    narrow = False
    notes = fixed_paths = ()

    def placed(self, batch: object) -> object:
        return batch

    @property
    def certified(self) -> Network:
        return self.network

    def apply(
        self, edits: Sequence[tuple[Stream, Proposal]], label: str, *, consume: bool = False
    ) -> tuple[Machine, int]:
        self.log.append(f"apply {label}")
        done = [(e.target, o) for _, p in edits for e in p.edits for o in e.operations]
        put = {(target, o.where): o.norm for target, o in done if isinstance(o, SetNorm)}
        streams = tuple(replace(s, blocks=tuple(self._block(b, put) for b in s.blocks)) for s in self.network.streams)
        return Machine(replace(self.network, streams=streams), self.log), len(put)

    def _block(self, block: Block, put: Mapping[tuple[str, Where], Norm | None]) -> Block:
        sites = {s.where: s for s in block.sites}
        for (target, where), norm in put.items():
            if target == block.name:
                sites.pop(where, None)
                if norm:
                    sites[where] = Site(where, norm)
        return replace(block, sites=tuple(sites.values()))

    def samples(self, batches: Sequence[Batch]) -> Mapping[str, Samples]:
        self.log.append(f"samples {len(batches)}")
        return {}

    def synthetic(self, seed: int) -> Sequence[Batch]:
        return [{"x": seed + i} for i in range(8)]

    def is_ones(self, param: str) -> bool:
        return False

    is_zeros = is_ones

    def values(self, param: str) -> list[float]:
        raise KeyError(param)

    def shape(self, param: str) -> tuple[int, ...]:
        raise KeyError(param)

    def affine(self, start: str, end: str) -> tuple[float, float]:
        raise KeyError(start, end)

    def peaks(self, batches: Sequence[Batch]) -> dict[str, float]:
        self.log.append(f"peaks {len(batches)}")
        return {}

    def evidence(self, seed: int) -> None:
        """Return nothing to be held against."""

    def away(self, evidence: Any) -> float:
        raise AssertionError("there is no evidence")

    def drift(self, other: Machine, batches: Sequence[Batch], held_out: bool) -> Drift:
        assert other is not self
        self.log.append(f"drift {len(batches)} {held_out}")
        return Drift(held_out, len(batches), relative_error=0.0125, cosine=0.999, top1_agreement=1.0)


RMS = Norm(Kind.RMS, 1e-6)


def machine() -> Machine:
    pre = (Site(Where.IN, Norm(Kind.LAYER, 1e-5)),)
    blocks = tuple(Block(f"h.{i}", "mlp", pre) for i in range(3))
    return Machine(Network((Stream("one", 4, blocks), Stream("two", 4, (Block("d.0", "mlp", pre),)))), [])


def put_out(stream: Stream, context: Context) -> Proposal:
    """Give every block an out norm."""
    context.samples()
    context.samples()
    edits = tuple(Edit(b.name, (SetNorm(Where.OUT, RMS),), 0.01 * i, "fitted") for i, b in enumerate(stream.blocks))
    return Proposal(edits)


def no(code: str, site: str) -> Refusal:
    return Refusal(code, site, "it cannot be", "select others")


@pytest.fixture(autouse=True)
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Stream, Context], Proposal]], Pipeline]:
    """Give a function that makes the pipeline whose one pass proposes what the given function does."""

    def set_script(propose: Callable[[Stream, Context], Proposal]) -> Pipeline:
        monkeypatch.setattr(Bare, "script", staticmethod(propose), raising=False)
        return Pipeline((Bare(),))

    return set_script


def test_run_applies_reports_and_leaves_the_program_alone(script: Any, caplog: pytest.LogCaptureFixture) -> None:
    before = machine()
    pipeline = script(put_out)
    with caplog.at_level("INFO", logger="lnrewrite"):
        result = Pipeline((Options(), *pipeline.passes)).run(before, seed=3)
    assert {b.placement for b in before.network.blocks} == {"pre"}
    assert {b.placement for b in result.program.network.blocks} == {"peri"}
    assert before.log == ["samples 6", f"apply {BARE}", "drift 2 True"]
    assert caplog.messages == [f"1/2 {OPTIONS}", f"2/2 {BARE}", "measuring the drift"]
    found = result.report.to_dict()
    assert [(s["pass"], s["edits"], s["refused"]) for s in found["steps"]] == [(OPTIONS, 0, 0), (BARE, 4, 0)]
    assert found["pipeline"] == f"{OPTIONS},{BARE}" and found["output"] is None
    assert (found["placement_before"], found["placement_after"]) == ("pre", "peri")
    assert found["exactness"] == "calibrated"
    assert found["drift"] == {
        "data": "synthetic",
        "samples": 2,
        "relative_error": 0.0125,
        "cosine": 0.999,
        "kl": None,
        "top1_agreement": 1.0,
        "held_out": True,
    }
    assert found["sites"][1] == {"site": "h.1", "expected": 0.01, "note": "fitted"}
    assert found["not_applicable"][0] == {"pass": "options", "site": "one", "why": "nothing to do"}
    text = str(result.report)
    assert "pre -> peri" in text and "synthetic inputs" in text and "calibrated: close on sample data" in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_sites_that_a_pass_does_not_speak_of_are_counted_by_reason(script: Any) -> None:
    rows = (("h.0", "done"), ("h.1", "done"))
    result = script(lambda s, c: Proposal(not_applicable=(*rows, (s.name, f"no norm of {s.name}")))).run(machine())
    lines = str(result.report).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("not applicable"))
    assert lines[at] == f"not applicable: {len(result.report.not_applicable)}"
    told = ["4      done", "one    no norm of one", "two    no norm of two"]
    assert [line.split(maxsplit=1)[1] for line in lines[at + 2 :]] == told


def test_without_edits_the_class_is_structural_and_nothing_is_measured(script: Any) -> None:
    before = machine()
    result = script(lambda stream, context: Proposal(not_applicable=((stream.name, "done"),))).run(before)
    assert result.program is before and before.log == []
    assert result.report.exactness is Exactness.STRUCTURAL and result.report.drift is None


@pytest.mark.parametrize(
    ("given", "log"),
    [
        (1, ["samples 1", "drift 1 False"]),
        (2, ["samples 1", "drift 1 True"]),
        (5, ["samples 4", "drift 1 True"]),
        (8, ["samples 7", "drift 1 True"]),
        (24, ["samples 21", "drift 3 True"]),
    ],
)
def test_calibration_data_are_split(script: Any, given: int, log: list[str]) -> None:
    before = machine()
    report = script(put_out).run(before, ((i,) for i in range(given)), data="mine.npz").report
    assert [line for line in before.log if not line.startswith("apply")] == log
    assert report.drift["data"] == "mine.npz"
    assert any("one batch only" in note for note in report.notes) == (given == 1)
    assert not any("synthetic" in note for note in report.notes)


@pytest.mark.parametrize("data", [[], {"x": 1}, [3], iter(())])
def test_what_is_no_calibration_data(script: Any, data: Any) -> None:
    with pytest.raises(LnrewriteError) as caught:
        script(put_out).run(machine(), data)
    assert caught.value.code == "LN022"


def refuse_one(stream: Stream, context: Context) -> Proposal:
    """Edit all blocks but the first of each stream."""
    edits = tuple(Edit(b.name, (SetNorm(Where.OUT, RMS),)) for b in stream.blocks[1:])
    return Proposal(edits, (no("LN110", stream.blocks[0].name),))


def test_a_refusal_stops_everything(script: Any) -> None:
    before = machine()
    with pytest.raises(Refused) as caught:
        script(refuse_one).run(before)
    assert [row["site"] for row in caught.value.refusals] == ["h.0", "d.0"]
    assert before.log == []


def test_partial_does_the_rest(script: Any) -> None:
    result = script(refuse_one).run(machine(), partial=True)
    assert [b.placement for b in result.program.network.blocks] == ["pre", "peri", "peri", "pre"]
    assert [r.site for r in result.report.refusals] == ["h.0", "d.0"]
    assert "LN110 h.0: it cannot be; select others" in str(result.report)


def test_a_refused_stream_stays_as_it_is(script: Any) -> None:
    def propose(stream: Stream, context: Context) -> Proposal:
        proposal = put_out(stream, context)
        return replace(proposal, refusals=(no("LN114", "one"),)) if stream.name == "one" else proposal

    result = script(propose).run(machine(), partial=True)
    assert [b.placement for b in result.program.network.blocks] == ["pre", "pre", "pre", "peri"]


def test_what_detection_did_not_understand(script: Any) -> None:
    before = Machine(Network(refusals=(no("LN202", "model"),)), [])
    (note,) = script(put_out).run(before).report.notes
    assert note == "no residual block was found; LN202 model: it cannot be; select others"
    with pytest.raises(Refused, match="LN202"):
        Pipeline((Demanding(),)).run(before)
    assert Pipeline((Demanding(),)).run(before, partial=True).report.steps[0].refused == 1


@pytest.mark.parametrize("target", ["h.1", "h.2.in"])
def test_a_pass_that_skips_a_site_silently_is_a_bug(script: Any, target: str) -> None:
    def propose(stream: Stream, context: Context) -> Proposal:
        rows = [row for b in stream.blocks for row in ((b.name, "a block"), (f"{b.name}.in", "a norm"))]
        return Proposal(not_applicable=tuple(row for row in rows if not row[0].startswith(target[:3])))

    with pytest.raises(RuntimeError, match=rf"{BARE} does not mention '{target[:3]}.in'"):
        script(propose).run(machine())


def test_every_site_of_a_block_or_the_block_must_be_named(script: Any) -> None:
    sites = (Site(Where.IN, RMS), Site(Where.OUT, RMS))
    stream = Stream("s", 4, (Block("b", "mlp", sites), Block("empty")), final=Site(Where.FINAL, RMS))
    before = Machine(Network((stream,)), [])

    def missing(*named: str) -> str:
        try:
            script(lambda s, c: Proposal(not_applicable=tuple((n, "") for n in named))).run(before)
        except RuntimeError as error:
            return str(error).split("'")[1]
        return ""

    assert missing("b.in", "empty", "s.final") == "b.out"
    assert missing("b.in", "b.out", "s.final") == "empty"
    assert missing("b", "empty") == "s.final"
    assert missing("b.in", "b.out", "empty", "s.final") == missing("b", "empty", "s.final") == missing("s") == ""


def test_an_edit_of_nothing_is_a_bug(script: Any) -> None:
    def propose(stream: Stream, context: Context) -> Proposal:
        return Proposal((Edit("h.9", ()),), not_applicable=((stream.name, ""),))

    with pytest.raises(RuntimeError, match="edits 'h.9', which is neither a block"):
        script(propose).run(machine())


def test_a_pass_without_data_gets_no_samples(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bare, "needs_data", False)
    with pytest.raises(RuntimeError, match="needs no data"):
        script(put_out).run(machine())


@dataclass(frozen=True)
class Based(Pass):
    """Stand on the base class: claim exact edits, and propose what a test puts into `script`."""

    name: ClassVar[str] = "based"
    exactness: ClassVar[Exactness] = Exactness.ALGEBRAIC
    script: ClassVar[Callable[[Stream, Context], Proposal]]

    def plan(self, stream: Stream, context: Context) -> Proposal:
        return type(self).script(stream, context)


def test_the_base_class_checks_what_is_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream("s", 4, (Block("b", "mlp", (Site(Where.IN, RMS),)), Block("empty")), final=Site(Where.FINAL, RMS))

    def proposed(proposal: Proposal) -> Proposal:
        monkeypatch.setattr(Based, "script", lambda s, c: proposal, raising=False)
        return Based().propose(stream, Context(Network((stream,)), dict, bool, bool, str))

    edit = Edit("b", (SetNorm(Where.IN, None),))
    assert proposed(Proposal((edit,), otherwise="no")).not_applicable == (("s.final", "no"), ("empty", "no"))
    assert proposed(Proposal(refusals=(no("LN110", "s"),), otherwise="no")).not_applicable == ()
    with pytest.raises(RuntimeError, match="does not mention 'empty'"):
        proposed(Proposal((edit,)))
    with pytest.raises(RuntimeError, match="claims algebraic edits and expects an error at 'b'"):
        proposed(Proposal((replace(edit, expected=0.1),), otherwise="no"))


def test_a_pass_sees_what_the_one_before_it_made(script: Any) -> None:
    seen = []

    def propose(stream: Stream, context: Context) -> Proposal:
        seen.append(stream.blocks[0].placement)
        return put_out(stream, context)

    (bare,) = script(propose).passes
    report = Pipeline((bare, bare)).run(machine()).report
    assert seen == ["pre", "pre", "peri", "peri"] and report.edits == 8
