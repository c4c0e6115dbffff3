"""What several tests of the balancer share."""

import pytest

from moe_serve.c_library import find_compiler
from moe_serve.eplb.split.policy import find_library


@pytest.fixture(scope="session")
def library():
    """The compiled splits."""
    if find_compiler() is None:
        pytest.skip("this machine has no C compiler; the plain split is the one in use")
    found = find_library()
    assert found is not None, "the log says why split.c could not be built"
    return found
