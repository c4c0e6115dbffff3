"""What config.json leaves out, or says null to, is what transformers takes for it, or the model is refused."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from moe_serve.errors import ModelError
from moe_serve.models.families.registry import DEFAULTS, read_spec
from moe_serve.models.families.registry import FAMILIES as READERS
from moe_serve.models.spec import ModelSpec
from tests.models.families import FAMILIES
from tests.models.published import GPT_OSS_20B, PUBLISHED
from tests.models.test_spec import DEEPSEEK_V2, DEEPSEEK_V2_LITE, DEEPSEEK_V3, KIMI_K2, QWEN_30B

Values = dict[str, Any]
CONFIGS: dict[str, Values] = {name: {**keys, "model_type": kind} for name, (kind, keys) in FAMILIES.items()}
CONFIGS |= {name: config for name, (config, _) in PUBLISHED.items()}
CONFIGS |= {"Qwen3-30B": QWEN_30B, "DeepSeek-V3": DEEPSEEK_V3, "gpt-oss-20b": GPT_OSS_20B}
CONFIGS |= {"DeepSeek-V2": DEEPSEEK_V2, "DeepSeek-V2-Lite": DEEPSEEK_V2 | DEEPSEEK_V2_LITE}
# Its dtype chooses that of dummy weights alone, and transformers does not hand Llama-4's on to the text model.
# Layers for multi-token prediction are left out by transformers.
NOT_NUMBERS: dict[str, Any] = {"checkpoint_dtype": None, "num_predictors": 0}


def ours(values: Values, folder: Path) -> ModelSpec | None:
    """What we read; None where it is refused."""
    return read(json.dumps(values), folder)


@lru_cache(maxsize=1000)  # most keys left out give the configuration in full that others gave
def read(text: str, folder: Path) -> ModelSpec | None:
    (folder / "config.json").write_text(text)
    try:
        return replace(read_spec(folder), **NOT_NUMBERS)
    except ModelError:
        return None


def in_full(values: Values) -> Values | None:
    """The configuration with everything that transformers takes for it; None where it refuses."""
    from transformers import CONFIG_MAPPING

    kind = values["model_type"]
    try:
        config = CONFIG_MAPPING[kind].from_dict(json.loads(json.dumps(values)))
    except Exception:  # transformers' own checks, of many kinds
        return None
    found: Values = config.to_dict()
    outer = found.get("thinker_config") or found
    text = outer.get("text_config") or outer
    eos = text.get("eos_token_id")
    if isinstance(eos, int) and eos >= text["vocab_size"]:
        text["eos_token_id"] = None  # which ends nothing
    return found


def with_less(values: Values) -> Iterator[tuple[str, Values]]:
    """Yields the configuration with each key left out, and with each set to null, those of rotations and text too."""
    for key, value in values.items():
        if key in ("model_type", "architectures", "transformers_version"):
            continue
        yield f"no {key}", {name: other for name, other in values.items() if name != key}
        if value is not None:
            yield f"{key}: null", values | {key: None}
        if key in ("rope_parameters", "rope_scaling", "thinker_config", "text_config") and isinstance(value, dict):
            for name, changed in with_less(value):
                yield f"{key}, {name}", values | {key: changed}


# Configurations within configurations have many more keys; all of them together are left out by default.
NESTED = {name for name, values in CONFIGS.items() if not values.keys().isdisjoint({"thinker_config", "text_config"})}
# By default one configuration meets each reader: a published one where there is one, else a tiny model, a variant of a
# family ("-" in its name) where there is no other. The other variants go through the same reader with one key changed.
VARIANTS_FIRST = sorted(CONFIGS, key=lambda name: name not in FAMILIES or "-" not in name)  # others take their places
OF_READERS = {CONFIGS[name]["model_type"]: name for name in VARIANTS_FIRST}
NAMES = [pytest.param(name, marks=() if name in OF_READERS.values() else pytest.mark.slow) for name in CONFIGS]


@pytest.mark.parametrize(
    "name",
    [pytest.param(*each.values, marks=pytest.mark.slow if each.values[0] in NESTED else each.marks) for each in NAMES],
)
def test_a_key_that_is_left_out_is_what_transformers_takes_for_it(name: str, tmp_path: Path) -> None:
    num_compared = 0
    for values in (CONFIGS[name], in_full(CONFIGS[name])):
        assert values is not None
        for change, less in [("as it is", values), *with_less(values)]:
            full = in_full(less)
            spec = None if full is None else ours(less, tmp_path)
            if spec is not None and full is not None:
                assert spec == ours(full, tmp_path), change
                num_compared += 1
    assert num_compared > 20, "refused by one of both"


@pytest.mark.parametrize("name", NAMES)
def test_all_that_can_be_left_out_is_what_transformers_takes_for_it(name: str, tmp_path: Path) -> None:
    least = in_full(CONFIGS[name])
    assert least is not None
    for key in sorted(least.keys() - {"model_type"}):
        less = {other: value for other, value in least.items() if other != key}
        if in_full(less) is not None and ours(less, tmp_path) is not None:
            least = less
    full = in_full(least)
    assert full is not None
    assert ours(least, tmp_path) == ours(full, tmp_path)
    assert len(least) < 20, "sizes alone are needed"


def test_every_family_that_transformers_knows_has_been_compared() -> None:
    from transformers import CONFIG_MAPPING

    assert {values["model_type"] for values in CONFIGS.values()} == {kind for kind in READERS if kind in CONFIG_MAPPING}
    assert DEFAULTS.keys() <= READERS.keys()


def test_a_default_end_of_sequence_is_left_out_where_generation_config_names_one(tmp_path: Path) -> None:
    values = {key: value for key, value in CONFIGS["DeepSeek-V3"].items() if key != "eos_token_id"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_spec(tmp_path).eos_token_ids == (1,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert read_spec(tmp_path).eos_token_ids == (7, 9)


KIMI = DEEPSEEK_V3 | KIMI_K2
AMBIGUOUS = (
    "first_k_dense_replace", "n_group", "n_shared_experts", "norm_topk_prob", "routed_scaling_factor", "topk_group",
)  # fmt: skip


@pytest.mark.parametrize("key", AMBIGUOUS)
def test_what_kimis_authors_and_deepseeks_take_different_defaults_for_must_be_said(key: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({name: value for name, value in KIMI.items() if name != key}))
    with pytest.raises(ModelError, match=rf"{key} is missing; is this the folder of a 'kimi_k2' model\?"):
        read_spec(tmp_path)


def test_rope_scaling_counts_where_rope_parameters_are_given_too(tmp_path: Path) -> None:
    both = QWEN_30B | {
        "rope_scaling": {"rope_type": "linear", "factor": 3.0, "rope_theta": 7e5},
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
    }
    full = in_full(both)
    assert full is not None
    spec = ours(both, tmp_path)
    assert spec is not None
    assert spec == ours(full, tmp_path)
    assert math.isclose(spec.rope.linear_factor, 3.0)
