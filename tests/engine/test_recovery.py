"""A rank is lost in the middle of serving: the others go on, every token is the one it would have been, nothing is
counted twice."""

import signal
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.engine.protocol.messages import Submit
from moe_serve.eplb.files.placements import write_placement
from moe_serve.eplb.load import LoadRecord
from moe_serve.eplb.placement import Placement
from tests.engine.losing import Outcome, serve_and_lose
from tests.engine.offline import prompts_with_shared_beginnings, serve, submits_of, tiny_model
from tests.engine.strikes import Fault

NUM_RANKS = 3
PHASES = ("counts send", "counts receive", "dispatch send", "dispatch receive", "combine send", "combine receive")
REDUNDANT = 8  # of 8 experts: every one has slots on two of three ranks


def requests() -> list[Submit]:
    """Greedy and seeded ones, more than run at a time, with beginnings that the prefix cache knows. Some may have two
    tokens only, and so repeat themselves."""
    prompts = prompts_with_shared_beginnings(12, 256, 30)
    greedy = SamplingParams(max_new_tokens=10, temperature=0, ignore_eos=True)
    sampled = SamplingParams(
        max_new_tokens=14, temperature=0.9, top_p=0.9, ignore_eos=True, repetition_penalty=1.2, frequency_penalty=0.5
    )
    repetitive = SamplingParams(max_new_tokens=14, temperature=0.7, allowed_token_ids=(5, 6), ignore_eos=True)
    ways = greedy, sampled, greedy, repetitive
    submits = submits_of(prompts, greedy)
    return [
        Submit(each.request_id, 0, each.prompt_ids, ways[number % 4], each.seed) for number, each in enumerate(submits)
    ]


def settings_of(model: Path, suspect_after_s: float) -> list[str]:
    """suspect_after_s: of a process that gives no sign of life; one that lives may be late: cores are busy"""
    return [
        f"model.path={model}", "model.load_format=dummy", f"eplb.num_redundant_experts={REDUNDANT}",
        "eplb.record_window_steps=5", "engine.max_running_requests=3", "engine.max_batch_tokens=16",
        "dispatch.max_tokens_per_rank=6", "engine.step_deadline_s=30", f"engine.suspect_after_s={suspect_after_s}",
    ]  # fmt: skip


DRAFTS = ["speculation.mode=lookup", "speculation.index_mib=1"]


def check_drafts(outcomes: dict[int, Outcome]) -> None:
    """Some drafts were right, and some were not."""
    right, wrong = (
        sum(outcome.counters[f"num_drafts_own_{which}"] for outcome in outcomes.values())
        for which in ("right", "wrong")
    )
    assert right > 0 < wrong


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("recovery"), "qwen3_moe")


@cache
def tokens_without_fault(model: Path) -> dict[str, list[int]]:
    overrides = [f"model.path={model}", "model.load_format=dummy", "engine.numerics=batch_invariant"]
    return serve(1, requests(), overrides).tokens


def check_trace(
    trace: Sequence[LoadRecord], outcomes: dict[int, Outcome], victim: int, num_ranks: int = NUM_RANKS
) -> None:
    """Every computed row is in the trace, topk times in each layer, whichever rank wrote it and whatever was voided."""
    first = outcomes[min(outcomes)]
    # What a lost rank had reported before; one that rejoined has reported all its counts.
    reported = [0] * 3 if victim in outcomes else first.reported_by_victim
    assert len(set(reported)) == 1, "the lost rank counted in all layers or in none"
    assert reported[0] % first.topk == 0
    load = sum(record.tokens.sum(axis=1) for record in trace)
    rows = sum(outcome.rows for outcome in outcomes.values())
    assert (load - reported).tolist() == [first.topk * rows] * len(reported)
    assert sum(record.num_steps for record in trace) == first.step
    ends = [record.first_step + record.num_steps for record in trace]
    assert [record.first_step for record in trace] == [0, *ends[:-1]]
    for record in trace:
        assert record.placement is not None
        assert record.placement.num_ranks == num_ranks


@pytest.mark.parametrize(
    ("victim", "phase", "step", "calls", "moves"),
    [
        *((1, phase, 4, number, number % 2 == 1) for number, phase in enumerate(PHASES)),
        (1, "exchange", 6, 0, True), (2, "sample", 5, 1, False), (0, "window", 7, 0, False),
        (0, "combine receive", 6, 0, False), (2, "activate", 4, 0, True),
    ],
)  # fmt: skip
def test_the_others_go_on_and_every_token_is_right(
    model: Path, victim: int, phase: str, step: int, calls: int, moves: bool
) -> None:
    fault, drafts = Fault(victim, phase, step, calls), DRAFTS if victim == 1 else []
    outcomes, tokens, trace = serve_and_lose(
        NUM_RANKS, requests(), [*settings_of(model, 20), *drafts], fault, "written" if moves else "none"
    )
    assert tokens == tokens_without_fault(model)
    if drafts:
        check_drafts(outcomes)
    survivors = [rank for rank in range(NUM_RANKS) if rank != victim]
    assert sorted(outcomes) == survivors
    for outcome in outcomes.values():
        assert outcome.error == ""
        assert outcome.groups == [survivors]
        assert outcome.ended == [[victim]], "the front end is told that this one will not rejoin"
        (void,) = outcome.voids
        in_layer = phase.partition(" ")[0] in ("counts", "dispatch", "combine", "activate")
        # A rank that is slow hears of a loss in a layer while it is still at the exchange in front of it.
        assert in_layer or void.layer < 0, "one that ends outside a forward is missed outside its layers"
        if victim in void.missing:
            assert set(void.received) <= set(survivors) - set(void.missing)
        else:  # it waited for the other one, or for nobody, and heard of the loss from that one
            assert "voided" in void.reason
        assert outcome.counters["num_voided_steps"] == 1
        assert outcome.step == outcomes[survivors[0]].step
    assert any(victim in outcome.voids[0].missing for outcome in outcomes.values())
    check_trace(trace, outcomes, victim)


def test_states_that_a_void_step_has_left_in_the_middle_are_made_again(tmp_path: Path) -> None:
    """The step ends in the third layer, behind two whose states have gone on by its tokens, and by drafts."""
    hybrid, fault = tiny_model(tmp_path, "qwen3_next"), Fault(1, "combine receive", 6, 2)
    outcomes, tokens, _ = serve_and_lose(NUM_RANKS, requests(), [*settings_of(hybrid, 20), *DRAFTS], fault)
    assert tokens == tokens_without_fault(hybrid)
    assert sorted(outcomes) == [0, 2]
    assert all(outcome.counters["num_preempted"] > 0 for outcome in outcomes.values()), "no state was made again"
    check_drafts(outcomes)


def test_a_rank_may_be_lost_while_the_layer_that_predicts_runs() -> None:
    """Tokens of the step are on their way then: the others go on behind them. The demo model's layer is its sixth."""
    settings = [*settings_of(Path("demo"), 20), "model.load_format=auto", "eplb.num_redundant_experts=32"]
    fault = Fault(1, "predict send", 6)
    outcomes, tokens, _ = serve_and_lose(NUM_RANKS, requests(), [*settings, "speculation.mode=mtp"], fault)
    assert tokens == serve(1, requests(), ["engine.numerics=batch_invariant"]).tokens
    assert sorted(outcomes) == [0, 2]
    assert 5 in [outcome.voids[0].layer for outcome in outcomes.values()]
    for outcome in outcomes.values():
        assert outcome.counters["num_voided_steps"] == 1
        assert outcome.counters["num_drafts_mtp_right"] + outcome.counters["num_drafts_mtp_wrong"] > 0


@pytest.mark.parametrize(("phase", "calls"), [("counts send", 2), ("dispatch receive", 3), ("combine send", 1)])
def test_a_rank_may_be_lost_between_rounds_that_overlap(model: Path, phase: str, calls: int) -> None:
    overrides = [*settings_of(model, 20), "dispatch.overlap_from_tokens=1"]
    outcomes, tokens, trace = serve_and_lose(NUM_RANKS, requests(), overrides, Fault(1, phase, 4, calls))
    assert tokens == tokens_without_fault(model)
    assert {rank: outcome.groups for rank, outcome in outcomes.items()} == {0: [[0, 2]], 2: [[0, 2]]}
    assert all(outcome.counters["num_overlapped_forwards"] > 0 for outcome in outcomes.values())
    check_trace(trace, outcomes, 1)


@pytest.mark.parametrize(
    ("victim", "phase", "step", "moves"),
    [(1, "combine receive", 4, False), (2, "exchange", 6, True), (0, "window", 7, False), (0, "bring", 4, True),
     (1, "exchange receive", 4, True)],
)  # fmt: skip
def test_a_rank_that_stops_is_masked_and_rejoins(model: Path, victim: int, phase: str, step: int, moves: bool) -> None:
    fault = Fault(victim, phase, step, sign=signal.SIGSTOP)
    outcomes, tokens, trace = serve_and_lose(
        NUM_RANKS, requests(), settings_of(model, 2), fault, "written" if moves else "none"
    )
    right = tokens_without_fault(model)
    assert tokens == right | {"extra": right["0"]}, "it serves again once it has rejoined"
    all_ranks = list(range(NUM_RANKS))
    assert sorted(outcomes) == all_ranks
    survivors = [rank for rank in all_ranks if rank != victim]
    for rank, outcome in outcomes.items():
        assert outcome.error == ""
        assert outcome.groups == ([all_ranks] if rank == victim else [survivors, all_ranks])
        assert not any(outcome.ended), "late is not ended"
        assert outcome.counters["num_times_left_out"] == int(rank == victim)
        assert (outcome.step, outcome.version) == (outcomes[0].step, outcomes[0].version)
        assert outcome.num_told == int(rank == victim), "it alone is told where experts are"
    if phase == "exchange receive":
        assert outcomes[victim].num_read > 0, "it never heard that the others activated a round, and reads its part"
    check_trace(trace, outcomes, victim)


def check_survivors(outcomes: dict[int, Outcome], groups: list[list[int]]) -> None:
    assert sorted(outcomes) == groups[-1]
    for outcome in outcomes.values():
        assert outcome.error == ""
        assert outcome.groups == groups
    assert len({outcome.version for outcome in outcomes.values()}) == 1


def test_experts_that_were_lost_are_read_again_by_the_others(model: Path) -> None:
    """Four slots on each of three ranks: the eight that are left are just enough for eight experts."""
    victim = 0  # it writes the trace
    overrides = [*settings_of(model, 20), "eplb.num_redundant_experts=4"]
    outcomes, tokens, trace = serve_and_lose(NUM_RANKS, requests(), overrides, Fault(victim, "dispatch receive", 4))
    check_survivors(outcomes, [[1, 2]])
    assert tokens == tokens_without_fault(model)
    first, last = trace[0].placement, trace[-1].placement
    assert first is not None
    assert last is not None
    lost = first.without_ranks([victim])[1]
    assert sum(outcome.num_read for outcome in outcomes.values()) == len(lost) > 0
    assert last.without_ranks([victim])[1] == [], "and their records say where they are now"
    check_trace(trace, outcomes, victim)


def test_two_ranks_are_lost_one_after_the_other(model: Path) -> None:
    """16 slots on four ranks, of which 1 and 3 have the same: the second loss leaves just enough slots, and experts to
    read."""
    overrides = [*settings_of(model, 20), "eplb.num_redundant_experts=8"]
    fault = Fault(1, "counts receive", 4, then=Fault(3, "combine send", 7))
    outcomes, tokens, trace = serve_and_lose(4, requests(), overrides, fault)
    check_survivors(outcomes, [[0, 2, 3], [0, 2]])
    assert tokens == tokens_without_fault(model)
    assert sum(outcome.num_read for outcome in outcomes.values()) == 4 * 3, "four of each layer"
    check_trace(trace, outcomes, 1, num_ranks=4)


@pytest.mark.parametrize(("phase", "calls", "told"), [("reload", 0, 0), ("counts send", 1, 1)])
def test_a_rank_may_be_lost_before_all_have_read_again(
    model: Path, tmp_path: Path, phase: str, calls: int, told: int
) -> None:
    """Experts 4 and 5 are on rank 1 alone. When rank 3 ends, both others have read them, or only the one that has had
    its part of the load record: it then tells the other one, which reads its slots later."""
    row = [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 6, 7, 6, 7, 2, 0]
    write_placement(Placement([row] * 3, 8, 4), tmp_path / "placement.json")
    where = f"eplb.init_expert_location={tmp_path}/placement.json"
    overrides = [*settings_of(model, 20), "eplb.num_redundant_experts=0", where]
    fault = Fault(1, "dispatch receive", 4, then=Fault(3, phase, 4, calls))
    outcomes, tokens, trace = serve_and_lose(4, requests(), overrides, fault)
    check_survivors(outcomes, [[0, 2, 3], [0, 2]])
    assert [outcomes[0].num_told, outcomes[2].num_told] == [0, told]
    assert tokens == tokens_without_fault(model)
    check_trace(trace, outcomes, 1, num_ranks=4)


def test_ranks_with_too_few_slots_end_with_what_is_needed(model: Path) -> None:
    overrides = [*settings_of(model, 20), "eplb.num_redundant_experts=0"]
    outcomes, _, _ = serve_and_lose(NUM_RANKS, requests(), overrides, Fault(1, "dispatch receive", 4))
    assert sorted(outcomes) == [0, 2]
    for outcome in outcomes.values():
        assert (
            "rank 1 cannot be spared: the 2 ranks that are left have 6 slots per layer for 8 experts" in outcome.error
        )
        assert "raise eplb.num_redundant_experts to 4" in outcome.error


def test_on_lost_rank_end_ends_the_epoch(model: Path) -> None:
    overrides = [*settings_of(model, 20), "engine.on_lost_rank=end"]
    outcomes, _, _ = serve_and_lose(NUM_RANKS, requests(), overrides, Fault(1, "combine send", 4))
    assert {rank: outcome.groups for rank, outcome in outcomes.items()} == {0: [], 2: []}
    assert all("rank 1" in outcome.error for outcome in outcomes.values())
