"""The HTTP server: refusals in one form, readiness, information. Over real sockets, without a model."""

import asyncio

import pytest

from moe_serve.config import model_dir
from tests.server.served import in_event_loop, serving, until

JSON = {"content-type": "application/json"}
FIVE = {"max_new_tokens": 5, "sampling_seed": 10}


@in_event_loop
async def test_put_works_like_post():
    async with serving() as served:
        assert (await served.client.put("/generate", json={"text": "a", "sampling_params": FIVE})).status_code == 200


BAD = [
    ({}, "text"),
    ({"text": "a", "input_ids": [1]}, "text"),
    ({"text": 4}, "text"),
    ({"text": ""}, "text"),
    ({"text": ["ok", ""]}, "text"),
    ({"input_ids": [2048]}, "input_ids"),
    ({"input_ids": [-1]}, "input_ids"),
    ({"input_ids": [10**40]}, "input_ids"),
    ({"input_ids": ["a"]}, "input_ids[0]"),
    ({"input_ids": [5] * 201}, "input_ids"),
    ({"text": "word " * 4000}, "text"),
    ({"text": "w" * 100_000}, "text"),
    ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
    ({"text": "a", "sampling_params": {"max_new_tokens": 256}}, "max_new_tokens"),
    ({"text": "a", "sampling_params": {"temperature": -0.1}}, "sampling_params.temperature"),
    ({"text": "a", "sampling_params": {"top_p": 2}}, "sampling_params.top_p"),
    ({"text": "a", "sampling_params": {"stop_token_ids": [5000]}}, "stop_token_ids"),
    ({"text": "a", "sampling_params": {"frequency_penalty": 5}}, "sampling_params.frequency_penalty"),
    ({"text": "a", "return_hidden_states": True}, "return_hidden_states"),
    ({"text": "a", "routed_dp_rank": 2}, "routed_dp_rank"),
    ({"text": "a", "unknown": 1}, "unknown"),
]


@in_event_loop
async def test_bad_input_gets_one_400_that_names_the_field_and_the_server_goes_on():
    async with serving() as served:
        for stream in (False, True):
            for fields, field in BAD:
                response = await served.generate(**fields, **({"stream": True} if stream else {}))
                error = response.json()["error"]
                assert response.status_code == 400, (fields, error)
                assert error["param"] == field, (fields, error)
                assert field.rpartition(".")[2].partition("[")[0] in error["message"]
                assert error["code"] == 400
                assert error["type"] == "invalid_request_error"
        assert len(served.bridge.book) == 0
        assert not any(worker.submitted for worker in served.workers)
        assert (await served.generate(text="still here", sampling_params=FIVE)).status_code == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b"text=hello", b'{"text": "a"} x'])
def test_a_body_that_is_not_json_gets_a_400(body):
    @in_event_loop
    async def check():
        async with serving() as served:
            response = await served.client.post("/generate", content=body, headers=JSON)
            assert response.status_code == 400
            assert "body" in response.json()["error"]["message"]

    check()


@in_event_loop
async def test_a_body_beyond_the_bound_gets_a_413_announced_or_not():
    async def pieces():
        for _ in range(20):
            yield b" " * 1000

    async with serving(2, "server.max_body_mib=0.01") as served:
        announced = await served.client.post("/generate", content=b" " * 20_000, headers=JSON)
        unannounced = await served.client.post("/generate", content=pieces(), headers=JSON)
        assert (await served.generate(text="a", sampling_params=FIVE)).status_code == 200
    for response in (announced, unannounced):
        assert response.status_code == 413
        assert "server.max_body_mib" in response.json()["error"]["message"]


@in_event_loop
async def test_a_full_queue_gets_a_429_with_retry_after_and_drains():
    async with serving(2, "engine.max_running_requests=1", "engine.max_queued_requests=1") as served:
        served.hold()
        calls = [asyncio.create_task(served.generate(text="a", sampling_params=FIVE)) for _ in range(3)]
        await until(lambda: len(served.bridge.book) == 3)
        refused = await served.generate(text="a")
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert "max_queued_requests" in refused.json()["error"]["message"]
        assert refused.json()["error"]["retryable"]
        served.go_on()
        assert [(await call).status_code for call in calls] == [200] * 3
        assert (await served.generate(text="a", sampling_params=FIVE)).status_code == 200
        too_many = await served.generate(text="a", sampling_params={"n": 5})
        assert too_many.status_code == 400
        assert too_many.json()["error"]["param"] == "sampling_params.n"


@in_event_loop
async def test_models_and_server_info_tell_what_is_served():
    async with serving(2, "model.served_name=[tiny, gpt-4o]") as served:
        served.workers[1].load(num_running=4)
        await until(lambda: any(view.status for view in served.bridge.workers))
        models = (await served.client.get("/v1/models")).json()
        one = (await served.client.get("/v1/models/tiny")).json()
        other_name = (await served.client.get("/v1/models/gpt-4o")).json()
        unknown = await served.client.get("/v1/models/other")
        info = (await served.client.get("/server_info")).json()
        assert (await served.client.get("/get_server_info")).status_code == 200
        model_info = (await served.client.get("/model_info")).json()
    assert models["object"] == "list"
    assert models["data"] == [one, other_name]
    assert other_name == one | {"id": "gpt-4o"}
    assert (one["id"], one["max_model_len"]) == ("tiny", 256)
    assert one["root"] == str(model_dir(served.bridge.config.model))
    assert unknown.status_code == 404
    assert "'tiny' or 'gpt-4o'" in unknown.json()["error"]["message"]
    assert info["state"] == "ready"
    assert info["config"]["parallel"]["num_ranks"] == 2
    assert info["limits"]["vocab_size"] == 2048
    assert [rank["rank"] for rank in info["ranks"]] == [0, 1]
    assert info["ranks"][1]["status"]["num_running"] == 4
    assert info["ranks"][0]["info"] == {"backend": "fake"}
    assert model_info["is_generation"] is True


@in_event_loop
async def test_wrong_paths_and_methods_have_the_same_error_form():
    async with serving() as served:
        missing = await served.client.get("/nothing")
        method = await served.client.get("/generate")
    assert missing.status_code == 404
    assert "/nothing" in missing.json()["error"]["message"]
    assert method.status_code == 405
    assert "GET" in method.json()["error"]["message"]
