"""What one rewrite of a module changed, so that it can be undone: when it fails, or when somebody asks."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..compat.transformers import config_of
from ..errors import Code, LnrewriteError
from ..recipe.runtime import FUSED
from .recipes import Change

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def configs_of(module: nn.Module) -> list[PretrainedConfig]:
    """Return the configs that say whether a transformers model ties its embeddings; it ties again when it is saved."""
    config = config_of(module)
    if config is None:
        return []
    return [c for c in (config, config.get_text_config()) if hasattr(c, "tie_word_embeddings")]


RECORD = "_lnrewrite"
"""Where a rewritten module keeps the logs of its rewrites."""

Slots = dict[str, dict[Hashable, object]]


@dataclass
class UndoLog:
    """Hold what one rewrite changed: rows (module, dict of it, key, old, new), classes, and old values."""

    recipe: list[Change] = field(default_factory=list)
    pipeline: str = ""
    rows: list[tuple[nn.Module, str, Hashable, object, object]] = field(default_factory=list)
    classes: list[tuple[nn.Module, type, type]] = field(default_factory=list)
    values: list[Kept] = field(default_factory=list)
    configs: list[tuple[PretrainedConfig, bool]] = field(default_factory=list)

    def check(self) -> None:
        """Raise LnrewriteError LN314 where something was changed since."""
        changed = [slot for m, slot, key, _, new in self.rows if getattr(m, slot).get(key, _MISSING) is not new]
        changed += [m.__class__.__name__ for m, _, new in self.classes if type(m) is not new]
        if changed:
            raise LnrewriteError(
                Code.LN314, changed[0], "the structure has changed since the rewrite", "undo those changes first"
            )
        if any(value.old is None for value in self.values):
            raise LnrewriteError(Code.LN314, "weights", "their old values were not kept", "rewrite with undo=True")
        if any(_checksum(value.parameter) != value.after for value in self.values):
            raise LnrewriteError(
                Code.LN314, "weights", "they have changed since the rewrite", "load the original checkpoint instead"
            )

    def undo(self) -> None:
        """Put everything back."""
        for holder, slot, key, old, _ in reversed(self.rows):
            held = getattr(holder, slot)
            held.pop(key, None) if old is _MISSING else held.update({key: old})
        for holder, before, _ in self.classes:
            holder.__class__ = before
        with torch.no_grad():
            for value in self.values:
                if value.old is not None:
                    value.parameter.copy_(value.old)
        for config, tied in self.configs:
            config.tie_word_embeddings = tied


@dataclass
class Kept:
    """Hold a parameter, what it held before the rewrite, and the checksum of what it was given."""

    parameter: nn.Parameter
    old: torch.Tensor | None
    after: int = 0


class _Missing:
    """Represent a key that a dict lacks; one object, also in a copy."""

    def __deepcopy__(self, memo: object) -> _Missing:
        return self

    def __reduce__(self) -> str:
        return "_MISSING"


_MISSING = _Missing()


@contextmanager
def all_or_nothing(module: nn.Module, keep: bool) -> Iterator[UndoLog]:
    """Note what happens to a module; on an error put everything back, else log it on the module."""
    log = UndoLog(configs=[(c, c.tie_word_embeddings) for c in configs_of(module)])
    before = {m: (type(m), _slots(m)) for m in module.modules()}
    values = [Kept(p, p.detach().clone()) for p in module.parameters()]
    try:
        yield log
    except BaseException:
        _note(log, before, values)
        log.undo()
        raise
    _note(log, before, values)
    for value in log.values:
        value.old = value.old if keep else None
    vars(module).setdefault(RECORD, []).append(log)


def _note(
    log: UndoLog,
    before: Mapping[nn.Module, tuple[type, Slots]],
    values: Sequence[Kept],
) -> None:
    """Fill a log with what changed."""
    for m, (cls, slots) in before.items():
        if type(m) is not cls:
            log.classes.append((m, cls, type(m)))
        for slot, now in _slots(m).items():
            old = slots.get(slot, {})
            keys = [k for k in {**old, **now} if old.get(k, _MISSING) is not now.get(k, _MISSING)]
            log.rows += [(m, slot, k, old.get(k, _MISSING), now.get(k, _MISSING)) for k in keys]
    log.values += [v for v in values if v.old is not None and not torch.equal(v.parameter, v.old)]
    for value in log.values:
        value.after = _checksum(value.parameter)


def _checksum(parameter: nn.Parameter) -> int:
    return zlib.crc32(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


def _slots(module: nn.Module) -> Slots:
    """Return the dicts that hold a module's children, parameters and hooks, and of its attributes what `apply` sets."""
    own = vars(module)
    held: Slots = {k: dict(v) for k, v in own.items() if isinstance(v, dict)}
    return held | {"__dict__": {k: own[k] for k in FUSED if k in own}}
