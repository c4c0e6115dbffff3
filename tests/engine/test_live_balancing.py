"""Experts move while requests are served, and no token notices: bit for bit, in batch_invariant."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moe_serve.dispatch.base import EpGroup
from moe_serve.engine.engine import Engine
from moe_serve.engine.protocol.messages import Submit
from tests.dispatch.hosts.pretended import on_hosts
from tests.engine.moving import DYNAMIC, lead_restlessly, move_in_every_step
from tests.engine.offline import OTHER_FAMILIES, Served, serve, tiny_model
from tests.engine.test_identity import GREEDY, PLAIN, requests_for, same
from tests.engine.test_speculation import VERIFIES, drafts_of

MODEL = "qwen3_moe"
# ranks, redundant experts (of 8), transport, split
WAYS = [
    (2, 0, "low_latency", "even"),
    (2, 2, "collective", "exact"),
    (2, 8, "low_latency", "nearest"),
    (4, 2, "low_latency", "exact"),
    (4, 8, "collective", "even"),
    (1, 2, "auto", "exact"),
]


def rarely(ways: list[tuple[int, int, str, str]]) -> list[Any]:
    """Returns cases that only a slow run goes through."""
    return [pytest.param(*way, marks=pytest.mark.slow) for way in ways]


EVERY_WAY = rarely(
    [
        (num_ranks, redundant, backend, split)
        for num_ranks in (1, 2, 4)
        for redundant in (0, 2, 8)
        for backend in (("auto",) if num_ranks == 1 else ("low_latency", "collective"))
        for split in ("even", "nearest", "exact")
        # On one rank without a redundant slot nothing can move: all slots of a rank are alike.
        if (num_ranks, redundant, backend, split) not in WAYS and (num_ranks, redundant) != (1, 0)
    ]
)


def keep_moving(engine: Engine) -> None:
    lead_restlessly(engine)
    count_activations(engine)


def count_activations(engine: Engine) -> None:
    activate = engine.recovery.activate_round
    engine.counters.num_activations = 0  # type: ignore[attr-defined]

    def counted(this: object) -> None:
        engine.counters.num_activations += 1  # type: ignore[attr-defined]
        activate(this)  # type: ignore[arg-type]

    engine.recovery.activate_round = counted  # type: ignore[method-assign]


def move_always(engine: Engine) -> None:
    move_in_every_step(engine)
    count_activations(engine)


def move_and_draft(expected: dict[str, list[int]], engine: Engine) -> None:
    move_always(engine)
    drafts_of(expected, engine)


def requests() -> list[Submit]:
    few = requests_for(MODEL, "small")[:24]
    return [replace_params(submit) for submit in few]


def replace_params(submit: Submit) -> Submit:
    params = replace(GREEDY, max_new_tokens=10)
    return Submit(submit.request_id, submit.attempt, submit.prompt_ids, params, submit.seed)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder: Path = tmp_path_factory.mktemp("live")
    return [f"model.path={tiny_model(folder, MODEL)}", "model.load_format=dummy"]


@pytest.fixture(scope="module")
def reference(model: list[str]) -> Served:
    return serve(1, requests(), [*PLAIN, *model, "eplb.mode=off"])


def settings(model: list[str], redundant: int, backend: str, split: str) -> list[str]:
    small = ["engine.max_running_requests=5", "engine.max_batch_tokens=24", "dispatch.max_tokens_per_rank=10"]
    ways = [f"eplb.num_redundant_experts={redundant}", f"dispatch.backend={backend}", f"eplb.split={split}"]
    # Ranks with their own weights send each other experts; where they share them, slots only name others.
    cache = "none" if redundant == 2 else "memory"
    return [*PLAIN, *small, *model, *ways, f"model.weight_cache={cache}"]


@pytest.mark.parametrize(("num_ranks", "redundant", "backend", "split"), [*WAYS[1:], *rarely(WAYS[:1]), *EVERY_WAY])
def test_tokens_do_not_notice_a_round_in_every_step(
    model: list[str], reference: Served, num_ranks: int, redundant: int, backend: str, split: str
) -> None:
    overrides = [*settings(model, redundant, backend, split), *DYNAMIC]
    served = serve(num_ranks, requests(), overrides, stagger=3, prepare=move_always)
    same(served, reference)
    assert set(served.tokens) == set(reference.tokens)
    assert served.counters["num_activations"] >= num_ranks * (served.num_steps - 2) > 10


@pytest.mark.parametrize(
    ("num_ranks", "redundant", "backend", "split"), [WAYS[0], WAYS[3], *rarely([*WAYS[1:3], *WAYS[4:]]), *EVERY_WAY]
)
def test_tokens_do_not_notice_a_leader_that_never_rests(
    model: list[str], reference: Served, num_ranks: int, redundant: int, backend: str, split: str
) -> None:
    overrides = [*settings(model, redundant, backend, split), *DYNAMIC]
    served = serve(num_ranks, requests(), overrides, stagger=3, prepare=keep_moving)
    same(served, reference)
    assert set(served.tokens) == set(reference.tokens)
    assert served.counters["num_activations"] == 60 * num_ranks


EVERY_DAY = ("qwen2_moe", "granitemoeshared")  # a shared expert with a gate; experts that lie in one tensor


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in EVERY_DAY else pytest.mark.slow) for name in OTHER_FAMILIES]
)
def test_tokens_of_no_family_notice_experts_that_move(family: str, tmp_path: Path) -> None:
    model = [f"model.path={tiny_model(tmp_path, family)}", "model.load_format=dummy"]
    wanted = serve(1, requests(), [*PLAIN, *model, "eplb.mode=off"])
    overrides = [*settings(model, 2, "low_latency", "even"), *DYNAMIC, VERIFIES]
    served = serve(2, requests(), overrides, stagger=3, prepare=partial(move_and_draft, wanted.tokens))
    same(served, wanted)
    assert set(served.tokens) == set(wanted.tokens)
    assert served.counters["num_activations"] >= 2 * (served.num_steps - 2) > 10


def of_one_host(group: EpGroup) -> EpGroup:
    return group


def of_linked_hosts(group: EpGroup) -> EpGroup:
    return on_hosts(group, (0, 1))


def of_hosts_over_gloo(group: EpGroup) -> EpGroup:
    return replace(group, num_nodes=2)


@pytest.fixture(scope="module")
def in_four_bits(model: list[str]) -> Served:
    return serve(1, requests(), [*PLAIN, *model, "eplb.mode=off", "model.expert_weights=int4"])


@pytest.mark.parametrize("placed", [of_one_host, of_linked_hosts, of_hosts_over_gloo], ids=lambda each: each.__name__)
def test_tokens_do_not_notice_experts_in_four_bits_that_move_between_ranks_or_hosts(
    model: list[str], reference: Served, in_four_bits: Served, placed: Callable[[EpGroup], EpGroup]
) -> None:
    overrides = [*settings(model, 2, "collective", "exact"), *DYNAMIC, "model.expert_weights=int4"]
    served = serve(2, requests(), overrides, stagger=3, prepare=move_always, placed=placed)
    same(served, in_four_bits)
    assert served.counters["num_activations"] >= 2 * (served.num_steps - 2) > 10
    assert served.digests != reference.digests, "the setting changed nothing"


@pytest.mark.parametrize("mode", ["off", "static", "dynamic"])
def test_tokens_do_not_depend_on_the_mode(model: list[str], reference: Served, mode: str) -> None:
    overrides = [*settings(model, 8, "auto", "even"), f"eplb.mode={mode}", "eplb.record_window_steps=5"]
    served = serve(2, requests(), overrides, stagger=3)
    same(served, reference)
    assert bool(served.load) == (mode != "off")
