"""The text form: exact round trip, readable, and errors that name their line."""

from __future__ import annotations

import pytest
from hypothesis import given

from lnrewrite.errors import Refusal
from lnrewrite.ir import Barrier, Block, Kind, Linear, Network, Norm, Scale, Side, Site, Stream, Where
from lnrewrite.ir.text import digest, parse, render, render_stream
from zoo.streams import networks, streams

GOLDEN = """\
stream model width=64 opaque="gelu"
  source @wte.weight:1(uses=2,table) @conv.weight:0+@conv.bias
  embedding layer(eps=1e-12 gamma=@ln_e.weight beta=@ln_e.bias) -> taps "an output"
  block h.0.attn attention peri scale=1.5
    in     layer(eps=1e-05 gamma=@ln_1.weight beta=@ln_1.bias) -> @q.weight:0 @k.weight:0+@k.bias(inexact) taps sin
    inner  rms(eps=1e-06) -> taps mul_3
    out    rms(eps=1e-06 gamma=1+@ln_2.weight)
    inner  batch(eps=0.001 mean=@m variance=@v) width=16 <- @"a -> b":0 -> @x:1
    scale  read *0.5
    scale  branch /@ls vector
    writes @o.weight:1+@o.bias
  block h.0.mlp mlp none group=1
    barrier written a.b
    adds   @pos:1(table)
    reads  @onnx::MatMul_7:0(uses=2)
    writes @down.weight:1
  block h.1 other pre
    in     std(eps=0.0 gamma=%sigmoid) -> @u.weight:0
    reads  -
  final  layer(eps=1e-05) -> @wte.weight:1(uses=2)
  taps   hidden.0 hidden.1
  head   @head:1
  exits  output mean
elsewhere inner batch(eps=0.001)
refused LN205 div_2 "it looks like a norm" "report it"
"""


def picture() -> Network:
    """Build what GOLDEN shows from the types."""
    q, k = Linear("q.weight", 0), Linear("k.weight", 0, "k.bias", exact=False)
    batch = Norm(Kind.BATCH, 1e-3, mean="m", variance="v")
    attention = Block(
        "h.0.attn",
        "attention",
        (
            Site(Where.IN, Norm(Kind.LAYER, 1e-5, "ln_1.weight", "ln_1.bias"), (q, k), ("sin",)),
            Site(Where.INNER, Norm(Kind.RMS, 1e-6), (), ("mul_3",)),
            Site(Where.OUT, Norm(Kind.RMS, 1e-6, "ln_2.weight", plus_one=True)),
            Site(Where.INNER, batch, (Linear("x", 1),), writers=(Linear("a -> b", 0),), width=16),
        ),
        (q, k),
        (Linear("o.weight", 1, "o.bias"),),
        scale=1.5,
        scales=(Scale("read", 0.5), Scale("branch", "ls", vector=True, inverse=True)),
    )
    reader, writer = Linear("onnx::MatMul_7", 0, uses=2), Linear("down.weight", 1)
    added = Linear("pos", 1, table=True)
    mlp = Block("h.0.mlp", "mlp", (), (reader,), (writer,), 1, added=(added,), barriers=(Barrier(Side.WRITTEN, "a.b"),))
    computed = Norm(Kind.STD, 0.0, "sigmoid", computed=True)
    other = Block("h.1", sites=(Site(Where.IN, computed, (Linear("u.weight", 0),)),))
    stream = Stream(
        "model",
        64,
        (attention, mlp, other),
        (Linear("wte.weight", 1, uses=2, table=True), Linear("conv.weight", 0, "conv.bias")),
        "gelu",
        Site(Where.EMBEDDING, Norm(Kind.LAYER, 1e-12, "ln_e.weight", "ln_e.bias"), (), ("an output",)),
        Site(Where.FINAL, Norm(Kind.LAYER, 1e-5), (Linear("wte.weight", 1, uses=2),)),
        ("hidden.0", "hidden.1"),
        (Linear("head", 1),),
        ("output", "mean"),
    )
    elsewhere = Site(Where.INNER, Norm(Kind.BATCH, 1e-3))
    return Network((stream,), (elsewhere,), (Refusal("LN205", "div_2", "it looks like a norm", "report it"),))


def test_golden() -> None:
    assert render(picture()) == GOLDEN
    assert parse(GOLDEN) == picture()


@given(networks())
def test_round_trip(network: Network) -> None:
    text = render(network)
    assert parse(text) == network
    assert render(parse(text)) == text
    assert text.isascii()


@given(streams())
def test_round_trip_of_one_stream(stream: Stream) -> None:
    assert parse(render_stream(stream)).streams == (stream,)


def test_comments_blank_lines_and_indentation_mean_nothing() -> None:
    loose = "\n".join(f"\n   # a comment\n{line.strip()}" for line in GOLDEN.splitlines())
    assert parse(loose) == picture()


def test_the_empty_network_is_the_empty_text() -> None:
    assert render(Network()) == ""
    assert parse("") == Network()


def test_digest_follows_what_the_text_says() -> None:
    network = picture()
    unprinted = Network(network.streams, (Site(Where.INNER, Norm(Kind.BATCH, 1e-3), origin=("a",)),), network.refusals)
    assert digest(network) == digest(unprinted) == digest(parse(GOLDEN))
    assert len(digest(network)) == 16
    assert digest(network) != digest(parse(GOLDEN.replace("eps=1e-05", "eps=1.0000000000000002e-05")))


HEAD = "stream s width=4\n  block b mlp pre\n"
NORM = "    in     rms(eps=1e-05) -> @w:0\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("streem s width=4", "line 1: unexpected 'streem'"),
        ("stream s", r"line 1: not a stream \(name width=N\): 's'"),
        ("# one\n\nstream s width=-1", "line 3: stream s: width must not be negative, got -1"),
        ("stream s width=4\n  source wte", r"line 2: not a linear map \(@param:axis\): 'wte'"),
        ("stream s width=4\n    in rms(eps=1)", "line 2: unexpected 'in'"),
        (HEAD, "line 2: block b says pre, its norms say none"),
        (HEAD + "    in     rms(eps=1e-05 beta=@b gamma=@g)", "line 3: not a norm"),
        (HEAD + "    in     mean(eps=1e-05)", "line 3: 'mean' is not a valid Kind"),
        (HEAD + "    in     rms(eps=-1)", "line 3: a norm's eps must be finite"),
        (HEAD + "    in     rms(eps=tiny)", "line 3: could not convert string to float"),
        (HEAD + NORM + "    writes w:0", r"line 4: not a linear map \(@param:axis\): 'w:0'"),
        (HEAD + NORM + "    writes @w:0(tied)", "line 4: a linear map is inexact, a table or apart, not 'tied'"),
        (HEAD + NORM + "    writes @a:0\n    writes @c:0", "line 5: block b has a second 'writes' line"),
        (HEAD + NORM + "  block b mlp none", "line 1: stream s: block names must be unique: b"),
        (HEAD + NORM + '    writes @"a\\x":0', "line 4: Invalid"),
        ("elsewhere nowhere rms(eps=1)", "line 1: 'nowhere' is not a valid Where"),
        ("refused LN101 site why remedy", "line 1: not a refusal"),
    ],
)
def test_errors_name_their_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)
