"""No rank ever misses a collective: whatever arrives where and when, all ranks make the same calls and none hangs."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.config import load_config
from moe_serve.dispatch.base import EpGroup
from moe_serve.engine.build import build_engine
from moe_serve.engine.protocol.mailbox import Inbound
from moe_serve.engine.protocol.messages import Abort, Submit, Tokens
from moe_serve.engine.step.exchange import make_exchange
from tests.engine.offline import Script, ScriptedMailbox, tiny_model
from tests.ranks import run_ranks

COLLECTIVES = ["all_gather", "all_gather_into_tensor", "all_to_all_single", "all_reduce", "broadcast", "barrier"]
BUSY = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]  # other tests may hold the cores


def count_collectives(counts: dict[str, int]) -> None:
    for name in COLLECTIVES:
        original = getattr(dist, name, None)
        if original is None:
            continue

        def counting(*args: object, _name: str = name, _original: object = original, **kwargs: object) -> object:
            counts[_name] = counts.get(_name, 0) + 1
            return _original(*args, **kwargs)  # type: ignore[operator]

        setattr(dist, name, counting)


def run_script(
    rank: int, group: EpGroup, scripts: Sequence[Script], overrides: Sequence[str], meeting: str
) -> dict[str, Any]:
    config = load_config(overrides=list(overrides))
    originals = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}
    counts: dict[str, int] = {}
    mailbox = ScriptedMailbox(scripts[rank], rank, group.num_ranks, Path(meeting))
    exchange = make_exchange(config.engine.exchange, group.process_group, True, 60.0)
    engine = build_engine(config, group, exchange, mailbox)
    try:
        count_collectives(counts)
        engine.run()
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    engine.scheduler.check()
    assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.num_blocks
    exchange.close()
    lengths: dict[str, int] = {}
    finished = set()
    for message in mailbox.sent:
        if isinstance(message, Tokens):
            for event in message.events:
                assert event.request_id not in finished, "an event after the end"
                lengths[event.request_id] = lengths.get(event.request_id, 0) + len(event.token_ids)
                if event.finish:
                    finished.add(event.request_id)
    return {"counts": counts, "lengths": lengths, "finished": sorted(finished), "steps": engine.step}


requests = st.tuples(
    st.integers(0, 30),  # arrives at this poll
    st.integers(1, 40),  # prompt tokens
    st.integers(1, 12),  # output tokens
    st.one_of(st.none(), st.integers(0, 20)),  # aborted so many polls later
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("lockstep"), "qwen3_moe")


@settings(max_examples=8, deadline=None, suppress_health_check=BUSY)
@given(data=st.data())
def test_all_ranks_make_the_same_collective_calls(model: Path, data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 4), label="ranks")
    per_rank = data.draw(st.lists(st.lists(requests, max_size=5), min_size=num_ranks, max_size=num_ranks))
    exchange = data.draw(st.sampled_from(["gloo", "shm"]))
    backend = data.draw(st.sampled_from(["auto", "collective"]))
    overlap = data.draw(st.sampled_from(["null", "1", "8"]))
    scripts: list[list[tuple[int, Inbound]]] = []
    expected: dict[str, int] = {}
    for rank, wanted in enumerate(per_rank):
        script: list[tuple[int, Inbound]] = []
        for number, (at, num_prompt, num_output, abort_after) in enumerate(wanted):
            name = f"{rank}.{number}"
            params = SamplingParams(max_new_tokens=num_output, temperature=0, ignore_eos=True)
            script.append((at, Submit(name, 0, list(range(3, 3 + num_prompt)), params, seed=number)))
            if abort_after is None:
                expected[name] = num_output
            else:
                script.append((at + abort_after, Abort(name)))
        scripts.append(sorted(script, key=lambda entry: entry[0]))
    overrides = [
        f"model.path={model}", "model.load_format=dummy", f"parallel.num_ranks={num_ranks}",
        "cache.num_blocks=12", "cache.block_size=8", "engine.max_running_requests=4", "engine.max_batch_tokens=16",
        "dispatch.max_tokens_per_rank=6", "eplb.record_window_steps=7", "engine.prefill_hold_steps=2",
        f"engine.exchange={exchange}", "engine.heartbeat_s=0.02", f"dispatch.backend={backend}",
        f"dispatch.overlap_from_tokens={overlap}",
        "engine.suspect_after_s=60",  # a busy machine may hold a process up for seconds
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as meeting:
        ranks = run_ranks(num_ranks, run_script, scripts, overrides, meeting, timeout_s=120)
    assert all(rank["counts"] == ranks[0]["counts"] for rank in ranks), [rank["counts"] for rank in ranks]
    assert len({rank["steps"] for rank in ranks}) == 1
    lengths = {name: length for rank in ranks for name, length in rank["lengths"].items()}
    finished = {name for rank in ranks for name in rank["finished"]}
    for name, length in expected.items():
        assert name in finished, f"{name} never ended"
        assert lengths[name] == length
