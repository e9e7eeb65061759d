"""Put ours beside the field: 17 models through ONNX Runtime alone, its optimizer, onnxscript, onnxslim and lnrewrite.

    python examples/onnx_peers.py [--models gpt2,llama] [--opsets 18,20,23] [--dtypes fp32,fp16] [--time] [-o OUT]
    python examples/onnx_peers.py --opsets 18 --tools onnxruntime,mobius,transformers,"lnrewrite cuda"

Models are 4 layers of width 256 with random weights, gains and biases, built from transformers' configs. Each tool
runs in a process of its own; a crash, a model that does not load and wrong numbers (at another batch size and length)
are cells of the table. Norm operators are counted in the tool's graph (for ONNX Runtime alone, in the graph that it
runs), with the adds that ride in them; times are medians of paired CPU times to ONNX Runtime alone, on one thread.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LAYERS, WIDTH, VOCABULARY, TOKENS = 4, 256, 512, 64
FUSED = {
    "LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization", "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization", "EmbedLayerNormalization",
}  # fmt: skip
NORMS = {
    "gpt2": 9, "bert": 9, "vit": 9, "whisper": 9, "opt": 9, "gpt_neox": 9, "modernbert": 9, "swinv2": 11, "cohere": 5,
    "llama": 9, "qwen3": 17, "phi3": 9, "gemma2": 17, "gemma3_text": 25, "glm4": 17, "olmo2": 17, "t5": 9,
}  # fmt: skip
TOOLS = ("onnxruntime", "optimize_model", "onnxscript", "onnxslim", "lnrewrite cpu", "lnrewrite cuda")
MORE = ("mobius", "transformers")
"""Tools that --tools may name too: the rules of mobius-onnx on the plain export, and transformers' own exporter."""
BOUND = {"fp32": 2e-5, "fp16": 2e-2}


def build(name: str) -> tuple[Any, dict[str, Any]]:
    """Return a model (encoders alone of whisper and t5) with random gains and biases, and its inputs."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {
        **dict.fromkeys(("hidden_size", "d_model", "n_embd"), WIDTH), "vocab_size": VOCABULARY, "embed_dim": 64,
        **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"), LAYERS),
        **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4), "decoder_attention_heads": 4,
        "encoder_attention_heads": 4,
        **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim"), 2 * WIDTH), "d_kv": 64,
        "num_key_value_heads": 4, "head_dim": 64, "word_embed_proj_dim": WIDTH, "image_size": 32, "patch_size": 4,
        "num_mel_bins": 16, "max_source_positions": TOKENS, "use_cache": False, "pad_token_id": 0,
    }  # fmt: skip
    if name == "swinv2":
        sizes = {"embed_dim": 64, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "image_size": 32}
    config = transformers.AutoConfig.for_model(name)
    known = {k: v for k, v in sizes.items() if hasattr(config, k)}
    config = transformers.AutoConfig.for_model(name, **known)
    causal = name not in {"bert", "vit", "whisper", "modernbert", "swinv2", "t5"}
    kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
    model = {"t5": transformers.T5EncoderModel}.get(name, kind.from_config)(config).eval()
    model = model.encoder if name == "whisper" else model
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    if name in {"vit", "swinv2"}:
        return model, {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}
    if name == "whisper":
        return model, {"input_features": torch.randn(2, 16, 2 * TOKENS, generator=generator)}
    return model, {"input_ids": torch.randint(1, VOCABULARY, (2, TOKENS), generator=generator)}


def plain(name: str, opset: int, dtype: str, path: Path) -> None:
    """Export as everybody does: torch.onnx.export with its defaults, batch and length dynamic."""
    import torch

    model, inputs = build(name)
    if dtype == "fp16":
        model, inputs = model.half(), {k: v.half() if v.is_floating_point() else v for k, v in inputs.items()}
    dims = {k: dict.fromkeys(range(2 if v.dim() == 2 else 1), torch.export.Dim.AUTO) for k, v in inputs.items()}
    cached = "use_cache" in inspect.signature(model.forward).parameters
    keywords = {**inputs, "use_cache": False} if cached else inputs
    shapes = {**dict.fromkeys(keywords), **dims}
    exported = torch.onnx.export(
        model, kwargs=keywords, dynamo=True, opset_version=opset, dynamic_shapes=shapes, verbose=False
    )
    exported.save(path)


def apply(tool: str, name: str, opset: int, dtype: str, source: Path, path: Path) -> None:
    """Make one tool write its model."""
    import onnx

    if tool == "onnxruntime":
        path.write_bytes(source.read_bytes())
    elif tool == "optimize_model":
        from onnxruntime.transformers.optimizer import optimize_model

        kind = "gpt2" if name not in {"bert", "vit", "modernbert", "swinv2", "t5"} else "bert"
        optimize_model(str(source), kind, num_heads=4, hidden_size=WIDTH, opt_level=0).save_model_to_file(str(path))
    elif tool == "onnxscript":
        import onnx_ir as ir
        from onnxscript.rewriter.ort_fusions import optimize_for_ort

        model, _ = optimize_for_ort(ir.load(source))
        ir.save(model, path)
    elif tool == "onnxslim":
        import onnxslim

        onnx.save(onnxslim.slim(str(source)), path)
    elif tool == "mobius":
        import onnx_ir as ir
        from mobius import rewrite_rules
        from onnxscript.rewriter import rewrite

        model = ir.load(source)
        for rules in ("layer_norm_fusion_rules", "skip_norm_rules", "skip_layer_norm_rules"):
            model = rewrite(model, pattern_rewrite_rules=getattr(rewrite_rules, rules)())
        ir.save(model, path)
    elif tool == "transformers":
        import onnx_ir as ir
        from transformers.exporters.configs import OnnxConfig
        from transformers.exporters.exporter_onnx import OnnxExporter

        built, inputs = build(name)
        if dtype == "fp16":
            built, inputs = built.half(), {k: v.half() if v.is_floating_point() else v for k, v in inputs.items()}
        how = OnnxConfig(dynamic=True, ort_fusions="cuda", opset_version=opset)
        ir.save(OnnxExporter().export(built, inputs, how).program, path)
    else:
        import lnrewrite as lnr

        model, inputs = build(name)
        target = tool.split()[1]
        lnr.capture(model, kwargs=inputs).export(path, target=target, dtype=dtype, opset=opset)


def judge(name: str, dtype: str, path: Path, counts: bool) -> dict[str, Any]:
    """Load a model, compare it with torch at two sizes, and count operators in the graph that runs."""
    import numpy as np
    import onnx
    import onnxruntime
    import torch

    model, inputs = build(name)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    optimised = path.with_suffix(".run.onnx")
    if counts:
        options.optimized_model_filepath = str(optimised)
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    worst = 0.0
    for rows, tokens in ((2, TOKENS), (3, TOKENS - 5)):
        fed = {k: v.repeat(2, *[1] * (v.dim() - 1))[:rows] for k, v in inputs.items()}
        fed = {k: v[:, :tokens] if k == "input_ids" else v for k, v in fed.items()}
        with torch.no_grad():
            wanted = model(**fed)[0].double().numpy()
        half = dtype == "fp16"
        feed = {k: (v.half() if half and v.is_floating_point() else v).numpy() for k, v in fed.items()}
        got = session.run(None, {i.name: feed[i.name] for i in session.get_inputs()})[0].astype(np.float64)
        worst = max(worst, float(np.abs(wanted - got).max() / np.abs(wanted).max()))
    graph = onnx.load(optimised if counts else path, load_external_data=False).graph
    kinds = [node.op_type for node in graph.node]
    return {
        "norms": sum(kind in FUSED for kind in kinds),
        "adds": sum(kind.startswith("Skip") for kind in kinds),
        "nodes": len(kinds),
        "error": worst,
        "wrong": worst > BOUND[dtype],
    }


def work(arguments: list[str]) -> None:
    """Do one cell of the table in this process: a tool's model, and what is to be said of it."""
    tool, name, opset, dtype, source, path = arguments
    if tool == "plain":
        plain(name, int(opset), dtype, Path(path))
        return
    apply(tool, name, int(opset), dtype, Path(source), Path(path))
    print("CELL" + json.dumps(judge(name, dtype, Path(path), tool == "onnxruntime")))


def cell(*arguments: object) -> dict[str, Any]:
    """Run one cell in a process of its own; a failure is a cell too."""
    command = [sys.executable, __file__, "--work", *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        return {"failed": "took over 300 s"}
    line = next((line for line in done.stdout.splitlines() if line.startswith("CELL")), None)
    if line:
        found: dict[str, Any] = json.loads(line[4:])
        return found
    if done.returncode == 0:
        return {}
    said = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
    return {"failed": next((line for line in reversed(said) if "Error" in line or "Exception" in line), said[-1])[:120]}


def row(name: str, opset: int, dtype: str, tools: list[str], folder: Path, time: bool) -> dict[str, Any]:
    """Run every tool on one model and, if asked to, time what runs on the CPU."""
    import lnrewrite as lnr

    source = folder / "plain.onnx"
    cells: dict[str, dict[str, Any]] = {"plain": cell("plain", name, opset, dtype, "-", source)}
    paths = {tool: folder / f"{tool.replace(' ', '_')}.onnx" for tool in tools}
    for tool in tools:
        ours = tool.startswith("lnrewrite")
        failed = not ours and cells["plain"].get("failed")
        cells[tool] = cells["plain"] if failed else cell(tool, name, opset, dtype, source, paths[tool])
    timed = [t for t in tools if not cells[t].get("failed") and not cells[t].get("wrong") and t != "lnrewrite cuda"]
    if time and timed and timed[0] == "onnxruntime":
        found = lnr.bench([str(paths[t]) for t in timed], inputs=build(name)[1])
        for tool, figures in zip(timed, found["models"], strict=True):
            cells[tool]["time"] = figures["ratio_to_first"]
    return {"model": name, "opset": opset, "dtype": dtype, "expected": NORMS[name], "tools": cells}


def words(found: dict[str, Any], expected: int) -> str:
    """Write a cell: norms of those expected, adds absorbed, time."""
    if "failed" in found:
        return "fails: " + next(iter(re.findall(r"\w*(?:Error|Exception|Fail)\b", found["failed"])), "no message")
    if found.get("wrong"):
        return f"wrong by {found['error']:.1g}"
    time = f" {found['time']['median']:.2f}" if "time" in found else ""
    return f"{min(found['norms'], expected)}/{expected} +{found['adds']}{time}"


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2:])
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(NORMS))
    parser.add_argument("--opsets", default="18,20,23")
    parser.add_argument("--dtypes", default="fp32,fp16")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--time", action="store_true", help="time what runs on the CPU too: on a quiet machine")
    parser.add_argument("-o", "--output")
    chosen = parser.parse_args()
    tools = chosen.tools.split(",")
    print("norm operators of those that the model has, + adds that ride in them, CPU time to onnxruntime alone")
    print("| model | " + " | ".join(tools) + " |")
    print("|---|" + "---|" * len(tools))
    rows = []
    for opset in map(int, chosen.opsets.split(",")):
        for dtype in chosen.dtypes.split(","):
            for name in chosen.models.split(","):
                with tempfile.TemporaryDirectory() as folder:
                    rows.append(row(name, opset, dtype, tools, Path(folder), chosen.time))
                cells = [words(rows[-1]["tools"][tool], NORMS[name]) for tool in tools]
                print(f"| {name} o{opset} {dtype} | " + " | ".join(cells) + " |", flush=True)
    if chosen.output:
        Path(chosen.output).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
