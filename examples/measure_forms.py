"""Time the forms of a residual add and its norm in ONNX Runtime, as the costs in lnrewrite/export/targets.py were.

    python examples/measure_forms.py [--threads 1] [--rounds 7] [--products]

Each form is a chain of 16 (add, norm) pairs whose sums are read again; with --products of four, and behind each norm
stands a square product, of which a network has more. Sessions are made anew in every round, in shuffled order; figures
are the median over the rounds of the time relative to Sum with the norm's own operator.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

PAIRS, BETWEEN = 16, 4
LAYER = ("LayerNormalization", "", "SkipLayerNormalization")
RMS = ("SimplifiedLayerNormalization", "", "SkipSimplifiedLayerNormalization")
FORMS = {
    "Add + LayerNormalization": (LAYER, "Add"), "Sum + LayerNormalization": (LAYER, "Sum"),
    "SkipLayerNormalization": (LAYER, None),
    "Add + SimplifiedLayerNormalization": (RMS, "Add"), "Sum + SimplifiedLayerNormalization": (RMS, "Sum"),
    "SkipSimplifiedLayerNormalization": (RMS, None),
}  # fmt: skip


def model(form: str, hidden: int, dtype: int, products: bool) -> bytes:
    """Build x -> so many times (sum = x + f, f = norm(sum) or its product with a matrix, x = sum)."""
    (norm, _, skip), add = FORMS[form]
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(rng.normal(size=hidden).astype(kind), n) for n in ("g", "b")]
    if products:
        weights.append(numpy_helper.from_array((rng.normal(size=(hidden, hidden)) / hidden**0.5).astype(kind), "w"))
    affine = ["g", "b"] if norm == "LayerNormalization" else ["g"]
    nodes, x, f = [], "x", "y"
    for i in range(BETWEEN if products else PAIRS):
        if add:
            nodes.append(helper.make_node(add, [x, f], [f"s{i}"]))
            nodes.append(helper.make_node(norm, [f"s{i}", *affine], [f"f{i}"], axis=-1, epsilon=1e-5))
        else:
            outputs = [f"f{i}", "", "", f"s{i}"]
            nodes.append(helper.make_node(skip, [x, f, *affine], outputs, domain="com.microsoft", epsilon=1e-5))
        x, f = f"s{i}", f"f{i}"
        if products:
            nodes.append(helper.make_node("MatMul", [f, "w"], [f"p{i}"]))
            f = f"p{i}"
    nodes.append(helper.make_node("Relu", [f], ["o"]))
    ends = [helper.make_tensor_value_info(n, dtype, [1, "tokens", hidden]) for n in ("x", "y")]
    out = helper.make_tensor_value_info("o", dtype, [1, "tokens", hidden])
    graph = helper.make_graph(nodes, "g", ends, [out], weights)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    made: bytes = helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString()
    return made


def seconds(content: bytes, feed: dict[str, np.ndarray], threads: int, level: object) -> float:
    """Return the fastest of five short runs in a session made for them."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.graph_optimization_level, options.log_severity_level = level, 3
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    session.run(None, feed)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(3):
            session.run(None, feed)
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--products", action="store_true")
    parser.add_argument("--dtype", default="FLOAT", choices=["FLOAT", "FLOAT16"])
    arguments = parser.parse_args()
    dtype = getattr(TensorProto, arguments.dtype)
    level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    print(f"onnxruntime {onnxruntime.__version__}, {arguments.threads} threads, {arguments.dtype}, ORT_ENABLE_ALL")
    print("| hidden | tokens | " + " | ".join(FORMS) + " |")
    print("|---|---|" + "---|" * len(FORMS))
    for hidden in (256, 768, 2048):
        for tokens in (1, 16, 128, 512):
            rng = np.random.default_rng(1)
            kind = helper.tensor_dtype_to_np_dtype(dtype)
            feed = {n: rng.normal(size=(1, tokens, hidden)).astype(kind) for n in ("x", "y")}
            contents = {form: model(form, hidden, dtype, arguments.products) for form in FORMS}
            ratios: dict[str, list[float]] = {form: [] for form in FORMS}
            for index in range(arguments.rounds):
                order = list(FORMS)
                random.Random(index).shuffle(order)
                taken = {form: seconds(contents[form], feed, arguments.threads, level) for form in order}
                for form in FORMS:
                    ratios[form].append(taken[form] / taken[f"Sum + {FORMS[form][0][0]}"])
            cells = [f"{statistics.median(values):.2f}" for values in ratios.values()]
            print(f"| {hidden} | {tokens} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
