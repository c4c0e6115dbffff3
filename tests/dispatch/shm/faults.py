"""Ranks that die, stop or come late in the middle of a step: forked processes over regions that they share by descent.

No process group: nothing but the transport under test connects the ranks. Each step's rows and results are checked
against what the ranks that take part must have sent; data say who sent them, in which step.
"""

import mmap
import os
import pickle
import signal
import struct
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection, get_context
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_serve.dispatch.base import BufferLimits, PackedRows, TransportRequest
from moe_serve.dispatch.shm.memory import Mappings, ShmMemory
from moe_serve.dispatch.shm.region import region_shape
from moe_serve.dispatch.shm.transport import ShmAllToAll
from moe_serve.dispatch.wire import make_wire
from moe_serve.errors import PeerError
from moe_serve.kernels.rows import weighted_sum_reference
from tests.dispatch.shm.regions import is_overrun, map_anonymous

HIDDEN, TOPK, SLOTS, NUM_TOKENS = 32, 4, 3, 6
PHASES = ("dispatch send", "dispatch receive", "combine send", "combine receive")
GOOD_STEPS = 3
LIMITS = BufferLimits(NUM_TOKENS, HIDDEN, TOPK, SLOTS)


@dataclass(frozen=True)
class Report:
    """What a survivor saw.

    missed, phase, sequence: of its error;  reported_s, recovered_s: from the victim's end to the error, and to the end
    of the first good step;  members: of the group after it;  rejoined_s: from the victim's wake to a good step of all
    """

    missed: int
    phase: str
    sequence: int
    reported_s: float
    recovered_s: float
    members: tuple[int, ...]
    rejoined_s: float = 0.0
    overruns: int = 0


def make_transport(rank: int, mappings: Mappings, deadline_s: float, compiled: bool = True) -> ShmAllToAll:
    """Returns a rank's end over regions made by `regions`."""
    request = TransportRequest("shm", LIMITS, torch.float32, deadline_s=deadline_s, compiled=compiled)
    return ShmAllToAll(ShmMemory(rank, mappings), request)


def regions(num_ranks: int) -> Mappings:
    return map_anonymous(num_ranks, region_shape(num_ranks, LIMITS, make_wire("auto", torch.float32)).num_bytes)


def inputs(step: int, rank: int, members: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rows that name step, rank and token, ids of slots of members, weights."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    slots = torch.tensor([member * SLOTS + slot for member in members for slot in range(SLOTS)])
    ids = slots[torch.randint(0, len(slots), (NUM_TOKENS, TOPK), generator=draw)]
    hidden = torch.zeros(NUM_TOKENS, HIDDEN)
    hidden[:, 0], hidden[:, 1], hidden[:, 2] = step, rank, torch.arange(NUM_TOKENS)
    hidden[:, 3:] = torch.randn(NUM_TOKENS, HIDDEN - 3, generator=draw)
    return hidden, ids, torch.rand(NUM_TOKENS, TOPK, generator=draw)


def run_step(transport: ShmAllToAll, rank: int, step: int, members: list[int]) -> None:
    """One dispatch and one combine; every row and every result is checked."""
    hidden, ids, weights = inputs(step, rank, members)
    arrived = transport.dispatch(hidden, ids).wait()
    assert isinstance(arrived.rows, PackedRows)
    expected, slots = [], []
    for slot in range(rank * SLOTS, (rank + 1) * SLOTS):
        for source in members:
            theirs, their_ids, _ = inputs(step, source, members)
            tokens = (their_ids == slot).nonzero()[:, 0]
            expected.append(theirs[tokens])
            slots += [slot] * len(tokens)
    assert torch.equal(arrived.rows.x, torch.cat(expected)), f"rank {rank} got wrong rows in step {step}"
    out = arrived.rows.x * (1 + torch.tensor(slots, dtype=torch.float32)[:, None])
    combined = transport.combine(out, weights, arrived.handle).wait()
    results = hidden.repeat_interleave(TOPK, 0) * (1 + ids.flatten().float()[:, None])
    index = torch.arange(ids.numel()).view(ids.shape)
    assert torch.equal(combined, weighted_sum_reference(results, index, weights)), f"wrong result in step {step}"


def run_steps(transport: ShmAllToAll, rank: int, steps: range, members: list[int]) -> None:
    for step in steps:
        run_step(transport, rank, step, members)


def meet(board: mmap.mmap, number: int, rank: int, members: list[int]) -> None:
    """Waits until all have come here: the step of a slow rank would be void if another one went on and died.

    board: 64 bytes for each number, which counts the meetings
    """
    board[64 * number + rank] = 1
    while not all(board[64 * number + member] for member in members):
        time.sleep(0.0005)


def end_in(transport: ShmAllToAll, phase: str, kill: Callable[[], None]) -> None:
    """Makes this rank call `kill` in the middle of a phase of its next step."""
    channel = transport._rows if phase.startswith("dispatch") else transport._results
    if phase.endswith("send"):

        def signal_one_and_end(call: int) -> None:
            everybody = transport._peers.others
            transport._peers.others = everybody[:1]  # the hardest case: some have the flag, some have not
            signal_all(call)
            transport._peers.others = everybody
            channel.signal = signal_all  # type: ignore[method-assign]
            kill()
            signal_all(call)

        signal_all = channel.signal
        channel.signal = signal_one_and_end  # type: ignore[method-assign]
    else:

        def end(call: int) -> None:
            channel.wait = wait  # type: ignore[method-assign]
            kill()
            wait(call)

        wait = channel.wait
        channel.wait = end  # type: ignore[method-assign]


def rejoin(transport: ShmAllToAll, timeout_s: float) -> list[int]:
    """Waits until the others have taken this rank back; returns the ranks."""
    transport.membership.ask_to_rejoin()
    deadline_s = time.monotonic() + timeout_s
    while not transport.membership.try_rejoin():
        assert time.monotonic() < deadline_s, f"not taken back within {timeout_s:g} s"
        time.sleep(0.0002)
    return transport.membership.members


def body(
    rank: int, mappings: Mappings, clock: mmap.mmap, victim: int, phase: str, sign: int, deadline_s: float
) -> Report | None:
    transport = make_transport(rank, mappings, deadline_s)
    everybody = list(range(len(mappings)))
    patience = transport.membership._deadline_s
    transport.membership._deadline_s = 20.0  # processes start when they like
    run_steps(transport, rank, range(GOOD_STEPS), everybody)
    meet(clock, 1, rank, everybody)
    transport.membership._deadline_s = patience
    rejoins = sign == signal.SIGSTOP

    def kill() -> None:
        clock[:8] = struct.pack("d", time.monotonic())
        os.kill(os.getpid(), sign)

    if rank == victim:
        end_in(transport, phase, kill)
        with pytest.raises(PeerError, match="came too late") as caught:
            run_steps(transport, rank, range(GOOD_STEPS, GOOD_STEPS + 3), everybody)
        assert caught.value.rank == rank
        members = rejoin(transport, 20)
        assert members == everybody
        run_step(transport, rank, 100, everybody)
        return None

    step = GOOD_STEPS
    error = None
    while error is None:
        try:
            run_step(transport, rank, step, everybody)
            step += 1
            assert step < GOOD_STEPS + 3, "nobody was missed"
        except PeerError as missed:
            error = missed
    reported_s = time.monotonic()
    members = transport.membership.regroup({error.rank})
    transport.membership._deadline_s = 20.0  # nobody else is to be missed, also on a busy machine
    run_step(transport, rank, 50, members)
    recovered_s = time.monotonic()
    run_steps(transport, rank, range(51, 54), members)
    ended_s = struct.unpack("d", clock[:8])[0]
    rejoined_s = 0.0
    if rejoins:
        started_s = time.monotonic()
        while transport.membership.waiting_to_rejoin() != [victim]:
            assert time.monotonic() - started_s < 60, "the late rank does not come back"
            if rank == min(members):  # again and again: on a busy machine it may be missed before it stops itself
                os.kill(int(transport._memory._heads[victim][0]), signal.SIGCONT)  # type: ignore[attr-defined]
            time.sleep(0.001)
        members_now = transport.membership.regroup(joining=[victim])
        assert members_now == everybody
        run_step(transport, rank, 100, everybody)
        rejoined_s = time.monotonic() - started_s
    return Report(
        error.rank, error.phase, error.step, reported_s - ended_s, recovered_s - ended_s, tuple(members), rejoined_s,
        sum(is_overrun(each) for each in transport._received),
    )  # fmt: skip


def run_fault(num_ranks: int, victim: int, phase: str, sign: int, deadline_s: float = 0.05) -> dict[int, Report]:
    """Returns the survivors' reports."""
    torch.set_num_threads(1)
    clock = mmap.mmap(-1, 4096)
    results = run_forked(num_ranks, body, regions(num_ranks), clock, victim, phase, sign, deadline_s, dies=(victim,))
    return {rank: report for rank, report in results.items() if report is not None}


def run_forked(
    num_ranks: int,
    fn: Callable[..., Any],
    *args: Any,
    dies: tuple[int, ...] = (),
    anew: Callable[..., Any] | None = None,
    timeout_s: float = 60,
) -> dict[int, Any]:
    """Returns {rank: fn(rank, *args)} of forked processes; those of `dies` may end without an answer.

    anew: what runs in the place of each of them then, in a process of its own; None: nothing does
    """
    context = get_context("fork")
    open_pipes: dict[Any, int] = {}
    processes = []

    def begin(rank: int, call: Callable[..., Any]) -> Any:
        ours, theirs = context.Pipe()
        process = context.Process(target=_answer, args=(theirs, call, rank, args), daemon=True)
        process.start()
        theirs.close()
        open_pipes[ours] = rank
        processes.append(process)
        return process

    process_of = {rank: begin(rank, fn) for rank in range(num_ranks)}
    results: dict[int, Any] = {}
    try:
        deadline = time.monotonic() + timeout_s
        while open_pipes:
            ready = connection.wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic()))
            assert ready, f"ranks {sorted(open_pipes.values())} hang"
            for pipe in ready:
                rank = open_pipes.pop(pipe)
                try:
                    ok, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    process_of[rank].join()  # a zombie still has its id
                    assert rank in dies, f"rank {rank} died"
                    if anew is not None:
                        process_of[rank] = begin(rank, anew)
                    continue
                assert ok, f"rank {rank}:\n{value}"
                results[rank] = value
    finally:
        for process in processes:
            process.kill()
            process.join()
    return results


def _answer(pipe: Any, fn: Callable[..., Any], rank: int, args: tuple[Any, ...]) -> None:
    try:
        answer = (True, fn(rank, *args))
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))
    os._exit(0)
