"""Run a folder that `export` wrote: tokens from a prompt, one after the other, by genai or by ONNX Runtime alone."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import Code, LnrewriteError, UsageError, unknown
from ..files.output import CONFIG
from ..kernels.library import find
from ..loading.foreign import Foreign, Json, read_file
from ..loading.identify import damaged
from ..loading.transformers import tokenizer_in
from .sessions import session

GENAI, GENERATION, MODEL = "genai_config.json", "generation_config.json", "model.onnx"
ENGINES = ("auto", "genai", "session")
LOADED = re.compile(r"librar|path|backend")
"""Keys of genai's config under which files with code are named."""
NUMPY = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}


@dataclass(frozen=True, slots=True)
class Generated:
    """Hold what was generated: its text, its tokens, how many the prompt had, tokens per second after the first."""

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    tokens_per_second: float
    engine: str


def generate(
    folder: Path,
    prompt: str,
    *,
    most: int = 64,
    engine: str = "auto",
    threads: int | None = None,
    told: Callable[[str], object] | None = None,
) -> Generated:
    """Generate greedily from a prompt with the model of a folder, until it ends its text or made `most` tokens.

    engine: genai, session, or auto: genai where it is installed and the folder has its config. threads: of one
    operator; None leaves it to the engine. told: is given each piece of text when it is there. Raises LnrewriteError
    LN013 for a folder without a model of that kind, LN017 where genai would load code for it, LN015 for a config that
    cannot be read, LN018 for a package that lacks, UsageError LN003 for an unknown engine.
    """
    if engine not in ENGINES:
        unknown(Code.LN003, "engine", engine, ENGINES)
    model, names = folder / MODEL, tokenizer_in(folder, False)
    if not model.is_file() or names is None:
        lacks = f"no {MODEL}" if not model.is_file() else "no tokenizer"
        remedy = "write the folder with `lnrewrite export CHECKPOINT -o FOLDER`"
        raise LnrewriteError(Code.LN013, f"folder {str(folder)!r}", f"it holds {lacks}", remedy)
    here = importlib.util.find_spec("onnxruntime_genai") is not None
    if engine == "genai" and not here:
        raise LnrewriteError(Code.LN018, "engine genai", "the package is missing", "pip install onnxruntime-genai")
    if engine == "auto":
        engine = "genai" if here and (folder / GENAI).is_file() else "session"
    tokenizer = names.load()
    ids = [int(i) for i in tokenizer(prompt)["input_ids"]]
    if not ids:
        raise UsageError(Code.LN003, "prompt", "the tokenizer makes no tokens of it", "give some text")
    ends, found, text = _ends(folder), list[int](), ""
    steps = (_by_genai if engine == "genai" else _by_session)(folder, ids, most, threads)
    first = last = time.perf_counter()
    for token in steps:
        last = time.perf_counter()
        first = first if found else last
        found.append(token)
        now = str(tokenizer.decode(found, skip_special_tokens=True))
        if not now.endswith("\ufffd"):  # the bytes of a character may be several tokens
            if told is not None:
                told(now[len(text) :])
            text = now
        if token in ends:
            break
    speed = (len(found) - 1) / (last - first) if len(found) > 1 and last > first else 0.0
    return Generated(text, tuple(found), len(ids), speed, engine)


def _read(path: Path) -> Json:
    """Return what a JSON file of the folder holds. Raises LnrewriteError LN015 where that is no object."""
    try:
        return read_file(path)
    except Foreign as error:
        raise damaged(str(path), str(error)) from error


def _ends(folder: Path) -> set[int]:
    """Return the tokens that end a text."""
    for name in (GENERATION, CONFIG):
        held = _read(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        if held is not None:
            return {end for end in (held if isinstance(held, list) else [held]) if isinstance(end, int)}
    return set()


def _check(folder: Path) -> None:
    """Raise LnrewriteError LN017 where genai would load code for a folder, LN015 where it would read elsewhere.

    genai takes the names of libraries, for operators and providers, from its config. lnrewrite's own kernels are known,
    byte for byte; a folder that names others has to be run by genai itself.
    """
    left, own = list[object]([_read(folder / GENAI)]), find()
    while left:
        each = left.pop()
        left += each.values() if isinstance(each, dict) else each if isinstance(each, list) else []
        for key, value in each.items() if isinstance(each, dict) else ():
            if not isinstance(value, str):
                continue
            here = folder / Path(value).name
            plain = value == here.name and here.is_file() and not here.is_symlink()
            if key == "custom_ops_library" and plain and own and own.read_bytes() == here.read_bytes():
                continue
            if LOADED.search(key) or re.search(r"\.(so|dll|dylib)\b", value):
                remedy = "run it with --engine session, or, if you trust that file, with onnxruntime-genai itself"
                raise LnrewriteError(
                    Code.LN017, f"folder {str(folder)!r}", f"running it would load {value[:60]}", remedy
                )
            if key == "filename" and not plain:
                raise damaged(str(folder), f"{GENAI} names {value[:60]!r}, which is not a file of the folder")


def _by_genai(folder: Path, ids: list[int], most: int, threads: int | None) -> Iterator[int]:
    """Yield tokens that onnxruntime-genai chooses. Raises LnrewriteError LN017 and LN015 as `_check`."""
    _check(folder)
    import onnxruntime_genai as genai

    config = genai.Config(str(folder))
    if threads is not None:
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    model = genai.Model(config)
    options = genai.GeneratorParams(model)
    options.set_search_options(do_sample=False, repetition_penalty=1.0, max_length=len(ids) + most)
    run = genai.Generator(model, options)
    run.append_tokens(np.array([ids], np.int32))
    for _ in range(most):
        run.generate_next_token()
        yield int(run.get_next_tokens()[0])
        if run.is_done():
            return


def _by_session(folder: Path, ids: list[int], most: int, threads: int | None) -> Iterator[int]:
    """Yield tokens that a plain session of ONNX Runtime chooses, its cache going round."""
    run: Any = session(folder / MODEL, threads=threads)
    taken = {value.name: value for value in run.get_inputs()}
    given = [value.name for value in run.get_outputs()]
    cache = [name for name in given if name != "logits"]
    held = {}
    for name in cache:
        value = taken[name.replace("present", "past_key_values")]
        if value.type not in NUMPY:
            why = f"its cache is {value.type}, of which arrays cannot be given to ONNX Runtime from here"
            raise LnrewriteError(Code.LN520, str(folder / MODEL), why, "run it with --engine genai")
        held[value.name] = np.zeros((1, value.shape[1], 0, value.shape[3]), NUMPY[value.type])
    new, past = np.array([ids], np.int64), 0
    for _ in range(most):
        feed = {
            "input_ids": new,
            "attention_mask": np.ones((1, past + new.shape[1]), np.int64),
            "position_ids": np.arange(past, past + new.shape[1])[None],
            **held,
        }
        out = dict(zip(given, run.run(given, {n: v for n, v in feed.items() if n in taken}), strict=True))
        past += new.shape[1]
        held = {name.replace("present", "past_key_values"): out[name] for name in cache}
        token = int(out["logits"][0, -1].argmax())
        yield token
        new = np.array([[token]], np.int64)
