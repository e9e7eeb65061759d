"""Write a network as a stock architecture: find a host that fits, carry the weights over, write, load, compare."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..backends.torch.capture import capture_module
from ..backends.torch.lift import parameter_names
from ..checkpoints.writing import WEIGHTS, carry, whole
from ..comparison.verifying import compare
from ..errors import Code, LnrewriteError, told
from ..files.output import check_folder
from ..live.rewriting import ROUNDED
from ..loading.checkpoint import blank_model
from ..loading.identify import identify
from ..loading.open import open_module
from ..loading.transformers import closed
from ..models.program import Program
from ..quiet import LOGGER
from . import idle
from .carrying import Carrier, tail
from .host import Host, Misfit, Numbers
from .matching import match
from .numbers import check_whole, head_of, numbers_of
from .tables import Tables
from .views import View

GENERATION = "generation_config.json"

PROVED = 1e-6
"""How far the host's outputs may be from the network's in float64, relative."""


@dataclass(frozen=True)
class Fit:
    """Say whether a network with its norms in one placement fits a host, or what one thing keeps it out."""

    host: str
    placement: str
    fits: bool
    why: str = ""

    def to_dict(self) -> dict[str, object]:
        """Return the row of `inspect --hosts --json`."""
        return asdict(self)


@dataclass(frozen=True)
class Rehosted:
    """Say what was written: the host, the folder, and how far its outputs are from the network's, relative."""

    host: str
    output: str
    relative_error: float
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Return the object of `rehost --json`."""
        return {**asdict(self), "notes": list(self.notes)}

    def __str__(self) -> str:
        off = f"loaded again, its outputs are {self.relative_error:.1e} (relative) off"
        text = f"{self.output} is a stock {self.host}: {off}"
        return "\n".join([text, *(f"note: {note}" for note in self.notes)])


Blanks = dict[str, "HostView"]
"""Hosts with nothing in them, by their names and configs, each built and captured once."""


@dataclass(frozen=True, eq=False)
class Guest:
    """Hold a network that looks for a host: what is seen in it, its numbers, and the type that its weights have."""

    view: View
    numbers: Numbers
    dtype: torch.dtype
    blanks: Blanks

    @classmethod
    def of(cls, program: Program, config: Any, blanks: Blanks | None = None) -> Guest:
        """Look at a network; `config` is that of its folder. Raises Misfit where no host could have it."""
        padding = getattr(config, "pad_token_id", None)
        view = View(program, padding=-1 if padding is None else padding)
        check_whole(view)
        weight = view.tensor(view.stream.sources[0].param)
        return cls(view, numbers_of(view, config), weight.dtype, {} if blanks is None else blanks)

    def trial(self, host: Host) -> Numbers:
        """Compare with a host of one layer, and return the numbers for one that holds it. Raises Misfit."""
        numbers, blank = self.numbers, self._blank(host, self.numbers.of_layers(1))
        if numbers.tied and not self._alike(blank):
            numbers = replace(numbers, tied=False)
            blank = self._blank(host, numbers.of_layers(1))
        match(self.view, blank, numbers, Carrier(self.view, blank, whole=False))
        return numbers.of_layers(numbers.layers + idle.wanted(self.view, blank))

    def _alike(self, blank: View) -> bool:
        """Return whether one table can be embedding and head: the two networks multiply both by the same."""
        factors = [Tables.of(view).factor * tail(view, head_of(view.stream)[0]) for view in (self.view, blank)]
        return abs(idle.factor(self.view, blank) * factors[0] / factors[1] - 1) < 1e-9

    def settled(self, host: Host, numbers: Numbers) -> View:
        """Return the host with all of the network's weights. Raises Misfit."""
        made = self._blank(host, numbers)
        carrier = Carrier(self.view, made, whole=True)
        match(self.view, made, numbers, carrier)
        names = {n for n, _ in self.view.program.module().named_parameters()} & set(self.view.program.graph.uses)
        if left := sorted(names - carrier.used):
            raise Misfit(f"the host has no place for {left[0]}")
        return made

    def _blank(self, host: Host, numbers: Numbers) -> View:
        """Return a host with nothing in it. Raises Misfit where its config does not take the numbers."""
        fields = host.config(numbers)
        key = f"{host.name} {numbers.causal} {self.dtype} {fields}"
        if key not in self.blanks:
            try:
                with closed():
                    module: Any = blank_model(host.name, fields, numbers.causal, self.dtype)
                    module.config.use_cache = False
                    taken = Program(capture_module(module, (), dict(self.view.inputs)))
            except Exception as error:  # configs and networks check what they are given, and raise anything
                why = error.why if isinstance(error, LnrewriteError) else told(error)
                raise Misfit(f"the host does not run with the network's sizes: {why}") from error
            self.blanks[key] = HostView(taken, padding=self.view.padding, module=module)
        return replace(self.blanks[key], carried={})

    def batches(self) -> list[dict[str, torch.Tensor]]:
        """Return inputs to compare by, of two sizes."""
        given = self.view.inputs
        return [given, {name: held[:1, : held.shape[1] // 2] for name, held in given.items()}]


@dataclass(frozen=True, eq=False)
class HostView(View):
    """See a host's network: `module` is the living one."""

    module: torch.nn.Module = torch.nn.Module()


def find(guest: Guest, hosts: Iterable[Host], what: str) -> tuple[Host, View]:
    """Return the first host that fits, settled. Raises LnrewriteError LN315 with what keeps the network out."""
    why: list[str] = []
    for host in hosts:
        try:
            return host, guest.settled(host, guest.trial(host))
        except Misfit as error:
            why.append(f"{host.name}: {error}")
    raise _no_host(what, why)


def _no_host(what: str, why: Sequence[str]) -> LnrewriteError:
    told = why[0] if len(why) == 1 else f"none of {len(why)} hosts fits; {why[0]}"
    remedy = "lnrewrite inspect FOLDER --hosts lists what fits; without --as any placement is written"
    return LnrewriteError(Code.LN315, what, told, remedy)


def write(
    program: Program, config: Any, folder: Path, hosts: Sequence[Host], output: str | os.PathLike[str], *, force: bool
) -> Rehosted:
    """Write a network into OUT as the first of some hosts that fits, with the tokenizer of the folder that it is from.

    OUT is written whole or not at all: it is loaded by the stock class, and its outputs compared with the network's.
    Raises LnrewriteError LN025, LN315, LN316.
    """
    target = check_folder(output, folder, force)
    try:
        guest = Guest.of(program, config)
    except Misfit as error:
        raise _no_host(str(folder), [str(error)]) from error
    host, made = find(guest, hosts, str(folder))
    with whole(target, folder, force) as place:
        _write(place, folder, made)
        LOGGER.info("checking what was written")
        off = _proved(guest, place, host)
    notes = [host.note] if host.note else []
    if len(made.stream.blocks) > len(guest.view.stream.blocks):
        notes.append("it has one layer more, which stands idle and computes the embedding norm")
    return Rehosted(host.name, str(target), off, tuple(notes))


def _write(place: Path, folder: Path, made: View) -> None:
    """Write the host's folder: weights and config in the stock class's own way, all else as the source's has it."""
    assert isinstance(made, HostView)
    module: Any = made.module
    first = parameter_names(module)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if first[name] not in made.carried:
                raise LnrewriteError(Code.LN316, str(folder), f"{name} was left empty", "report this with the config")
            parameter.copy_(made.carried[first[name]])
    module.config.use_cache = True
    with closed():
        module.save_pretrained(place)
    if (folder / GENERATION).is_file():
        (place / GENERATION).unlink(missing_ok=True)  # the source's own comes along
    carry(folder, place, lambda path: path.name.endswith((*WEIGHTS, ".py")))


def _proved(guest: Guest, place: Path, host: Host) -> float:
    """Load what was written by the stock class and return how far its outputs are. Raises LnrewriteError LN316."""
    opened = open_module(identify(str(place)))
    assert opened.module is not None
    notes = [note for note in opened.notes if "not used" in note]
    again = Program(capture_module(opened.module, (), dict(guest.view.inputs)))
    bound = ROUNDED if guest.dtype.itemsize < 4 else PROVED
    found = compare(guest.view.program, again, bound, inputs=guest.batches())
    if found.differs or notes:
        why = notes[0] if notes else f"as {host.name} its outputs are {found.max_rel:.1e} (relative) off"
        raise LnrewriteError(Code.LN316, str(place.name), why, "report this with the config; omit --as")
    return found.max_rel


def fitting(program: Program, config: Any, placement: str, hosts: Iterable[Host], blanks: Blanks) -> Iterator[Fit]:
    """Yield for each host whether a network fits it, or what one thing keeps it out."""
    try:
        guest = Guest.of(program, config, blanks)
    except Misfit as error:
        yield from (Fit(host.name, placement, False, str(error)) for host in hosts)
        return
    for host in hosts:
        try:
            guest.trial(host)
        except Misfit as error:
            yield Fit(host.name, placement, False, str(error))
        else:
            yield Fit(host.name, placement, True)
