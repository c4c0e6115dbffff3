"""A clock that a test sets, for the modules that it tests."""

import time
from types import ModuleType
from typing import Any

import pytest


class Clock:
    """Stands for `time` in some modules. All others have the real one: threads of earlier tests may run on in them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, now_s: float, *modules: ModuleType):
        self.now_s = now_s
        for module in modules:
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.now_s

    def monotonic_ns(self) -> int:
        return round(self.now_s * 10**9)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)
