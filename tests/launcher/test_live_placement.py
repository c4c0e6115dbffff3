"""A person moves experts of a running server, and its planner is killed: over HTTP, the demo model on two ranks."""

import os
import signal

import httpx

from tests.conftest import _command
from tests.launcher.running import Running, eventually

SETTINGS = (
    "eplb.mode=dynamic", "eplb.trigger=0", "eplb.record_window_steps=8", "engine.numerics=batch_invariant",
    "server.worker_port=0", "parallel.threads_per_rank=1", "engine.heartbeat_s=0.1",
)  # fmt: skip


def tokens(client: httpx.Client) -> list[list[int]]:
    params = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    calls = [{"text": "def __init__(self", "sampling_params": params, "routed_dp_rank": rank} for rank in (0, 1)]
    return [client.post("/generate", json=call).json()["output_ids"] for call in calls]


def status(client: httpx.Client) -> dict:
    return client.get("/eplb/status").json()


def planners(system: Running) -> list[int]:
    return [pid for pid in system.descendants() if "planning.worker" in _command(pid)]


def test_experts_move_as_a_person_says_and_a_killed_planner_is_replaced():
    sets = [word for setting in SETTINGS for word in ("--set", setting)]
    command = ["serve", "--port", "0", "--num-ranks", "2", *sets]
    with Running("moe_serve.launcher.cli", command) as system, system.client(timeout_s=120) as client:
        right = tokens(client)
        assert eventually(lambda: client.get("/eplb/placement").status_code == 200)
        placement = client.get("/eplb/placement").json()
        for row in placement["physical_to_logical_map"]:
            row[0], row[-1] = row[-1], row[0]
        answer = client.post("/eplb/placement", json=placement)
        assert answer.status_code == 200, answer.text
        assert eventually(lambda: status(client)["placement"]["version"] > placement["version"] and not is_busy(client))
        assert client.get("/eplb/placement").json()["physical_to_logical_map"] == placement["physical_to_logical_map"]
        assert tokens(client) == right

        assert eventually(lambda: planners(system))
        (killed,) = planners(system)
        os.kill(killed, signal.SIGKILL)
        assert tokens(client) == right
        answer = client.post("/eplb/rebalance")
        assert answer.status_code == 200, answer.text
        assert eventually(lambda: status(client)["totals"].get("num_plans") == 1 and not is_busy(client))
        assert status(client)["last_decision"]["kind"] in ("keep", "done")
        assert planners(system) not in ([], [killed])
        assert tokens(client) == right
        assert status(client)["alarm"] is None
        assert system.end(signal.SIGINT) == 0


def is_busy(client: httpx.Client) -> bool:
    return status(client)["state"] != "watching"
