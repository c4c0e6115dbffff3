"""Steps that are split exactly and evenly in any order give the same tokens, bit for bit, on every rank."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.engine.engine import Engine
from moe_serve.engine.protocol.messages import Submit
from moe_serve.engine.step.plan import PHASES, RankState
from tests.engine.offline import TINY, Served, prompts_with_shared_beginnings, serve, submits_of, tiny_model

INVARIANT = ["engine.numerics=batch_invariant", "model.load_format=dummy", "engine.max_running_requests=8"]
GREEDY = SamplingParams(max_new_tokens=8, temperature=0, ignore_eos=True)
REDUNDANT = {"none": 0, "two": 2, "every expert twice": 8}  # mixtral has six experts, and two of them three slots
TRANSPORTS = ("low_latency", "collective")

# family, ranks, redundancy, transport, split, requests: one alone leaves the other ranks idle
FAST = [
    ("qwen3_moe", 2, "two", "low_latency", "exact", 10),
    ("mixtral", 4, "every expert twice", "collective", "exact", 10),
    ("deepseek_v3", 2, "every expert twice", "collective", "time", 10),
    ("qwen3_moe", 4, "every expert twice", "low_latency", "exact", 1),
    ("deepseek_v3", 1, "two", "low_latency", "exact", 10),
    ("mixtral", 2, "two", "low_latency", "nearest", 10),
]
ALL = [(*case, num) for case in product(TINY, (1, 2, 4), REDUNDANT, TRANSPORTS, ("even", "nearest", "exact", "time"))
       for num in (1, 10)]  # fmt: skip
CASES = [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in FAST)]


def switch_at_any_step(engine: Engine) -> None:
    """Draws the phases to split evenly anew for every step. Ranks draw differently: only the leader's word counts."""
    gather, served = engine.exchange.gather, engine.served
    split_evenly = served.replica_map.split_evenly
    totals: Any = engine.counters
    totals.num_even_steps = totals.num_exact_steps = 0

    def say(state: RankState, step: int) -> Sequence[RankState]:
        even_phases = int(np.random.default_rng([step, engine.rank]).integers(2 ** len(PHASES)))
        return gather(state._replace(even_phases=even_phases), step)

    def count(flag: bool) -> None:
        totals.num_even_steps += flag
        totals.num_exact_steps += not flag
        split_evenly(flag)

    engine.exchange.gather = say  # type: ignore[method-assign]
    served.replica_map.split_evenly = count  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[Submit], list[str], Served]]:
    """Requests, settings, and what one rank makes of them: of every family that was asked for."""
    folder = tmp_path_factory.mktemp("models")

    class References(dict[str, tuple[list[Submit], list[str], Served]]):
        def __missing__(self, family: str) -> tuple[list[Submit], list[str], Served]:
            settings = [*INVARIANT, f"model.path={tiny_model(Path(folder), family)}"]
            requests = submits_of(prompts_with_shared_beginnings(10, 256, max_len=24), GREEDY)
            self[family] = requests, settings, serve(1, requests, settings)
            return self[family]

    return References()


@pytest.mark.parametrize(("family", "num_ranks", "redundancy", "transport", "split", "num_requests"), CASES)
def test_tokens_do_not_depend_on_which_steps_are_split_evenly(
    references: dict[str, tuple[list[Submit], list[str], Served]],
    family: str, num_ranks: int, redundancy: str, transport: str, split: str, num_requests: int,
) -> None:  # fmt: skip
    requests, settings, reference = references[family]
    settings = [*settings, f"eplb.num_redundant_experts={REDUNDANT[redundancy]}", f"eplb.split={split}"]
    settings += [f"dispatch.backend={transport}"] if num_ranks > 1 else []
    served = serve(num_ranks, requests[:num_requests], settings, stagger=1, prepare=switch_at_any_step)
    assert set(served.tokens) == {request.request_id for request in requests[:num_requests]}
    for name, tokens in served.tokens.items():
        assert tokens == reference.tokens[name]
        assert served.digests[name] == reference.digests[name]
    assert served.counters["num_even_steps"] > 0
    assert served.counters["num_exact_steps"] > 0
