"""Describe by its content what a MODEL is; its extension says nothing and nothing is unpickled or imported for it."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from ..errors import Code, LnrewriteError, did_you_mean
from ..files.output import named_path
from .archives import program_hazards
from .configs import read_config
from .foreign import LIMIT, Foreign, astray, read_file, safetensors_header
from .pickles import LEGACY_MAGIC, Damaged, unsafe_names
from .source import Format, OpenOptions, Source, stamp_of

_ONNX_FIELDS = {*range(1, 9), 14, 20, 25, 26}  # ModelProto
_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_OTHER = {
    b"PAR1": "a Parquet file",
    b"\x93NUMPY": "a numpy array; arrays are data (--input, --calibrate)",
    b"\x89HDF": "an HDF5 file (Keras); only PyTorch and ONNX models are read",
    b"GGUF": "a GGUF file; convert the original checkpoint instead",
    b"\x1f\x8b": "a gzip archive; unpack it first",
}


def identify(model: str | os.PathLike[str], how: OpenOptions | None = None) -> Source:
    """Return what `model`, a path or a name, is: reads magic bytes, zip members, headers and pickle operations only.

    `how` says how it may be opened; it goes along.
    Raises LnrewriteError: LN010 nothing of that name, LN011 none of the forms, LN015 damaged, LN028 a transformers
    folder whose files lead out of it.
    """
    how, model = how or OpenOptions(), os.fspath(model)
    if model.startswith("demo:"):
        return Source(Format.DEMO, model, how=how)
    path = named_path(model)
    try:
        if path.is_dir():
            stamp = stamp_of(path)
            if graphs := _graphs(model, path):
                return Source(Format.ONNX, model, path, (), how, stamp, graphs)
            return Source(Format.TRANSFORMERS, model, path, _folder(model, path), how, stamp)
        if path.is_file():
            stamp = stamp_of(path)
            with path.open("rb") as stream:
                found, unsafe = _file(model, path, stream)
            return Source(found, model, path, unsafe, how, stamp)
        if path.exists():
            raise not_a_model(model, "it is neither a regular file nor a folder")
    except (Damaged, Foreign) as error:
        raise damaged(model, str(error)) from error
    except OSError as error:
        why = f"it cannot be read: {error.strerror or error}"
        raise LnrewriteError(Code.LN010, f"model {model!r}", why, "check the path and its permissions") from error
    if _REFERENCE.fullmatch(model):
        return Source(Format.CALLABLE, model, how=how)
    raise LnrewriteError(Code.LN010, f"model {model!r}", "no such file or folder", _nearest(path))


def current(source: Source) -> Source:
    """Return a source as it is now: what lies there is looked at again where it changed since. Raises as `identify`."""
    try:
        same = stamp_of(source.path) == source.stamp
    except OSError:
        same = False
    return source if same else identify(source.name, source.how)


def not_a_model(model: str, why: str) -> LnrewriteError:
    """Make the error for content that is none of the forms."""
    remedy = "give a .pt2, a state dict or safetensors with --factory, a transformers folder or pkg.module:callable"
    return LnrewriteError(Code.LN011, f"model {model!r}", why, remedy)


def damaged(model: str, why: str) -> LnrewriteError:
    """Make the error for a file that starts like a model and cannot be read to its end."""
    return LnrewriteError(Code.LN015, f"model {model!r}", why, "fetch or save the file again")


def _nearest(path: Path) -> str:
    """Suggest what the folder of a missing path holds, or the other ways to name a model."""
    folder = path.parent
    names = [str(p) for p in folder.iterdir()] if folder.is_dir() else []
    hint = did_you_mean(str(path), names)
    return hint if hint.startswith("did") else "check the path; demo:NAME and pkg.module:callable are names too"


def _file(model: str, path: Path, stream: IO[bytes]) -> tuple[Format, tuple[str, ...]]:
    """Return what a file holds and what loading it would run. Raises LnrewriteError, Damaged, Foreign."""
    start = stream.read(64)
    stream.seek(0)
    if not start:
        raise Damaged("it is empty")
    if start.startswith(b"version https://git-lfs"):
        raise Damaged("it is a Git LFS pointer, not the file itself (git lfs pull fetches it)")
    if start.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _archive(model, stream)
    if _is_pickle(start):
        return _pickle(model, stream, start)
    if len(start) > 8 and start[8:9] == b"{" and int.from_bytes(start[:8], "little") < LIMIT:
        safetensors_header(path)
        return Format.SAFETENSORS, ()
    if start[0] == 0x08 and _is_onnx(stream, path.stat().st_size):
        return Format.ONNX, ()
    known = next((what for magic, what in _OTHER.items() if start.startswith(magic)), None)
    raise not_a_model(model, f"it is {known}" if known else "lnrewrite does not know its format")


def _archive(model: str, stream: IO[bytes]) -> tuple[Format, tuple[str, ...]]:
    """Return what a zip holds by its members, below the one folder that torch puts them in."""
    try:
        with zipfile.ZipFile(stream) as archive:
            members = archive.namelist()
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError) as error:
        raise Damaged(f"its zip archive cannot be read: {error}") from error
    stream.seek(0)
    inner = {name.split("/", 1)[-1] for name in members}
    if "archive_format" in inner:
        if not any(name.startswith("models/") and name.endswith(".json") for name in inner):
            raise not_a_model(model, "it is a torch archive without an exported program (compiled code is not read)")
        return Format.PROGRAM, program_hazards(stream)
    if "constants.pkl" in inner:
        return Format.TORCHSCRIPT, ()
    if "data.pkl" in inner:
        unsafe = unsafe_names(stream)
        return Format.PICKLE if unsafe else Format.STATE_DICT, () if _known(unsafe) else unsafe
    if "serialized_exported_program.json" in inner:
        raise not_a_model(model, "it is a torch.export archive of torch before 2.8; load it there and save it again")
    if members and all(name.endswith(".npy") for name in members):
        raise not_a_model(model, "it is an .npz of arrays; arrays are data (--input, --calibrate)")
    raise not_a_model(model, "it is a zip archive that torch did not write")


def _is_pickle(start: bytes) -> bool:
    """Return whether bytes start like a pickle: protocol 2 to 5 as its first operation."""
    return start[0] == 0x80 and len(start) > 1 and 2 <= start[1] <= 5


def _pickle(model: str, stream: IO[bytes], start: bytes) -> tuple[Format, tuple[str, ...]]:
    """Distinguish weights from objects in a file that torch.save wrote before it wrote zips."""
    unsafe = unsafe_names(stream)
    if not start.startswith(LEGACY_MAGIC):
        runs = f" and would run {listed(unsafe)}" if unsafe else ""
        raise not_a_model(model, f"it is a Python pickle that torch.save did not write{runs}")
    return Format.PICKLE if unsafe else Format.STATE_DICT, unsafe


def _known(names: Iterable[str]) -> bool:
    """Return whether a pickle names nothing but torch's own layers, which are made without running it."""
    from .layers import known

    return set(names) <= set(known())


def listed(names: Iterable[str], limit: int = 4) -> str:
    """Write the first `limit` names and how many more there are."""
    all_names = list(names)
    more = f" and {len(all_names) - limit} more" if len(all_names) > limit else ""
    return ", ".join(all_names[:limit]) + more


def _is_onnx(stream: IO[bytes], size: int) -> bool:
    """Walk the top fields of a protobuf message and tell whether they are a ModelProto's, with a graph.

    Raises Damaged where the graph (field 7) is longer than the file.
    """
    graph = False
    while stream.tell() < size:
        tag = _varint(stream)
        if tag is None or tag >> 3 not in _ONNX_FIELDS or tag & 7 not in (0, 2):
            return False
        value = _varint(stream)
        if value is None:
            return False
        if tag & 7 == 2:
            graph = graph or tag >> 3 == 7
            if stream.tell() + value > size:
                if tag >> 3 == 7:
                    raise Damaged("its ONNX graph is cut off")
                return False
            stream.seek(value, 1)
    return graph


def _varint(stream: IO[bytes]) -> int | None:
    """Read one protobuf varint; None where there is none."""
    value = 0
    for shift in range(0, 70, 7):
        byte = stream.read(1)
        if not byte:
            return None
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    return None


def _graphs(model: str, folder: Path) -> tuple[Path, ...]:
    """Return the ONNX files of a folder that holds no other weights, all of it inside."""
    found = tuple(sorted(folder.glob("*.onnx")))
    if not found or any(path for kind in ("*.safetensors", "*.bin") for path in folder.glob(kind)):
        return ()
    _check_inside(model, folder)
    for path in found:
        with path.open("rb") as stream:
            if _file(str(path), path, stream)[0] is not Format.ONNX:
                raise damaged(model, f"{path.name} is not an ONNX file")
    return found


def _folder(model: str, folder: Path) -> tuple[str, ...]:
    """Check that a folder is a transformers checkpoint, all of it inside; return what loading it would run."""
    config = folder / "config.json"
    if not config.is_file():
        raise not_a_model(model, "the folder has no config.json and no ONNX files, so it is not a checkpoint")
    _check_inside(model, folder)
    content = read_config(folder)
    if not {"model_type", "architectures", "auto_map"} & set(content):
        raise not_a_model(model, "its config.json names no model_type, so it is not a transformers checkpoint")
    return _folder_pickles(folder)


def _check_inside(model: str, folder: Path) -> None:
    """Raise LN028 for what leads out of the folder, or is a pipe in it; LN015 for a missing shard of its index."""
    roots = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":  # the hub's cache links a snapshot's files into its own blobs
        roots.append(folder.resolve().parent.parent / "blobs")
    shards = []
    for index in folder.glob("*.index.json"):
        try:
            weights = read_file(index).get("weight_map")
        except Foreign as error:
            raise damaged(model, f"{index.name}: {error}") from error
        if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
            raise damaged(model, f"{index.name} cannot be read: it maps no weights to files")
        shards += [folder / name for name in sorted(set(weights.values()))]
    for file in [*sorted(folder.iterdir()), *shards]:
        why, remedy = astray(file, roots), "copy the file into the folder"
        if not why and file.exists() and not file.is_file() and not file.is_dir():  # to open it may take for ever
            why, remedy = "is not a plain file", "remove it from the folder"
        if why:
            raise LnrewriteError(Code.LN028, f"model {model!r}", f"{file.name} {why}", remedy)
    if missing := [file.name for file in shards if not file.is_file()]:
        raise damaged(model, f"the shards {listed(missing)} are missing")


def _folder_pickles(folder: Path) -> tuple[str, ...]:
    """List what the pickled weights of a folder would run; none is read where safetensors stand beside them."""
    if any(folder.glob("*.safetensors")):
        return ()
    unsafe: set[str] = set()
    for file in sorted(folder.glob("*.bin")):
        with file.open("rb") as stream:
            unsafe.update(unsafe_names(stream) if _is_torch(stream) else ())
    return tuple(sorted(unsafe))


def _is_torch(stream: IO[bytes]) -> bool:
    start = stream.read(2)
    stream.seek(0)
    return start == b"PK" or len(start) == 2 and _is_pickle(start)
