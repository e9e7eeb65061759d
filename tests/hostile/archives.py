"""Hostile .pt2 archives."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from . import zips
from .pickled import PAYLOAD, payloads
from .place import Case, Place, inspecting
from .zips import Entry

Edit = Callable[[Any], Any]
CONSTANTS = "data/constants/model_constants_config.json"
WEIGHTS = "data/weights/model_weights_config.json"
MODEL = "models/model.json"


def root(place: Place) -> str:
    """Return the folder that the archive's members lie in."""
    return zips.read(place.goods.pt2)[0].name.decode().split("/")[0]


def archive(place: Place, edits: dict[str, Edit | bytes | None], *more: Entry) -> bytes:
    """Return the good archive with members edited (JSON), replaced or taken out, and others put in."""
    base, entries = root(place), []
    for entry in zips.read(place.goods.pt2):
        change = edits.get(entry.name.decode().split("/", 1)[1], entry.content)
        if callable(change):
            node = json.loads(entry.content)
            made = change(node)
            change = json.dumps(node if made is None else made).encode()
        if change is not None:
            entries.append(Entry(entry.name, change))
    named = [e if e.name.startswith(b"=") else Entry(**(vars(e) | {"name": f"{base}/".encode() + e.name})) for e in more]
    return zips.pack(zips.put(entries, *(Entry(**(vars(e) | {"name": e.name.lstrip(b"=")})) for e in named)))


def edited(name: str, member: str, edit: Edit, exits: tuple[int, ...] = (1,)) -> Case:
    """Return the case of one JSON member that was edited."""
    return inspecting(f"pt2: {name}", "m.pt2", lambda place: archive(place, {member: edit}), exits)


def walk(node: Any, change: Callable[[str, Any], Any], key: str = "") -> Any:
    """Return JSON with `change(key, value)` in place of every leaf and object, from the leaves up."""
    if isinstance(node, dict):
        node = {k: walk(v, change, k) for k, v in node.items()}
    elif isinstance(node, list):
        node = [walk(v, change, key) for v in node]
    return change(key, node)


def replacing(key: str, value: Any) -> Edit:
    """Return what puts a value in place of everything under one key."""
    return lambda node: walk(node, lambda k, v: value if k == key else v)


OPAQUE = (
    "data/constants/opaque_obj_0", "data/constants/OPAQUE_OBJ_0", "data/Constants/opaque_obj_0", "DATA/CONSTANTS/opaque_obj_0",
    "data/constants/opaque_obj_x/y", "data/constants/opaque_obj_//y", "data/constants/custom_obj_0", "data/constants/CUSTOM_OBJ_0",
    "data/constants/tensor_9", "data/constants/x.pt", "data/weights/opaque_obj_0", "data/weights/weight_99",
    "data/constants/tensor_0/../opaque_obj_0", "data/constants/./opaque_obj_0", "data/constants/opaque_obj_\u0661",
)  # fmt: skip


def opaque_cases() -> Iterator[Case]:
    """A member that torch unpickles freely, under all names that torch finds it by."""
    meta = {
        "dtype": 7, "sizes": [{"as_int": 1}], "requires_grad": False, "device": {"type": "cpu", "index": None},
        "strides": [{"as_int": 1}], "storage_offset": {"as_int": 0}, "layout": 7,
    }  # fmt: skip
    for member in OPAQUE:
        for pickled in (False, True):
            for tensor in (False, True):
                if tensor and pickled:
                    continue

                def make(place: Place, member: str = member, pickled: bool = pickled, tensor: bool = tensor) -> bytes:
                    folder = "/".join(member.split("/")[:2])
                    path = member[len(folder) + 1 :].lower() if member[-1:].isascii() else member[len(folder) + 1 :]
                    entry = {
                        "path_name": path, "is_param": False, "use_pickle": pickled, "tensor_meta": meta if tensor else None,
                    }  # fmt: skip
                    config = WEIGHTS if "weights" in folder else CONSTANTS
                    evil = Entry(member.encode(), payloads(place.marker)["a global"], flags=0x800)
                    return archive(place, {config: lambda node: node["config"].update(evil=entry)}, evil)

                kind = "pickled" if pickled else "a tensor" if tensor else "plain"
                bytes_alone = tensor and member.endswith(("tensor_9", "weight_99"))
                yield inspecting(f"pt2: unpickled member {member}, {kind}", "m.pt2", make, (0, 1) if bytes_alone else (1,))


FORMULAS = {
    "os": "__import__('os').mkdir({marker!r})", "eval": "eval(\"__import__('os').mkdir({marker!r})\")", "tower": "9**9**9**9",
    "power": "9**(9**9)", "shift": "1 << 10**10", "binary": "2**(2**40)", "factorial": "factorial(10**8)",
    "binomial": "binomial(10**9, 10**8)", "prime": "prime(10**12)", "digits": "N(pi, 10**9)", "exponent": "1e999999999",
    "hexadecimal": "0x" + "f" * 100_000, "class": "().__class__.__base__.__subclasses__()", "lambda": "(lambda: 0)()",
    "comprehension": "[x for x in range(10**12)]", "attribute": "s0.func", "open": "open({marker!r}, 'w')",
    "zero": "1/0", "infinity": "oo", "no number": "nan", "long sum": "+".join(["1"] * 50_000), "brackets": "(" * 5000 + "1" + ")" * 5000,
    "minus": "-" * 100_000 + "1", "escape": "\x1b[31m", "empty": "", "builtins": "__builtins__", "name": "s" * 100_000,
    "imaginary": "sqrt(-1)", "number of 10^6 digits": "9" * 1_000_000, "Symbol": "Symbol('x', commutative=open)", "NUL": "1\0+1",
    "Integer tower": "Integer(10)**Integer(10)**Integer(10)**10", "repeat": "'x'*10**10", "Mod": "Mod(9**9**9, 7)",
}  # fmt: skip


def formula_cases() -> Iterator[Case]:
    """Sizes that are formulas: torch hands them to sympy, which evaluates Python."""
    for name, text in FORMULAS.items():

        def make(place: Place, text: str = text) -> bytes:
            said = text.replace("{marker!r}", repr(place.marker))
            return archive(place, {MODEL: replacing("expr_str", said)})

        yield inspecting(f"pt2: formula: {name}", "m.pt2", make)
    evil = "__import__('os').mkdir({marker!r})"
    for member in ("models/modelxjson", "models/model2xjson", "MODELS/MODEL2.JSON", "models/evil.json", "models/sub/a.json"):

        def elsewhere(place: Place, member: str = member) -> bytes:
            held = next(e for e in zips.read(place.goods.pt2) if e.name.decode().endswith(MODEL))
            node = replacing("expr_str", evil.replace("{marker!r}", repr(place.marker)))(json.loads(held.content))
            return archive(place, {}, Entry(member.encode(), json.dumps(node).encode()))

        yield inspecting(f"pt2: formula in the member {member}", "m.pt2", elsewhere)
    yield edited("guards that run", MODEL, lambda node: node.update(guards_code=["__import__('os').system('true')"]))


def spec_cases() -> Iterator[Case]:
    """Specifications of inputs: torch imports what they name."""
    enum = {"__enum__": True, "fqn": "payload:X", "name": "a"}
    specs: dict[str, Any] = {
        "an enum as context": [1, {"type": "builtins.dict", "context": json.dumps([enum]), "children_spec": []}],
        "an enum as type": [1, {"type": enum, "context": None, "children_spec": []}],
        "an enum inside": enum,
        "a class": [1, {"type": "payload.X", "context": "null", "children_spec": []}],
        "a named tuple of a module": [1, {"type": "collections.namedtuple", "context": '"payload.X"', "children_spec": []}],
        "os.system": [1, {"type": "os.system", "context": '"true"', "children_spec": []}],
        "a default dict": [1, {"type": "collections.defaultdict", "context": '{"default_factory_module": "payload",'
                               ' "default_factory_name": "X", "dict_context": []}', "children_spec": []}],
        "another protocol": [99, {"type": None, "context": None, "children_spec": []}],
        "a protocol of text": ["1", {"type": None, "context": None, "children_spec": []}],
        "a number": 7, "null": None, "a list": [], "no type": [1, {}],
    }  # fmt: skip
    texts = {name: json.dumps(spec) for name, spec in specs.items()}
    texts["no JSON"] = "(lambda: 0)()"
    texts["100000 deep"] = '[1,{"type":"builtins.tuple","context":"null","children_spec":[' * 100_000
    texts["10^6 leaves"] = json.dumps([1, {"type": "builtins.tuple", "context": "null", "children_spec": [
        {"type": None, "context": None, "children_spec": []}] * 300_000}])  # fmt: skip
    for key in ("in_spec", "out_spec"):
        for name, text in texts.items():

            def make(place: Place, key: str = key, text: str = text) -> Any:
                place.write("lib/payload.py", PAYLOAD.replace("{marker!r}", repr(place.marker)))
                place.write("m.pt2", archive(place, {MODEL: replacing(key, text)}))

            yield Case(f"pt2: {key}: {name}", ("inspect", "m.pt2"), make, library="lib")


TARGETS = (
    "os.system", "builtins.eval", "torch.load", "torch.hub.load", "torch.ops.load_library", "torch.ops.aten.save.default",
    "torch.ops.aten.from_file.default", "torch.ops.aten.warn.default", "torch.ops.prim.RaiseException.default", "_operator.call",
    "_operator.methodcaller", "_operator.attrgetter", "math.factorial", "torch.ops.aten.unknown.default", "torch.ops.higher_order.cond",
    "torch.ops.aten.set_.source_Tensor", "torch.ops.c10d.send.default", "torch.ops.aten.empty.memory_format", "torch.ops.aten.full.default",
    "torch.ops.__class__", "torch.ops.aten.relu.__init__", "#torch.os", "torch.ops.aten", "", "torch.sym_max", "\x1b[31m", "x" * 100_000,
    "torch.ops.inductor.accumulate_grad_.default", "torch.ops.prim.Print.default", "torch.ops.aten.__getitem__.t", "torch.os.system",
    "torch.ops.torchvision.nms.default", "torch.ops.aten.relu_.default",
)  # fmt: skip


def effect_cases() -> Iterator[Case]:
    """Calls for their effect alone, given what they take."""
    texts = {
        "torch.ops.aten.warn.default": ("message", "stacklevel"), "torch.ops.prim.RaiseException.default": ("msg", "cls"),
        "torch.ops.aten.save.default": ("item", "filename"), "torch.ops.prim.Print.default": (), "torch.ops.aten._assert_async.msg": ("self", "assert_msg"),
        "torch.ops.aten._print.default": ("s",), "torch.ops.aten.manual_seed.default": ("seed",), "torch.ops.profiler._record_function_enter.default": ("name", "args"),
        "torch.ops.aten.get_gradients.default": ("context_id",), "torch.ops.aten.sym_constrain_range.default": ("size",),
    }  # fmt: skip
    for target, names in texts.items():

        def make(place: Place, target: str = target, names: tuple[str, ...] = names) -> bytes:
            kinds: dict[str, Any] = {"stacklevel": {"as_int": 1}, "item": {"as_tensor": {"name": "x"}}, "self": {"as_tensor": {"name": "x"}}, "filename": {"as_string": place.marker},
                                     "seed": {"as_int": 7}, "context_id": {"as_int": 7}, "size": {"as_int": 7}}  # fmt: skip
            given = [{"name": n, "arg": kinds.get(n, {"as_string": "\x1b[31mx"}), "kind": 1} for n in names]
            call = {"target": target, "inputs": given, "outputs": [], "metadata": {}, "is_hop_single_tensor_return": None, "name": "effect"}
            return archive(place, {MODEL: lambda node: node["graph_module"]["graph"]["nodes"].insert(0, call)})

        harmless = ("_assert_async", "sym_constrain_range", "manual_seed")
        yield inspecting(f"pt2: effect of {target}", "m.pt2", make, (0, 1) if any(h in target for h in harmless) else (1,))


def trusted_cases() -> Iterator[Case]:
    """Files that run something, and were trusted: the other promises hold."""
    for name in ("a global", "eval", "no end", "an extension", "lists in lists"):

        def make(place: Place, name: str = name) -> None:
            place.write("m.pt2", archive(place, {"data/sample_inputs/model.pt": payloads(place.marker)[name]}))

        yield Case(f"pt2: trusted sample inputs: {name}", ("inspect", "m.pt2", "--trust-pickle"), make, (0, 1), runs=True)


def target_cases() -> Iterator[Case]:
    """Calls of other things than operators, and of operators that do something."""
    for target in TARGETS:
        shown = target[:40].encode("unicode_escape").decode()

        def make(place: Place, target: str = target) -> bytes:
            def edit(node: Any) -> None:
                for call in node["graph_module"]["graph"]["nodes"]:
                    if "relu" in call["target"]:
                        call["target"] = target
                        if "from_file" in target:
                            given = {"filename": {"as_string": str(place.outside / "secret.bin")}, "shared": {"as_bool": False},
                                     "size": {"as_int": 64}}  # fmt: skip
                            call["inputs"] = [{"name": k, "arg": v, "kind": 1} for k, v in given.items()]
                        if "aten.save" in target:
                            call["inputs"].append({"name": "filename", "arg": {"as_string": place.marker}, "kind": 1})

            return archive(place, {MODEL: edit})

        harmless = target in ("torch.ops.aten.relu_.default",)
        yield inspecting(f"pt2: target {shown!r}", "m.pt2", make, (0, 1) if harmless else (1,))


CONSTANTS_MADE = {
    "2^29 zeros": ("full", [1 << 29], 1), "2^31 zeros": ("full", [1 << 31], 1), "2^40 zeros": ("full", [1 << 40], 1),
    "zeros in three axes": ("full", [1 << 11] * 3, 1), "2^31 drawn numbers": ("rand", [1 << 31], 1), "2^26 zeros twelve times": ("full", [1 << 26], 12),
}  # fmt: skip


def constant_cases() -> Iterator[Case]:
    """Small programs that make large constants, and declare them small."""

    def call(kind: str, name: str, **given: Any) -> Any:
        inputs = [{"name": key, "arg": value, "kind": 1} for key, value in given.items()]
        made = {"outputs": [{"as_tensor": {"name": name}}], "metadata": {}, "is_hop_single_tensor_return": None, "name": name}
        return {"target": f"torch.ops.aten.{kind}", "inputs": inputs, **made}

    def edit(node: Any, kind: str, sizes: list[int], count: int) -> None:
        graph = node["graph_module"]["graph"]
        values, nodes = graph["tensor_values"], graph["nodes"]
        place = next(i for i, n in enumerate(nodes) if "relu" in n["target"])
        held = nodes[place]["inputs"][0]["arg"]["as_tensor"]["name"]
        fills = {"full": {"fill_value": {"as_float": 0.0}}, "rand": {}}[kind]
        new = [call(f"{kind}.default", f"big{i}", size={"as_ints": sizes}, **fills) for i in range(count)]
        for i in range(count):
            new.append(call("sum.default", f"few{i}", self={"as_tensor": {"name": f"big{i}"}}))
            new.append(call("add.Tensor", f"more{i}", self={"as_tensor": {"name": held}}, other={"as_tensor": {"name": f"few{i}"}}))
            declared = values[held] | {"sizes": [], "strides": []}
            values |= {f"big{i}": declared | {"sizes": [{"as_int": 4}], "strides": [{"as_int": 1}]}, f"few{i}": declared}
            values[f"more{i}"] = values[held]
            held = f"more{i}"
        nodes[place]["inputs"][0]["arg"]["as_tensor"]["name"] = held
        nodes[place:place] = new

    for name, (kind, sizes, count) in CONSTANTS_MADE.items():
        yield edited(f"a constant: {name}", MODEL, partial(edit, kind=kind, sizes=sizes, count=count))
