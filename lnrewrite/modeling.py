"""The modeling file of a rewritten transformers folder: generated, self-contained, and known again by its text.

The folder's config.json holds under `lnrewrite` what was done, as data; the file holds the code that does it again to
the original class: `rewritten.py` as it is, and a few lines below it. A model type of its own keeps transformers from
loading the weights into the unchanged class.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "modeling_lnrewrite.py"
KEY, PREFIX = "lnrewrite", "lnrewrite_"

_CLASS = re.compile(r"transformers(?:\.\w+)+")

_TEMPLATE = """

# ---- the model: {name} with its norms changed; config.json says how, under "{key}" ----

from {config_module} import {config} as _Config  # noqa: E402
from {module} import {name} as _Model  # noqa: E402


class {config}(_Config):
    model_type = "{prefix}" + _Config.model_type


class {name}(_Model):
    config_class = {config}

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        apply(self, config.{key}["changes"])
"""


def generate(record: Mapping[str, Any]) -> str:
    """Return the modeling file for a config's record: `model` and `config` are the original classes' dotted names.

    Raises ValueError where they are no classes of transformers.
    """
    parts = {}
    for key in ("model", "config"):
        if not _CLASS.fullmatch(str(record.get(key))):
            raise ValueError(f"{key} is no class of transformers: {record.get(key)!r}")
        parts[key] = str(record[key]).rpartition(".")
    (module, _, name), (config_module, _, config) = parts["model"], parts["config"]
    code = Path(__file__).with_name("backends").joinpath("rewritten.py").read_text()
    names = {"module": module, "name": name, "config_module": config_module, "config": config}
    return code + _TEMPLATE.format(**names, key=KEY, prefix=PREFIX)


def record_of(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what a config says of an earlier rewrite, or None."""
    found = content.get(KEY)
    return found if isinstance(found, dict) and isinstance(found.get("changes"), list) else None


def written_by_us(folder: Path, content: Mapping[str, Any]) -> bool:
    """Say whether the only code of a folder is the modeling file that this version would write for its config."""
    record, code = record_of(content), content.get("auto_map")
    if record is None or not isinstance(code, dict):
        return False
    stem = FILE.removesuffix(".py")
    if not all(isinstance(v, str) and re.fullmatch(rf"{stem}\.\w+", v) for v in code.values()):
        return False
    try:
        return (folder / FILE).read_text() == generate(record)
    except (OSError, UnicodeDecodeError, ValueError):
        return False


def with_record(content: Mapping[str, Any], record: Mapping[str, Any], autos: list[str]) -> dict[str, Any]:
    """Return a config.json that names the modeling file for the given auto classes."""
    stem = FILE.removesuffix(".py")
    name, config = (str(record[key]).rpartition(".")[2] for key in ("model", "config"))
    base = str(content["model_type"]).removeprefix(PREFIX)
    new = {"model_type": f"{PREFIX}{base}", "architectures": [name], KEY: dict(record)}
    new["auto_map"] = {"AutoConfig": f"{stem}.{config}"} | dict.fromkeys(autos, f"{stem}.{name}")
    return json.loads(json.dumps({**content, **new}))  # type: ignore[no-any-return]
