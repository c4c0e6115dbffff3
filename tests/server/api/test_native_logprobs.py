"""Log probabilities of `/generate`, in SGLang's shapes."""

import asyncio
import json

import pytest

from moe_serve.engine.protocol.messages import Submit, TokenEvent, Tokens
from moe_serve.errors import RequestError
from moe_serve.server.api.native import parse_generate
from tests.server.fake_logprobs import prompt_block
from tests.server.served import Served, demo_tokenizer, in_event_loop, serving, until

THREE = {"max_new_tokens": 3, "sampling_seed": 10}


async def events(served: Served, **fields) -> list[dict]:
    response = await served.generate(stream=True, **fields)
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@in_event_loop
async def test_the_output_alone_has_its_tokens_numbers_and_nothing_of_the_prompt():
    async with serving() as served:
        answer = (await served.generate(input_ids=[5, 6, 7], sampling_params=THREE, return_logprob=True)).json()
        plain = (await served.generate(input_ids=[5, 6, 7], sampling_params=THREE)).json()
    meta = answer["meta_info"]
    ids = answer["output_ids"]
    assert meta["output_token_logprobs"] == [[-token / 8, token, None] for token in ids]
    assert meta["input_token_logprobs"] == []
    assert "output_top_logprobs" not in meta
    assert not [name for name in plain["meta_info"] if "logprob" in name]


@in_event_loop
async def test_prompt_top_and_named_tokens_come_with_their_texts():
    text = demo_tokenizer().decode
    fields = {
        "return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 2, "token_ids_logprob": [8, 4],
        "return_text_in_logprobs": True,
    }  # fmt: skip
    async with serving() as served:
        answer = (await served.generate(input_ids=[5, 60, 7, 80], sampling_params=THREE, **fields)).json()
    meta = answer["meta_info"]
    wanted = [[None, 60, text([60])], [-7 / 8, 7, text([7])], [-10.0, 80, text([80])]]
    assert meta["input_token_logprobs"] == wanted
    top = {token: [[-each / 8, each, text([each])] for each in (token, token + 1)] for token in (7, 80, 12, 13, 14)}
    assert meta["input_top_logprobs"] == [None, top[7], top[80]]
    assert meta["output_top_logprobs"] == [top[12], top[13], top[14]]
    named = [[-1.0, 8, text([8])], [-0.5, 4, text([4])]]
    assert meta["input_token_ids_logprobs"] == [None, named, named]
    assert meta["output_token_ids_logprobs"] == [named] * 3
    assert len(meta["output_token_logprobs"]) == 3


@in_event_loop
async def test_a_prompt_is_scored_without_an_output():
    async with serving() as served:
        params = {"max_new_tokens": 0, "sampling_seed": 8}
        fields = {"return_logprob": True, "logprob_start_len": 0}
        answer = (await served.generate(input_ids=[5, 6, 7], sampling_params=params, **fields)).json()
        fields["logprob_start_len"] = 2
        last = (await served.generate(input_ids=[5, 6, 7], sampling_params=params, **fields)).json()
    assert answer["meta_info"]["input_token_logprobs"] == [[None, 5, None], [-6 / 8, 6, None], [-7 / 8, 7, None]]
    assert answer["meta_info"]["output_token_logprobs"] == []
    assert last["meta_info"]["input_token_logprobs"] == [[None, 7, None]]


@in_event_loop
async def test_tokens_behind_a_stop_string_have_none():
    tokenizer = demo_tokenizer()
    ids = tokenizer.encode("one two three four five six")
    stop = tokenizer.decode(ids[2:4])
    async with serving(reply=lambda submit: ids, tokens_at_once=len(ids)) as served:
        params = {"max_new_tokens": len(ids), "stop": stop}
        answer = (await served.generate(input_ids=[5], sampling_params=params, return_logprob=True)).json()
    assert answer["meta_info"]["finish_reason"]["matched"] == stop
    assert len(answer["output_ids"]) < len(ids)
    assert [each[1] for each in answer["meta_info"]["output_token_logprobs"]] == answer["output_ids"]


@in_event_loop
async def test_a_stream_has_all_again_or_only_what_is_new():
    fields = {"input_ids": [5, 6], "sampling_params": THREE, "return_logprob": True, "logprob_start_len": 0}
    async with serving() as served:
        whole = await events(served, **fields)
        parts = await events(served, **fields, stream_options={"incremental": True})
    for event in whole:
        assert len(event["meta_info"]["output_token_logprobs"]) == len(event["output_ids"])
        assert len(event["meta_info"]["input_token_logprobs"]) == 2
    new = [each for event in parts for each in event["meta_info"]["output_token_logprobs"]]
    assert new == whole[-1]["meta_info"]["output_token_logprobs"]
    inputs = [event["meta_info"].get("input_token_logprobs") for event in parts]
    assert inputs == [whole[-1]["meta_info"]["input_token_logprobs"], *[None] * (len(parts) - 1)]


@in_event_loop
async def test_fields_are_one_for_all_prompts_or_one_for_each():
    fields = {
        "input_ids": [[5, 6], [7, 8], [9]], "sampling_params": THREE, "return_logprob": [True, False, True],
        "logprob_start_len": [0, 0, -1], "token_ids_logprob": [[3], None, [4, 5]],
    }  # fmt: skip
    async with serving() as served:
        answers = [answer["meta_info"] for answer in (await served.generate(**fields)).json()]
    assert [each[1] for each in answers[0]["input_token_logprobs"]] == [5, 6]
    assert "output_token_logprobs" not in answers[1]
    assert answers[2]["input_token_logprobs"] == []
    assert [each[1] for each in answers[2]["output_token_ids_logprobs"][0]] == [4, 5]


@in_event_loop
async def test_samples_share_the_log_probabilities_of_their_prompt():
    async with serving(1) as served:
        params = {**THREE, "n": 3}
        fields = {"input_ids": [5, 6, 7], "return_logprob": True, "logprob_start_len": 0}
        answers = (await served.generate(sampling_params=params, **fields)).json()
        streamed = await events(served, sampling_params=params, **fields)
        asked = [submit.params.prompt_logprobs for submit in served.workers[0].submitted]
    assert asked == [0, None, None] * 2, "the prompt is scored once"
    assert len({json.dumps(answer["meta_info"]["input_token_logprobs"]) for answer in answers}) == 1
    assert all(len(event["meta_info"]["input_token_logprobs"]) == 3 for event in streamed)
    assert {event["index"] for event in streamed} == {0, 1, 2}


@in_event_loop
async def test_the_best_of_several_outputs_are_the_likeliest_per_token():
    async with serving() as served:
        ten = {**THREE, "n": 2, "best_of": 5}
        best = (await served.generate(input_ids=[5], sampling_params=ten)).json()
        every = (await served.generate(input_ids=[5], sampling_params={**THREE, "n": 5}, return_logprob=True)).json()
        one = (await served.generate(input_ids=[5], sampling_params={**THREE, "best_of": 5})).json()
        refused = await served.generate(input_ids=[5], sampling_params=ten, stream=True)
    order = sorted(every, key=lambda answer: -sum(each[0] for each in answer["meta_info"]["output_token_logprobs"]))
    assert [answer["output_ids"] for answer in best] == [answer["output_ids"] for answer in order[:2]]
    assert one["output_ids"] == best[0]["output_ids"]
    assert not [name for name in one["meta_info"] if "logprob" in name], "nobody asked for them"
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "best_of"


@in_event_loop
async def test_a_prompt_that_is_scored_in_parts_goes_on_where_a_lost_connection_left_it():
    """No entry is lost or doubled; repeated parts are dropped, and parts with a gap before them cause a new attempt."""
    async with serving(1) as served:
        (worker,) = served.workers
        worker.go.clear()
        fields = {"return_logprob": True, "logprob_start_len": 0}
        call = served.generate(input_ids=[5, 6, 7, 8, 9], sampling_params=THREE, **fields)
        answer = asyncio.create_task(call)
        await until(lambda: bool(worker.submitted))
        submit = worker.submitted[0]
        block = prompt_block(submit, 0)
        assert block is not None

        def part(first: int, end: int) -> TokenEvent:
            whole = type(block)(first, block.ranks[4 * first : 4 * end], block.logprobs[4 * first : 4 * end])
            return TokenEvent(submit.request_id, 0, 0, [], prompt_logprobs=whole)

        worker.say(Tokens(0, 0, [part(0, 2), part(0, 2), part(1, 2), part(3, 4)]))
        await until(lambda: len(worker.submitted) == 2)
        again: Submit = worker.submitted[1]
        assert (again.attempt, again.num_prompt_logprobs, again.output_ids) == (1, 2, [])
        worker.go.set()
        entries = (await answer).json()["meta_info"]["input_token_logprobs"]
    assert entries == [[None, 5, None], *([-token / 8, token, None] for token in range(6, 10))]


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"top_logprobs_num": 3}, "top_logprobs_num", "return_logprob is not true"),
        ({"token_ids_logprob": [3]}, "token_ids_logprob", "return_logprob is not true"),
        ({"return_logprob": 1}, "return_logprob", "true or false"),
        ({"return_logprob": True, "logprob_start_len": -2}, "logprob_start_len", "-1"),
        ({"return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num", "at least 0"),
        ({"return_logprob": True, "token_ids_logprob": list(range(65))}, "token_ids_logprob", "at most 64"),
        ({"return_logprob": True, "token_ids_logprob": [[1], [2]]}, "token_ids_logprob", "2 lists for 1 prompts"),
        ({"return_logprob": True, "token_ids_logprob": [-1]}, "token_ids_logprob[0]", "at least 0"),
        ({"sampling_params": {"n": 3, "best_of": 2}}, "sampling_params.best_of", "n is 3"),
        ({"sampling_params": {"best_of": 0}}, "sampling_params.best_of", "1 to 128"),
    ],
)
def test_a_wrong_field_is_named(fields, field, words):
    with pytest.raises(RequestError, match=words) as caught:
        parse_generate(json.dumps({"text": "a", **fields}).encode(), 4)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"top_logprobs_num": 21}, "top_logprobs_num", "engine.max_logprobs"),
        ({"logprob_start_len": 4}, "logprob_start_len", "the prompt has 4 tokens"),
        ({"token_ids_logprob": [2048]}, "token_ids_logprob", "outside the vocabulary"),
    ],
)
@in_event_loop
async def test_limits_are_told_in_sglangs_words(fields, field, words):
    async with serving() as served:
        response = await served.generate(input_ids=[5, 6, 7, 8], return_logprob=True, **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == field
    assert words in error["message"]
    assert field in error["message"]
