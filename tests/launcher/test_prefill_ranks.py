"""`moe-serve serve` with prefill and decode ranks: tokens of handed-over prompts, and one copy of the weights."""

from pathlib import Path
from typing import Any

from tests.launcher.running import Running, eventually

FLAGS = ["--prefill-ranks", "1", "--decode-ranks", "1", "--device", "cpu", "--port", "0"]
PROMPT = list(range(10, 90))


def weights_of(pid: int) -> set[str]:
    """Returns the inodes of the packed weights that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "moe_serve_weights" in line and "_state" not in line}


def test_a_prompt_is_handed_over_with_the_tokens_of_one_rank_and_both_roles_map_one_copy_of_the_weights() -> None:
    with Running("moe_serve", ["serve", *FLAGS]) as running, running.client(timeout_s=60) as client:

        def info() -> Any:
            return client.get("/server_info").json()

        def answer(**fields: object) -> Any:
            params = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
            return client.post("/generate", json={"input_ids": PROMPT, "sampling_params": params} | fields).json()

        assert eventually(lambda: info()["prefill"]["state"] == "ready", 90)
        handed_over = answer()
        assert handed_over["meta_info"]["route"] == "prefill"
        assert eventually(lambda: 'fate="from_prefill",rank="0"} 5.0' in client.get("/metrics").text, 60)
        assert client.post("/flush_cache").status_code == 200
        assert answer(routed_dp_rank=0)["output_ids"] == handed_over["output_ids"]
        found = info()
        decode, prefill = (weights_of(ranks[0]["pid"]) for ranks in (found["ranks"], found["prefill"]["ranks"]))
        assert len(decode) == 1
        assert decode == prefill
