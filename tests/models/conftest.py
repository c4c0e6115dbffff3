"""Tiny oracles of every family, made and saved once per session."""

from pathlib import Path
from typing import Any

import pytest

from tests.models.families import Oracle, make_oracle, save


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    made: dict[str, tuple[Any, Path]] = {}

    def get(name: str) -> tuple[Any, Path]:
        if name not in made:
            model = make_oracle(name)
            made[name] = (model, save(model, tmp_path_factory.mktemp("models") / name))
        return made[name]

    return get
