"""The routes of the balancer, over the real front end with fake ranks."""

import json

import pytest

from moe_serve.engine.protocol.messages import Answer, Members, Rebalance, SetPlacement
from moe_serve.eplb.files.placements import read_placement
from tests.server.observe.reports import Story
from tests.server.served import Served, in_event_loop, serving, until

JSON = {"content-type": "application/json"}
DYNAMIC = "eplb.mode=dynamic"
STORY = Story(num_windows=20, shifts=(8,))


async def told(served: Served, story: Story = STORY) -> None:
    """Has rank 0 send all reports of a story."""
    for _, report in story.reports():
        served.workers[story.rank].say(report)
    await until(lambda: served.bridge.balance.num_windows == story.num_windows)


def answered(served: Served, ok: bool, text: str, **facts: object) -> None:
    served.workers[0].answer = lambda call_id: Answer(0, 0, call_id, ok, text, facts)


@in_event_loop
async def test_status_tells_what_the_balancer_does_and_why():
    async with serving(4, DYNAMIC, info=STORY.info) as served:
        empty = (await served.client.get("/eplb/status")).json()
        await told(served)
        status = (await served.client.get("/eplb/status")).json()
    assert (empty["mode"], empty["window"], empty["last_decision"]) == ("dynamic", None, None)
    assert empty["placement"] == {"version": 0, "age_s": None}
    assert (status["mode"], status["state"], status["alarm"], status["leader"]) == ("dynamic", "watching", None, 0)
    assert status["placement"]["version"] == STORY.totals["num_rounds"] > 0
    assert 0 <= status["placement"]["age_s"] < 60
    assert status["last_decision"]["reason"].endswith("is live")
    assert [one["kind"] for one in reversed(status["decisions"])][:3] == ["plan", "move", "done"]
    assert status["moves"][0]["predicted_gain_s"] > status["moves"][0]["predicted_cost_s"] > 0
    assert status["moves"][0]["balancedness_after"] > status["moves"][0]["balancedness_before"]
    assert status["totals"]["num_experts_moved"] == STORY.totals["num_experts_moved"]
    balance = status["window"]["balancedness"]
    assert 0 < balance["min"] <= balance["p50"] <= 1
    assert balance["min"] <= balance["mean"] <= 1


@in_event_loop
async def test_a_rebalance_is_answered_by_the_leader():
    async with serving(2, DYNAMIC, info=STORY.info) as served:
        answered(served, True, "planning", request_id=3)
        done = await served.client.post("/eplb/rebalance")
        answered(served, False, "a move is under way; wait for its end")
        refused = await served.client.post("/eplb/rebalance")
        await until(lambda: len(served.workers[1].commands) == 2)
        first = served.workers[0].commands[0].call_id
        assert all(worker.commands == [Rebalance(first), Rebalance(first + 1)] for worker in served.workers)
    assert (done.status_code, done.json()) == (200, {"ok": True, "message": "planning", "facts": {"request_id": 3}})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "a move is under way; wait for its end"


@in_event_loop
async def test_the_placement_in_use_can_be_read_back_as_a_file_and_set_again(tmp_path):
    async with serving(4, DYNAMIC, info=STORY.info) as served:
        early = await served.client.get("/eplb/placement")
        await told(served)
        body = (await served.client.get("/eplb/placement")).text
        answered(served, True, "moving")
        for given in (json.loads(body), {"physical_to_logical_map": json.loads(body)["physical_to_logical_map"]}):
            assert (await served.client.post("/eplb/placement", json=given)).status_code == 200
        rows = served.bridge.balance.placement
        first = served.workers[3].commands[0].call_id
        assert served.workers[3].commands == [SetPlacement(number, rows) for number in (first, first + 1)]
    assert early.status_code == 503
    file = tmp_path / "placement.json"
    file.write_text(body)
    placement = read_placement(file, num_ranks=4, num_logical=STORY.num_experts, moe_layer_ids=(1, 2, 3, 4))
    assert placement.physical_to_logical.tolist() == rows
    assert placement.version == STORY.totals["num_rounds"]


GOOD = [list(range(4)) * 2, list(range(4)) * 2]  # 2 layers, 4 experts, 8 slots
INFO = {"num_logical": 4, "num_slots": 8, "moe_layer_ids": [1, 3]}


@in_event_loop
async def test_a_placement_is_taken_in_each_form():
    every_layer = [[-1] * 8, GOOD[0], "dense", GOOD[1]]
    async with serving(2, DYNAMIC, info=INFO) as served:
        answered(served, True, "moving")
        for body in (GOOD, {"physical_to_logical_map": GOOD}, {"physical_to_logical_map": every_layer}):
            assert (await served.client.post("/eplb/placement", json=body)).status_code == 200
        assert [one.physical_to_logical for one in served.workers[0].commands] == [GOOD] * 3


BAD = [
    (b"", "empty"),
    (b"[[0, 1", "not valid JSON"),
    (b"7", "the body is 7, expected an object"),
    ({}, "physical_to_logical_map is missing"),
    ({"map": GOOD}, "did you mean physical_to_logical_map?"),
    ({"physical_to_logical_map": None}, "missing"),
    ([GOOD[0]], "has 1 rows, expected 2"),
    ([GOOD[0], 5], "[1] is 5, expected a list of whole numbers"),
    ([GOOD[0], GOOD[1][:-1]], "[1] has 7 slots, expected 8"),
    ([GOOD[0], [*GOOD[1][:-1], 4]], "[1][7] is 4, expected an expert from 0 to 3"),
    ([GOOD[0], [*GOOD[1][:-1], -2]], "[1][7] is -2"),
    ([GOOD[0], [*GOOD[1][:-1], True]], "[1][7] is true, expected a whole number"),
    ([GOOD[0], [*GOOD[1][:-1], 1.5]], "[1][7] is 1.5"),
    ([GOOD[0], [*GOOD[1][:-1], 10**30]], "huge number"),
    ({"physical_to_logical_map": GOOD, "num_ranks": 4}, "num_ranks is 4, expected 2"),
    ({"physical_to_logical_map": GOOD, "num_logical": "4"}, "num_logical"),
    ({"physical_to_logical_map": GOOD, "moe_layer_ids": [0, 1]}, "moe_layer_ids is a list of 2, expected [1, 3]"),
    ({"physical_to_logical_map": GOOD, "force": True}, "force is not a field"),
]


@in_event_loop
async def test_a_placement_of_wrong_type_or_size_is_refused_before_a_rank_sees_it():
    async with serving(2, DYNAMIC, "server.max_body_mib=0.01", info=INFO) as served:
        for body, words in BAD:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            response = await served.client.post("/eplb/placement", content=content, headers=JSON)
            assert response.status_code == 400, (body, response.text)
            assert words in response.json()["error"]["message"], (body, response.text)
        assert (await served.client.post("/eplb/placement", content=b" " * 20_000, headers=JSON)).status_code == 413
        answered(served, False, "expert 3 of layer 1 has no slot")
        refused = await served.client.post("/eplb/placement", json=GOOD)
        assert (refused.status_code, len(served.workers[0].commands)) == (400, 1)
        assert refused.json()["error"]["message"] == "expert 3 of layer 1 has no slot"


@pytest.mark.parametrize("mode", ["off", "static"])
def test_without_balancing_the_answers_say_what_to_set(mode: str):
    @in_event_loop
    async def check():
        async with serving(2, f"eplb.mode={mode}", info=INFO) as served:
            for answer in (
                await served.client.post("/eplb/rebalance"),
                await served.client.post("/eplb/placement", json=GOOD),
            ):
                assert answer.status_code == 400
                assert f"eplb.mode is {mode}" in answer.json()["error"]["message"]
                assert "to dynamic" in answer.json()["error"]["message"]
            status = (await served.client.get("/eplb/status")).json()
            assert status["mode"] == mode
            assert "to dynamic" in status["note"]
            placement = await served.client.get("/eplb/placement")
            assert placement.status_code == (400 if mode == "off" else 503)
            assert not served.workers[0].commands

    check()


@in_event_loop
async def test_health_shows_an_alarm_and_stays_healthy():
    async with serving(2, DYNAMIC, info=STORY.info) as served:
        story = Story(num_windows=0)
        (_, report), *_ = story.reports()
        served.workers[0].say(type(report)(0, 0, 5, "dynamic", "off", 0, {}, alarm="the planner died 3 times"))
        await until(lambda: bool(served.bridge.balance.alarm))
        health = await served.client.get("/health")
        assert (await served.client.get("/ready")).json() == {"status": "ready"}
    assert health.status_code == 200
    assert health.json()["status"] == "ready"
    assert health.json()["balancer"]["alarm"] == "the planner died 3 times"
    assert health.json()["balancer"]["state"] == "off"


@in_event_loop
async def test_a_masked_rank_leads_no_more():
    members = [Members(rank, 0, 1, [1], "rank 0 is late") for rank in (1,)]
    async with serving(2, DYNAMIC, info={**STORY.info, "on_lost_rank": "mask"}) as served:
        served.workers[1].say(members[0])
        await until(lambda: bool(served.bridge.workers.masked))
        for rank, version in ((0, 7), (1, 3)):
            (_, report), *_ = Story(num_windows=0, rank=rank).reports()
            served.workers[rank].say(type(report)(rank, 0, 5, "dynamic", "watching", version, {}))
        await until(lambda: served.bridge.balance.version != 0)
        served.workers[0].load(num_running=9)
        await until(lambda: next(iter(served.bridge.workers)).status is not None)
        assert served.bridge.balance.version == 3
