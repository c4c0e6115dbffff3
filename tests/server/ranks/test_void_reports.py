"""Why a step was void: one sentence from the reports of all ranks."""

import logging

import pytest

from moe_serve.engine.protocol.messages import Members, Voided
from moe_serve.server.ranks.bridge import why_void
from tests.server.served import in_event_loop, serving, until


def void(rank: int, missing: list[int], step: int = 7, layer: int = 3, phase: str = "dispatch receive") -> Voided:
    others = [other for other in range(4) if other != rank]
    return Voided(rank, 0, step, layer, phase, 93, missing, [each for each in others if each not in missing], "late")


def host_of(rank: int) -> str:
    return "ab"[rank // 2]


@pytest.mark.parametrize(
    ("reports", "sentence"),
    [
        (
            [void(0, [3]), void(1, [2, 3]), void(2, [3])],
            "step 7, layer 3, dispatch receive 93: ranks 0, 1 on a and rank 2 on b waited for rank 3 on b, which "
            "waited for nobody: look at its last lines",
        ),
        (
            [void(0, [1, 2, 3]), void(1, [0, 2, 3])],
            "step 7, layer 3, dispatch receive 93: ranks 0, 1 on a waited for ranks 2, 3 on b, of which nothing was "
            "heard: look at their last lines, and at the network to b",
        ),
        (
            [void(0, [2, 3]), void(1, [2, 3]), void(2, [0, 1]), void(3, [1])],
            "step 7, layer 3, dispatch receive 93: ranks 0, 1 on a and ranks 2, 3 on b waited for ranks 0, 1 on a and "
            "ranks 2, 3 on b, all of them for ranks of other hosts: look at the network between these",
        ),
        (
            [void(0, [1]), void(1, [0], layer=-1, phase="exchange", step=6)],
            "step 7, layer 3, dispatch receive 93: ranks 0, 1 on a waited for ranks 0, 1 on a, so they wait for each "
            "other: look at what each logged of this step",
        ),
        (
            [
                Voided(0, 0, 7, 3, "combine", -1, [1, 2, 3], [], "late"),
                Voided(1, 0, 7, 3, "combine", -1, [0, 2, 3], [], "late"),
            ],
            "step 7, layer 3, combine: ranks 0, 1 on a waited for ranks 2, 3 on b, of which nothing was heard: look at "
            "their last lines, and at the network to b",
        ),
        ([void(0, []), void(1, [])], None),
    ],
    ids=["a rank", "a host", "a cable", "each other", "a call without a number", "nobody"],
)
def test_the_sentence_follows_from_whom_all_waited_for(reports: list[Voided], sentence: str | None) -> None:
    assert why_void(reports, host_of) == sentence
    assert why_void(reports[::-1], host_of) == sentence


@in_event_loop
async def test_the_front_end_says_it_once_when_all_ranks_that_go_on_have_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    async with serving(3, info={"on_lost_rank": "mask"}) as served:
        for rank in (0, 1):
            assert "waited for" not in caplog.text
            served.workers[rank].say(void(rank, [2]))
            served.workers[rank].say(Members(rank, 0, 1, [0, 1], "rank 2 died"))
            await until(lambda: 2 in served.bridge.workers.masked)
        await until(lambda: "waited for rank 2 on testhost" in caplog.text)
    assert caplog.text.count("waited for rank 2 on testhost") == 1
    assert "step 7, layer 3, dispatch receive 93: ranks 0, 1 on testhost waited" in caplog.text
