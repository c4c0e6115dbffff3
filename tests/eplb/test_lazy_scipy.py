"""Importing scipy takes longer than a plan, so planning does it only where an assignment has to be solved."""

import subprocess
import sys

import numpy as np
import pytest

from moe_serve.eplb.migration import relabel
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.policy import PlanRequest
from moe_serve.topology import Topology
from tests.eplb.loads import drifting

PLANS = """
import sys
import numpy as np
from moe_serve.eplb.migration.plan import plan_migration
from moe_serve.eplb.planner import plan
from moe_serve.topology import Topology

tokens = np.random.default_rng(0).integers(1, 1000, (1, 256))
for nodes, ranks_per_node, slots in ((4, 8, 288), (8, 8, 320), (32, 8, 256)):
    topology = Topology(nodes, ranks_per_node)
    for policy in ("deepseek", "static", "greedy", "refined"):
        current = plan(tokens, topology, slots, policy).placement
    later = plan(tokens[:, ::-1] + 100 * tokens, topology, slots, "incremental", current=current)
    plan_migration(current, later.placement, topology, relabel="nodes")
    loaded = [name for name in sys.modules if name.split(".")[0] == "scipy"]
    assert not loaded, (slots, loaded[:3])
"""


def test_a_process_that_plans_does_not_import_scipy():
    done = subprocess.run([sys.executable, "-c", PLANS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("kind", ["nodes", "ranks"])
def test_where_every_part_has_its_rank_already_the_assignment_is_that_of_scipy(kind, monkeypatch):
    loads = drifting(2, 3, 64, 0.9)
    top = Topology(2, 4)
    current = make_policy("refined").plan(PlanRequest(loads[0], top, 72)).placement
    later = make_policy("incremental").plan(PlanRequest(loads[1], top, 72, current=current)).placement
    other = make_policy("refined").plan(PlanRequest(loads[1], top, 72)).placement
    quick = [relabel.relabel_ranks(current, new, top, kind) for new in (later, other)]
    monkeypatch.setattr(relabel, "_is_cheapest_as_it_is", lambda price: False)
    for slots, new in zip(quick, (later, other), strict=True):
        np.testing.assert_array_equal(slots, relabel.relabel_ranks(current, new, top, kind))
    assert (quick[0] == np.arange(72)).all()
    assert (quick[1] != np.arange(72)).any()
