"""The modeling file of a rewritten transformers folder: generated, self-contained, and known again by its text.

The folder's config.json holds under `lnrewrite` what was done, as data; the file holds the code that does it again:
`runtime.py` and `heads.py` as they are, and below them a class for each auto class of transformers that opens the
original. Model type and classes have names of their own, so that nothing takes them for the original's and loads the
weights into an unchanged network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Json = Mapping[str, Any]
"""An object of a config.json."""

FILE = "modeling_lnrewrite.py"
KEY, PREFIX, CLASS = "lnrewrite", "lnrewrite_", "Lnrewrite"

_DOTTED = re.compile(r"transformers(?:\.\w+)+")

_CONFIG = """

# ---- {model} with its norms changed, and the other heads that it may have; config.json says how, under "{key}" ----

import transformers  # noqa: E402
from {module} import {config} as _Config  # noqa: E402


class {prefix}{config}(Recorded, _Config):
    model_type = "{type}" + _Config.model_type
"""

_CLASS = """

class {prefix}{name}(Rewritten, transformers.{name}):
    config_class = {prefix}{config}
"""

_LAST = """

stand_in({prefix}{config}, _Config, {network})
"""


def generate(record: Json) -> str:
    """Return the modeling file for a config's record: `model` and `config` are the original classes' dotted names.

    `network` is the name of the base network's class or None, `classes` has those that the auto classes make. Raises
    ValueError where they are no classes of transformers.
    """
    for key in ("model", "config"):
        if not _DOTTED.fullmatch(str(record.get(key))):
            raise ValueError(f"{key} is not a class of transformers: {record.get(key)!r}")
    network, heads = record.get("network"), record.get("classes")
    classes = {str(name) for name in [*(heads.values() if isinstance(heads, dict) else ()), network] if name}
    if not all(re.fullmatch(r"\w+", name) for name in classes):
        raise ValueError(f"classes that are not of transformers: {sorted(classes)}")
    names = {"model": last(record["model"]), "config": last(record["config"])}
    names["network"] = f"{CLASS}{network}" if network else "None"
    names |= {"module": record["config"].rpartition(".")[0], "key": KEY, "prefix": CLASS, "type": PREFIX}
    here = Path(__file__).parent
    heads = here.joinpath("heads.py").read_text().partition("import annotations\n")[2]
    code = here.joinpath("runtime.py").read_text() + "\n\n# ---- heads ----\n"
    code += heads.replace("from .runtime import Change, apply\n", "") + _CONFIG.format(**names)
    code += "".join(_CLASS.format(**names, name=name) for name in sorted(classes))
    return code + _LAST.format(**names)


def last(dotted: object) -> str:
    """Return what a dotted name ends with."""
    return str(dotted).rpartition(".")[2]


def record_of(content: Json) -> dict[str, Any] | None:
    """Return what a config says of an earlier rewrite, or None."""
    found = content.get(KEY)
    return found if isinstance(found, dict) and isinstance(found.get("changes"), list) else None


def written_by_us(folder: Path, content: Mapping[str, object]) -> bool:
    """Return whether the only code of a folder is the modeling file that this version would write for its config."""
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


def with_record(content: Json, record: Json, model: str) -> dict[str, Any]:
    """Return a config.json that names the modeling file's classes; `model` is the original's of the one that it is."""
    stem = FILE.removesuffix(".py")
    base = str(content["model_type"]).removeprefix(PREFIX)
    new = {"model_type": PREFIX + base, "architectures": [CLASS + model], KEY: dict(record)}
    names = {"AutoConfig": last(record["config"]), **record["classes"]}
    new["auto_map"] = {auto: f"{stem}.{CLASS}{name}" for auto, name in names.items()}
    return json.loads(json.dumps({**content, **new}))  # type: ignore[no-any-return]
