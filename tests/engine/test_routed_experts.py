"""The experts that requests ask for are those that the gates have chosen, however the requests were served."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from moe_serve.engine.output.routed_experts import MOST_BYTES, RoutedExperts, check_experts, in_messages
from moe_serve.engine.protocol.messages import ExpertsBlock, Submit, TokenEvent
from moe_serve.errors import RequestError
from moe_serve.kernels.cpu.operations import recorded_once
from tests.engine.offline import Served, prompts_with_shared_beginnings, serve, submits_of
from tests.engine.test_identity import BY_TORCH, GREEDY, PLAIN
from tests.engine.test_live_balancing import DYNAMIC, move_always, settings
from tests.engine.test_speculation import drafting
from tests.models.families import make_oracle, save

KEEPS = ["engine.return_routed_experts=true", "model.dtype=float32"]
# The second has a dense layer, groups and a correction bias, the third experts that give back what they take.
FAMILIES = ["qwen3_moe", "deepseek_v3", pytest.param("longcat_flash", marks=pytest.mark.slow)]
SMALL_CACHE = [
    "cache.num_blocks=24", "cache.block_size=8", "cache.prefix_cache=true", "engine.max_batch_tokens=24",
    "engine.max_running_requests=24",
]  # fmt: skip


def requests() -> list[Submit]:
    prompts = prompts_with_shared_beginnings(20, 256, max_len=60)
    return submits_of(prompts, replace(GREEDY, max_new_tokens=10, return_routed_experts=True))


def chosen(served: Served) -> dict[str, np.ndarray]:
    """The experts of each request, [tokens, layers, K]."""
    lengths = {each.request_id: len(each.prompt_ids) + len(served.tokens[each.request_id]) - 1 for each in requests()}
    found = {name: served.experts[name].array(length) for name, length in lengths.items()}
    assert {name: len(rows) for name, rows in found.items()} == lengths
    return found


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not np.array_equal(one[name], other[name])] == []


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[str]]:
    oracle = make_oracle(request.param)
    folder = save(oracle, tmp_path_factory.mktemp("routed") / request.param)
    return oracle, [f"model.path={folder}", "model.load_format=auto", *KEEPS]


@pytest.fixture(scope="module")
def reference(model: tuple[Any, list[str]]) -> Served:
    return serve(1, requests(), [*PLAIN, *model[1]])


def test_they_are_those_of_transformers(model: tuple[Any, list[str]], reference: Served) -> None:
    oracle, seen = model[0], []
    blocks = [layer.mlp for layer in oracle.model.layers]
    gates = [getattr(mlp, name) for mlp in blocks for name in ("gate", "router") if hasattr(mlp, name)]
    hooks = [gate.register_forward_hook(lambda _gate, _x, out: seen.append(out[2])) for gate in gates]
    for request in requests():
        seen.clear()
        text = request.prompt_ids + reference.tokens[request.request_id]
        with torch.no_grad():
            oracle(torch.tensor([text[:-1]]))
        wanted = torch.stack(seen, 1).sort(-1).values.numpy()
        assert np.array_equal(np.sort(chosen(reference)[request.request_id], -1), wanted)
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(
    ("num_ranks", "overrides"),
    [
        (1, SMALL_CACHE),
        (2, ["dispatch.max_tokens_per_rank=10", "dispatch.overlap_from_tokens=2"]),
        (1, [*BY_TORCH, "engine.max_batch_tokens=24", "engine.max_running_requests=16"]),
        (2, [*BY_TORCH, "eplb.num_redundant_experts=2"]),
    ],
    ids=["chunked, preempted, cached", "halves in rounds", "torch", "torch, replicas"],
)
def test_they_do_not_depend_on_how_requests_are_served(
    model: tuple[Any, list[str]], reference: Served, num_ranks: int, overrides: list[str]
) -> None:
    served = serve(num_ranks, requests(), [*PLAIN, *model[1], *overrides], stagger=3)
    same(chosen(served), chosen(reference))
    if overrides[: len(SMALL_CACHE)] == SMALL_CACHE:
        assert served.stats["num_preempted"] > 0
        assert served.stats["num_cached_prompt_tokens"] > 0


def test_they_are_those_of_drafts_that_were_right(model: tuple[Any, list[str]], reference: Served) -> None:
    served = serve(1, requests(), [*PLAIN, *model[1]], stagger=1, prepare=drafting(reference))
    same(chosen(served), chosen(reference))


def test_they_are_those_of_a_request_that_goes_on_where_its_lost_rank_stopped(
    model: tuple[Any, list[str]], reference: Served
) -> None:
    resumed = [
        Submit(each.request_id, 1, each.prompt_ids, each.params, each.seed, reference.tokens[each.request_id][:4])
        for each in requests()
    ]
    served = serve(1, resumed, [*PLAIN, *model[1]])
    assert served.tokens == reference.tokens
    same(chosen(served), chosen(reference))


def test_they_are_logical_ones_where_experts_move_in_every_step(
    model: tuple[Any, list[str]], reference: Served
) -> None:
    overrides = [*settings(model[1], 2, "low_latency", "even"), *DYNAMIC]
    served = serve(2, requests(), overrides, stagger=3, prepare=move_always)
    assert served.counters["num_activations"] > 10
    same(chosen(served), chosen(reference))


def test_who_does_not_ask_gets_none(model: tuple[Any, list[str]]) -> None:
    quiet = [replace_params(each, index % 2 == 0) for index, each in enumerate(requests()[:4])]
    assert set(serve(1, quiet, [*PLAIN, *model[1]]).experts) == {"0", "2"}


def replace_params(submit: Submit, asks: bool) -> Submit:
    return Submit(submit.request_id, 0, submit.prompt_ids, replace(submit.params, return_routed_experts=asks), 0)


@pytest.mark.parametrize(("dtype", "largest"), [(torch.uint8, 255), (torch.int16, 40_000)])
def test_the_kernel_writes_rows_that_have_slots(dtype: torch.dtype, largest: int) -> None:
    ids = torch.tensor([[3, largest], [0, 1], [7, 2]])
    kept = torch.zeros(5, 3, 2, dtype=dtype)
    recorded_once(3, lambda recorder: recorder.keep_ids(ids, torch.tensor([4, -1, 0]), kept[:, 1]))
    numbers = kept.numpy().view("u1" if dtype == torch.uint8 else "u2")
    assert numbers[:, 1].tolist() == [[7, 2], [0, 0], [0, 0], [0, 0], [3, largest]]
    assert not numbers[:, [0, 2]].any()


def test_rows_of_a_new_attempt_take_the_place_of_earlier_ones() -> None:
    experts = RoutedExperts()
    assert experts.array(3).shape == (0, 0, 0)
    first = ExpertsBlock(0, 2, 1, "uint16", np.array([1, 2, 3, 4, 5, 6], "<u2").tobytes())
    for block in (first, ExpertsBlock(0, 2, 1, "uint16", first.rows[:8]), ExpertsBlock(2, 2, 1, "uint16", b"\0\1" * 2)):
        experts.add(block)
    assert experts.array(9).tolist() == [[[1], [2]], [[3], [4]], [[256], [256]]]
    found = experts.as_json(2)
    assert (found["shape"], found["dtype"], found["data"]) == ([2, 2, 1], "uint16", "AQACAAMABAA=")


def test_requests_that_cannot_be_served_are_refused_by_name() -> None:
    with pytest.raises(RequestError, match="--enable-return-routed-experts"):
        check_experts(10, None)
    check_experts(MOST_BYTES // 100, 100)
    with pytest.raises(RequestError, match="send a shorter prompt"):
        check_experts(MOST_BYTES // 100 + 1, 100)


def test_many_long_prompts_in_one_step_come_in_several_messages() -> None:
    block = ExpertsBlock(0, 1, 1, "uint8", bytes(MOST_BYTES))
    events = [TokenEvent(str(i), 0, 0, [1], experts=block) for i in range(3)] + [TokenEvent("3", 0, 0, [1])]
    assert [[each.request_id for each in part] for part in in_messages(events)] == [["0"], ["1"], ["2"], ["3"]]
