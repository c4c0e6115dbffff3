"""Builds small C helpers at first use and keeps them in the user's cache. None is required: each has a Python twin.

Callers fall back to the twin and report why. All arguments and results are int64 (numbers or addresses), so one
prototype serves all functions.
"""

import ctypes
import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from moe_serve.errors import ConfigError

_FLAGS = ("-O3", "-fPIC", "-shared")
FOR_THIS_PROCESSOR = ("-march=native",)
_TIMEOUT_S = 120  # of the compiler


def load_c_library(
    source: Path, arguments: Mapping[str, int], flags: tuple[str, ...] = (), folder: Path | None = None
) -> tuple[ctypes.CDLL, str]:
    """Returns the library of a C file, and the compiler that built it.

    arguments: the number of arguments of each function, all int64; each returns int64 or nothing
    flags:     beside the usual ones, e.g. FOR_THIS_PROCESSOR
    folder:    None: $XDG_CACHE_HOME/moe_serve, or ~/.cache/moe_serve
    Raises ConfigError when there is no compiler, when it fails, or when other users can write to the folder.
    """
    command = find_compiler()
    if command is None:
        raise ConfigError(f"no C compiler for {source.name}; install gcc or clang, or run: pip install ziglang")
    compiler = " ".join(command)
    folder = folder or _cache_folder()
    # All sources of the folder, since one may include the others.
    sources = [path.read_bytes() for path in sorted(source.parent.glob("*.[ch]"))]
    facts = (source.name, sources, compiler, _FLAGS + flags, platform.python_version(), processor_features())
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
        said = " ".join(error.stderr.split())[-300:]
        raise ConfigError(f"{compiler} could not build {source.name}: {said}; use its plain twin") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{compiler} could not build {source.name}: {error}; use its plain twin") from None
    for name, num_arguments in arguments.items():
        function = getattr(library, name)
        function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_int64] * num_arguments
    return library, compiler


def find_compiler() -> tuple[str, ...] | None:
    """Returns the command of the machine's C compiler, or None. The package `ziglang` of PyPI brings one (clang)."""
    path = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if path is not None:
        return (path,)
    return (sys.executable, "-m", "ziglang", "cc") if importlib.util.find_spec("ziglang") else None


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
        command = [*compiler, *_FLAGS, *flags, "-o", built, str(source)]
        subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S, text=True)
        os.replace(built, path)
    finally:
        Path(built).unlink(missing_ok=True)


def processor_features() -> str:
    """Returns the processor's features, on which -march=native depends: different machines may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line for line in lines if line.startswith("flags")), platform.processor())
