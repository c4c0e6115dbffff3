"""The part of `moe-serve check` on choices: what each `auto` becomes, and why."""

from collections.abc import Iterator

import torch

from moe_serve.config import ServeConfig
from moe_serve.engine.model_plan import compute_dtype
from moe_serve.engine.numerics_choice import choose_numerics
from moe_serve.launcher.check.report import Line, Report

_BALANCING = {
    "off": "experts stay where they start, and their load is not recorded",
    "static": "experts stay where they start; their load is recorded and shown; dynamic: they move",
    "dynamic": "experts move while the server serves, where that pays",
}
_MEANING = {
    "fast": "last bits may depend on what else runs",
    "batch_invariant": "tokens depend on nothing but the request",
}


def describe_choices(report: Report, config: ServeConfig, device: str) -> None:
    """Adds what the configuration chooses on this device. Expects the transport in the report, where it is known."""
    dtype: str = config.model.dtype
    wire_dtype: str = config.dispatch.wire_dtype
    exchange: str = config.engine.exchange
    why_dtype = why_wire = why_exchange = ""
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
        why_dtype = "auto: bfloat16 is several times slower on CPUs" if device == "cpu" else "auto: for GPUs"
    if wire_dtype == "auto":
        wire_dtype, why_wire = dtype, "auto: the compute dtype"
    if exchange == "auto":
        exchange, why_exchange = "shm on one machine, gloo on several", "auto"
    report.choices += [
        Line("ranks", str(config.parallel.num_ranks), "each owns its requests and its share of the experts"),
        Line("device", device, "auto: what torch finds here" if config.parallel.device == "auto" else ""),
        Line("compute dtype", dtype, why_dtype),
        *_transport_lines(report, config),
        Line("wire dtype", wire_dtype, why_wire),
        Line("step exchange", exchange, why_exchange),
        Line("eplb.mode", config.eplb.mode, _BALANCING[config.eplb.mode]),
    ]
    with report.noting_problems():
        choice = choose_numerics(config, torch.device(device), compute_dtype(config, torch.device(device)))
        report.choices += [
            Line("kernels", choice.kernels, choice.why),
            Line("numerics", choice.name, _MEANING[choice.name]),
        ]


def _transport_lines(report: Report, config: ServeConfig) -> Iterator[Line]:
    """Yields which transport will carry rows, and what it takes; where no model can be read, only its name."""
    transport = report.transport
    if transport is None:
        yield Line("dispatch", config.dispatch.backend)
        return
    yield Line("dispatch", transport.name, transport.why)
    yield from (Line(*fact) for fact in transport.facts)
    if not transport.is_bitwise:
        yield Line("", "results are added in another order", "not for engine.numerics batch_invariant")
