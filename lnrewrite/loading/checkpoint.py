"""Open a transformers checkpoint folder: from this disk only, its code only when trusted, no weight left random."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ..compat.transformers import batch_experts
from ..errors import Code, LnrewriteError, told
from .identify import damaged, listed, not_a_model
from .source import Source
from .transformers import library
from .weighing import weighed

if TYPE_CHECKING:
    import torch


def open_folder(source: Source) -> tuple[torch.nn.Module, tuple[str, ...]]:
    """Load the network that the folder's config names, with its weights, ready to be exported; return it and notes.

    The class is the one that `architectures` names, else the config's causal language model, else its bare network.
    `use_cache` is off and experts run as batched matrix products, for only these can be exported. Raises LN017 for
    code that the folder brings, LN018 without transformers, LN015, LN016 and LN028 for its content.
    """
    with library(source) as (transformers, _, remote):
        config = _config(source, remote)
        return _load(source, _class(transformers, config, remote), config, remote)


def empty_model(source: Source, dtype: torch.dtype) -> torch.nn.Module:
    """Build the network that the folder's config names without its weights: parameters on the meta device.

    Buffers are real. Raises as `open_folder`, LN011 where the network cannot be built from the config alone.
    """
    import torch

    with library(source) as (transformers, _, remote), _meta_parameters():
        config = _config(source, remote)
        found = _class(transformers, config, remote)
        make = getattr(found, "from_config", found)
        how = {"trust_remote_code": remote} if make is not found else {}
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with weighed(source.name, source.file), torch.device("meta"):
                make(config, **how)  # buffers too take no memory here
            module = make(config, **how)
        except LnrewriteError:
            raise
        except Exception as error:  # a network's own checks raise anything
            raise not_a_model(source.name, f"{found.__name__} cannot be built from its config: {error}") from error
        finally:
            torch.set_default_dtype(before)
        module.tie_weights()
        return module.eval()  # type: ignore[no-any-return]


def blank_model(model_type: str, fields: dict[str, object], causal: bool, dtype: torch.dtype) -> torch.nn.Module:
    """Build a stock network of transformers from its config's fields, all its parameters zero; buffers are real.

    causal: with the head of a causal language model, else the bare network. Raises what the library does for a config
    that it does not take.
    """
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    made: Any = AutoModelForCausalLM if causal else AutoModel
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _meta_parameters():
            module = made.from_config(AutoConfig.for_model(model_type, **fields))
        for name, parameter in list(module.named_parameters()):
            holder = module.get_submodule(name.rpartition(".")[0])
            zeros = torch.zeros(parameter.shape, dtype=parameter.dtype)  # takes no memory before it is written
            setattr(holder, name.rpartition(".")[2], torch.nn.Parameter(zeros))
    finally:
        torch.set_default_dtype(before)
    module.tie_weights()
    return module.eval()  # type: ignore[no-any-return]


@contextlib.contextmanager
def _meta_parameters() -> Iterator[None]:
    """Make every parameter that a module registers be on the meta device: its memory is never touched."""
    from torch.nn import Parameter
    from torch.nn.modules.module import register_module_parameter_registration_hook

    def moved(module: torch.nn.Module, name: str, param: Parameter | None) -> Parameter | None:
        return None if param is None or param.is_meta else Parameter(param.detach().to("meta"), param.requires_grad)

    hook = register_module_parameter_registration_hook(moved)  # type: ignore[arg-type]  # it may return a parameter
    try:
        yield
    finally:
        hook.remove()


def _config(source: Source, remote: bool) -> object:
    """Read the folder's config, set for export. Raises LN011 for a model type that transformers does not know."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(source.file, local_files_only=True, trust_remote_code=remote)
        for part in (config, config.get_text_config()):
            if hasattr(part, "use_cache"):
                part.use_cache = False
        batch_experts(config)
    except Exception as error:  # a config's own checks raise anything
        raise not_a_model(source.name, f"transformers cannot read its config: {error}") from error
    return config


def _class(transformers: Any, config: Any, remote: bool) -> Any:
    """Choose what to build: the class that the config names, or the auto class that knows the config."""
    named = next(iter(config.architectures or ()), "")
    found = None if remote else getattr(transformers, named, None)
    if inspect.isclass(found) and issubclass(found, transformers.PreTrainedModel):
        return found
    causal = transformers.AutoModelForCausalLM
    if remote:
        code = {auto: str(ref) for auto, ref in getattr(config, "auto_map", {}).items() if auto.startswith("AutoModel")}
        known = [auto for auto, ref in code.items() if ref.endswith(f".{named}")] or code
        return getattr(transformers, min(known, key=lambda n: (n != "AutoModelForCausalLM", n), default="AutoModel"))
    return causal if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING else transformers.AutoModel


def _load(source: Source, found: Any, config: Any, remote: bool) -> tuple[torch.nn.Module, tuple[str, ...]]:
    """Load the weights; a network whose pooler the checkpoint lacks is built without one. Raises LN015, LN016."""
    options: dict[str, object] = {"config": config, "local_files_only": True, "output_loading_info": True}
    options |= {"weights_only": not (source.how.trust_pickle and source.unsafe), "trust_remote_code": remote}
    options["ignore_mismatched_sizes"] = True  # they are told of in `info`, and raised for here
    notes: list[str] = []
    try:
        with weighed(source.name, source.file):
            module, info = found.from_pretrained(source.file, **options)
            if _lacks_pooler(module, info["missing_keys"]):
                module, info = found.from_pretrained(source.file, add_pooling_layer=False, **options)
                notes.append("built without the pooler, which the checkpoint does not hold")
    except LnrewriteError:
        raise
    except Exception as error:  # safetensors, pickle, shape and file errors of three libraries
        raise damaged(source.name, f"transformers could not load it: {told(error)}") from error
    for key, there, wanted in sorted(info["mismatched_keys"]):
        raise _misfit(source, f"{key} is {list(there)} in the checkpoint, and {list(wanted)} by its config")
    if missing := sorted(info["missing_keys"]):
        raise _misfit(source, f"{len(missing)} weights are missing from the checkpoint: {listed(missing)}")
    if unexpected := sorted(info["unexpected_keys"]):
        used = f"are not used by {type(module).__name__}"
        notes.append(f"{len(unexpected)} weights of the checkpoint {used}: {listed(unexpected)}")
    return module, tuple(notes)


def _lacks_pooler(module: torch.nn.Module, missing: Iterable[str]) -> bool:
    """Return whether all that is missing is a pooler that the network's class can do without."""
    keys = list(missing)
    makers: list[Any] = [vars(cls)["__init__"] for cls in type(module).__mro__ if "__init__" in vars(cls)]
    optional = any("add_pooling_layer" in inspect.signature(made).parameters for made in makers[:-1])
    return optional and bool(keys) and all(".pooler." in f".{key}" for key in keys)


def _misfit(source: Source, why: str) -> LnrewriteError:
    remedy = "check `architectures` in config.json against the weights"
    return LnrewriteError(Code.LN016, f"model {source.name!r}", why, remedy)
