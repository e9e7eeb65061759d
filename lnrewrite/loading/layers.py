"""Open a network of torch's own layers that was pickled whole, without letting the pickle make anything.

torch's restricted reader meets an inert record in place of every layer's class: it takes the attributes as the file has
them, and nothing else. Where all of them are plain data of the kinds that a layer has, the layer is made of them as its
own unpickling would make it; any other attribute, a hook or a method's name among them, is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .pickles import check_built

FUNCTIONS = (F.relu, F.gelu, F.silu, F.leaky_relu, F.elu, F.selu, F.mish, F.softplus, F.hardswish, F.tanh, F.sigmoid)
"""Functions that a layer may hold: TransformerEncoderLayer keeps its activation so."""


UNDER_WAY = object()


class NotPlain(ValueError):
    """Say what a pickled network holds that is not torch's own layers."""


class Record:
    """Hold what a pickle says of one layer: its attributes. It cannot be called with anything."""

    layer: ClassVar[type[nn.Module]]

    def __setstate__(self, state: object) -> None:
        self.state = state


class Named:
    """Stand for a function that a pickle names; never made."""

    function: ClassVar[Callable[..., Tensor]]


@cache
def known() -> Mapping[str, type[Record | Named]]:
    """Return, by the names that pickles have for them, what stands for torch's layers and functions."""
    public = [getattr(nn.modules, name) for name in nn.modules.__all__]
    kinds = [
        k for k in (*public, NonDynamicallyQuantizableLinear) if not issubclass(k, nn.modules.lazy.LazyModuleMixin)
    ]
    stands: dict[str, type[Record | Named]] = {}
    stands |= {f"{k.__module__}.{k.__name__}": type(k.__name__, (Record,), {"layer": k}) for k in kinds}
    named = [(f, f"{f.__module__}.{f.__name__}") for f in FUNCTIONS]
    return stands | {name: type(f.__name__, (Named,), {"function": staticmethod(f)}) for f, name in named}


def read_layers(path: Path) -> object:
    """Return what torch.save wrote at `path`: tensors, plain data and torch's own layers. Raises NotPlain, Damaged."""
    stands: list[Any] = [(stand, name) for name, stand in known().items()]
    try:
        with torch.serialization.safe_globals(stands), path.open("rb") as file:  # of a path torch goes by the suffix
            held = torch.load(file, map_location="cpu", weights_only=True)
    except TypeError as error:  # a record takes no arguments
        raise NotPlain(f"it would call a layer's class: {error}") from error
    try:
        return _Making().of(held)
    except RecursionError:
        raise NotPlain("its layers lie too deep in each other") from None


class _Making:
    """Make layers of records, and containers of what they hold: one of each, however often a pickle names it."""

    def __init__(self) -> None:
        self.made: dict[int, object] = {}

    def of(self, held: object) -> object:
        """Return what a record stands for; containers with all they hold. Raises NotPlain, Damaged."""
        if isinstance(held, type) and issubclass(held, Named):
            return held.function
        if not isinstance(held, Record) and type(held) not in (dict, OrderedDict, list, tuple, set):
            check_built(held)
            return held
        if id(held) not in self.made:
            self.made[id(held)] = UNDER_WAY
            self.made[id(held)] = self.layer(held) if isinstance(held, Record) else self.container(held)
        elif self.made[id(held)] is UNDER_WAY:
            raise NotPlain("something in it lies in itself")
        return self.made[id(held)]

    def container(self, held: Any) -> object:
        """Return a container of the same kind."""
        if isinstance(held, dict):
            return type(held)((key, self.of(value)) for key, value in held.items())
        return type(held)(map(self.of, held))

    def layer(self, record: Record) -> nn.Module:
        """Return the layer that a record holds the attributes of, as its own unpickling would make it."""
        state = self.of(getattr(record, "state", None))
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise NotPlain(f"a {record.layer.__name__} has no attributes")
        _check(record.layer, state)
        made: Any = record.layer.__new__(record.layer)
        made.__setstate__(state)
        return cast(nn.Module, made)


def _check(layer: type[nn.Module], state: Mapping[str, object]) -> None:
    """Raise NotPlain where attributes are not those of a layer: what every module has, no hooks, no methods."""
    kinds: dict[str, Any] = {"_parameters": nn.Parameter, "_buffers": Tensor, "_modules": nn.Module}
    for name, usual in vars(nn.Module()).items():
        mine, kind = state.get(name, usual), kinds.get(name)
        if kind:
            each = mine.values() if isinstance(mine, dict) and name in state else ["nothing"]
            plain = all(v is None or isinstance(v, kind) for v in each)
        else:  # the other dicts are hooks
            plain = not mine if isinstance(usual, dict) else isinstance(mine, (type(usual), bool))
        if not plain:
            raise NotPlain(f"the {name} of a {layer.__name__} hold more than a layer of torch")
    if taken := sorted(name for name in state if callable(getattr(layer, name, None))):
        raise NotPlain(f"a {layer.__name__} has its {taken[0]} replaced")
