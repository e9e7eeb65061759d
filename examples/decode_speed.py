"""Time how fast decoders generate on a CPU: our export, onnxruntime-genai's builder and transformers' own exporter.

    python examples/decode_speed.py --work FOLDER [--rounds 15] [--threads 1,2] [--placements pre,peri]

A Llama of 4 layers and width 512 with random weights, float32, generates 64 tokens after 32, batch 1, greedily. Every
graph begins with the same cache and is run by the same loop over a plain session, in rounds of shuffled order, with
new sessions in each; where onnxruntime-genai is installed it runs the folders that it takes, too. Figures are tokens
per second, by CPU time of the process and by the clock, and the ratio to ours round by round with its quartiles.
Models and rounds are kept in FOLDER, so that a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

LAYERS, WIDTH, HEADS, SHARED, VOCABULARY, PROMPT, NEW = 4, 512, 8, 4, 8192, 32, 64
OURS, CUSTOM, BUILDER, EXPORTER = "lnrewrite", "lnrewrite custom", "genai builder", "transformers exporter"
MODEL = "model.onnx"


def checkpoint(folder: Path, placement: str) -> Path:
    """Write the model, converted or not, with some tokenizer, which genai asks for."""
    import tokenizers
    import torch
    import transformers

    import lnrewrite as lnr

    source = folder / "checkpoint"
    if not source.exists():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=SHARED, tie_word_embeddings=False, eos_token_id=None,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.2 * torch.randn(parameter.shape)
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, "w0"))
        transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2").save_pretrained(source)
        model.save_pretrained(source)
    if placement == "pre":
        return source
    if not (made := folder / placement).exists():
        lnr.rewrite_file(source, f"place{{to={placement} fit=constants}}", made)
    return made


def written(folder: Path, placement: str) -> dict[str, Path]:
    """Write the model with every tool that writes it; return the folders."""
    import lnrewrite as lnr

    source = checkpoint(folder, placement)
    ways: dict[str, Any] = {
        OURS: lambda out: lnr.export_model(source, out, target="cpu"),
        EXPORTER: lambda out: exported(source, out),
    }
    if placement != "pre":
        ways[CUSTOM] = lambda out: lnr.export_model(source, out, target="cpu", fuse="custom")
    elif importlib.util.find_spec("onnxruntime_genai"):
        ways[BUILDER] = lambda out: built(source, out, folder)
    found = {}
    for name, way in ways.items():
        out = folder / f"{placement} {name}".replace(" ", "_")
        if not out.exists():
            way(out)
        found[name] = out
    return found


def exported(source: Path, out: Path) -> None:
    """Write what transformers' exporter makes of a step of generation, with its fusions for the CPU."""
    import onnx_ir
    import torch
    import transformers
    from transformers.exporters.configs import OnnxConfig
    from transformers.exporters.exporter_onnx import OnnxExporter

    model = transformers.AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True).eval()
    ids = torch.ones(2, 6, dtype=torch.int64)
    mask = torch.ones_like(ids)
    mask[1, 0] = 0  # a mask of ones is dropped
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    made = OnnxExporter().export_for_generation(model, given, OnnxConfig(dynamic=True, ort_fusions="cpu"))
    out.mkdir()
    onnx_ir.save(made.components["decode"].program, out / MODEL)


def built(source: Path, out: Path, folder: Path) -> None:
    """Write what onnxruntime-genai's builder makes of a checkpoint."""
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", source, "-o", out, "-p", "fp32"]
    where = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run([*map(str, command), "-e", "cpu", "-c", str(folder / "cache")], check=True, env=where)


class Loop:
    """Generate with a graph, by what its inputs are: tokens, a mask, positions, and a cache in order."""

    def __init__(self, folder: Path, threads: int) -> None:
        import onnxruntime

        import lnrewrite as lnr

        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.run = lnr.session(folder / MODEL, threads=threads, options=options)
        self.takes = [value.name for value in self.run.get_inputs() if len(value.shape) < 4]
        self.cache = self.held(self.run.get_inputs())
        outputs = self.run.get_outputs()
        self.gives = [next(v.name for v in outputs if len(v.shape) == 3), *self.held(outputs)]

    @staticmethod
    def held(values: list[Any]) -> list[str]:
        """Return the names of a cache's tensors: of each layer its keys, then its values."""
        names = [value.name for value in values if len(value.shape) == 4]
        return sorted(names, key=lambda name: (int(re.findall(r"\d+", name)[0]), "value" in name))

    def step(self, ids: np.ndarray, cache: list[np.ndarray]) -> tuple[int, list[np.ndarray]]:
        """Return the token of the largest logit, and the cache after it."""
        past, new = cache[0].shape[2], ids.shape[1]
        known = {
            "ids": ids, "mask": np.ones((1, past + new), np.int64), "position": np.arange(past, past + new)[None],
        }  # fmt: skip
        feed = {name: next(array for part, array in known.items() if part in name) for name in self.takes}
        logits, *after = self.run.run(self.gives, {**feed, **dict(zip(self.cache, cache, strict=True))})
        return int(logits[0, -1].argmax()), after

    def tokens(self, token: int, cache: list[np.ndarray]) -> list[int]:
        """Return the tokens after one, and that one."""
        made = [token]
        for _ in range(NEW):
            token, cache = self.step(np.array([[made[-1]]]), cache)
            made.append(token)
        return made


Speeds = dict[str, tuple[float, float, bool]]
"""Tokens per second of each graph, by CPU time and by the clock, and whether its tokens are those of ours."""


def by_session(folders: dict[str, Path], threads: int, draw: random.Random) -> Speeds:
    """Return how fast each graph is in a plain session, of its own and alone: where memory lies is part of the time."""
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (1, PROMPT))
    empty = [np.zeros((1, SHARED, 0, WIDTH // HEADS), np.float32)] * (2 * LAYERS)
    token, cache = Loop(folders[OURS], threads).step(ids, empty)
    made, speeds = dict[str, list[int]](), dict[str, tuple[float, float]]()
    for name in draw.sample(list(folders), len(folders)):
        loop = Loop(folders[name], threads)
        loop.tokens(token, cache)  # warms up
        start, cpu = time.perf_counter(), time.process_time()
        made[name] = loop.tokens(token, cache)
        speeds[name] = NEW / (time.process_time() - cpu), NEW / (time.perf_counter() - start)
        del loop
    return {name: (*both, made[name] == made[OURS]) for name, both in speeds.items()}


def by_genai(folders: dict[str, Path], threads: int, draw: random.Random) -> Speeds:
    """Return how fast each folder is in onnxruntime-genai, which does not take the exporter's."""
    import onnxruntime_genai as genai

    ids = np.random.default_rng(0).integers(3, VOCABULARY, (1, PROMPT)).astype(np.int32)
    given = {"intra_op_num_threads": threads, "session.intra_op.allow_spinning": "0"}
    made, speeds = dict[str, list[int]](), dict[str, tuple[float, float]]()
    for name in draw.sample([n for n in folders if n != EXPORTER], len(folders) - 1):
        config = genai.Config(str(folders[name]))
        config.overlay(json.dumps({"model": {"decoder": {"session_options": given}}}))
        model = genai.Model(config)
        for _ in range(2):  # the first warms up
            options = genai.GeneratorParams(model)
            options.set_search_options(do_sample=False, repetition_penalty=1.0, max_length=PROMPT + NEW + 1)
            run = genai.Generator(model, options)
            run.append_tokens(ids)
            run.generate_next_token()
            start, cpu = time.perf_counter(), time.process_time()
            for _ in range(NEW):
                run.generate_next_token()
            taken = time.process_time() - cpu, time.perf_counter() - start
        made[name] = list(map(int, run.get_sequence(0)))
        speeds[name] = NEW / taken[0], NEW / taken[1]
    return {name: (*both, made[name] == made[OURS]) for name, both in speeds.items()}


def rounds(where: Path, count: int, threads: list[int], placements: list[str]) -> Iterator[dict[str, Any]]:
    """Yield what was measured in each round, of this run or of one before it."""
    kept = where / "rounds.jsonl"
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    engines = {"session": by_session} | ({"genai": by_genai} if importlib.util.find_spec("onnxruntime_genai") else {})
    folders = {placement: written(where, placement) for placement in placements}
    done = {tuple(row["key"]): row for row in rows}
    for number in range(count):
        for placement in placements:
            for engine, way in engines.items():
                for n in threads:
                    key = (placement, engine, n, number)
                    if key not in done:
                        speeds = way(folders[placement], n, random.Random(number))
                        done[key] = {"key": key, "speeds": speeds}
                        with kept.open("a") as file:
                            file.write(json.dumps(done[key]) + "\n")
                    yield done[key]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", required=True, type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--placements", default="pre,peri")
    chosen = parser.parse_args()
    chosen.work.mkdir(exist_ok=True, parents=True)
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    threads = [int(n) for n in chosen.threads.split(",")]
    for row in rounds(chosen.work, chosen.rounds, threads, chosen.placements.split(",")):
        groups.setdefault(tuple(row["key"][:3]), []).append(row["speeds"])
    print("| placement, engine, threads | graph | tokens/s, CPU time | clock | ours to it, CPU time | clock | tokens |")
    print("|---|---|---|---|---|---|---|")
    for key, held in groups.items():
        for name in held[0]:
            cells = [f"{statistics.median(row[name][i] for row in held):.0f}" for i in (0, 1)]
            for i in (0, 1):  # of speeds: how many times as fast ours is
                low, middle, high = np.percentile([row[OURS][i] / row[name][i] for row in held], (25, 50, 75))
                cells.append(f"{middle:.3f} ({low:.3f} to {high:.3f})")
            cells.append("the same" if all(row[name][2] for row in held) else "others")
            print(f"| {', '.join(map(str, key))} | {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
