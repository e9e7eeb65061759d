"""Build the library of ONNX Runtime operators from the sources in this package: a C++ compiler, and nvcc for CUDA."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ..errors import Code, LnrewriteError
from ..files.landing import land, room
from ..quiet import LOGGER

SOURCES = Path(__file__).parent / "csrc"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
LEVELS = {"base": (), "v3": ("-march=x86-64-v3",), "v4": ("-march=x86-64-v4", "-mprefer-vector-width=512")}
"""The levels of instructions that the CPU's rows are compiled for, on x86-64; elsewhere `base` alone."""
ARCHITECTURES = (80, 90)
"""The GPUs, as compute capabilities times ten, that CUDA code is made for; newer ones compile its PTX when it loads."""
WARNINGS = ("-Wall", "-Wextra", "-Werror")


@dataclass(frozen=True, slots=True)
class Built:
    """Describe what was built: the library, and with which compilers; `nvcc` is None where it is for CPUs alone."""

    library: Path
    compiler: str
    nvcc: str | None


def place() -> Path:
    """Return where the library of these sources belongs: in the user's cache, under a name that their content makes."""
    digest = hashlib.sha256()
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "lnrewrite" / f"kernels-{digest.hexdigest()[:16]}-{platform.machine()}.so"


def build(
    output: str | os.PathLike[str] | None = None,
    *,
    cuda: bool | None = None,
    strict: bool = False,
) -> Built:
    """Compile the operators into one shared library, whole or not at all.

    output: the file; None puts it where sessions look for it. cuda: True needs nvcc, False leaves the GPU out, None
    takes nvcc where it is found. strict: let warnings be errors. Raises LnrewriteError LN531 without a compiler or
    where one fails, LN025 where the file cannot be written.
    """
    compiler = _compiler()
    nvcc = None if cuda is False else _nvcc()
    if cuda and nvcc is None:
        raise _failed("nvcc", "it is not found", "install the CUDA toolkit and set CUDA_HOME, or build without CUDA")
    target = Path(output) if output is not None else place()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with room(target.absolute().parent) as folder:
            made = _compiled(folder, compiler, nvcc, strict)
            land(made, target, force=True)
    except OSError as why:
        remedy = "choose another file with -o, and name it in LNREWRITE_KERNELS"
        raise LnrewriteError(Code.LN025, str(target), str(why), remedy) from why
    return Built(target, compiler, nvcc)


def _compiled(folder: Path, compiler: str, nvcc: str | None, strict: bool) -> Path:
    warnings = WARNINGS if strict else ()
    flags = [*FLAGS, *warnings]
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    objects = []

    def compile_one(name: str, command: list[str]) -> None:
        LOGGER.info(f"compiling {name}")
        objects.append(str(folder / f"{name}.o"))
        _run([*command, "-o", objects[-1]])

    for level, options in LEVELS.items() if x86 else [("base", ())]:
        source = str(SOURCES / "cpu_rows.cc")
        compile_one(f"cpu_rows_{level}", [compiler, *flags, *options, f"-DLEVEL={level}", "-c", source])
    with_cuda = ["-DWITH_CUDA"] if nvcc else []
    compile_one("operators", [compiler, *flags, *with_cuda, "-c", str(SOURCES / "operators.cc")])
    link = [compiler, "-shared"]
    if nvcc:
        host = ",".join(["-fPIC", "-fvisibility=hidden", *warnings])
        codes = [f"-gencode=arch=compute_{a},code=[sm_{a},compute_{a}]" for a in ARCHITECTURES]
        checks = ["-Werror", "all-warnings"] if strict else []
        command = [nvcc, "-std=c++17", "-O3", "-ccbin", compiler, "-Xcompiler", host, *codes, *checks]
        compile_one("cuda_rows", [*command, "-c", str(SOURCES / "cuda_rows.cu")])
        link = [nvcc, "-shared", "-cudart", "static", "-ccbin", compiler]
    library = folder / "library.so"
    LOGGER.info("linking")
    _run([*link, *objects, "-o", str(library)])
    return library


def _compiler() -> str:
    named = os.environ.get("CXX")
    found = next((path for name in ([named] if named else COMPILERS) if name and (path := shutil.which(name))), None)
    if found is None:
        missing = f"{named} of CXX" if named else "none of " + ", ".join(COMPILERS)
        raise _failed("the C++ compiler", f"{missing} is found", "install g++ or clang++, or name one in CXX")
    return found


def _nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return shutil.which("nvcc", path=str(Path(home) / "bin")) if home else shutil.which("nvcc")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if "error" in line.lower()] or ["no message"]
        name, needs = Path(command[0]).name, "it needs C++17 and vector extensions: g++ 12, clang 14"
        raise _failed(name, lines[0].strip(), "build without CUDA (--no-cuda)" if name.startswith("nvcc") else needs)


def _failed(what: str, why: str, remedy: str) -> LnrewriteError:
    return LnrewriteError(Code.LN531, what, why, remedy)
