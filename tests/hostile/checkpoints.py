"""Hostile transformers folders."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from .goods import edited
from .pickled import PAYLOAD, payloads
from .place import Case, Place
from .weights import safe

Files = dict[str, bytes | None]


def folder(
    name: str, change: Callable[[Files, Place], Any], exits: tuple[int, ...] = (1,), args: tuple[str, ...] = ("inspect", "f"), **more: Any
) -> Case:
    """Return the case of a good folder whose files were changed; None leaves a file out."""

    def make(place: Place) -> None:
        files: Files = dict(place.goods.llama)
        change(files, place)
        for file, content in files.items():
            if content is not None:
                place.write(f"f/{file}", content)

    return Case(f"folder: {name}", args, make, exits, **more)


def config(**values: Any) -> Callable[[Files, Place], None]:
    """Return what puts values into config.json."""

    def change(files: Files, place: Place) -> None:
        held = files["config.json"]
        assert held is not None
        files["config.json"] = edited(held, lambda node: node.update(values))

    return change


NUMBERS: dict[str, Any] = {
    "negative": -2, "zero": 0, "10^6": 10**6, "2^40": 1 << 40, "2^70": 1 << 70, "NaN": float("nan"), "infinite": float("inf"), "a text": "\x1b[31mx",
    "null": None, "a list": [2], "a half": 2.5, "true": True,
}  # fmt: skip
TOLD = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "max_position_embeddings", "rms_norm_eps", "intermediate_size")


def number_cases() -> Iterator[Case]:
    """Numbers of the configuration, out of range or no numbers."""
    for key in TOLD:
        for name, value in NUMBERS.items():
            loose = key in ("max_position_embeddings", "rms_norm_eps") or name in ("true", "a half")
            yield folder(f"{key} {name}", config(**{key: value}), (0, 1) if loose else (1,))


def config_cases() -> Iterator[Case]:
    """Configurations of other kinds."""
    values: dict[str, dict[str, Any]] = {
        "architectures [null]": {"architectures": [None]}, "architectures a text": {"architectures": "LlamaForCausalLM"}, "architectures of numbers": {"architectures": [7]},
        "architectures of another class": {"architectures": ["Trainer"]}, "architectures of a module": {"architectures": ["os.system"]}, "architectures {}": {"architectures": {}},
        "an unknown type": {"model_type": "evil"}, "a type of dots": {"model_type": "../../evil"}, "type null": {"model_type": None}, "type a list": {"model_type": ["llama"]},
        "type of escape bytes": {"model_type": "\x1b[31m"}, "a type of 5000 letters": {"model_type": "x" * 5000}, "auto_map a list": {"auto_map": ["code.C"]}, "auto_map a text": {"auto_map": "code.C"},
        "auto_map null": {"auto_map": None}, "auto_map of numbers": {"auto_map": {"AutoModel": 7}}, "auto_map of dots": {"auto_map": {"AutoModelForCausalLM": "../../outside/code.C"}},
        "auto_map of a repository": {"auto_map": {"AutoModelForCausalLM": "evil/repository--code.C"}}, "dtype of code": {"dtype": "os.system"}, "dtype null": {"dtype": None}, "dtype 7": {"dtype": 7},
        "torch_dtype of code": {"torch_dtype": "load"}, "quantization of code": {"quantization_config": {"quant_method": "evil"}}, "quantization a list": {"quantization_config": []},
        "quantization bitsandbytes": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "attention of a repository": {"_attn_implementation": "evil/kernels"},
        "attention of code": {"attn_implementation": "evil/kernels:f"}, "an unknown activation": {"hidden_act": "__import__('os')"}, "activation null": {"hidden_act": None}, "rope of text": {"rope_parameters": "x"},
        "rope of nothing": {"rope_parameters": {"rope_type": "evil"}}, "rope of a factor NaN": {"rope_parameters": {"rope_type": "linear", "factor": "x", "rope_theta": 1e4}}, "a name elsewhere": {"_name_or_path": "../../outside"},
        "experts' kernels": {"use_kernels": True}, "a tie of text": {"tie_word_embeddings": "no"}, "labels of 10^6": {"num_labels": 10**6}, "heads that do not divide": {"num_attention_heads": 3},
        "kv heads 0": {"num_key_value_heads": 0}, "a pad id beyond": {"pad_token_id": 10**9}, "_lnrewrite a list": {"lnrewrite": []}, "our record, of code": {"lnrewrite": {"changes": [{"kind": "__import__('os')"}]}},
        "text_config of itself": {"text_config": {"text_config": {}}}, "a base model elsewhere": {"base_model_name_or_path": "evil/evil"}, "a class of names": {"__class__": "evil"}, "from_pretrained null": {"from_pretrained": None},
    }  # fmt: skip
    loose = {"dtype null", "a name elsewhere", "labels of 10^6", "_lnrewrite a list", "auto_map null", "a tie of text", "a base model elsewhere", "experts' kernels", "text_config of itself",
             "architectures {}", "architectures a text", "architectures of another class", "architectures of a module", "our record, of code", "attention of code", "attention of a repository", "a class of names", "from_pretrained null",
             "rope of nothing", "architectures [null]", "architectures of numbers", "a pad id beyond", "quantization a list", "quantization of code", "torch_dtype of code"}  # fmt: skip
    for name, value in values.items():
        yield folder(name, config(**value), (0, 1) if name in loose else (1,))
    whole = {"deep": b'{"a":' * 100_000, "a list": b"[]", "null": b"null", "empty": b"", "no JSON": b"\x1b[31m", "no UTF-8": b'{"\xff": 1}', "NUL": b"\0" * 100, "200 MB": b" " * (200 << 20),
             "10^6 keys": json.dumps({f"k{i}": i for i in range(300_000)}).encode(), "cut": b'{"model_type": "lla', "a number of 10^5 digits": b'{"model_type": "llama", "hidden_size": ' + b"9" * 100_000 + b"}"}  # fmt: skip
    for name, content in whole.items():
        yield folder(f"config {name}", lambda files, place, c=content: files.update({"config.json": c}))  # type: ignore[misc]
        for file in ("generation_config.json", "tokenizer_config.json", "model.safetensors.index.json"):
            yield folder(f"{file} {name}", lambda files, place, c=content, f=file: files.update({f: c}), (0, 1))  # type: ignore[misc]
    for args in (("inspect", "f"), ("opt", "f", "--preset", "exact", "-o", "o")):
        yield folder(f"{args[0]} of widths that are not the weights'", config(hidden_size=32), args=args)
    yield folder("good", lambda files, place: None, (0,))


def code_cases() -> Iterator[Case]:
    """Code that comes with the folder, and a "y" for whoever asks."""

    def coded(files: Files, place: Place, member: str = "code.py") -> None:
        files[member] = PAYLOAD.replace("{marker!r}", repr(place.marker)).encode()

    autos = ("AutoModelForCausalLM", "AutoModel", "AutoConfig", "AutoTokenizer", "AutoProcessor", "AutoModelForMaskedLM", "AutoImageProcessor")
    for auto in autos:

        def model(files: Files, place: Place, auto: str = auto) -> None:
            coded(files, place)
            config(auto_map={auto: "code.X"}, model_type="evil")(files, place)

        def known(files: Files, place: Place, auto: str = auto) -> None:
            coded(files, place)
            config(auto_map={auto: "code.X"})(files, place)

        yield folder(f"code of an unknown type for {auto}", model)
        yield folder(f"code of a known type for {auto}", known, (0, 1))
    for name in ("tokenizer_config.json", "config.json"):
        for value in (["code.X", None], [None, "code.X"], "code.X", ["code.X", "code.X"]):

            def tokenizer(files: Files, place: Place, name: str = name, value: Any = value) -> None:
                coded(files, place)
                held = files[name]
                assert held is not None
                files[name] = edited(held, lambda node: node.update(auto_map={"AutoTokenizer": value}, tokenizer_class="X"))
                place.write("text.txt", "w1 w2 w3 w4 w5 w6 w7 w8 " * 300)

            convert = ("convert", "f", "--to", "peri", "-o", "o.pt2", "--calibrate", "text.txt")
            yield folder(f"code of a tokenizer, {name} {json.dumps(value)}", tokenizer, (0, 1), convert, writes=("o.pt2",))
    for file, class_ in {"tokenizer_config.json": "../../evil.X", "processor_config.json": "X", "preprocessor_config.json": "X"}.items():

        def other(files: Files, place: Place, file: str = file, class_: str = class_) -> None:
            coded(files, place)
            files[file] = json.dumps({"tokenizer_class": class_, "processor_class": class_, "auto_map": {"AutoProcessor": "code.X"}}).encode()

        yield folder(f"code named by {file}", other, (0, 1))
    for name in ("__init__.py", "sitecustomize.py", "torch.py", "json.py", "modeling_llama.py", "configuration_llama.py", "tokenizers.py"):
        yield folder(f"a file {name}", lambda files, place, n=name: coded(files, place, n), (0,))  # type: ignore[misc]
    template = "{{ ''.__class__.__base__.__subclasses__() }}{% for i in range(10**12) %}{% endfor %}"
    yield folder("a chat template", lambda files, place: files.update({"chat_template.jinja": template.encode()}), (0,))


def weight_cases() -> Iterator[Case]:
    """Weights that are elsewhere, are pickles, or are other ones."""
    shards = {"dots": "../../outside/secret.bin", "absolute": "/etc/passwd", "a link": "link.safetensors", "nothing": "no.safetensors", "itself": "model.safetensors.index.json",
              "NUL": "a\0b", "a number": 7, "null": None, "escape bytes": "\x1b[31m", "a folder": ".", "a pickle": "x.bin", "5000 letters": "x" * 5000}  # fmt: skip
    for name, shard in shards.items():

        def index(files: Files, place: Place, shard: Any = shard) -> None:
            names = list(_header(files["model.safetensors"]))
            files["model.safetensors"] = None
            files["x.bin"] = payloads(place.marker)["a global"]
            files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, shard)}).encode()
            (place.here / "f").mkdir(exist_ok=True)
            os.symlink(place.outside / "secret.bin", place.here / "f" / "link.safetensors")

        for command in (("inspect", "f"), ("opt", "f", "--preset", "exact", "-o", "o")):
            yield folder(f"a shard at {name}, {command[0]}", index, args=command)
    for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "extra.json", "pytorch_model.bin"):
        for to in ("outside", "nothing", "itself", "pipe"):

            def link(files: Files, place: Place, file: str = file, to: str = to) -> None:
                content = files.get(file) or b"{}"
                files[file] = None
                path = place.here / "f" / file
                path.parent.mkdir(exist_ok=True)
                if to == "pipe":
                    os.mkfifo(path)
                    return
                (place.outside / "real").write_bytes(content)
                os.symlink({"outside": place.outside / "real", "nothing": place.outside / "no", "itself": path}[to], path)

            yield folder(f"{file} is a link to {to}" if to != "pipe" else f"{file} is a pipe", link, (0, 1))
    for name in ("a global", "an object", "eval", "lists in lists", "doubling", "a string of 2^62 bytes"):

        def pickled(files: Files, place: Place, name: str = name) -> None:
            files["model.safetensors"], files["pytorch_model.bin"] = None, payloads(place.marker)[name]

        yield folder(f"weights pickled: {name}", pickled)
    whole: dict[str, Callable[[bytes], bytes | None]] = {"missing": lambda c: None, "empty": lambda c: b"", "cut": lambda c: c[:-100], "junk": lambda c: b"\xff" * 1000,
             "deep": lambda c: safe(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b""), "of NaN": lambda c: _filled(c, b"\xff"), "without one": lambda c: _dropped(c)}  # fmt: skip
    for name, change in whole.items():
        for command in (("inspect", "f"), ("opt", "f", "--preset", "exact", "-o", "o")):
            loose = name == "of NaN" and command[0] == "inspect"
            yield folder(f"weights {name}, {command[0]}", lambda files, place, c=change: files.update(
                {"model.safetensors": c(files["model.safetensors"])}), (0, 1) if loose else (1,), command)  # type: ignore[misc]  # fmt: skip


def _header(content: bytes | None) -> dict[str, Any]:
    assert content is not None
    held = dict(json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]))
    held.pop("__metadata__", None)
    return held


def _filled(content: bytes, byte: bytes) -> bytes:
    start = 8 + int.from_bytes(content[:8], "little")
    return content[:start] + byte * (len(content) - start)


def _dropped(content: bytes) -> bytes:
    header, start = _header(content), 8 + int.from_bytes(content[:8], "little")
    last = max(header, key=lambda n: header[n]["data_offsets"][1])
    begin = header.pop(last)["data_offsets"][0]
    return safe(header | {"__metadata__": {"format": "pt"}}, content[start : start + begin])
