"""Builds small C helpers at first use and keeps them in the user's cache. All but the index of texts for drafts
(attention_dp/text_index.py) have a Python twin.

Callers fall back to the twin and report why. All arguments and results are int64 (numbers or addresses), so one
prototype serves all functions.
"""

import ctypes
import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moe_serve.errors import ConfigError
from moe_serve.log import get_logger

_FLAGS = ("-O3", "-fPIC", "-shared")
UNFUSED = "-ffp-contract=off"  # fused multiply-adds round once where numpy rounds twice
_TIMEOUT_S = 120  # of the compiler
_INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)
ISA = "MOE_SERVE_ISA"  # an environment variable, so that processes started by this one build for the same


@dataclass(frozen=True)
class InstructionSet:
    """What C code may be built for. features: of /proc/cpuinfo, which it needs"""

    flags: tuple[str, ...]
    features: tuple[str, ...] = ()


_AVX2 = ("avx2", "fma", "f16c", "bmi2")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
INSTRUCTION_SETS = {
    "avx2": InstructionSet(("-march=haswell",), _AVX2),
    "avx512": InstructionSet(("-march=skylake-avx512",), _AVX512),
    "amx": InstructionSet(("-march=native",), (*_AVX512, "amx_tile", "amx_bf16")),
    "plain": InstructionSet(("-march=nehalem",)),  # without fused multiply-add: other bits
}


def load_c_library(
    source: Path, arguments: Mapping[str, int], flags: tuple[str, ...] = (), folder: Path | None = None
) -> tuple[ctypes.CDLL, str]:
    """Returns the library of a C file, and the compiler that built it.

    arguments: the number of arguments of each function, all int64; each returns int64 or nothing
    flags:     beside the usual ones, e.g. processor_flags()
    folder:    None: $XDG_CACHE_HOME/moe_serve, or ~/.cache/moe_serve
    Raises ConfigError when there is no compiler, when it fails, or when other users can write to the folder.
    """
    command = find_compiler()
    if command is None:
        raise ConfigError(f"no C compiler for {source.name}; install gcc or clang, or run: pip install ziglang")
    compiler = " ".join(command)
    folder = folder or _cache_folder()
    texts = [path.read_text(encoding="utf-8") for path in _with_included(source)]
    facts = (source.name, texts, compiler, _FLAGS + flags, platform.python_version(), processor_features())
    path = folder / f"{source.stem}_{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.so"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
            raise ConfigError(f"{folder} can be written by others, so no code is loaded from it; chmod go-w it")
        if not path.exists():
            with _one_builder(folder):
                if not path.exists():
                    _build(command, source, path, flags)
        library = ctypes.CDLL(str(path))
    except subprocess.CalledProcessError as error:
        said = " ".join(error.stderr.split())[-300:] or f"it said nothing and ended with status {error.returncode}"
        raise ConfigError(f"{compiler} could not build {source.name}: {said}; install another one") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{compiler} could not build {source.name}: {error}; install another one") from None
    for name, num_arguments in arguments.items():
        function = getattr(library, name)
        function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_int64] * num_arguments
    return library, compiler


def find_c_library(
    source: Path, arguments: Mapping[str, int], otherwise: str, flags: tuple[str, ...] = ()
) -> ctypes.CDLL | None:
    """Returns the library of a C file; None where it cannot be built, with a warning of what happens otherwise."""
    try:
        return load_c_library(source, arguments, flags)[0]
    except ConfigError as error:
        get_logger(__name__).warning("%s: %s", otherwise, error)
        return None


def find_compiler() -> tuple[str, ...] | None:
    """Returns the command of the machine's C compiler, or None. The package `ziglang` of PyPI brings one (clang)."""
    path = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if path is not None:
        return (path,)
    return (sys.executable, "-m", "ziglang", "cc") if importlib.util.find_spec("ziglang") else None


def processor_flags() -> tuple[str, ...]:
    """Returns the compiler's flags for this processor: all of it, or the part that $MOE_SERVE_ISA names.

    Raises ConfigError for a name that is none, and for what the processor lacks.
    """
    name = os.environ.get(ISA)
    if name is None:
        return ("-march=native",)
    if platform.machine() != "x86_64" or name not in INSTRUCTION_SETS:
        raise ConfigError(
            f"{ISA} is {name!r} on {platform.machine()}; it names a part of an x86_64: {', '.join(INSTRUCTION_SETS)}; "
            "leave it out to build for all that the processor has"
        )
    chosen, present = INSTRUCTION_SETS[name], processor_features().split()
    lacking = [feature for feature in chosen.features if feature not in present]
    if lacking:
        raise ConfigError(
            f"{ISA} is {name!r}, but this processor lacks {', '.join(lacking)}; name another, or leave it out"
        )
    return chosen.flags


def instruction_set() -> str:
    """Returns which of INSTRUCTION_SETS C code is built for here; the kind of processor where it is no x86-64."""
    if platform.machine() != "x86_64":
        return platform.machine()
    present = {*processor_features().split()}
    whole = next(name for name in ("amx", "avx512", "avx2", "plain") if present >= {*INSTRUCTION_SETS[name].features})
    return os.environ.get(ISA, whole)


def _with_included(source: Path) -> list[Path]:
    """Returns the file and all files that it includes by "...", each once."""
    found, waiting = [], [source.resolve()]
    while waiting:
        path = waiting.pop()
        if path not in found and path.exists():  # what is missing is the compiler's to report
            found.append(path)
            waiting += [(path.parent / name).resolve() for name in _INCLUDE.findall(path.read_text(encoding="utf-8"))]
    return found


def _cache_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(cache or Path.home() / ".cache") / "moe_serve"
    except RuntimeError:
        raise ConfigError("there is no home folder to keep the C helper in; set XDG_CACHE_HOME") from None


@contextmanager
def _one_builder(folder: Path) -> Iterator[None]:
    """Lets one process of this user build at a time: of several ranks the first builds, the others find its library."""
    with (folder / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(compiler: tuple[str, ...], source: Path, path: Path, flags: tuple[str, ...]) -> None:
    """Builds into a temporary file and renames it, so that nobody loads half a library."""
    descriptor, built = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(descriptor)
    try:
        _run_bounded([*compiler, *_FLAGS, *flags, "-o", built, str(source)])
        os.replace(built, path)
    finally:
        Path(built).unlink(missing_ok=True)


def _run_bounded(command: list[str]) -> None:
    """Runs a compiler; ends it with all that it has started where it takes too long, or this process is interrupted.

    Raises CalledProcessError, TimeoutExpired.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, process_group=0) as compiler:
        try:
            output, errors = compiler.communicate(timeout=_TIMEOUT_S)
        except BaseException:
            os.killpg(compiler.pid, signal.SIGKILL)  # the compiler proper is a child of the command
            raise
    if compiler.returncode:
        raise subprocess.CalledProcessError(compiler.returncode, command, output, errors)


def processor_features() -> str:
    """Returns the processor's features, on which -march=native depends: different machines may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line for line in lines if line.startswith("flags")), platform.processor())
