"""What the planner process is asked and answers, as bytes: whole in any pieces, and refused where it is not."""

import contextlib
import struct
import zlib

import msgspec
import numpy as np
import pytest

from moe_serve.eplb.migration.moves import RoundLimits
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.planning.worker import PIECE_BYTES, Ask, MessageReader, Reply, WireError, answer, pieces
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.policy import PlanRequest, RankCost
from moe_serve.topology import Topology

TOPOLOGY = Topology(2, 2)


def request(num_layers=3, num_logical=8, num_redundant=4, **more):
    tokens = np.random.default_rng(1).random((num_layers, num_logical)) ** 4 * 1000
    placement = Placement.trivial(num_layers, num_logical, 4, num_redundant)
    return PlanRequest(tokens, TOPOLOGY, placement.num_slots, current=placement, **more)


def same(one, other):
    """Whether two requests or plans are equal, arrays and placements included."""
    for name, value in vars(one).items():
        theirs = vars(other)[name]
        if isinstance(value, Placement):
            assert value.physical_to_logical.tolist() == theirs.physical_to_logical.tolist()
            assert (value.moe_layer_ids, value.version) == (theirs.moe_layer_ids, theirs.version)
        elif isinstance(value, np.ndarray):
            assert value.dtype == theirs.dtype
            np.testing.assert_array_equal(value, theirs)
        else:
            assert value == theirs, name
    return True


def joined(message):
    return b"".join(pieces(message))


def test_requests_and_plans_come_back_as_they_were():
    asked = request(
        by_source=np.arange(3 * 4 * 8).reshape(3, 4, 8),
        activations=np.full((3, 8), 0.5),
        cost=RankCost(1e-6, 2e-6),
        objective={"tokens": 1.0, "step_time": 0.5},
        excluded_ranks=(3,),
        moe_layer_ids=(7, 8, 9),
        max_moves=2,
        max_total_moves=5,
        max_rank_moves=1,
        min_gain=0.001,
    )
    back = MessageReader(Ask).feed(joined(Ask(4, "greedy", asked, RoundLimits(), "nodes")))
    assert (back.request_id, back.policy) == (4, "greedy")
    assert same(asked, back.request)
    plan = make_policy("refined").plan(request(uneven_shares=True))
    assert plan.shares is not None
    assert same(plan, MessageReader(Reply).feed(joined(Reply(5, plan, None))).plan)


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_bytes_may_arrive_in_any_pieces(size):
    data = b"".join(joined(Ask(number, "greedy", request(), RoundLimits(), "nodes")) for number in (1, 2))
    reader, seen = MessageReader(Ask), []
    for first in range(0, len(data), size):
        message = reader.feed(data[first : first + size])
        seen += [] if message is None else [message.request_id]
    while (message := reader.feed(b"")) is not None:
        seen.append(message.request_id)
    assert seen == [1, 2]


def test_a_large_request_is_made_piece_by_piece():
    large = request(num_layers=40, num_logical=256, num_redundant=0, by_source=np.ones((40, 4, 256), dtype=np.int64))
    parts = list(pieces(Ask(1, "greedy", large, RoundLimits(), "nodes")))
    assert len(parts) > 3
    assert max(map(len, parts)) <= PIECE_BYTES + 8
    assert same(large, MessageReader(Ask).feed(b"".join(parts)).request)


def test_every_flipped_byte_is_noticed():
    data = joined(Reply(1, make_policy("greedy").plan(request()), None))
    rng = np.random.default_rng(0)
    for at in [*range(40), *rng.integers(0, len(data), 100).tolist()]:
        wrong = bytearray(data)
        wrong[at] ^= 0x41
        reader = MessageReader(Reply)
        with contextlib.suppress(WireError):
            assert reader.feed(bytes(wrong)) is None, at  # a longer piece is announced: it never completes


@pytest.mark.parametrize("change", [{"request": {}}, {"request_id": "x"}, {"policy": 3}], ids=str)
def test_a_message_of_another_kind_is_refused(change):
    whole = msgspec.to_builtins({"request_id": 1, "policy": "greedy", "request": {"tokens": 3}} | change)

    class Other(msgspec.Struct):
        request_id: object
        policy: object
        request: object

    with pytest.raises(WireError, match="not a Ask"):
        MessageReader(Ask).feed(joined(Other(**whole)))


def test_a_message_that_claims_to_be_huge_is_refused():
    head = b"MSP1" + struct.pack("<IQ", 10, 1 << 50)
    with pytest.raises(WireError, match="at most"):
        MessageReader(Ask).feed(head + struct.pack("<I", zlib.crc32(head)))


def test_a_request_that_a_policy_refuses_is_answered_in_words():
    asked = request(num_groups=2, off_home=0.0)
    reply = answer(Ask(3, "no such policy", asked, RoundLimits(), "nodes"))
    assert reply.plan is None
    assert "no such policy" in reply.problem
