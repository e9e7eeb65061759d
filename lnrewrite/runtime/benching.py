"""Time ONNX models against each other in ONNX Runtime, so that the ratio is of the models and not of the machine.

A round makes a new session of every model, in shuffled order, since where a session's memory lies alone moves times by
15 %; then runs them in turn, in a new order each time. Ratios are taken within a round. Threads spin within a run only:
ONNX Runtime would let them go on after it, on the cores that the next model needs.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime

from ..backends.onnx.file import read
from ..backends.onnx.inputs import spec_of_model
from ..backends.onnx.session import OnnxModule
from ..errors import Code, LnrewriteError
from ..kernels.library import DOMAIN, register
from ..models.onnx_program import Given, OnnxProgram
from ..pipeline.results import Json
from ..quiet import LOGGER
from .sessions import PROVIDERS, check_target, does_not_run
from .timings import Benchmark, Spread, Timing

WARM = 2
Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timed:
    """Hold a model that is timed: the user's name for it, its file, its inputs, the sizes of its free dimensions.

    `ours` says whether it holds operators of lnrewrite, `notes` what was fixed when it was captured.
    """

    name: str
    path: Path
    feed: Mapping[str, np.ndarray]
    sizes: Mapping[str, int]
    ours: bool
    notes: tuple[str, ...]


def bench(
    models: Sequence[Path],
    *,
    names: Sequence[str],
    target: str = "cpu",
    threads: int = 1,
    inputs: Given = None,
    rounds: int = 9,
    runs: int = 11,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> Json:
    """Time ONNX files on one input and return the object of `bench --json`: medians in ms, ratios to the first model.

    names: of the models, for people. target: cpu, or cuda (IO binding, a CUDA graph of these inputs' shapes, no
    fallback to the CPU). threads: of the CPU, for one operator. inputs: as `lnrewrite.load` takes them, for all models
    alike, in the types that each declares; made up from the first model where None. Each of `rounds` times every model
    `runs` times. Raises LnrewriteError LN520 where a model does not take the first one's inputs, or does not load or
    run on the target, LN530 where kernels that it needs are not built; LN022 where `inputs` are not the first model's;
    LN015, LN030, LN031 where a file is broken.
    """
    check_target(target)
    timed = _opened(models, names, inputs, seed)
    order = random.Random(seed)
    times: list[list[float]] = [[] for _ in timed]
    medians: list[list[float]] = [[] for _ in timed]
    for index in range(rounds):
        LOGGER.info(f"round {index + 1} of {rounds}")
        ready: dict[int, Run] = {}
        for each in order.sample(range(len(timed)), len(timed)):
            ready[each] = _session(timed[each], target, threads)
        taken = _interleaved(ready, runs, order, clock)
        for each, found in taken.items():
            times[each] += found
            medians[each].append(statistics.median(found))
    notes = tuple(dict.fromkeys(note for model in timed for note in model.notes))
    rows = []
    for model, seconds, middle in zip(names, times, medians, strict=True):
        ratios = [mine / first for mine, first in zip(middle, medians[0], strict=True)]
        rows.append(Timing(model, Spread.of([1000 * t for t in seconds]), Spread.of(ratios)))
    return Benchmark(target, threads, rounds, runs, tuple(rows), notes).to_dict()


def _opened(paths: Sequence[Path], names: Sequence[str], inputs: Given, seed: int) -> list[Timed]:
    """Read the models, with the inputs that all get: those given, or made up from the first."""
    first = OnnxProgram.open(paths[0], names[0], inputs, seed)
    given = OnnxModule(first.model).feed((), first.example_inputs())
    timed = []
    for name, path in zip(names, paths, strict=True):
        model = read(path, name)
        module = OnnxModule(model)
        try:
            feed = module.feed((), {key: value for key, value in given.items() if key in module.inputs})
        except LnrewriteError as error:
            why = f"it does not take the inputs of {names[0]}: {error.why}"
            raise LnrewriteError(Code.LN520, f"model {name!r}", why, "time models that take the same inputs") from error
        sizes = {dim: feed[key].shape[i] for key, axes in spec_of_model(model).axes.items() for i, dim in axes.items()}
        timed.append(Timed(name, path, feed, sizes, DOMAIN in model.graph.opset_imports, OnnxProgram(model).notes))
    return timed


def _interleaved(
    ready: Mapping[int, Run], runs: int, order: random.Random, clock: Callable[[], float]
) -> dict[int, list[float]]:
    """Run all models in turn, in a new order each time; return the seconds of each run, the first few left out."""
    taken: dict[int, list[float]] = {each: [] for each in ready}
    for index in range(WARM + runs):
        for each in order.sample(list(ready), len(ready)):
            start = clock()
            ready[each]()
            if index >= WARM:
                taken[each].append(clock() - start)
    return taken


def _session(model: Timed, target: str, threads: int) -> Run:
    """Return what runs a model once, in a session made for it."""
    options = _options(model, target, threads)
    try:
        if target == "cpu":
            session = onnxruntime.InferenceSession(model.path, options, providers=[PROVIDERS["cpu"]])
            run: Run = lambda: session.run(None, model.feed)  # noqa: E731
        else:
            run = _on_cuda(model, options)
        run()
    except Exception as why:  # ONNX Runtime has no common base class of its errors
        raise does_not_run(model.name, why) from why
    return run


def _options(model: Timed, target: str, threads: int) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if model.ours:
        register(options, model.name, target == "cuda")
    if target == "cuda":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        for name, size in model.sizes.items():  # a CUDA graph has one shape; free ones are computed on the CPU
            options.add_free_dimension_override_by_name(name, size)
    return options


def _on_cuda(model: Timed, options: onnxruntime.SessionOptions) -> Run:
    """Return what replays a model's CUDA graph on inputs and outputs that stay on the device, and waits for it."""
    provider = [(PROVIDERS["cuda"], {"enable_cuda_graph": "1"})]
    session = onnxruntime.InferenceSession(model.path, options, providers=provider, enable_fallback=0)
    binding = session.io_binding()
    for name, value in model.feed.items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(value, "cuda", 0))
    for item in session.get_outputs():
        binding.bind_output(item.name, "cuda")
    session.run_with_iobinding(binding)
    for item, value in zip(session.get_outputs(), binding.get_outputs(), strict=True):
        binding.bind_ortvalue_output(item.name, value)  # a graph replays on the memory that it was captured with

    def run() -> None:
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()

    return run
