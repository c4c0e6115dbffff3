import pytest

from moe_serve.kernels.cpu.library import find_cpu_library


@pytest.fixture(autouse=True)
def library():
    """The compiled kernels on one thread."""
    found = find_cpu_library()
    if found is None:
        pytest.skip("no C compiler")
    found.set_threads(1)
    yield found
    found.set_threads(1)
