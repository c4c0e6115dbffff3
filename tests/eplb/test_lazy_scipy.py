"""Importing scipy takes longer than a plan, and engines that take our planner need not have it: plans do without."""

import subprocess
import sys

PLANS = """
import sys
import numpy as np
from moe_serve.eplb.migration.plan import plan_migration
from moe_serve.eplb.policies.make import plan
from moe_serve.topology import Topology

sys.modules["scipy"] = None
tokens = np.random.default_rng(0).integers(1, 1000, (1, 256))
for nodes, ranks_per_node, slots in ((4, 8, 288), (8, 8, 320), (32, 8, 256)):
    topology = Topology(nodes, ranks_per_node)
    by_source = np.ones((1, topology.num_ranks, 256), dtype=np.int64)
    for policy in ("deepseek", "static", "greedy", "refined", "incremental"):
        current = plan(tokens, topology, slots, policy).placement
        for more in ({}, {"off_home": 0.1, "num_groups": 8}, {"objective": "off_node", "by_source": by_source}):
            later = plan(tokens[:, ::-1] + 100 * tokens, topology, slots, policy, current=current, **more)
            plan_migration(current, later.placement, topology, relabel="nodes")
"""


def test_a_process_that_plans_and_moves_does_without_scipy():
    done = subprocess.run([sys.executable, "-c", PLANS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
