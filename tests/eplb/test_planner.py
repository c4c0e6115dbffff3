"""The entry point for scripts, and what a plan loads: torch takes longer to import than a plan, so plans do without."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import moe_serve.eplb
from moe_serve.eplb import Topology, plan
from moe_serve.errors import ConfigError, PlacementError
from tests.eplb.loads import grouped, lognormal, one_hot


def test_the_documented_call_works_with_its_defaults():
    made = plan(lognormal(3, 64, 0.6), Topology(2, 4), 72)
    assert made.placement.physical_to_logical.shape == (3, 72)
    assert made.balancedness.shape == made.bound.shape == (3,)
    assert made.truncated is False
    assert made.num_moves == 0
    assert made.elapsed_s > 0


def test_the_example_of_the_guide_runs():
    guide = (Path(__file__).parents[2] / "docs/planning.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"### From Python.*?```python\n(.*?)```", guide, re.DOTALL)
    names = {}
    exec(example, names)
    later, last = names["later"], names["last"]
    assert 0 < later.num_moves <= 4 * len(last)
    assert sum(len(each.moves) for each in names["rounds"]) >= later.num_moves
    assert names["tokens"].sum() == last[0].sum()


def test_lists_and_floats_are_taken():
    made = plan([[1.5, 2.5, 3.0, 1.0]], Topology(1, 2), 4, policy="greedy")
    assert made.balancedness[0] == 1.0


def test_policy_options_are_passed_on_and_mistakes_are_named():
    plan(lognormal(1, 8, 0.6), Topology(1, 2), 8, options={"sweeps": 3})
    with pytest.raises(ConfigError, match="refined"):
        plan(lognormal(1, 8, 0.6), Topology(1, 2), 8, policy="best")
    with pytest.raises(PlacementError, match="num_slots"):
        plan(lognormal(1, 8, 0.6), Topology(1, 2), 9)


@pytest.mark.parametrize("seed", range(2))
def test_the_soft_hierarchy_meets_its_goals(seed):
    hot = plan(one_hot(4, 256, 0.3, seed), Topology(4, 8), 288, num_groups=8, off_home=0.2)
    assert hot.balancedness.mean() >= 0.90
    assert hot.off_home.max() <= 0.2 + 1e-9
    correlated = plan(grouped(4, 256, 8, seed), Topology(4, 8), 288, num_groups=8, off_home=0.08)
    assert correlated.balancedness.mean() >= 0.90
    assert correlated.off_home.max() <= 0.08 + 1e-9


def test_the_dial_trades_traffic_for_balance():
    tokens = grouped(6, 128, 8, 3)
    made = [plan(tokens, Topology(4, 4), 160, num_groups=8, off_home=share) for share in (0.0, 0.05, 0.2)]
    reached = [m.balancedness.mean() for m in made]
    assert reached == sorted(reached)
    assert made[0].off_home.max() == 0


@pytest.mark.parametrize("policy", ["greedy", "deepseek", "refined"])
def test_a_first_plan_loads_neither_torch_nor_pulp(policy):
    code = (
        "import sys, numpy as np, moe_serve.eplb as e\n"
        f"e.plan(np.arange(1, 73).reshape(2, 36), e.Topology(2, 4), 40, policy={policy!r})\n"
        "print(*(m for m in ('torch', 'pulp') if m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == []


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    with pytest.raises(AttributeError, match="plan_everything"):
        _ = moe_serve.eplb.plan_everything
    assert np.all([hasattr(moe_serve.eplb, name) for name in moe_serve.eplb.__all__])
