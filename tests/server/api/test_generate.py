"""`/generate` answers as SGLang does, in JSON and in streams, and a client that leaves frees its requests.

Over real sockets, without a model.
"""

import asyncio
import itertools
import json
import os
import threading

import httpx
import msgspec
import pytest

from moe_serve.models.tokenizer import Tokenizer
from tests.server.fake_worker import LIMITS
from tests.server.served import Served, demo_tokenizer, in_event_loop, serving, until

TEXT = demo_tokenizer()
FIVE = {"max_new_tokens": 5, "sampling_seed": 10}


def says(text: str):
    """A reply of fake ranks: this text, then the end of the sequence."""
    ids = [*TEXT.encode(text), 1]
    return lambda submit: ids


async def events(served: Served, **fields) -> list[dict | str]:
    """The events of a streamed call."""
    found = []
    async with served.client.stream("POST", "/generate", json={"stream": True, **fields}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line:
                assert line.startswith("data: ")
                found.append("[DONE]" if line == "data: [DONE]" else json.loads(line[6:]))
    return found


@in_event_loop
async def test_a_text_prompt_gives_sglangs_object():
    async with serving(reply=says("Hello — 漢字")) as served:
        response = await served.generate(text="def f", rid="my-name")
    answer = response.json()
    assert response.status_code == 200
    assert answer["text"] == "Hello — 漢字"
    assert answer["output_ids"] == [*TEXT.encode("Hello — 漢字"), 1]
    meta = answer["meta_info"]
    assert meta.pop("e2e_latency") > 0
    assert meta.pop("dp_rank") in (0, 1)
    assert meta == {
        "id": "my-name",
        "finish_reason": {"type": "stop", "matched": 1},
        "prompt_tokens": len(TEXT.encode("def f")),
        "completion_tokens": len(answer["output_ids"]),
        "cached_tokens": 3,
        "weight_version": "default",
    }


@in_event_loop
async def test_ids_in_give_ids_and_their_length():
    async with serving() as served:
        answer = (await served.generate(input_ids=[5, 6], sampling_params=FIVE)).json()
    assert answer["output_ids"] == [12, 13, 14, 15, 16]
    assert answer["text"] == TEXT.decode([12, 13, 14, 15, 16])
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 5}


@in_event_loop
async def test_without_a_tokenizer_only_ids_are_filled():
    async with serving(2, "model.skip_tokenizer=true", tokenizer=False) as served:
        answer = (await served.generate(input_ids=[5], sampling_params=FIVE)).json()
        text = await served.generate(text="a")
        stop = await served.generate(input_ids=[5], sampling_params={"stop": "a"})
    assert (answer["text"], answer["output_ids"]) == ("", [12, 13, 14, 15, 16])
    assert text.status_code == stop.status_code == 400
    assert "no tokenizer.json" in text.json()["error"]["message"]
    assert "input_ids" in text.json()["error"]["message"]
    assert "stop_token_ids" in stop.json()["error"]["message"]


@in_event_loop
async def test_a_batch_answers_in_its_order():
    seeds = [100, 7, 50]
    async with serving() as served:
        answers = (
            await served.generate(
                input_ids=[[1], [2, 3], [4]],
                sampling_params=[{"max_new_tokens": n + 1, "sampling_seed": seed} for n, seed in enumerate(seeds)],
                rid=["a", "b", "c"],
            )
        ).json()
    assert [answer["output_ids"] for answer in answers] == [[102], [9, 10], [52, 53, 54]]
    assert [answer["meta_info"]["id"] for answer in answers] == ["a", "b", "c"]


@in_event_loop
async def test_several_samples_have_derived_seeds_and_the_first_is_the_plain_request():
    async with serving() as served:
        plain = (await served.generate(input_ids=[1], sampling_params=FIVE)).json()
        answers = (await served.generate(input_ids=[1], sampling_params=FIVE | {"n": 3}, rid="x")).json()
        again = (await served.generate(input_ids=[1], sampling_params=FIVE | {"n": 3})).json()
    assert [answer["meta_info"]["id"] for answer in answers] == ["x-0", "x-1", "x-2"]
    outputs = [answer["output_ids"] for answer in answers]
    assert outputs[0] == plain["output_ids"]
    assert len({tuple(output) for output in outputs}) == 3
    assert [answer["output_ids"] for answer in again] == outputs


@in_event_loop
async def test_several_samples_go_to_one_rank_which_computes_their_prompt_once():
    async with serving(3) as served:
        params = {"n": 5, "max_new_tokens": 10}
        await served.generate(input_ids=list(range(2, 180)), sampling_params=params)
        await served.generate(input_ids=[[5, 6]] * 6, sampling_params={"max_new_tokens": 10})
    counts = sorted(len([each for each in w.submitted if len(each.prompt_ids) > 2]) for w in served.workers)
    assert counts == [0, 0, 5]
    assert all(any(len(each.prompt_ids) == 2 for each in w.submitted) for w in served.workers), "others spread"


@in_event_loop
async def test_a_missing_seed_is_drawn_by_the_front_end():
    async with serving() as served:
        await served.generate(input_ids=[[1], [1]], sampling_params={"max_new_tokens": 1})
        seeds = [submit.seed for worker in served.workers for submit in worker.submitted]
    assert len(set(seeds)) == 2
    assert all(0 <= seed < 2**63 for seed in seeds)


@in_event_loop
async def test_a_stream_has_cumulative_text_and_ends_with_done():
    async with serving(reply=says("one two 漢字 three")) as served:
        found = await events(served, text="x")
    *chunks, end = found
    texts = [chunk["text"] for chunk in chunks]
    assert end == "[DONE]"
    assert len(chunks) > 3
    assert texts[-1] == "one two 漢字 three"
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert all("\ufffd" not in text for text in texts)
    assert [chunk["meta_info"]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": 1}
    assert "index" not in chunks[0]


@in_event_loop
async def test_a_batch_stream_says_which_prompt_each_event_belongs_to():
    async with serving() as served:
        found = await events(served, input_ids=[[1], [2]], sampling_params=FIVE)
    last = {chunk["index"]: chunk for chunk in found[:-1]}
    assert sorted(last) == [0, 1]
    assert all(chunk["output_ids"] == [12, 13, 14, 15, 16] for chunk in last.values())


@in_event_loop
async def test_a_stop_string_ends_the_text_before_it_and_frees_the_rank():
    async with serving(reply=says("one two three four five six")) as served:
        answer = (await served.generate(text="x", sampling_params={"stop": ["o thr", "zzz"]})).json()
        await until(lambda: any(worker.aborted for worker in served.workers))
        assert len(served.bridge.book) == 0
    assert answer["text"] == "one tw"
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "o thr"}
    assert (
        len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"] < len(TEXT.encode("one two three four"))
    )


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
def test_a_client_that_goes_away_aborts_its_requests(stream):
    @in_event_loop
    async def check():
        async with serving() as served:
            served.hold()
            fields = {"input_ids": [[1], [2], [3]], "stream": stream}
            with pytest.raises(httpx.ReadTimeout):
                await served.client.post("/generate", json=fields, timeout=0.2)
            await until(lambda: sum(len(worker.aborted) for worker in served.workers) == 3)
            assert len(served.bridge.book) == 0
            assert served.bridge.book.counters["num_aborted"] == 3

    check()


@in_event_loop
async def test_a_client_that_leaves_in_the_middle_of_a_stream_aborts_it():
    async with serving() as served:
        fields = {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 200}}
        async with served.client.stream("POST", "/generate", json=fields) as response:
            async for _ in response.aiter_lines():
                break
        await until(lambda: any(worker.aborted for worker in served.workers))
        assert len(served.bridge.book) == 0


@in_event_loop
async def test_a_request_that_the_rank_refuses_gets_its_words():
    async with serving(failure=("input_ids needs 9 blocks, 5 exist", "input_ids")) as served:
        response = await served.generate(text="a")
        (chunk, end) = await events(served, text="a")
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "input_ids needs 9 blocks, 5 exist"
    assert chunk["error"]["param"] == "input_ids"
    assert end == "[DONE]"


@in_event_loop
async def test_a_request_that_the_model_failed_is_not_worth_another_try():
    async with serving(failure=("the logits of this request are NaN", None)) as served:
        response = await served.generate(text="a")
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "the logits of this request are NaN"
    assert not response.json()["error"]["retryable"]


@in_event_loop
async def test_many_clients_at_once_each_get_their_own_answer():
    async with serving() as served:

        async def one(seed: int) -> list[int]:
            fields = {"input_ids": [seed % 50 + 2], "sampling_params": {"max_new_tokens": 9, "sampling_seed": seed}}
            return (await served.client.post("/generate", json=fields)).json()["output_ids"]

        outputs = await asyncio.gather(*(one(seed) for seed in range(60)))
        used = {worker.rank for worker in served.workers if worker.submitted}
    assert outputs == [[2 + seed + i for i in range(9)] for seed in range(60)]
    assert used == {0, 1}


@in_event_loop
async def test_long_texts_of_one_client_do_not_take_all_threads_from_shorter_ones():
    go, begun = threading.Event(), []

    class Slow(Tokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            if len(text) > 1 << 16:
                begun.append(len(text))
                go.wait(30)
            return [7]

    limits = msgspec.structs.replace(LIMITS, max_prompt_len=80_000, max_model_len=80_000)
    async with serving(1, tokenizer=Slow(TEXT._backend), limits=limits) as served:
        params = {"max_new_tokens": 1}
        calls = [asyncio.create_task(served.generate(text="a" * 70_000, sampling_params=params)) for _ in range(40)]
        await until(lambda: bool(begun))
        try:
            assert (await served.generate(text="a" * 60_000, sampling_params=params)).status_code == 200
            assert len(begun) <= max(1, (os.cpu_count() or 1) // 2)
        finally:
            go.set()
        assert {(await call).status_code for call in calls} == {200}
