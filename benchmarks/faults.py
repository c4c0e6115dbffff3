"""What becomes of requests while processes are killed, stopped and slowed, connections reset and cut, a disk is full.

    python -m benchmarks.faults [--events 13] [--ranks 2] [--redundant 0] [--streams 16] [--seed 0]
    python -m benchmarks.faults --minutes 30 [--redundant 64]      a soak: faults in turn, as long as that
    python -m benchmarks.faults --minutes 30 --spare 0             a soak in which rank 0 is never killed: its curve
    python -m benchmarks.faults --minutes 10 --redundant 64 --front-ends 2   front ends and ranks are killed together
    python -m benchmarks.faults --hosts 2 --ranks 4 --redundant 32 --events 100   hosts, their cables and links as well

Serves the demo model by `moe-serve serve`, with live balancing and a trace. Streams go on all the time; a stream that
ends is replaced by the next one of a fixed list. One fault after the other is injected, once all ranks serve again. The
tokens of every stream are compared with those of the same server before anything was disturbed. With --redundant 64
the others serve on without a killed rank until it is back; with 0 they wait for it. What the processes hold is sampled;
in the last third of a soak no rank is killed, so that it shows what old ranks hold. --spare names a rank that lives as
long as the whole soak while the others are killed to its end; a table has what it held over time. With --front-ends a
front end and a rank are killed within two seconds, in either order: streams that were connected to that front end are
counted apart, and a restart of all ranks is a failure. A run that is
interrupted (SIGINT, SIGTERM) writes its tables too. A cycle of all faults takes about one minute.

With --hosts the ranks are on so many hosts, which are network namespaces (needs root), with --ranks in all. Tokens are
compared with those of one rank. While a cable is cut the front ends of all hosts are asked all the time: two sides must
never both answer. The cycle is another one: a rank or a whole host is killed, a rank is stopped for longer than its
deadline, a cable is cut in both directions or one and mended, and connections between hosts are reset.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.conditions import conditions, save, table
from benchmarks.fault_events import CYCLE, FRONT_ENDS, SPARES_ONE_RANK, SPARES_RANKS, Faults
from benchmarks.fault_hosts import CERTAIN_AFTER_S, STEP_DEADLINE_S, HostFaults, HostsSystem, tokens_of_one_rank
from benchmarks.fault_hosts import CYCLE as CYCLE_OF_HOSTS
from benchmarks.fault_soak import Soak
from benchmarks.fault_streams import Load, Tally, body, right_tokens, stream
from benchmarks.fault_system import FaultySystem

_READY_S = 120.0  # within which the system must answer again after a fault
_WHOLE_S = 180.0  # within which all ranks must serve again
_LATE_S = 15.0  # after which the last lines of all hosts are printed
_REST_S = 3.0  # after which ranks have reported that they hold nothing
_SPARED_SHARE = 1 / 3  # of a soak, at its end: no rank is killed, so that it shows what old ranks hold
_PARTS = 10  # of the life of a spared rank, a row each

AnySystem = FaultySystem | HostsSystem
AnyFaults = Faults | HostFaults


@dataclass(frozen=True)
class Event:
    """One fault.

    lasted_s:  until it was over, as a cable was mended;  answers_s: until the system answered a new request again
    whole_s:   until all ranks served again
    lost, wrong: streams meanwhile;  two_sides: whether two sides answered
    """

    name: str
    begin_s: float
    lasted_s: float
    answers_s: float
    whole_s: float
    lost: int
    wrong: int
    two_sides: int


class Run:
    """One run: what was injected so far, and what became of the streams."""

    def __init__(self, args: argparse.Namespace, system: AnySystem, faults: AnyFaults):
        self.num_launches_lost = 0
        self.tally = Tally()
        self.events: list[Event] = []
        self.stopped_by = ""
        self._faults = faults
        self._args = args
        self._system = system

    async def go(self) -> None:
        """Runs streams and faults to the end; an interrupt ends it earlier."""
        loop = asyncio.get_running_loop()
        work = asyncio.create_task(self._disturb())
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, work.cancel)
        try:
            await work
        except asyncio.CancelledError:
            self.stopped_by = "interrupted"
        except Exception as error:
            self.stopped_by = f"{type(error).__name__}: {error}"
        print(f"ended after {len(self.events)} faults {self.stopped_by}", flush=True)

    async def _disturb(self) -> None:
        raise NotImplementedError

    async def _inject_in_turn(self, names: Sequence[str], ends_s: float) -> None:
        if self._args.minutes:
            await self._inject_until(ends_s, names)
        else:
            for name in itertools.islice(itertools.cycle(names), self._args.events):
                await self._inject(name)

    async def _inject_until(self, ends_s: float, names: Sequence[str]) -> None:
        for name in itertools.cycle(names):
            if time.monotonic() > ends_s:
                return
            await self._inject(name)

    async def _inject(self, name: str) -> None:
        await asyncio.sleep(self._args.pause)
        system, begin_s, before = self._system, time.monotonic(), dataclasses.replace(self.tally)
        launch_id, two_sides = system.info()["launch_id"], self._faults.num_two_sides
        if await self._faults.by_name[name]() is False:
            return
        lasted_s = time.monotonic() - begin_s
        status = 0
        while status != 200:
            assert time.monotonic() - begin_s < _READY_S, f"no answer {_READY_S:g} s after: {name}"
            await asyncio.sleep(0.1)
            status, _, _ = await stream(system.connect, body(0, 2))
        answers_s = time.monotonic() - begin_s
        await system.serves_with(self._args.ranks, _WHOLE_S)
        self.num_launches_lost += name != "kill all ranks" and system.info()["launch_id"] != launch_id
        tally, whole_s = self.tally, time.monotonic() - begin_s
        became = tally.lost - before.lost, tally.wrong - before.wrong, self._faults.num_two_sides - two_sides
        self.events.append(Event(name, begin_s, lasted_s, answers_s, whole_s, *became))
        print(
            f"{len(self.events)}: {name}: answers after {answers_s:.1f} s, all ranks after {whole_s:.1f} s; streams "
            f"ended {tally.finished - before.finished}, in all lost {tally.lost}, wrong {tally.wrong}, cut off "
            f"{tally.cut_off}",
            flush=True,
        )


class RunOfOneHost(Run):
    """One run on this host, with samples of what the processes hold."""

    def __init__(self, args: argparse.Namespace, system: FaultySystem):
        self.faults = Faults(system, args.seed, args.spare)
        super().__init__(args, system, self.faults)
        self.soak = Soak(system, args.sample)
        self.counters: dict[str, int] = {}
        self.at_rest = ""
        self._one_host = system

    async def _disturb(self) -> None:
        args, system = self._args, self._one_host
        right = await right_tokens(system.connect, 4 * args.streams, args.tokens)
        load = Load(system.connect, right, args.tokens, self.faults.cut_off)
        self.tally = load.tally
        streams, samples = asyncio.create_task(load.run(args.streams)), asyncio.create_task(self.soak.run())
        try:
            ends_s = time.monotonic() + 60 * args.minutes
            if args.front_ends > 1:
                await self._inject_in_turn(FRONT_ENDS, ends_s)
            elif args.minutes and args.spare is not None:
                await self._inject_until(ends_s, SPARES_ONE_RANK)
            elif args.minutes:
                await self._inject_until(ends_s - 60 * args.minutes * _SPARED_SHARE, CYCLE)
                await self._inject_until(ends_s, SPARES_RANKS)
            else:
                await self._inject_in_turn(CYCLE if args.spare is None else SPARES_ONE_RANK, ends_s)
            load.goes_on = False
            await streams
        finally:
            streams.cancel()
            samples.cancel()
            await asyncio.gather(streams, samples, return_exceptions=True)
            await asyncio.sleep(_REST_S)
            with contextlib.suppress(OSError):
                info = system.info()
                self.counters, reports = info["requests"], [each["status"] for each in info["ranks"]]
                used = sum(each["num_blocks"] - each["num_free_blocks"] for each in reports if each is not None)
                self.at_rest = f"At rest afterwards: {self.counters['open']} open requests, {used} KV blocks in use."


class RunOfHosts(Run):
    """One run over several hosts."""

    def __init__(self, args: argparse.Namespace, system: HostsSystem, right: list[list[int]]):
        """right: the tokens of each request of the list"""
        self.faults = HostFaults(system, args.seed)
        super().__init__(args, system, self.faults)
        self._right, self._hosts = right, system

    async def _inject(self, name: str) -> None:
        before, num = self.num_launches_lost, len(self.events)
        try:
            await super()._inject(name)
        except Exception:
            print(self._hosts.said(), flush=True)
            raise
        if self.num_launches_lost > before:
            print(f"all ranks were started again\n{self._hosts.said()}", flush=True)
        elif any(event.whole_s - event.lasted_s > _LATE_S for event in self.events[num:]):
            print(f"a rank came back late\n{self._hosts.said()}", flush=True)

    async def _disturb(self) -> None:
        args, system = self._args, self._system
        await system.serves_with(args.ranks, _WHOLE_S)
        load = Load(system.connect, self._right, args.tokens, set())
        self.tally = load.tally
        streams = asyncio.create_task(load.run(args.streams))
        try:
            await self._inject_in_turn(args.faults or CYCLE_OF_HOSTS, time.monotonic() + 60 * args.minutes)
            load.goes_on = False
            await streams
        finally:
            streams.cancel()
            await asyncio.gather(streams, return_exceptions=True)


def report_of_hosts(args: argparse.Namespace, facts: dict[str, object], run: RunOfHosts) -> None:
    """Prints and saves the table of a run over several hosts."""
    if not run.events:
        raise SystemExit(f"nothing was injected: {run.stopped_by}")
    tally, two_sides = run.tally, run.faults.num_two_sides
    notes = (
        f"Demo model, {args.ranks} ranks on {args.hosts} hosts (network namespaces), {args.redundant} redundant "
        f"experts, engine.step_deadline_s {STEP_DEADLINE_S:g}, {args.streams} streams of {args.tokens} tokens at a "
        f"time, {len(run.events)} faults. Streams offered {tally.offered}, finished {tally.finished}, refused "
        f"{tally.refused} (429 or 503), lost {tally.lost}, with tokens other than one rank's {tally.wrong}; cuts "
        f"during which two sides answered {two_sides}; restarts of all ranks {run.num_launches_lost}. A loss is "
        f"certain, and streams may go on elsewhere, once the deadline of a step has passed; that of a rank whose host "
        f"can tell at once. Back: from the kill, or the end of the fault, until all ranks serve. {run.stopped_by} "
        f"{args.note}"
    )
    rows = list(rows_of_hosts(run.events, tally.pauses))
    name = f"faults_{args.hosts}_hosts_{args.ranks}_ranks_{args.redundant}_redundant"
    print(save(name, "Requests while ranks, hosts and cables fail", rows, facts, notes, per_cpu=True))
    if tally.lost or tally.wrong or two_sides or run.stopped_by or run.num_launches_lost:
        raise SystemExit("requests were lost or wrong, two sides answered, or the run did not come to its end")


def rows_of(events: list[Event], pauses: list[tuple[float, float]]) -> Iterator[dict[str, object]]:
    """Yields one row for each kind of fault. A stream's pause is of the fault during which it ended."""
    for name in dict.fromkeys(event.name for event in events):
        of_name = [event for event in events if event.name == name]
        yield {
            "fault": name,
            "times": len(of_name),
            "answers again after, median s": statistics.median(event.answers_s for event in of_name),
            "longest, s": max(event.answers_s for event in of_name),
            "all ranks serve again after, median s": statistics.median(event.whole_s for event in of_name),
            "longest, s ": max(event.whole_s for event in of_name),
            "longest pause of a stream, s": max(longest_pause_s(event, pauses) for event in of_name),
        }


def rows_of_hosts(events: list[Event], pauses: list[tuple[float, float]]) -> Iterator[dict[str, object]]:
    """Yields one row for each kind of fault of hosts."""
    for name in dict.fromkeys(event.name for event in events):
        of_name = [event for event in events if event.name == name]
        certain_s = CERTAIN_AFTER_S[name]
        waits = [max(longest_pause_s(event, pauses) - certain_s, 0.0) for event in of_name]
        back = [event.whole_s - event.lasted_s for event in of_name]
        yield {
            "fault": name,
            "times": len(of_name),
            "certain after, s": certain_s,
            "longest pause of a stream after that, median s": statistics.median(waits),
            "longest, s": max(waits),
            "back after, median s": statistics.median(back),
            "longest, s ": max(back),
            "streams lost": sum(event.lost for event in of_name),
            "with wrong tokens": sum(event.wrong for event in of_name),
            "two sides answered": sum(event.two_sides for event in of_name),
        }


def longest_pause_s(event: Event, pauses: list[tuple[float, float]]) -> float:
    """Returns the longest pause of a stream that ended during a fault."""
    until_s = event.begin_s + event.whole_s + 1
    return max((length for ended_s, length in pauses if event.begin_s <= ended_s <= until_s), default=0.0)


def report(args: argparse.Namespace, facts: dict[str, object], run: RunOfOneHost) -> None:
    """Prints and saves the tables."""
    if not run.events:
        raise SystemExit(f"nothing was injected: {run.stopped_by}")
    tally, counters, kills = run.tally, run.counters, run.faults.kills
    whole = sum(event.name == "kill all ranks" for event in run.events)
    notes = (
        f"Demo model, {args.ranks} ranks, {args.redundant} redundant experts, {args.streams} streams of {args.tokens} "
        f"tokens at a time, {len(run.events)} faults. Kills: {kills.total()} ("
        + ", ".join(f"{kind}: {number}" for kind, number in kills.items())
        + f"); connections reset: {run.faults.num_resets}; restarts of all ranks: {whole}. "
        f"Streams offered {tally.offered}, finished {tally.finished}, refused {tally.refused} (429 or 503), lost "
        f"{tally.lost}, with wrong tokens {tally.wrong}, ended with their front end {tally.cut_off}; other restarts of "
        f"all ranks {run.num_launches_lost}; moved to another rank {counters.get('num_moved', 0)}, "
        f"submitted again {counters.get('num_resubmitted', 0)}. {run.at_rest} {run.stopped_by} {args.note}\n\n"
        "What the processes held: of those that took each other's place, the oldest; without the first minute of each; "
        "medians of the first and the last sixth of the samples.\n\n"
    )
    soak = run.soak.rows()
    notes += table(soak) if soak else "too few samples"
    name = f"faults_{args.ranks}_ranks_{args.redundant}_redundant"
    if args.spare is not None:
        name += "_one_rank_spared"
        notes += f"\n\nRank {args.spare} was never killed. What it held, medians of a tenth of its life each:\n\n"
        notes += table(run.soak.curve(f"rank {args.spare}", _PARTS))
    if args.front_ends > 1:
        name += f"_{args.front_ends}_front_ends"
    rows = list(rows_of(run.events, tally.pauses))
    print(save(name, "Requests while processes and connections fail", rows, facts, notes, per_cpu=True))
    if tally.lost or tally.wrong or run.stopped_by or run.num_launches_lost:
        raise SystemExit("requests were lost or wrong, or the run did not come to its end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=len(CYCLE), help=f"faults, of a cycle of {len(CYCLE)} in turn")
    parser.add_argument("--minutes", type=float, default=0.0, help="inject faults for so long, whatever --events says")
    parser.add_argument("--hosts", type=int, default=0, help="hosts that share the ranks; 0: this machine as it is")
    parser.add_argument(
        "--fault", action="append", dest="faults", choices=CYCLE_OF_HOSTS, help="with --hosts: this alone"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--redundant", type=int, default=0, help="eplb.num_redundant_experts")
    parser.add_argument("--front-ends", type=int, default=1, help="server.api_workers")
    parser.add_argument("--spare", type=int, metavar="RANK", help="a rank that is never killed, nor are all at once")
    parser.add_argument("--streams", type=int, default=16, help="open at a time")
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds before each fault")
    parser.add_argument("--sample", type=float, default=10.0, help="seconds between two samples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--note", default="", help="what else to say of the machine")
    args = parser.parse_args()
    facts = conditions("pyzmq", "msgspec")
    if args.hosts:
        right = asyncio.run(tokens_of_one_rank(4 * args.streams, args.tokens))
        with HostsSystem(args.hosts, args.ranks // args.hosts, args.redundant) as hosts:
            run_of_hosts = RunOfHosts(args, hosts, right)
            asyncio.run(run_of_hosts.go())
        report_of_hosts(args, facts, run_of_hosts)
        return
    with FaultySystem(args.ranks, args.redundant, args.front_ends) as system:
        run = RunOfOneHost(args, system)
        asyncio.run(run.go())
    report(args, facts, run)


if __name__ == "__main__":
    main()
