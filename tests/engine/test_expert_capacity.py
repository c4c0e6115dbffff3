"""engine.expert_capacity: the same limit however experts are placed and rows travel, counted to the last choice."""

from pathlib import Path

import pytest
import torch

from moe_serve.config import load_config
from moe_serve.engine.model.model_plan import ModelPlan
from moe_serve.engine.protocol.messages import Submit
from moe_serve.errors import ConfigError
from moe_serve.models.families.registry import read_spec
from tests.engine.offline import Served, prompts_with_shared_beginnings, serve, submits_of, tiny_model
from tests.engine.test_identity import GREEDY, PLAIN
from tests.engine.test_live_balancing import DYNAMIC, move_always
from tests.models.families import make_oracle, save

LIMIT = ["engine.expert_capacity=1"]


def requests() -> list[Submit]:
    return submits_of(prompts_with_shared_beginnings(16, 256, max_len=40), GREEDY)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = save(make_oracle("deepseek_v3"), tmp_path_factory.mktemp("capacity") / "deepseek_v3")
    return [*PLAIN, f"model.path={folder}", "model.load_format=auto", "model.dtype=float32"]


@pytest.fixture(scope="module")
def limited(model: list[str]) -> Served:
    return serve(2, requests(), [*model, *LIMIT])


def counts_agree(served: Served) -> None:
    assert sum(served.changed.values()) == served.counters["num_choices_changed"] > 0
    assert served.changed.keys() == served.tokens.keys()


def test_each_request_is_told_how_many_of_its_choices_have_changed(limited: Served) -> None:
    counts_agree(limited)


@pytest.mark.parametrize(
    "overrides",
    [
        ["eplb.num_redundant_experts=2"],
        ["eplb.num_redundant_experts=2", *DYNAMIC],
        ["dispatch.backend=collective", "dispatch.max_tokens_per_rank=7", "engine.return_routed_experts=true"],
    ],
    ids=["redundant", "moving", "rounds"],
)
def test_placement_and_transport_change_neither_tokens_nor_counts(
    model: list[str], limited: Served, overrides: list[str]
) -> None:
    prepare = move_always if DYNAMIC[0] in overrides else None
    served = serve(2, requests(), [*model, *LIMIT, *overrides], prepare=prepare)
    assert served.digests == limited.digests
    assert served.changed == limited.changed


def test_a_capacity_that_nothing_exceeds_changes_nothing(model: list[str]) -> None:
    free, wide = serve(1, requests(), model), serve(1, requests(), [*model, "engine.expert_capacity=1000"])
    assert wide.digests == free.digests
    assert set(wide.changed.values()) == {0}
    assert not free.changed, "without a limit nothing is counted"
    assert serve(1, requests(), [*model, *LIMIT]).digests != free.digests


def test_plain_torch_limits_and_counts_as_well(model: list[str]) -> None:
    counts_agree(serve(2, requests()[:8], [*model, *LIMIT, "engine.over_capacity=drop", "engine.cpu_kernels=torch"]))


def test_a_prefix_that_is_reused_brings_its_changes(model: list[str]) -> None:
    once = requests()[:8]
    again = [Submit(f"again {each.request_id}", 0, each.prompt_ids, each.params, each.seed) for each in once]
    served = serve(1, [*once, *again], [*model, *LIMIT, "cache.prefix_cache=true", "engine.max_running_requests=4"])
    assert served.stats["num_cached_prompt_tokens"] > 0
    assert sum(served.changed.values()) > served.counters["num_choices_changed"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine.numerics=batch_invariant"], "numerics is batch_invariant, which excludes that"),
        (["speculation.mode=auto"], "speculation.mode is auto; leave one of the two out"),
    ],
)
def test_what_it_would_break_is_refused_by_name(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(overrides=[*LIMIT, *overrides])


def test_where_the_rest_goes_without_a_capacity_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"over_capacity is drop, but there is no expert_capacity; set it"):
        load_config(overrides=["engine.over_capacity=drop"])


def test_gpus_and_routers_without_a_next_best_expert_are_refused(tmp_path: Path) -> None:
    config = load_config(overrides=[f"model.path={tiny_model(tmp_path, 'phimoe')}", "model.load_format=dummy", *LIMIT])
    spec = read_spec(Path(config.model.path))
    with pytest.raises(ConfigError, match=r"over_capacity is next.*set engine.over_capacity: drop"):
        ModelPlan.of(config, spec, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"built for CPUs.*parallel.device: cpu"):
        ModelPlan.of(config, spec, torch.device("cuda"))
