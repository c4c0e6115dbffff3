"""`moe-serve replay --like-server`: what a server's own file says about a replay of its load."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_serve.config import ServeConfig, load_config, model_dir
from moe_serve.errors import ConfigError

if TYPE_CHECKING:
    from moe_serve.eplb.load import LoadTrace
    from moe_serve.eplb.placement import Placement
    from moe_serve.eplb.rebalance.settings import SystemFacts
    from moe_serve.eplb.replay.settings import ServerReplay


def server_replay(
    file: Path, trace_file: Path | None, load: "LoadTrace", nodes: int
) -> "tuple[ServerReplay, Placement]":
    """Returns what the server's balancer began with, and the placement at its start.

    file:       the configuration of the server
    trace_file: where the events of its balancer are recorded; None = nowhere
    nodes:      machines, where the trace does not tell
    Raises ConfigError where the file does not fit the trace.
    """
    import msgspec

    from moe_serve.eplb.files.trace_jsonl import events_between_records
    from moe_serve.eplb.rebalance.event_fields import STARTED
    from moe_serve.eplb.rebalance.settings import BalancerSettings, SystemFacts
    from moe_serve.eplb.replay.settings import ServerReplay

    config = load_config(file)
    events: list[tuple[int, dict[str, Any]]] = [] if trace_file is None else list(events_between_records(trace_file))
    started = next((fields for _, fields in events if fields["event"] == STARTED), None)
    start = _start(config, file, load)
    facts = SystemFacts.from_event(started) if started else facts_of(config, nodes, start)
    if start.num_ranks % facts.num_nodes:
        raise ConfigError(
            f"{start.num_ranks} ranks do not divide over {facts.num_nodes} nodes; give the server's --nodes"
        )
    settings = msgspec.convert(config.eplb, BalancerSettings, from_attributes=True)
    return ServerReplay.of(settings, facts, events), start


def facts_of(config: ServeConfig, nodes: int, start: "Placement") -> "SystemFacts":
    """Returns the facts of the system that the configuration describes, as far as it tells.

    Experts have the size that the server's ranks give them; on CPUs, with the compiled kernels unless the file says
    otherwise.
    """
    import torch

    from moe_serve.engine.model_plan import checkpoint_folder, compute_dtype, expert_form
    from moe_serve.eplb.rebalance.settings import SystemFacts
    from moe_serve.models.families.registry import read_spec
    from moe_serve.models.stored_weights import StoredWeights
    from moe_serve.models.weight_share import WeightShare

    spec = read_spec(model_dir(config.model))
    device = "cuda" if config.parallel.device == "cuda" else "cpu"
    place = torch.device(device)
    dtype = compute_dtype(config, place)
    is_compiled = device == "cpu" and dtype == torch.float32 and config.engine.cpu_kernels != "torch"
    stored = StoredWeights.of(spec, checkpoint_folder(config)) if is_compiled else None
    form = expert_form(config, spec, place, stored)
    num_bytes = WeightShare(spec, start, 0, dtype, place, form, stored).slot_form.num_bytes
    survives_loss = config.engine.on_lost_rank == "mask" and config.parallel.num_ranks > 2 and device == "cpu"
    return SystemFacts.of_model(spec.hidden, spec.moe_intermediate, num_bytes, device, nodes, survives_loss)


def _start(config: ServeConfig, file: Path, load: "LoadTrace") -> "Placement":
    """Returns the placement of the first record; where records have none, experts in order as the server begins."""
    from moe_serve.eplb.placement import Placement

    first = next(iter(load), None)
    if first is not None and first.placement is not None:
        return first.placement
    if config.eplb.init_expert_location != "trivial":
        raise ConfigError(
            f"the trace does not say where experts were, and {file} begins with {config.eplb.init_expert_location}; "
            "replay a trace that the server has recorded (eplb.record_path)"
        )
    ranks, redundant = config.parallel.num_ranks, config.eplb.num_redundant_experts
    return Placement.trivial(len(load.moe_layer_ids), load.num_logical, ranks, redundant, load.moe_layer_ids)
