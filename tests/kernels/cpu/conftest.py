import platform

import pytest

from moe_serve.c_library import INSTRUCTION_SETS, find_compiler, processor_flags
from moe_serve.kernels.cpu import library as library_module
from moe_serve.kernels.cpu.library import build_cpu_library, find_cpu_library


@pytest.fixture(autouse=True)
def library():
    """The compiled kernels on one thread."""
    if find_compiler() is None:
        pytest.skip("no C compiler")
    found = find_cpu_library()
    assert found is not None, "the kernels do not build"
    found.set_threads(1)
    yield found
    found.set_threads(1)
    found.use_amx(True)


@pytest.fixture
def avx2(library):
    """The kernels built for AVX2, which a processor with AVX-512 runs too. `library` computes without AMX meanwhile."""
    if platform.machine() != "x86_64":
        pytest.skip("needs an x86-64")
    if library.vectors != "avx512":
        pytest.skip("needs AVX-512, to compare with")
    library.use_amx(False)
    return build_cpu_library(INSTRUCTION_SETS["avx2"].flags)


@pytest.fixture
def emulated():
    """The kernels with AMX as tiles.h plays it, which any processor runs."""
    return build_cpu_library((*processor_flags(), "-DEMULATE_TILES"))


@pytest.fixture
def use(monkeypatch):
    """Returns use(library): what the kernels' Python functions call until the test ends."""
    return lambda chosen: monkeypatch.setattr(library_module, "find_cpu_library", lambda: chosen)
