"""What a rank knows about where experts are, told to others and compared with its own slots."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.engine.recovery.full_placement import (
    decode,
    encode,
    meaning_of_a_loss,
    meaning_of_a_lost_host,
    slots_to_read,
    spareable_ranks,
    too_few_slots,
    with_reloads,
)
from moe_serve.eplb.placement import Placement
from moe_serve.errors import PeerError
from moe_serve.models.weights import ExpertToRead


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    num_ranks, slots = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    num_logical = draw(st.integers(1, num_ranks * slots))
    free = num_ranks * slots - num_logical
    rows = [
        draw(st.permutations([*range(num_logical), *draw(st.lists(st.integers(-1, num_logical - 1), min_size=free,
                                                                  max_size=free))]))
        for _ in range(2)
    ]  # fmt: skip
    return Placement(np.array(rows), num_logical, num_ranks, (3, 5), version=draw(st.integers(0, 99)))


@given(placements())
def test_a_placement_is_told_as_it_is(placement: Placement) -> None:
    told = decode(encode(placement), placement)
    assert (told.physical_to_logical == placement.physical_to_logical).all()
    assert (told.version, told.moe_layer_ids, told.num_ranks) == (placement.version, (3, 5), placement.num_ranks)
    assert not any(slots_to_read(placement, told, rank) for rank in range(placement.num_ranks))


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff\x00", msgspec.msgpack.encode([2, 0, bytes(24)]), msgspec.msgpack.encode([1, 0, bytes(20)]),
     msgspec.msgpack.encode([1, 0, b"\x07\0\0\0" * 6])],
    ids=["nothing", "noise", "another form", "another shape", "an unknown expert"],
)  # fmt: skip
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(PeerError, match=r"does not fit .* start all ranks with one version"):
        decode(data, Placement([[0, 1, 2, 3, 4, 5]], 6, 3))


def test_a_rank_reads_the_experts_that_its_own_slots_lack() -> None:
    holds = Placement([[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, -1, -1]], 4, 3)
    wanted = Placement([[0, 1, 3, 2, 0, 1], [0, 1, 2, -1, 3, 0]], 4, 3)
    assert slots_to_read(holds, wanted, 0) == []
    assert slots_to_read(holds, wanted, 1) == [ExpertToRead(0, 3, 0), ExpertToRead(0, 2, 1)], "and empties one"
    assert slots_to_read(holds, wanted, 2) == [ExpertToRead(1, 3, 0), ExpertToRead(1, 0, 1)]


@given(placements(), st.data())
def test_reloads_complete_the_others_and_leave_masked_ranks_what_they_hold(placement: Placement, data) -> None:
    masked = sorted(data.draw(st.sets(st.integers(0, placement.num_ranks - 1), max_size=placement.num_ranks - 1)))
    num_left = placement.num_ranks - len(masked)
    if num_left * placement.slots_per_rank < placement.num_logical:
        assert f"cannot be spared: the {num_left} rank" in too_few_slots(placement, masked)
        return
    full, reloaded = with_reloads(placement, masked)
    serving, lost = full.without_ranks(masked)
    assert lost == []
    assert serving.version == placement.version + 2, "a round that is staged would lead to version + 1"
    by_rank = (2, placement.num_ranks, -1)
    before, after = (each.physical_to_logical.reshape(by_rank) for each in (placement, full))
    assert (before[:, masked] == after[:, masked]).all()
    to_read = [slots_to_read(placement, full, rank) for rank in range(placement.num_ranks)]
    assert sum(map(len, to_read)) == len(reloaded)


def test_what_a_loss_means_follows_from_slots_and_replicas() -> None:
    twice = Placement([[0, 1, 2, 2, 3, 0, 1, 3, 1]], 4, 3)
    assert meaning_of_a_loss(twice) == ("the others serve on without any", "every expert has slots on two ranks")
    some = Placement([[0, 1, 2, 2, 3, 0, 0, 1, 2]], 4, 3)
    assert meaning_of_a_loss(some)[1] == (
        "after the loss of rank 1 they first read up to 1 experts from the checkpoint again (layer 0); another "
        "placement would leave none to read (eplb.init_expert_location)"
    )
    assert spareable_ranks(some) == [0, 1, 2]
    none = Placement([[0, 1, 2, 3, 4, 0]], 5, 3)
    assert spareable_ranks(none) == []
    assert meaning_of_a_loss(none) == (
        "ends serving",
        "the 2 ranks that are left have 4 slots per layer for 5 experts; to go on, raise eplb.num_redundant_experts to "
        "4, or change the file in eplb.init_expert_location",
    )
    assert meaning_of_a_loss(none, restarts=True)[0] == "the others wait until it is started again"
    raised = Placement.trivial(1, 5, 3, 4)
    assert spareable_ranks(raised) == [0, 1, 2], "as many as the message says"


def test_what_the_loss_of_a_host_means_follows_from_slots_and_replicas() -> None:
    pairs, names = [0, 0, 1, 1, 2, 2], ["a", "b", "c"]
    spread = Placement.trivial(1, 12, 6, 12)
    assert meaning_of_a_lost_host(spread, pairs, names) == (
        "the others serve on without any",
        "every expert has slots on two hosts",
    )
    neighbours = Placement([[0, 1, 2, 0, 2, 3, 0, 1, 3, 4, 5, -1]] * 8, 6, 6, tuple(range(3, 11)))
    assert meaning_of_a_lost_host(neighbours, pairs, names)[1] == (
        "after the loss of c they first read up to 16 experts from the checkpoint again (layers 3, 4, 5, 6, 7, …); "
        "another placement would leave none to read (eplb.init_expert_location)"
    )
    few = Placement.trivial(1, 12, 6, 6)
    assert meaning_of_a_lost_host(few, pairs, names)[1].endswith(
        "eplb.num_redundant_experts: 12 would leave none to read"
    )
    two = meaning_of_a_lost_host(Placement.trivial(1, 8, 4, 8), [0, 0, 1, 1], names[:2])
    assert two == (
        "the others serve on without b",
        "every expert has slots on two hosts; without a they wait until it is back: as fewer than half of the ranks, "
        "or a half without rank 0, they cannot tell its loss from that of the cable",
    )
    unequal = meaning_of_a_lost_host(Placement.trivial(1, 2, 4, 6), [0, 1, 1, 1], names[:2])
    assert unequal[0] == "the others serve on without a", "rank 0 decides between halves only"
    assert meaning_of_a_lost_host(Placement.trivial(1, 8, 4, 4), [0, 0, 1, 1], names[:2]) == (
        "the others wait until it is back",
        "the 2 ranks that are left have 6 slots per layer for 8 experts; to go on, raise eplb.num_redundant_experts to "
        "8, or change the file in eplb.init_expert_location",
    )
