"""Where a rank dies or stops: inside the calls of its engine, at a chosen moment of a step, never after a time."""

import os
import signal
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moe_serve.dispatch.shm.counts import NativeCounts
from moe_serve.engine.engine import Engine
from moe_serve.engine.step.plan import StepPlan
from moe_serve.ep.expert_store import ExpertStore
from moe_serve.ep.expert_transfer import IncomingExpert, OutgoingExpert

CHANNELS = {"counts": "_counts", "dispatch": "_rows", "combine": "_results"}


@dataclass(frozen=True)
class Fault:
    """phase: "exchange", "sample", "window", "activate" (the slots are written), "bring" (the expert of a move into its
    slot), "reload", or counts, dispatch or combine with send or receive, "exchange receive" after others can read this
    rank's row; "predict" with send or receive, as combine, of the layer that predicts. Of a leader's rounds: "hear"
    with send or receive; "carry" with send or receive, in the middle of a piece; "write" before an expert goes into its
    slot; "restored" when every expert is on two ranks of a smaller group
    calls: of it from that step on that pass unharmed
    sign: SIGKILL or SIGSTOP;  then: another rank that dies;  anew: a new process takes the place of each that died"""

    victim: int
    phase: str
    step: int
    calls: int = 0
    sign: int = signal.SIGKILL
    then: "Fault | None" = None
    anew: bool = False

    @property
    def all(self) -> "list[Fault]":
        return [self, *(self.then.all if self.then is not None else [])]


def strike(engine: Engine, fault: Fault, rounds: Any = None) -> None:
    """Makes this rank die or stop where the fault says. rounds: where "bring" is a method of it"""
    transport: Any = engine.served.all_to_all
    calls, inside = fault.calls, True

    def here() -> bool:
        nonlocal calls
        if not inside or engine.step < fault.step:
            return False
        calls -= 1
        return calls == -1

    def end() -> None:
        os.kill(os.getpid(), fault.sign)

    def before(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def struck(*args: Any) -> Any:
            if here():
                end()
            return original(*args)

        setattr(owner, name, struck)

    def during(owner: Any, name: str) -> None:
        """Strikes only in calls of this method."""
        nonlocal inside
        inside = False
        original = getattr(owner, name)

        def entered(*args: Any) -> Any:
            nonlocal inside
            inside = True
            try:
                return original(*args)
            finally:
                inside = False

        setattr(owner, name, entered)

    phase, _, half = fault.phase.partition(" ")
    if phase == "hear":
        during(engine.balancing, "_hear_round")
        phase = "counts"
    if phase == "predict":
        during(engine.served, "predict")
        phase = "combine"
    if phase == "carry" and half == "receive":
        before(IncomingExpert, "accept")  # the piece is copied, and not yet counted
    elif phase == "carry":
        read_into = OutgoingExpert.read_into

        def read_half_and_end(expert: OutgoingExpert, buffer: Tensor) -> int:
            if here():
                half_piece = expert.pieces[expert.num_read][: len(buffer) // 2]
                buffer[: len(half_piece)].copy_(half_piece)
                end()
            return read_into(expert, buffer)

        OutgoingExpert.read_into = read_half_and_end  # type: ignore[method-assign]
    elif phase == "write":
        before(ExpertStore, "write_slot")
    elif phase == "exchange":
        before(engine.exchange, "_wait" if half == "receive" else "gather")
    elif phase == "restored":
        end_step = engine.balancing.end_step

        def end_when_restored(plan: StepPlan, step_s: float) -> None:
            end_step(plan, step_s)
            placement, members = engine.served.placement, engine.recovery.members
            is_smaller = len(members) < placement.num_ranks
            if is_smaller and not any(placement.without_ranks([member])[1] for member in members):
                end()

        engine.balancing.end_step = end_when_restored  # type: ignore[method-assign]
    elif phase == "sample":
        before(engine.scheduler, "complete")
    elif phase == "window":
        before(engine.served.windows, "close")
    elif phase == "activate":
        before(engine.recovery, "activate_round")
    elif phase == "bring":
        assert rounds is not None
        before(rounds, "bring")
    elif phase == "reload":
        before(engine.recovery, "_read")
    elif phase == "counts" and isinstance(transport._exchange, NativeCounts):
        exchange = transport._exchange
        send_all = exchange._send

        def send_to_one_and_end(facts: int, buffer: int, mask: int, *arguments: int) -> int:
            if here():
                send_all(facts, buffer, mask & -mask, *arguments)
                end()
            return send_all(facts, buffer, mask, *arguments)

        if half == "receive":
            before(exchange, "_receive")
        else:
            exchange._send = send_to_one_and_end  # type: ignore[assignment]
    elif half == "receive":
        before(getattr(transport, CHANNELS[phase]), "wait")
    else:
        channel = getattr(transport, CHANNELS[phase])
        signal_all = channel.signal

        def signal_one_and_end(call: int) -> None:
            if here():
                others = transport._peers.others
                transport._peers.others = others[:1]  # the hardest case: some have the flag, some have not
                signal_all(call)
                transport._peers.others = others
                end()
            signal_all(call)

        channel.signal = signal_one_and_end
