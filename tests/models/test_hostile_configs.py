"""A config.json from a stranger: any value under any key is read, or refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from moe_serve.errors import ModelError
from moe_serve.models.families.registry import read_spec
from tests.models.published import PUBLISHED

EXTREMES: list[Any] = [-1, 0, 2, 1e308, 10**400, float("nan"), True, "x", [], [[]], [1, 2], {"a": 1}]
ROPES: list[Any] = [
    {"alpha": -1}, {"alpha": 1e300, "rope_theta": 1e300}, {"alpha": 1e9, "rope_theta": 1e300}, {"rope_type": []},
    {"rope_type": "yarn"}, {"partial_rotary_factor": 1e-9}, {"partial_rotary_factor": []}, {"rope_theta": True},
]  # fmt: skip
MORE = ("layer_types", "sliding_window", "use_sliding_window", "rotary_dim", "head_dim", "quantization_config")
OF_FAMILIES = {config["model_type"]: config for config, _ in PUBLISHED.values()}
OF_FAMILIES["llama4_text"] = OF_FAMILIES["llama4"]["text_config"]


@pytest.mark.parametrize("model_type", OF_FAMILIES)
def test_any_value_is_read_or_refused_in_one_line(model_type: str, tmp_path: Path) -> None:
    base = OF_FAMILIES[model_type]
    changes = [{key: value} for key in {*base, *MORE} for value in EXTREMES]
    changes += [{key: value} for key in ("rope_parameters", "rope_scaling") for value in ROPES]
    rope = base.get("rope_scaling") or {}
    changes += [{"rope_scaling": rope | {key: value}} for key in rope for value in (*EXTREMES, 1e-308, 1e308)]
    messages: list[str] = []
    for change in changes:
        (tmp_path / "config.json").write_text(json.dumps(base | change))
        try:
            spec = read_spec(tmp_path)
        except ModelError as error:
            messages.append(str(error))
        else:
            assert spec.dense_parameters > 0, change
            assert spec.attention.softmax_scale > 0, change
    assert not [message for message in messages if "\n" in message]
    assert len(messages) > len(changes) // 4
