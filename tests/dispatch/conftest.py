"""Fixtures that are the kernels' own."""

from tests.kernels.conftest import interpreter as interpreter
from tests.kernels.conftest import on_device as on_device
