"""Puts one rank's engine together from the configuration: wires all floors of the engine.

`build_served_model` is the only function that knows attention, experts and balancing together.
"""

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moe_serve.attention_dp.batch import BatchBuilder
from moe_serve.attention_dp.host_pages import HostPages
from moe_serve.attention_dp.kv_cache import KvCache
from moe_serve.attention_dp.page_channel import PageReceiver, PageSender, check_room_for_state
from moe_serve.attention_dp.page_peers import OtherHosts
from moe_serve.attention_dp.page_ring import PageFiles
from moe_serve.attention_dp.pages import PageTiers, open_folder
from moe_serve.attention_dp.request_blocks import RequestBlocks
from moe_serve.attention_dp.scheduler import Scheduler
from moe_serve.attention_dp.speculation import Speculator
from moe_serve.attention_dp.state_slots import SNAPSHOT_TOKENS, StateSlots
from moe_serve.config import ServeConfig, model_dir, served_name
from moe_serve.dispatch.base import AnyAllToAll, BufferLimits, EpGroup, TransportRequest
from moe_serve.dispatch.hosts.handshake import PREFIXES
from moe_serve.dispatch.make import make_all_to_all
from moe_serve.engine.balancing.balancing import make_balancing
from moe_serve.engine.balancing.record_control import Responder, make_record_control
from moe_serve.engine.engine import Engine
from moe_serve.engine.model.agreement import RankFacts, check_agreement
from moe_serve.engine.model.expert_sources import ExpertSources
from moe_serve.engine.model.load_windows import LoadWindows, TraceWriter
from moe_serve.engine.model.model_plan import (
    ModelPlan,
    NumericsChoice,
    cache_layouts,
    checkpoint_folder,
    num_draft_states,
)
from moe_serve.engine.model.prediction import TokenPredictor
from moe_serve.engine.model.served_model import ServedModel
from moe_serve.engine.model.shared_weights import (
    MEMORY,
    NONE,
    ModelFiles,
    SharedWeights,
    open_shared_weights,
    weights_made_from,
)
from moe_serve.engine.output.changed_choices import ChangedCounts
from moe_serve.engine.output.grammars import make_grammars
from moe_serve.engine.output.routed_experts import KeptExperts
from moe_serve.engine.output.row_logprobs import LogprobScorer
from moe_serve.engine.output.sampler import Sampler
from moe_serve.engine.profiler import Profiler
from moe_serve.engine.protocol.mailbox import Mailbox
from moe_serve.engine.protocol.messages import ModelLimits
from moe_serve.engine.rank_memory import lasting_memory, own_in_words, weight_memory
from moe_serve.engine.recovery.full_placement import (
    decode_now,
    meaning_of_a_loss,
    meaning_of_a_lost_host,
    slots_to_read,
    spareable_ranks,
)
from moe_serve.engine.recovery.recovery import Rank, Recovery, make_recovery
from moe_serve.engine.requests import OpenRequests, StepEvents
from moe_serve.engine.status import EngineCounters, StepTimes
from moe_serve.engine.step.exchange import Exchange
from moe_serve.engine.step.plan import StepSettings
from moe_serve.engine.watchdog import Watchdog, WatchLimits
from moe_serve.ep.gate import CapacityLimit
from moe_serve.ep.load_recorder import LoadRecorder
from moe_serve.ep.moe_layer import ExpertParallel
from moe_serve.ep.pass_recorder import PassRecorder
from moe_serve.ep.peer_experts import ExpertServer
from moe_serve.ep.replica_map import ReplicaMap
from moe_serve.eplb.files.trace_jsonl import RollingTrace, TraceMeta, begin_trace
from moe_serve.eplb.load import NUM_DECODE_COUNTS, LoadRecord
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.split.time import ExpertTime
from moe_serve.errors import CapacityError, ConfigError
from moe_serve.kernels.capacity import ExpertCapacity
from moe_serve.log import get_logger
from moe_serve.models.decoder.moe_decoder import (
    build_decoder,
    captures_decodes,
    expert_id_bytes,
    state_shapes,
)
from moe_serve.models.families.registry import read_spec
from moe_serve.models.weight_share import WeightShare
from moe_serve.models.weights import ExpertReloader, ExpertRoom, LoadedWeights, dummy_weights, load_weights
from moe_serve.process_facts import give_freed_memory_back
from moe_serve.topology import Topology

_DIAL_S = 1.0  # for a connection with a rank whose pages a prompt waits for
Progress = Callable[[str, float], None]  # (phase, fraction done)
log = get_logger(__name__)


def build_engine(
    config: ServeConfig,
    group: EpGroup,
    exchange: Exchange,
    mailbox: Mailbox,
    launch_id: int = 0,
    progress: Progress | None = None,
    page_files: PageFiles | None = None,
    pages_fd: int | None = None,
    weight_files: Sequence[int] = (),
) -> Engine:
    """Returns a rank's engine with its model loaded. Raises what `build_served_model` raises.

    page_files: memory for pages on their way to decode ranks; None: there are no prefill ranks
    pages_fd:   memory for cache.host_gb, which ranks of this host may share; None: this one has its own
    weight_files: as in open_shared_weights
    """
    served = build_served_model(config, group, progress, weight_files)
    give_freed_memory_back()  # most of it is of loading, and would stay with this rank for good
    tiers = _page_tiers(config, served, pages_fd, group)
    sender, receiver = _page_channel(config, served, page_files, launch_id)
    blocks = RequestBlocks(
        served.cache.num_blocks,
        config.cache.block_size,
        config.cache.prefix_cache,
        served.kv_key,
        tiers,
        sender,
        receiver,
        key_tokens=int(served.spec.predictor_id is not None),  # which caches a token's row with the token behind it
        states=_state_slots(config, served),
    )
    sampler = Sampler(served.limits.eos_token_ids, served.numerics.compiled)
    scheduler = Scheduler(
        blocks,
        max_running=config.engine.max_running_requests,
        max_batch_tokens=config.engine.max_batch_tokens,
        max_model_len=served.limits.max_model_len,
        speculator=_make_speculator(config, sampler, has_layer=served.spec.predictor_id is not None),
    )
    settings = StepSettings(
        max_tokens_per_rank=config.dispatch.max_tokens_per_rank or config.engine.max_batch_tokens,
        prefill_hold_steps=config.engine.prefill_hold_steps,
        record_window_steps=config.eplb.record_window_steps,
        overlap_from_tokens=config.dispatch.overlap_from_tokens,
    )
    _trace_drafts(served, scheduler)
    counters = EngineCounters()
    served.windows.decodes = lambda: counters.decodes.numbers
    kept = None
    if served.cache.keeps_experts:
        spec = served.spec
        kept = KeptExperts(served.cache, spec.num_moe_layers, spec.topk, spec.router.num_choices)
    changed = ChangedCounts(served.cache) if served.cache.keeps_changed else None
    requests = OpenRequests(scheduler, served.limits, counters, make_grammars(config, served.limits), kept, changed)
    own = Rank(group.rank, launch_id, exchange, mailbox, requests.drop_all)
    recovery = make_recovery(config, own, served, restarts=group.files is not None)
    balancing = make_balancing(config, own, group, served, recovery)
    served.info |= _network_facts(group)
    _report_on_lost_rank(recovery, group, served)
    return Engine(
        rank=group.rank,
        launch_id=launch_id,
        served=served,
        scheduler=scheduler,
        batches=BatchBuilder(
            blocks.tables,
            served.device,
            served.numerics,
            captures_decodes(served.spec, served.numerics, served.device, config.engine.attention_backend),
        ),
        sampler=sampler,
        requests=requests,
        events=StepEvents(
            scheduler,
            requests,
            LogprobScorer(served.numerics.compiled),
            served.logits_of,
            served.rows,
            served.clock,
            served.all_to_all.check_step,
        ),
        exchange=exchange,
        mailbox=mailbox,
        recovery=recovery,
        records=make_record_control(
            config.eplb, Responder(group.rank, launch_id, lambda: recovery.members[0], mailbox.send), served
        ),
        balancing=balancing,
        expert_server=_make_expert_server(config, group, served, recovery),
        counters=counters,
        profiler=Profiler(group.rank, launch_id, served.clock),
        times=StepTimes(served.clock, has_parts=served.device.type == "cpu"),
        watchdog=_step_watchdog(group.rank, config.engine.step_deadline_s, exchange, served),
        step_settings=settings,
        config=config,
        predictor=_make_predictor(served, scheduler, settings),
    )


def _state_slots(config: ServeConfig, served: ServedModel) -> StateSlots | None:
    """Returns the slots of the requests' states; None: the model keeps none."""
    if not served.cache.num_states:
        return None
    size, running, drafts = config.cache.block_size, config.engine.max_running_requests, num_draft_states(config)
    num_snapshots = served.cache.num_states - running - drafts
    return StateSlots(running, drafts, num_snapshots, -(-SNAPSHOT_TOKENS // size) * size)


def _make_speculator(config: ServeConfig, sampler: Sampler, has_layer: bool) -> Speculator | None:
    """Returns what guesses tokens; None where nothing does. has_layer: a layer of the model does, too"""
    speculation = config.speculation
    if speculation.mode == "off":
        return None
    index_bytes, shares_text = int(speculation.index_mib * 2**20), config.cache.prefix_cache
    always = speculation.mode in ("lookup", "mtp")
    predicted = min(speculation.predicted_drafts, speculation.max_drafts) if has_layer else 0
    return Speculator(
        speculation.max_drafts, index_bytes, shares_text, always, sampler.forced, predicted, speculation.reads_text
    )


def _trace_drafts(served: ServedModel, scheduler: Scheduler) -> None:
    """Writes the newest choice of drafts into the trace, behind each record, with all that it follows from."""
    speculator, trace = scheduler.speculator, served.trace
    if speculator is None or trace is None:
        return

    def write(record: LoadRecord) -> None:
        decision, speculator.gate.decision = speculator.gate.decision, None
        if decision is not None:
            trace.event("drafts", record.first_step + record.num_steps, rank=served.rank, **decision._asdict())

    served.windows.listeners.append(write)


def _make_predictor(served: ServedModel, scheduler: Scheduler, settings: StepSettings) -> TokenPredictor | None:
    """Returns what runs the layer for multi-token prediction; None where the model is served without one."""
    if served.spec.predictor_id is None:
        return None
    assert scheduler.speculator is not None, "the layer is served for its drafts"
    batches = BatchBuilder(scheduler.blocks.tables, served.device, served.numerics)
    return TokenPredictor(served, scheduler, scheduler.speculator, batches, settings.max_tokens_per_rank)


def _make_expert_server(
    config: ServeConfig, group: EpGroup, served: ServedModel, recovery: Recovery
) -> ExpertServer | None:
    """Returns what gives this rank's experts to ranks that are started anew; None where none is."""
    if group.streams is None:
        return None

    return ExpertServer(
        group.streams,
        group.rank,
        served.decoder.experts,
        served.changing,
        lambda: served.placement,
        recovery.now_bytes,
        config.engine.suspect_after_s,
    )


def _step_watchdog(rank: int, deadline_s: float, exchange: Exchange, served: ServedModel) -> Watchdog:
    """Returns a watchdog that warns of a long step and writes the stacks before peers give up; the caller starts it."""
    membership = served.membership

    def detail() -> str:
        waits = membership.describe_wait() if membership is not None else ""
        missing = ", ".join(map(str, exchange.missing()))
        return waits or (f"rank {missing} has not arrived" if missing else "")

    return Watchdog(f"rank {rank}", WatchLimits(min(5.0, deadline_s / 4), deadline_s / 2), detail)


def _network_facts(group: EpGroup) -> dict[str, Any]:
    """Returns how the balancer sees hosts and the network between them, for /server_info."""
    facts: dict[str, Any] = {"num_nodes": group.num_nodes}
    if group.link is not None:
        facts["host"] = group.link.hosts.names[group.link.hosts.of_rank[group.rank]]
        speed = group.link.speed
        facts["network"] = None if speed is None else asdict(speed)
    return facts


def _report_on_lost_rank(recovery: Recovery, group: EpGroup, served: ServedModel) -> None:
    """Writes to the log and to /server_info what happens when a rank is lost."""
    if recovery.why_end is not None:
        served.info["on_lost_rank"] = f"end: {recovery.why_end}"
        meaning = f"a lost rank ends the launch: {recovery.why_end}"
    else:
        served.info |= {"on_lost_rank": "mask", "spareable_ranks": spareable_ranks(served.placement)}
        meaning = "a lost rank: " + ", ".join(
            meaning_of_a_loss(served.placement, group.files is not None, served.names_experts)
        )
        if group.link is not None:
            hosts = group.link.hosts
            meaning += "; a lost host: " + ", ".join(
                meaning_of_a_lost_host(served.placement, hosts.of_rank, hosts.names)
            )
    if group.rank == 0 and group.num_ranks > 1 and not group.is_replacement:
        log.info("%s", meaning)


def build_served_model(
    config: ServeConfig, group: EpGroup, progress: Progress | None = None, weight_files: Sequence[int] = ()
) -> ServedModel:
    """Returns this rank's part of the model, loaded and ready.

    progress: called with (phase, fraction) while weights are read;  weight_files: as in open_shared_weights
    Raises ModelError, PlacementError, ConfigError or CapacityError naming what does not fit.
    """
    started_s = time.monotonic()
    files = ModelFiles(config)
    spec = read_spec(model_dir(config.model))
    plan = ModelPlan.of(config, spec, group.device)
    kv_key = _kv_key(config, plan)  # before weights are read: what replaces their files meanwhile has another name
    check_agreement(RankFacts.of(plan), group)
    reloader = ExpertReloader(plan.share(group.rank), checkpoint_folder(config), config.model.seed)
    sources = ExpertSources(reloader, group.rank, group.streams, config.engine.suspect_after_s)
    plan, held = _where_experts_are(plan, group, sources)
    num_threads = use_threads(config, plan.choice)
    trace = _begin_trace(config, plan, begins=group.rank == 0 and not group.is_replacement)
    if group.rank == 0:
        log.info("kernels: %s (%s); numerics: %s", plan.choice.kernels, plan.choice.why, plan.choice.name)
        if plan.expert_form != "dense":
            log.info("%s expert weights: %s", plan.expert_form, plan.slot_form.meaning)
        if plan.stored is not None and plan.stored.dense_meaning:
            log.info("dense weights: %s; rows by %s", plan.stored.dense_meaning, plan.activations)
        if spec.tie_embeddings and not plan.spec.tie_embeddings:
            log.info("the checkpoint's own lm_head is used, which config.json would tie to the embedding")
    progress = progress or (lambda phase, fraction: None)
    parallel = _expert_parallel(config, plan, group, num_threads)
    shared = open_shared_weights(config, plan, group, progress, weight_files)
    share, read = plan.share(group.rank, has_experts=held is None), partial(_read_weights, config, files, progress)
    weights = read(share, None) if shared is None else shared.load(share, read, progress)
    decoder = build_decoder(plan.spec, weights, parallel, plan.device, config.engine.attention_backend)
    if shared is not None:
        shared.finish(progress)
    block_size = config.cache.block_size
    limits = ModelLimits(
        model_name=served_name(config.model),
        vocab_size=plan.spec.vocab_size,
        max_model_len=plan.max_model_len,
        max_prompt_len=min(plan.max_model_len, plan.num_blocks * block_size) - 1,
        eos_token_ids=list(plan.spec.eos_token_ids),
        block_size=block_size,
        max_logprobs=config.engine.max_logprobs,
        expert_id_bytes=expert_id_bytes(plan.spec) if config.engine.return_routed_experts else None,
        # A step that a GPU replays from a graph leaves no rows.
        embedding_size=plan.spec.hidden if plan.device.type == "cpu" else 0,
    )
    num_states = config.engine.max_running_requests + num_draft_states(config) + plan.num_snapshots
    served = ServedModel(
        rank=group.rank,
        spec=plan.spec,
        decoder=decoder,
        cache=KvCache(
            cache_layouts(config, plan.spec),
            plan.num_blocks,
            block_size,
            plan.cache_dtype,
            plan.device,
            plan.dtype,
            state_shapes(plan.spec),
            num_states if state_shapes(plan.spec) else 0,
        ),
        limits=limits,
        numerics=plan.numerics,
        device=plan.device,
        all_to_all=parallel.all_to_all,
        replica_map=parallel.replica_map,
        recorder=parallel.recorder,
        passes=parallel.passes,
        limit=parallel.limit,
        windows=LoadWindows(
            None if config.eplb.mode == "off" else parallel.recorder, plan.placement, limits.model_name
        ),
        sources=sources,
        info=_model_facts(plan, parallel.all_to_all)
        | {
            "num_threads": num_threads,
            "bytes_read": weights.bytes_read,
            "shared_weights": None if shared is None else shared.facts,
        },
        clock=parallel.clock,
        kv_key=kv_key,
    )
    if held is not None and not served.names_experts:
        own = slots_to_read(held, plan.placement, group.rank)
        sources.read(own, decoder.experts, held, lambda fraction: progress("loading experts", fraction))
        files.check_same()
        served.info["experts_from"] = sources.read_from
    served.info["weight_load_s"] = round(time.monotonic() - started_s, 3)
    if shared is not None and group.rank == 0 and not group.is_replacement:
        log.info("%s", shared.described(config.model.weight_cache))
    if plan.device.type == "cpu" and group.rank == 0 and not group.is_replacement:
        weights_now = weight_memory(config, plan, 1 if shared is None else shared.num_sharing)
        log.info("%s", own_in_words([*weights_now, *lasting_memory(config, plan)]))
    if trace is not None:
        served.trace = TraceWriter(trace, group.rank, served.membership)
        served.windows.listeners.append(served.trace.add)
        served.windows.at_end.append(served.trace.close)
    return served


def _kv_key(config: ServeConfig, plan: ModelPlan) -> bytes:
    """Returns all that makes cached values differ. Of weights only the name, where no page leaves this process."""
    key = f"{served_name(config.model)} {plan.cache_dtype}{' experts' * config.engine.return_routed_experts}"
    if config.engine.expert_capacity is not None:
        key += f" capacity {config.engine.expert_capacity} {config.engine.over_capacity}"
    leaves = config.cache.disk_gb is not None or config.cache.host_gb is not None or config.parallel.num_prefill_ranks
    if leaves:
        arithmetic = f"{plan.choice.name} {plan.choice.kernels} {plan.dtype} {plan.activations}"
        key += f" {arithmetic} {weights_made_from(config, plan, has_experts=False)}"
    return key.encode()


def _page_tiers(config: ServeConfig, served: ServedModel, pages_fd: int | None, group: EpGroup) -> PageTiers | None:
    """Returns the tiers below this rank's pool; None: there are none. Raises ConfigError for what does not fit."""
    settings, cache = config.cache, served.cache
    host = folder = None
    if settings.host_gb is not None:
        num_bytes = int(settings.host_gb * 1e9) if pages_fd is None else os.fstat(pages_fd).st_size
        host = HostPages(pages_fd, num_bytes, cache.page_form)
    if settings.disk_gb is not None and settings.path is not None:
        quota = int(settings.disk_gb * 1e9)
        folder = open_folder(Path(settings.path).expanduser(), served.kv_key, quota)
    if host is None and folder is None:
        return None
    others = _other_hosts(group, served)
    served.info["asks_other_hosts"] = others is not None
    return PageTiers(cache, host, folder, others)


def _other_hosts(group: EpGroup, served: ServedModel) -> OtherHosts | None:
    """Returns how this rank reaches the pages of other hosts; None: there are none, or no connections of our own."""
    link, page_bytes = group.link, served.cache.page_bytes
    if link is None or served.cache.num_state_pages:
        return None

    def dial(rank: int) -> socket.socket:
        if rank in (down := link.down()):
            raise OSError(down[rank])
        return link.dial(rank, PREFIXES, _DIAL_S)

    listen, speed = partial(link.take_dialled, PREFIXES), link.speed
    if speed is None:
        return OtherHosts(dial, listen, served.kv_key)
    return OtherHosts(dial, listen, served.kv_key, page_bytes / speed.bytes_per_s, 2 * speed.delay_s)


def _page_channel(
    config: ServeConfig, served: ServedModel, files: PageFiles | None, launch_id: int
) -> tuple[PageSender | None, PageReceiver | None]:
    """Returns this rank's end of the way of pages from prefill ranks to decode ranks; None: it has no such end.

    files: as for build_engine. Raises ConfigError where they are too small for a page.
    """
    if files is None:
        return None, None
    if config.parallel.role == "prefill":
        (own,) = files.descriptors
        sender = PageSender(own, served.cache, launch_id, files.dials)
        check_room_for_state(sender.num_slots // config.num_front_ends, served.cache)
        served.info |= {"handover_pages": sender.num_slots, "handover_state_pages": served.cache.num_state_pages}
        return sender, None
    wait_s = config.engine.suspect_after_s if files.are_copies else None
    return None, PageReceiver(files.descriptors, served.cache, wait_s)


def _where_experts_are(plan: ModelPlan, group: EpGroup, sources: ExpertSources) -> tuple[ModelPlan, Placement | None]:
    """Returns the plan with the placement that ranks serve with, and where the others hold experts.

    None in its place: nobody serves whose memory this rank can read, so it takes its experts from the checkpoint
    """
    answer = sources.ask_placement(group.num_ranks) if group.is_replacement else None
    if answer is None:
        return plan, None
    placement, members = decode_now(answer, plan.placement)
    lost = set(range(group.num_ranks)) - set(members)
    return replace(plan, placement=placement), placement.without_ranks({*lost, group.rank})[0]


def _model_facts(plan: ModelPlan, all_to_all: AnyAllToAll) -> dict[str, Any]:
    """Returns the facts about the model that /server_info shows."""
    return {
        "model_type": plan.spec.model_type,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(plan.cache_dtype).removeprefix("torch."),
        "numerics": plan.choice.name,
        "kernels": plan.choice.kernels,
        "kernels_why": plan.choice.why,
        "expert_weights": f"{plan.expert_form} ({plan.slot_form.meaning})",
        "device": str(plan.device),
        "num_logical": plan.placement.num_logical,
        "num_slots": plan.placement.num_slots,
        "moe_layer_ids": list(plan.placement.moe_layer_ids),
        "slots_per_rank": plan.placement.slots_per_rank,
        "num_redundant_experts": plan.placement.num_slots - plan.spec.num_logical,
        "num_cache_blocks": plan.num_blocks,
        "all_to_all": type(all_to_all).__name__,
        "all_to_all_note": all_to_all.note,
        "all_to_all_is_bitwise": all_to_all.capabilities.bitwise,
    }


def pack_weights(config: ServeConfig, progress: Progress) -> SharedWeights:
    """Returns the file of this model in model.weight_cache, made as CPU ranks of one host make it if it is missing.

    Raises ConfigError where there are no such files, CapacityError where the folder takes none, and as the ranks do.
    """
    serving = config.parallel.model_copy(update={"num_ranks": 1})
    # A file is the same for all ranks; one with a layer for multi-token prediction is another one.
    config = ServeConfig(model=config.model, engine=config.engine, parallel=serving, speculation=config.speculation)
    if config.model.weight_cache in (MEMORY, NONE):
        raise ConfigError(
            f"model.weight_cache is {config.model.weight_cache}, which keeps no file; set model.weight_cache: FOLDER"
        )
    files = ModelFiles(config)
    group, spec = EpGroup(0, 1, torch.device("cpu")), read_spec(model_dir(config.model))
    plan = ModelPlan.of(config, spec, group.device)
    shared = open_shared_weights(config, plan, group, progress)
    if shared is None:
        raise ConfigError(f"weights are packed for the compiled CPU kernels alone: {plan.choice.why}")
    if shared.in_memory:
        raise CapacityError(f"{config.model.weight_cache} takes no file with packed weights; see the line above")
    parallel = _expert_parallel(config, plan, group, use_threads(config, plan.choice))
    weights = shared.load(plan.share(0), partial(_read_weights, config, files, progress), progress)
    if not shared.was_there:
        build_decoder(plan.spec, weights, parallel, plan.device)  # which packs what is dense
        shared.finish(progress)
    return shared


def use_threads(config: ServeConfig, choice: NumericsChoice) -> int:
    """Returns the CPU threads of this rank, and gives them to the compiled kernels or to torch."""
    num_threads = config.parallel.threads_per_rank or torch.get_num_threads()
    if choice.library is not None:
        choice.library.set_threads(num_threads)
        torch.set_num_threads(1)  # else the threads of two pools would wait for work on the same cores
        return num_threads
    if choice.numerics.invariant:
        num_threads = 1  # BLAS divides a GEMM among threads by its number of rows
    torch.set_num_threads(num_threads)
    return num_threads


def check_bits(all_to_all: AnyAllToAll, config: ServeConfig) -> None:
    """Raises ConfigError for a transport outside the bitwise class in batch_invariant, whoever chose it."""
    if config.engine.numerics == "batch_invariant" and not all_to_all.capabilities.bitwise:
        raise ConfigError(
            f"dispatch.backend {config.dispatch.backend} gives {type(all_to_all).__name__} here ({all_to_all.note}), "
            "whose sums depend on where experts live, which engine.numerics batch_invariant excludes; set "
            "dispatch.backend: collective, or engine.numerics: fast"
        )


def _begin_trace(config: ServeConfig, plan: ModelPlan, begins: bool) -> RollingTrace | None:
    """Returns the trace of this model's load; None where none is written. begins: this rank makes or continues the file

    Raises ConfigError on that rank when it cannot be written. Called before the weights are read, which takes minutes.
    """
    if config.eplb.record_path is None:
        return None
    path, spec = Path(config.eplb.record_path), plan.spec
    meta = TraceMeta(spec.num_logical, tuple(spec.moe_layer_ids), spec.topk, served_name(config.model))
    lock = begin_trace(path, meta) if begins else None
    return RollingTrace(path, meta, int(config.eplb.record_max_mib * 2**20), lock)


def _read_weights(
    config: ServeConfig, files: ModelFiles, progress: Progress, share: WeightShare, room: ExpertRoom | None
) -> LoadedWeights:
    """Reads or draws a share. Raises ModelError where files of the model change meanwhile.

    files: as they were before anything was read;  room: for its experts; None: new memory
    """
    phase = "loading weights"
    progress(phase, 0.0)
    folder = checkpoint_folder(config)
    if folder is None:
        return dummy_weights(share, config.model.seed, room)

    def report_bytes(num_done: int, num_total: int) -> None:
        progress(phase, num_done / max(num_total, 1))

    loaded = load_weights(folder, share, report_bytes, room)
    files.check_same()
    return loaded


def _expert_time(plan: ModelPlan) -> ExpertTime | None:
    """Returns what the split by time balances: from sizes alone, so that all ranks have the same."""
    if plan.split != "time":
        return None
    return ExpertTime.of_cpu(plan.slot_form.num_bytes, plan.spec.expert_parameters)


def _expert_parallel(config: ServeConfig, plan: ModelPlan, group: EpGroup, num_threads: int) -> ExpertParallel:
    """Returns the parts that all MoE layers share. Collective: transports map each other's memory."""
    spec, placement, dispatch = plan.spec, plan.placement, config.dispatch
    topology = Topology(group.num_nodes, group.num_ranks // group.num_nodes)
    request = TransportRequest(
        backend=dispatch.backend,
        limits=BufferLimits(plan.max_tokens_per_rank, spec.expert_hidden, spec.topk, placement.slots_per_rank),
        dtype=plan.dtype,
        wire_dtype=dispatch.wire_dtype,
        rows=dispatch.rows,
        combine=dispatch.combine,
        deadline_s=dispatch.deadline_s or config.engine.step_deadline_s,
        compiled=dispatch.compiled,
        cpu_kernels=plan.numerics.compiled,
        threads=num_threads,
        fp8_rows=plan.expert_form == "fp8" and (plan.device.type, plan.dtype) == ("cuda", torch.bfloat16),
    )
    all_to_all = make_all_to_all(group, request)
    check_bits(all_to_all, config)
    # A transport that can mask a rank can also reduce without it; torch.distributed cannot.
    gather = None if all_to_all.membership is None else all_to_all.exchange_counts
    recorder = passes = limit = None
    engine = config.engine
    if engine.expert_capacity is not None:
        limit = CapacityLimit(ExpertCapacity(engine.expert_capacity, moves=engine.over_capacity == "next"))
    if config.eplb.mode != "off" or (config.speculation.mode != "off" and plan.device.type == "cpu"):
        recorder = LoadRecorder(len(spec.moe_layer_ids), spec.num_logical, group, gather, NUM_DECODE_COUNTS)
    if config.eplb.mode != "off" and config.eplb.recorder_mode != "stat":
        per_token = config.eplb.recorder_mode == "per_token"
        passes = PassRecorder(len(spec.moe_layer_ids), placement.num_slots, per_token, plan.device)
    return ExpertParallel(
        rank=group.rank,
        router=spec.router,
        all_to_all=all_to_all,
        replica_map=ReplicaMap(placement, plan.device, plan.split, topology, dispatch.compiled, _expert_time(plan)),
        recorder=recorder,
        max_tokens_per_rank=plan.max_tokens_per_rank,
        numerics=plan.numerics,
        passes=passes,
        limit=limit,
    )
