"""A model with LongRoPE: the longest context that is configured chooses its rotations."""

import json
from pathlib import Path

import pytest
import torch

from moe_serve.config import load_config
from moe_serve.engine.model.model_plan import ModelPlan
from moe_serve.models.families.registry import read_spec
from tests.models.published import PHI_35_MOE


@pytest.mark.parametrize(("given", "context", "divisor"), [(None, 4096, 1.0), (4096, 4096, 1.0), (4097, 4097, 64.02)])
def test_the_longest_context_chooses_the_rotations(
    given: int | None, context: int, divisor: float, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PHI_35_MOE))
    overrides = [f"model.path={tmp_path}", "model.load_format=dummy"]
    config = load_config(overrides=[*overrides, *([f"model.max_model_len={given}"] if given else [])])
    plan = ModelPlan.of(config, read_spec(tmp_path), torch.device("cpu"))
    assert (plan.max_model_len, plan.spec.max_position) == (context, context)
    assert plan.spec.rope.divisors[-1] == divisor
