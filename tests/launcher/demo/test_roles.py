"""Prefill and decode ranks apart, by `moe-serve serve`: the tokens of the demo system, one copy of the weights, lost
prefill ranks."""

import os
import signal
import threading
from pathlib import Path

import httpx

from tests.launcher.running import Running, eventually, gone


def weights_of(pid: int) -> set[str]:
    """Returns the inodes of the packed weights that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "moe_serve_weights" in line and "_state" not in line}


def test_roles_give_the_tokens_of_two_ranks_and_no_request_is_lost_with_the_prefill_rank(demo: Running):
    flags = ["--prefill-ranks", "1", "--decode-ranks", "1", "--port", "0", "--device", "cpu"]
    prompts = [list(range(100 + 7 * number, 180 + 7 * number)) for number in range(3)]
    params = {"max_new_tokens": 40, "ignore_eos": True, "sampling_seed": 3, "frequency_penalty": 0.4}
    bodies = [{"input_ids": ids, "sampling_params": params, "return_logprob": True} for ids in prompts]

    def answer(client: httpx.Client, body: dict[str, object]) -> tuple[object, object]:
        got = client.post("/generate", json=body).json()
        cached.append(got["meta_info"]["cached_tokens"])
        routes.append(got["meta_info"].get("route"))
        return got["output_ids"], got["meta_info"]["output_token_logprobs"]

    cached: list[int] = []
    routes: list[str | None] = []

    with demo.client(timeout_s=120) as client:
        right = [answer(client, body) for body in bodies]
    settings = ["cache.host_gb=0.02", "eplb.mode=dynamic"]
    with Running("moe_serve", ["serve", *flags, *(f"--set={each}" for each in settings)]) as running:
        with running.client(timeout_s=120) as client:

            def prefill() -> dict:
                return client.get("/server_info").json()["prefill"]

            cached.clear()
            routes.clear()
            assert eventually(lambda: prefill()["state"] == "ready")
            assert [answer(client, body) for body in bodies] == right
            assert cached == [0, 0, 0]
            assert routes == ["prefill"] * 3
            assert prefill()["routes"] == {"prefill": 3}
            # 80 tokens are five pages of each prompt: none was computed again, and none is called cached.
            pages = 'moe_serve_rank_cache_pages_total{fate="from_prefill",rank="0"} 15.0'
            assert eventually(lambda: pages in client.get("/metrics").text, 20)
            assert 'moe_serve_rank_prefix_cache_hits_total{rank="0"} 0.0' in client.get("/metrics").text
            assert answer(client, bodies[0] | {"input_ids": prompts[0][:8]})[0]
            assert prefill()["routes"] == {"prefill": 3, "short": 1}
            assert 'moe_serve_requests_routed_total{route="short"} 1.0' in client.get("/metrics").text
            (rank,) = prefill()["ranks"]
            assert rank["info"]["role"] == "prefill"
            (decodes,) = client.get("/server_info").json()["ranks"]
            assert len(weights_of(decodes["pid"])) == 1
            assert weights_of(decodes["pid"]) == weights_of(rank["pid"]), "both map one copy"
            got: dict[int, tuple[object, object]] = {}
            threads = [
                threading.Thread(target=lambda n=n: got.update({n: answer(client, bodies[n])})) for n in range(3)
            ]
            for thread in threads:
                thread.start()
            os.kill(rank["pid"], signal.SIGKILL)
            for thread in threads:
                thread.join(120)
            assert [got[number] for number in range(3)] == right
            assert client.get("/ready").status_code == 200, "the decode ranks serve on"
            running.wait_for("prefill: they are started again", 120)
            assert eventually(lambda: prefill()["state"] == "ready", 120)
            assert answer(client, bodies[0]) == right[0]
            assert client.post("/flush_cache").status_code == 200
            assert answer(client, bodies[0] | {"routed_dp_rank": 0}) == right[0], "computed where it decodes"
            assert 'moe_serve_rank_cache_pages_total{fate="down",rank="prefill 0"}' in client.get("/metrics").text
            pids = running.descendants()
        assert running.end(signal.SIGINT) == 0, running.output
        assert gone(pids)
