"""Write a checkpoint folder whole or not at all: weights shard by shard, config, modeling file, all else as it is."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..backends.torch.lift import parameter_names
from ..errors import Code, LnrewriteError
from ..files.landing import failing, land, room
from ..files.output import CHECKPOINT, check_replaceable
from ..live.saving import recorded
from ..loading.configs import read_config
from ..loading.foreign import Foreign, read_file
from ..loading.identify import damaged
from ..quiet import LOGGER
from ..recipe.modeling import FILE, KEY, generate
from .shards import Stored, Writer, stored_in

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".index.json")
"""How names of files end that hold weights or say where they are: these are written anew or left out."""

SMALL = 1e-2
"""Below which a number of a config may be the eps of its norms."""

WEIGHTLESS = ("flash_norm", "flashnorm_folded")
"""What a config says where norms have no gains: it holds for what is written only if that was looked at."""

SHARD = 5 << 30
"""The size of a shard, in bytes, where the source's shards do not say what goes together."""


@dataclass(frozen=True)
class Weights:
    """Hold where a folder's safetensors are: the file of each key, and the key of each parameter by its first name."""

    files: dict[str, Stored]
    keys: dict[str, str]

    @classmethod
    def read(cls, folder: Path, module: nn.Module) -> Weights | None:
        """Look at a folder's safetensors; None where they do not hold each parameter as the network has it."""
        index = folder / INDEX
        names = set(read_file(index)["weight_map"].values()) if index.is_file() else {SINGLE}
        paths = [folder / name for name in sorted(names)]
        if not all(p.is_file() for p in paths):
            return None
        files = {key: where for path in paths for key, where in held_by(path).items()}
        first = parameter_names(module)
        prefix = f"{getattr(module, 'base_model_prefix', '')}."
        keys: dict[str, str] = {}
        for key in files:
            name = next((n for n in (key, prefix + key, key.removeprefix(prefix)) if n in first), None)
            if name is not None:
                keys.setdefault(first[name], key)
        held = {name: files[key].shape for name, key in keys.items()}
        whole = all(held.get(first[n]) == tuple(p.shape) for n, p in module.named_parameters())
        return cls(files, keys) if whole else None

    def key(self, name: str) -> str:
        """Return the key for a new name: with or without the prefix, as its neighbours have it."""
        near = max(self.keys, key=lambda n: len(os.path.commonprefix([n, name])))
        key = self.keys[near]
        if near.endswith(key) and name.startswith(cut := near.removesuffix(key)):
            return name.removeprefix(cut)
        return key.removesuffix(near) + name if key.endswith(near) else name


def held_by(path: Path) -> dict[str, Stored]:
    """Return what a safetensors file holds, by key. Raises LnrewriteError LN015 for a damaged file."""
    try:
        return stored_in(path)
    except Foreign as error:
        raise damaged(str(path), str(error)) from error
    except KeyError as error:
        raise damaged(str(path), f"it holds a dtype that torch does not have: {error}") from error


@dataclass(frozen=True)
class Done:
    """Hold a rewritten model that is to be written: `read` gives the pieces of a tensor of `module`'s state.

    flags: what config.json says in addition.
    """

    module: nn.Module
    changes: list[dict[str, object]]
    weights: Weights | None
    read: Callable[[str], Iterable[torch.Tensor]]
    form: Callable[[str], tuple[torch.dtype, tuple[int, ...]]]
    check: Callable[[Path], None]
    flags: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def in_memory(
        cls,
        module: nn.Module,
        changes: list[dict[str, object]],
        weights: Weights | None,
        check: Callable[[Path], None],
    ) -> Done:
        """Return it for a module that holds its weights."""
        state = module.state_dict()

        def form(name: str) -> tuple[torch.dtype, tuple[int, ...]]:
            return state[name].dtype, tuple(state[name].shape)

        return cls(module, changes, weights, lambda name: [state[name]], form, check)


def check_room(target: Path, source: Path) -> None:
    """Raise LnrewriteError LN025 where the disk has less room than the source takes."""
    needed = sum(p.stat().st_size for p in source.iterdir() if p.is_file())
    if (free := shutil.disk_usage(target.absolute().parent).free) < needed:
        why = f"{needed / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free"
        raise LnrewriteError(Code.LN025, str(target), why, "free some room or choose another folder")


@contextmanager
def whole(target: Path, source: Path, force: bool, known: Sequence[str] = CHECKPOINT) -> Iterator[Path]:
    """Give a folder beside the target that takes its place when all went well, and is gone when not."""
    with failing(target), room(target.absolute().parent) as place:
        made = place / "whole"
        made.mkdir()
        yield made
        check_replaceable(target, source, known)  # again: something may have been put there since
        land(made, target, force=force)


def write_checked(target: Path, source: Path, done: Done, pipeline: str, force: bool) -> None:
    """Write a folder, check it, and let it take the target's place, whole or not at all."""
    with whole(target, source, force) as folder:
        for stock in (*_stock(source, done), None):
            write_folder(folder, source, done, pipeline, stock)
            LOGGER.info("checking what was written")
            try:
                return done.check(folder)
            except LnrewriteError:
                if stock is None:
                    raise
                shutil.rmtree(folder)
                folder.mkdir()


def _stock(source: Path, done: Done) -> Iterator[dict[str, Any]]:
    """Yield configs under which the class itself may be the result: where norms have another eps, and nothing changed.

    Which entry of a config its norms take their eps from is not known: each small number is tried, and checked.
    """
    content = read_config(source)
    rows = [change.get("as") for change in done.changes]
    norms = [row[0] for row in rows if isinstance(row, list) and len(row) == 1 and row[0]["is"] == "norm"]
    eps = {norm["eps"] for norm in norms}
    if len(norms) < len(rows) or len(eps) != 1 or KEY in content:
        return
    for key, value in content.items():
        if isinstance(value, float) and 0 < value < SMALL:
            yield content | {key: next(iter(eps))}


def write_folder(folder: Path, source: Path, done: Done, pipeline: str, stock: dict[str, Any] | None = None) -> None:
    """Write weights, config, the modeling file where one is needed, and copy everything else.

    stock: the config of a class of transformers' own that needs no modeling file.
    """
    content = read_config(source) if stock is None else stock
    if any("untie" in change for change in done.changes):
        for part in (content, content.get("text_config")):
            if isinstance(part, dict) and ("tie_word_embeddings" in part or part is content):
                part["tie_word_embeddings"] = False
    structural = [change for change in done.changes if "untie" not in change]
    if structural and stock is None:
        content = recorded(content, done.module, structural, pipeline)
        (folder / FILE).write_text(generate(content[KEY]))
    content = {**{key: value for key, value in content.items() if key not in WEIGHTLESS}, **done.flags}
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
    carry(source, folder, lambda path: path.name.endswith(WEIGHTS))
    _write_weights(folder, list(_shards(done)))


def carry(source: Path, folder: Path, left: Callable[[Path], bool]) -> None:
    """Copy what a folder holds into another, but what is hidden, `left`, or there already."""
    for path in sorted(p for p in source.rglob("*") if p.is_file()):
        name = path.relative_to(source)
        hidden = any(part.startswith(".") for part in name.parts)
        if not (hidden or left(path) or (folder / name).exists()):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)


Shard = dict[str, tuple[tuple[torch.dtype, tuple[int, ...]], Callable[[], Iterable[torch.Tensor]]]]
"""What goes into a file: each key's dtype and shape, and what reads it, in pieces."""


def _shards(done: Done) -> Iterator[Shard]:
    """Yield what goes into each file; new keys go into the last."""
    first = parameter_names(done.module)
    left = dict.fromkeys(n for n in done.module.state_dict() if first.get(n, n) == n)

    def entry(name: str) -> Any:
        del left[name]
        return done.form(name), lambda: done.read(name)

    weights, shard = done.weights, Shard()
    if weights is None:
        for name in list(left):
            shard[name] = entry(name)
            if not left or sum(prod(shape) * dtype.itemsize for (dtype, shape), _ in shard.values()) >= SHARD:
                yield shard
                shard = {}
        return
    own = {key: name for name, key in weights.keys.items()}
    paths = list(dict.fromkeys(where.path for where in weights.files.values()))
    for path in paths:
        shard = {}
        for key, where in weights.files.items():
            if where.path == path and key not in own:
                shard[key] = (where.dtype, where.shape), where.rows
            elif where.path == path and own[key] in left:
                shard[key] = entry(own[key])
        if path == paths[-1]:
            shard |= {weights.key(name): entry(name) for name in list(left)}
        yield shard


def _write_weights(folder: Path, shards: list[Shard]) -> None:
    """Write each shard to a file, several files at once, and an index where there are several."""
    shards = [shard for shard in shards if shard]
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    names = [SINGLE] if len(shards) == 1 else names

    def write(name: str, shard: Shard) -> int:
        LOGGER.info(f"writing {name}")
        with Writer(folder / name, {key: form for key, (form, _) in shard.items()}) as file:
            for key in file.places:
                file.write(key, shard[key][1]())
        return file.size

    with _threads() as pool:
        size = sum(pool.map(write, names, shards))
    if len(shards) > 1:
        where = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": size}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


@contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    """Give one thread for each core, none of which starts threads of its own."""
    count = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(count)
