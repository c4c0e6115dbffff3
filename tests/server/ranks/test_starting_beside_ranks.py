"""A front end that starts beside running ranks, while one of them is lost: it waits for what the others say.

Its launcher tells it of the death at any time: before a rank has attached to it, before the others are ready for it, or
when the rank has come back already.
"""

import pytest

from moe_serve.engine.protocol.messages import (
    NEXT_STEP,
    SUPERVISOR,
    Exited,
    Fatal,
    Hello,
    Members,
    Message,
    ModelLimits,
    Progress,
    Ready,
    Refused,
    ToFrontEnd,
    Wake,
    encode,
)
from moe_serve.links.link import Link
from moe_serve.server.ranks.bridge import Bridge
from tests.server.served import fake_config

LIMITS = ModelLimits("m", 100, 20, 10, [1], 4)
LAUNCH = 7
DIED = Exited(1, LAUNCH, 0, "rank 1 was killed by SIGKILL")
WITHOUT_1 = Members(0, LAUNCH, 1, [0], "rank 1 died", ended=[1])


class Starting:
    """A front end of two ranks; a message arrives when it is said.

    told: what it tells its launcher;  refused: whom it does not take;  woken: ranks, and how
    """

    def __init__(self) -> None:
        self.told: list[ToFrontEnd] = []
        self.refused: list[bytes] = []
        self.woken: list[tuple[bytes, Wake]] = []
        self.link = Bridge(fake_config(2, "server.api_workers=2"), None, self.told.append, Link(worker=0))
        self.link._send = self._send  # type: ignore[method-assign]
        self.say("launcher", Hello(SUPERVISOR, 2, 0, 99, "h"))

    def say(self, who: str, *messages: Message) -> None:
        for message in messages:
            self.link._receive(who.encode(), encode(message))

    def _send(self, identity: bytes, message: Message) -> None:
        if isinstance(message, Refused):
            self.refused.append(identity)
        if isinstance(message, Wake):
            self.woken.append((identity, message))

    def check_launch_goes_on(self) -> None:
        assert self.link.workers.loss is None
        assert self.refused == []
        assert not [each for each in self.told if isinstance(each, Fatal)]


def hello(rank: int, num_before: int = 0, is_ready: bool = True) -> Hello:
    return Hello(rank, 2, LAUNCH, 100 + rank, "h", is_ready=is_ready, num_before=num_before)


def ready(rank: int) -> Ready:
    return Ready(rank, LAUNCH, LIMITS, {"on_lost_rank": "mask"})


SCENE = {"death": ("launcher", DIED), "hello": ("rank 0", hello(0)), "ready": ("rank 0", ready(0))}
SCENE["members"] = ("rank 0", WITHOUT_1)


@pytest.mark.parametrize("at", range(len(SCENE)))
def test_a_death_that_is_told_before_the_others_have_said_how_they_go_on_ends_nothing(at: int):
    order = ["hello", "ready", "members"]
    order.insert(at, "death")
    front_end = Starting()
    for name in order:
        front_end.say(*SCENE[name])
        front_end.check_launch_goes_on()
    assert front_end.link.workers.masked.keys() == {1}
    assert front_end.link.workers.is_ready


@pytest.mark.parametrize("is_told_after", ["its hello", "it is ready", "the others are ready"])
def test_a_rank_that_attached_before_it_died_takes_no_requests(is_told_after: str):
    front_end = Starting()
    front_end.say("rank 1", hello(1))
    if is_told_after != "its hello":
        front_end.say("rank 1", ready(1))
    front_end.say("rank 0", hello(0))
    if is_told_after == "the others are ready":
        front_end.say("rank 0", ready(0))
    front_end.say("launcher", DIED)
    assert not next(view for view in front_end.link.workers if view.rank == 1).serves
    front_end.say("rank 0", ready(0), WITHOUT_1)
    front_end.check_launch_goes_on()
    assert front_end.link.workers.masked == {1: DIED.reason}


def test_ranks_that_may_sleep_are_woken_to_notice_a_death():
    front_end = Starting()
    front_end.say("rank 0", hello(0), ready(0))
    front_end.say("rank 1", hello(1), ready(1))
    assert front_end.woken == []
    front_end.say("launcher", DIED)
    assert (b"rank 0", Wake(LAUNCH, NEXT_STEP)) in front_end.woken


def test_the_death_of_an_earlier_process_is_none_of_the_one_that_took_its_place():
    front_end = Starting()
    back = Members(0, LAUNCH, 2, [0, 1], "rank 1 rejoined")
    front_end.say("rank 0", hello(0), ready(0), back)
    front_end.say("new rank 1", hello(1, num_before=1), ready(1), Members(1, LAUNCH, 2, [0, 1], "rank 1 rejoined"))
    front_end.say("launcher", DIED)
    front_end.check_launch_goes_on()
    assert [view.serves for view in front_end.link.workers] == [True, True]


def test_a_rank_that_fails_by_itself_before_the_others_have_attached_ends_nothing():
    front_end = Starting()
    front_end.say("rank 1", hello(1), ready(1), Fatal(1, LAUNCH, "out of memory", 1))
    front_end.check_launch_goes_on()
    front_end.say("rank 0", hello(0), ready(0), WITHOUT_1)
    front_end.check_launch_goes_on()
    assert front_end.link.workers.is_ready


def test_a_new_process_that_fails_while_it_starts_ends_nothing_at_a_front_end_that_knows_it_alone():
    front_end = Starting()
    front_end.say("new rank 1", hello(1, num_before=1, is_ready=False), Fatal(1, LAUNCH, "x is wrong; set y", 1))
    front_end.check_launch_goes_on()


def test_a_new_process_that_attaches_before_the_others_is_masked_until_it_takes_part():
    front_end = Starting()
    front_end.say("new rank 1", hello(1, num_before=1, is_ready=False), ready(1))
    assert front_end.link.workers.masked.keys() == {1}
    front_end.say("rank 0", hello(0), ready(0), WITHOUT_1)
    assert front_end.link.workers.masked.keys() == {1}
    front_end.say("rank 0", Members(0, LAUNCH, 2, [0, 1], "rank 1 rejoined"))
    assert front_end.link.workers.masked == {}
    assert [view.serves for view in front_end.link.workers] == [True, True]


def test_a_new_process_waits_where_the_others_have_not_said_yet_that_the_one_before_is_lost():
    front_end = Starting()
    front_end.say("rank 1", hello(1), ready(1))
    front_end.say("new rank 1", hello(1, num_before=1, is_ready=False))
    front_end.say("rank 0", hello(0), ready(0), WITHOUT_1)
    front_end.say("new rank 1", hello(1, num_before=1), ready(1))
    assert front_end.link.workers.by_identity(b"new rank 1") is not None
    front_end.check_launch_goes_on()


def test_a_launch_that_is_over_is_not_begun_by_what_a_dead_rank_of_it_has_said():
    front_end = Starting()
    front_end.say("launcher", Fatal(SUPERVISOR, LAUNCH, "the ranks are gone", SUPERVISOR))
    front_end.say("rank 0", hello(0), ready(0))
    assert front_end.refused == [b"rank 0"]
    assert list(front_end.link.workers) == []
    other = Hello(0, 2, 8, 200, "h")
    front_end.say("new rank 0", other, Progress(0, 8, "importing torch", 0.0))
    assert front_end.link.workers.launch_id == 8
