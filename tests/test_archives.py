"""Torch's archives by what is allowed: what torch does not write runs nothing, costs little and is told in a line."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import random
import struct
import sys
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zoo
from commands import fails
from lnrewrite.errors import Code, LnrewriteError, Untrusted
from lnrewrite.loading.archives import DEPTH, JSON_LIMIT
from lnrewrite.loading.formulas import Forbidden, check_guard, check_size
from lnrewrite.loading.identify import identify
from lnrewrite.loading.open import open_module
from lnrewrite.loading.pickles import LEGACY_MAGIC, unsafe_names
from lnrewrite.quiet import LOGGER, quiet
from tiers import rows

Content = dict[str, bytes]
MODEL, WEIGHTS, CONSTANTS = (
    "models/model.json",
    "data/weights/model_weights_config.json",
    "data/constants/model_constants_config.json",
)
SAVED = sorted(zoo.CASES)
CODE = "__import__('os').mkdir('sign')"
_WATCHED: list[str] = []
_WATCHING = [False]


class Trap:
    """Make a folder when it is unpickled: the sign that a pickle ran."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("sign",)


class Net(nn.Module):
    """A network with a weight, a buffer, a constant, and inputs of two names."""

    def __init__(self) -> None:
        super().__init__()
        self.mid = nn.Linear(4, 4)
        self.register_buffer("scale", torch.arange(4.0).expand(3, 4)[0])
        self.shift = torch.ones(4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": self.mid(x).reshape(x.shape[0] * 3, 4) * self.scale + self.shift, "sum": x.sum() + y.sum()}


@pytest.fixture(scope="module")
def content() -> Content:
    """Return the members of a small program by their names below the root."""
    dims = {"x": {0: torch.export.Dim.DYNAMIC}, "y": None}
    inputs = {"x": torch.ones(2, 3, 4), "y": torch.ones(2)}
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(Net().eval(), (), inputs, dynamic_shapes=dims, strict=False), buffer)
    with zipfile.ZipFile(buffer) as held:
        return {name.split("/", 1)[1]: held.read(name) for name in held.namelist()}


def packed(content: Content, root: str = "m/", **how: Any) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", **how) as new:
        for name, held in content.items():
            new.writestr(root + name, held)
    return buffer.getvalue()


def _watch(event: str, args: tuple[Any, ...]) -> None:
    runs = event in ("os.system", "subprocess.Popen", "socket.connect") or event == "os.mkdir" and "sign" in repr(args)
    if _WATCHING[0] and runs:
        _WATCHED.append(f"{event} {args}")


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Go to an empty folder, and check at the end that nothing ran and nothing is left there."""
    if not getattr(sys, "_lnrewrite_watch", False):  # a hook stays for good
        sys.addaudithook(_watch)
        sys._lnrewrite_watch = True  # type: ignore[attr-defined]
    monkeypatch.chdir(tmp_path)
    _WATCHED.clear()
    _WATCHING[0] = True
    yield tmp_path
    _WATCHING[0] = False
    assert not _WATCHED
    assert os.listdir() == ["m.pt2"]


def told(held: bytes, *allowed: str) -> LnrewriteError | None:
    """Open an archive; return what is wrong with it, in one line and with one of the codes, or None."""
    Path("m.pt2").write_bytes(held)
    try:
        open_module(identify("m.pt2"))
    except LnrewriteError as error:
        assert error.code in (allowed or ("LN011", "LN012", "LN014", "LN015")), error
        assert error.code in set(Code) and "\n" not in str(error) and str(error).isprintable()
        assert len(str(error)) < 700
        return error
    assert not allowed
    return None


# ---- what torch writes ----


@pytest.mark.parametrize("name", rows(SAVED, sample=SAVED[1::17]))
def test_all_that_torch_writes_is_allowed(name: str, tmp_path: Path) -> None:
    zoo.program(name).save(tmp_path / "m.pt2")
    assert identify(str(tmp_path / "m.pt2")).unsafe == ()


@pytest.mark.parametrize("root", ["m/", "a long name, with ünïcode.v2/"])
def test_the_file_as_it_is_opens_under_any_name(content: Content, watched: Path, root: str) -> None:
    assert told(packed(content | {"extra/a/b.txt": b"kept"}, root)) is None


class Bits(nn.Module):
    """A network of the operators whose names begin with underscores."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x &= 7
        return (x & 6 | x ^ 1) << 2 >> 1


def test_operators_that_are_named_like_pythons_own_are_allowed(tmp_path: Path) -> None:
    program = torch.export.export(Bits(), (torch.ones(3, dtype=torch.long),))
    assert any("__rshift__" in str(node.target) for node in program.graph.nodes)
    torch.export.save(program, tmp_path / "m.pt2")
    assert identify(str(tmp_path / "m.pt2")).unsafe == ()


# ---- members ----

_EVIL = pickle.dumps(Trap())
_STRANGE = [
    "data/constants/OPAQUE_OBJ_0",
    "Data/Constants/opaque_obj_0",
    "data/constants/opaque_obj_x/y",
    "data/constants//opaque_obj_0",
    "data/constants/./tensor_9",
    "data/weights/../constants/opaque_obj_0",
    "data/weights/model.pt",
    "data/weights/weight_9.pt",
    "data\\constants\\opaque_obj_0",
    "models/modelxjson",
    "models/sub/model.json",
    "MODELS/MODEL2.JSON",
    "Models/model.json",
    "version",
    "serialized_exported_program.json",
    "code/a.py",
    "data/mtia/x",
    "data/executorch/x",
    "extra/../models/model.json",
    "extra/a\x00b",
    "/etc/passwd",
    "..",
]


@pytest.mark.parametrize("name", _STRANGE)
def test_a_member_that_torch_does_not_write_is_refused(content: Content, watched: Path, name: str) -> None:
    assert told(packed(content | {name: _EVIL}), "LN015", "LN012")
    config = json.loads(content[CONSTANTS])
    entry = {"path_name": name.rpartition("constants/")[2], "is_param": False, "use_pickle": False}
    config["config"]["shift2"] = {**next(iter(config["config"].values())), **entry}
    assert told(packed(content | {name: _EVIL, CONSTANTS: json.dumps(config).encode()}), "LN015", "LN012")


@pytest.mark.parametrize("start", ["data/constants/opaque_obj_", "data/constants/custom_obj_", "data/aotinductor/m/"])
def test_what_torch_would_run_needs_trust(content: Content, watched: Path, start: str) -> None:
    assert told(packed(content | {f"{start}0": _EVIL}), "LN012")


def test_every_member_that_torch_reads_is_needed(content: Content, watched: Path) -> None:
    for name in content:
        if name not in ("archive_version", "byteorder", ".data/version", ".data/serialization_id"):
            assert told(packed({k: v for k, v in content.items() if k != name}), "LN015", "LN011"), name


def test_a_member_given_twice_or_beside_the_root_is_refused(content: Content, watched: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate"):
        buffer = io.BytesIO(packed(content))
        with zipfile.ZipFile(buffer, "a") as more:
            more.writestr(f"m/{MODEL}", content[MODEL])
    assert told(buffer.getvalue(), "LN015")
    with zipfile.ZipFile(buffer := io.BytesIO(packed(content)), "a") as more:
        more.writestr("other/data/x", b"")
    assert told(buffer.getvalue(), "LN015")


def test_two_directories_in_one_file_are_refused(content: Content, watched: Path) -> None:
    """The record at the end points to one directory, as torch's reader finds it; another lies where Python looks."""
    good, evil = packed(content), packed({name: bytes(len(held)) for name, held in content.items()})
    size, at = struct.unpack("<II", good[-10:-2])
    both = evil[: at + size] + good[: at + size] + good[-22:]
    with zipfile.ZipFile(io.BytesIO(both)) as seen:  # Python sees the good one, and no reason to complain
        assert seen.read(f"m/{MODEL}") == content[MODEL]
    assert told(both, "LN015")
    for other in (b"x" + good, good + b"x", good[:-2] + b"\4\0evil", good + good[-22:]):
        assert told(other, "LN015", "LN011")


@pytest.mark.parametrize("name", [MODEL, WEIGHTS, "extra/a", "data/sample_inputs/model.pt", "archive_format"])
def test_a_bomb_is_not_unpacked(content: Content, watched: Path, name: str) -> None:
    held = packed(content | {name: bytes(64 * 2**20)}, compression=zipfile.ZIP_DEFLATED)
    assert len(held) < 2**20
    tracemalloc.start()
    try:
        assert told(held, "LN015")
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("place", [MODEL, WEIGHTS, CONSTANTS])
@pytest.mark.parametrize("deep", [DEPTH + 1, 100_000])
def test_deep_json_is_damage(content: Content, watched: Path, place: str, deep: int) -> None:
    nested = b'{"config": ' + b"[" * deep + b"]" * deep + b"}"
    assert told(packed(content | {place: nested}), "LN015")
    assert deep < JSON_LIMIT


def test_weights_bombs_are_not_unpacked(watched: Path) -> None:
    buffer = io.BytesIO()
    torch.save(Net().state_dict(), buffer)
    with zipfile.ZipFile(buffer) as held:
        content = {name.split("/", 1)[1]: held.read(name) for name in held.namelist()}
    bomb = packed(content | {"data.pkl": bytes(64 * 2**20)}, compression=zipfile.ZIP_DEFLATED)
    assert told(bomb, "LN015")
    assert told(packed(content | {"DATA.pkl": _EVIL}), "LN015")
    assert told(packed(content | {"other.pkl": _EVIL}), "LN015")
    assert told(packed(content | {"data.pkl": _EVIL}), "LN012")
    assert told(packed(content), "LN013")


SAMPLES = "data/sample_inputs/model.pt"


@pytest.mark.parametrize(
    "key",
    [
        '"+str(__import__("os").mkdir("sign"))+"',  # torch writes the keys into a string of the code that checks inputs
        "it's",
        "a\\",
        "\n",
        b"k",  # made by _codecs.encode, which finds quotes in plain words
    ],
)
def test_keys_of_example_inputs_are_plain(content: Content, watched: Path, key: str | bytes) -> None:
    buffer = io.BytesIO()
    torch.save(((), {"x": {key: torch.ones(2, 3, 4)}, "y": torch.ones(2)}), buffer)
    assert told(packed(content | {SAMPLES: buffer.getvalue()}), "LN012")


def test_tensors_that_tell_where_in_memory_to_read_need_trust(tmp_path: Path) -> None:
    """Not every release of torch checks them, even where only weights may be loaded."""
    far = torch.sparse_coo_tensor([[10**6]], [1.0], (4,), check_invariants=False)
    with pytest.warns(UserWarning, match="nested"):
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for number, weight in enumerate((far, nested)):
        path = tmp_path / f"{number}.pt"
        torch.save({"weight": weight}, path)
        assert any("_rebuild_" in what for what in identify(str(path)).unsafe)


def test_every_pickle_of_torchs_older_format_is_read() -> None:
    """Torch compares the number that the format starts with, and not the bytes that it is pickled as."""
    buffer = io.BytesIO()
    torch.save({"weight": torch.ones(2), "trap": Trap()}, buffer, _use_new_zipfile_serialization=False)
    held = buffer.getvalue()
    assert held.startswith(LEGACY_MAGIC)
    number = pickle.dumps(pickle.loads(held), protocol=0)
    assert unsafe_names(io.BytesIO(number + held[len(LEGACY_MAGIC) :])) == (f"{os.mkdir.__module__}.mkdir",)


# ---- JSON ----

_META = [
    ("sizes", [{"as_int": 10**6}, {"as_int": 4}]),
    ("sizes", [{"as_int": -1}, {"as_int": 4}]),
    ("sizes", [{"as_int": 2**70}, {"as_int": 4}]),
    ("sizes", [{"as_expr": {"expr_str": CODE}}, {"as_int": 4}]),
    ("strides", [{"as_int": 10**9}, {"as_int": 1}]),
    ("strides", [{"as_int": -4}, {"as_int": 1}]),
    ("storage_offset", {"as_int": 10**6}),
    ("storage_offset", {"as_int": -1}),
]


@pytest.mark.parametrize(("key", "value"), _META)
def test_a_weight_that_its_file_does_not_hold_is_damage(content: Content, watched: Path, key: str, value: Any) -> None:
    config = json.loads(content[WEIGHTS])
    config["config"]["mid.weight"]["tensor_meta"][key] = value
    assert told(packed(content | {WEIGHTS: json.dumps(config).encode()}), "LN015")


def test_a_number_repeated_without_end_is_damage(content: Content, watched: Path) -> None:
    config = json.loads(content[WEIGHTS])
    meta = config["config"]["mid.weight"]["tensor_meta"]
    meta |= {"sizes": [{"as_int": 10**11}, {"as_int": 1}], "strides": [{"as_int": 0}, {"as_int": 1}]}
    assert told(packed(content | {WEIGHTS: json.dumps(config).encode()}), "LN015")
    file = f"data/weights/{config['config']['mid.weight']['path_name']}"
    assert told(packed(content | {WEIGHTS: json.dumps(config).encode(), file: b""}), "LN015")


@pytest.mark.parametrize(
    "target",
    [
        "torch.ops.aten.save.default",
        "torch.ops.aten.from_file.default",
        "torch.ops.aten.warn.default",
        "torch.ops.aten._print.default",
        "torch.ops.prim.RaiseException.default",
        "torch.ops.prim.Print.default",
        "torch.ops.load_library",
        "torch.ops.import_module",
        "torch.ops.profiler._record_function_enter.default",
        "torch.ops.higher_order.call_torchbind",
        "torch.ops.higher_order.triton_kernel_wrapper_mutation",
        "torch.os.system",
        "torch.load",
        "torch.hub.load",
        "_operator.attrgetter",
        "_operator.methodcaller",
        "_operator.call",
        "_operator.__class__",
        "math.__loader__",
        "torch.sym_not.__globals__",
        "torch.ops.aten.__dict__.clear",
        "torch.ops.aten.__class__.mro",
        "torch.ops.aten._dir.append",
        "torch.ops.aten.name.zfill",
        "torch.ops.aten.add._op",
        "torch.ops.aten.add.overloads",
        "#executorch:x",
    ],
)
def test_an_operator_that_is_none_needs_trust(content: Content, watched: Path, target: str) -> None:
    tree = json.loads(content[MODEL])
    tree["graph_module"]["graph"]["nodes"][0]["target"] = target
    assert told(packed(content | {MODEL: json.dumps(tree).encode()}), "LN012")


@pytest.mark.parametrize(
    "node",
    [
        {"type": "builtins.dict", "context": '[{"__enum__": true, "fqn": "evil:X", "name": "a"}]'},
        {"type": "builtins.dict", "context": '[{"\\u005f_enum__": true, "fqn": "evil:X", "name": "a"}]'},
        {"type": "builtins.dict", "context": [{"__enum__": True, "fqn": "evil:X", "name": "a"}]},
        {
            "type": "collections.defaultdict",
            "context": {"default_factory_module": "evil", "default_factory_name": "X", "dict_context": []},
        },
        {"type": "transformers.evil.Evil", "context": "[]"},
        {"type": "builtins.dict", "context": '["a\'] or open()"]'},
    ],
)
@pytest.mark.parametrize("key", ["in_spec", "out_spec"])
def test_a_tree_that_imports_is_refused(
    content: Content,
    watched: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    node: dict[str, Any],
) -> None:
    reach = tmp_path_factory.mktemp("reach")
    (reach / "evil.py").write_text("import os\nos.mkdir('sign')\n")
    monkeypatch.syspath_prepend(reach)
    tree = json.loads(content[MODEL])
    tree["graph_module"]["module_call_graph"][0]["signature"][key] = json.dumps([1, {**node, "children_spec": []}])
    assert told(packed(content | {MODEL: json.dumps(tree).encode()}), "LN012", "LN015")
    assert "evil" not in sys.modules


@pytest.mark.parametrize("name", ["metadata", "as_string", "as_strings", "torch_version", "target", "in_spec", "nodes"])
def test_a_value_named_like_a_key_of_the_schema_hides_nothing(content: Content, watched: Path, name: str) -> None:
    tree = json.loads(content[MODEL])
    graph = tree["graph_module"]["graph"]
    values = graph["tensor_values"]
    values[name] = json.loads(json.dumps(next(iter(values.values()))))
    assert told(packed(content | {MODEL: json.dumps(tree).encode()})) is None
    values[name]["sizes"] = [{"as_expr": {"expr_str": CODE}}]
    assert told(packed(content | {MODEL: json.dumps(tree).encode()}), "LN012")
    del values[name]
    graph["sym_int_values"][name] = {"as_expr": {"expr_str": CODE}}
    assert told(packed(content | {MODEL: json.dumps(tree).encode()}), "LN012")
    graph["sym_int_values"] = {}
    operator = {name: {"as_operator": "torch.os.system"}, "other": {"as_none": True}}
    graph["nodes"][0]["inputs"][0]["arg"] = {"as_string_to_argument": operator}
    assert told(packed(content | {MODEL: json.dumps(tree).encode()}), "LN012")


def test_symbols_are_not_counted_without_end(content: Content, watched: Path) -> None:
    tree = json.loads(content[MODEL])
    tree["range_constraints"]["u9999999999"] = {"min_val": 0, "max_val": 9}
    assert told(packed(content | {MODEL: json.dumps(tree).encode()}), "LN015")


_STRINGS = [CODE, "9**9**9**9", "Pow(9,Pow(9,9))", "\x1b[31m", "a" * 100_000, "..", "", "NaN", "torch.os.system", "é\0"]
_VALUES: list[Any] = [*_STRINGS, None, True, -1, 2**40, 2**200, 1.5, [], {}, [[]], {"__enum__": True, "fqn": "os:x"}]


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each object or list of a JSON tree with each of its keys."""
    if isinstance(node, dict | list):
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            yield node, key
            yield from places(node[key])


def mutant(content: Content, seed: int) -> bytes:
    """Return an archive with one to three changes of members, of JSON, or of bytes."""
    chance = random.Random(seed)
    held = dict(content)
    for _ in range(chance.randint(1, 3)):
        name = chance.choice([MODEL, MODEL, MODEL, WEIGHTS, CONSTANTS, *held])
        if name not in held:
            continue
        kind = chance.choice(["json", "json", "json", "json", "name", "bytes", "gone"])
        if kind == "json" and name.endswith(".json"):
            try:
                tree = json.loads(held[name])
                owner, key = chance.choice(list(places(tree)))
            except (ValueError, IndexError):  # an earlier change broke it, or left nothing
                continue
            if chance.random() < 0.2:
                del owner[key]
            elif chance.random() < 0.2 and isinstance(owner, dict):
                owner[chance.choice(_STRINGS)] = owner.pop(key)
            else:
                owner[key] = chance.choice(_VALUES)
            held[name] = json.dumps(tree).encode()
        elif kind == "name":
            changed = [name.upper(), name + "/", name.replace("/", "//"), "../" + name, name + "x", name.swapcase()]
            held[chance.choice(changed)] = held[name] if chance.random() < 0.5 else _EVIL
        elif kind == "bytes" and held[name]:
            at = chance.randrange(len(held[name]))
            held[name] = chance.choice([held[name][:at], held[name][:at] + b"\xff" + held[name][at + 1 :], _EVIL, b""])
        elif kind == "gone":
            del held[name]
    whole = bytearray(packed(held))
    if chance.random() < 0.15:
        whole[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
    return bytes(whole)


@pytest.mark.parametrize("seed", rows(range(600), sample=range(20)))
def test_mutants_run_nothing_and_are_told_in_one_line(
    content: Content, watched: Path, seed: int, capfd: pytest.CaptureFixture[str]
) -> None:
    told(mutant(content, seed) if seed else packed(content))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["torch", "torch.export", "torch.export.pt2_archive", "torch.new"])
def test_torchs_logs_are_kept_unless_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a part of torch has a handler of its own, and where its logger is made later."""
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logger = logging.getLogger(name if name != "torch.new" else "torch")
    logger.addHandler(handler)
    try:
        with quiet("torch"):
            logging.getLogger(name).warning("hidden")
        assert said.getvalue() == ""
        monkeypatch.setattr(LOGGER, "level", logging.DEBUG)
        LOGGER._cache.clear()  # type: ignore[attr-defined]
        with quiet("torch"):
            logging.getLogger(name).warning("shown")
        assert said.getvalue() == "shown\n"
    finally:
        logger.removeHandler(handler)
        LOGGER._cache.clear()  # type: ignore[attr-defined]


# ---- formulas ----


@pytest.mark.parametrize(
    "text",
    [
        "Symbol('s0', positive=True, integer=True)",
        "Add(Mul(Integer(-1), Symbol('s0', integer=True)), Integer(8))",
        "FloorDiv(Add(Symbol('s0'), Integer(7)), Integer(8))",
        "Max(Integer(1), Min(Symbol('s0'), Symbol('u1')))",
        "Pow(Symbol('s0'), Integer(2))",
        "Pow(Symbol('s0'), Integer(-1))",
        "PowByNatural(Integer(2), Symbol('s0'))",
        "Mul(Float('0.5', precision=53), ToFloat(Symbol('s0')))",
        "And(GreaterThan(Symbol('s0'), Integer(1)), Or(Eq(Symbol('s0'), Integer(2)), true))",
        "RShift(Symbol('s0'), Integer(3))",
        "BitwiseFn_bitwise_and(Symbol('s0'), Integer(7))",
        "FloorDiv(Add(" + ", ".join(f"Symbol('s{n}')" for n in range(20)) + "), Integer(4))",
        "s0//2 + 1",
        "-(s0 % 8)**2",
    ],
)
def test_sizes_that_torch_writes_are_allowed(text: str) -> None:
    check_size(text)


@pytest.mark.parametrize(
    "text",
    [
        CODE,
        "9**9**9**9",
        "Pow(Integer(9), Pow(Integer(9), Integer(9)))",
        "Pow(Pow(Pow(Integer(9), Integer(64)), Integer(64)), Integer(64))",
        "LShift(Integer(1), Integer(10000000000))",
        "1 << 10000000000",
        "RShift(Integer(1), Integer(10000000000))",
        "FloorDiv(Add(" + ", ".join(f"Symbol('s{n}')" for n in range(60)) + "), Add(Symbol('s0'), Symbol('s1')))",
        'Symbol("s0")',
        "s0 ^ 99",
        "Pow(Add(Symbol('s0'), Symbol('s1'), Symbol('s2')), Integer(60))",
        "Float('1', precision=999999999)",
        "Float('1e999999999')",
        "Max(" + ",".join(f"Symbol('s{n}')" for n in range(60)) + ")",
        "-" * 5000 + "s0",
        "(" * 5000 + "s0" + ")" * 5000,
        "Symbol('s0').func",
        "Symbol(open('x'))",
        "Symbol('s0', commutative=open('x'))",
        "factorial(Integer(100000))",
        "1e999999999",
        "s0 + 1e-999999999",
        "1_0.5",
        "exec",
        "[s0 for s0 in (1,)]",
        "(lambda: 1)()",
        "L['x'].size()[0]",
        "s0\n",
        "s0 if s1 else s2",
        "f'{s0}'",
        "'s0'",
    ],
)
def test_sizes_that_run_or_never_end_are_refused(text: str) -> None:
    with pytest.raises(Forbidden):
        check_size(text)


@pytest.mark.parametrize(
    "text",
    [
        "L['x'].size()[0] >= 2",
        "not (L['x']['k'][0].size()[1] % 8 == 0 and L['x'].stride()[0] != 1)",
        "L['mode'] == 'floor'",
        "math.floor(L['x'].size()[0] / 2) == max(1, L['y'].size()[0])",
        "L['x'].size()[0] <= inf",
        "torch.sym_max(L['x'].size()[0], torch.sym_min(L['x'].size()[1], 3)) > 5",
        "torch._sym_sqrt(torch.sym_float(L['x'].size()[0])) > math.log2(3) and round(L['x'].size()[0] / 3) != math.nan",
        "L['x'].size()[0] ^ 7 < 2",
    ],
)
def test_guards_that_torch_writes_are_allowed(text: str) -> None:
    check_guard(text)


@pytest.mark.parametrize(
    "text",
    [
        CODE,
        "L.__class__",
        "L['x'].__reduce__()",
        "L['x'].tofile('a')",
        "L['x'].size(open('a'))",
        "math.__loader__",
        "L['x\\'] or open()']",
        "L['x'].size()[0] ** L['x'].size()[0]",
        "9**9**9**L['x'].size()[0]",
        "(y := 1)",
        "L['x'] @ L['x']",
        'L["x"].size()[0] >= 2',
        "L['x'].size()[0] >= 2 # note",
        "L['\\x78'].size()[0] >= 2",
        "torch.load('a')",
        "torch.sym_float.__globals__",
        "math.sym_float(2)",
    ],
)
def test_guards_that_run_are_refused(text: str) -> None:
    with pytest.raises(Forbidden):
        check_guard(text)


_NUMBERS = st.integers(-(2**40), 2**40).map(str)
_POWERS = st.recursive(
    _NUMBERS,
    lambda inner: st.tuples(inner, st.sampled_from(["**", "*", "+", "<<", "//"]), inner).map(
        lambda t: f"({''.join(t)})"
    ),
    max_leaves=12,
)


@given(_POWERS)
def test_what_is_allowed_stays_small(text: str) -> None:
    try:
        check_size(text)
    except Forbidden:
        return
    try:
        value = eval(text)
    except (ArithmeticError, ValueError):  # 0 ** -1, 1 << -1
        return
    assert isinstance(value, float) or value.bit_length() <= 2**13


# ---- what trust would run ----


def test_what_is_not_torchs_own_is_told_first_and_all_of_it_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from commands import run

    monkeypatch.chdir(tmp_path)
    harmless = [nn.Linear(1, 1), nn.LayerNorm(1), nn.Dropout(), nn.Embedding(1, 1), nn.ReLU(), nn.GELU()]
    torch.save(nn.ModuleDict({"z": nn.Sequential(*harmless), "y": Net()}), "m.pt")
    torch.save([*harmless, Trap()], "t.pt")
    for file, first in (("m.pt", f"{__name__}.Net"), ("t.pt", "posix.mkdir")):
        error = fails("LN012", 1, "inspect", file)
        assert error["why"].startswith(f"loading it would run {first} and")
        assert error["runs"][0] == first and "torch.nn.modules.linear.Linear" in error["runs"]
        loud = run("inspect", file, "-v").stderr
        assert all(f"\n  {name}\n" in f"{loud}\n" for name in error["runs"])


def test_names_are_shown_without_control_characters() -> None:
    error = Untrusted("m", ["a\x1b[31mb", "x" * 5000])
    assert "\x1b" not in str(error) and "\x1b" not in json.dumps(error.to_dict()) and len(str(error)) < 400
