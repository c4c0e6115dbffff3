"""`/start_profile`, `/stop_profile`: one trace of all ranks, in Chrome's format, on one clock."""

import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_serve.engine.protocol.messages import STEP_WORDS, Answer, Profile
from moe_serve.errors import MoeServeError
from moe_serve.process_facts import boot_id
from moe_serve.server.observe.profile import RankProfile, RequestSpan, align, events, write_profile
from tests.server.served import in_event_loop, serving, until

PARTS, PHASES = ["other", "exchange", "attention", "between"], ["decode", "prefill", "mixed"]


def facts(began_ns: list[int], clock: str = "here", shift_ns: int = 0, first_step: int = 0) -> dict[str, Any]:
    """Steps of 1 ms, agreed upon after 0.2 ms, on a clock that is `shift_ns` ahead."""
    steps, turns = [], []
    for number, at_ns in enumerate(began_ns):
        at_ns += shift_ns
        steps.append([first_step + number, 0, at_ns, at_ns + 200_000, at_ns + 1_000_000, 3, 0, 1, 0, 0, 1000 * number])
        turns += [[at_ns, 1], [at_ns + 200_000, 2], [at_ns + 1_000_000, 3]]
    return {
        "steps": np.array(steps, np.int64).reshape(-1, STEP_WORDS).tobytes(),
        "turns": np.array(turns, np.int64).reshape(-1, 2).tobytes(),
        "parts": PARTS, "phases": PHASES, "num_left_out": 0, "turns_full": False, "clock": clock,
        "wall_ns": 10**18 - shift_ns,
    }  # fmt: skip


def profile(rank: int, *args: Any, **kwargs: Any) -> RankProfile:
    return RankProfile.of(rank, facts(*args, **kwargs))


def test_ranks_of_one_host_share_a_clock_and_others_are_set_by_their_exchanges() -> None:
    began = [1_000_000 * (i + 1) for i in range(50)]
    ahead_ns = 7_777_000_000
    jitter = [at + (i % 5) * 1000 for i, at in enumerate(began)]
    ranks = [profile(0, began), profile(1, began), profile(2, jitter, "there", ahead_ns)]
    same, also, other = align(ranks, "here", 10**18)
    assert (same.ns, also.ns, same.how) == (0, 0, "same host")
    assert other.ns == pytest.approx(-ahead_ns, abs=5000)
    assert 0 < other.spread_ns < 5000
    assert "rank 0" in other.how


def test_without_a_common_step_the_wall_clocks_decide_and_the_trace_says_so() -> None:
    ranks = [profile(0, [10**6]), profile(1, [10**6], "there", 5_000_000, first_step=100)]
    _, other = align(ranks, "here", 10**18)
    assert (other.ns, other.how) == (-5_000_000, "wall clocks of the hosts")
    first, second = align([profile(0, [10**6], "a", 300), profile(1, [10**6], "b", 900)], "here", 10**18)
    assert (first.ns, second.ns) == (-300, -900)
    assert "by wall clocks" in second.how


def test_a_rank_without_steps_is_there_and_empty() -> None:
    ranks = [profile(0, []), profile(1, [10**6])]
    found = list(events(ranks, align(ranks, "here", 10**18), []))
    assert {event["pid"] for event in found if event["ph"] == "M"} == {0, 1, 2}
    assert {event["pid"] for event in found if event["ph"] == "X"} == {2}
    nobody = [profile(0, [])]
    assert [event["ph"] for event in events(nobody, align(nobody, "elsewhere", 0), [])] == ["M", "M"]


def test_parts_lie_inside_their_step_and_a_wait_between_two_is_none() -> None:
    rank = profile(3, [5_000_000, 9_000_000])
    found = list(events([rank], align([rank], "here", 0), []))
    steps = [event for event in found if event.get("cat") == "step"]
    parts = [event for event in found if event.get("cat") == "part"]
    assert [step["ts"] for step in steps] == [0, 4000]
    assert [(part["name"], part["ts"], part["dur"]) for part in parts] == [
        ("exchange", 0, 200), ("attention", 200, 800), ("exchange", 4000, 200), ("attention", 4200, 800),
    ]  # fmt: skip
    assert steps[1]["args"] == {"step": 1, "decode_rows": 3, "prefill_rows": 0, "rounds": 1, "overlap": False,
                                "waited_us": 1.0}  # fmt: skip


def check_format(trace: dict[str, Any]) -> None:
    """The rules of Chrome's trace event format, as far as these events go."""
    needs = {"X": {"ts", "dur", "name", "pid", "tid"}, "M": {"name", "pid", "args"}, "C": {"ts", "name", "pid", "args"},
             "i": {"ts", "name", "pid", "s"}, "b": {"ts", "id", "cat", "name"}, "e": {"ts", "id", "cat", "name"},
             "n": {"ts", "id", "cat", "name"}}  # fmt: skip
    open_ids: set[str] = set()
    for event in trace["traceEvents"]:
        assert needs[event["ph"]] <= set(event), event
        assert event.get("s", "t") in ("g", "p", "t")
        assert event["ph"] != "C" or all(isinstance(value, int | float) for value in event["args"].values())
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
        if event["ph"] == "b":
            open_ids.add(event["id"])
        elif event["ph"] == "e":
            open_ids.remove(event["id"])
    assert not open_ids, "every request ends"
    check_nesting(trace)


def check_nesting(trace: dict[str, Any]) -> None:
    """Slices of one track lie inside each other or apart, as Perfetto's trace_processor reads them: in whole ns, cut
    off after the third digit (src/trace_processor/importers/json/json_utils.cc)."""
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            began = int(event["ts"] * 1000.0)
            tracks.setdefault((event["pid"], event["tid"]), []).append((began, began + int(event["dur"] * 1000.0)))
    for slices in tracks.values():
        around: list[int] = []  # where slices end that are open
        for began, ended in sorted(slices, key=lambda each: (each[0], -each[1])):
            while around and around[-1] <= began:
                around.pop()
            assert not around or ended <= around[-1], (began, ended, around)
            around.append(ended)


def test_parts_lie_inside_their_step_whatever_the_nanosecond() -> None:
    times = np.cumsum(np.random.default_rng(0).integers(1000, 9_000_000, (1000, 4)))
    steps = np.zeros((1000, STEP_WORDS), np.int64)
    steps[:, 2], steps[:, 3], steps[:, 4] = times[::4], times[1::4], times[2::4]
    turns = np.stack([times, np.tile([1, 2, 3, 3], 1000)], axis=1)
    rank = RankProfile(0, steps, turns, PARTS, PHASES, "here", 0)
    check_nesting({"traceEvents": list(events([rank], align([rank], "here", 0), []))})


def test_the_file_is_a_trace_that_only_its_owner_reads(tmp_path: Path) -> None:
    answers = [Answer(rank, 0, 1, True, "", facts([10**6 * i for i in range(1, 700)])) for rank in range(2)]
    spans = [RequestSpan('a"b', 1, 2 * 10**6, 3 * 10**6, 4 * 10**6, 5, 7, "stop"),
             RequestSpan("c", None, 2 * 10**6, None, 4 * 10**6, 5, 0, "abort")]  # fmt: skip
    path = write_profile(tmp_path / "new", answers, spans)
    trace = json.loads(path.read_text())
    check_format(trace)
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == 2 * 699 * 3
    assert trace["otherData"]["rank 1"]["steps"] == 699
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]


def test_what_cannot_be_written_or_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MoeServeError, match=r"server\.profile_dir"):
        write_profile(tmp_path / "file" / "x", [], [])
    for wrong in (
        {"steps": b"123"},
        {"turns": np.array([[5, 99]], np.int64).tobytes()},
        {"clock": None, "wall_ns": "x"},
    ):
        with pytest.raises(MoeServeError, match="cannot be read"):
            write_profile(tmp_path, [Answer(0, 0, 1, True, "", facts([10**6]) | wrong)], [])
    with pytest.raises(MoeServeError, match="cannot be read"):
        write_profile(tmp_path, [Answer(0, 0, 1, True, "", {})], [])


@in_event_loop
async def test_the_routes_write_to_the_configured_folder_alone(tmp_path: Path) -> None:
    now_ns = time.monotonic_ns()

    def answer_of(rank: int):
        mine = facts([now_ns, now_ns + 2_000_000], boot_id())
        return lambda call_id: Answer(rank, 0, call_id, True, "recorded", mine)

    async with serving(2, f"server.profile_dir={tmp_path}") as served:
        for worker in served.workers:
            worker.answer = answer_of(worker.rank)
        client = served.client
        for wrong in ({"output_dir": "/tmp"}, {"duration_s": 0}, {"duration_s": 1e9}, {"duration_s": "x"}):
            refused = await client.post("/start_profile", json=wrong)
            assert refused.status_code == 400
            assert next(iter(wrong)) in refused.text
        assert (await client.post("/start_profile", json={"duration_s": 5})).status_code == 200
        sent = served.workers[1].commands[-1]
        assert isinstance(sent, Profile)
        assert (sent.command, sent.max_s) == ("start", 5)
        await served.generate(input_ids=[5, 6], rid="private name", sampling_params={"max_new_tokens": 2})
        await until(lambda: len(served.bridge.book) == 0)
        said = (await client.post("/stop_profile")).json()
    trace = json.loads((tmp_path / said["file"]).read_text())
    check_format(trace)
    request = next(event for event in trace["traceEvents"] if event["ph"] == "b")
    assert request["args"] == {
        "rank": request["args"]["rank"],
        "prompt_tokens": 2,
        "output_tokens": 2,
        "finish": "length",
    }
    begins = {event["pid"]: event["ts"] for event in reversed(trace["traceEvents"]) if event.get("cat") == "step"}
    assert begins[1] == begins[2], "both ranks, on one clock"
    assert 0 <= request["ts"] - begins[1] < 60e6, "which is the front end's, too"


@in_event_loop
async def test_a_server_without_a_folder_refuses_and_says_how():
    async with serving(1) as served:
        for path in ("/start_profile", "/stop_profile"):
            refused = await served.client.post(path)
            assert refused.status_code == 400
            assert "server.profile_dir" in refused.text
        assert not served.workers[0].commands


@in_event_loop
async def test_a_rank_that_refuses_is_named(tmp_path: Path) -> None:
    async with serving(1, f"server.profile_dir={tmp_path}") as served:
        served.workers[0].answer = lambda call_id: Answer(0, 0, call_id, False, "no profile was started")
        refused = await served.client.post("/stop_profile")
        assert refused.status_code == 409
        assert "rank 0: no profile was started" in refused.text
    assert not list(tmp_path.iterdir())
