"""Fixtures that are the kernels' own."""

from tests.kernels.conftest import interpreter as interpreter
