"""What lnrewrite takes of transformers.exporters, which is experimental: this file alone talks to it.

It knows what to patch in transformers, while a model is traced with its cache, so that the graph holds at every size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from transformers import PreTrainedModel

__all__ = ["NEEDED", "WINDOW", "fits", "traced"]

WINDOW = ((5, 23), (6, 0))
"""The versions of transformers whose exporters are taken: from the first, which is tested, to below the second."""
NEEDED = "transformers {}.{} to below {}.{}".format(*WINDOW[0], *WINDOW[1])
"""The window in words."""


def fits() -> bool:
    """Return whether the transformers that is installed lies in the window."""
    try:
        held = version("transformers").split(".")
    except PackageNotFoundError:
        return False
    return WINDOW[0] <= (int(held[0]), int(held[1])) < WINDOW[1]


def traced(
    model: PreTrainedModel, forward: Callable[..., Any], inputs: Mapping[str, Any], free: Mapping[str, Any]
) -> ExportedProgram:
    """Trace `forward`, which calls the model's own, with the exporter's patches; parameters keep the model's names.

    inputs: tensors, or lists of them, by the arguments of `forward`. free: their free axes, as torch.export takes them.
    """
    from transformers.exporters.configs import DynamoConfig
    from transformers.exporters.exporter_dynamo import DynamoExporter

    exporter: Any = DynamoExporter
    twin: Any = copy.copy(model)  # shares every submodule and parameter, so that the model keeps its own forward
    twin.forward = forward
    program, _ = exporter().export_program(twin, dict(inputs), DynamoConfig(dynamic_shapes=dict(free)))
    found: ExportedProgram = program
    return found
