"""Through shared memory nobody takes bytes of another round, wherever a rank is interrupted."""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_serve.dispatch.shm.memory import ShmMemory
from moe_serve.ep.expert_carrier_shm import ShmCarrier, region_bytes
from moe_serve.ep.expert_transfer import IncomingExpert, OutgoingExpert, Transfers
from tests.dispatch.shm.regions import map_anonymous

PIECE, NUM_PIECES = 8, 3


class InterruptedIncoming(IncomingExpert):
    """Lets something happen between the look at a ticket and the copy of a piece."""

    def __init__(self, pieces: list[Tensor], before_copy: Callable[[], None]):
        super().__init__(0, 0, 0, pieces)
        self.before_copy = before_copy

    @property
    def next_piece(self) -> Tensor:
        self.before_copy()
        return super().next_piece


class InterruptedOutgoing(OutgoingExpert):
    """Lets something happen between the look at a ticket and the word that announces a piece."""

    def __init__(self, pieces: list[Tensor], after_copy: Callable[[], None]):
        super().__init__(1, pieces)
        self.after_copy = after_copy

    def read_into(self, buffer: Tensor) -> int:
        num_bytes = super().read_into(buffer)
        self.after_copy()
        return num_bytes


def make_carriers(num_ranks: int) -> list[ShmCarrier]:
    shared = map_anonymous(num_ranks, region_bytes(PIECE * NUM_PIECES, 1))
    memories = [ShmMemory(rank, shared, watch_processes=False) for rank in range(num_ranks)]
    return [ShmCarrier(memory, PIECE * NUM_PIECES, 1, PIECE) for memory in memories]


def expert_of(value: int) -> list[Tensor]:
    return list(torch.full((NUM_PIECES, PIECE), value, dtype=torch.uint8))


def sending(value: int) -> Transfers:
    """Returns a round in which rank 0 sends an expert of these bytes to rank 1; each value is a round of its own."""
    return Transfers(value, NUM_PIECES, [OutgoingExpert(1, expert_of(value))], [])


def receiving(value: int, expert: IncomingExpert) -> Transfers:
    return Transfers(value, NUM_PIECES, [], [expert])


def finish(source: ShmCarrier, destination: ShmCarrier, expert: IncomingExpert, value: int) -> None:
    """Carries the expert of a round that both have started, and checks it."""
    for _ in range(20):
        source.carry(1)
        destination.carry(1)
    assert expert.is_right()
    assert torch.equal(torch.stack(list(expert.pieces)), torch.stack(expert_of(value)))


def test_a_source_that_turns_to_another_rank_in_the_middle_of_a_copy_is_noticed() -> None:
    for num_taken in range(NUM_PIECES):
        source, slow, other = make_carriers(3)
        source.start(sending(5))
        expert = InterruptedIncoming(expert_of(0), lambda: None)
        slow.start(receiving(5, expert))
        source.carry(1 << 20)
        for _ in range(num_taken):
            slow.carry(1)

        def turn(source: ShmCarrier = source, other: ShmCarrier = other) -> None:
            source.end()
            source.start(Transfers(7, NUM_PIECES, [OutgoingExpert(2, expert_of(7))], []))
            other.start(receiving(7, IncomingExpert(0, 0, 0, expert_of(0))))
            assert source.carry(1 << 20) == PIECE * NUM_PIECES, "it overwrites its send buffer"

        expert.before_copy = turn
        slow.carry(1)
        expert.before_copy = lambda: None
        slow.carry(1 << 20)
        assert expert.num_written == num_taken
        assert all(bool((piece == 5).all()) for piece in expert.pieces[:num_taken])


def test_a_source_that_was_stopped_in_the_middle_of_a_copy_publishes_for_nobody() -> None:
    for num_sent in range(NUM_PIECES):
        source, destination = make_carriers(2)
        stops = [False] * num_sent + [True] + [False] * NUM_PIECES
        wanted: list[IncomingExpert] = []

        def go_on_without_it(
            stops: list[bool] = stops, destination: ShmCarrier = destination, wanted: list[IncomingExpert] = wanted
        ) -> None:
            if stops.pop(0):  # the others cancel the round and start it anew
                destination.end()
                wanted.append(IncomingExpert(0, 0, 0, expert_of(0)))
                destination.start(receiving(5, wanted[0]))

        slow = InterruptedOutgoing(expert_of(5), go_on_without_it)
        destination.start(receiving(5, IncomingExpert(0, 0, 0, expert_of(0))))
        source.start(Transfers(5, NUM_PIECES, [slow], []))
        while not wanted:
            source.carry(1)
        destination.carry(1 << 20)
        assert wanted[0].num_written == 0, "what it has published was for the ticket that was taken away"
        stops += [False] * 10
        finish(source, destination, wanted[0], 5)


def test_what_is_left_of_an_older_round_is_not_taken_for_a_newer_one_of_the_same_moves() -> None:
    source, destination = make_carriers(2)
    for value in (1, 2, 3):  # the slot holds other bytes each time; the round has the same number
        expert = IncomingExpert(0, 0, 0, expert_of(0))
        destination.start(receiving(9, expert))
        destination.carry(1 << 20)
        assert expert.num_written == 0, "the source has not started yet"
        source.start(Transfers(9, NUM_PIECES, [OutgoingExpert(1, expert_of(value))], []))
        finish(source, destination, expert, value)
        source.end()
        destination.end()


def test_a_source_copies_nothing_for_who_waits_for_another_round() -> None:
    source, destination = make_carriers(2)
    source.start(sending(5))
    assert source.carry(1 << 20) == 0
    destination.start(receiving(6, IncomingExpert(0, 0, 0, expert_of(0))))
    assert source.carry(1 << 20) == 0
    destination.end()
    destination.start(receiving(5, IncomingExpert(0, 0, 0, expert_of(0))))
    assert source.carry(1 << 20) == PIECE * NUM_PIECES
    assert source.carry(1 << 20) == 0
    source.end()
    destination.end()
    source.start(sending(5))
    assert source.carry(1 << 20) == 0, "who has ended its round waits for nothing"
