"""Log probabilities of outputs and prompts: the same bits however requests are served, none lost, none twice."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from moe_serve.attention_dp.batch import ForwardBatch, PromptRows
from moe_serve.attention_dp.request import Request, SamplingParams
from moe_serve.attention_dp.scheduler import ScheduledChunk
from moe_serve.engine.output import row_logprobs
from moe_serve.engine.output.logprobs import TokenLogprobs
from moe_serve.engine.output.row_logprobs import LogprobScorer
from moe_serve.engine.protocol.messages import LogprobBlock, Submit
from tests.engine.offline import Served, prompts_with_shared_beginnings, serve, submits_of
from tests.engine.scored import Numbers, collected
from tests.engine.test_identity import BY_TORCH, PLAIN, TWO_THREADS, WAYS
from tests.tolerance import LOGPROB

BASE = SamplingParams(max_new_tokens=20, temperature=0.8, ignore_eos=True)
KINDS = [
    replace(BASE, logprobs=5, prompt_logprobs=3),
    replace(BASE, prompt_logprobs=0, prompt_logprobs_start=20, logprob_token_ids=(3, 2047)),
    BASE,
    replace(BASE, logprobs=0, logprob_token_ids=(9,), repetition_penalty=1.5, logit_bias={7: 3.0}, min_new_tokens=3),
    replace(BASE, logprobs=20, prompt_logprobs=20, prompt_logprobs_start=7),
]


def asking(count: int) -> list[Submit]:
    submits = submits_of(prompts_with_shared_beginnings(count, 2048, max_len=60), BASE)
    kinds = [KINDS[i % len(KINDS)] for i in range(count)]
    return [
        Submit(submit.request_id, 0, submit.prompt_ids, kind, submit.seed)
        for submit, kind in zip(submits, kinds, strict=True)
    ]


def numbers_of(served: Served, submits: list[Submit]) -> dict[str, tuple[Numbers, Numbers]]:
    """Returns the entries of output and prompt of each request, as many as it asks for."""
    found = {}
    for submit in submits:
        params, name, num_prompt = submit.params, submit.request_id, len(submit.prompt_ids)
        output, prompt = served.logprobs.get(name, []), served.prompt_logprobs.get(name, [])
        assert (params.logprobs is None) <= (not output)
        assert (params.prompt_logprobs is None) <= (not prompt)
        of_output = collected(params, params.logprobs, output) if params.logprobs is not None else []
        of_prompt = [] if params.prompt_logprobs is None else collected(params, params.prompt_logprobs, prompt)
        assert len(of_output) == (0 if params.logprobs is None else len(served.tokens[name]))
        wanted = 0 if params.prompt_logprobs is None else max(0, num_prompt - 1 - params.prompt_logprobs_start)
        assert len(of_prompt) == wanted
        found[name] = of_output, of_prompt
    return found


@pytest.fixture(scope="module")
def reference() -> tuple[list[Submit], Served]:
    submits = asking(40)
    return submits, serve(1, submits, PLAIN)


@pytest.mark.parametrize("way", WAYS)
def test_they_do_not_depend_on_how_requests_are_served(reference: tuple[list[Submit], Served], way: str) -> None:
    submits, alone = reference
    num_ranks, overrides, stagger = WAYS[way]
    served = serve(num_ranks, submits, [*PLAIN, *overrides, *TWO_THREADS], stagger)
    assert served.tokens == alone.tokens
    assert numbers_of(served, submits) == numbers_of(alone, submits)
    if "preempted" in way:
        assert served.stats["num_preempted"] > 0
        assert served.stats["num_cached_prompt_tokens"] > 0


def test_those_of_an_output_are_those_of_the_same_text_as_a_prompt(reference: tuple[list[Submit], Served]) -> None:
    """So they are the model's own, whatever penalties, biases and temperature made of the logits afterwards."""
    submits, alone = reference
    numbers = numbers_of(alone, submits)
    score = SamplingParams(max_new_tokens=1, prompt_logprobs=0, logprob_token_ids=(9,))
    chosen = [submit for submit in submits if submit.params.logit_bias]
    texts = [submit.prompt_ids + alone.tokens[submit.request_id] for submit in chosen]
    scored = serve(1, submits_of(texts, score), PLAIN)
    for index, submit in enumerate(chosen):
        entries = collected(score, 0, scored.prompt_logprobs[str(index)])
        assert entries[len(submit.prompt_ids) - 1 :] == numbers[submit.request_id][0]


def test_asking_changes_no_token(reference: tuple[list[Submit], Served]) -> None:
    submits, alone = reference
    silent = {"logprobs": None, "prompt_logprobs": None, "prompt_logprobs_start": 0, "logprob_token_ids": ()}
    plain = [Submit(each.request_id, 0, each.prompt_ids, replace(each.params, **silent), each.seed) for each in submits]
    served = serve(1, plain, PLAIN)
    assert served.tokens == alone.tokens
    assert not served.logprobs
    assert not served.prompt_logprobs


def test_batch_invariant_by_torch_holds_the_same() -> None:
    submits = asking(10)
    alone = serve(1, submits, [*PLAIN, *BY_TORCH])
    num_ranks, overrides, stagger = WAYS["preempted, cached prefixes, chunks, all at once"]
    served = serve(num_ranks, submits, [*PLAIN, *BY_TORCH, *overrides], stagger)
    assert numbers_of(served, submits) == numbers_of(alone, submits)


def test_a_request_that_is_sent_again_goes_on_where_it_stopped(reference: tuple[list[Submit], Served]) -> None:
    """As after the loss of a rank in a prefill, between two tokens, and between a prompt and its first token."""
    submits, alone = reference
    whole = numbers_of(alone, submits)
    again, expected = [], {}
    for index, submit in enumerate(submits[::5]):  # those of the first kind
        of_output, of_prompt = whole[submit.request_id]
        num_output, num_prompt = [(0, len(of_prompt) // 2), (3, len(of_prompt)), (0, len(of_prompt))][index % 3]
        tokens = alone.tokens[submit.request_id]
        name = submit.request_id
        again.append(
            Submit(name, 1, submit.prompt_ids, submit.params, submit.seed, tokens[:num_output], "", num_prompt)
        )
        expected[name] = of_output[num_output:], of_prompt[num_prompt:]
    served = serve(1, again, [*PLAIN, "engine.max_batch_tokens=24", "engine.max_running_requests=16"])
    for submit in again:
        params, name = submit.params, submit.request_id
        of_output = collected(params, params.logprobs, served.logprobs[name], len(submit.output_ids))
        blocks = served.prompt_logprobs.get(name, [])
        assert (of_output, collected(params, params.prompt_logprobs, blocks, submit.num_prompt_logprobs)) == expected[
            name
        ]


def test_outputs_of_one_prompt_compute_it_once() -> None:
    """Blocks of 16: the first 5 of 90 tokens are shared, and each output computes its own last block."""
    prompt = list(range(100, 190))
    submits = submits_of([prompt] * 4, replace(BASE, prompt_logprobs=0))
    submits[1:] = [Submit(each.request_id, 0, prompt, BASE, each.seed) for each in submits[1:]]
    served = serve(1, submits, ["engine.max_batch_tokens=64", "cache.block_size=16"])
    assert served.stats["num_prompt_tokens"] == 4 * 90
    assert served.stats["num_cached_prompt_tokens"] == 3 * 80
    assert len(served.tokens) == 4
    assert sum(len(block.ranks) // 4 for block in served.prompt_logprobs["0"]) == 89


@pytest.mark.parametrize("tile_rows", [1, 2, 7, 100])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_prompt_is_scored_in_tiles_and_a_row_that_is_not_finite_is_told(
    tile_rows: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(30, 50, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(prompt_logprobs=3, prompt_logprobs_start=4, logprob_token_ids=(7,))
    request = Request("a", 0, list(range(20)), [], params, 0, logprobs_from=6)
    chunks = [ScheduledChunk(request, 0, 2, False), ScheduledChunk(request, 5, 12, False)]
    batch = cast(ForwardBatch, SimpleNamespace(prompt_rows=(PromptRows(1, 6, range(10, 21)),)))
    sizes = []

    def project(rows: range) -> torch.Tensor:
        sizes.append(len(rows))
        return logits[rows.start : rows.stop]

    monkeypatch.setattr(row_logprobs, "TILE_ELEMENTS", 50 * tile_rows + 49)
    blocks, not_finite = LogprobScorer(compiled).of_prompts(batch, chunks, project, 50)
    assert max(sizes) == min(tile_rows, 11)
    assert (list(blocks), not_finite, blocks[1].start, request.logprobs_from) == ([1], set(), 2, 17)
    numbers = collected(params, 3, [blocks[1]], 2)
    truth = logits[10:21].double().log_softmax(dim=1)
    assert [token for token, _ in (each[2][0] for each in numbers)] == truth.argmax(dim=1).tolist()
    own = truth[torch.arange(11), torch.arange(7, 18)].tolist()
    assert [each[0] for each in numbers] == pytest.approx(own, rel=LOGPROB, abs=LOGPROB)
    assert [each[3][0] for each in numbers] == pytest.approx(truth[:, 7].tolist(), rel=LOGPROB, abs=LOGPROB)
    logits[15, 3], request.logprobs_from = torch.nan, 6
    assert LogprobScorer(compiled).of_prompts(batch, chunks, project, 50) == ({}, {1})
    assert request.logprobs_from == 6


def test_entries_behind_the_end_and_repeated_ones_are_dropped() -> None:
    whole = LogprobBlock(0, b"\1\0\0\0\2\0\0\0\3\0\0\0", bytes(24), bytes(12), bytes(12))
    entries = TokenLogprobs(1, [8])
    entries.add(whole)
    entries.add(whole)
    assert len(entries) == 3
    entries.cut(1)
    assert (len(entries), entries.rank(0), len(entries.top(0)), entries.of_ids(0)[0].token_id) == (1, 1, 1, 8)
    entries.add(whole)
    assert [entries.rank(i) for i in range(3)] == [1, 2, 3]
    with pytest.raises(AssertionError, match="missing"):
        entries.add(LogprobBlock(4, b"", b""))
