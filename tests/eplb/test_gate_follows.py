"""Under drift the gate is nearly as fast as the policy that moves in every window, by the same prices."""

from dataclasses import replace

import numpy as np
import pytest

from moe_serve.eplb.cost.model import CostModel
from moe_serve.eplb.cost.profile_files import load_hardware, load_model_profile
from moe_serve.eplb.rebalance.settings import RebalanceSettings
from moe_serve.eplb.replay.costs import ProfileCosts
from moe_serve.eplb.replay.replay import replay
from moe_serve.eplb.replay.settings import ReplaySettings
from moe_serve.eplb.replay.synthetic import SyntheticLoad, synthetic_trace
from moe_serve.topology import Topology

FEW_LAYERS = 4, 64, Topology(2, 4), 72
WHOLE_MODEL = 58, 256, Topology(4, 8), 288


@pytest.mark.parametrize("shape", [FEW_LAYERS, pytest.param(WHOLE_MODEL, marks=pytest.mark.slow)], ids=["few", "whole"])
def test_on_60_drifting_windows_the_gate_is_within_one_percent_of_moving_in_every_window(shape):
    num_layers, num_logical, topology, slots = shape
    model = replace(
        load_model_profile("DeepSeek-V3"),
        num_logical=num_logical,
        num_layers=num_layers + 3,
        num_moe_layers=num_layers,
    )
    costs = ProfileCosts(CostModel(load_hardware("H800"), model, topology))
    drift = SyntheticLoad(
        "lognormal", 60, num_layers, num_logical, rho=0.98, steps_per_window=1000, tokens_per_step=4096
    )
    settings = ReplaySettings(
        topology,
        slots,
        costs=costs,
        gate=RebalanceSettings(bytes_per_expert=costs.expert_bytes),
        gate_cost=costs.gate(),
        latency_steps=2,
    )
    always, gated = replay(synthetic_trace(drift), ["incremental", "gate:incremental"], settings).policies
    seconds = [float(run.step_s.sum() * 1000 + run.stall_s.sum()) for run in (always, gated)]
    assert seconds[1] <= 1.01 * seconds[0]
    # A plan in every second window would serve well in turn with badly.
    served = gated.served.mean(axis=1)[10:]
    zigzag = served[::2].mean() - served[1::2].mean()
    usual = always.served.mean(axis=1)[10:]
    assert abs(zigzag - (usual[::2].mean() - usual[1::2].mean())) < 0.004
    assert np.count_nonzero(gated.moves[10:]) > 40
