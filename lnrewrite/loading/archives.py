"""What a torch.export archive (.pt2) may hold: all of it is listed here, and everything else is refused.

An auditor reads this file's tables, `formulas.py` (sizes and guards) and `zips.py` (one directory, no compression, the
same members for Python and for torch). What torch writes and where it says so, in releases 2.11 to 2.15:

- members: torch/csrc/export/pt2_archive_constants.h; torch/export/pt2_archive/_package.py `_package_exported_programs`,
  `_package_state_dict`, `_package_constants`, `_package_extra_files`; `.data/` and byteorder by `PyTorchStreamWriter`
  (caffe2/serialize/inline_container.cc). Also written there, and not allowed: AOTInductor's code, ExecuTorch's files,
  custom objects and (from 2.13) opaque ones; `_load_constants` unpickles the two last, whatever weights_only says.
- JSON: torch/_export/serde/schema.py (8.17 in 2.11, 8.20 from 2.12); read in torch/_export/serde/serialize.py, which
  evaluates `expr_str` (`_parse_sym_expr`), looks up `target` attribute by attribute (`deserialize_operator`; from 2.13
  `deserialize_node` takes any callable), counts up to the number of an unbacked symbol; and in torch/utils/_pytree.py,
  which imports modules for `__enum__` and for a defaultdict's factory. From 2.13 `handle_call_function` also writes the
  functions of vmap and jvp (torch/_functorch/predispatch.py), which outlive a call and are not allowed.
- guards, and the keys of example inputs: torch/export/_unlift.py `_convert_guards_code_to_fn` executes both.

A hazard is what --trust-pickle may allow. What torch does not write, what is larger than the file, and what is too much
work is damage, trusted or not.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import zipfile
from collections.abc import Iterator
from typing import IO, Any

from .foreign import Json
from .formulas import Forbidden, check_guard, check_size
from .pickles import PLAIN, unsafe_names
from .zips import Damaged, Members

_MODEL = r"[\w][\w. -]{0,99}"
_MEMBERS = re.compile(
    rf"archive_format|archive_version|byteorder|\.data/(version|serialization_id)|models/{_MODEL}\.json"
    rf"|data/weights/(weight_\d{{1,7}}|{_MODEL}_weights_config\.json)"
    rf"|data/constants/(tensor_\d{{1,7}}|{_MODEL}_constants_config\.json)"
    rf"|data/sample_inputs/{_MODEL}\.pt|extra/.+"
)
_HAZARDS = {
    "data/aotinductor/": "compiled code (AOTInductor)",
    "data/constants/custom_obj_": "a custom TorchScript object",
    "data/constants/opaque_obj_": "a pickled object",
}
_BESIDE = ("data/weights/{}_weights_config.json", "data/constants/{}_constants_config.json", "data/sample_inputs/{}.pt")
_OF_MODEL = ("_config.json", ".pt")
_PAYLOADS = {"data/weights/": re.compile(r"weight_\d{1,7}"), "data/constants/": re.compile(r"tensor_\d{1,7}")}

_NAMESPACES = "aten|prims|quantized|quantized_decomposed|torchvision|torchaudio|lnrewrite"
_REFUSED = (  # files, the terminal, what outlives a call, Python's own; `__and__` and the like are operators
    r"save|from_file|warn|_print|manual_seed|set_grad_enabled|_cufft\w*|name|_dir|__(?!i?(and|x?or|[lr]shift)__)\w+"
)
_OVERLOAD = r"(?!(_|op\b|op_overloads\b|overloads\b))\w+"
"""The name of an overload, and not of what else torch/_ops.py keeps beside the overloads."""
_HIGHER = (
    "cond|while_loop|scan|associative_scan|map|map_impl|wrap_with_set_grad_enabled|wrap_with_autocast|invoke_subgraph"
    "|auto_functionalized|auto_functionalized_v2|out_dtype|flex_attention|tag_activation_checkpoint|hints_wrapper"
)
_SYMBOLIC = "getitem|eq|ne|le|ge|lt|gt|neg|pos|abs|mul|add|sub|floordiv|mod|pow|truediv|and_|or_|not_|lshift|rshift|xor"
_OPERATOR = re.compile(
    rf"torch\.ops\.({_NAMESPACES})\.(?!({_REFUSED})\b)\w+\.{_OVERLOAD}|torch\.ops\.higher_order\.({_HIGHER})"
    rf"|torch\._?sym_(?!_)\w+|_operator\.({_SYMBOLIC})|math\.(trunc|floor|ceil|sqrt)"
)
_FACTORIES = {"dict", "list", "set", "tuple", "int", "float", "str", "bool"}
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)  # possessive: nothing is kept to go back to
_NO_MARKS = bytes(b for b in range(256) if b not in b"[]{},")
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_RANGED = re.compile(r"[a-zA-Z]+(\d{1,5})?")

JSON_LIMIT, DEPTH, PARTS, FORMULAS = 64 * 2**20, 100, 4_000_000, 200_000
"""Bytes of one JSON, how deep it nests, how many parts it has; letters of all different sizes and guards."""
SPEC_PARTS, REPEATED = 200_000, 64
"""How many parts a tree of inputs or outputs has, and how often a stored number may be repeated (stride 0)."""
_STRIDED = 7
"""The layout of every tensor that is written by its bytes (schema.py `Layout`)."""
_BYTES = {4: 4, 5: 8, 6: 2, 3: 2, 7: 4, 8: 8, 9: 4, 10: 8, 11: 16, 13: 2, 28: 2, 34: 4, 35: 8}
"""Bytes of a number by its code (schema.py `ScalarType`) where it is not one byte."""


def program_hazards(stream: IO[bytes]) -> tuple[str, ...]:
    """List what loading a torch.export archive would run beyond building tensors and calling operators.

    Raises Damaged for what torch does not write, and for what would take too much time or memory.
    """
    try:
        return tuple(sorted(set(_hazards(Members(stream)))))
    except (zipfile.BadZipFile, EOFError) as error:  # a member that is read as a stream
        raise Damaged(f"a member cannot be read: {error}") from error
    except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        told = str(error).split("\n", 1)[0][:80]
        raise Damaged(f"its JSON is not what torch writes ({type(error).__name__}: {told})") from error


def _hazards(members: Members) -> Iterator[str]:
    names = set(members.names())
    models = [name[7:-5] for name in names if name.startswith("models/")]
    beside = {form.format(model) for form in _BESIDE for model in models}
    if missing := sorted(beside - names):
        raise Damaged(f"it lacks {missing[0]}")
    for name in names:
        what = next((what for start, what in _HAZARDS.items() if name.startswith(start)), None)
        if what:
            yield what
        elif not _MEMBERS.fullmatch(name) or name.endswith(_OF_MODEL) and name not in beside:
            raise Damaged(f"it holds {name[:80]!r}, which torch.export does not write")
    for model in models:
        weights, constants, inputs = (form.format(model) for form in _BESIDE)
        for config in (weights, constants):
            yield from _payload_hazards(members, config)
        if members.size(inputs):
            with members.open(inputs) as given:
                yield from unsafe_names(given, plain=True)
        yield from _model_hazards(_json(members, f"models/{model}.json"))


# ---- tensors ----


def _payload_hazards(members: Members, config: str) -> Iterator[str]:
    """Yield what reading the tensors of one configuration would run; each must lie in the file that it names."""
    folder = config[: config.rindex("/") + 1]
    for name, entry in _json(members, config)["config"].items():
        path = entry["path_name"]
        if not isinstance(path, str) or entry["use_pickle"] is not False and entry["use_pickle"] is not True:
            raise Damaged(f"{config} names no file for {name[:80]!r}")
        if not _PAYLOADS[folder].fullmatch(path):
            yield f"the file {folder + path[:60]!r}"
        elif folder + path not in members.names():
            raise Damaged(f"it lacks {folder}{path}")
        elif entry["use_pickle"]:
            with members.open(folder + path) as pickled:
                yield from unsafe_names(pickled)
            yield "a pickled tensor"
        else:
            _check_tensor(name, entry["tensor_meta"], members.size(folder + path))


def _check_tensor(name: str, meta: Json, held: int) -> None:
    """Raise Damaged unless a tensor of that description fits into `held` bytes, or is on the meta device."""
    sizes, strides = ([_number(v["as_int"]) for v in meta[key]] for key in ("sizes", "strides"))
    offset, width = _number(meta["storage_offset"]["as_int"]), _BYTES.get(meta["dtype"], 1)
    if len(sizes) != len(strides) or min([0, offset, *sizes, *strides]) < 0:
        raise Damaged(f"the description of {name[:80]!r} is not that of a tensor")
    count = math.prod(sizes)
    if meta["layout"] != _STRIDED:
        raise Damaged(f"{name[:80]!r} has a layout that torch.export does not write")
    if not held and meta["device"]["type"] == "meta":
        return
    last = offset + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True)) if count else offset - 1
    if (last + 1) * width > held or count * width > REPEATED * max(held, 2**16):
        raise Damaged(f"{name[:80]!r} is described as {sizes} and its file has {held} bytes")


def _number(value: object) -> int:
    if type(value) is not int or abs(value) >= 2**63:
        raise Damaged(f"{str(value)[:40]!r} stands where an integer should")
    return value


# ---- the graph ----


def _model_hazards(tree: Json) -> Iterator[str]:
    """Yield what a serialised program would run. Raises Damaged."""
    if strange := [k for k in tree["range_constraints"] if not _RANGED.fullmatch(k)]:
        raise Damaged(f"it ranges over {strange[0][:40]!r}, which is not a symbol that torch writes")
    formulas: set[str] = set()
    yield from _node_hazards(tree, "", formulas)
    if sum(map(len, formulas)) > FORMULAS:
        raise Damaged(f"its sizes are formulas of more than {FORMULAS} letters")


def _node_hazards(node: Any, key: str, formulas: set[str]) -> Iterator[str]:
    """Yield what a part of a serialised graph, under `key` of its JSON, would run.

    torch writes its strings into Python code: call targets must be operators, sizes and guards plain formulas, and
    every name a plain word. Metadata, and strings that are arguments of operators, are only carried along.
    """
    if isinstance(node, list):
        for child in node:
            yield from _node_hazards(child, key, formulas)
    elif isinstance(node, dict):
        graph = isinstance(node.get("nodes"), list)  # and no value of that name; a string input is compared in code
        for given in node["inputs"] if graph else ():
            yield from _word_hazards(given.get("as_string") or "")
        for name, child in node.items():
            yield from _word_hazards(name)
            if name in ("target", "as_operator") and isinstance(child, str):
                yield from [] if _OPERATOR.fullmatch(child) else [f"the function {child[:60]!r}"]
            elif name in ("in_spec", "out_spec") and isinstance(child, str):
                yield from _tree_hazards(_parsed(child.encode(), name, SPEC_PARTS))
            elif not _is_carried(node, name, child):
                yield from _node_hazards(child, name, formulas)
    elif isinstance(node, str):
        if key in ("expr_str", "guards_code"):
            yield from _formula_hazards(node, key == "guards_code", formulas)
        else:
            yield from _word_hazards(node)
    elif isinstance(node, int):
        _number(int(node))


def _is_carried(node: dict[str, object], name: str, child: object) -> bool:
    """Return whether a part is text that torch keeps and never evaluates.

    A value may have the name of a key of the schema; what it holds is no text, and what lies beside it neither.
    """
    if name == "metadata" and isinstance(child, dict):
        described = isinstance(node.get("target"), str) or isinstance(node.get("module_call_graph"), list)
        return described and all(isinstance(text, str) for text in child.values())
    texts = child if name == "as_strings" and isinstance(child, list) else [child]
    return name in ("as_string", "as_strings", "torch_version") and all(isinstance(text, str) for text in texts)


def _formula_hazards(text: str, guard: bool, formulas: set[str]) -> Iterator[str]:
    if text not in formulas:
        formulas.add(text)
        try:
            (check_guard if guard else check_size)(text)
        except Forbidden:
            yield f"the formula {text[:60]!r}"


def _word_hazards(text: str) -> Iterator[str]:
    if not PLAIN.fullmatch(text):
        yield f"the name {text[:60]!r}"


def _tree_hazards(spec: object) -> Iterator[str]:
    """Yield what building the tree of inputs or outputs would run: an import of what it names.

    A node is a leaf, or {type, context, children_spec}; the type is looked up among those that are registered.
    """
    if not isinstance(spec, list) or len(spec) != 2 or spec[0] != 1:
        raise Damaged(f"a tree of inputs or outputs has the form {str(spec)[:20]!r}")
    nodes = [spec[1]]
    while nodes:
        node = nodes.pop()
        nodes += node["children_spec"]
        context = node["context"]
        if isinstance(context, str) and not PLAIN.fullmatch(context):
            context = _parsed(context.encode(), "context", SPEC_PARTS)
        yield from _context_hazards(node["type"] or "")
        yield from _context_hazards(context)


def _context_hazards(context: object) -> Iterator[str]:
    if isinstance(context, dict):
        if "default_factory_module" in context or "default_factory_name" in context:
            factory = context.get("default_factory_module"), context.get("default_factory_name")
            if factory[0] != "builtins" or factory[1] not in _FACTORIES:
                yield f"the function {'.'.join(map(str, factory))[:60]!r}"
        if "__enum__" in context:
            yield f"the class {str(context.get('fqn'))[:60]!r}"
    if isinstance(context, dict | list):
        for part in itertools.chain(context, context.values() if isinstance(context, dict) else ()):
            yield from _context_hazards(part)
    elif isinstance(context, str):
        yield from _word_hazards(context)


# ---- JSON ----


def _json(members: Members, name: str) -> Any:
    return _parsed(members.read(name, JSON_LIMIT), name)


def _shape(text: bytes) -> tuple[int, int]:
    """Return how deep objects and lists nest in JSON, and how many parts it has."""
    marks = _STRING.sub(b"", text).translate(None, _NO_MARKS)
    deep = itertools.accumulate(_STEPS.get(mark, 0) for mark in marks)
    return (max(deep, default=0) if len(marks) <= PARTS else 0), len(marks)


def _parsed(text: bytes, name: str, most: int = PARTS) -> Any:
    """Parse JSON that is neither too deep nor too much. Raises Damaged."""
    deep, many = _shape(text)
    if deep > DEPTH or many > most:
        raise Damaged(f"{name} is nested {deep} deep or has {many} parts; {DEPTH} and {most} are allowed")
    try:
        return json.loads(text.decode())
    except ValueError as error:
        raise Damaged(f"{name} cannot be read: {error}") from error
