"""NaN or infinity in one request ends that request with an error; the bits of its neighbours stay what they were."""

import math
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.attention_dp.scheduler import ScheduledChunk
from moe_serve.engine.engine import Engine
from moe_serve.engine.protocol.messages import Submit
from moe_serve.kernels.cpu.linear import RowTable
from tests.engine.offline import Prepare, Served, prompts_with_shared_beginnings, serve, submits_of
from tests.kernels.cpu.unpacking import unpack

VICTIM = "0"
VICTIM_TOKEN = 2047  # in the prompt of the victim only
GREEDY = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True)
BY_TORCH = ["engine.cpu_kernels=torch"]
INVARIANT_BY_TORCH = [*BY_TORCH, "engine.numerics=batch_invariant"]


def submits(num_prompts: int = 12) -> list[Submit]:
    prompts = prompts_with_shared_beginnings(num_prompts, VICTIM_TOKEN, max_len=60)
    prompts[0] = [*range(100, 140), VICTIM_TOKEN, *range(150, 160)]
    return submits_of(prompts, GREEDY)


def poison_embedding(engine: Engine, value: float, token_id: int = VICTIM_TOKEN) -> None:
    """The row of one token holds the value; only the table is changed, not an output matrix tied to it."""
    stack = engine.served.decoder.stack
    table = stack.embed
    if isinstance(table, RowTable):
        table = RowTable.of(unpack(table.data[0], table.num_rows, table.width))
        table.data[token_id, 5] = value
    else:
        table = table.clone()
        table[token_id, 5] = value
    object.__setattr__(stack, "embed", table)  # before the first step, which records where the table is


def poison_cache(engine: Engine, value: float) -> None:
    """Before the victim's fifth token its oldest block holds the value, in every layer."""
    commit, served = engine.scheduler.commit, engine.served

    def poison_and_commit(*args: Any) -> tuple[ScheduledChunk, ...]:
        chunks = commit(*args)
        for request in (chunk.request for chunk in chunks if chunk.request.request_id == VICTIM):
            if len(request.output_ids) == 4:
                for index in range(len(served.cache.layouts)):
                    served.cache.layer(index)[request.block_ids[0] * served.cache.block_size] = value
        return chunks

    engine.scheduler.commit = poison_and_commit  # type: ignore[method-assign]


def nan_in_embedding(engine: Engine) -> None:
    poison_embedding(engine, math.nan)


def infinity_in_embedding(engine: Engine) -> None:
    poison_embedding(engine, math.inf)


def nan_in_cache(engine: Engine) -> None:
    poison_cache(engine, math.nan)


def infinity_in_cache(engine: Engine) -> None:
    poison_cache(engine, math.inf)


# fault -> number of tokens that the victim has before it
FAULTS: dict[Prepare, int] = {nan_in_embedding: 0, infinity_in_embedding: 0, nan_in_cache: 4, infinity_in_cache: 4}
# name -> (ranks, overrides)
SETUPS: dict[str, tuple[int, list[str]]] = {
    "one rank": (1, []),
    "one rank, prompts in chunks": (1, ["engine.max_batch_tokens=32", "engine.max_running_requests=16"]),
    "two ranks over shared memory": (2, []),
    "two ranks over gloo, exact split": (
        2, ["dispatch.backend=collective", "eplb.num_redundant_experts=4", "eplb.split=exact"]
    ),
    "two ranks, slabs": (2, ["dispatch.backend=low_latency", "dispatch.rows=masked"]),
}  # fmt: skip


def expect_only_the_victim_to_fail(served: Served, clean: Served, num_tokens: int) -> None:
    assert served.finish[VICTIM] == "error"
    assert "NaN or infinite" in served.messages[VICTIM]
    assert "model.dtype" in served.messages[VICTIM]
    assert served.tokens[VICTIM] == clean.tokens[VICTIM][:num_tokens]
    for name in clean.tokens.keys() - {VICTIM}:
        assert served.tokens[name] == clean.tokens[name], f"request {name} has other tokens"
        assert served.digests[name] == clean.digests[name], f"request {name} has other logits"
        assert served.finish[name] == "length"
    assert served.counters["num_failed"] == 1


@cache
def without_fault() -> Served:
    """What each setup gives: by batch_invariant the bits of all are the same."""
    return serve(1, submits())


@pytest.mark.parametrize(
    ("setup", "fault"),
    [
        pytest.param(
            setup,
            fault,
            id=f"{setup}-{fault.__name__}",
            marks=pytest.mark.slow if setup != "one rank" and fault in (infinity_in_embedding, nan_in_cache) else (),
        )
        for setup in SETUPS
        for fault in FAULTS
    ],
)
def test_a_fault_in_one_request_ends_it_and_changes_no_bit_of_the_others(setup: str, fault: Prepare) -> None:
    num_ranks, overrides = SETUPS[setup]
    clean = without_fault()
    assert not any(VICTIM_TOKEN in tokens for tokens in clean.tokens.values()), "others must not meet the faulty row"
    served = serve(num_ranks, submits(), overrides, prepare=fault)
    expect_only_the_victim_to_fail(served, clean, FAULTS[fault])
    load = np.array(served.load).sum(axis=0)
    num_rows = served.counters["num_decode_tokens"] + served.counters["num_prefill_tokens"]
    assert (load.sum(axis=1) == num_rows * load_topk(clean)).all(), "rows with NaN are counted like all others"


def load_topk(clean: Served) -> int:
    """Returns the experts of one token, from a run without a fault."""
    num_rows = clean.counters["num_decode_tokens"] + clean.counters["num_prefill_tokens"]
    return int(np.array(clean.load).sum(axis=(0, 2))[0]) // num_rows


@pytest.mark.parametrize("fault", [nan_in_cache, infinity_in_cache])
def test_blocks_of_a_failed_request_are_neither_reused_by_prefix_nor_harm_whoever_takes_them(fault: Prepare) -> None:
    first = submits(1)[0]
    again = Submit("again", 0, first.prompt_ids, GREEDY, seed=0)
    # One request at a time, and a cache that one of them fills: the second takes the blocks of the first.
    overrides = ["engine.max_running_requests=1", "cache.num_blocks=5", "cache.prefix_cache=true"]
    clean = serve(1, [first, again], overrides)
    assert clean.stats["num_cached_prompt_tokens"] > 0, "without a fault the prefix is reused"
    served = serve(1, [first, again], overrides, prepare=fault)
    expect_only_the_victim_to_fail(served, clean, 4)
    assert served.stats["num_cached_prompt_tokens"] == 0


@pytest.mark.parametrize("numerics", [BY_TORCH, INVARIANT_BY_TORCH], ids=["fast", "batch_invariant"])
def test_by_torch_too_neighbours_keep_their_tokens(numerics: list[str]) -> None:
    clean = serve(1, submits(8), numerics)
    for fault in (nan_in_cache, infinity_in_cache):
        served = serve(1, submits(8), numerics, prepare=fault)
        assert served.finish.pop(VICTIM) == "error"
        assert set(served.finish.values()) == {"length"}
        for name in served.finish:
            assert served.tokens[name] == clean.tokens[name]


@pytest.mark.parametrize("overrides", [[], BY_TORCH], ids=["compiled", "torch"])
def test_a_request_whose_parameters_leave_no_token_ends_alone(overrides: list[str]) -> None:
    """Its first token may be 100 alone; then 100 may not follow 100."""
    params = SamplingParams(max_new_tokens=12, allowed_token_ids=(100,), bad_words_ids=((100, 100),))
    requests = submits(3)
    requests[0] = msgspec.structs.replace(requests[0], params=params)
    served = serve(1, requests, overrides)
    assert served.tokens[VICTIM] == [100]
    assert served.finish == {VICTIM: "error", "1": "length", "2": "length"}
    assert "leave no token for output token 1; allow more tokens" in served.messages[VICTIM]
    assert served.counters["num_failed"] == 0, "which counts logits that are not finite"
