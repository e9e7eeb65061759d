"""What lnrewrite needs of transformers and transformers has no public name for."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["NotCopied", "batch_experts", "config_of", "model_classes"]


class NotCopied:
    """Keep transformers from copying the file that a config's class is written in beside what it saves."""

    _auto_class = None


def config_of(module: nn.Module) -> PretrainedConfig | None:
    """Return the config of a transformers model, None for any other module; transformers is not imported for it."""
    library, config = sys.modules.get("transformers"), getattr(module, "config", None)
    return config if library is not None and isinstance(config, library.PretrainedConfig) else None


def batch_experts(config: PretrainedConfig) -> None:
    """Make a model of this config run its experts as one batched product, which torch.export can follow."""
    config._experts_implementation = "batched_mm"


def model_classes(auto: type) -> Mapping[type, type[PreTrainedModel] | tuple[type[PreTrainedModel], ...]]:
    """Return what an auto class makes, by the class of the config; nothing for one that makes no models."""
    found = getattr(auto, "_model_mapping", None)
    return {} if found is None else found
