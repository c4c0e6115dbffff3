"""The package names its adapters in the plugin groups that engines read."""

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
GROUPS = ["vllm.general_plugins", "sglang.srt.plugins"]


@pytest.mark.parametrize("group", GROUPS)
def test_an_engines_plugin_group_leads_to_its_adapter(group: str) -> None:
    for name, value in PROJECT["entry-points"][group].items():
        register = EntryPoint(name, value, group).load()
        register()  # without MOE_SERVE_EPLB: the engine need not even be installed
        assert group.split(".")[0] in value.split(":")[0]
