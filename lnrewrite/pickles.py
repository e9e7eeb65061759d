"""Read what a pickle would import without running it, and what an archive would run while it is loaded.

A pickle is a program: its GLOBAL operations import names and its REDUCE operations call them. Reading the operations
runs nothing. `torch.load(weights_only=True)` allows a short list of names that only build tensors; every other name is
reported, so that a user knows what --trust-pickle would run.
"""

from __future__ import annotations

import ast
import io
import json
import pickletools
import re
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Iterator
from typing import IO, Any

LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
LEGACY_PICKLES = 5  # magic, protocol, system, object, storage keys; raw storages follow

_STRINGS = {"STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
_CARRIED = {"metadata", "as_string", "as_strings", "doc_string", "torch_version"}
_WORD = re.compile(r"[\w .#:/*-]*")
_OPERATOR = re.compile(
    r"torch\.ops\.(?!__)\w+\.((?!__)|(?=__(i?and|i?or|i?xor|i?lshift|i?rshift)__))\w+(\.(?!__)\w+)*"
    r"|torch\._?sym_\w+|_operator\.\w+|math\.\w+|#[\w:.]+"
)
_FUNCTION = re.compile(r"[A-Z]\w*|min|max|abs|int|float|floor|ceil|ceiling|sqrt|log")  # sympy's, and harmless builtins
_ATTRIBUTES = {
    "size",
    "shape",
    "ndim",
    "stride",
    "storage_offset",
    "dtype",
    "floor",
    "ceil",
    "trunc",
    "sqrt",
    "isnan",
    "inf",
}
_UNREADABLE = "a name computed at run time"


class Damaged(ValueError):
    """Report that bytes that start like a pickle or an archive cannot be read to their end."""


def pickled_names(stream: IO[bytes]) -> set[str]:
    """Collect every `module.name` that the pickle at `stream`'s position imports; leave `stream` behind its end.

    A name that is not written out literally is reported as such. Raises Damaged when the pickle is cut off.
    """
    names: set[str] = set()
    memo: dict[int, str | None] = {}
    pushed: list[str | None] = [None, None]  # what the last operations pushed, None where it is no string
    try:
        for op, arg, _ in pickletools.genops(stream):
            if op.name in ("GLOBAL", "INST"):
                names.add(_modern(*str(arg).split(" ", 1)))
            elif op.name == "STACK_GLOBAL":
                module, name = pushed[-2:]
                names.add(_modern(module, name) if module and name else _UNREADABLE)
            elif op.name.startswith("EXT"):
                names.add(f"copyreg extension {arg}")
            if op.name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
                memo[len(memo) if op.name == "MEMOIZE" else int(str(arg))] = pushed[-1]
            elif op.name in _STRINGS:
                pushed.append(arg.decode("latin-1") if isinstance(arg, bytes) else str(arg))
            elif op.name in ("GET", "BINGET", "LONG_BINGET"):
                pushed.append(memo.get(int(str(arg))))
            elif op.name not in ("PROTO", "FRAME"):
                pushed.append(None)
    except Exception as error:  # pickletools raises whatever the malformed bytes lead to
        raise Damaged(f"its pickle cannot be read: {error}") from error
    return names


def unsafe_names(stream: IO[bytes]) -> tuple[str, ...]:
    """List, sorted, what a torch.save file (zip or legacy) or a plain pickle imports beyond what builds tensors.

    Empty means that `torch.load(weights_only=True)` imports nothing that it does not allow. Raises Damaged.
    """
    start = stream.read(len(LEGACY_MAGIC))
    stream.seek(0)
    names: set[str] = set()
    if start.startswith(b"PK"):
        with _zip(stream) as archive:
            for member in archive.namelist():
                if member.endswith(".pkl"):
                    names |= pickled_names(io.BytesIO(archive.read(member)))
    else:
        for _ in range(LEGACY_PICKLES if start == LEGACY_MAGIC else 1):
            names |= pickled_names(stream)
    return tuple(sorted(names - _allowed()))


def program_hazards(stream: IO[bytes]) -> tuple[str, ...]:
    """List what loading a torch.export archive would run beyond building tensors and calling operators.

    torch.export.load unpickles sample inputs, opaque objects and some tensors without restriction, loads compiled
    code, and evaluates size expressions as Python. Raises Damaged.
    """
    found: set[str] = set()
    with _zip(stream) as archive:
        members = {name.split("/", 1)[-1]: name for name in archive.namelist()}
        for name in members:
            if name.startswith("data/aotinductor/"):
                found.add("compiled code (AOTInductor)")
            elif name.startswith("data/constants/custom_obj"):
                found.add("a custom TorchScript object")
        for name in _pickled_members(archive, members):
            content = archive.read(members[name])
            found.update(unsafe_names(io.BytesIO(content)) if content else ())
        for name, member in members.items():
            if name.startswith("models/") and name.endswith(".json"):
                found.update(_model_hazards(_json(archive, member)))
    return tuple(sorted(found))


def _pickled_members(archive: zipfile.ZipFile, members: dict[str, str]) -> Iterator[str]:
    """Yield the members that torch.export.load hands to an unpickler."""
    for name in members:
        folder, _, file = name.rpartition("/")
        tensors = folder in ("data/weights", "data/constants")
        if folder == "data/sample_inputs" or file.startswith("opaque_obj") or (tensors and file.endswith(".pt")):
            yield name
        elif tensors and file.endswith("_config.json"):
            for payload in _json(archive, members[name]).get("config", {}).values():
                if payload.get("use_pickle") and f"{folder}/{payload['path_name']}" in members:
                    yield f"{folder}/{payload['path_name']}"


def _model_hazards(node: Any, key: str = "") -> Iterator[str]:
    """Yield what a serialised graph, under `key` of its JSON, would run: torch writes its strings into Python code.

    Call targets must be operators, sizes and guards plain formulas, and every name a plain word. Metadata, and strings
    that are arguments of operators, are only carried along.
    """
    if isinstance(node, list):
        for child in node:
            yield from _model_hazards(child, key)
    elif isinstance(node, dict):
        if "nodes" in node:  # a graph: a string input of its own is compared in generated code
            for given in node.get("inputs", ()):
                yield from _model_hazards(given.get("as_string") or "", "name")
        for name, child in node.items():
            yield from _model_hazards(name, "name")
            if name == "target" and "inputs" in node:
                yield from [] if _is_operator(str(child)) else [f"the function {str(child)[:60]!r}"]
            elif name not in _CARRIED:
                yield from _model_hazards(child, name)
    elif isinstance(node, str):
        if key in ("expr_str", "guards_code"):
            yield from [] if _is_formula(node) else [f"the formula {node[:60]!r}"]
        elif key in ("in_spec", "out_spec", "context") and node[:1] in ("[", "{"):
            yield from _model_hazards(_nested(node), key)
        elif not _WORD.fullmatch(node):
            yield f"the name {node[:60]!r}"


def _nested(text: str) -> Any:
    """Parse JSON that stands as a string in JSON; what is none is left as a list of one string."""
    try:
        return json.loads(text)
    except ValueError:
        return [f"({text})"]


def _is_operator(target: str) -> bool:
    """Tell whether a call target names a torch operator, a symbolic size function or Python arithmetic."""
    return _OPERATOR.fullmatch(target) is not None


def _is_formula(text: str) -> bool:
    """Tell whether a size or a guard, which torch evaluates as Python, is arithmetic over sizes and nothing else."""
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError):
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Name | ast.Attribute):
            return False
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not _FUNCTION.fullmatch(node.func.id):
            return False
        if isinstance(node, ast.Name) and node.id.startswith("__"):
            return False
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and not re.fullmatch(r"[\w. -]+", node.value):
            return False
        if isinstance(node, ast.Attribute) and node.attr not in _ATTRIBUTES:
            return False
        if isinstance(node, ast.Lambda | ast.comprehension | ast.JoinedStr | ast.NamedExpr):
            return False
    return True


def _zip(stream: IO[bytes]) -> zipfile.ZipFile:
    """Open a zip whose members have one root and distinct names, so that every reader sees the same; else Damaged."""
    try:
        archive = zipfile.ZipFile(stream)
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError) as error:
        raise Damaged(f"its zip archive cannot be read: {error}") from error
    names = [name.casefold() for name in archive.namelist()]
    if len(set(names)) < len(names) or len({name.split("/", 1)[0] for name in names}) > 1:
        raise Damaged("its zip archive holds members of the same name, or of several roots")
    return archive


def _json(archive: zipfile.ZipFile, member: str) -> Any:
    try:
        return json.loads(archive.read(member))
    except (ValueError, zipfile.BadZipFile) as error:
        raise Damaged(f"{member} cannot be read: {error}") from error


def _modern(module: str, name: str) -> str:
    """Write an imported name as Python 3 knows it (torch pickles `set` as `__builtin__ set`)."""
    module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
    return f"{module}.{name}"


def _allowed() -> frozenset[str]:
    """Return the names that `torch.load(weights_only=True)` allows by default."""
    from torch._weights_only_unpickler import _get_allowed_globals

    return frozenset(_get_allowed_globals())
