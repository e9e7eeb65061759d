"""Open a MODEL: a path or a name becomes a torch module in eval mode, or an exported program. See `forms.identify`."""

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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import Code, LnrewriteError, Untrusted, code_of_others, did_you_mean, told
from ..quiet import quiet
from .identify import Form, Format, damaged, identify, listed, not_a_model
from .pickles import Damaged, check_built

if TYPE_CHECKING:
    import torch

    from .transformers import Tokenizer

_OUTPUT = re.compile(
    rb'"type\\*": \\*"(transformers(?:\.\w+)*\.(?:modeling_\w+|cache_utils)\.\w+)\\*"'
)  # in JSON that stands as a string in JSON
Factory = str | Callable[[], Any]
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


def open_module(
    model: str, *, factory: Factory | None = None, trust_pickle: bool = False, trust_remote_code: bool = False
) -> Opened:
    """Open `model` on the CPU, whatever form `identify` finds it to be.

    `factory` builds the network that a file of weights belongs to: `pkg.module:callable` or a callable without
    arguments. Raises LnrewriteError LN001, LN010 to LN019, LN028, LN029 or LN032; nothing that a file names is run
    unless it is trusted.
    """
    form = identify(model)
    if form.unsafe and not trust_pickle:
        raise Untrusted(f"model {model!r}", form.unsafe)
    if form.format is Format.TRANSFORMERS:
        opened = _open_folder(form, trust_pickle, trust_remote_code)
    elif form.format in (Format.STATE_DICT, Format.SAFETENSORS, Format.PICKLE):
        opened = _open_weights(form, factory, trust_pickle)
    else:
        opened = _OPENERS[form.format](form)
    if opened.module is not None:
        opened.module.eval()
    return replace(opened, path=None if form.path is None else str(form.path))


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


def build(factory: Factory) -> tuple[torch.nn.Module, dict[str, Any] | None]:
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
        raise _failed(name, f"it returned a {type(made).__name__}")
    if isinstance(made, torch.jit.ScriptModule):
        raise _torchscript(name)
    return made, inputs


def _failed(name: str, why: str, code: Code = Code.LN019, remedy: str = "") -> LnrewriteError:
    default = "name a callable without arguments that returns a torch.nn.Module"
    what = "data" if code == Code.LN022 else "factory"
    return LnrewriteError(
        code, f"{what} {name!r}", why, remedy or (default if code == Code.LN019 else "check the name")
    )


def _torchscript(model: str) -> LnrewriteError:
    remedy = "give the Python module as pkg.module:callable, or save it with torch.export.save"
    return LnrewriteError(Code.LN014, f"model {model!r}", "it is TorchScript, which is not read", remedy)


def _open_callable(form: Form) -> Opened:
    module, inputs = build(form.name)
    return Opened(form.format, module, inputs=inputs)


def _open_demo(form: Form) -> Opened:
    from .. import demo

    name = form.name.removeprefix("demo:")
    if name not in demo.NAMES:
        hint = did_you_mean(name, demo.NAMES)
        raise LnrewriteError(Code.LN001, f"demo model {name!r}", "there is no such demo model", hint)
    return Opened(form.format, demo.load(name))


def _open_program(form: Form) -> Opened:
    """Load a torch.export archive; torch's own unpickling is held to tensors unless the archive was trusted."""
    import torch

    _know_outputs(form)
    try:
        limit = _environment("TORCH_FORCE_WEIGHTS_ONLY_LOAD", None if form.unsafe else "1")
        with limit, quiet("torch"), _path_of(form).open("rb") as stream:  # torch wants .pt2 of a path, not of a stream
            program = torch.export.load(stream)
    except Exception as error:  # torch raises whatever the content leads to
        why = told(error).replace("Please check the warnings above for possible errors.", "With -v torch tells more.")
        raise damaged(form.name, f"torch.export.load failed with {why.strip()}") from error
    args, kwargs = _built(form, program.example_inputs or ((), {}))
    return Opened(form.format, program=program, inputs=dict(kwargs) if kwargs and not args else None)


def _know_outputs(form: Form) -> None:
    """Import the transformers modules whose output classes the program returns, for torch.export.load needs them."""
    with zipfile.ZipFile(_path_of(form)) as archive:
        models = [archive.read(n) for n in archive.namelist() if n.endswith(".json") and "/models/" in f"/{n}"]
    for name in sorted({n.decode() for model in models for n in _OUTPUT.findall(model)}):
        try:
            importlib.import_module(name.rpartition(".")[0])
        except ImportError as error:
            why, remedy = f"the program returns a {name}", "pip install transformers (or lnrewrite[hf])"
            raise LnrewriteError(Code.LN018, f"model {form.name!r}", why, remedy) from error


def _open_torchscript(form: Form) -> Opened:
    raise _torchscript(form.name)


def _open_onnx(form: Form) -> Opened:
    why = "an ONNX file holds a graph, not a torch module"
    raise LnrewriteError(Code.LN032, f"model {form.name!r}", why, "open it with lnrewrite.load")


_OPENERS: dict[Format, Callable[[Form], Opened]] = {
    Format.CALLABLE: _open_callable,
    Format.DEMO: _open_demo,
    Format.PROGRAM: _open_program,
    Format.TORCHSCRIPT: _open_torchscript,
    Format.ONNX: _open_onnx,
}


def _path_of(form: Form) -> Path:
    assert form.path is not None, form
    return form.path


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


def _open_weights(form: Form, factory: Factory | None, trust_pickle: bool) -> Opened:
    """Load a file of weights into what the factory builds, or a trusted pickled module as it is."""
    import torch

    held = _read_safetensors(form) if form.format is Format.SAFETENSORS else _read_pickle(form, trust_pickle)
    if isinstance(held, Mapping) and not _is_state(held):
        held = _unwrap(form, held)
    if isinstance(held, torch.jit.ScriptModule):
        raise _torchscript(form.name)
    if isinstance(held, torch.nn.Module):
        if factory is None:
            return Opened(form.format, held)
        held = held.state_dict()
    if not isinstance(held, Mapping):
        raise not_a_model(form.name, f"the file holds a {type(held).__name__}, neither weights nor a module")
    if factory is None:
        why = f"the file holds {len(held)} weights without the network they belong to"
        remedy = "give --factory pkg.module:callable that returns the module"
        raise LnrewriteError(Code.LN013, f"model {form.name!r}", why, remedy)
    module, inputs = build(factory)
    notes = load_weights(form.name, module, dict(held))
    return Opened(form.format, module, inputs=inputs, notes=notes)


def _read_safetensors(form: Form) -> State:
    from safetensors.torch import load_file

    try:
        return load_file(_path_of(form))
    except Exception as error:  # SafetensorError, or what a dtype that torch lacks raises
        raise damaged(form.name, told(error)) from error


def _read_pickle(form: Form, trust_pickle: bool) -> Any:
    """Load what torch.save wrote: tensors alone, or whatever it holds where it must and may be unpickled."""
    import pickle

    import torch

    try:
        if not form.unsafe:
            with contextlib.suppress(pickle.UnpicklingError), warnings.catch_warnings(action="ignore"):
                return _built(form, torch.load(_path_of(form), map_location="cpu", weights_only=True))
            if not trust_pickle:  # harmless names in a pickle that torch's restricted reader does not understand
                why = "torch cannot read it without unpickling (another pickle protocol, or unusual content)"
                remedy = "save it with torch.save's default protocol, or trust the file with --trust-pickle"
                raise LnrewriteError(Code.LN012, f"model {form.name!r}", why, remedy)
        _import_from_here()
        return torch.load(_path_of(form), map_location="cpu", weights_only=False)
    except LnrewriteError:
        raise
    except (RuntimeError, EOFError, OSError) as error:
        raise damaged(form.name, f"torch.load failed with {told(error)}") from error
    except Exception as error:  # a pickle's own code may raise anything
        remedy = "run where its code is importable, or save the weights alone and give --factory"
        raise LnrewriteError(Code.LN029, f"model {form.name!r}", told(error), remedy) from error


def _built(form: Form, held: Any) -> Any:
    """Return what was read, its tensors made of what the file holds. Raises LN015."""
    try:
        check_built(held)
    except Damaged as error:
        raise damaged(form.name, str(error)) from error
    return held


def _is_state(held: Mapping[Any, Any]) -> bool:
    """Return whether a mapping is a state dict: names to tensors, and at least one."""
    import torch

    return bool(held) and all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in held.items())


def _unwrap(form: Form, held: Mapping[Any, Any]) -> Any:
    """Take the one entry of a training checkpoint that holds the weights, or the module. Raises LN011."""
    import torch

    entries = [held[name] for name in _ENTRIES if name in held]
    found = [e for e in entries if isinstance(e, torch.nn.Module) or isinstance(e, Mapping) and _is_state(e)]
    if len(found) != 1:
        why = f"the file holds a dict of {listed(map(str, held)) or 'nothing'}, in which the weights are not to be told"
        raise not_a_model(form.name, why)
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


def _open_folder(form: Form, trust_pickle: bool, trust_remote_code: bool) -> Opened:
    from .checkpoint import open_folder
    from .transformers import tokenizer_in

    module, notes = open_folder(form, trust_pickle=trust_pickle, trust_remote_code=trust_remote_code)
    tokenizer = tokenizer_in(_path_of(form), trust_remote_code)
    return Opened(form.format, module, tokenizer=tokenizer, notes=notes)
