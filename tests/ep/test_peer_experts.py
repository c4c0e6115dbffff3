"""Experts out of the memory of a rank that serves: whole and right, or not at all."""

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from moe_serve.dispatch import peer_streams
from moe_serve.dispatch.peer_streams import PeerStreams
from moe_serve.ep import peer_experts
from moe_serve.ep.expert_store import ExpertStore
from moe_serve.ep.expert_transfer import Checksum
from moe_serve.ep.peer_experts import ExpertServer, PeerExperts, SlotChanges
from moe_serve.eplb.placement import Placement

HIDDEN, WIDTH, NUM_EXPERTS = 520, 300, 4  # more than a piece, and no whole number of rows of a checksum
PLACEMENT = Placement([[0, 1, 2, 3], [3, 2, 1, 0]], NUM_EXPERTS, 2)
SERVER = 1  # its rank: experts 2 and 3, then 1 and 0


def store_of(num_slots: int) -> ExpertStore:
    shapes = {"gate_up": (num_slots, 2 * WIDTH, HIDDEN), "down": (num_slots, HIDDEN, WIDTH)}
    return ExpertStore({name: torch.randn(shape) for name, shape in shapes.items()})


class Scene:
    """Rank 1 serves; `read` is rank 0's side."""

    def __init__(self) -> None:
        self.stores = [store_of(2), store_of(2)]
        self.changes, self.placement = SlotChanges(), PLACEMENT
        self.streams = PeerStreams(lambda rank: None, None)
        self.server = ExpertServer(
            self.streams, SERVER, self.stores, self.changes, lambda: self.placement, self.now, deadline_s=20.0
        )

    def now(self) -> bytes:
        return b"where they are"

    def read(self, *experts: tuple[int, int]) -> tuple[list[bool], list[dict[str, Tensor]]]:
        slots = [store_of(1).slot(0) for _ in experts]
        with PeerExperts(PeerStreams(lambda rank: self.streams.name, None), deadline_s=20.0) as peers:
            wanted = [(*expert, slot) for expert, slot in zip(experts, slots, strict=True)]
            return peers.read({SERVER: wanted})[SERVER], slots


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.server.close()


def same(slot: dict[str, Tensor], store: ExpertStore, number: int) -> bool:
    return all(torch.equal(tensor, store.slot(number)[name]) for name, tensor in slot.items())


def test_experts_arrive_as_they_are_in_their_slots_and_others_are_not_there(scene: Scene) -> None:
    arrived, slots = scene.read((0, 3), (1, 3), (1, 0), (0, 3), (7, 0), (0, 99))
    assert arrived == [True, False, True, True, False, False]
    assert same(slots[0], scene.stores[0], 1)
    assert same(slots[2], scene.stores[1], 1)
    assert same(slots[3], scene.stores[0], 1), "an expert may be wanted twice"
    with PeerExperts(PeerStreams(lambda rank: scene.streams.name, None), deadline_s=20.0) as peers:
        assert peers.ask_placement(SERVER) == scene.now()
        assert peers.ask_placement(SERVER) is not None, "and again"


def test_nothing_is_given_while_slots_change_or_when_they_have_changed_meanwhile(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scene.changes:
        assert scene.read((0, 2))[0] == [False]
    assert scene.read((0, 2))[0] == [True]
    add = Checksum.add

    def moved_meanwhile(self: Checksum, piece: Tensor) -> None:
        with scene.changes:
            scene.placement = Placement([[2, 3, 0, 1], [3, 2, 1, 0]], NUM_EXPERTS, 2)
        add(self, piece)

    monkeypatch.setattr(Checksum, "add", moved_meanwhile)
    assert scene.read((0, 2))[0] == [False]


def test_an_expert_that_arrives_with_other_bytes_is_none(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    receive_into = peer_experts.receive_into

    def fill_with_a_changed_bit(stream: socket.socket, part: memoryview) -> None:
        receive_into(stream, part)
        if len(part) == peer_experts.PIECE_BYTES:
            part[12345] ^= 4

    monkeypatch.setattr(peer_experts, "receive_into", fill_with_a_changed_bit)
    assert scene.read((0, 2), (0, 3))[0] == [False, False]


@contextmanager
def answering(data: bytes, *, closes: bool) -> Iterator[str]:
    """Yields the name of a rank that answers with these bytes, and then ends or says nothing more."""
    streams, kept = PeerStreams(lambda rank: None, None), []

    def take(stream: socket.socket, source: int) -> None:
        stream.recv(100)
        stream.sendall(data)
        stream.close() if closes else kept.append(stream)

    streams.listen(take)
    yield streams.name
    streams.close()
    for stream in kept:
        stream.close()


@pytest.mark.parametrize("data", [b"", b"\1", b"\1" + bytes(1000), b"\0\1" + bytes(1 << 20)])
@pytest.mark.parametrize("closes", [True, False])
def test_a_rank_that_goes_away_in_the_middle_is_given_up(data: bytes, closes: bool) -> None:
    with (
        answering(data, closes=closes) as name,
        PeerExperts(PeerStreams(lambda rank: name, None), deadline_s=0.2) as peers,
    ):
        wanted = [(0, expert, store_of(1).slot(0)) for expert in range(3)]
        assert peers.read({SERVER: wanted}) == {SERVER: [False] * 3}
        assert not peers.answers(SERVER)
        assert peers.read({SERVER: wanted}) == {SERVER: [False] * 3}
        assert peers.ask_placement(SERVER) is None


@pytest.mark.parametrize("name", [None, "", "moe_serve-nobody"])
def test_a_rank_that_does_not_listen_is_given_up_at_once(name: str | None) -> None:
    with PeerExperts(PeerStreams(lambda rank: name, None), deadline_s=60.0) as peers:
        assert peers.ask_placement(SERVER) is None


def test_a_reader_that_asks_for_nonsense_or_too_much_is_cut_off_and_others_are_served(scene: Scene) -> None:
    for said in (b"\xff" * 4, b"\1\0\0\0", b"\1"):
        with PeerStreams(lambda rank: scene.streams.name, None).dial(SERVER, 20.0) as stream:
            stream.sendall(said)
            stream.shutdown(socket.SHUT_WR)
            assert stream.recv(1) == b""
    assert scene.read((0, 2))[0] == [True]


def test_another_user_of_the_machine_gets_no_byte_and_is_not_asked(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_streams.os, "geteuid", lambda: os.getuid() + 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.connect(f"\0{scene.streams.name}")
        assert stream.recv(1) == b""
    with pytest.raises(OSError, match="another user listens there"):
        PeerStreams(lambda rank: scene.streams.name, None).dial(SERVER, 20.0)


def test_a_server_that_is_closed_leaves_no_thread_behind(scene: Scene) -> None:
    def threads() -> Sequence[threading.Thread]:
        return [each for each in threading.enumerate() if each.name in ("peer streams", "experts for another rank")]

    with PeerStreams(lambda rank: scene.streams.name, None).dial(SERVER, 20.0):
        scene.server.close()
        for thread in threads():
            thread.join(60)
        assert not threads()
