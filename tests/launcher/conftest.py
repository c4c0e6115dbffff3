"""Two hosts on this machine, for systems that run on both."""

from collections.abc import Iterator

import pytest

from tests.launcher.hosts import Host, make_hosts


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Host, Host]]:
    monkeypatch.setenv("MOE_SERVE_TOKEN", "0123456789abcdef" * 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with make_hosts(2) as (a, b):
        yield a, b
