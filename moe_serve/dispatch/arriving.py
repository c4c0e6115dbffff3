"""The receive half of a dispatch over shared memory: all rows at once, or slot by slot as they come."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_serve.dispatch.base import Dispatched
from moe_serve.dispatch.channel import Channel, Peers, check_epoch
from moe_serve.dispatch.inbox import Int64Array
from moe_serve.dispatch.lane_work import Lanes, LaneWork, Placed, Room, Rooms, rows_needed

SLOT_GROUPS = 8  # in so many steps slots are named by `by_slot`
PHASE = "dispatch receive"
BySlot = tuple[Dispatched, Iterator[Sequence[int]]]


@dataclass
class RowReceiver:
    """What the receive halves of all dispatches of a transport share.

    finish: makes what the caller gets of rows that are placed in a room, in an epoch
    """

    peers: Peers
    channel: Channel
    work: LaneWork
    lanes: Lanes
    rooms: Rooms
    finish: Callable[[Placed, Room, int], Dispatched]


class ArrivingRows:
    """One dispatch on its way; `Arriving` of base.py."""

    __slots__ = ("_arrived", "_call", "_epoch", "_failed", "_own", "_receiver", "_sent", "_slots")

    def __init__(self, receiver: RowReceiver, sent: object, own: Tensor, call: int):
        """sent: what `send_rows` gave;  own: this rank's rows, encoded;  call: number of the dispatch"""
        self._receiver, self._call = receiver, call
        self._sent: object = sent
        self._own: Tensor | None = own
        self._epoch = receiver.peers.epoch
        self._arrived: Dispatched | None = None
        self._slots: Iterator[Sequence[int]] = iter(())
        self._failed: Exception | None = None

    def wait(self) -> Dispatched:
        if self._arrived is None:
            self._arrived = self._receive()
            self._sent = self._own = None
        for _ in self._slots:
            pass
        if self._failed is not None:  # some slots never came
            raise self._failed
        return self._arrived

    def by_slot(self) -> BySlot:
        if self._arrived is None:
            if self._receiver.lanes.wire.dispatch.is_identity:
                self._open()
            else:  # rows of a source are decoded together
                self._arrived = self._receive()
                self._slots = iter([range(self._receiver.lanes.shape.slots_per_rank)])
        assert self._arrived is not None
        return self._arrived, self._slots

    def _receive(self) -> Dispatched:
        receiver = self._receiver
        check_epoch(receiver.peers, self._epoch, PHASE)
        receiver.channel.arrive(self._call)
        room = receiver.rooms.take()
        placed = self._place(room)
        receiver.channel.finish(self._call)
        return receiver.finish(placed, room, self._epoch)

    def _open(self) -> None:
        """Waits for entries, and lays the rows out."""
        receiver = self._receiver
        check_epoch(receiver.peers, self._epoch, PHASE)
        for source in receiver.peers.others:
            receiver.channel.await_rows(self._call, source, 0)
        room = receiver.rooms.take()
        placed = self._place(room, torch.zeros(receiver.lanes.shape.slots_per_rank, dtype=torch.bool))
        self._arrived = receiver.finish(placed, room, self._epoch)
        self._slots = self._draw_slots(room)

    def _draw_slots(self, room: Room) -> Iterator[Sequence[int]]:
        try:
            yield from self._receive_slots(room)
        except Exception as error:
            self._failed = error
            raise

    def _receive_slots(self, room: Room) -> Iterator[Sequence[int]]:
        receiver = self._receiver
        needed = rows_needed(receiver.lanes, self._call % 2, receiver.peers.others)
        for group in _in_order_of_need(needed):
            check_epoch(receiver.peers, self._epoch, PHASE)
            for source in receiver.peers.others:
                receiver.channel.await_rows(self._call, source, int(needed[source, group].max()))
            wanted = torch.zeros(needed.shape[1], dtype=torch.bool)
            wanted[group] = True
            self._place(room, wanted)
            yield [int(slot) for slot in group]
        receiver.channel.arrive(self._call)
        receiver.channel.finish(self._call)
        self._sent = self._own = None

    def _place(self, room: Room, wanted: Tensor | None = None) -> Placed:
        receiver = self._receiver
        assert self._own is not None, "rows are placed before they are let go"
        return receiver.work.place_rows(
            self._sent, self._own, receiver.rooms.rows(room), self._call % 2, receiver.peers.others, wanted
        )


def _in_order_of_need(needed: Int64Array) -> list[Int64Array]:
    """Returns slots in a few groups, those first that wait for the fewest rows. needed: [R, S]"""
    order = np.argsort(needed.max(axis=0), kind="stable")
    return np.array_split(order, min(SLOT_GROUPS, len(order)))
