"""The cost model: what its parts must do, and how far it is from published figures (see published_figures.py)."""

from dataclasses import replace

import numpy as np
import pytest

from moe_serve.eplb.cost.links import busiest_rows, expected_places
from moe_serve.eplb.cost.model import Batch, CostModel, PredictedCost
from moe_serve.eplb.cost.profile_files import load_hardware, load_model_profile, profile_names
from moe_serve.eplb.migration.plan import plan_migration
from moe_serve.eplb.placement import Placement
from moe_serve.errors import ConfigError
from moe_serve.topology import Topology
from tests.eplb import published_figures as published

V3 = load_model_profile("DeepSeek-V3")
H800 = load_hardware("H800")


def cluster(num_ranks, hardware=H800, model=V3):
    return CostModel(hardware, model, Topology(max(1, num_ranks // 8), min(num_ranks, 8)))


def even_rows(num_ranks, tokens_per_rank, topk=8):
    return np.full(num_ranks, float(tokens_per_rank * topk))


# What the model says where somebody has measured: error = predicted / measured - 1.


def low_latency_errors(figure, hardware=H800):
    costs = cluster(figure.num_ranks, hardware)
    rows = even_rows(figure.num_ranks, 128)
    dispatch, combine = costs.dispatch(rows, "low_latency"), costs.combine(rows, "low_latency")
    return [float(dispatch) / figure.dispatch_s - 1, float(combine) / figure.combine_s - 1]


def normal_errors(figure, hardware=H800):
    """DeepEP counts the bytes of every copy a rank sends to a node, its own included."""
    costs = cluster(figure.num_ranks, hardware)
    rows = even_rows(figure.num_ranks, 4096)
    copies = 4096 * expected_places(figure.num_ranks // 8, 256, 8, 8, 4)
    out = []
    for seconds, value_bytes, measured in (
        (costs.dispatch(rows, "normal"), V3.dispatch_bytes, figure.dispatch_bytes_per_s),
        (costs.combine(rows, "normal"), V3.combine_bytes, figure.combine_bytes_per_s),
    ):
        out.append(measured / (copies * V3.hidden * value_bytes / float(seconds)) - 1)
    return out


def gemm_error(figure, hardware=H800):
    seconds = cluster(8, hardware).grouped_gemm(np.full(figure.num_groups, float(figure.rows)), figure.n, figure.k)
    measured = 2.0 * figure.num_groups * figure.rows * figure.n * figure.k / figure.flops
    return float(seconds) / measured - 1


def serving_error(figure, phase, hardware=None):
    """Of the time per token, so that +100 % is half the throughput."""
    profile = replace(load_hardware(figure.hardware), step_overhead=H800.step_overhead)
    costs = cluster(figure.num_ranks, hardware or profile)
    slots = 288
    rows = np.full((58, slots), figure.tokens_per_rank * figure.num_ranks * 8 / slots)
    batch = Batch(phase, figure.tokens_per_rank, figure.context, two_batch=True)
    seconds = costs.step(batch, rows).total_s
    return seconds / (8 * figure.tokens_per_rank / figure.tokens_per_s_node) - 1


def test_fitted_parameters_are_the_best_ones_for_the_figures_they_may_be_fitted_on():
    def squares(hardware):
        low = [e for f in published.FITTED_LOW_LATENCY for e in low_latency_errors(f, hardware)]
        normal = [e for f in published.FITTED_NORMAL for e in normal_errors(f, hardware)]
        gemm = [gemm_error(f, hardware) for f in published.FITTED_GEMM]
        decode = [
            serving_error(f, "decode", replace(load_hardware(f.hardware), step_overhead=hardware.step_overhead))
            for f in published.FITTED_DECODE
        ]
        return sum(e * e for e in (*low, *normal, *gemm, *decode))

    fitted = (
        "gemm_efficiency",
        "hbm_efficiency",
        "nic_efficiency_low_latency",
        "dispatch_latency_s",
        "combine_latency_s",
        "nic_efficiency_normal",
        "step_overhead",
    )
    best = squares(H800)
    for name in fitted:
        for factor in (0.98, 1.02):
            assert squares(H800.scaled(**{name: factor})) > best, name


def test_errors_on_held_out_figures_are_those_that_the_document_states():
    """A change that makes one of these worse has to say so in docs/cost-model.md."""
    got = {
        f"low latency EP{f.num_ranks} {name}": error
        for f in published.HELD_OUT_LOW_LATENCY
        for name, error in zip(("dispatch", "combine"), low_latency_errors(f), strict=True)
    }
    got |= {
        f"normal EP{f.num_ranks} {name}": error
        for f in published.HELD_OUT_NORMAL
        for name, error in zip(("dispatch", "combine"), normal_errors(f), strict=True)
    }
    got |= {f"GEMM {f.num_groups} x {f.rows}, n {f.n}": gemm_error(f) for f in published.HELD_OUT_GEMM}
    got |= {f"decode EP{f.num_ranks}": serving_error(f, "decode") for f in published.HELD_OUT_DECODE}
    got |= {f"prefill {f.hardware}": serving_error(f, "prefill") for f in published.HELD_OUT_PREFILL}
    stated = {
        "low latency EP8 dispatch": 0.05,
        "low latency EP8 combine": 0.10,
        "low latency EP64 dispatch": 0.02,
        "low latency EP64 combine": -0.02,
        "low latency EP128 dispatch": -0.03,
        "low latency EP128 combine": -0.11,
        "low latency EP256 dispatch": -0.02,
        "low latency EP256 combine": -0.06,
        "normal EP16 dispatch": -0.27,
        "normal EP16 combine": -0.28,
        "normal EP64 dispatch": 0.03,
        "normal EP64 combine": 0.00,
        "GEMM 8 x 4096, n 7168": -0.06,
        "GEMM 1 x 1024, n 4096": -0.04,
        "GEMM 4 x 256, n 7168": -0.06,
        "decode EP144": -0.04,
        "prefill H100": -0.33,
        "prefill H800": -0.55,
    }
    assert got == pytest.approx(stated, abs=0.012)


@pytest.mark.parametrize("kind", ["hardware", "models"])
def test_every_number_of_every_profile_has_a_source(kind):
    load = load_hardware if kind == "hardware" else load_model_profile
    for name in profile_names(kind):
        profile = load(name)
        assert profile.name == name
        given = {key for key, value in vars(profile).items() if key not in ("name", "sources") and value}
        assert given <= set(profile.sources), name
        assert all(len(source) > 3 for source in profile.sources.values())


def test_profiles_are_found_by_name_in_any_case_and_by_path(tmp_path):
    assert load_hardware("h800") == H800
    own = tmp_path / "own.yaml"
    text = "\n".join(
        f"{k}: {{value: {v}, source: measured}}" for k, v in vars(H800).items() if k not in ("name", "sources")
    )
    own.write_text(f"name: own\n{text}\n")
    assert replace(load_hardware(own), name="H800") == H800
    own.write_text(f"name: own\n{text}\nfp9_flops: {{value: 1, source: measured}}\n")
    with pytest.raises(ConfigError, match="fp9_flops"):
        load_hardware(own)
    own.write_text(f"name: own\n{text.replace(', source: measured', '', 1)}\n")
    with pytest.raises(ConfigError, match="where it is from"):
        load_hardware(own)
    own.write_text("name: own\nfp8_flops: {value: 1, source: measured}\n")
    with pytest.raises(ConfigError, match="missing"):
        load_hardware(own)
    with pytest.raises(ConfigError, match="H800"):
        load_hardware("H900")
    with pytest.raises(ConfigError, match="no number fp9"):
        H800.scaled(fp9=2)


def test_weights_are_streamed_once_per_active_expert():
    costs = cluster(8)
    stream = 2048 * 7168 / (H800.hbm_efficiency * H800.hbm_bytes_per_s)
    one, two = (float(costs.grouped_gemm(np.array(r), 2048, 7168)) for r in ([2.0, 0.0, 0.0], [1.0, 1.0, 0.0]))
    assert one == pytest.approx(stream, rel=0.05)
    assert two == pytest.approx(2 * one, rel=0.05)
    assert costs.grouped_gemm(np.zeros(3), 2048, 7168) == 0


def test_rows_are_rounded_up_to_tiles_when_compute_binds():
    costs = cluster(8, H800.scaled(hbm_bytes_per_s=1e9))  # memory costs nothing
    times = [float(costs.grouped_gemm(np.array([rows]), 2048, 7168)) for rows in (1.0, 64.0, 65.0, 128.0)]
    assert times[0] == pytest.approx(times[1])
    assert times[2] == pytest.approx(times[3])
    assert times[3] == pytest.approx(2 * times[0])


def test_mean_rows_cost_what_batches_of_that_mean_cost_on_average():
    costs = cluster(8)
    rng = np.random.default_rng(0)
    for mean in (0.3, 3.0, 40.0, 500.0):
        draws = rng.poisson(mean, (4000, 4)).astype(float)
        average = costs.grouped_gemm(draws, 2048, 7168).mean()
        assert float(costs.grouped_gemm(np.full(4, mean), 2048, 7168, is_mean=True)) == pytest.approx(average, rel=0.12)


def test_the_busiest_rank_sets_the_pace_and_only_of_its_layer():
    costs = cluster(16)
    rows = np.full((3, 64), 100.0)
    rows[1, :4] = 400.0
    times = costs.moe_layer(rows, "low_latency")
    assert times.ffn_s[1] > times.ffn_s[0] == times.ffn_s[2]
    assert times.total_s[1] > times.total_s[0]
    assert np.argmax(costs.expert_ffn(rows.reshape(3, 16, -1))[1]) == 0


def test_traffic_that_is_even_costs_what_no_traffic_given_costs():
    topology = Topology(3, 4)
    rng = np.random.default_rng(0)
    rows = rng.random((2, 12))
    even = np.repeat(rows[:, None] / 12, 12, axis=1)
    for a, b in zip(
        vars(busiest_rows(rows, topology)).values(), vars(busiest_rows(rows, topology, even)).values(), strict=True
    ):
        assert a == pytest.approx(b)


def test_traffic_is_counted_on_links_nics_and_nodes():
    topology = Topology(2, 2)
    traffic = np.zeros((4, 4))
    traffic[0, 1], traffic[0, 2], traffic[1, 2], traffic[3, 3] = 7, 5, 3, 100
    busiest = busiest_rows(traffic.sum(axis=0), topology, traffic)
    assert (busiest.link, busiest.nic, busiest.node) == (7, 8, 8)


def test_local_traffic_makes_dispatch_cheaper():
    costs = cluster(16)
    rows = even_rows(16, 128)
    local = np.diag(rows)
    assert costs.dispatch(rows, "low_latency", local) == H800.dispatch_latency_s
    assert costs.dispatch(rows, "low_latency") > H800.dispatch_latency_s


def test_expected_places_counts_by_enumeration():
    rng = np.random.default_rng(0)
    for places, groups, topk_groups in ((4, 8, 4), (8, 8, 4), (16, 8, 4), (4, 1, 1)):
        experts, topk = 64, 6
        seen = []
        for _ in range(4000):
            picked = rng.choice(groups, topk_groups, replace=False)
            pool = np.concatenate([np.arange(g * experts // groups, (g + 1) * experts // groups) for g in picked])
            seen.append(len({int(e) * places // experts for e in rng.choice(pool, topk, replace=False)}))
        assert expected_places(places, experts, topk, groups, topk_groups) == pytest.approx(np.mean(seen), rel=0.02)


def test_step_adds_up_and_two_batches_hide_the_shorter_side():
    costs = cluster(32)
    one = costs.step(Batch("prefill", 8192, 2000))
    two = costs.step(Batch("prefill", 8192, 2000, two_batch=True))
    assert two.total_s < one.total_s
    parts = one.attention_s + one.dispatch_s + one.ffn_s + one.combine_s + one.other_s
    assert one.total_s == pytest.approx(parts * H800.step_overhead, rel=1e-6)  # the shared expert is hidden
    small = [costs.step(Batch("decode", 2, 2000, two_batch=t)).total_s for t in (False, True)]
    assert small[1] > small[0]  # tiny batches lose by overlap, as users report


def test_step_needs_the_rows_of_all_layers():
    with pytest.raises(ConfigError, match="58 MoE layers"):
        cluster(32).step(Batch("decode", 8, 100), np.ones((3, 288)))


@pytest.mark.parametrize("model", profile_names("models"))
@pytest.mark.parametrize("hardware", profile_names("hardware"))
def test_every_pair_of_profiles_gives_finite_times(model, hardware):
    profile = load_hardware(hardware)
    for topology in (Topology(1, 1), Topology(2, profile.ranks_per_node)):
        costs = CostModel(profile, load_model_profile(model), topology)
        for batch in (Batch("decode", 16, 1000), Batch("prefill", 2048, 1000, two_batch=True), Batch("decode", 0, 0)):
            assert 0 < costs.step(batch).total_s < 1e4


def test_gate_cost_prices_layers_and_moves():
    costs = cluster(8)
    gate = PredictedCost(costs)
    placement = Placement.trivial(2, 16, 8)
    tokens = np.full((2, 16), 64.0)
    tokens[1, :2] *= 20
    layers = gate.layer_seconds(tokens, placement)
    assert layers[1] > layers[0] > 0
    rows = placement.physical_to_logical.copy()
    rows[0, [0, 2]] = rows[0, [2, 0]]
    plan = plan_migration(placement, Placement(rows, 16, 8), costs.topology, relabel="none")
    seconds = gate.migration_seconds(plan, costs.topology)
    link = V3.expert_bytes / (H800.link_bytes_per_s * H800.link_efficiency)
    assert link < seconds < 1.5 * link
    far = gate.migration_seconds(plan, Topology(8, 1))
    assert far > 2 * seconds
    empty = plan_migration(placement, placement, costs.topology)
    assert gate.migration_seconds(empty, costs.topology) == 0


def test_rank_cost_prices_tokens_weights_and_slow_ways():
    near, far = cluster(8).rank_cost("normal"), cluster(16).rank_cost("normal")
    assert near.off_node_token_s == 0 < far.off_node_token_s
    assert near.activated_s == pytest.approx(V3.expert_bytes / (H800.hbm_efficiency * H800.hbm_bytes_per_s))
