"""What parameters change in logits: as the formulas over the whole vocabulary, and as transformers' processors."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from moe_serve.attention_dp.constraint import Constraint, FormStart
from moe_serve.attention_dp.request import Request, SamplingParams
from moe_serve.engine.output.sampler import RequestChanges, changes_logits, mask_of
from moe_serve.kernels.sampling import LogitChanges, change_logits
from moe_serve.structured.grammar import Matcher
from moe_serve.structured.vocabulary import Vocabulary

VOCAB = 40


def request(params: SamplingParams, prompt_ids: list[int], output_ids: list[int]) -> Request:
    return Request("r", 0, prompt_ids, output_ids, params, 0)


def changed(logits: Tensor, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]) -> Tensor:
    logits = logits.clone()[None]
    change_logits(logits, [RequestChanges(request(params, prompt_ids, output_ids), [], len(logits[0])).now()])
    return logits[0]


def by_formula(logits: Tensor, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]) -> Tensor:
    """Every step over the whole vocabulary, in vLLM's order."""
    x = logits.clone()
    for token, bias in params.logit_bias.items():
        x[token] += bias
    counts = torch.bincount(torch.tensor(output_ids, dtype=torch.int64), minlength=VOCAB)
    occurs = counts + torch.bincount(torch.tensor(prompt_ids, dtype=torch.int64), minlength=VOCAB) > 0
    repetition = torch.where(occurs, torch.tensor(params.repetition_penalty), torch.tensor(1.0))
    x = torch.where(x > 0, x / repetition, x * repetition)
    x = x - torch.tensor(params.frequency_penalty) * counts
    return x - torch.tensor(params.presence_penalty) * (counts > 0)


ids = st.lists(st.integers(0, VOCAB - 1), max_size=60)


@settings(max_examples=100, deadline=None)
@given(
    prompt_ids=ids,
    output_ids=ids,
    repetition=st.sampled_from([1.0, 1.3, 0.7, 100.0, 0.01]),
    frequency=st.sampled_from([0.0, 0.4, -2.0]),
    presence=st.sampled_from([0.0, 1.1, -0.3]),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 0.7, 100.0]), max_size=5),
    seed=st.integers(0, 1000),
)
def test_penalties_and_bias_are_those_of_the_formulas_to_the_last_bit(
    prompt_ids, output_ids, repetition, frequency, presence, bias, seed
):
    logits = 5 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    params = SamplingParams(
        repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence, logit_bias=bias
    )
    wanted = by_formula(logits, params, prompt_ids, output_ids)
    assert torch.equal(changed(logits, params, prompt_ids, output_ids), wanted)


def with_transformers(logits: Tensor, processor: LogitsProcessor, token_ids: list[int]) -> Tensor:
    return processor(torch.tensor([token_ids], dtype=torch.int64), logits[None].clone())[0]


@pytest.mark.parametrize("penalty", [1.2, 0.8, 3.0])
def test_repetition_penalty_is_that_of_transformers(penalty):
    logits = 5 * torch.randn(1000, generator=torch.Generator().manual_seed(0))
    prompt_ids, output_ids = [3, 5, 5, 999, 0], [7, 3, 7]
    wanted = with_transformers(logits, RepetitionPenaltyLogitsProcessor(penalty), prompt_ids + output_ids)
    assert torch.equal(changed(logits, SamplingParams(repetition_penalty=penalty), prompt_ids, output_ids), wanted)


def test_logit_bias_is_that_of_transformers():
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    bias = {5: 2.5, 0: -100.0, 999: 0.125}
    wanted = with_transformers(logits, SequenceBiasLogitsProcessor([[[i], b] for i, b in bias.items()]), [1, 2])
    assert torch.equal(changed(logits, SamplingParams(logit_bias=bias), [1, 2], []), wanted)


WORDS = ((5,), (7, 3), (7, 3, 9), (2, 2, 2, 4), (39,), (3, 0))


@pytest.mark.parametrize(
    "output_ids", [[], [7], [3], [7, 3], [1, 7, 3], [2, 2], [2, 2, 2], [2, 2, 2, 2], [8, 2, 2, 3], [7, 3, 9]], ids=str
)
def test_bad_words_are_those_of_transformers_where_the_output_is_all_there_is(output_ids):
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2))
    wanted = with_transformers(logits, NoBadWordsLogitsProcessor([list(word) for word in WORDS]), output_ids or [30])
    assert torch.equal(changed(logits, SamplingParams(bad_words_ids=WORDS), [], output_ids), wanted)


def test_a_bad_word_that_the_prompt_begins_is_not_banned():
    logits = torch.zeros(VOCAB)
    params = SamplingParams(bad_words_ids=((7, 3),))
    assert changed(logits, params, [7], []).isfinite().all(), "as in vLLM: bad words are those of the output"
    assert changed(logits, params, [7], [7])[3] == -torch.inf


def test_allowed_token_ids_are_those_of_transformers():
    for vocab in (1, 31, 32, 33, 1000):
        allowed = [0, 30, 31, 32, 40, 999, 999]
        within = [token for token in allowed if token < vocab]
        logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3))
        wanted = with_transformers(logits, PrefixConstrainedLogitsProcessor(lambda *_, ids=within: ids, 1), [0])
        assert torch.equal(changed(logits, SamplingParams(allowed_token_ids=tuple(allowed)), [], []), wanted)


def test_min_new_tokens_is_that_of_transformers():
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(4))
    for num_output in (0, 2, 3):
        params, output_ids = SamplingParams(min_new_tokens=3, stop_token_ids=(9, 4)), [1] * num_output
        wanted = with_transformers(logits, MinNewTokensLengthLogitsProcessor(2, 3, [9, 4], "cpu"), [1, 2, *output_ids])
        assert torch.equal(changed(logits, params, [1, 2], output_ids), wanted)


PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2, "logit_bias": {3: 1.0}}
EVERYTHING = SamplingParams(
    **PENALTIES,
    min_new_tokens=5,
    stop_token_ids=(9,),
    bad_words_ids=((4,), *((i, j) for i in range(9) for j in (1, 6))),
)


def test_counts_kept_from_token_to_token_are_those_counted_anew():
    draw = random.Random(0)
    prompt_ids = [draw.randrange(500) for _ in range(50)]
    num_banned = set()
    growing = request(EVERYTHING, prompt_ids, [])
    kept = RequestChanges(growing, [2], 500)
    for _ in range(300):
        after, anew = kept.now(), RequestChanges(request(EVERYTHING, prompt_ids, growing.output_ids), [2], 500).now()
        assert after is not None
        assert anew is not None
        np.testing.assert_array_equal(np.sort(after.edits, order="token"), np.sort(anew.edits, order="token"))
        np.testing.assert_array_equal(after.banned, anew.banned)
        num_banned.add(len(after.banned))
        growing.output_ids.append(draw.choice([3, draw.randrange(500)]))
    assert num_banned == {1, 3, 5}, "one word, two more by the last token, two ids while it may not end"


def test_ids_beyond_the_logits_change_nothing():
    beyond = {"logit_bias": {70: 1.0}, "bad_words_ids": ((50,), (4, 51)), "allowed_token_ids": (-1, 3, 45)}
    params = SamplingParams(**(PENALTIES | beyond), min_new_tokens=9, stop_token_ids=(99,))
    changes = RequestChanges(request(params, [60, 3, 2**40], [50, 4, -1]), [VOCAB], VOCAB).now()
    assert changes is not None
    assert sorted(changes.edits["token"].tolist()) == [3, 4]
    assert changes.banned.size == 0
    assert changes.mask is not None
    assert changes.mask.tolist() == [1 << 3, 0]


def test_a_request_without_such_parameters_changes_nothing():
    assert not changes_logits(request(SamplingParams(stop_token_ids=(3,)), [1], []))
    early, later = (request(SamplingParams(min_new_tokens=2), [1], output) for output in ([5], [5, 5]))
    assert changes_logits(early)
    assert not changes_logits(later)
    assert RequestChanges(later, [3], VOCAB).now() is None


FORM_VOCAB = 64  # with the tokens around the form


class _Form:
    """In the place of a grammar: tokens below 40, as many as there are."""

    must_end, may_end = False, True

    def __init__(self) -> None:
        self.taken: list[int] = []

    def copy(self, name: str) -> "_Form":
        return self

    def advance(self, token_ids: list[int]) -> None:
        self.taken += token_ids

    def mask(self) -> np.ndarray:
        return mask_of(range(40), FORM_VOCAB)


@pytest.mark.parametrize(
    "start, output_ids, in_form",
    [
        (None, [5, 6], [5, 6]),
        (FormStart(((50,),)), [5, 50, 6, 50], [6, 50]),
        (FormStart(((50, 51), (50,))), [50, 50, 51, 51, 50], []),
        (FormStart(((50, 51), (50,))), [50, 51, 7], None),
        (FormStart(((50, 51), (51,))), [50, 51, 7], None),
        (FormStart(((50, 51),), may_end=True), [51, 50], None),
        (FormStart(((50,),), opens=52), [], []),
        (FormStart(((50,),), opens=52), [5, 50, 6], [5, 50, 6]),
        (FormStart(((50,),), opens=52), [52, 5], None),
        (FormStart(((50,),), opens=52), [52, 5, 50, 6], [6]),
    ],
)
def test_a_form_holds_from_its_start_and_the_end_waits_for_it(start, output_ids, in_form):
    """The same however the output has come: token by token, or after a preemption."""
    asked = request(SamplingParams(constraint=Constraint("regex", "x", start)), [1], [])
    grown, anew = _Form(), _Form()
    asked.matcher = grown
    kept = RequestChanges(asked, [39], FORM_VOCAB)
    kept.now()
    for token in output_ids:
        asked.output_ids.append(token)
        changes = kept.now()
    asked.matcher = anew
    again = RequestChanges(asked, [39], FORM_VOCAB).now()
    changes = kept.now()
    if in_form is None:
        assert (anew.taken, grown.taken) == ([], [])
        for each in (changes, again):
            if start.may_end:
                assert each is None
            else:
                assert each.mask is None
                assert each.banned.tolist() == [39]
        return
    assert anew.taken == grown.taken == in_form
    allowed = [*range(40), *([52] if start is not None and start.opens and not output_ids else [])]
    for each in (changes, again):
        assert each.mask.tolist() == mask_of(allowed, FORM_VOCAB).tolist()


@pytest.mark.parametrize("output", ["abacbaabc", "abacbabcc", "acc", "abacbaaba"])
@pytest.mark.parametrize("drafts", ["a", "ab", "abacbaab", "abacc", "abx"])
def test_masks_behind_drafts_are_those_of_the_output_anew_also_where_drafts_were_wrong(drafts: str, output: str):
    """Of drafts those behind the first that has not the form are left out; what comes later may differ from them."""
    letters = "abcx"
    constraint = Constraint("regex", "(a[abc]|b)*c?")
    compiled = Matcher.compiled(constraint, Vocabulary([*(each.encode() for each in letters), None], [4]))
    params = SamplingParams(50, constraint=constraint, stop_token_ids=(3,))

    def asking(output_ids: list[int]) -> RequestChanges:
        made = request(params, [0], output_ids)
        made.matcher = compiled
        return RequestChanges(made, [4], 5)

    def mask(changes: LogitChanges | None) -> list[int]:
        assert changes is not None
        assert changes.mask is not None
        return changes.mask.tolist()

    ids, growing = [letters.index(each) for each in drafts], [0]
    changes = asking(growing)
    behind = [mask(each) for each in changes.behind(ids)]
    assert behind == [mask(asking(ids[: number + 1]).now()) for number in range(len(drafts.rstrip("x")))]
    for letter in output[1:]:
        growing.append(letters.index(letter))
        assert mask(changes.now()) == mask(asking(list(growing)).now())
