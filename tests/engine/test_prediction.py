"""Drafts of a layer for multi-token prediction change no bit, and are those of a plain implementation of it."""

import json
import random
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from moe_serve.attention_dp.draft_gate import DraftGate
from moe_serve.attention_dp.request import Request, SamplingParams
from moe_serve.attention_dp.scheduler import Proposal, ScheduledChunk
from moe_serve.attention_dp.speculation import MTP, Speculator
from moe_serve.config import load_config, model_dir
from moe_serve.engine.build import pack_weights
from moe_serve.engine.engine import Engine
from moe_serve.engine.model.model_plan import ModelPlan
from moe_serve.engine.model.prediction import TokenPredictor
from moe_serve.engine.step.plan import StepPlan
from moe_serve.eplb.files.placements import write_placement
from moe_serve.errors import ConfigError, PlacementError
from moe_serve.models.families.registry import read_spec
from moe_serve.models.tokenizer import Tokenizer
from tests.engine.moving import DYNAMIC, move_in_every_step
from tests.engine.offline import prompts_with_shared_beginnings, serve, submits_of
from tests.engine.test_identity import PLAIN, same
from tests.engine.test_speculation import SMALL_CACHE, VERIFIES, drafting, greedy_and_sampled
from tests.models.predicting import PREDICTING, PredictionOracle, make_predicting

Predicting = Callable[[str], tuple[PredictionOracle, Path]]


@pytest.fixture(scope="module")
def predicting(tmp_path_factory: pytest.TempPathFactory) -> Predicting:
    """Returns name -> (oracle, folder of its checkpoint)."""
    made: dict[str, tuple[PredictionOracle, Path]] = {}

    def get(name: str) -> tuple[PredictionOracle, Path]:
        if name not in made:
            made[name] = make_predicting(name, tmp_path_factory.mktemp("predicting"))
        return made[name]

    return get


def settings_of(folder: Path) -> list[str]:
    return [*PLAIN, f"model.path={folder}"]


USUAL = ("deepseek_v3", "deepseek_v32", "glm4_moe")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in USUAL else pytest.mark.slow) for name in PREDICTING]
)
def test_predicted_drafts_change_no_bit(name: str, predicting: Predicting) -> None:
    overrides = settings_of(predicting(name)[1])
    submits = greedy_and_sampled(name, 24)
    expected = serve(1, submits, overrides)
    for num_ranks, predicted, cache in ((1, 1, []), (2, 3, SMALL_CACHE)):
        mtp = ["speculation.mode=mtp", f"speculation.predicted_drafts={predicted}"]
        drafted = serve(num_ranks, submits, [*overrides, *mtp, *cache], stagger=1, prepare=_has_drafts)
        same(drafted, expected)
        assert (drafted.tokens, drafted.finish) == (expected.tokens, expected.finish)
        assert not cache or drafted.stats["num_preempted"] > 0, "the cache was not small enough to preempt anybody"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_layer_that_runs_now_and_then_beside_drafts_from_text_changes_no_bit(
    num_ranks: int, predicting: Predicting
) -> None:
    overrides = settings_of(predicting("deepseek_v3")[1])
    submits = greedy_and_sampled("auto", 24)
    expected = serve(1, submits, overrides)
    auto = [*overrides, *SMALL_CACHE, "speculation.mode=auto", "speculation.predicted_drafts=2"]
    drafted = serve(num_ranks, submits, auto, stagger=1, prepare=_now_and_then)
    same(drafted, expected)
    assert (drafted.tokens, drafted.finish) == (expected.tokens, expected.finish)


def _now_and_then(engine: Engine) -> None:
    """Lets each rank want the layer in steps of its own, and verifies all drafts."""
    run, draw, speculator = engine.run, random.Random(engine.rank), engine.scheduler.speculator
    assert isinstance(speculator, Speculator)
    gate, run_step = speculator.gate, engine.run_step
    assert gate.layer_runs, "it begins with the layer"

    def checked() -> None:
        run()
        assert speculator.counters.num_drafts[MTP] > 0

    def step() -> StepPlan:
        gate.layer_runs = draw.random() < 0.4  # but for steps that begin a prompt, with which it begins again
        return run_step()

    engine.run_step = step  # type: ignore[method-assign]
    gate.layer_ran = lambda layer_s: None  # type: ignore[method-assign]
    gate._judge_layer = lambda step, plain_s: None  # type: ignore[method-assign]
    gate.lengths = lambda num, chances, num_rows: [len(each) for each in chances]  # type: ignore[method-assign]
    engine.run = checked  # type: ignore[method-assign]


def test_the_layer_is_tried_again_with_a_step_that_begins_a_prompt() -> None:
    """With its first rows, behind what was cached of it: the layer has no keys of a prompt that only goes on."""
    asked: list[tuple[bool, list[str]]] = []

    class Asked:
        def __init__(self, layer_runs: bool):
            self.gate = DraftGate()
            self.gate.layer_runs = layer_runs

        def num_predictions(self, has_prompt: bool, going_on: Iterable[Request]) -> int:
            asked.append((has_prompt, [request.request_id for request in going_on]))
            return 3

    none: Any = None
    predictor, resting = (TokenPredictor(none, none, cast("Any", Asked(runs)), none, 8) for runs in (True, False))
    decoding, prompt, cached = (Request(name, 0, list(range(40)), [], SamplingParams(9), 0) for name in "dpc")
    cached.num_cached_prompt = 16
    decode = ScheduledChunk(decoding, 40, 1, True)
    for prefill in (ScheduledChunk(prompt, 0, 8, False), ScheduledChunk(prompt, 8, 8, False),
                    ScheduledChunk(cached, 16, 8, False), ScheduledChunk(cached, 24, 16, True)):  # fmt: skip
        assert predictor.num_runs(Proposal((decode,), (prefill,))) == 3
        assert predictor.num_runs(Proposal((), (prefill,))) == (3 if prefill.samples else 1)
        assert resting.num_runs(Proposal((decode,), (prefill,))) == 3
    assert asked[::3] == asked[2::3] == [(True, ["d"]), (False, ["d", "p"]), (True, ["d"]), (False, ["d", "c"])]
    assert predictor.num_runs(Proposal((decode,))) == 3
    assert resting.num_runs(Proposal((decode,))) == 0


def test_auto_goes_without_a_layer_that_it_cannot_have(predicting: Predicting) -> None:
    folder = predicting("glm4_moe")[1]
    for device, overrides, has_layer in (("cpu", [], True), ("cpu", ["cache.host_gb=0.1"], False), ("cuda", [], False)):
        config = load_config(overrides=[f"model.path={folder}", "speculation.mode=auto", *overrides])
        plan = ModelPlan.of(config, read_spec(folder), torch.device(device))
        assert (plan.spec.predictor_id is not None) == has_layer


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_drafts_end_with_the_context(num_ranks: int, predicting: Predicting) -> None:
    """Whose end lies within a block here: rows behind it have no rotation. A second rank has no request."""
    overrides = [*settings_of(predicting("deepseek_v3")[1]), "model.max_model_len=50", "cache.block_size=16"]
    submits = submits_of([[5, 6, 7, 8, 9]], SamplingParams(max_new_tokens=45, temperature=0, ignore_eos=True))
    expected = serve(1, submits, overrides)
    drafted = serve(num_ranks, submits, [*overrides, "speculation.mode=mtp", "speculation.predicted_drafts=8"])
    assert drafted.tokens == expected.tokens
    by_text = serve(num_ranks, submits, [*overrides, VERIFIES], prepare=drafting(expected))
    assert by_text.tokens == expected.tokens


def test_weights_that_are_packed_beforehand_have_the_layer(predicting: Predicting, tmp_path: Path) -> None:
    cache = [f"model.weight_cache={tmp_path}", *settings_of(predicting("deepseek_v3")[1]), "speculation.mode=mtp"]
    pack_weights(load_config(overrides=cache), lambda phase, fraction: None)
    (made,) = tmp_path.glob("*.weights")
    before = made.stat()
    serve(1, submits_of([[5, 6, 7]], SamplingParams(max_new_tokens=2, temperature=0)), cache)
    assert (made.stat().st_ino, made.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def _has_drafts(engine: Engine) -> None:
    """Fails where a rank has verified no draft of the layer."""
    run, speculator = engine.run, engine.scheduler.speculator
    assert isinstance(speculator, Speculator)

    def checked() -> None:
        run()
        assert speculator.counters.num_drafts[MTP] > 0
        assert not speculator._followers, "requests that have ended are remembered"

    engine.run = checked  # type: ignore[method-assign]


EVERY_DAY = (("deepseek_v3", 1), ("glm4_moe", 2))


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [pytest.param(*case, marks=() if case in EVERY_DAY else pytest.mark.slow) for case in product(PREDICTING, (1, 2))],
)
def test_drafts_are_those_of_a_plain_layer_in_chunks_behind_prefixes_and_behind_drafts(
    name: str, num_ranks: int, predicting: Predicting
) -> None:
    oracle, folder = predicting(name)
    params = SamplingParams(max_new_tokens=9, temperature=0, ignore_eos=True)
    prompts = prompts_with_shared_beginnings(10, 256, max_len=60, seed=2)
    prompts += [prompt[:48] + [7] * 3 for prompt in prompts if len(prompt) > 48]  # which leave at the end of a block
    overrides = [
        *settings_of(folder), "speculation.mode=mtp", "speculation.predicted_drafts=2", "cache.block_size=8",
        "cache.prefix_cache=true", "engine.max_batch_tokens=40", "engine.max_running_requests=16",
        "dispatch.max_tokens_per_rank=16",
    ]  # fmt: skip
    prepare = partial(_compared if num_ranks == 1 else _moved_and_compared, oracle)
    overrides += [] if num_ranks == 1 else [*DYNAMIC, "eplb.num_redundant_experts=2"]
    served = serve(num_ranks, submits_of(prompts, params), overrides, stagger=3, prepare=prepare)
    assert served.stats["num_cached_prompt_tokens"] > 0


def _moved_and_compared(oracle: PredictionOracle, engine: Engine) -> None:
    """Compares while experts move in every step, those of the layer as well."""
    run, before = engine.run, engine.served.placement
    move_in_every_step(engine)

    def checked() -> None:
        run()
        assert (engine.served.placement.physical_to_logical != before.physical_to_logical).any(axis=1).all()

    engine.run = checked  # type: ignore[method-assign]
    _compared(oracle, engine)


def _compared(oracle: PredictionOracle, engine: Engine) -> None:
    """Fails where a draft differs from the token that the oracle predicts, but for those that are nearly as likely."""
    run, speculator = engine.run, engine.scheduler.speculator
    assert isinstance(speculator, Speculator)
    predict, seen = speculator.predict, [0, 0]

    def compared(request: Request, token_ids: list[int]) -> None:
        known = request.token_ids(0, request.num_known)
        wanted = oracle.logits(known, guessed=len(token_ids) - 1)[-len(token_ids) :]
        assert 1 <= len(token_ids) <= 2
        first, best = wanted[0].max(0)
        assert float(first - wanted[0, token_ids[0]]) < 1e-3, "not what the layer predicts"
        if len(token_ids) == 2 and token_ids[0] == int(best):
            assert float(wanted[1].max() - wanted[1, token_ids[1]]) < 1e-3, "not what it predicts of its own row"
        seen[0] += 1
        seen[1] += len(token_ids) == 2
        predict(request, token_ids)

    def checked() -> None:
        run()
        assert min(seen) > 10, f"{seen[0]} drafts, {seen[1]} of two tokens"

    speculator.predict = compared  # type: ignore[method-assign, assignment]
    engine.run = checked  # type: ignore[method-assign]


def test_a_wrong_shift_of_tokens_would_be_noticed(predicting: Predicting) -> None:
    oracle, folder = predicting("glm4_moe")
    params = SamplingParams(max_new_tokens=9, temperature=0, ignore_eos=True)
    submits = submits_of(prompts_with_shared_beginnings(6, 256, max_len=30, seed=2), params)
    overrides = [*settings_of(folder), "speculation.mode=mtp", "speculation.predicted_drafts=2"]
    with pytest.raises(Exception, match="not what the layer predicts"):
        serve(1, submits, overrides, prepare=partial(_shifted, oracle))


def _shifted(oracle: PredictionOracle, engine: Engine) -> None:
    """A mutation: each row gets its own token, not the one behind it."""
    _compared(oracle, engine)
    served, predict = engine.served, engine.served.predict

    def shifted(batch: Any, num_chunks: int, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if hidden is None:
            batch = batch._replace(input_ids=torch.roll(batch.input_ids, 1))
        return predict(batch, num_chunks, hidden)

    served.predict = shifted  # type: ignore[method-assign]


def refused(folder: Path, *overrides: str) -> str:
    """Returns why a configuration with a layer that predicts is refused."""
    config = load_config(overrides=[f"model.path={folder}", "speculation.mode=mtp", *overrides])
    with pytest.raises(ConfigError) as error:
        ModelPlan.of(config, read_spec(folder), torch.device("cpu"))
    return str(error.value)


def test_what_goes_without_the_layer_is_refused_with_a_way_out(predicting: Predicting, tmp_path: Path) -> None:
    folder = predicting("glm4_moe")[1]
    assert "below the pool" in refused(folder, "cache.host_gb=0.1")
    assert "experts of that layer" in refused(folder, "engine.return_routed_experts=true")
    assert "prefill ranks" in refused(folder, "parallel.num_prefill_ranks=1")
    assert "recorder_mode: stat" in refused(folder, "eplb.mode=static", "eplb.recorder_mode=per_pass")
    values = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"num_nextn_predict_layers": 0}))
    assert "num_nextn_predict_layers" in refused(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values | {"num_hidden_layers": values["num_hidden_layers"] + 1}))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    message = refused(tmp_path)
    assert f"no layer {values['num_hidden_layers'] + 1}" in message
    assert "speculation.mode: auto" in message


def test_auto_goes_without_the_layer_where_files_are_of_the_own_layers(predicting: Predicting, tmp_path: Path) -> None:
    """So that placements and traces of servers without it are still good; a placement with that layer brings it."""
    folder, path = predicting("glm4_moe")[1], tmp_path / "placement.json"

    def plan_of(mode: str, *overrides: str) -> ModelPlan:
        config = load_config(overrides=[f"model.path={folder}", f"speculation.mode={mode}", *overrides])
        return ModelPlan.of(config, read_spec(folder), torch.device("cpu"))

    own, predicts = plan_of("off"), plan_of("auto")
    assert (own.spec.predictor_id, predicts.spec.predictor_id) == (None, own.spec.num_layers)
    for plan in (own, predicts):
        write_placement(plan.placement, path)
        found = plan_of("auto", f"eplb.init_expert_location={path}")
        assert found.spec.predictor_id == plan.spec.predictor_id
        assert found.placement.moe_layer_ids == plan.placement.moe_layer_ids
    record = f"eplb.record_path={tmp_path / 'load.jsonl'}"
    assert plan_of("auto", "eplb.mode=static", record).spec == own.spec
    assert plan_of("mtp", "eplb.mode=static", record).spec == predicts.spec
    path.write_text("{}")
    with pytest.raises(PlacementError, match="not a placement"):
        plan_of("auto", f"eplb.init_expert_location={path}")


@pytest.mark.parametrize(("temperature", "least"), [(0.0, 0.35), (0.7, 0.25)])
def test_the_layer_of_the_demo_model_is_right_about_its_own_text(temperature: float, least: float) -> None:
    tokenizer = Tokenizer.from_folder(model_dir(load_config().model))
    texts = (
        "def read(self, size=-1):\n", "The following example shows how to", "class Queue:\n    ", "Return a new ",
        "    def __init__(self, name, value=None):\n", "If the argument is omitted, ",
    )  # fmt: skip
    params = SamplingParams(max_new_tokens=60, temperature=temperature, ignore_eos=True)
    submits = submits_of([tokenizer.encode(text) for text in texts], params)
    expected = serve(1, submits, PLAIN)
    drafted = serve(1, submits, [*PLAIN, "speculation.mode=mtp"], prepare=partial(_right, least))
    same(drafted, expected)
    assert drafted.tokens == expected.tokens


def _right(least: float, engine: Engine) -> None:
    """Fails where the layer's drafts are right less often."""
    run, speculator = engine.run, engine.scheduler.speculator
    assert isinstance(speculator, Speculator)

    def checked() -> None:
        run()
        share = speculator.counters.num_accepted[MTP] / speculator.counters.num_drafts[MTP]
        assert share >= least, f"{share:.1%} of {speculator.counters.num_drafts[MTP]} drafts were right"

    engine.run = checked  # type: ignore[method-assign]
