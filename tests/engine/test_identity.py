"""The same request gives the same tokens, whatever else the engine serves, bit for bit: by default on CPUs.

One rank that serves everything at once, without prefix cache, is the reference. Every other way of serving the same
prompts must repeat it: more ranks, other placements, replicas, chunks, cached prefixes, preemption, another order, more
threads. Where torch computes, `numerics: batch_invariant` holds the same for one thread per rank.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.engine.protocol.messages import Submit
from moe_serve.eplb.split.make import SEARCHED_SPLITS
from moe_serve.models.families.registry import read_spec
from moe_serve.models.spec import ModelSpec
from tests.engine.offline import (
    OTHER_FAMILIES,
    TINY,
    Served,
    prompts_with_shared_beginnings,
    serve,
    submits_of,
    tiny_model,
)
from tests.models.mxfp4_checkpoint import write_mxfp4_config

SIZES = {"small": (28, 12), "large": (200, 64)}  # prompts, tokens of each
PLAIN = ["engine.max_running_requests=64", "parallel.threads_per_rank=1", "cache.prefix_cache=false"]
BY_TORCH = ["engine.cpu_kernels=torch", "engine.numerics=batch_invariant"]
TWO_THREADS = ["parallel.threads_per_rank=2"]
GREEDY = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True)

# name -> (ranks, overrides, stagger). These three together cover everything, on every model.
WAYS: dict[str, tuple[int, list[str], int | None]] = {
    "two ranks, small batches, arriving one by one": (2, ["engine.max_running_requests=13"], 3),
    "four ranks, prompts and dispatches in chunks": (
        4, ["engine.max_batch_tokens=24", "engine.max_running_requests=16", "dispatch.max_tokens_per_rank=10"], None,
    ),
    "preempted, cached prefixes, chunks, all at once": (
        2,
        [
            "cache.num_blocks=40", "cache.block_size=8", "cache.prefix_cache=true", "engine.max_batch_tokens=40",
            "engine.max_running_requests=24", "dispatch.max_tokens_per_rank=16", "dispatch.backend=collective",
        ],
        1,
    ),
}  # fmt: skip
# What none of these has, on one model.
SINGLE: dict[str, tuple[int, list[str], int | None]] = {
    "rows in slabs, moved without the helper": (
        2, ["dispatch.backend=low_latency", "dispatch.rows=masked", "dispatch.compiled=false"], None,
    ),
    "prefills wait for other ranks": (2, ["engine.prefill_hold_steps=3"], 2),
    "exchange over gloo": (2, ["engine.exchange=gloo"], None),
    "overlapped rounds": (2, ["dispatch.overlap_from_tokens=2"], 3),
    "overlapped rounds over gloo, exact split": (
        3,
        [
            "dispatch.backend=collective", "dispatch.overlap_from_tokens=6", "eplb.num_redundant_experts=3",
            "eplb.split=exact",
        ],
        None,
    ),
}  # fmt: skip
DEMO = ("demo", "small")
# Families that are another's form: slow tests alone serve them over ranks.
IN_ANOTHERS_FORM = (
    "glm4_moe_lite-list",
    "solar_open-plain",
    "hy_v3-plain",
    "mistral4-heated",
    "flex_olmo-plain",
    "kolibri1-plain",
)
MODELS = [(model, size) for size in SIZES for model in ("demo", *TINY, *OTHER_FAMILIES, *IN_ANOTHERS_FORM)]
# Of families that are served here alone: attention, states, gates or experts of a kind of their own. That rows of the
# others have the same bits in any batch, tests/models/test_invariance.py holds by default for each of them.
OF_A_KIND = (
    "cohere2_moe", "qwen3_next", "longcat_flash", "deepseek_v32", "llama4_text", "phimoe", "lfm2_moe", "minimax",
    "nemotron_h", "kimi_linear", "deepseek_v4",
)  # fmt: skip
# Of these attention and states are their own, gates and experts those of others.
OF_OWN_STATES = ("cohere2_moe", "qwen3_next", "deepseek_v32", "lfm2_moe", "minimax", "kimi_linear")


def marked(reference: tuple[str, str], *case: object) -> object:
    name = "-".join(map(str, (*reference, *case)))
    model, size = reference
    every_day = BY_SHARED_KERNELS if model in OTHER_FAMILIES else BY_KERNELS
    is_known = model in (*OTHER_FAMILIES, *IN_ANOTHERS_FORM) and model not in OF_A_KIND
    is_placed = case not in ALL_WAYS
    is_slow = size == "large" or is_known or (model in OF_OWN_STATES if is_placed else case not in every_day)
    return pytest.param(reference, *case, id=name, marks=pytest.mark.slow if is_slow else ())


PLACED_DEMO = [(4, 8, "even"), (2, 8, "exact"), (2, 8, "nearest"), (2, 8, "time")]  # ranks, redundant experts, split
ALL_WAYS = [(way, threads) for way in WAYS for threads in (1, 2)]
# By default each model meets each way, with one thread or two; families that share their kernels with others meet the
# way that has most in it.
BY_KERNELS = [ALL_WAYS[1], ALL_WAYS[2], ALL_WAYS[5]]
BY_SHARED_KERNELS = [ALL_WAYS[5]]
CASES = [marked(reference, *case) for reference in MODELS for case in ALL_WAYS]
PLACED = [
    marked(reference, *case)
    for reference in MODELS
    for case in (PLACED_DEMO if reference[0] == "demo" else [(2, 4, "even")])
]


def model_overrides(model: str, folder: Path) -> list[str]:
    if model == "demo":
        return []
    return [f"model.path={tiny_model(folder, model)}", "model.load_format=dummy"]


def requests_for(model: str, size: str) -> list[Submit]:
    num_prompts, num_tokens = SIZES[size]
    prompts = prompts_with_shared_beginnings(num_prompts, 2048 if model == "demo" else 256, max_len=60)
    return submits_of(prompts, replace(GREEDY, max_new_tokens=num_tokens))


@dataclass(frozen=True)
class Reference:
    """What one rank made of the requests, all at once."""

    requests: list[Submit]
    overrides: list[str]  # that name the model
    served: Served


def lengths(requests: list[Submit]) -> dict[str, int]:
    return {submit.request_id: submit.params.max_new_tokens for submit in requests}


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    model, size = request.param
    overrides = model_overrides(model, tmp_path_factory.mktemp(model))
    requests = requests_for(model, size)
    served = serve(1, requests, [*PLAIN, *overrides])
    assert {name: len(tokens) for name, tokens in served.tokens.items()} == lengths(requests)
    return Reference(requests, overrides, served)


def same(served: Served, reference: Served) -> None:
    """Tokens alone would hide most changes of the last bit, so the logits of every token are compared too."""
    differing = []
    for name, tokens in served.tokens.items():
        num_tokens = len(tokens)
        same_tokens = tokens == reference.tokens[name][:num_tokens]
        if not same_tokens or served.digests[name] != reference.digests[name][:num_tokens]:
            differing.append(name)
    assert not differing, f"{len(differing)} of {len(served.tokens)} requests differ, first {differing[0]}"


@pytest.mark.parametrize(("reference", "way", "threads"), CASES, indirect=["reference"])
def test_tokens_do_not_depend_on_how_they_are_served(reference: Reference, way: str, threads: int) -> None:
    num_ranks, overrides, stagger = WAYS[way]
    overrides = [*reference.overrides, *overrides, f"parallel.threads_per_rank={threads}"]
    served = serve(num_ranks, reference.requests, [*PLAIN, *overrides], stagger)
    assert {name: message for name, message in served.messages.items() if message} == {}, "requests have failed"
    assert {name: len(tokens) for name, tokens in served.tokens.items()} == lengths(reference.requests)
    same(served, reference.served)
    if "preempted" in way:
        assert served.stats["num_preempted"] > 0, "the cache was not small enough to preempt anybody"
        assert served.stats["num_cached_prompt_tokens"] > 0, "no prefix was reused"


@pytest.mark.parametrize("reference", [DEMO], indirect=True)
@pytest.mark.parametrize("way", SINGLE)
def test_tokens_do_not_depend_on_one_thing(reference: Reference, way: str) -> None:
    num_ranks, overrides, stagger = SINGLE[way]
    requests = [msgspec.structs.replace(submit, params=GREEDY) for submit in reference.requests]
    served = serve(num_ranks, requests, [*PLAIN, *overrides], stagger)
    assert set(served.tokens) == set(reference.served.tokens)
    same(served, reference.served)
    assert (served.counters["num_overlapped_forwards"] > 0) == ("overlapped" in way)


@pytest.mark.parametrize("model", [pytest.param("demo", marks=pytest.mark.slow), "deepseek_v3", "qwen2_moe"])
def test_batch_invariant_by_torch_holds_the_same(model: str, tmp_path: Path) -> None:
    requests = requests_for(model, "small")[:10]
    overrides = [*PLAIN, *BY_TORCH, *model_overrides(model, tmp_path)]
    expected = serve(1, requests, overrides)
    for num_ranks, more, stagger in WAYS.values():
        same(serve(num_ranks, requests, [*overrides, *more], stagger), expected)


@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek_v3", pytest.param("qwen2_moe", marks=pytest.mark.slow)])
def test_weights_stored_in_bfloat16_hold_the_same(model: str, tmp_path: Path) -> None:
    requests = requests_for(model, "small")[:16]
    overrides = [*PLAIN, *model_overrides(model, tmp_path)]
    config = tmp_path / model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"torch_dtype": "bfloat16"}))
    hold_the_same(requests, overrides)


def test_experts_kept_in_mxfp4_hold_the_same(tmp_path: Path) -> None:
    path = write_mxfp4_config(tmp_path)
    overrides = [*PLAIN, f"model.path={path}", "model.load_format=dummy", "model.expert_weights=mxfp4"]
    hold_the_same(requests_for("gpt_oss", "small")[:16], overrides)


def hold_the_same(requests: list[Submit], overrides: list[str]) -> None:
    expected = serve(1, requests, overrides)
    for num_ranks, more, stagger in WAYS.values():
        same(serve(num_ranks, requests, [*overrides, *more, *TWO_THREADS], stagger), expected)


def shuffled_placement(spec: ModelSpec, num_slots: int) -> np.ndarray:
    """Returns slots in random order, redundant ones for the first experts; a rank may hold an expert twice."""
    draw = np.random.default_rng(num_slots)
    row = np.resize(np.arange(spec.num_logical), num_slots)
    return np.stack([draw.permutation(row) for _ in spec.moe_layer_ids])


def write_placement(path: Path, rows: np.ndarray) -> str:
    path.write_text(json.dumps({"physical_to_logical_map": rows.tolist()}))
    return f"eplb.init_expert_location={path}"


@pytest.mark.parametrize(("reference", "num_ranks", "num_redundant", "split"), PLACED, indirect=["reference"])
def test_tokens_do_not_depend_on_where_experts_live(
    reference: Reference, num_ranks: int, num_redundant: int, split: str, tmp_path: Path
) -> None:
    overrides = reference.overrides
    spec = read_spec(Path(overrides[0].partition("=")[2]) if overrides else _demo())
    num_slots = -(-(spec.num_logical + num_redundant) // num_ranks) * num_ranks
    rows = shuffled_placement(spec, num_slots)
    placement = write_placement(tmp_path / "placement.json", rows)
    served = serve(num_ranks, reference.requests, [*PLAIN, *overrides, placement, f"eplb.split={split}"])
    same(served, reference.served)
    received = np.array(served.slot_rows)
    load = np.zeros((len(rows), spec.num_logical), dtype=np.int64)
    for layer, slots in enumerate(rows):
        np.add.at(load[layer], slots, received[layer])
    replicas = np.stack([np.bincount(slots, minlength=spec.num_logical)[slots] for slots in rows])
    hot = np.take_along_axis(load, rows, axis=1) >= 64 * num_ranks * replicas
    if split in SEARCHED_SPLITS:
        return  # a replica on a busy rank may rightly receive nothing
    assert (received[hot & (replicas > 1)] > 0).all(), "a replica of a hot expert received no rows"


@pytest.mark.parametrize("reference", [DEMO], indirect=True)
def test_adding_expert_outputs_in_rank_order_would_be_noticed(reference: Reference, tmp_path: Path) -> None:
    placement = write_placement(tmp_path / "placement.json", shuffled_placement(read_spec(_demo()), 32))
    overrides = [*PLAIN, placement, "dispatch.backend=collective"]
    mutated = serve(2, reference.requests[:20], overrides, add_in_slot_order=True)
    with pytest.raises(AssertionError, match="requests differ"):
        same(mutated, reference.served)


def test_counted_load_is_exactly_the_tokens_that_ran() -> None:
    spec = read_spec(_demo())
    served = serve(2, requests_for(*DEMO), [*PLAIN, "eplb.record_window_steps=5"])
    counters = served.counters
    num_tokens = counters["num_decode_tokens"] + counters["num_prefill_tokens"]
    load = np.array(served.load).sum(axis=0)
    assert len(served.load) == -(-served.num_steps // 5), "one record for each window, the last one cut by the end"
    assert (load.sum(axis=1) == num_tokens * spec.topk).all()


SAMPLED = SamplingParams(max_new_tokens=20, temperature=0.9, top_k=50, top_p=0.95, ignore_eos=True)


WAYS_TO_SAMPLE: tuple[tuple[int, list[str], int | None], ...] = (
    (2, [], None), (1, ["engine.max_running_requests=5"], 4), (2, ["cache.num_blocks=16"], 2),
)  # fmt: skip
SEEDS = [1000 + index for index in range(30)]


def test_sampled_tokens_depend_on_the_seed_alone() -> None:
    prompts = prompts_with_shared_beginnings(30, 2048, max_len=30)
    expected = serve(1, submits_of(prompts, SAMPLED, SEEDS), PLAIN)
    for num_ranks, overrides, stagger in WAYS_TO_SAMPLE:
        same(serve(num_ranks, submits_of(prompts, SAMPLED, SEEDS), [*PLAIN, *overrides], stagger), expected)
    other = serve(1, submits_of(prompts, SAMPLED, [seed + 1 for seed in SEEDS]), PLAIN)
    assert sum(other.tokens[name] != expected.tokens[name] for name in expected.tokens) > 27


CHANGED = replace(
    SAMPLED, repetition_penalty=1.5, frequency_penalty=1.0, presence_penalty=0.5, logit_bias={5: 3.0, 9: -2.0}
)


def submits_that_change_logits() -> list[Submit]:
    """Two thirds of the requests change their logits, each kind of change beside plain neighbours."""
    submits = submits_of(prompts_with_shared_beginnings(30, 2048, max_len=30), SAMPLED, SEEDS)
    words = tuple((token,) for token in range(300, 310)) + tuple((a, b) for a in range(200) for b in (10, 11))[:100]
    every = [
        replace(CHANGED, bad_words_ids=words),
        replace(CHANGED, temperature=0.0, allowed_token_ids=tuple(range(0, 2000, 2))),
        SAMPLED,
    ]
    return [msgspec.structs.replace(submit, params=every[i % 3]) for i, submit in enumerate(submits)]


def test_changed_logits_give_the_same_tokens_however_they_are_served() -> None:
    submits = submits_that_change_logits()
    expected = serve(1, submits, PLAIN)
    for num_ranks, overrides, stagger in WAYS_TO_SAMPLE:
        served = serve(num_ranks, submits, [*PLAIN, *overrides], stagger)
        same(served, expected)
        assert served.stats["num_preempted"] > 0 or "cache.num_blocks=16" not in overrides
    plain = serve(1, [msgspec.structs.replace(submit, params=SAMPLED) for submit in submits], PLAIN)
    differ = [expected.tokens[str(i)] != plain.tokens[str(i)] for i in range(30)]
    assert sum(differ[0::3]) > 7, "changes that change no token show nothing"
    assert not any(differ[2::3]), "plain neighbours are not changed"
    by_torch = serve(1, submits[:12], [*PLAIN, *BY_TORCH])
    same(serve(2, submits[:12], [*PLAIN, *BY_TORCH], stagger=1), by_torch)


def test_a_request_that_goes_on_elsewhere_gets_the_tokens_that_it_would_have_had() -> None:
    submits = submits_that_change_logits()
    expected = serve(1, submits, PLAIN)
    cut = [
        msgspec.structs.replace(submit, output_ids=expected.tokens[submit.request_id][: 1 + i % 19], attempt=1)
        for i, submit in enumerate(submits)
    ]
    assert serve(2, cut, PLAIN, stagger=1).tokens == expected.tokens


def _demo() -> Path:
    from moe_serve.config import load_config, model_dir

    return model_dir(load_config().model)
