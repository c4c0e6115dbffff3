"""The compiled CPU kernels: one C library, built at first use with the machine's compiler and called through ctypes.

Every output of a kernel is summed in a fixed order, so a row's bits depend on that row only: one chain of fused
multiply-adds, or with AMX what tile_gemm.h says.
A function of a .c file here that begins with `i64 name(` takes int64 only (numbers or addresses) and returns one.
Imports no torch, so that a launcher can build the library before it starts ranks.
"""

import ctypes
import functools
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from moe_serve.c_library import load_c_library, processor_flags
from moe_serve.errors import ConfigError
from moe_serve.log import get_logger

SOURCE = Path(__file__).with_name("all.c")
FLAGS = ("-pthread",)
FORMS = ("avx512", "avx2", "neon", "plain")
AMX = "amx"
_DECLARATION = re.compile(r"^i64 (\w+)\(([^)]*)\)\s*\{", re.MULTILINE)


@dataclass(frozen=True)
class CpuLibrary:
    """The built kernels. vectors: what they were built for, of FORMS; all but `plain` have the same bits."""

    call: ctypes.CDLL
    compiler: str
    vectors: str
    _shared: list[object] = field(default_factory=list, repr=False, compare=False)

    @property
    def form(self) -> str:
        """The form in use: `vectors`, or AMX where products with bfloat16 weights run on it, with other bits."""
        return AMX if self.call.uses_tiles() else self.vectors

    def use_amx(self, wanted: bool) -> bool:
        """Lets this process multiply bfloat16 weights by AMX, if wanted, from now on. Returns whether it does."""
        return bool(self.call.use_tiles(int(wanted)))

    def address(self, kernel: str) -> int:
        """Returns where a function of the library begins, for code that calls it from C."""
        at = ctypes.cast(getattr(self.call, kernel), ctypes.c_void_p).value
        assert at is not None
        return at

    def set_threads(self, num_threads: int) -> None:
        """Sets the threads that kernels use in this process, the calling one included."""
        assert num_threads > 0, f"{num_threads} threads"
        self.call.set_threads(num_threads)

    def share_cores(self, rank: int, table_at: int, num_ranks: int, words: object) -> None:
        """Lets workers compute only where no rank's main thread does. The pool's threads read the words ever after.

        table_at: [num_ranks] addresses of what cores.h describes;  words: owns that memory
        """
        self._shared.append(words)
        status = self.call.share_cores(rank, num_ranks, table_at, len(os.sched_getaffinity(0)))
        assert status == 0, f"{num_ranks} ranks share cores"

    def end_sharing(self) -> None:
        """Lets workers compute on any core again."""
        self.call.share_cores(0, 0, 0, 0)


def build_cpu_library(flags: tuple[str, ...] | None = None) -> CpuLibrary:
    """Returns the library, built where no earlier build is found, with AMX where compiler, CPU and system have it.

    flags: None: for this processor.  Raises ConfigError as load_c_library and processor_flags do.
    """
    flags = (*(processor_flags() if flags is None else flags), *FLAGS)
    call, compiler = load_c_library(SOURCE, num_arguments(), flags)
    library = CpuLibrary(call, compiler, FORMS[call.vector_form()])
    library.use_amx(True)
    return library


@functools.cache
def find_cpu_library() -> CpuLibrary | None:
    """Returns the library; None where it cannot be built, and says so in one line.

    Raises ConfigError where it is wanted for instructions that this processor lacks.
    """
    flags = processor_flags()
    try:
        return build_cpu_library(flags)
    except ConfigError as error:
        get_logger(__name__).warning("no compiled CPU kernels, so torch computes, several times slower: %s", error)
        return None


def cpu_library() -> CpuLibrary:
    """Returns the library, for code that runs only where find_cpu_library found one."""
    library = find_cpu_library()
    assert library is not None, "compiled kernels were chosen, and there are none"
    return library


def num_arguments() -> dict[str, int]:
    """Returns the functions of all .c files here, with the number of arguments that each declares."""
    sources = [path.read_text(encoding="utf-8") for path in sorted(SOURCE.parent.glob("*.c"))]
    found = [match for source in sources for match in _DECLARATION.findall(source)]
    return {name: 0 if declared.strip() == "void" else declared.count(",") + 1 for name, declared in found}
