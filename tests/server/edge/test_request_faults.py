"""Requests that broke something once, deadlines, and increments in streams. Over real sockets, without a model."""

import asyncio
import itertools

import pytest

from moe_serve.errors import RequestError
from moe_serve.server.api.native import parse_generate
from tests.server.api.test_generate import events, says
from tests.server.served import in_event_loop, serving, until

FIVE = {"max_new_tokens": 5, "sampling_seed": 10}


@in_event_loop
async def test_no_new_tokens_computes_the_prompt_and_answers_with_none():
    async with serving() as served:
        answer = (await served.generate(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 0})).json()
        (submit,) = [submit for worker in served.workers for submit in worker.submitted]
    assert submit.params.max_new_tokens == 1
    assert (answer["text"], answer["output_ids"]) == ("", [])
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert answer["meta_info"]["cached_tokens"] == 3


@in_event_loop
async def test_an_rid_is_taken_while_its_request_is_open_and_free_again_after_it():
    async with serving() as served:
        served.hold()
        first = asyncio.create_task(served.generate(input_ids=[7], rid="mine", sampling_params=FIVE))
        await until(lambda: len(served.bridge.book) == 1)
        second = await served.generate(input_ids=[7], rid="mine")
        both = await served.generate(input_ids=[[7], [8]], rid=["other", "other"])
        served.go_on()
        assert (await first).status_code == 200
        again = await served.generate(input_ids=[7], rid="mine", sampling_params=FIVE)
    for refused in (second, both):
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "rid"
    assert again.status_code == 200


def test_input_embeds_alone_are_named():
    with pytest.raises(RequestError, match=r"input_embeds .* is not supported; send text or input_ids"):
        parse_generate(b'{"input_embeds": [[0.5]]}', 1)


@in_event_loop
async def test_increments_add_up_to_the_cumulative_stream():
    async with serving(reply=says("one two 漢字 three")) as served:
        *whole, _ = await events(served, text="x")
        *parts, _ = await events(served, text="x", stream_options={"incremental": True})
    assert "".join(part["text"] for part in parts) == whole[-1]["text"] == "one two 漢字 three"
    assert list(itertools.chain(*(part["output_ids"] for part in parts))) == whole[-1]["output_ids"]
    assert parts[-1]["meta_info"]["finish_reason"] == whole[-1]["meta_info"]["finish_reason"]
    assert len(parts[-1]["output_ids"]) < len(whole[-1]["output_ids"])


@in_event_loop
async def test_a_server_may_send_increments_unless_a_request_wants_all():
    async with serving(2, "server.incremental_stream_output=true") as served:
        *parts, _ = await events(served, input_ids=[7], sampling_params=FIVE)
        *whole, _ = await events(served, input_ids=[7], sampling_params=FIVE, stream_options={"incremental": False})
    assert (
        list(itertools.chain(*(part["output_ids"] for part in parts)))
        == whole[-1]["output_ids"]
        == [12, 13, 14, 15, 16]
    )


@in_event_loop
async def test_a_request_beyond_its_timeout_keeps_what_it_has_and_frees_its_rank():
    async with serving(2, round_s=0.02) as served:
        params = {"max_new_tokens": 200, "sampling_seed": 10}
        answer = (await served.generate(input_ids=[7], timeout=0.3, sampling_params=params)).json()
        await until(lambda: any(worker.aborted for worker in served.workers))
        wrong = await served.generate(input_ids=[7], timeout=0)
    assert answer["output_ids"] == [12 + i for i in range(len(answer["output_ids"]))]
    assert 0 < len(answer["output_ids"]) < 200
    reason = {"type": "abort", "message": "the request took longer than 0.3 s"}
    assert answer["meta_info"]["finish_reason"] == reason
    assert wrong.json()["error"]["param"] == "timeout"


@in_event_loop
async def test_a_request_without_a_token_within_its_own_timeout_gets_a_408():
    async with serving(1) as served:
        served.workers[0].go.clear()
        answer = await served.generate(input_ids=[7], timeout=1e-320)
        assert (answer.status_code, answer.json()["error"]["param"]) == (408, "timeout")


@in_event_loop
async def test_a_request_that_waits_too_long_gets_a_503_and_those_on_a_rank_go_on():
    async with serving(1, "engine.max_running_requests=1", "server.queue_deadline_s=0.2") as served:
        served.workers[0].go.clear()
        calls = [asyncio.create_task(served.generate(input_ids=[7], sampling_params=FIVE)) for _ in range(5)]
        await until(lambda: sum(call.done() for call in calls) >= 2)
        await asyncio.sleep(0.3)  # long enough for a third that should stay
        late = [call for call in calls if call.done()]
        assert [call.result().status_code for call in late] == [503, 503]
        assert "server.queue_deadline_s = 0.2 s" in late[0].result().text
        served.workers[0].go.set()
        assert sorted([(await call).status_code for call in calls]) == [200] * 3 + [503] * 2
