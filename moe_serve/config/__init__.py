"""The configuration of a serving system: one YAML file, plus overrides from the command line.

Unknown keys are refused, with the nearest known one. Nothing edits a configuration later: computed
values (`auto` choices, sizes read from the model) are new objects.
"""

from moe_serve.config.reading import load_config
from moe_serve.config.sections import (
    DEMO_MODEL,
    CacheConfig,
    DispatchConfig,
    EngineConfig,
    EplbConfig,
    LauncherConfig,
    ModelConfig,
    ParallelConfig,
    ServeConfig,
    ServerConfig,
    SpeculationConfig,
    hub_cache,
    is_hub_name,
    model_dir,
    served_name,
    served_names,
)

__all__ = [
    "DEMO_MODEL",
    "CacheConfig",
    "DispatchConfig",
    "EngineConfig",
    "EplbConfig",
    "LauncherConfig",
    "ModelConfig",
    "ParallelConfig",
    "ServeConfig",
    "ServerConfig",
    "SpeculationConfig",
    "hub_cache",
    "is_hub_name",
    "load_config",
    "model_dir",
    "served_name",
    "served_names",
]
