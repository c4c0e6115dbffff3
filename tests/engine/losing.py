"""Real engines on forked ranks, one of which dies or stops at a chosen moment.

No process outlives its rank's death here as in tests/ranks.py: a dead rank is what is wanted. A front end's part is
played by files, see file_mailbox.py.
"""

import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from moe_serve.config import load_config
from moe_serve.dispatch.base import EpGroup
from moe_serve.dispatch.peer_streams import PeerStreams
from moe_serve.dispatch.shared_files import FileMark, SharedFiles
from moe_serve.engine.build import build_engine
from moe_serve.engine.engine import Engine
from moe_serve.engine.protocol.messages import Submit, Voided
from moe_serve.engine.status import totals_of
from moe_serve.engine.step.exchange import ShmExchange, make_exchange, open_exchange
from moe_serve.engine.step.plan import StepPlan
from moe_serve.eplb import read_trace
from moe_serve.eplb.load import LoadRecord
from moe_serve.eplb.migration.moves import MigrationRound, SlotMove
from moe_serve.eplb.placement import Placement
from moe_serve.errors import PeerError
from moe_serve.models.weights import ExpertToRead
from tests.dispatch.shm import faults
from tests.engine.file_mailbox import FileMailbox, tokens_in
from tests.engine.moving import DYNAMIC, lead_restlessly, real_balancer
from tests.engine.strikes import Fault, strike

Moves = Literal["none", "written", "carried", "decided"]
NUM_ROUNDS = 40  # of each leader


@dataclass
class Outcome:
    """What one rank saw until its end. rows: computed by its finished steps. ended: the dead ranks of each group

    voids: what it told of its void steps
    experts_from: where a new process had its experts from
    num_read: experts that it read again;  num_told: how often it was told a placement that it did not know
    version: of the placement at the end;  activated: how many ranks took part in each activation
    decisions: kinds of those that a real balancer made on this rank
    """

    groups: list[list[int]] = field(default_factory=list)
    ended: list[list[int]] = field(default_factory=list)
    voids: list[Voided] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    reported_by_victim: list[int] = field(default_factory=list)
    rows: int = 0
    step: int = 0
    topk: int = 0
    num_read: int = 0
    experts_from: dict[str, int] = field(default_factory=dict)
    num_told: int = 0
    version: int = 0
    activated: list[int] = field(default_factory=list)
    decisions: list[str] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    error: str = ""


class RandomRounds:
    """Moves experts while the ranks serve, without a mover: in every other step that begins no group, all ranks write
    the experts of a random legal round into their slots, and activate it."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._begin_step = engine.recovery.begin_step
        engine.recovery.begin_step = self._move  # type: ignore[method-assign]

    def _move(self, plan: StepPlan) -> None:
        self._begin_step(plan)
        recovery, served = self._engine.recovery, self._engine.served
        if plan.step % 2 or plan.regrouped or plan.rejoining:
            return
        table, rank = served.placement, self._engine.rank
        legal = random_round(table, recovery.members, random.Random(plan.step))
        with served.changing:
            for move in legal.moves:
                if move.dst_rank == rank:
                    expert = int(table.physical_to_logical[move.layer, move.src_slot])
                    self.bring(ExpertToRead(move.layer, expert, move.dst_slot % table.slots_per_rank))
            recovery.activate_round(legal)

    def bring(self, expert: ExpertToRead) -> None:
        served = self._engine.served
        served.sources.checkpoint.read([expert], served.decoder.experts)


def random_round(placement: Placement, members: Sequence[int], draw: random.Random) -> MigrationRound:
    """Returns moves to ranks that take part, two for each of them, after which every expert has a slot."""
    slots, table = placement.slots_per_rank, placement.physical_to_logical
    moves: list[SlotMove] = []
    for dst in [*members, *members]:
        layer = draw.randrange(placement.num_layers)
        if any(move.layer == layer for move in moves):
            continue  # one move a layer: no expert loses two slots
        own = table[layer, dst * slots : (dst + 1) * slots].tolist()
        free = [slot for slot, held in enumerate(own) if held < 0 or placement.replica_count[layer, held] > 1]
        read = [slot for slot, held in enumerate(table[layer].tolist()) if held >= 0 and held not in own]
        if free and read:
            src = draw.choice(read)
            moves.append(SlotMove(layer, src // slots, src, dst, dst * slots + draw.choice(free)))
    return MigrationRound(tuple(moves))


def count_repairs(engine: Engine, outcome: Outcome) -> None:
    recovery = engine.recovery
    read, take, activate = engine.served.read_experts, recovery.take_placement, recovery.activate_round

    def counted(experts: Sequence[ExpertToRead], held: Placement | None = None) -> None:
        outcome.num_read += len(experts)
        read(experts, held)

    def activated(this: MigrationRound) -> None:
        activate(this)
        outcome.activated.append(len(recovery.members))

    def told(data: bytes) -> None:
        before = engine.served.placement
        take(data)
        outcome.num_told += engine.served.placement is not before

    engine.served.read_experts, recovery.take_placement = counted, told  # type: ignore[method-assign]
    recovery.activate_round = activated  # type: ignore[method-assign]


def be_patient_at_first(engine: Engine) -> None:
    """Lets ranks begin when they like: deadlines hold from step 2 on."""
    membership, exchange, run_step = engine.served.membership, engine.exchange, engine.run_step
    assert isinstance(exchange, ShmExchange)
    if membership is None:
        return
    deadlines = membership._deadline_s, exchange._deadline_s
    membership._deadline_s = exchange._deadline_s = 30.0

    def count() -> StepPlan:
        if engine.step == 2:
            membership._deadline_s, exchange._deadline_s = deadlines
        return run_step()

    engine.run_step = count  # type: ignore[method-assign]


def note_reported(engine: Engine, outcome: Outcome, victims: Sequence[int]) -> None:
    recorder = engine.served.recorder
    assert recorder is not None
    reported = torch.stack([recorder._reported[victim] for victim in victims]).sum(0)
    num_layers, num_logical = len(engine.served.spec.moe_layer_ids), engine.served.spec.num_logical
    load = reported[: num_layers * num_logical]  # counts of decode steps lie behind it
    outcome.reported_by_victim = load.view(num_layers, num_logical).sum(1).tolist()


def note_what_replacements_take_over(engine: Engine, outcome: Outcome) -> None:
    windows = engine.served.windows
    begin_anew = windows.begin_anew

    def noted(rank: int) -> None:
        if not outcome.reported_by_victim:
            note_reported(engine, outcome, [rank])
        begin_anew(rank)

    windows.begin_anew = noted  # type: ignore[method-assign]


def check_slots(engine: Engine) -> None:
    """Every slot of this rank holds the bytes of its expert."""
    served, table = engine.served, engine.served.placement
    own = table.physical_to_logical.reshape(table.num_layers, table.num_ranks, -1)[:, engine.rank]
    stores = [store.staging(store.num_slots) for store in served.decoder.experts]
    experts = [ExpertToRead(row, int(own[row, slot]), slot) for row, slot in np.argwhere(own >= 0).tolist()]
    served.sources.checkpoint.read(experts, stores)
    for each in experts:
        held = served.decoder.experts[each.layer_row].slot(each.slot)
        for name, tensor in stores[each.layer_row].slot(each.slot).items():
            assert torch.equal(held[name], tensor), f"{each} has other bytes"


def run_engine(
    rank: int,
    num_ranks: int,
    submits: Sequence[Submit],
    overrides: list[str],
    fault: Fault | None,
    moves: Moves,
    folder: str,
) -> Outcome:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    files = SharedFiles() if fault is not None and fault.anew else None
    streams = streams_in(folder) if files is not None else None
    group = EpGroup(rank, num_ranks, torch.device("cpu"), dist.group.WORLD, files=files, streams=streams)
    config = load_config(overrides=overrides)
    mailbox = FileMailbox(rank, num_ranks, submits, fault, Path(folder))
    exchange = make_exchange(config.engine.exchange, dist.group.WORLD, True, config.engine.step_deadline_s, files)
    engine = build_engine(config, group, exchange, mailbox)
    if files is not None:
        left = [os.getpid(), files.marks(), files.kernels, streams.name if streams is not None else ""]
        (Path(folder) / f"files{rank}").write_text(json.dumps(left))
    engine.served.warm_up()
    dist.barrier()
    return go(engine, mailbox, num_ranks, fault, moves)


def streams_in(folder: str) -> PeerStreams:
    """Returns a rank's streams with those whose names lie in the folder."""

    def name_of(rank: int) -> str:
        name: str = json.loads((Path(folder) / f"files{rank}").read_text())[3]
        return name

    return PeerStreams(name_of, None)


def run_anew(
    rank: int,
    num_ranks: int,
    submits: Sequence[Submit],
    overrides: list[str],
    fault: Fault,
    moves: Moves,
    folder: str,
) -> Outcome:
    """`run_engine` in the place of a rank that has died, once the others have masked it."""
    while not (Path(folder) / f"masked{rank}").exists():
        time.sleep(0.01)
    (Path(folder) / f"masked{rank}").unlink()
    living = next(other for other in range(num_ranks) if other not in [each.victim for each in fault.all])
    pid, marks, kernels, _ = json.loads((Path(folder) / f"files{living}").read_text())
    files = SharedFiles(pid, {name: FileMark(*mark) for name, mark in marks.items()}, kernels)
    config = load_config(overrides=overrides)
    mailbox = FileMailbox(rank, num_ranks, submits, fault, Path(folder))
    mailbox.begin_anew()
    exchange = open_exchange(files, rank, num_ranks, config.engine.step_deadline_s)
    group = EpGroup(rank, num_ranks, torch.device("cpu"), files=files, streams=streams_in(folder))
    engine = build_engine(config, group, exchange, mailbox)
    return go(engine, mailbox, num_ranks, None, moves)


def go(engine: Engine, mailbox: FileMailbox, num_ranks: int, fault: Fault | None, moves: Moves) -> Outcome:
    """Runs an engine to its end, with its part of the fault."""
    rank, outcome = (
        engine.rank,
        Outcome(topk=engine.served.spec.topk, groups=mailbox.groups, ended=mailbox.ended, voids=mailbox.voids),
    )
    outcome.experts_from = engine.served.info.get("experts_from", {})
    be_patient_at_first(engine)
    count_repairs(engine, outcome)
    note_what_replacements_take_over(engine, outcome)
    rounds = RandomRounds(engine) if moves == "written" else None
    if moves == "carried":
        lead_restlessly(engine, NUM_ROUNDS)
    if moves in ("written", "carried"):
        # A stopped rank then surely wakes behind the others: in time, it would still find the rows of its own step.
        mailbox.may_continue = lambda: num_ranks - 1 in outcome.activated
    for each in fault.all if fault is not None else []:
        if rank == each.victim:
            strike(engine, each, rounds)
    try:
        engine.run()
    except PeerError as error:
        outcome.error = str(error)
        return outcome
    engine.scheduler.check()
    assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.num_blocks
    outcome.counters = totals_of(engine.counters, engine.recovery, engine.scheduler, [])
    outcome.rows = engine.counters.num_decode_tokens + engine.counters.num_prefill_tokens
    outcome.step = engine.step
    outcome.version = engine.served.placement.version
    check_slots(engine)
    if moves == "decided" and engine.balancing.leads:
        outcome.decisions = [decision.kind for decision in real_balancer(engine).rebalancer.decisions]
    if fault is not None and not fault.anew:
        note_reported(engine, outcome, [each.victim for each in fault.all])
    outcome.waited_s = engine.served.waited_s
    return outcome


def serve_and_lose(
    num_ranks: int, submits: Sequence[Submit], overrides: Sequence[str], fault: Fault | None, moves: Moves = "none"
) -> tuple[dict[int, Outcome], dict[str, list[int]], list[LoadRecord]]:
    """Returns what each rank saw that came to an end, the tokens of each request as a reader has them, the trace.

    moves: how experts move while the ranks serve: "written", see RandomRounds; "carried" by the movers, as a restless
           leader says, NUM_ROUNDS rounds by each leader; "decided" by a real balancer
    Each rank has its own weights, unless model.weight_cache is among the overrides.
    """
    settings = [
        f"parallel.num_ranks={num_ranks}", "cache.num_blocks=256", "cache.block_size=8", "engine.heartbeat_s=0.02",
        "dispatch.backend=low_latency", "engine.exchange=shm", "engine.numerics=batch_invariant",
        "model.weight_cache=none", *overrides,
    ]  # fmt: skip
    dies = tuple(each.victim for each in fault.all if each.sign == signal.SIGKILL) if fault is not None else ()
    with tempfile.TemporaryDirectory() as folder:
        settings.append(f"eplb.record_path={folder}/load.jsonl")
        settings += DYNAMIC if moves in ("carried", "decided") else []
        outcomes = faults.run_forked(
            num_ranks, run_engine, num_ranks, submits, settings, fault, moves, folder, dies=dies,
            anew=run_anew if fault is not None and fault.anew else None,
        )  # fmt: skip
        tokens = {request_id: output for request_id, (output, is_all) in tokens_in(Path(folder)).items() if is_all}
        return outcomes, tokens, list(read_trace(Path(folder) / "load.jsonl"))
