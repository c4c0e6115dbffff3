"""A rank that is asked to end: it tells the front end, serves on, and ends when it is told to, or at its deadline."""

from moe_serve.attention_dp.request import SamplingParams
from moe_serve.config import load_config
from moe_serve.dispatch.base import EpGroup
from moe_serve.engine.build import build_engine
from moe_serve.engine.protocol.mailbox import Inbound
from moe_serve.engine.protocol.messages import Draining, Shutdown, Submit, Tokens
from moe_serve.engine.step.exchange import make_exchange
from tests.engine.queue_mailbox import QueueMailbox
from tests.ranks import run_ranks

SUBMIT = Submit("a", 0, [5, 6], SamplingParams(max_new_tokens=6, temperature=0.0), seed=0)


class AskedToEnd(QueueMailbox):
    """The engine is asked to end at its first poll; a front end that answers says Shutdown when the tokens are out."""

    def __init__(self, answers: bool):
        super().__init__([SUBMIT], end_when_idle=False)
        self.answers = answers

    def poll(self, timeout_s: float) -> list[Inbound]:
        arrived = super().poll(timeout_s)
        if not self.engine.draining:
            self.engine.request_drain()
        asked = any(isinstance(message, Draining) for message in self.sent)
        return [*arrived, Shutdown()] if self.answers and asked and self.num_tokens == 6 else arrived

    @property
    def num_tokens(self) -> int:
        return sum(len(e.token_ids) for sent in self.sent if isinstance(sent, Tokens) for e in sent.events)


def asked_to_end(rank: int, group: EpGroup, answers: bool, deadline_s: float) -> tuple[int, int]:
    overrides = ["cache.memory_gib=0.05", "engine.heartbeat_s=0.02", "parallel.num_ranks=1"]
    config = load_config(overrides=[*overrides, f"server.drain_deadline_s={deadline_s}"])
    mailbox = AskedToEnd(answers)
    engine = build_engine(config, group, make_exchange(config.engine.exchange, group.process_group, True, 60), mailbox)
    mailbox.engine = engine
    engine.run()
    engine.close()
    return mailbox.num_tokens, sum(isinstance(message, Draining) for message in mailbox.sent)


def test_a_rank_that_is_asked_to_end_finishes_what_runs_and_waits_for_the_front_end() -> None:
    ((num_tokens, num_told),) = run_ranks(1, asked_to_end, True, 60.0)
    assert num_tokens == 6
    assert num_told >= 1


def test_without_an_answer_it_ends_at_its_deadline() -> None:
    ((_, num_told),) = run_ranks(1, asked_to_end, False, 0.0)
    assert num_told >= 1
