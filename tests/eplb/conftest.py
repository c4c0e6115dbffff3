"""What several tests of the balancer share."""

import pytest

from moe_serve.eplb.split.policy import build_library
from moe_serve.errors import ConfigError


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The compiled splits, built anew."""
    try:
        return build_library(tmp_path_factory.mktemp("built"))
    except ConfigError as error:
        if "no C compiler" in str(error):
            pytest.skip("this machine has no C compiler; the plain split is the one in use")
        raise
