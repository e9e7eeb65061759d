"""Hostile command lines: names, factories, outputs, options."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from .goods import FACTORY, HEAL, array
from .pickled import PAYLOAD
from .place import Case, Place

OPT = ("opt", "m.pt2", "--preset", "exact")
PERI = ("convert", "m.pt2", "--to", "peri", "-o", "o.pt2", "--no-verify")


def _good(place: Place) -> None:
    place.write("m.pt2", place.goods.pt2)


def _folder(place: Place) -> None:
    for name, content in place.goods.llama.items():
        place.write(f"f/{name}", content)


def name_cases() -> Iterator[Case]:
    """What stands where a model's name belongs."""
    names = (
        "", ".", "..", "/", "/etc/passwd", "/dev/zero", "/dev/null", "/dev/stdin", "/proc/self/mem", "no.pt2", "a" * 5000, "\x1b[31mred\x07", "\u202egnp.2tp", "m.pt2\n", "demo:", "demo:../x", "demo:evil",
        "builtins:exit", "builtins:eval", "builtins:print", "os:getcwd", "os:abort", "sys:exit", "subprocess:run", "http://example.com/m.pt2", "file:///etc/passwd", "a:b:c", "a:b.c.d", ":", "x:", ":x",
        "-", "$(id)", "`id`", "%s%n", "meta-llama/Llama-3", "~root", "\ud800", "..:x", "os.path:join", "this:d", "antigravity:x", "__main__:x", "lnrewrite.cli:main",
    )  # fmt: skip
    pairs = [("inspect", name) for name in names] + [("verify", name) for name in ("", "/dev/zero", "\x1b[31m", "\u202e")]
    for command, name in pairs:
        args = (command, name) if command == "inspect" else (command, "m.pt2", name)
        shown = name[:40].encode("unicode_escape", "surrogatepass").decode()
        exits = (-6,) if name == "os:abort" else (1, 2)
        yield Case(f"name: {command} {shown!r}", args, _good, exits, trusts=":" in name, prints=name in ("builtins:print", "this:d"))
    for shown, name in {"escape bytes": "\x1b[31m.pt2", "right to left": "\u202e2tp.m.pt2", "a newline": "a\nb.pt2", "surrogates": "\udcff.pt2", "a colon": "a:b", "a dash": "--json", "255 letters": "x" * 255}.items():
        yield Case(f"name: a good file named with {shown}", ("inspect", "--", name), lambda p, n=name: p.write(n, p.goods.pt2), (0,))  # type: ignore[misc]
        yield Case(f"name: a bad file named with {shown}", ("inspect", "--", name), lambda p, n=name: p.write(n, b"PK\3\4junk"))  # type: ignore[misc]
    kinds: dict[str, Callable[[Place], Any]] = {
        "a pipe": lambda p: os.mkfifo(p.here / "m"), "a link to itself": lambda p: os.symlink("m", p.here / "m"), "an empty file": lambda p: p.write("m", b""), "an empty folder": lambda p: (p.here / "m").mkdir(),
        "a link to nothing": lambda p: os.symlink("no", p.here / "m"), "a link to /dev/zero": lambda p: os.symlink("/dev/zero", p.here / "m"), "zeros": lambda p: p.write("m", bytes(1 << 20)), "a script": lambda p: p.write("m", b"#!/bin/sh\nid"),
        "a PNG": lambda p: p.write("m", b"\x89PNG\r\n\x1a\n" + bytes(100)), "an executable": lambda p: p.write("m", b"\x7fELF" + bytes(100)), "JSON": lambda p: p.write("m", b"{}"), "a sparse file of 64 GB": lambda p: _sparse(p, 64 << 30),
        "gzip": lambda p: p.write("m", b"\x1f\x8b" + bytes(100)), "a tar": lambda p: p.write("m", b"x" * 257 + b"ustar" + bytes(1000)), "GGUF": lambda p: p.write("m", b"GGUF" + bytes(100)), "a Git LFS pointer": lambda p: p.write("m", b"version https://git-lfs.github.com/spec/v1\n"),
        "Python's pickle of a module": lambda p: p.write("m", b"\x80\x04cpayload\nX\n."), "a folder in folders": lambda p: (p.here / ("m/" * 200)).mkdir(parents=True), "10000 files": lambda p: [p.write(f"m/{i}", b"") for i in range(10_000)],
    }  # fmt: skip
    for kind, make in kinds.items():
        yield Case(f"model: {kind}", ("inspect", "m"), make)


def _sparse(place: Place, size: int) -> None:
    path = place.write("m", b"\x08\x09:")
    os.truncate(path, size)


def factory_cases() -> Iterator[Case]:
    """Factories that end, write, hang or return other things: they are trusted, the rest of the promises hold."""
    bodies = {
        "exits with 7": "raise SystemExit(7)", "exits with 0": "raise SystemExit(0)", "exits": "import sys; sys.exit()", "exits with a text": "raise SystemExit('\\x1b[31mbye')", "interrupts": "raise KeyboardInterrupt",
        "raises": "raise ValueError('\\x1b[31m' + 'x' * 5000)", "raises BaseException": "raise BaseException('x')", "raises GeneratorExit": "raise GeneratorExit", "recurses": "net()", "returns None": "pass", "returns a text": "return '\\x1b[31m'",
        "returns a class": "from torch import nn; return nn.Linear", "prints": "print('\\x1b[31m' * 3); raise ValueError('\\x1b[31m')", "fills memory": "return bytearray(1 << 60)", "raises without str": "class E(Exception):\n        __str__ = None\n    raise E",
    }  # fmt: skip
    for name, body in bodies.items():
        for where in ("when called", "when imported"):
            if where == "when imported" and ("return" in body or name == "recurses" or body == "pass"):
                continue
            text = f"def net():\n    {body}\n" if where == "when called" else f"{body.replace(chr(10) + '    ', chr(10))}\n"
            yield Case(f"factory: {name} {where}", ("inspect", "nets:net"), lambda p, t=text: p.write("nets.py", t), (130,) if name == "interrupts" else (1,), trusts=True, prints=name == "prints")  # type: ignore[misc]
    broken = {"no Python": "def (", "NUL": "\0", "no UTF-8": b"\xff\xfe", "deep": "(" * 10_000, "nothing": ""}
    for name, content in broken.items():
        yield Case(f"factory: a module of {name}", ("inspect", "nets:net"), lambda p, c=content: p.write("nets.py", c), (1,), trusts=True)  # type: ignore[misc]
    yield Case("factory: good", ("inspect", "nets:net"), lambda p: p.write("nets.py", FACTORY), (0,), trusts=True)
    for name in ("torch.py", "lnrewrite.py", "sitecustomize.py", "json.py", "numpy.py", "transformers.py"):
        evil: Callable[..., Any] = lambda p, n=name: (_good(p), p.write(n, PAYLOAD.replace("{marker!r}", repr(p.marker))))  # noqa: E731
        yield Case(f"the current folder holds {name}", ("inspect", "m.pt2"), evil, (0,))


def output_cases() -> Iterator[Case]:
    """Where something is to be written."""
    kinds: dict[str, tuple[str, Callable[[Place], Any], tuple[int, ...]]] = {
        "empty": ("", _good, (1, 2)), "a space": (" ", _good, (1, 2)), "a dot": (".", _good, (1, 2)), "two dots": ("..", _good, (1, 2)), "a file there": ("o.pt2", lambda p: (_good(p), p.write("o.pt2", b"mine")), (1, 2)),
        "a folder there": ("o.pt2", lambda p: (_good(p), (p.here / "o.pt2").mkdir()), (1, 2)), "no folder": ("no/o.pt2", _good, (1, 2)), "a file as folder": ("m.pt2/o.pt2", _good, (1, 2)), "the model": ("m.pt2", _good, (1, 2)),
        "a link to the model": ("o.pt2", lambda p: (_good(p), os.symlink("m.pt2", p.here / "o.pt2")), (1, 2)), "a link to nothing": ("o.pt2", lambda p: (_good(p), os.symlink("no", p.here / "o.pt2")), (0, 1, 2)), "another suffix": ("o.exe", _good, (1, 2)),
        "no suffix": ("o", _good, (0, 1, 2)), "/dev/null": ("/dev/null", _good, (1, 2)), "/proc": ("/proc/o.pt2", _good, (1, 2)), "NUL": ("o\udc00.pt2", _good, (0, 1, 2)), "5000 letters": ("x" * 5000 + ".pt2", _good, (1, 2)),
        "escape bytes": ("\x1b[31m.pt2", _good, (0, 1, 2)), "a read-only folder": ("locked/o.pt2", lambda p: (_good(p), (p.here / "locked").mkdir(0o500)), (0, 1, 2)), "a dash": ("-", _good, (1, 2)), "a pipe": ("o.pt2", lambda p: (_good(p), os.mkfifo(p.here / "o.pt2")), (1, 2)),
        "a disk that is full": ("/dev/full", _good, (1, 2)), "a folder that ends in a slash": ("no/", _good, (1, 2)), "a suffix alone": (".pt2", _good, (0, 1, 2)),
    }  # fmt: skip
    for name, (output, make, exits) in kinds.items():
        writes = ("o", "o.pt2", output, "locked") if 0 in exits else ()
        yield Case(f"output: {name}", (*OPT, "-o", output), make, exits, writes)
        if output in ("o.pt2", "", " ", ".", "..", "/dev/null", "-") and name not in ("a file there", "the model"):
            yield Case(f"output: {name}, forced", (*OPT, "-o", output, "--force"), make, exits if name != "a link to the model" else (0, 1, 2), writes or ("o.pt2", "m.pt2"))
    yield Case("output: a file there, forced", (*OPT, "-o", "o.pt2", "--force"), lambda p: (_good(p), p.write("o.pt2", b"mine")), (0,), ("o.pt2",))
    yield Case("output: an evil .onnx there, forced", (*OPT, "-o", "o.onnx", "--force"), lambda p: (_good(p), os.symlink(p.outside / "secret.bin", p.here / "o.onnx")), (0, 1), ("o.onnx",))
    held: dict[str, Callable[[Place], Any]] = {
        "a precious file": lambda p: p.write("o/precious", b"x"), "a checkpoint and a precious file": lambda p: (p.write("o/precious", b"x"), [p.write(f"o/{n}", c) for n, c in p.goods.llama.items()]), "a precious folder": lambda p: p.write("o/sub/precious", b"x"),
        "a checkpoint and a precious folder": lambda p: (p.write("o/mine/precious", b"x"), [p.write(f"o/{n}", c) for n, c in p.goods.llama.items()]), "a config.json of something else": lambda p: (p.write("o/config.json", b'{"my": "app"}'), p.write("o/app.py", b"x")),
        "a hidden file": lambda p: p.write("o/.git/HEAD", b"x"), "a link to the outside": lambda p: os.symlink(p.outside, p.here / "o"), "a checkpoint with a link": lambda p: ([p.write(f"o/{n}", c) for n, c in p.goods.llama.items()], os.symlink(p.outside, p.here / "o" / "x")),
        "a model of yours": lambda p: p.write("o/model.safetensors", b"x"), "a file": lambda p: p.write("o", b"mine"),
    }  # fmt: skip
    for name, fill in held.items():
        linked = name == "a link to the outside"  # the link is replaced, and what it leads to is left alone
        yield Case(f"output: a folder that holds {name}, forced", ("opt", "f", "--preset", "exact", "-o", "o", "--force"), lambda p, f=fill: (_folder(p), f(p)), (0,) if linked else (1,), ("o",) if linked else ())  # type: ignore[misc]
        yield Case(f"output: a folder that holds {name}", ("opt", "f", "--preset", "exact", "-o", "o"), lambda p, f=fill: (_folder(p), f(p)))  # type: ignore[misc]
    for output in ("f", "f/x", ".", "..", "", "f/.", "./f", "{outside}", "{here}"):
        for force in ((), ("--force",)):
            yield Case(f"output: the folder {output or 'empty'}{' forced' if force else ''}", ("opt", "f", "--preset", "exact", "-o", output, *force), _folder, (1, 2))


def room_cases() -> Iterator[Case]:
    """Disks that are full: nothing is left, nothing crashes."""
    inputs: Callable[[Place], Any] = lambda place: (_good(place), place.write("data.npy", array()), _folder(place))  # noqa: E731
    commands = {
        "convert": PERI, "opt": (*OPT, "-o", "o.pt2"), "opt to ONNX": (*OPT, "-o", "o.onnx"), "export": ("export", "m.pt2", "-o", "o.onnx", "--target", "cpu"), "a folder": ("opt", "f", "--preset", "exact", "-o", "o"), "heal": HEAL,
    }  # fmt: skip
    for name, args in commands.items():
        for room in (1024, 4096, 20_000):  # what the command says is in files too
            fits = room == 20_000 and "-o" in args and "o.onnx" in args
            keeps = ("o.pt2.run", "o.pt2.run/log.jsonl", "o.pt2.run/run.json") if name == "heal" else ()  # --resume goes on
            yield Case(f"output: {name} with room for {room} bytes", args, inputs, (0,) if fits else (1,), ("o.onnx",) if fits else (), keeps=keeps, room=room)


def option_cases() -> Iterator[Case]:
    """Numbers and texts that options do not take."""
    rows: dict[str, tuple[str, ...]] = {
        "--seed": ("-1", "x", "9" * 400, str(1 << 64), "1e3", "", "nan", "\x1b[31m"), "--device": ("evil", "cuda", "cuda:99", "meta", "", "\x1b[31m", "cpu:7", "x" * 5000), "--blocks": ("", "*" * 5000, "9" * 400, "first:1e400%", "first:-5%", "5-2", "0-999999999999", "{}", ";", "(" * 1000, "[" * 500, "\x1b[31m", "last:nan%"),
        "--norm": ("evil", "", "\x1b[31m"), "--to": ("evil", "", "\x1b[31m", "x" * 5000), "--calibrate": ("", "no.npy", "/dev/zero", "/dev/stdin", ".", "os:environ", "builtins:exit", "sys:exit", "\x1b[31m", "a:b", "itertools:count"),
        "--factory": ("", "x", "os:abort2", "\x1b[31m", "builtins:exit"), "--evil": ("x",), "--input": ("x",),
    }  # fmt: skip
    for option, values in rows.items():
        unused = option in ("--factory", "--input")  # a .pt2 needs neither; verify and heal give them to two models
        for value in values:
            shown = value[:30].encode("unicode_escape").decode()
            loose = option in ("--blocks", "--device") or (option, value) in (("--factory", "builtins:exit"),) or option in ("--factory", "--seed")
            named = option == "--calibrate" and ":" in value or option == "--factory"
            yield Case(f"option: {option} {shown!r}", (*PERI, option, value), _good, (0, 1, 2) if unused or loose and value[:1] in ("o", "b", "m", "c", "x", "0", "1", "9", "f", "l", "*", "") else (1, 2), ("o.pt2",), trusts=named)
    for value in ("nan", "-1", "inf", "-inf", "", "x", "1e400", "\x1b[31m", "-0.0", "9" * 400):
        shown = value[:30].encode("unicode_escape").decode()
        yield Case(f"verify: --tolerance {shown!r}", ("verify", "m.pt2", "m.pt2", "--tolerance", value), _good, (0, 1, 2) if value == "-0.0" else (1, 2))
    texts = ("", ",", "canonicalize," * 5000 + "canonicalize", "evil", "\x1b[31m", "place{to=peri", "place{to=" + "x" * 5000 + "}", "place{" * 500, "os:system", "payload:X", "rescale-stream{by=nan}", "rescale-stream{by=0}", "rescale-stream{by=inf}", "rescale-stream{by=1e400}",
             "rescale-stream{by=-1}", "rescale-stream{by=9**9}", "rotate-stream{block=0}", "rotate-stream{seed=-1}", "place{to=peri eps=nan}", "\0", "canonicalize{x=1}", "../outside:X", "fold-affine{", "fold-affine}")  # fmt: skip
    for text in texts:
        shown = text[:40].encode("unicode_escape").decode()
        yield Case(f"pipeline: {shown!r}", ("opt", "m.pt2", "--passes", text, "-o", "o.pt2"), _good, (0, 1, 2) if text.startswith("canonicalize,") or "rescale" in text else (1, 2), ("o.pt2",))
    for args in (("export", "m.pt2", "-o", "o.onnx", "--target", "evil"), ("export", "m.pt2", "-o", "o.onnx", "--target", "cpu", "--opset", "-1"), ("export", "m.pt2", "-o", "o.onnx", "--target", "cpu", "--opset", "9" * 30),
                 ("export", "m.pt2", "-o", "o.onnx", "--target", "cpu", "--dtype", "\x1b[31m"), ("export", "m.pt2", "-o", "", "--target", "cpu"), ("bench", "m.pt2", "--threads", "9" * 30), ("bench", "m.pt2", "--rounds", "0"), ("explain", "\x1b[31m"), ("explain", "x" * 5000),
                 ("passes", "\x1b[31m"), ("passes", "os:system"), ("evil",), ("\x1b[31m",), ("x" * 5000,), ("inspect",), ("inspect", "m.pt2", "m.pt2"), ("opt", "m.pt2", "--preset", "\x1b[31m", "-o", "o.pt2"), ("opt", "m.pt2", "--preset", "", "-o", "o.pt2")):  # fmt: skip
        shown = " ".join(a[:20] for a in args).encode("unicode_escape").decode()
        yield Case(f"command: {shown}", args, _good, (1, 2))


def environment_cases() -> Iterator[Case]:
    """Variables of the environment that other libraries look at."""
    for name, value in {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1", "TORCH_LOGS": "+all", "TORCHDYNAMO_VERBOSE": "1", "HF_HUB_OFFLINE": "0", "HF_TRUST_REMOTE_CODE": "1", "TRANSFORMERS_VERBOSITY": "debug", "PYTHONWARNINGS": "error",
                        "LNREWRITE_TRUST": "1", "TORCH_SHOW_CPP_STACKTRACES": "1", "PYTHONSTARTUP": "payload.py"}.items():  # fmt: skip

        def make(place: Place) -> None:
            from .archives import archive
            from .pickled import payloads

            place.write("m.pt2", archive(place, {"data/sample_inputs/model.pt": payloads(place.marker)["a global"]}))

        yield Case(f"environment: {name}={value}", ("inspect", "m.pt2"), make, environment=((name, value),))
