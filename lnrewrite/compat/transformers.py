"""What lnrewrite needs of transformers and transformers has no public name for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["NotCopied", "batch_experts", "model_classes"]


class NotCopied:
    """Keep transformers from copying the file that a config's class is written in beside what it saves."""

    _auto_class = None


def batch_experts(config: PretrainedConfig) -> None:
    """Make a model of this config run its experts as one batched product, which torch.export can follow."""
    config._experts_implementation = "batched_mm"


def model_classes(auto: type) -> Mapping[type, type[PreTrainedModel] | tuple[type[PreTrainedModel], ...]]:
    """Return what an auto class makes, by the class of the config; nothing for one that makes no models."""
    found = getattr(auto, "_model_mapping", None)
    return {} if found is None else found
