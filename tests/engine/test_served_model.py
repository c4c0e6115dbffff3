"""What a rank's model does with its transport: settings reach it, it hears of steps, and its bits are checked."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from moe_serve.attention_dp.batch import ForwardBatch
from moe_serve.attention_dp.request import SamplingParams
from moe_serve.config import load_config
from moe_serve.dispatch.base import EpGroup, TransportRequest
from moe_serve.dispatch.local import LocalAllToAll
from moe_serve.dispatch.wire import make_wire
from moe_serve.engine import build as build_module
from moe_serve.engine.build import build_engine, build_served_model, check_bits
from moe_serve.engine.model.served_model import ServedModel
from moe_serve.engine.output.row_logprobs import LogprobScorer
from moe_serve.engine.output.sampler import Sampler
from moe_serve.engine.protocol.messages import Status, Submit
from moe_serve.engine.requests import StepEvents
from moe_serve.engine.step.exchange import make_exchange
from moe_serve.errors import ConfigError, PeerError
from tests.engine.queue_mailbox import QueueMailbox
from tests.ranks import run_ranks

ALONE = EpGroup(0, 1, torch.device("cpu"))


class Listening(LocalAllToAll):
    """A transport that hears of steps. late: it missed a peer's rows in the step that runs"""

    note = "ears"
    step_sizes = (0, 129)

    def __init__(self, slots_per_rank: int):
        super().__init__(slots_per_rank, make_wire("auto", torch.float32))
        self.heard: list[object] = []
        self.late = False

    @property
    def waited_s(self) -> list[float]:
        return [0.0, 1.5]

    def begin_step(self, most_tokens: int) -> None:
        self.heard.append(most_tokens)

    def end_step(self) -> None:
        self.heard.append("end")

    def check_step(self) -> None:
        self.heard.append("check")
        if self.late:
            raise PeerError("rank 1 did not send its rows", 1, "dispatch", 5)


def build(*overrides: str, **changes: Any) -> tuple[ServedModel, Listening, TransportRequest]:
    """A model of one rank over such a transport, and with what its maker was called."""
    asked: list[TransportRequest] = []

    def make(group: EpGroup, request: TransportRequest) -> Listening:
        asked.append(request)
        transport = Listening(request.limits.slots_per_rank)
        transport.capabilities = replace(transport.capabilities, **changes)
        return transport

    config = load_config(overrides=["cache.num_blocks=8", "parallel.device=cpu", *overrides])
    with mock.patch.object(build_module, "make_all_to_all", make):
        served = build_served_model(config, EpGroup(0, config.parallel.num_ranks, torch.device("cpu")))
    assert isinstance(served.all_to_all, Listening)
    return served, served.all_to_all, asked[0]


def test_settings_of_the_dispatch_reach_the_transport() -> None:
    _, _, asked = build()
    assert (asked.compiled, asked.rows, asked.deadline_s) == (True, "auto", 60.0)
    _, _, asked = build(
        "dispatch={backend: low_latency, rows: masked, compiled: false, deadline_s: 0.05}", "parallel.num_ranks=2"
    )
    assert (asked.compiled, asked.rows, asked.deadline_s) == (False, "masked", 0.05)
    _, _, asked = build("dispatch.rows=packed", "engine.step_deadline_s=7")
    assert (asked.rows, asked.deadline_s, asked.combine) == ("packed", 7.0, "ordered")
    _, _, asked = build("dispatch.combine=rank_sum")
    assert asked.combine == "rank_sum"


def test_a_transport_hears_of_steps_and_a_late_peer_voids_one() -> None:
    served, transport, _ = build()
    served.warm_up()
    assert transport.heard == [0, "end", "check", 129, "end", "check"], "each path that a step may take is warm"
    served.begin_step(12)
    transport.late = True
    batch = ForwardBatch.empty(served.device, served.numerics)
    logits = served.forward(batch, 1)
    assert transport.heard[6:] == [12, "end"], "the host has not waited for the device"
    scorer = LogprobScorer(compiled=True)
    events = StepEvents(Any, Any, scorer, served.logits_of, served.rows, served.clock, transport.check_step)  # type: ignore[arg-type]
    with pytest.raises(PeerError, match="rank 1"):
        events.of([], batch, logits, Sampler([]))


def test_what_it_is_and_for_whom_it_waited_is_told() -> None:
    served, _, _ = build()
    told = {name: served.info[name] for name in ("all_to_all", "all_to_all_note", "all_to_all_is_bitwise")}
    assert told == {"all_to_all": "Listening", "all_to_all_note": "ears", "all_to_all_is_bitwise": True}
    assert served.waited_s == [0.0, 1.5]
    silent = LocalAllToAll(2, make_wire("auto", torch.float32))
    served.all_to_all = silent
    assert served.waited_s == []


def check_engine(rank: int, group: EpGroup) -> tuple[list[object], list[list[float]]]:
    settings = [
        "cache.num_blocks=8",
        "parallel.device=cpu",
        "engine.max_batch_tokens=8",
        "engine.max_running_requests=2",
    ]
    transports: list[Listening] = []

    def make(group: EpGroup, request: TransportRequest) -> Listening:
        transports.append(Listening(request.limits.slots_per_rank))
        return transports[0]

    params = SamplingParams(max_new_tokens=3, temperature=0, ignore_eos=True)
    mailbox = QueueMailbox([Submit("a", 0, list(range(3, 14)), params, seed=0)])
    with mock.patch.object(build_module, "make_all_to_all", make):
        exchange = make_exchange("auto", group.process_group, True, 60.0)
        engine = build_engine(load_config(overrides=settings), ALONE, exchange, mailbox)
    engine.run()
    return transports[0].heard, [one.waited_s for one in mailbox.sent if isinstance(one, Status)]


def test_the_engine_tells_the_size_of_each_step_and_reports_the_waits() -> None:
    ((heard, waits),) = run_ranks(1, check_engine)
    steps = [[size, "end", "check"] for size in (8, 3, 1, 1)]  # two chunks of the prompt, then token by token
    assert heard == [each for step in steps for each in step]
    assert waits[0] == [0.0, 1.5]


@pytest.mark.parametrize("backend", ["auto", "low_latency"])
def test_bits_of_its_own_are_refused_in_batch_invariant_whoever_chose_the_transport(backend: str) -> None:
    own = SimpleNamespace(capabilities=SimpleNamespace(bitwise=False), note="adds in an order of its own")
    settings = [f"dispatch.backend={backend}", "parallel.num_ranks=2", "engine.numerics=batch_invariant"]
    config = load_config(overrides=settings)
    with pytest.raises(ConfigError, match=rf"backend {backend} gives .*order of its own.*dispatch.backend: collective"):
        check_bits(own, config)  # type: ignore[arg-type]
    own.capabilities.bitwise = True
    check_bits(own, config)  # type: ignore[arg-type]
    own.capabilities.bitwise = False
    check_bits(own, load_config(overrides=settings[:2]))  # type: ignore[arg-type]


def test_a_model_is_not_built_over_bits_of_its_own_in_batch_invariant() -> None:
    with pytest.raises(ConfigError, match="batch_invariant excludes"):
        build("engine.numerics=batch_invariant", bitwise=False)
