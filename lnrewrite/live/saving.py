"""What a rewritten transformers model is written with: a record in its config, and a modeling file.

A folder gets them when it is converted, and a living module when it saves itself (`save_pretrained`).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from .._version import __version__
from ..compat.transformers import NotCopied, config_of, model_classes
from ..errors import Code, LnrewriteError
from ..recipe.heads import PLACES, base_of
from ..recipe.modeling import CLASS, FILE, KEY, generate, record_of, with_record
from .undoing import RECORD, UndoLog

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from .recipes import Change

Content = dict[str, Any]
"""What a JSON file holds."""


def recorded(content: Content, module: Any, changes: Sequence[Change], pipeline: str) -> Content:
    """Return a config.json with what was done, after what was done before.

    `network` is the class of the base network, `classes` has what each auto class makes: of those only that look for
    their base network's weights under the same name. LN310: a class of other code, or one that no auto class opens.
    """
    import transformers

    before = record_of(content) or {}
    cls = type(module)
    config = type(module.config)
    name = cls.__name__.removeprefix(CLASS)
    names: Content = {key: f"{c.__module__}.{c.__qualname__}" for key, c in (("model", cls), ("config", config))}
    known = {} if before else auto_classes(module)
    heads = {auto: c.__name__ for auto, c in known.items() if c.base_model_prefix == cls.base_model_prefix}
    names |= {"network": known["AutoModel"].__name__ if "AutoModel" in known else None, "classes": heads}
    names |= {key: before[key] for key in names if before}
    versions = {"lnrewrite": __version__, "transformers": transformers.__version__}
    rows = [*before.get("changes", ()), *(seen_from(base_of(module), change) for change in changes)]
    record = {**names, **versions, "pipeline": pipeline, "changes": rows}
    try:
        generate(record)
        if name not in names["classes"].values():
            raise ValueError("no auto class of transformers opens it")
    except ValueError as error:
        remedy = "use -o OUT.pt2, or rewrite the loaded module (lnr.rewrite) and keep its state_dict"
        raise LnrewriteError(Code.LN310, cls.__name__, str(error), remedy) from error
    return with_record(content, record, name)


def auto_classes(module: PreTrainedModel) -> dict[str, type[PreTrainedModel]]:
    """Return what transformers' auto classes make of a module's config: the module's own class, or their first."""
    import transformers

    found = {}
    for auto in (name for name in dir(transformers) if name.startswith("Auto")):
        mapping = model_classes(getattr(transformers, auto))
        if type(module.config) not in mapping:
            continue
        known = mapping[type(module.config)]
        known = known if isinstance(known, tuple) else (known,)
        cls = next((c for c in known if isinstance(module, c)), known[0])
        whole = issubclass(cls, transformers.PreTrainedModel) and isinstance(module.config, cls.config_class or ())
        if whole and getattr(transformers, cls.__name__, None) is cls:  # not a class for a part of the config
            found[auto] = cls
    return found


def seen_from(base: str, change: Content) -> Content:
    """Return a change with paths from the base network, as `heads.py` reads them; with a dot they start outside."""

    def path(name: str) -> str:
        if not base:
            return name
        if name == base:
            return ""
        return name.removeprefix(f"{base}.") if name.startswith(f"{base}.") else f".{name}"

    paths = {key: path(change[key]) for key in PLACES if key in change}
    return {**change, **paths} | ({"by": [path(p) for p in change["by"]]} if "by" in change else {})


def save_as_rewritten(module: nn.Module) -> None:
    """Make a rewritten transformers model save itself as what it is, and its parts refuse to save themselves."""
    for name, part in module.named_modules():
        if hasattr(part, "save_pretrained") and config_of(part) is not None:
            vars(part)["save_pretrained"] = Refusing(name, type(module).__name__) if name else Saving(module)


def save_as_before(module: nn.Module) -> None:
    """Take back what `save_as_rewritten` did."""
    for part in module.modules():
        vars(part).pop("save_pretrained", None)


class Saving:
    """Represent a rewritten model's `save_pretrained`: what it writes opens as what the model is."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, save_directory: str | os.PathLike[str], *args: Any, **how: Any) -> object:
        """Save as transformers does, with the modeling file and a config that names it. Raises LnrewriteError LN310."""
        module, config = self.module, self.module.config
        module.config = written(module)
        if module.config is not config:
            how["save_original_format"] = False  # a rewritten class loads weights by its own names only
        try:
            return type(module).save_pretrained(module, save_directory, *args, **how)
        finally:
            module.config = config


@dataclass(frozen=True)
class Refusing:
    """Represent the `save_pretrained` of a part of a rewritten model, which would be written as unchanged."""

    name: str
    whole: str

    def __call__(self, *args: object, **how: object) -> NoReturn:
        """Raise LnrewriteError LN310."""
        remedy = f"save the {self.whole} (AutoModel opens its base network), or rewrite this part on its own"
        raise LnrewriteError(Code.LN310, self.name, f"it is part of a {self.whole} that was rewritten", remedy)


def written(module: Any) -> PretrainedConfig:
    """Return a copy of a rewritten model's config that writes the record, and the modeling file before it."""
    rows: list[UndoLog] = vars(module)[RECORD]
    config: PretrainedConfig = module.config
    changes = [change for row in rows for change in row.recipe if "untie" not in change]
    if not changes:
        return config
    record = recorded(config.to_dict(), module, changes, ",".join(row.pipeline for row in rows))[KEY]
    code, name = generate(record), type(module).__name__.removeprefix(CLASS)

    class Written(NotCopied, type(config)):  # type: ignore[misc]
        def save_pretrained(self, folder: str | os.PathLike[str], *args: object, **how: object) -> None:
            Path(folder, FILE).write_text(code)
            super().save_pretrained(folder, *args, **how)

        def to_diff_dict(self) -> Content:
            return with_record(super().to_diff_dict(), record, name)

    found: PretrainedConfig = copy.deepcopy(config)
    found.__class__ = Written
    return found
