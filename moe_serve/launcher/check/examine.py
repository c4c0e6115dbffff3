"""`moe-serve check`: what a configuration means, without starting it.

It calls the functions that the ranks themselves size things with, so what it prints is what they will do.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from moe_serve.config import ServeConfig, model_dir
from moe_serve.errors import LaunchError, MoeServeError
from moe_serve.launcher.preflight import look_for_files
from moe_serve.server.ports import open_port

if TYPE_CHECKING:
    from moe_serve.eplb.placement import Placement
    from moe_serve.launcher.check.transport import TransportReport
    from moe_serve.models.spec import ModelSpec

_LOGIT_BYTES = 4  # logits are float32


@dataclass(frozen=True)
class Line:
    """One fact: its name, its value, and the reason or the setting behind it."""

    name: str
    value: str
    why: str = ""


@dataclass
class Report:
    """What there is to say about a configuration. problems: why it cannot run here; each says what to do."""

    model: list[Line] = field(default_factory=list)
    memory: list[tuple[str, int, str]] = field(default_factory=list)  # (what, bytes per rank, how many of what)
    choices: list[Line] = field(default_factory=list)
    machine: list[Line] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    transport: "TransportReport | None" = None  # known with the model

    @property
    def memory_bytes(self) -> int:
        """Bytes of one rank, all together."""
        return sum(num_bytes for _, num_bytes, _ in self.memory)


def print_check(config: ServeConfig) -> int:
    """Prints what a configuration means to stdout; returns the exit code: 0, or 1 when it cannot run here."""
    from rich.console import Console
    from rich.table import Table

    report = examine(config)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 130  # a file has no width, and wrapped cells are hard to search
    for title, lines in (("model", report.model), ("choices", report.choices), ("this machine", report.machine)):
        table = Table(title=title, title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
        for line in lines:
            table.add_row(line.name, line.value, line.why)
        console.print(table)
        console.print()
        if title == "model" and report.memory:
            console.print(_memory_table(report))
            console.print()
    for problem in report.problems:
        console.print(f"cannot run: {problem}", style="red", soft_wrap=True, markup=False)
    if not report.problems:
        console.print("this configuration can run here", style="green")
    return 1 if report.problems else 0


def examine(config: ServeConfig) -> Report:
    """Returns everything there is to say about a configuration, as far as its files can be read."""
    report = Report()
    with _noting(report):
        look_for_files(config)
    device = _device(config)
    if (model_dir(config.model) / "config.json").is_file():
        with _noting(report):
            _describe_model(report, config, device)
    _describe_choices(report, config, device)
    _describe_machine(report, config, device)
    return report


class _noting:
    """Turns an error of ours into a problem of the report, and goes on with the next part."""

    def __init__(self, report: Report):
        self._report = report

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, MoeServeError):
            return False
        if str(error) not in self._report.problems:
            self._report.problems.append(str(error))
        return True


def _device(config: ServeConfig) -> str:
    if config.parallel.device != "auto":
        return config.parallel.device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _describe_model(report: Report, config: ServeConfig, device: str) -> None:
    from moe_serve.models.spec import read_spec

    folder = model_dir(config.model)
    spec = read_spec(folder)
    total = spec.dense_parameters + spec.num_moe_layers * spec.num_logical * spec.expert_parameters
    active = spec.dense_parameters + spec.num_moe_layers * spec.topk * spec.expert_parameters
    report.model += [
        Line("path", str(folder)),
        Line("type", spec.model_type, f"{spec.num_layers} layers, {spec.num_moe_layers} of them with experts"),
        Line("parameters", _count(total), f"{_count(active)} work on each token"),
        Line("experts", f"{spec.num_logical} per layer, top-{spec.topk}", _groups(spec)),
        Line("context", f"{config.model.max_model_len or spec.max_position} tokens", "prompt + output"),
    ]
    _describe_sizes(report, config, spec, device)


def _describe_sizes(report: Report, config: ServeConfig, spec: "ModelSpec", device: str) -> None:
    import torch

    from moe_serve.attention_dp.kv_cache import bytes_per_block
    from moe_serve.dispatch.base import BufferLimits
    from moe_serve.engine.model_plan import compute_dtype, expert_form, make_placement, num_cache_blocks
    from moe_serve.ep.expert_form import MEANING, slot_bytes
    from moe_serve.launcher.check.transport import describe_loss, describe_transport, look_here
    from moe_serve.models.moe_decoder import kv_layouts

    dtype = compute_dtype(config, torch.device(device))
    placement = make_placement(config, spec)
    max_model_len = config.model.max_model_len or spec.max_position
    num_blocks = num_cache_blocks(config, spec, dtype, max_model_len)
    block_bytes = bytes_per_block(kv_layouts(spec), config.cache.block_size, dtype)
    form = expert_form(config, spec, torch.device(device))
    expert_bytes = slot_bytes(form, spec.hidden, spec.moe_intermediate, dtype)
    num_tokens = config.dispatch.max_tokens_per_rank or config.engine.max_batch_tokens
    report.model += [_slots(placement, spec), Line("expert weights", form, MEANING[form])]
    slot_bytes_of_rank = placement.slots_per_rank * spec.num_moe_layers * expert_bytes
    dense_bytes = spec.dense_parameters * dtype.itemsize
    report.transport = describe_transport(
        config,
        BufferLimits(num_tokens, spec.hidden, spec.topk, placement.slots_per_rank),
        dtype,
        device,
        look_here(device, dense_bytes + slot_bytes_of_rank),
    )
    report.problems += report.transport.problems
    report.model += [Line(*fact) for fact in describe_loss(config, placement, report.transport.shares_memory)]
    report.memory += [
        ("attention, embeddings, shared experts", dense_bytes, "the same on every rank"),
        (
            "expert slots",
            slot_bytes_of_rank,
            f"{placement.slots_per_rank} slots x {spec.num_moe_layers} layers x {_bytes(expert_bytes)}",
        ),
        (
            "KV cache",
            num_blocks * block_bytes,
            f"{num_blocks} blocks of {config.cache.block_size} tokens: {num_blocks * config.cache.block_size} tokens",
        ),
        *_buffers(config, spec, placement, report.transport, num_tokens, dtype.itemsize),
    ]
    if num_blocks * config.cache.block_size < max_model_len:
        report.model.append(
            Line(
                "longest request",
                f"{num_blocks * config.cache.block_size} tokens",
                "what the KV cache of one rank holds; raise cache.memory_gib for the model's own limit",
            )
        )


def _buffers(
    config: ServeConfig,
    spec: "ModelSpec",
    placement: "Placement",
    transport: "TransportReport",
    num_tokens: int,
    element_bytes: int,
) -> Iterator[tuple[str, int, str]]:
    """Yields what one step needs beside weights and cache, at its largest."""
    row_bytes = spec.hidden * element_bytes
    at_once = min(num_tokens, config.engine.max_batch_tokens)  # what is not static holds the rows of one round
    sent = at_once * spec.topk
    taken = transport.taken
    if taken is not None:
        yield "dispatch buffers", taken.total, f"for {taken.max_tokens} tokens per rank, taken at once"
    if config.parallel.num_ranks > 1 and (taken is None or taken.max_tokens < num_tokens):
        text = f"{at_once} tokens x top-{spec.topk} rows of {_bytes(row_bytes)}, out and back"
        yield "dispatch, sending", 2 * sent * row_bytes, text
        worst = config.parallel.num_ranks * at_once * min(spec.topk, placement.slots_per_rank)
        yield (
            "dispatch, receiving (even load)",
            2 * sent * row_bytes,
            f"if all tokens choose this rank's experts: {_bytes(2 * worst * row_bytes)}",
        )
    width = 3 * spec.moe_intermediate * element_bytes
    yield "expert activations (even load)", sent * width, f"{sent} rows x 3 x {spec.moe_intermediate}"
    rows = config.engine.max_running_requests
    yield "logits", rows * spec.vocab_size * _LOGIT_BYTES, f"{rows} requests x {spec.vocab_size} tokens, float32"


def _slots(placement: "Placement", spec: "ModelSpec") -> Line:
    num_redundant = placement.num_slots - spec.num_logical
    empty = int((placement.physical_to_logical < 0).sum(axis=1).max()) if placement.num_layers else 0
    replicas = int(placement.replica_count.max()) if placement.num_layers else 1
    why = f"{num_redundant - empty} of {placement.num_slots} hold replicas (at most {replicas} of one expert)"
    return Line(
        "slots", f"{placement.slots_per_rank} per rank and layer", why + (f", {empty} stay empty" if empty else "")
    )


def _describe_choices(report: Report, config: ServeConfig, device: str) -> None:
    num_ranks = config.parallel.num_ranks
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    why_dtype = "auto: bfloat16 is several times slower on CPUs" if device == "cpu" else "auto: for GPUs"
    report.choices += [
        Line("ranks", str(num_ranks), "each owns its requests and its share of the experts"),
        Line("device", device, "auto: what torch finds here" if config.parallel.device == "auto" else ""),
        Line("compute dtype", dtype, why_dtype if config.model.dtype == "auto" else ""),
        *_transport_lines(report, config),
        Line(
            "wire dtype",
            dtype if config.dispatch.wire_dtype == "auto" else config.dispatch.wire_dtype,
            "auto: the compute dtype" if config.dispatch.wire_dtype == "auto" else "",
        ),
        Line(
            "step exchange",
            "shm on one machine, gloo on several" if config.engine.exchange == "auto" else config.engine.exchange,
            "auto" if config.engine.exchange == "auto" else "",
        ),
        Line("kernels", "Triton" if device == "cuda" else "plain torch", f"for {device}"),
        Line("numerics", config.engine.numerics, _numerics(config)),
    ]


def _transport_lines(report: Report, config: ServeConfig) -> Iterator[Line]:
    """Yields which transport will carry rows, and what it takes; where no model can be read, only its name."""
    transport = report.transport
    if transport is None:
        yield Line("dispatch", config.dispatch.backend, "")
        return
    yield Line("dispatch", transport.name, transport.why)
    yield from (Line(*fact) for fact in transport.facts)
    if not transport.is_bitwise:
        yield Line("", "results are added in another order", "not for engine.numerics batch_invariant")


def _numerics(config: ServeConfig) -> str:
    if config.engine.numerics == "fast":
        return "last bits may depend on what else runs"
    return f"tokens depend on nothing but the request; GEMMs in tiles of {config.engine.row_tile} rows"


def _describe_machine(report: Report, config: ServeConfig, device: str) -> None:
    num_ranks = config.parallel.num_ranks
    cores = len(os.sched_getaffinity(0))
    memory = _memory_here()
    report.machine.append(Line("CPU", f"{cores} cores, {_bytes(memory)} available", ""))
    if device == "cpu" and report.memory_bytes * num_ranks > memory:
        report.problems.append(
            f"{num_ranks} ranks need {_bytes(report.memory_bytes * num_ranks)} together but {_bytes(memory)} of memory "
            "are available here; lower cache.memory_gib, or use fewer ranks or more machines"
        )
    if device == "cpu" and num_ranks > cores:
        report.machine.append(Line("", f"{num_ranks} ranks on {cores} cores", "they will wait for each other"))
    _describe_gpus(report, config, device)
    _describe_libraries(report, device)
    _describe_ports(report, config)


def _describe_gpus(report: Report, config: ServeConfig, device: str) -> None:
    import torch

    if not torch.cuda.is_available():
        report.machine.append(Line("GPU", "none", f"torch {torch.__version__} sees no CUDA device"))
        if device == "cuda":
            report.problems.append(
                "parallel.device is cuda but torch sees no GPU here; set parallel.device: cpu, or check where one is"
            )
        return
    num_gpus = torch.cuda.device_count()
    size = torch.cuda.get_device_properties(0).total_memory
    report.machine.append(Line("GPU", f"{num_gpus} x {torch.cuda.get_device_name(0)}", _bytes(size)))
    if device != "cuda":
        return
    if report.memory_bytes > size:
        report.problems.append(
            f"a rank needs {_bytes(report.memory_bytes)} but a GPU here has {_bytes(size)}; lower cache.memory_gib or "
            "engine.max_batch_tokens, or spread the experts over more ranks"
        )
    if config.parallel.num_ranks > num_gpus:
        report.machine.append(
            Line("", f"{config.parallel.num_ranks} ranks", "more than the GPUs here: start them on several machines")
        )


def _describe_libraries(report: Report, device: str) -> None:
    for module, purpose, needed in (
        ("triton", "GPU kernels: pip install 'moe-serve[gpu]'", device == "cuda"),
        ("mpi4py", "mpirun: pip install 'moe-serve[mpi]'", False),
        ("nvshmem", "low latency between GPUs: pip install nvshmem4py-cu13", False),
    ):
        found = _is_installed(module)
        report.machine.append(Line(module, "installed" if found else "not installed", "" if found else purpose))
        if needed and not found:
            report.problems.append(f"{module} is not installed; {purpose}")
    # The wheel's mpirun lies beside this Python, which need not be on the path.
    mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    report.machine.append(Line("mpirun", mpirun or "not found", "only for a start by MPI"))


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _describe_ports(report: Report, config: ServeConfig) -> None:
    server = config.server
    ports = (("HTTP", server.host, server.port), ("ranks", server.worker_host, server.worker_port))
    for name, host, port in ports:
        try:
            open_port(host, port).close()
        except LaunchError as error:
            report.machine.append(Line(f"port for {name}", f"{host}:{port}", "cannot be opened here"))
            if "in use" in str(error):
                setting = "server.port" if name == "HTTP" else "server.worker_port"
                report.problems.append(f"{host}:{port} is in use; end what uses it, or set {setting}")
            else:
                report.machine.append(Line("", "", f"{host} is another machine's: the front end must run there"))
        else:
            report.machine.append(Line(f"port for {name}", f"{host}:{port}", "free" if port else "any free one"))


def _memory_here() -> int:
    """Returns the bytes of memory that processes can still take on this machine."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _memory_table(report: Report) -> object:
    from rich.table import Table

    table = Table(title="memory of one rank", title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
    for what, num_bytes, how in report.memory:
        table.add_row(what, _bytes(num_bytes), how)
    table.add_row("together", _bytes(report.memory_bytes), "")
    return table


def _groups(spec: "ModelSpec") -> str:
    router = spec.router
    return "" if router.num_groups == 1 else f"{router.topk_groups} of {router.num_groups} groups are chosen first"


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)


def _bytes(number: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number} B"
