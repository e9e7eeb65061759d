"""A rewritten network under any head: mixed into the classes of transformers that a folder's modeling file names.

This file goes into it, behind `runtime.py`. A recipe there serves every head: its paths
start at the base network, and with a dot at the model around it.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from torch import nn

from .runtime import Change, apply

PLACES = ("module", "before", "after", "source", "bias")
"""What a change may call the path of the module that it changes."""


PREPARING = ("TOKENIZER", "PROCESSOR", "IMAGE_PROCESSOR", "VIDEO_PROCESSOR", "FEATURE_EXTRACTOR")
"""What prepares a model's inputs, as transformers calls the mappings from a config's class."""


class Rewritten:
    """Mix into a class of transformers: its models are built as their config says that they were rewritten."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        refit(self, config.lnrewrite)  # type: ignore[arg-type]


class Recorded:
    """Mix into a config's class: it names the rewritten classes, also where the base network in a model is saved."""

    def to_dict(self) -> dict[str, object]:
        """Return what is written."""
        content: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        names = [f"Lnrewrite{name.removeprefix('Lnrewrite')}" for name in content.get("architectures") or ()]
        return content | {"architectures": names}


def base_of(model: nn.Module) -> str:
    """Return the name of the child that is a model's base network; "" where the model is one itself."""
    name = getattr(model, "base_model_prefix", "")
    return name if isinstance(getattr(model, name, None), nn.Module) else ""


def refit(model: nn.Module, record: Change) -> None:
    """Change a model as the recipe says that was made for the class `record["model"]`.

    A model of that class takes all of it. One with another head leaves out what it has no part for (a decoder, the
    other head), and what its base network did when it was built. Raises RuntimeError where the recipe does not fit.
    """
    name, made_for, base = type(model).__name__, record["model"].rpartition(".")[2], base_of(model)
    whole, network = name.endswith("Lnrewrite" + made_for), model.get_submodule(base)
    done = bool(base) and isinstance(network, Rewritten)
    changes: list[Change] = []

    def rooted(path: str) -> str:
        return path[1:] if path.startswith(".") else ".".join(part for part in (base, path) if part)

    for change in record["changes"]:
        path = next(change[key] for key in PLACES if key in change)
        around, inner = path.startswith("."), path.removeprefix(".")
        top = inner.partition(".")[0]
        present = not top or hasattr(model if around else network, top) or ("module" in change and inner == top)
        if (done and not around) or not (whole or (present and (base or not around))):
            continue
        paths = {key: rooted(change[key]) for key in PLACES if key in change}
        changes.append({**change, **paths} | ({"by": [rooted(p) for p in change["by"]]} if "by" in change else {}))
    try:
        if not (changes or done):
            raise RuntimeError("it has none of the parts that were changed")
        apply(model, changes)
    except (AttributeError, RuntimeError) as error:
        raise RuntimeError(f"{name} cannot be made what {made_for} was rewritten to: {error}") from error


def stand_in(config: Any, original: Any, network: Any) -> None:
    """Make transformers find a config's own base network, in any head, and the original's tokenizer and processors.

    Its auto classes go by the name of the config's class; pipelines and the Trainer go by those of the models' classes.
    """
    auto = importlib.import_module("transformers.models.auto")
    if network is not None:
        auto.AutoModel.register(config, network, exist_ok=True)
    for key, names in vars(auto.modeling_auto).items():
        if key.startswith("MODEL") and key.endswith("_NAMES") and isinstance(names.get(original.model_type), str):
            names[config.model_type] = "Lnrewrite" + names[original.model_type]
    for kind in PREPARING:
        with contextlib.suppress(ImportError, TypeError):  # where the packages that it needs are missing
            mapping: Any = getattr(auto, f"{kind}_MAPPING", ())
            if original in mapping:
                mapping.register(config, mapping[original], exist_ok=True)
