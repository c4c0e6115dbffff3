"""Carries experts by torch.distributed: gloo among CPU ranks, NCCL among GPUs, on a process group of its own.

Exchange i of a round is one all-to-all of all ranks that carries piece i of every expert of the round; one more carries
the checksums. A few exchanges are on their way at once; they are polled and never waited for. (Plain isend and irecv
would not do: gloo completes them only inside wait(), and NCCL blocks where ranks send and receive in a ring.)

Collectives have to match, so a round that ends early issues its other exchanges at once, over bytes that nobody reads.
No exchange writes into a staging slot: what arrives lies in a receive buffer, which serves again only when its exchange
is complete, also where the round has ended.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from moe_serve.dispatch.base import EpGroup
from moe_serve.dispatch.peer_calls import lost_connection
from moe_serve.ep.expert_transfer import IncomingExpert, OutgoingExpert, Transfers
from moe_serve.errors import LostConnectionError

PIECE_BYTES = {"cpu": 1 << 18, "cuda": 1 << 22}
IN_FLIGHT = 4  # exchanges at once: on GPUs this bounds what a step moves, since the host's clock does not see copies
TIMEOUT = timedelta(minutes=10)  # of torch, which then breaks the process group; a round is given up long before
CLOSE_S = 5.0  # for exchanges that are on their way when a rank closes
_TRAILER_BYTES = 16  # the checksum


class CollectiveCarrier:
    """ExpertCarrier over a process group of its own, whose ranks all start and end the same rounds."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, staging_slots: int):
        """group: used by nobody else, and destroyed by `close`"""
        self.piece_bytes = PIECE_BYTES[device.type]
        self._group = group
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        shape = (1 + IN_FLIGHT, 2, staging_slots * max(self.piece_bytes, _TRAILER_BYTES))
        self._unread, *self._free = torch.zeros(shape, dtype=torch.uint8, device=device)
        self._round: _Round | None = None
        self._in_flight: deque[_Exchange] = deque()
        self._ended: list[_Exchange] = []  # still on their way though their round has ended
        self._lost: LostConnectionError | None = None

    def start(self, transfers: Transfers) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())  # slots are written on the stream of the forward
        self._round = _Round(transfers, self._group.size()) if transfers.num_pieces else None

    def carry(self, max_bytes: int) -> int:
        handled = 0
        if self._round is not None:
            with self._calls():
                self._reclaim()
                while handled < max_bytes:
                    if self._in_flight and self._in_flight[0].work.is_completed():
                        handled += self._receive(self._round, self._in_flight.popleft())
                    elif self._free and not self._round.is_issued:
                        handled += self._send(self._round, self._free.pop())
                    else:
                        break
        return handled

    def end(self) -> None:
        self._ended += self._in_flight
        self._in_flight.clear()
        if self._round is not None:
            with suppress(LostConnectionError), self._calls():  # a broken connection matters to the next round
                while not self._round.is_issued:
                    self._ended.append(self._issue(self._round, self._unread))
        self._round = None

    def close(self) -> None:
        self.end()
        deadline_s = time.monotonic() + CLOSE_S
        while self._ended and time.monotonic() < deadline_s:  # torch would wait for them without a deadline
            self._reclaim()
            time.sleep(0.001)
        dist.destroy_process_group(self._group)

    def _send(self, moved: "_Round", buffers: Tensor) -> int:
        """Issues the next exchange; returns its bytes. One without any takes time too, and counts as a piece."""
        num_bytes = moved.read_into(buffers[0])
        self._in_flight.append(self._issue(moved, buffers))
        return num_bytes or self.piece_bytes

    def _issue(self, moved: "_Round", buffers: Tensor) -> "_Exchange":
        number, to_ranks, from_ranks = moved.next_sizes()
        send, receive = buffers
        work = dist.all_to_all_single(
            receive[: sum(from_ranks)],
            send[: sum(to_ranks)],
            from_ranks,
            to_ranks,
            group=self._group,
            async_op=True,
        )
        return _Exchange(work, number, buffers)

    def _receive(self, moved: "_Round", exchange: "_Exchange") -> int:
        """Puts what has arrived into the staging slots; returns its bytes."""
        exchange.work.wait()  # it is complete: raises what went wrong; orders the streams of a GPU
        num_bytes = moved.write_from(exchange.buffers[1], exchange.number)
        self._free.append(exchange.buffers)
        return num_bytes

    def _reclaim(self) -> None:
        """Takes back the buffers of ended rounds whose exchanges are complete."""
        for exchange in self._ended:
            if exchange.work.is_completed() and exchange.buffers is not self._unread:
                self._free.append(exchange.buffers)
        self._ended = [exchange for exchange in self._ended if not exchange.work.is_completed()]

    @contextmanager
    def _calls(self) -> Iterator[None]:
        """Runs calls of torch.distributed; raises LostConnectionError for good once one of them has failed."""
        if self._lost is not None:
            raise self._lost
        try:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                yield
        except RuntimeError as error:
            self._lost = lost_connection(error, "a move of experts")
            raise self._lost from error


class _Round:
    """The exchanges of one round, as one rank sees them."""

    def __init__(self, transfers: Transfers, num_ranks: int):
        self._round_id = transfers.round_id
        # In the order in which an all-to-all lays them out; two for one rank stay in the order of the round.
        self._outgoing = sorted(transfers.outgoing, key=lambda expert: expert.dst_rank)
        self._incoming = sorted(transfers.incoming, key=lambda expert: expert.src_rank)
        self._num_ranks = num_ranks
        self._num_pieces, self._next = transfers.num_pieces, 0

    @property
    def is_issued(self) -> bool:
        """Whether all exchanges are on their way: those of pieces, and the one of checksums."""
        return self._next > self._num_pieces

    def _size(self, expert: OutgoingExpert | IncomingExpert, exchange: int) -> int:
        """Returns the bytes of an expert in an exchange: none in the last ones if others have more pieces."""
        if exchange == self._num_pieces:
            return _TRAILER_BYTES
        return len(expert.pieces[exchange]) if exchange < len(expert.pieces) else 0

    def next_sizes(self) -> tuple[int, list[int], list[int]]:
        """Takes the next exchange; returns which it is, and its bytes to each rank and from each rank."""
        to_ranks, from_ranks = [0] * self._num_ranks, [0] * self._num_ranks
        for sent in self._outgoing:
            to_ranks[sent.dst_rank] += self._size(sent, self._next)
        for received in self._incoming:
            from_ranks[received.src_rank] += self._size(received, self._next)
        self._next += 1
        return self._next - 1, to_ranks, from_ranks

    def read_into(self, buffer: Tensor) -> int:
        """Fills a send buffer for the next exchange; returns the bytes."""
        start = 0
        for expert in self._outgoing:
            size = self._size(expert, self._next)
            if self._next == self._num_pieces:
                sealed = expert.checksum() ^ self._round_id
                buffer[start : start + size] = sealed.view(torch.uint8)
            elif size:
                expert.read_into(buffer[start:])
            start += size
        return start

    def write_from(self, buffer: Tensor, exchange: int) -> int:
        """Puts a receive buffer where it belongs, in the order of the exchanges; returns the bytes."""
        start = 0
        for expert in self._incoming:
            size = self._size(expert, exchange)
            arrived = buffer[start : start + size]
            if exchange == self._num_pieces:
                expert.compare(arrived.view(torch.int64) ^ self._round_id)
            elif size:
                expert.next_piece.copy_(arrived)
                expert.accept()
            start += size
        return start


@dataclass(frozen=True)
class _Exchange:
    """An exchange on its way. number: which of its round;  buffers: [2, n] uint8, what is sent and what arrives"""

    work: dist.Work
    number: int
    buffers: Tensor


def make_collective_carrier(group: EpGroup, staging_slots: int) -> CollectiveCarrier:
    """Makes a process group with the ranks of a group, and its carrier; a collective call."""
    ranks = dist.get_process_group_ranks(group.process_group)
    own = dist.new_group(ranks, timeout=TIMEOUT, backend="nccl" if group.device.type == "cuda" else "gloo")
    hello = torch.zeros(len(ranks), dtype=torch.uint8, device=group.device)
    dist.all_to_all_single(torch.empty_like(hello), hello, group=own)  # connects the ranks, which takes a while, now
    return CollectiveCarrier(own, group.device, staging_slots)
