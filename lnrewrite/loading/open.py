"""Open a MODEL: a path or a name becomes a torch module in eval mode, or an exported program. See `identify`."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..errors import Code, LnrewriteError, code_of_others, did_you_mean, told
from ..quiet import quiet
from .identify import current, damaged, listed, not_a_model
from .pickles import Damaged, check_built
from .source import Factory, Format, Source

if TYPE_CHECKING:
    import torch

    from .transformers import Tokenizer

_OUTPUT = re.compile(
    rb'"type\\*": \\*"(transformers(?:\.\w+)*\.(?:modeling_\w+|cache_utils)\.\w+)\\*"'
)  # in JSON that stands as a string in JSON
State = dict[str, "torch.Tensor"]

_WRAPPERS = ("module.", "_orig_mod.")  # what DataParallel and torch.compile put before every name
_ENTRIES = ("state_dict", "model_state_dict", "model")  # where a training checkpoint keeps its weights


@dataclass(frozen=True, slots=True)
class Opened:
    """Hold an opened model: either `module` (in eval mode) or `program` is set.

    `kind` is its `Format`. `inputs` are example keyword inputs where the model brings its own; a program whose inputs
    are positional has them in `program.example_inputs`. `path` is None for a name; `tokenizer` is where the
    folder's tokenizer is; `notes` say in words what a user should know about how it was opened.
    """

    kind: str
    module: torch.nn.Module | None = None
    program: torch.export.ExportedProgram | None = None
    inputs: dict[str, Any] | None = None
    path: str | None = None
    tokenizer: Tokenizer | None = None
    notes: tuple[str, ...] = ()


def open_module(source: Source) -> Opened:
    """Open what `identify` found, on the CPU.

    Raises LnrewriteError LN001, LN010 to LN019, LN028, LN029 or LN032; nothing that a file names is run unless it is
    trusted.
    """
    source = current(source)  # another model may have been captured since it was looked at
    source.check_trusted()
    opened = _OPENERS[source.format](source)
    if opened.module is not None:
        opened.module.eval()
    return replace(opened, path=None if source.path is None else str(source.path))


def import_object(reference: str, code: Code = Code.LN019) -> Any:
    """Import what `pkg.module:name` names; the current folder is importable from now on.

    Raises LnrewriteError `code` where the module cannot be imported or lacks the name.
    """
    module_name, _, path = reference.partition(":")
    _import_from_here()
    with code_of_others(lambda why: _failed(reference, f"importing {module_name} raised {why}", code)):
        found: Any = importlib.import_module(module_name)
    for part in path.split("."):
        if not hasattr(found, part):
            known = [name for name in dir(found) if not name.startswith("_")]
            hint = did_you_mean(part, known) if known else ""
            raise _failed(reference, f"{module_name} has no {part!r}", code, hint if hint.startswith("did") else "")
        found = getattr(found, part)
    return found


def _import_from_here() -> None:
    """Make the current folder importable, as `python` itself does."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())


CALLABLE = "name a callable without arguments that returns a torch.nn.Module"
"""What a factory has to be."""


def build(factory: Factory) -> tuple[torch.nn.Module, dict[str, object] | None]:
    """Call a factory and return its module and, where it returns a pair, its example keyword inputs. Raises LN019."""
    import torch

    name = factory if isinstance(factory, str) else getattr(factory, "__qualname__", repr(factory))
    made = import_object(factory) if isinstance(factory, str) else factory
    if not isinstance(made, torch.nn.Module):
        if not callable(made):
            raise _failed(name, f"it is a {type(made).__name__}, neither callable nor a module")
        with code_of_others(lambda why: _failed(name, f"it raised {why}")):
            made = made()
    inputs = None
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Mapping):
        made, inputs = made[0], dict(made[1])
    if not isinstance(made, torch.nn.Module):
        pair = f"return (module, {{'x': tensor}}), inputs by name, or {CALLABLE}" if isinstance(made, tuple) else ""
        raise _failed(name, f"it returned a {type(made).__name__}", remedy=pair)
    if isinstance(made, torch.jit.ScriptModule):
        raise _torchscript(name)
    return made, inputs


def _failed(name: str, why: str, code: Code = Code.LN019, remedy: str = "") -> LnrewriteError:
    what = "data" if code is Code.LN022 else "factory"
    return LnrewriteError(
        code, f"{what} {name!r}", why, remedy or (CALLABLE if code is Code.LN019 else "check the name")
    )


def _torchscript(model: str) -> LnrewriteError:
    remedy = "give the Python module as pkg.module:callable, or save it with torch.export.save"
    return LnrewriteError(Code.LN014, f"model {model!r}", "it is TorchScript, which lnrewrite does not read", remedy)


def _open_callable(source: Source) -> Opened:
    module, inputs = build(source.name)
    return Opened(source.format, module, inputs=inputs)


def _open_demo(source: Source) -> Opened:
    from .. import demo

    name = source.name.removeprefix("demo:")
    if name not in demo.NAMES:
        hint = did_you_mean(name, demo.NAMES)
        raise LnrewriteError(Code.LN001, f"demo model {name!r}", "unknown demo model", hint)
    return Opened(source.format, demo.load(name))


def _open_program(source: Source) -> Opened:
    """Load a torch.export archive; torch's own unpickling is held to tensors unless the archive was trusted."""
    import torch

    _know_outputs(source)
    try:
        limit = _environment("TORCH_FORCE_WEIGHTS_ONLY_LOAD", None if source.unsafe else "1")
        with limit, quiet("torch"), source.file.open("rb") as stream:  # torch wants .pt2 of a path, not of a stream
            program = torch.export.load(stream)
    except Exception as error:  # torch raises whatever the content leads to
        why = told(error).replace("Please check the warnings above for possible errors.", "With -v torch tells more.")
        raise damaged(source.name, f"torch.export.load failed with {why.strip()}") from error
    args, kwargs = _built(source, program.example_inputs or ((), {}))
    return Opened(source.format, program=program, inputs=dict(kwargs) if kwargs and not args else None)


def _know_outputs(source: Source) -> None:
    """Import the transformers modules whose output classes the program returns, for torch.export.load needs them."""
    with zipfile.ZipFile(source.file) as archive:
        models = [archive.read(n) for n in archive.namelist() if n.endswith(".json") and "/models/" in f"/{n}"]
    for name in sorted({n.decode() for model in models for n in _OUTPUT.findall(model)}):
        try:
            importlib.import_module(name.rpartition(".")[0])
        except ImportError as error:
            why, remedy = f"the program returns a {name}", "pip install transformers (or lnrewrite[hf])"
            raise LnrewriteError(Code.LN018, f"model {source.name!r}", why, remedy) from error


def _open_torchscript(source: Source) -> Opened:
    raise _torchscript(source.name)


def _open_onnx(source: Source) -> Opened:
    why = "an ONNX file holds a graph, not a torch module"
    raise LnrewriteError(Code.LN032, f"model {source.name!r}", why, "open it with lnrewrite.load")


@contextlib.contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    """Set an environment variable for a while; None leaves it as it is."""
    before = os.environ.get(name)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        if value is not None:
            os.environ.pop(name) if before is None else os.environ.update({name: before})


def _open_weights(source: Source) -> Opened:
    """Load a file of weights into what the factory builds, or a trusted pickled module as it is."""
    import torch

    factory = source.how.factory
    held = _read_safetensors(source) if source.format is Format.SAFETENSORS else _read_pickle(source)
    if isinstance(held, Mapping) and not _is_state(held):
        held = _unwrap(source, held)
    if isinstance(held, torch.jit.ScriptModule):
        raise _torchscript(source.name)
    if isinstance(held, torch.nn.Module):
        if factory is None:
            return Opened(source.format, held)
        held = held.state_dict()
    if not isinstance(held, Mapping):
        raise not_a_model(source.name, f"the file holds a {type(held).__name__}, neither weights nor a module")
    if factory is None:
        why = f"the file holds {len(held)} weights without the network they belong to"
        remedy = "give --factory pkg.module:callable that returns the module"
        raise LnrewriteError(Code.LN013, f"model {source.name!r}", why, remedy)
    module, inputs = build(factory)
    notes = load_weights(source.name, module, dict(held))
    return Opened(source.format, module, inputs=inputs, notes=notes)


def _read_safetensors(source: Source) -> State:
    from safetensors.torch import load_file

    try:
        return load_file(source.file)
    except Exception as error:  # SafetensorError, or what a dtype that torch lacks raises
        raise damaged(source.name, told(error)) from error


def _read_pickle(source: Source) -> object:
    """Load what torch.save wrote: tensors alone, or whatever it holds where it must and may be unpickled."""
    import pickle

    import torch

    from .layers import NotPlain, read_layers

    try:
        if not source.unsafe:
            why = "torch cannot read it without unpickling (another pickle protocol, or unusual content)"
            try:
                with warnings.catch_warnings(action="ignore"):
                    return read_layers(source.file)
            except NotPlain as error:
                why = str(error)
            except pickle.UnpicklingError:  # harmless names in a pickle that the restricted reader does not understand
                pass
            if not source.how.trust_pickle:
                remedy = "save it with torch.save's default protocol, or trust the file with --trust-pickle"
                raise LnrewriteError(Code.LN012, f"model {source.name!r}", why, remedy)
        _import_from_here()
        with source.file.open("rb") as file:  # of a path torch goes by the suffix
            return torch.load(file, map_location="cpu", weights_only=False)
    except LnrewriteError:
        raise
    except Damaged as error:
        raise damaged(source.name, str(error)) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise damaged(source.name, f"torch.load failed with {told(error)}") from error
    except Exception as error:  # a pickle's own code may raise anything
        remedy = "run where its code is importable, or save only the weights and give --factory"
        raise LnrewriteError(Code.LN029, f"model {source.name!r}", told(error), remedy) from error


def _built(source: Source, held: Any) -> Any:
    """Return what was read, its tensors made of what the file holds. Raises LN015."""
    try:
        check_built(held)
    except Damaged as error:
        raise damaged(source.name, str(error)) from error
    return held


def _is_state(held: Mapping[object, object]) -> bool:
    """Return whether a mapping is a state dict: names to tensors, and at least one."""
    import torch

    return bool(held) and all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in held.items())


def _unwrap(source: Source, held: Mapping[object, object]) -> object:
    """Take the one entry of a training checkpoint that holds the weights, or the module. Raises LN011."""
    import torch

    entries = [held[name] for name in _ENTRIES if name in held]
    found = [e for e in entries if isinstance(e, torch.nn.Module) or isinstance(e, Mapping) and _is_state(e)]
    if len(found) != 1:
        why = f"no one entry of the file holds the weights (found keys: {listed(map(str, held)) or 'none'})"
        raise not_a_model(source.name, why)
    return found[0]


def load_weights(name: str, module: torch.nn.Module, state: State) -> tuple[str, ...]:
    """Load `state` into `module`, every name and shape accounted for, and return notes.

    A prefix that wrappers put before every name is dropped. A weight that the file leaves out is fine where the module
    ties it to one that the file holds. Raises LN016.
    """
    own = module.state_dict(keep_vars=True)
    while prefix := next((p for p in _WRAPPERS if all(k.startswith(p) for k in state)), None):
        if any(k.startswith(prefix) for k in own):
            break
        state = {k.removeprefix(prefix): v for k, v in state.items()}
    groups: dict[int, list[str]] = {}
    for key, value in own.items():
        groups.setdefault(id(value), []).append(key)
    given = {i: [k for k in keys if k in state] for i, keys in groups.items()}
    wrong = {
        "missing from the file": [k for k in own if not given[id(own[k])]],
        "not in the module": [k for k in state if k not in own],
        "of another shape": [
            _shapes(k, state[k], v) for k, v in own.items() if k in state and v.shape != state[k].shape
        ],
    }
    if not any(wrong.values()):
        untied = [k for keys in given.values() for k in _untied(state, keys)]
        wrong["tied in the module and different in the file"] = untied
    if any(wrong.values()):
        why = "; ".join(f"{len(names)} {what}: {listed(names)}" for what, names in wrong.items() if names)
        remedy = "give the factory of the network that the file was saved from"
        raise LnrewriteError(Code.LN016, f"model {name!r}", why, remedy)
    casts = sorted({f"{state[k].dtype} to {own[k].dtype}" for k in state if state[k].dtype != own[k].dtype})
    module.load_state_dict(state, strict=False)
    return tuple(f"weights cast from {cast}".replace("torch.", "") for cast in casts)


def _shapes(key: str, found: torch.Tensor, expected: torch.Tensor) -> str:
    return f"{key} {list(found.shape)} for {list(expected.shape)}"


def _untied(state: State, keys: list[str]) -> list[str]:
    """Return the names of one tied parameter whose values in the file differ from the first's."""
    return [k for k in keys[1:] if not state[k].equal(state[keys[0]])]


def _open_folder(source: Source) -> Opened:
    from .checkpoint import open_folder

    module, notes = open_folder(source)
    return Opened(source.format, module, tokenizer=tokenizer_of(source), notes=notes)


def tokenizer_of(source: Source) -> Tokenizer | None:
    """Return where a folder's tokenizer is; None where it has none."""
    from .transformers import tokenizer_in

    folder = source.path is not None and source.path.is_dir()
    return tokenizer_in(source.file, source.how.trust_remote_code) if folder else None


_OPENERS: dict[Format, Callable[[Source], Opened]] = {
    Format.CALLABLE: _open_callable,
    Format.DEMO: _open_demo,
    Format.PROGRAM: _open_program,
    Format.STATE_DICT: _open_weights,
    Format.SAFETENSORS: _open_weights,
    Format.PICKLE: _open_weights,
    Format.TRANSFORMERS: _open_folder,
    Format.TORCHSCRIPT: _open_torchscript,
    Format.ONNX: _open_onnx,
}
