"""Small helpers in C beside their Python twins: built at first use, kept in the user's cache, never required.

Whoever calls falls back to the twin and says why. Numbers in and out are int64 and addresses, so one prototype serves
all functions.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from moe_serve.errors import ConfigError

_FLAGS = ("-O3", "-fPIC", "-shared")
FOR_THIS_PROCESSOR = ("-march=native",)
_SECONDS = 60  # that a compiler may take


def load_c_library(
    source: Path, arguments: Mapping[str, int], flags: tuple[str, ...] = (), folder: Path | None = None
) -> tuple[ctypes.CDLL, str]:
    """Returns the library of a C file, and the compiler that builds it here.

    arguments: how many arguments each of its functions takes, all of int64; each returns int64, or nothing
    flags:     beside the usual ones, e.g. FOR_THIS_PROCESSOR
    folder:    None: $XDG_CACHE_HOME/moe_serve, or ~/.cache/moe_serve
    Raises ConfigError when there is no compiler, when it fails, or when others could have put a library there.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise ConfigError(f"no C compiler (cc, gcc, clang) for {source.name}; install one, or use its plain twin")
    folder = folder or _cache_folder()
    headers = [path.read_bytes() for path in sorted(source.parent.glob("*.h"))]
    facts = (source.read_bytes(), headers, compiler, _FLAGS + flags, platform.python_version(), _processor())
    path = folder / f"{source.stem}_{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.so"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
            raise ConfigError(f"{folder} can be written by others, so no code is loaded from it; chmod go-w it")
        if not path.exists():
            _build(compiler, source, path, flags)
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


def _cache_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(cache or Path.home() / ".cache") / "moe_serve"
    except RuntimeError:
        raise ConfigError("nobody's home folder is known here, so no C helper is kept; set XDG_CACHE_HOME") from None


def _build(compiler: str, source: Path, path: Path, flags: tuple[str, ...]) -> None:
    """Several ranks may build at once: each into a file of its own, which then takes the name in one step."""
    descriptor, built = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(descriptor)
    try:
        command = [compiler, *_FLAGS, *flags, "-o", built, str(source)]
        subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS, text=True)
        os.replace(built, path)
    finally:
        Path(built).unlink(missing_ok=True)


def _processor() -> str:
    """Returns what -march=native looks at; a home folder may be shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line for line in lines if line.startswith("flags")), platform.processor())
