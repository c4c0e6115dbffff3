"""Puts one rank's engine together from the configuration."""

import os
from pathlib import Path

from moe_serve.attention_dp.scheduler import Scheduler
from moe_serve.config import ServeConfig
from moe_serve.dispatch.base import EpGroup
from moe_serve.engine.engine import Engine, EngineSettings
from moe_serve.engine.exchange import Exchange
from moe_serve.engine.mailbox import Mailbox
from moe_serve.engine.recovery import Recovery, make_recovery, spareable_ranks
from moe_serve.engine.served_model import Progress, ServedModel, build_served_model
from moe_serve.engine.step import StepSettings
from moe_serve.eplb.files.jsonl_writer import JsonlWriter
from moe_serve.eplb.files.trace_meta import TraceMeta
from moe_serve.eplb.load import LoadRecord
from moe_serve.errors import ConfigError
from moe_serve.log import get_logger

log = get_logger(__name__)
_READ_BYTES = 1 << 16


def build_engine(
    config: ServeConfig,
    group: EpGroup,
    exchange: Exchange,
    mailbox: Mailbox,
    epoch: int = 0,
    progress: Progress | None = None,
) -> Engine:
    """Returns a rank's engine with its model loaded. Raises what `build_served_model` raises."""
    served = build_served_model(config, group, progress)
    if config.eplb.record_path is not None:
        record_to(Path(config.eplb.record_path), served, group.rank)
    scheduler = Scheduler(
        num_blocks=served.num_blocks,
        block_size=config.cache.block_size,
        max_running=config.engine.max_running_requests,
        max_batch_tokens=config.engine.max_batch_tokens,
        max_model_len=served.limits.max_model_len,
        prefix_cache=config.cache.prefix_cache,
        model_key=served.limits.model_name.encode(),
    )
    recovery = make_recovery(config, group.rank, served, exchange)
    _say_what_a_loss_means(recovery, group.rank, served)
    return Engine(
        rank=group.rank,
        epoch=epoch,
        served=served,
        scheduler=scheduler,
        exchange=exchange,
        mailbox=mailbox,
        step_settings=StepSettings(
            max_tokens_per_rank=config.dispatch.max_tokens_per_rank or config.engine.max_batch_tokens,
            prefill_hold_steps=config.engine.prefill_hold_steps,
            record_window_steps=config.eplb.record_window_steps,
            overlap_from_tokens=config.dispatch.overlap_from_tokens,
        ),
        settings=EngineSettings(
            heartbeat_s=config.engine.heartbeat_s, front_end_deadline_s=config.server.worker_deadline_s
        ),
        recovery=recovery if isinstance(recovery, Recovery) else None,
    )


def _say_what_a_loss_means(recovery: Recovery | str, rank: int, served: ServedModel) -> None:
    """Tells the operator, in the log and on /server_info, what happens when a rank is lost."""
    if isinstance(recovery, str):
        served.info["on_lost_rank"] = f"end: {recovery}"
        meaning = f"a lost rank ends the epoch: {recovery}"
    else:
        spareable = spareable_ranks(served.placement)
        served.info |= {"on_lost_rank": "mask", "spareable_ranks": spareable}
        which = ", ".join(map(str, spareable)) or "none: raise eplb.num_redundant_experts"
        meaning = f"serving goes on without a lost rank where every expert has slots elsewhere; ranks to spare: {which}"
    if rank == 0 and served.placement.num_ranks > 1:
        log.info("%s", meaning)


def record_to(path: Path, served: ServedModel, rank: int = 0) -> None:
    """Writes every load record of a model to a trace file, until the disk refuses one: serving goes on without.

    The first of the ranks that take part writes; rank 0 begins the file, and another one goes on with it when 0 is out.
    Raises ConfigError when the file cannot be begun.
    """
    spec = served.spec
    meta = TraceMeta(spec.num_logical, tuple(spec.moe_layer_ids), spec.topk, served.limits.model_name)
    try:
        writer = JsonlWriter(path, meta) if rank == 0 else None
    except OSError as error:
        raise ConfigError(
            f"eplb.record_path: {path} cannot be written ({error.strerror}); name a file in a folder that exists"
        ) from None

    group_epoch = 0

    def write(record: LoadRecord) -> None:
        nonlocal writer, group_epoch
        membership = served.membership
        if membership is not None and membership.members[0] != rank:
            return
        try:
            if writer is None or (membership is not None and membership.epoch != group_epoch):
                # Others may have written since: behind their last line, with a placement that is named again.
                cut_unfinished_line(path)
                writer = JsonlWriter(path, meta, append=True)
                group_epoch = membership.epoch if membership is not None else 0
            writer.add(record)
        except OSError as error:
            served.on_record = None  # a line may be cut off, so nothing may follow it
            log.error("eplb.record_path: the trace %s ends here (%s); serving goes on", path, error.strerror)

    served.on_record = write


def cut_unfinished_line(path: Path) -> None:
    """Removes what follows the last whole line of a file: the end of a process can cut a line off."""
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - _READ_BYTES)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                file.truncate(start + newline + 1)
                return
            end = start
        file.truncate(0)
