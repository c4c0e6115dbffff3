"""The cost model's parts, and prices learned from step times. test_published.py says how far the model is off."""

from dataclasses import replace

import numpy as np
import pytest

from moe_serve.eplb.cost.kernels import Batch, elementwise_bytes
from moe_serve.eplb.cost.measured import MeasuredCost, PriorPrices
from moe_serve.eplb.cost.model import CostModel, PredictedCost, Sides, busiest_rows, expected_places, overlapped_seconds
from moe_serve.eplb.cost.profile_files import load_engine, load_hardware, load_model_profile, profile_names
from moe_serve.eplb.load import LoadRecord, own_load, rank_load, slot_load
from moe_serve.eplb.migration.moves import MigrationRound, SlotMove
from moe_serve.eplb.migration.plan import plan_migration
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.rebalance.events import PlanReady, RequestPlan, RoundActivated, StartRound, WindowClosed
from moe_serve.eplb.rebalance.rebalancer import _costs_by_layer, make_rebalancer
from moe_serve.eplb.rebalance.settings import BalancerSettings, SystemFacts
from moe_serve.errors import ConfigError
from moe_serve.topology import Topology

V3 = load_model_profile("DeepSeek-V3")
H800 = load_hardware("H800")


def cluster(num_ranks, hardware=H800, model=V3):
    return CostModel(hardware, model, Topology(max(1, num_ranks // 8), min(num_ranks, 8)))


@pytest.mark.parametrize(
    ("model", "shapes", "read_more"),
    [
        # latents for all tokens on every rank, an eighth of the 128 heads; latents are read by every rank
        ("DeepSeek-V3", [(576, 7168), (1536, 7168), (16 * 192, 1536), (16 * 256, 512), (7168, 16 * 128)], 8),
        # 8 of 64 heads, and one of 4 heads of keys and values, which 2 ranks hold each
        ("Qwen3-235B-A22B", [(8 * 128 + 2 * 128, 4096), (4096, 8 * 128)], 2),
    ],
)
def test_ranks_that_share_attention_have_a_part_of_the_heads_for_the_tokens_of_all(model, shapes, read_more):
    costs = cluster(8, model=load_model_profile(model))
    kernels, alone = costs.kernels, Batch("decode", 64, 4096)
    shared = replace(alone, attention_ranks=8)
    projections = sum(kernels.gemm(8 * 64, n, k) for n, k in shapes)
    assert kernels.attention(shared) - kernels._attention_core(shared) == pytest.approx(projections)
    slow = CostModel(H800.scaled(attention_flops=1e9), costs.model, costs.topology).kernels
    cores = [slow._attention_core(batch) for batch in (shared, alone)]
    assert cores[0] == pytest.approx(read_more * cores[1]), "where reading bounds it"
    fast = CostModel(H800.scaled(attention_bytes_per_s=1e9), costs.model, costs.topology).kernels
    assert fast._attention_core(shared) == pytest.approx(fast._attention_core(alone)), "where computing bounds it"
    each_way = 7 * 64 * costs.model.hidden * 2 / (H800.link_bytes_per_s * H800.link_efficiency)
    others = kernels.attention(shared) + kernels.elementwise(shared)[0]
    assert kernels.attention_part(shared) - others == pytest.approx(2 * each_way)
    assert kernels.shared_tokens_s(alone) == 0


def test_ranks_that_cannot_share_attention_are_refused():
    for ranks in (3, 16):
        with pytest.raises(ConfigError, match="give a number that divides both"):
            cluster(16).step(Batch("decode", 8, 100, attention_ranks=ranks))
    ours = CostModel(H800, V3, Topology(1, 8), load_engine("moe_serve"))
    with pytest.raises(ConfigError, match="shares no attention between ranks"):
        ours.step(Batch("decode", 8, 100, attention_ranks=8))


@pytest.mark.parametrize("kind", ["hardware", "models", "engines"])
def test_every_number_of_every_profile_has_a_source(kind):
    load = {"hardware": load_hardware, "models": load_model_profile, "engines": load_engine}[kind]
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
    one, two = (float(costs.kernels.grouped_gemm(np.array(r), 2048, 7168)) for r in ([2.0, 0.0, 0.0], [1.0, 1.0, 0.0]))
    assert one == pytest.approx(stream, rel=0.05)
    assert two == pytest.approx(2 * one, rel=0.05)
    assert costs.kernels.grouped_gemm(np.zeros(3), 2048, 7168) == 0


def test_rows_are_rounded_up_to_tiles_when_compute_binds():
    costs = cluster(8, H800.scaled(hbm_bytes_per_s=1e9))  # memory costs nothing
    times = [float(costs.kernels.grouped_gemm(np.array([rows]), 2048, 7168)) for rows in (1.0, 64.0, 65.0, 128.0)]
    assert times[0] == pytest.approx(times[1])
    assert times[2] == pytest.approx(times[3])
    assert times[3] == pytest.approx(2 * times[0])


def test_mean_rows_cost_what_batches_of_that_mean_cost_on_average():
    costs = cluster(8)
    rng = np.random.default_rng(0)
    for mean in (0.3, 3.0, 40.0, 500.0):
        draws = rng.poisson(mean, (4000, 4)).astype(float)
        average = costs.kernels.grouped_gemm(draws, 2048, 7168).mean()
        assert float(costs.kernels.grouped_gemm(np.full(4, mean), 2048, 7168, is_mean=True)) == pytest.approx(
            average, rel=0.12
        )


def test_the_busiest_rank_sets_the_pace_and_only_of_its_layer():
    costs = cluster(16)
    rows = np.full((3, 64), 100.0)
    rows[1, :4] = 400.0
    times = costs.moe_layer(rows, Batch("decode", 8, 100))
    assert times.ffn_s[1] > times.ffn_s[0] == times.ffn_s[2]
    assert times.total_s[1] > times.total_s[0]
    assert np.argmax(costs.kernels.expert_ffn(rows.reshape(3, 16, -1))[1]) == 0


def test_rows_that_are_sent_evenly_are_counted_on_links_nics_and_nodes():
    topology = Topology(2, 2)
    busiest = busiest_rows(np.array([40.0, 8.0, 0.0, 0.0]), topology)  # each rank sends a quarter of each, 12
    assert busiest.link == 20 - 10, "to rank 0 from rank 1"
    assert busiest.nic == 20, "to rank 0 from the other node"
    assert busiest.node == 24, "to both ranks of node 0 from the other one"


def test_rows_that_stay_on_their_rank_travel_on_no_link():
    rows, topology = np.full((1, 4), 40.0), Topology(2, 2)
    even = busiest_rows(rows, topology)
    assert (even.link, even.nic, even.node) == (10, 20, 40)
    own = np.array([[40.0, 10.0, 10.0, 10.0]])  # rank 0 gets nothing from others
    some = busiest_rows(rows, topology, own_rows=own)
    assert some.link == 10, "from rank 0 to rank 1, and between ranks 2 and 3"
    assert (some.nic, some.node) == (20, 40), "node 0 still sends to node 1"
    assert busiest_rows(rows, topology, own_rows=rows).node == 0


def test_a_rank_that_takes_its_own_replicas_first_sends_less():
    placement = Placement(np.array([[0, 1, 0, 2], [0, 0, 1, 2]]), 3, 2)
    assert own_load(np.array([[40, 20, 20], [40, 20, 20]]), placement).tolist() == [[30, 30], [20, 20]]
    everywhere = Placement(np.tile(np.arange(16), (1, 8)), 16, 8)
    tokens, batch = np.full((1, 16), 8192.0), Batch("prefill", 4096, 2000)
    times = []
    for engine in ("SGLang", "ATOM"):
        costs = CostModel(H800, V3, Topology(1, 8), load_engine(engine))
        rows, own_rows = slot_load(tokens, everywhere), costs.own_rows(tokens, everywhere)
        times.append(costs.moe_layer(rows, batch, own_rows=own_rows))
    assert times[1].dispatch_s == pytest.approx(H800.dispatch_latency_s), "every rank holds every expert"
    assert times[0].dispatch_s > 2 * times[1].dispatch_s
    assert times[0].ffn_s == times[1].ffn_s


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
    assert one.total_s == pytest.approx(parts * costs.engine.step_factor, rel=1e-6)  # the shared expert is hidden
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
    layers = gate.layer_seconds(tokens, None, placement)
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


def test_elementwise_bytes_follow_from_the_shapes():
    prefill = elementwise_bytes(V3, "prefill", ranks_of_token=6.3)
    assert prefill.attention + prefill.moe + 8 * prefill.row == pytest.approx(0.87e6, rel=0.02)
    decode = elementwise_bytes(V3, "decode", ranks_of_token=6.3)
    assert decode.row == 2048 * (2 * 2 + 1)  # the activation alone: low-latency kernels permute and reduce themselves
    assert decode.attention < prefill.attention
    assert decode.moe < prefill.moe
    bf16 = replace(V3, compute="bf16", weight_bytes=2.0)
    assert elementwise_bytes(bf16, "decode", 1).attention < decode.attention  # nothing to quantise


def test_stages_last_as_long_as_their_longer_side():
    one = np.ones(1)
    compute = Sides(attention=10.0, experts=8 * one, shared=1.0, dispatch=3 * one, combine=6 * one)
    assert overlapped_seconds(compute) == 2 * (10 + 8 + 1)
    wires = Sides(attention=2.0, experts=3 * one, shared=1.0, dispatch=5 * one, combine=9 * one)
    assert overlapped_seconds(wires) == 2 * (5 + 9)
    mixed = Sides(attention=4.0, experts=2 * one, shared=0.0, dispatch=3 * one, combine=3 * one)
    assert overlapped_seconds(mixed) == 4 + 4 + 3 + 3
    assert overlapped_seconds(wires, alone=(1.0, 2.0)) == 2 * (1 + 2) + 2 * (4 + 7)
    nothing = Sides(0.0, 0 * one, 0.0, 0 * one, 0 * one)
    assert overlapped_seconds(nothing) == 0


def test_normal_kernels_take_compute_units_while_they_overlap_and_low_latency_ones_do_not():
    slow = cluster(32, H800.scaled(overlap_compute_share=0.5))
    for phase, tokens, same in (("prefill", 16384, False), ("decode", 128, True)):
        batch = Batch(phase, tokens, 4096, two_batch=True)
        assert (slow.step(batch).total_s == cluster(32).step(batch).total_s) is same
    alone = Batch("prefill", 8192, 4096)
    assert slow.step(alone).total_s == cluster(32).step(alone).total_s


def test_a_cached_prompt_costs_its_attention_only():
    costs = cluster(8)
    whole, half = (costs.kernels.attention(Batch("prefill", 4096, 8192, cache_hit=hit)) for hit in (0.0, 0.5))
    assert whole < half < 2 * whole  # new tokens see 3/4 of the prompt instead of 1/2, and cached latents are expanded
    as_far = costs.kernels.attention(Batch("prefill", 4096, 8192 * 2 / 3, cache_hit=0.5))  # sees as much as `whole`
    expanded = [costs.kernels.gemm(rows, V3.num_heads * (V3.nope_dim + V3.v_dim), V3.kv_lora) for rows in (4096, 8192)]
    assert as_far - whole == pytest.approx(expanded[1] - expanded[0])
    decode = [costs.kernels.attention(Batch("decode", 64, 8192, cache_hit=hit)) for hit in (0.0, 0.5)]
    assert decode[0] == decode[1]


def test_prompts_and_decodes_of_one_batch_share_their_projections_and_have_an_attention_each():
    costs = cluster(8)
    mixed = Batch("mixed", 2048, 4096, decode_share=0.125, decode_context=5000)
    prompts, decodes = mixed.parts
    assert (prompts.phase, prompts.tokens_per_rank, prompts.context) == ("prefill", 1792, 4096)
    assert (decodes.phase, decodes.tokens_per_rank, decodes.context) == ("decode", 256, 5000)
    assert mixed.sampled == pytest.approx(256 + 1792 / 4096)
    core = [costs.kernels._attention_core(part) for part in mixed.parts]
    projections = costs.kernels.attention(mixed) - sum(core)
    assert 0 < projections < sum(costs.kernels.attention(part) for part in mixed.parts) - sum(core)
    alone = [costs.step(batch).total_s for batch in mixed.parts]
    assert max(alone) < costs.step(mixed).total_s < sum(alone), "weights are read once"
    none = replace(mixed, decode_share=0.0)
    assert costs.step(none).total_s == pytest.approx(costs.step(Batch("prefill", 2048, 4096)).total_s)


def test_a_busy_rank_slows_experts_elementwise_kernels_and_links():
    costs = cluster(32)
    batch = Batch("prefill", 4096, 2000)
    even = np.full((1, 288), 4096 * 32 * 8 / 288)
    skewed = even.copy()
    skewed[0, :9] *= 2
    for part in ("dispatch_s", "ffn_s", "combine_s"):
        assert getattr(costs.moe_layer(skewed, batch), part) > 1.5 * getattr(costs.moe_layer(even, batch), part)


def test_an_engine_scales_the_whole_step_alike_in_both_phases():
    ideal, other = (CostModel(H800, V3, Topology(4, 8), load_engine(name)) for name in ("ideal", "DeepSeek"))
    for batch in (Batch("prefill", 8192, 4096), Batch("decode", 64, 4096)):
        ratio = other.step(batch).total_s / ideal.step(batch).total_s
        assert ratio == pytest.approx(other.engine.step_factor)


START = Placement.trivial(4, 16, 4, 8)
STEPS = 50
BASE_S, TOKEN_S, SKEW_S = 0.004, 3e-6, 2e-6  # of the true world
TWO_EACH = MigrationRound((SlotMove(0, 0, 0, 1, 6), SlotMove(0, 0, 1, 1, 7), SlotMove(0, 0, 2, 0, 3)))


def world(load, placement, rng=None, noise=0.0, skew_s=SKEW_S):
    """Returns the record of a window in which steps took what the true prices say."""
    ranks = rank_load(load, placement)[:, placement.live_ranks]
    mean, busiest = ranks.mean(axis=1).sum(), ranks.max(axis=1).sum()
    seconds = BASE_S + TOKEN_S * mean + skew_s * (busiest - mean)
    if rng is not None:
        seconds *= rng.lognormal(0.0, noise)
    return LoadRecord(0, STEPS, "mixed", np.round(load * STEPS).astype(np.int64), step_time_s=float(seconds))


def draw(rng):
    """A load whose size and skew vary."""
    popularity = np.exp(rng.uniform(0.1, 1.0) * rng.standard_normal((4, 16)))
    return popularity / popularity.sum(axis=1, keepdims=True) * rng.uniform(100, 2000)


@pytest.mark.parametrize("factor", [0.01, 0.3, 1.0, 10.0, 100.0])
def test_prices_converge_to_the_true_ones_from_any_start(factor):
    rng = np.random.default_rng(1)
    cost = MeasuredCost(PriorPrices(TOKEN_S * factor, 1e-3), 0.05)
    assert cost.learns, "so that windows without a move are waited for"
    for _ in range(60):
        assert cost.learn_window(world(draw(rng), START, rng, 0.02), START)
    assert cost.base_s == pytest.approx(BASE_S, rel=0.05)
    assert cost.token_s == pytest.approx(TOKEN_S, rel=0.05)
    assert cost.skew_s == pytest.approx(SKEW_S, rel=0.15)


def test_slow_windows_now_and_then_do_not_count_much():
    rng = np.random.default_rng(2)
    cost = MeasuredCost(PriorPrices(TOKEN_S, 1e-3), 0.05)
    for index in range(80):
        record = world(draw(rng), START, rng, 0.02)
        if index % 7 == 3:
            record = replace(record, step_time_s=record.step_time_s * 8)
        cost.learn_window(record, START)
    assert cost.base_s == pytest.approx(BASE_S, rel=0.25)
    assert cost.skew_s == pytest.approx(SKEW_S, rel=0.3)


def test_a_changed_world_is_learned_anew():
    rng = np.random.default_rng(3)
    cost = MeasuredCost(PriorPrices(TOKEN_S, 1e-3), 0.05)
    for skew_s in (SKEW_S, 5 * SKEW_S):
        for _ in range(150):
            cost.learn_window(world(draw(rng), START, rng, 0.02, skew_s), START)
        assert cost.skew_s == pytest.approx(skew_s, rel=0.2)


def test_a_constant_load_leaves_the_assumed_share_and_nothing_below_zero():
    rng = np.random.default_rng(4)
    load = draw(rng)
    cost = MeasuredCost(PriorPrices(TOKEN_S, 1e-3), 0.05)
    for _ in range(50):
        cost.learn_window(world(load, START, rng, 0.05), START)
    assert 0.2 * cost.token_s <= cost.skew_s <= 2 * cost.token_s
    predicted = cost.layer_seconds(load, None, START).sum() + cost.other_seconds(load, None, START)
    assert predicted == pytest.approx(world(load, START).step_time_s, rel=0.05)
    for _ in range(100):  # ranks that share a core: the busiest one does not matter
        cost.learn_window(world(draw(rng), START, rng, 0.02, -SKEW_S), START)
    assert cost.skew_s == 0.0


def test_idle_steps_of_a_window_change_no_price():
    costs = [MeasuredCost(PriorPrices(TOKEN_S, 1e-3), 0.05) for _ in range(2)]
    rng = np.random.default_rng(5)
    for _ in range(30):
        record = world(draw(rng), START, rng, 0.02)
        idle = int(rng.integers(0, 500))
        for cost, steps in zip(costs, (STEPS, STEPS + idle), strict=True):
            assert cost.learn_window(replace(record, num_steps=steps, num_forwards=STEPS), START)
    assert (costs[0].base_s, costs[0].token_s, costs[0].skew_s) == (costs[1].base_s, costs[1].token_s, costs[1].skew_s)
    assert costs[0].token_s == pytest.approx(TOKEN_S, rel=0.1)


def test_windows_without_a_time_teach_nothing():
    cost = MeasuredCost(PriorPrices(TOKEN_S, 1e-3), 0.05)
    record = replace(world(draw(np.random.default_rng(0)), START), step_time_s=None)
    assert not cost.learn_window(record, START)
    assert cost.token_s == TOKEN_S


def test_the_price_of_a_moved_expert_is_the_median_of_measured_rounds():
    cost = MeasuredCost(PriorPrices(TOKEN_S, 1.0), 0.05)
    for move_s in (0.2, 0.2, 30.0, 0.2, 0.2):
        cost.learn_round(TWO_EACH, Topology(1, 4), move_s, 0.01)
    assert cost.expert_s == pytest.approx((0.01 + 0.05 * 0.2) / 2)
    wanted = Placement(np.roll(START.physical_to_logical, 1, axis=1), 16, 4)
    plan = plan_migration(START, wanted, Topology(1, 4))
    assert cost.migration_seconds(plan, Topology(1, 4)) == pytest.approx(cost.expert_s * len(plan.rounds))


def test_experts_that_cross_a_slow_network_have_a_price_of_their_own():
    rate, delay_s = 1e6, 1e-3
    facts = SystemFacts(2, 1000, TOKEN_S, 1e-6, False, split="even", link_bytes_per_s=rate, link_delay_s=delay_s)
    nodes = Topology(2, 2)
    cost = MeasuredCost(PriorPrices(facts.token_s, facts.expert_s, facts.off_node_s), 0.5)
    inside = MigrationRound((SlotMove(0, 0, 0, 1, 5), SlotMove(0, 2, 8, 3, 12)))
    across = MigrationRound((SlotMove(0, 0, 0, 2, 8), SlotMove(1, 1, 4, 3, 12), SlotMove(1, 3, 13, 3, 12)))
    assert (inside.busiest_node(nodes), across.busiest_node(nodes), across.busiest()) == (0, 2, 1)
    assert cost.off_node_s == pytest.approx(delay_s + 1000 / rate), "as the network was measured"
    for _ in range(15):
        cost.learn_round(inside, nodes, 2e-3, 0.0)
        cost.learn_round(across, nodes, 0.4, 0.1)
    assert (cost.expert_s, cost.off_node_s) == pytest.approx((1e-3, 0.15))
    assert cost.off_node_weight == pytest.approx(150)
    fast = MeasuredCost(PriorPrices(TOKEN_S, 1e-3, 1e-6), 0.5)
    for _ in range(15):
        fast.learn_round(across, nodes, 0.04, 0.0)
    assert fast.expert_s == pytest.approx(0.02), "the network is not what these rounds wait for"
    assert fast.off_node_weight == 1


def test_the_first_move_is_priced_by_the_steps_that_it_stops():
    """A server's experts are copied in 0.04 ms, and its first round cost 2.7 ms at steps of 11.7 ms."""
    rng = np.random.default_rng(0)
    cost = MeasuredCost(PriorPrices(TOKEN_S, 4e-5), 0.05)
    assert cost.expert_s == 4e-5
    record = replace(world(rng.uniform(200, 2000, (4, 16)), START, rng, 0.0, 0.0), step_time_s=0.0117)
    cost.learn_window(record, START)
    assert cost.expert_s == pytest.approx(0.0027, rel=0.2)
    nodes = Topology(1, START.num_ranks)
    (one, *_) = plan_migration(START, replace(START, physical_to_logical=START.physical_to_logical[:, ::-1]), nodes,
                               relabel="exact").rounds  # fmt: skip
    for _ in range(2):
        cost.learn_round(one, nodes, 0.0, 1e-3 * one.busiest())
    assert cost.expert_s == pytest.approx(1e-3), "the median of what was measured"


def test_a_layer_whose_experts_stay_on_their_nodes_moves_where_the_network_is_too_slow_for_others():
    """Two layers gain alike; only in the first can the load be levelled inside the nodes."""
    start = Placement([[0, 1, 2, 3], [0, 1, 2, 3]], 4, 4, (0, 1))
    table = [[1, 0, 3, 2], [2, 3, 0, 1]]
    nodes = Topology(2, 2)
    target = Placement(table, 4, 4, (0, 1))
    cost = MeasuredCost(PriorPrices(TOKEN_S, 1e-6, 1e-3), 0.05)
    move = plan_migration(start, target, nodes, relabel="exact")
    costs, price = _costs_by_layer(cost, move, start, target, nodes)
    assert costs.sum() == pytest.approx(cost.migration_seconds(move, nodes))
    assert costs[1] == pytest.approx(1000 * costs[0])
    assert price == pytest.approx(costs[0] / 4)


def moves_made(skew_s, move_s, num_windows=90):
    """Returns the windows in which a rebalancer begins to move in a world with these prices.

    The load is skewed, and changes every 30 windows.
    """
    facts = SystemFacts(1, 1000, TOKEN_S, 1e-3, survives_loss=False, split="even")
    rebalancer = make_rebalancer(START, BalancerSettings(policy="greedy"), facts)
    rng = np.random.default_rng(5)
    policy = make_policy("greedy")
    for index in range(num_windows):
        if index % 30 == 0:
            steady = np.exp(0.9 * rng.standard_normal((4, 16)))
            steady = steady / steady.sum(axis=1, keepdims=True)
        load = steady * rng.uniform(200, 2000)
        record = replace(world(load, rebalancer.placement, rng, 0.01, skew_s), first_step=index * STEPS)
        actions = rebalancer.handle(WindowClosed((index + 1) * STEPS, record))
        while actions:
            (action,) = actions
            match action:
                case RequestPlan():
                    actions = rebalancer.handle(PlanReady(action.step, action.request_id, policy.plan(action.request)))
                case StartRound():
                    actions = rebalancer.handle(RoundActivated(action.step + 1, action.version, move_s, 0.0))
    return [decision.step // STEPS for decision in rebalancer.decisions if decision.kind == "move"]


def test_the_gate_moves_where_skew_costs_time_and_not_where_it_does_not():
    pays = moves_made(skew_s=2 * TOKEN_S, move_s=0.05)
    assert any(30 < window <= 60 for window in pays)
    assert any(window > 60 for window in pays)
    # First moves are made on an assumption, and show that nothing is gained; a dear one shows what moves cost.
    assert [window for window in moves_made(skew_s=0.0, move_s=0.05) if window > 40] == []
    assert [window for window in moves_made(skew_s=2 * TOKEN_S, move_s=500.0) if window > 20] == []
