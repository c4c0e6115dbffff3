"""Turns command-line flags, named as in SGLang and vLLM, into overrides of settings; holds the defaults without a file.

A flag overrides one setting, so it wins over the file, as `--set` does.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from moe_serve.config import DEMO_MODEL, ServeConfig, load_config
from moe_serve.errors import ConfigError

# What `moe-serve serve` serves without arguments; configs/demo-cpu.yaml says the same.
DEMO_SETTINGS: Mapping[str, Any] = {"model": {"path": DEMO_MODEL}, "parallel": {"num_ranks": 2, "device": "cpu"}}


def settings_of_flags(flags: Mapping[str, Any]) -> list[str]:
    """Returns the overrides for flags by setting ("section.key"); a flag that is None was not given.

    A setting may be given by several flags (`--ep-size`, `--attn-dp-size`), as a list: they must agree.
    Raises ConfigError when they do not.
    """
    overrides = []
    for setting, value in flags.items():
        given = [item for item in (value if isinstance(value, list) else [value]) if item is not None]
        if len(set(given)) > 1:
            raise ConfigError(
                f"{setting} is given as {' and '.join(str(item) for item in given)}; every rank holds experts and its "
                "own requests, so the sizes are one number: give it once"
            )
        if given:
            overrides.append(f"{setting}={_as_yaml(given[0])}")
    return overrides


def effective_config(path: Any, flags: Mapping[str, Any], overrides: Iterable[str]) -> ServeConfig:
    """Returns the configuration of a file (None: the demo's settings), with flags and then `--set` on top."""
    above = [*settings_of_flags(flags), *overrides]
    base: Mapping[str, Any] = {}
    if path is None:
        base = DEMO_SETTINGS
        if load_config(overrides=above, base={"parallel": {"num_ranks": 2}}).model.path != DEMO_MODEL:
            base = {"parallel": {"num_ranks": 2}}  # a model other than the demo may use GPUs
    return load_config(path, above, base)


def _as_yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()
