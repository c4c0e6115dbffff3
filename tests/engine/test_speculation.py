"""Drafts change no bit: neither tokens, nor the logits behind them, nor log probabilities, wherever drafts go wrong.

Drafts that are right, wrong and right again behind a wrong one come from `Oracle`, which knows what is drawn. Drafts of
the product come from text; the demo model repeats itself enough to have some.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest

from moe_serve.attention_dp.constraint import Constraint
from moe_serve.attention_dp.request import Request, SamplingParams
from moe_serve.attention_dp.speculation import FORM, Speculator
from moe_serve.engine.engine import Engine
from moe_serve.engine.protocol.messages import LogprobBlock, Submit, TokenEvent
from moe_serve.engine.requests import StepEvents
from tests.engine.offline import OTHER_FAMILIES, TINY, Served, prompts_with_shared_beginnings, serve, submits_of
from tests.engine.test_identity import PLAIN, model_overrides, requests_for, same, submits_that_change_logits
from tests.engine.test_structured import STARTS, compile_at_once, submits_with_forms
from tests.engine.test_values_not_finite import poison_embedding

# Of those with states one of each kind: the gated delta rule, state spaces, and convolutions.
EVERY_DAY = ("demo", "deepseek_v3", "gpt_oss", "deepseek_v32", "deepseek_v4", "qwen3_next", "nemotron_h", "lfm2_moe")
FAMILIES = [
    pytest.param(model, marks=() if model in EVERY_DAY else pytest.mark.slow)
    for model in ("demo", *TINY, *OTHER_FAMILIES)
]
SMALL_CACHE = [
    "cache.num_blocks=24", "cache.block_size=8", "cache.prefix_cache=true", "engine.max_batch_tokens=40",
    "engine.max_running_requests=24", "dispatch.max_tokens_per_rank=16",
]  # fmt: skip


VERIFIES = "speculation.mode=lookup"  # so that there are states behind drafts; what drafts then is replaced


class Oracle(Speculator):
    """Drafts of 0 to 6 tokens, each wrong with a chance of a fifth."""

    def __init__(self, expected: dict[str, list[int]]):
        """expected: all tokens of each request, by id"""
        super().__init__(max_drafts=6, index_bytes=1, shares_text=False, always=True)
        self._expected = expected
        self.num_right = 0

    def draft(self, requests: Sequence[Request], num_rows: int) -> list[tuple[int, ...]]:
        drafts = []
        for request in requests:
            known = len(request.output_ids)
            draw = random.Random(f"{request.request_id} {known}")
            right = self._expected[request.request_id][known : known + draw.randint(0, 6)]
            drafts.append(tuple(token if draw.random() < 0.8 else token ^ 1 for token in right)[:num_rows])
            num_rows -= len(drafts[-1])
        return drafts

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        self.num_right += num_accepted


def drafts_of(expected: dict[str, list[int]], engine: Engine) -> None:
    """Lets an engine verify what the oracle drafts, and fails where it has accepted nothing."""
    oracle = engine.scheduler.speculator = Oracle(expected)
    run = engine.run

    def checked() -> None:
        run()
        assert oracle.num_right > 0 or not engine.counters.num_output_tokens, "no draft was right"

    engine.run = checked  # type: ignore[method-assign]


def drafting(served: Served) -> partial[None]:
    return partial(drafts_of, served.tokens)


@pytest.mark.parametrize("model", FAMILIES)
def test_drafts_change_no_bit_in_any_family(model: str, tmp_path) -> None:
    overrides = [*PLAIN, *model_overrides(model, tmp_path)]
    submits = requests_for(model, "small")[:24]
    expected = serve(1, submits, overrides)
    drafted = serve(2, submits, [*overrides, *SMALL_CACHE, VERIFIES], stagger=1, prepare=drafting(expected))
    same(drafted, expected)
    assert drafted.tokens == expected.tokens
    assert drafted.stats["num_preempted"] > 0, "the cache was not small enough to preempt anybody"


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_drafts_change_no_bit_of_sampled_tokens_with_penalties_masks_and_banned_words(num_ranks: int) -> None:
    submits = submits_that_change_logits()
    expected = serve(1, submits, PLAIN)
    stops = {
        name: replace(submit.params, stop_token_ids=(expected.tokens[name][-5],))
        for submit in submits
        if int(name := submit.request_id) % 4 == 0
    }
    stops |= {submit.request_id: stops_when_it_may(submit, expected.tokens) for submit in submits[2::3]}
    submits = [
        msgspec.structs.replace(submit, params=stops.get(submit.request_id, submit.params)) for submit in submits
    ]
    stopped = serve(1, submits, PLAIN)
    drafted = serve(num_ranks, submits, PLAIN, prepare=drafting(expected))
    same(drafted, stopped)
    assert (drafted.tokens, drafted.finish) == (stopped.tokens, stopped.finish)
    assert "stop" in drafted.finish.values()


def stops_when_it_may(submit: Submit, tokens: dict[str, list[int]]) -> SamplingParams:
    """Returns parameters that change no logits but those of one stop id, up to the token that it then is."""
    output = tokens[submit.request_id]
    least = next(index for index in range(len(output) - 2, 0, -1) if output[index] not in output[:index])
    return replace(submit.params, min_new_tokens=least, stop_token_ids=(output[least],))


def test_drafts_change_no_bit_of_outputs_with_a_form() -> None:
    submits = submits_with_forms(16)
    expected = serve(1, submits, PLAIN, prepare=compile_at_once)
    drafted = serve(2, submits, PLAIN, prepare=partial(_drafts_with_forms, expected.tokens))
    same(drafted, expected)
    assert (drafted.tokens, drafted.finish) == (expected.tokens, expected.finish)


def test_stop_ids_end_a_form_behind_drafts_as_without() -> None:
    """They may come from the fourth digit on, in the middle of drafts."""
    form = Constraint("regex", "[0-9]{4,}")
    stops = tuple(range(300, 364))
    params = SamplingParams(20, temperature=1.0, constraint=form, stop_token_ids=stops)
    submits = submits_of(prompts_with_shared_beginnings(6, 2048, max_len=30), params)
    expected = serve(1, submits, PLAIN, prepare=compile_at_once)
    drafted = serve(1, submits, PLAIN, prepare=partial(_drafts_with_forms, expected.tokens))
    same(drafted, expected)
    assert (drafted.tokens, drafted.finish) == (expected.tokens, expected.finish)
    assert sum(output[-1] in stops for output in expected.tokens.values()) > 2


def test_drafts_that_forms_force_change_no_bit() -> None:
    submits = submits_with_forms(16, STARTS)
    expected = serve(1, submits, PLAIN, prepare=compile_at_once)
    for mode in ("lookup", "auto"):
        drafted = serve(2, submits, [*PLAIN, f"speculation.mode={mode}"], prepare=_some_are_forced, stagger=1)
        same(drafted, expected)
        assert (drafted.tokens, drafted.finish) == (expected.tokens, expected.finish)


def _some_are_forced(engine: Engine) -> None:
    """Fails where no draft that a form forces was right, of as many as there were."""
    compile_at_once(engine)
    run, speculator, mode = engine.run, engine.scheduler.speculator, engine.config.speculation.mode
    assert isinstance(speculator, Speculator)

    def checked() -> None:
        run()
        drafts, right = (each[FORM] for each in (speculator.counters.num_drafts, speculator.counters.num_accepted))
        assert mode == "auto" or 0 < right <= drafts, f"{right} drafts of {drafts} were right"

    engine.run = checked  # type: ignore[method-assign]


def _drafts_with_forms(expected: dict[str, list[int]], engine: Engine) -> None:
    compile_at_once(engine)
    drafts_of(expected, engine)


def test_drafts_change_no_log_probability() -> None:
    params = SamplingParams(max_new_tokens=16, temperature=0.8, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    submits = submits_of(prompts_with_shared_beginnings(12, 2048, max_len=30), params)
    expected = serve(1, submits, PLAIN)
    drafted = serve(2, submits, PLAIN, prepare=drafting(expected))
    for name in expected.tokens:
        assert numbers(drafted.logprobs[name]) == numbers(expected.logprobs[name])
        assert numbers(drafted.prompt_logprobs[name]) == numbers(expected.prompt_logprobs[name])


def numbers(blocks: list[LogprobBlock]) -> tuple[bytes, ...]:
    """Returns the numbers of all blocks of a request, as bits."""
    assert [block.start for block in blocks] == sorted(block.start for block in blocks)
    parts = ([getattr(block, name) for block in blocks] for name in ("ranks", "logprobs", "top_ids", "top"))
    return tuple(b"".join(part) for part in parts)


class AllRight(Oracle):
    """Three drafts of each request, all of them right."""

    def draft(self, requests: Sequence[Request], num_rows: int) -> list[tuple[int, ...]]:
        drafts = []
        for request in requests:
            known = len(request.output_ids)
            drafts.append(tuple(self._expected[request.request_id][known : known + min(3, num_rows)]))
            num_rows -= len(drafts[-1])
        return drafts


def _nan_behind(token_id: int, expected: dict[str, list[int]] | None, engine: Engine) -> None:
    """The row of this token is NaN. expected: tokens that are drafted, where any are"""
    poison_embedding(engine, math.nan, token_id)
    if expected is not None:
        engine.scheduler.speculator = AllRight(expected)


@pytest.mark.parametrize("logprobs", [None, 1], ids=["all rows at once", "in rounds"])
def test_a_row_that_draws_no_token_behind_a_right_draft_ends_its_request_alone(logprobs: int | None) -> None:
    """The row of the second draft is NaN, so there is no token for the third, whatever that is."""
    params = SamplingParams(max_new_tokens=8, temperature=1.0, logprobs=logprobs, ignore_eos=True)
    prompts = prompts_with_shared_beginnings(4, 2048, max_len=30)
    submits = submits_of(prompts, params)
    clean = serve(1, submits, PLAIN)
    token_id = clean.tokens["0"][2]
    assert sum(each.count(token_id) for each in (*prompts, *clean.tokens.values())) == 1, "others meet the faulty row"
    expected = serve(1, submits, PLAIN, prepare=partial(_nan_behind, token_id, None))
    drafted = serve(1, submits, PLAIN, prepare=partial(_nan_behind, token_id, clean.tokens))
    same(drafted, expected)
    assert "NaN or infinite at output token 3" in drafted.messages["0"]
    for name in ("tokens", "finish", "messages"):
        assert getattr(drafted, name) == getattr(expected, name)
    assert drafted.counters["num_failed"] == 1


def test_parameters_that_leave_no_token_behind_a_right_draft_end_their_request_alone() -> None:
    none_left = SamplingParams(max_new_tokens=30, temperature=0, allowed_token_ids=(5,), bad_words_ids=((5,) * 6,))
    submits = [Submit("none left", 0, [5] * 20, none_left, seed=0), *repetitive(2)]
    expected = serve(1, submits, PLAIN)
    drafted = serve(1, submits, [*PLAIN, "speculation.mode=lookup"], prepare=_some_are_right)
    same(drafted, expected)
    assert drafted.finish["none left"] == "error"
    for name in ("tokens", "finish", "messages"):
        assert getattr(drafted, name) == getattr(expected, name)


class OneTooMany(StepEvents):
    """A mutation: takes the row behind a wrong draft, too."""

    def _accept(
        self,
        request: Request,
        drafts: Sequence[int],
        drawn: Sequence[int],
        events: list[TokenEvent],
        index: int,
        *others: Any,
    ) -> None:
        came = [*events[index].token_ids[-1:], *drawn]
        wrong = next((place for place, each in enumerate(zip(drafts, came, strict=False)) if each[0] != each[1]), None)
        if wrong is not None:
            drafts = [*drafts[:wrong], came[wrong], *drafts[wrong + 1 :]]
        super()._accept(request, drafts, drawn, events, index, *others)


def _one_too_many(expected: dict[str, list[int]], engine: Engine) -> None:
    drafts_of(expected, engine)
    engine.events = OneTooMany(**vars(engine.events))


def test_accepting_one_draft_too_many_would_be_noticed() -> None:
    submits = requests_for("demo", "small")[:12]
    expected = serve(1, submits, PLAIN)
    mutated = serve(1, submits, PLAIN, prepare=partial(_one_too_many, expected.tokens))
    assert mutated.tokens != expected.tokens


def greedy_and_sampled(model: str, num: int) -> list[Submit]:
    """Returns requests with 1 to 60 prompt tokens and 4 to 20 output tokens, every other one sampled."""
    draw = random.Random(model)
    prompts = prompts_with_shared_beginnings(num, 2048 if model == "demo" else 256, max_len=60, seed=1)
    ways = [
        SamplingParams(draw.randint(4, 20), temperature=0, ignore_eos=True),
        SamplingParams(20, temperature=0.9, top_p=0.95, top_k=40),
        SamplingParams(16, temperature=0, repetition_penalty=1.2, presence_penalty=0.3, min_new_tokens=5),
        SamplingParams(20, temperature=1.2, min_p=0.01, frequency_penalty=0.2),
    ]
    return [
        msgspec.structs.replace(submit, params=ways[index % 4])
        for index, submit in enumerate(submits_of(prompts, ways[0], list(range(num))))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("model", ("demo", *TINY, *OTHER_FAMILIES))
def test_drafts_change_no_bit_of_5000_requests(model: str, tmp_path) -> None:
    """Of each family 3 x 96 requests, which is more than 5,000 over all of them."""
    overrides = [*PLAIN, *model_overrides(model, tmp_path)]
    submits = greedy_and_sampled(model, 96)
    expected = serve(1, submits, overrides)
    for num_ranks, stagger in ((1, 1), (2, None), (4, 2)):
        cache = SMALL_CACHE if num_ranks == 2 else []
        drafted = serve(num_ranks, submits, [*overrides, *cache, VERIFIES], stagger, prepare=drafting(expected))
        same(drafted, expected)
        assert (drafted.tokens, drafted.finish) == (expected.tokens, expected.finish)
    mutated = serve(2, submits, [*overrides, VERIFIES], prepare=partial(_one_too_many, expected.tokens))
    assert mutated.tokens != expected.tokens, "one draft too many would not be noticed"


def repetitive(num: int) -> list[Submit]:
    """Returns requests whose prompts repeat themselves and each other."""
    draw = random.Random(7)
    stems = [[draw.randrange(3, 2048) for _ in range(12)] for _ in range(3)]
    prompts = [draw.choice(stems) * 2 + draw.choice(stems)[:5] for _ in range(num)]
    params = SamplingParams(max_new_tokens=40, temperature=0, ignore_eos=True)
    return submits_of(prompts, params)


@pytest.mark.parametrize("mode", ["lookup", "auto"])
def test_drafts_from_text_change_no_bit(mode: str) -> None:
    submits = repetitive(12)
    expected = serve(1, submits, PLAIN)
    for overrides in (PLAIN, [*PLAIN, *SMALL_CACHE]):
        drafted = serve(2, submits, [*overrides, f"speculation.mode={mode}"], prepare=_some_are_right, stagger=2)
        same(drafted, expected)
        assert drafted.tokens == expected.tokens


def _some_are_right(engine: Engine) -> None:
    """Fails where no draft was right, of as many as there were."""
    run, speculator, mode = engine.run, engine.scheduler.speculator, engine.config.speculation.mode
    assert isinstance(speculator, Speculator)

    def checked() -> None:
        run()
        drafts, right = (
            sum(each.values()) for each in (speculator.counters.num_drafts, speculator.counters.num_accepted)
        )
        assert mode == "auto" or 0 < right < drafts, f"{right} drafts of {drafts} were right"
        assert not speculator._followers, "requests that have ended are remembered"

    engine.run = checked  # type: ignore[method-assign]
