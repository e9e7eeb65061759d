"""Hostile .pt2 archives: what members hold, and what is done to the zip."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from . import zips
from .archives import CONSTANTS, MODEL, WEIGHTS, Edit, archive, edited, replacing, root
from .goods import saved, spread
from .pickled import payloads
from .place import Case, Place, inspecting
from .zips import Entry


def pickle_cases() -> Iterator[Case]:
    """Sample inputs that are other pickles."""
    for name in payloads("x"):

        def make(place: Place, name: str = name) -> bytes:
            return archive(place, {"data/sample_inputs/model.pt": payloads(place.marker)[name]})

        yield inspecting(f"pt2: sample inputs: {name}", "m.pt2", make)


def key_cases() -> Iterator[Case]:
    """Sample inputs with keys that torch's `module()` writes into code."""
    places: dict[str, Callable[[Any, Any], Any]] = {
        "an argument": lambda x, evil: ((evil,), {}), "the keywords": lambda x, evil: ((), evil), "an inner dict": lambda x, evil: ((x, [evil]), {}),
    }  # fmt: skip
    keys = {"a word": "word", "a call": '"+str(__import__("os").mkdir({marker!r}))+"', "a quote": "'", "a line": "\n", "an escape": "\x1b[31m"}
    for name, put in places.items():
        for kind, key in keys.items():

            def make(place: Place, put: Callable[[Any, Any], Any] = put, key: str = key) -> bytes:
                x = spread(2, 4, 16).clone()
                inputs = put(x, {key.replace("{marker!r}", repr(place.marker)): x})
                return archive(place, {"data/sample_inputs/model.pt": saved(inputs)})

            yield inspecting(f"pt2: sample inputs: {kind} as a key of {name}", "m.pt2", make, (0, 1) if kind == "a word" else (1,))
    for size in ((1 << 30, 4, 16), (2, 1 << 32, 16)):
        yield inspecting(f"pt2: sample inputs: {list(size)} of stride 0", "m.pt2", lambda place, size=size: archive(  # type: ignore[misc]
            place, {"data/sample_inputs/model.pt": saved(((spread(*size),), {}))}))  # fmt: skip
    yield Case("pt2: exported with a call as a key", ("inspect", "m.pt2"), lambda place: _exported(place, keys["a call"]))


def _exported(place: Place, key: str) -> None:
    """Export a net that takes a dict, with such a key."""
    import torch

    key = key.replace("{marker!r}", repr(place.marker))

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = torch.nn.LayerNorm(16), torch.nn.Linear(16, 16)

        def forward(self, held: dict[str, torch.Tensor]) -> torch.Tensor:
            return held[key] + self.linear(self.norm(held[key]))

    torch.export.save(torch.export.export(Net().eval(), ({key: torch.zeros(2, 4, 16)},)), place.here / "m.pt2")


def member_cases() -> Iterator[Case]:
    """Members that have no business there, empty ones, and bombs."""
    for member in (
        "data/aotinductor/model/x.so", "DATA/AOTINDUCTOR/model/x.so", "data/aotinductor/model/x.wrapper.cpp", "code/x.py", "data.pkl",
        "constants.pkl", "models/evil.py", "data/weights/x.pkl", "data/sample_inputs/other.pt", "data/sample_inputs/OTHER.PT",
        "data/weights/\x1b[31m", "data/weights/\u202egnp", "data/executorch/x.pte",
    ):  # fmt: skip

        def foreign(place: Place, member: str = member) -> bytes:
            return archive(place, {}, Entry(member.encode(), payloads(place.marker)["a global"], flags=0x800))

        yield inspecting(f"pt2: member {member.encode('unicode_escape').decode()}", "m.pt2", foreign)
    for member in ("extra/x", "models/b.json", "data/weights/weight_0", "data/constants/b.json", "data/sample_inputs/b.pt",
                   "data/weights/b_config.json", "archive_format", "byteorder", ".data/version"):  # fmt: skip

        def big(place: Place, member: str = member) -> bytes:
            return archive(place, {member: None}, zips.bomb(member.encode()))

        yield inspecting(f"pt2: a bomb of 1 GB as {member}", "m.pt2", big, (0, 1) if member == "extra/x" else (1,))
        if member in ("models/b.json", "data/weights/weight_0"):
            yield inspecting(
                f"pt2: a bomb that says 10 bytes as {member}",
                "m.pt2",
                lambda place, member=member: archive(place, {member: None}, zips.bomb(member.encode(), told=10)),  # type: ignore[misc]
            )
    for member in (MODEL, WEIGHTS, CONSTANTS, "data/sample_inputs/model.pt", "archive_format", "archive_version", "byteorder",
                   "data/weights/weight_0", "data/constants/tensor_0"):  # fmt: skip
        for name, content in {"missing": None, "empty": b"", "junk": b"\xff\0\x1b[31m", "deep": b"[" * 200_000}.items():
            loose = member in ("archive_version", "byteorder", "data/sample_inputs/model.pt", "archive_format")
            loose |= name == "deep" and member.endswith("_0")  # they are numbers, whatever they were

            def other(place: Place, member: str = member, content: bytes | None = content) -> bytes:
                return archive(place, {member: content})

            yield inspecting(f"pt2: {member} {name}", "m.pt2", other, (0, 1) if loose else (1,))


def _entry(**values: Any) -> Edit:
    """Return what changes the first weight's entry in the configuration."""

    def edit(node: Any) -> None:
        entry = next(iter(node["config"].values()))
        for key, value in values.items():
            if key in entry["tensor_meta"]:
                entry["tensor_meta"][key] = value
            elif value is None:
                entry.pop(key)
            else:
                entry[key] = value

    return edit


def config_cases() -> Iterator[Case]:
    """Configurations of weights and constants that are not what they are to be."""
    sizes = {"huge": [1 << 40, 16], "of 10^11 elements": [100_000_000_000], "negative": [-1, 16], "2^63": [1 << 63], "2^70": [1 << 70],
             "none": [], "other": [7, 3]}  # fmt: skip
    entries: dict[str, dict[str, Any]] = {
        "no path": {"path_name": None}, "a path that is a number": {"path_name": 7}, "a path of dots": {"path_name": "../../../secret.bin"},
        "an absolute path": {"path_name": "/etc/passwd"}, "a path to nothing": {"path_name": "weight_1000"},
        "a path to the model": {"path_name": "../../models/model.json"}, "a path with NUL": {"path_name": "weight_0\0x"},
        "a path that is a list": {"path_name": ["weight_0"]}, "an empty path": {"path_name": "weight_"}, "pickled": {"use_pickle": True},
        "pickled by text": {"use_pickle": "yes"}, "no parameter": {"is_param": "no"}, "dtype 99": {"dtype": 99},
        "dtype text": {"dtype": "float32"}, "dtype float64": {"dtype": 8}, "layout 99": {"layout": 99}, "layout sparse": {"layout": 1},
        "strides beyond": {"strides": [{"as_int": 1 << 30}, {"as_int": 1}]}, "negative strides": {"strides": [{"as_int": -16}, {"as_int": 1}]},
        "no strides": {"strides": []}, "an offset beyond": {"storage_offset": {"as_int": 1 << 40}},
        "a negative offset": {"storage_offset": {"as_int": -8}}, "sizes that are formulas": {"sizes": [{"as_expr": {"expr_str": "9**9**9"}}]},
        "another device": {"device": {"type": "cuda", "index": 0}}, "an unknown device": {"device": {"type": "\x1b[31m", "index": -5}},
        "the meta device": {"device": {"type": "meta", "index": None}}, "sizes null": {"sizes": None}, "tensor_meta a list": {"tensor_meta": []},
    }  # fmt: skip
    entries |= {f"sizes {k}": {"sizes": [{"as_int": n} for n in v]} for k, v in sizes.items()}
    entries["10^11 elements of stride 0"] = {"sizes": [{"as_int": 10**11}], "strides": [{"as_int": 0}]}
    for name, values in entries.items():
        harmless = name in ("no parameter",)
        yield edited(f"weights: {name}", WEIGHTS, _entry(**values), (0, 1) if harmless else (1,))
    whole: dict[str, Any] = {"a list": [], "null": None, "a number": 7, "text": "x", "config a list": {"config": []},
                             "config null": {"config": None}, "an entry a number": {"config": {"lifted_tensor_0": 7}},
                             "an entry null": {"config": {"lifted_tensor_0": None}}, "no config": {}}  # fmt: skip
    for name, value in whole.items():
        for member in (WEIGHTS, CONSTANTS):
            kind = "weights" if member == WEIGHTS else "constants"
            yield inspecting(f"pt2: {kind} configuration {name}", "m.pt2",
                             lambda place, m=member, v=value: archive(place, {m: json.dumps(v).encode()}))  # type: ignore[misc]  # fmt: skip


ODD: dict[str, Any] = {"null": None, "a list": [], "an object": {}, "a number": -7, "2^70": 1 << 70, "NaN": float("nan"), "text": "\x1b[31mx",
                       "5000 letters": "x" * 5000}  # fmt: skip


def graph_cases() -> Iterator[Case]:
    """A graph whose values are of other kinds, or which is no graph."""
    for key in ("graph_module", "nodes", "tensor_values", "range_constraints", "signature", "opset_version", "schema_version", "sizes",
                "as_int", "dtype", "input_specs", "name", "inputs"):  # fmt: skip
        for name, value in ODD.items():
            loose = key in ("range_constraints", "opset_version", "schema_version", "name", "as_int", "dtype", "sizes", "tensor_values", "inputs")
            yield edited(f"{key} is {name}", MODEL, replacing(key, value), (0, 1) if loose else (1,))

    def cycle(node: Any) -> None:
        graph = node["graph_module"]["graph"]["nodes"]
        graph[0]["inputs"][0]["arg"] = {"as_tensor": {"name": graph[-1]["outputs"][0]["as_tensor"]["name"]}}

    def long(node: Any) -> None:
        graph = node["graph_module"]["graph"]["nodes"]
        relu = next(n for n in graph if "relu" in n["target"])
        at = graph.index(relu)
        chain, held = [], relu["inputs"][0]["arg"]["as_tensor"]["name"]
        values = node["graph_module"]["graph"]["tensor_values"]
        for i in range(100_000):
            chain.append({**relu, "name": f"r{i}", "inputs": [{"name": "self", "arg": {"as_tensor": {"name": held}}, "kind": 1}],
                          "outputs": [{"as_tensor": {"name": f"r{i}"}}], "metadata": {}})  # fmt: skip
            values[f"r{i}"], held = values[relu["outputs"][0]["as_tensor"]["name"]], f"r{i}"
        relu["inputs"][0]["arg"]["as_tensor"]["name"] = held
        graph[at:at] = chain

    def twice(node: Any) -> None:
        graph = node["graph_module"]["graph"]["nodes"]
        graph.append(graph[0])

    for number in (1 << 30, 1 << 40, (1 << 63) - 1):
        yield edited(f"all sizes are {number}", MODEL, replacing("as_int", number))
    yield edited("a cycle", MODEL, cycle)
    yield edited("100000 nodes in a row", MODEL, long, (0, 1))
    yield edited("a node twice", MODEL, twice)
    yield edited("no nodes", MODEL, lambda node: node["graph_module"]["graph"].update(nodes=[]))
    yield edited("a name that is code", MODEL, lambda node: _renamed(node, "x); __import__('os').system('true'); (x"))
    yield edited("a name that is a keyword", MODEL, lambda node: _renamed(node, "import"), (0, 1))  # torch finds another name


def _renamed(node: Any, name: str) -> Any:
    text = json.dumps(node)
    return json.loads(text.replace('"relu"', json.dumps(name)))


def zip_cases() -> Iterator[Case]:
    """What is done to the archive as a zip."""
    for name, trick in zips.TRICKS.items():
        loose = name in ("a member of 65535 letters", "65000 members", "a root of dots", "checksums that lie", "a comment with an end record")

        def made(place: Place, trick: Any = trick) -> bytes:
            return bytes(trick(zips.read(place.goods.pt2)))

        yield inspecting(f"pt2: zip: {name}", "m.pt2", made, (0, 1) if loose else (1,))
    for i in range(1, 6):
        yield inspecting(f"pt2: zip: cut at {i}/6", "m.pt2", lambda place, i=i: zips.cuts(place.goods.pt2)[f"cut at {i}/6"])  # type: ignore[misc]

    def both(place: Place) -> bytes:
        shown = zips.read(place.goods.pt2)
        name = f"{root(place)}/data/sample_inputs/model.pt".encode()
        evil = [Entry(e.name, payloads(place.marker)["a global"]) if e.name == name else e for e in shown]
        return zips.two_directories(shown, evil)

    yield inspecting("pt2: zip: two directories", "m.pt2", both)
    yield inspecting("pt2: good, packed anew", "m.pt2", lambda place: archive(place, {}), (0,))
