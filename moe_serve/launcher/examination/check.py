"""`moe-serve check`: explains a configuration without starting it.

It calls the functions by which the ranks choose and size things, so its report is what they will do.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from moe_serve.config import ServeConfig, model_dir
from moe_serve.dispatch.base import BufferLimits
from moe_serve.engine.model.model_plan import (
    ModelPlan,
    checkpoint_folder,
    choose_numerics,
    compute_dtype,
)
from moe_serve.engine.model.predictor_plan import why_no_predictor
from moe_serve.engine.rank_memory import Memory, bytes_in_words, lasting_memory, page_memory, step_memory, weight_memory
from moe_serve.errors import LaunchError, MoeServeError, PortError
from moe_serve.launcher.cpu_bind import node_of
from moe_serve.launcher.examination.transport import TransportReport, describe_loss, describe_transport, look_here
from moe_serve.launcher.preflight import look_for_files
from moe_serve.models.families.registry import read_spec
from moe_serve.models.spec import ModelSpec
from moe_serve.models.weight_plan import dense_parameters
from moe_serve.process_facts import numa_nodes
from moe_serve.server.edge.ports import open_port

_FILE_WIDTH = 400  # a file has no width, and wrapped cells are hard to search
_BALANCING = {
    "off": "experts stay where they start, and their load is not recorded",
    "static": "experts stay where they start; their load is recorded and shown; dynamic: they move",
    "dynamic": "experts move while the server serves, where that pays",
}
_MEANING = {
    "fast": "last bits may depend on what else runs",
    "batch_invariant": "tokens depend on nothing but the request",
}


@dataclass(frozen=True)
class Line:
    """One fact: its name, its value, and the reason or the setting behind it."""

    name: str
    value: str
    why: str = ""


@dataclass
class Report:
    """The findings about a configuration.

    problems:    why it cannot run here; each says what to do
    num_sharing: ranks that share memory: those of a host, or of a NUMA node where they are bound to several
    """

    model: list[Line] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    choices: list[Line] = field(default_factory=list)
    machine: list[Line] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    transport: TransportReport | None = None  # known with the model
    num_sharing: int = 1

    @property
    def memory_bytes(self) -> int:
        """Bytes of one rank, all together."""
        return sum(memory.num_bytes for memory in self.memory)

    @property
    def shared_bytes(self) -> int:
        """Those of them that the ranks of a host have once."""
        return sum(memory.num_bytes for memory in self.memory if memory.shared)

    def host_bytes(self, num_ranks: int) -> int:
        """Bytes of so many ranks on one host."""
        num_copies = -(-num_ranks // self.num_sharing)
        return num_copies * self.shared_bytes + num_ranks * (self.memory_bytes - self.shared_bytes)

    @contextmanager
    def noting_problems(self) -> Iterator[None]:
        """Turns a MoeServeError into a problem of the report, which then goes on with its next part."""
        try:
            yield
        except MoeServeError as error:
            if str(error) not in self.problems:
                self.problems.append(str(error))


def print_check(config: ServeConfig) -> int:
    """Examines a configuration and prints the report; returns the exit code: 0, or 1 when it cannot run here."""
    report = examine(config)
    console = make_console()
    for problem in report.problems:
        console.print(f"cannot run: {problem}", style="red", soft_wrap=True)
    if not report.problems:
        console.print("this configuration can run here", style="green")
    for title, rows in _tables(report, config.of_this_host().ranks_per_host):
        table = Table(title=title, title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
        for row in rows:
            table.add_row(*row)
        console.print()
        console.print(table)
    return 1 if report.problems else 0


def _tables(report: Report, num_ranks: int) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Yields the title and the rows of each table. num_ranks: of a host"""
    yield "model", [(line.name, line.value, line.why) for line in report.model]
    if report.memory:
        rows = [(memory.name, bytes_in_words(memory.num_bytes), memory.why) for memory in report.memory]
        rows.append(("together", bytes_in_words(report.memory_bytes), ""))
        if report.shared_bytes:
            rows[-1] = "of its own", bytes_in_words(report.memory_bytes - report.shared_bytes), ""
            why = f"once for {report.num_sharing} ranks"
            rows.append(("shared", bytes_in_words(report.shared_bytes), why))
        if num_ranks > 1:
            why = f"{num_ranks} ranks, beside their programs"
            rows.append(("on each host", bytes_in_words(report.host_bytes(num_ranks)), why))
        yield "memory of one rank", rows
    yield "choices", [(line.name, line.value, line.why) for line in report.choices]
    yield "this machine", [(line.name, line.value, line.why) for line in report.machine]


def examine(config: ServeConfig) -> Report:
    """Returns the findings about a configuration, as far as its files can be read."""
    report, config = Report(), config.of_this_host()
    with report.noting_problems():
        look_for_files(config)
    device = config.parallel.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if model_dir(config.model).is_file() or (model_dir(config.model) / "config.json").is_file():
        with report.noting_problems():
            _describe_model(report, config, device)
    _describe_choices(report, config, device)
    _describe_machine(report, config, device)
    return report


def _describe_model(report: Report, config: ServeConfig, device: str) -> None:
    """Adds the model, the memory of one rank and the transport. Raises a MoeServeError where it cannot be served.

    device: "cpu" or "cuda"
    """
    spec = read_spec(model_dir(config.model))
    report.model += _shape_lines(config, spec)
    plan = ModelPlan.of(config, spec, torch.device(device))
    report.model += [_slots(plan), Line("expert weights", plan.expert_form, plan.slot_form.meaning)]
    if plan.stored is not None and plan.stored.dense_meaning:
        report.model.append(Line("dense weights", "groups", f"{plan.stored.dense_meaning}; rows by {plan.activations}"))
    if plan.spec.predictor_id is not None:
        what = "one more with experts and a KV cache; it predicts tokens, which steps verify"
        report.model.append(Line("multi-token prediction", f"layer {plan.spec.predictor_id}", what))
    elif spec.num_predictors and config.speculation.mode == "auto":
        why_not = why_no_predictor(config, plan.spec, checkpoint_folder(config), on_gpu=device != "cpu")
        report.model.append(Line("multi-token prediction", "none", f"{why_not}; drafts come from text"))
    report.num_sharing = num_sharing_ranks(config)
    weights = list(weight_memory(config, plan, report.num_sharing))
    report.transport = transport = describe_transport(
        config,
        BufferLimits(plan.max_tokens_per_rank, spec.expert_hidden, spec.topk, plan.placement.slots_per_rank),
        plan.dtype,
        device,
        look_here(device, sum(memory.num_bytes for memory in weights)),
    )
    report.problems += transport.problems
    report.model += [Line(*fact) for fact in describe_loss(config, plan, report.num_sharing, transport.shares_memory)]
    report.memory += [*weights, *lasting_memory(config, plan, transport.taken), *page_memory(config)]
    report.memory += step_memory(config, plan)
    cache_tokens = plan.num_blocks * config.cache.block_size
    if cache_tokens < plan.max_model_len:
        why = "what the KV cache of one rank holds; raise cache.memory_gib to reach the model's limit"
        report.model.append(Line("longest request", f"{cache_tokens} tokens", why))


def _shape_lines(config: ServeConfig, spec: ModelSpec) -> list[Line]:
    dense, per_choice = dense_parameters(spec), spec.num_moe_layers * spec.expert_parameters
    total, active = dense + spec.num_logical * per_choice, dense + spec.topk * per_choice
    router = spec.router
    groups = "" if router.num_groups == 1 else f"{router.topk_groups} of {router.num_groups} groups are chosen first"
    groups = f"of these and {router.num_identity} that give back what they take" if router.num_identity else groups
    return [
        Line("path", str(model_dir(config.model))),
        Line("type", spec.model_type, f"{spec.num_layers} layers, {spec.num_moe_layers} of them with experts"),
        Line("parameters", _count_in_words(total), f"{_count_in_words(active)} work on each token"),
        Line("experts", f"{spec.num_logical} per layer, top-{spec.topk}", groups),
        Line("context", f"{config.model.max_model_len or spec.default_context} tokens", "prompt + output"),
    ]


def _slots(plan: ModelPlan) -> Line:
    placement = plan.placement
    num_redundant = placement.num_slots - plan.spec.num_logical
    empty = int((placement.physical_to_logical < 0).sum(axis=1).max()) if placement.num_layers else 0
    replicas = int(placement.replica_count.max()) if placement.num_layers else 1
    why = f"{num_redundant - empty} of {placement.num_slots} hold replicas (at most {replicas} of one expert)"
    return Line(
        "slots", f"{placement.slots_per_rank} per rank and layer", why + (f", {empty} stay empty" if empty else "")
    )


def num_sharing_ranks(config: ServeConfig) -> int:
    """Returns how many ranks of a host share weights: all, or those of a NUMA node where they are bound to several."""
    num_here, nodes = config.ranks_per_host, numa_nodes()
    bound = {node_of(config.parallel.cpu_bind, nodes, rank, num_here) for rank in range(num_here)}
    return num_here // len(bound)


def _describe_choices(report: Report, config: ServeConfig, device: str) -> None:
    """Adds the choices of the configuration on this device. Expects the transport in the report, where it is known."""
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
        exchange, why_exchange = "shm on one machine and, with TCP, between CPU machines; else gloo", "auto"
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
        meaning = _MEANING[choice.name]
        if choice.is_limited:
            meaning = "answers depend on what else runs, by engine.expert_capacity"
        report.choices += [
            Line("kernels", choice.kernels, choice.why),
            Line("numerics", choice.name, meaning),
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


def _describe_machine(report: Report, config: ServeConfig, device: str) -> None:
    """Adds this machine's resources, and what it lacks. Expects the memory of a rank in the report.

    device: "cpu" or "cuda"
    """
    num_ranks = config.parallel.num_ranks
    cores = len(os.sched_getaffinity(0))
    available = available_bytes()
    report.machine.append(Line("CPU", f"{cores} cores, {bytes_in_words(available)} available"))
    if device == "cpu" and (needed := report.host_bytes(num_ranks)) > available:
        report.problems.append(
            f"{num_ranks} ranks need {bytes_in_words(needed)} together but "
            f"{bytes_in_words(available)} of memory are available here; lower cache.memory_gib, or use fewer ranks or "
            "more machines"
        )
    if device == "cpu" and num_ranks > cores:
        report.machine.append(Line("", f"{num_ranks} ranks on {cores} cores", "they will wait for each other"))
    _describe_gpus(report, config, device)
    _describe_files(report, config)
    _describe_libraries(report, device)
    server = config.server
    _describe_port(report, "HTTP", server.host, server.port, "server.port")
    _describe_port(report, "ranks", server.worker_host, server.worker_port, "server.worker_port")


def _describe_files(report: Report, config: ServeConfig) -> None:
    """Adds the room for pages of the KV cache on disk."""
    size_gb = config.cache.disk_gb
    if size_gb is None or config.cache.path is None:
        return
    path = Path(config.cache.path).expanduser()
    nearest = next(each for each in (path, *path.absolute().parents) if each.exists())
    room = shutil.disk_usage(nearest).free + sum(file.stat().st_size for file in path.glob("*/*.page"))
    why = f"of cache.disk_gb {size_gb:g}, for all models and launches that share the folder"
    if room < size_gb * 1e9:
        why = f"less than cache.disk_gb {size_gb:g}, so the tier would end with a full disk; lower it, or make room"
    report.machine.append(Line("pages in files", f"{bytes_in_words(room)} for them in {path}", why))


def _describe_gpus(report: Report, config: ServeConfig, device: str) -> None:
    if not torch.cuda.is_available():
        report.machine.append(Line("GPU", "none", f"torch {torch.__version__} sees no CUDA device"))
        if device == "cuda":
            report.problems.append(
                "parallel.device is cuda but torch sees no GPU here; set parallel.device: cpu, or run check where "
                "one is"
            )
        return
    num_gpus = torch.cuda.device_count()
    size = torch.cuda.get_device_properties(0).total_memory
    report.machine.append(Line("GPU", f"{num_gpus} x {torch.cuda.get_device_name(0)}", bytes_in_words(size)))
    if device != "cuda":
        return
    if report.memory_bytes > size:
        report.problems.append(
            f"a rank needs {bytes_in_words(report.memory_bytes)} but a GPU here has {bytes_in_words(size)}; lower "
            "cache.memory_gib or engine.max_batch_tokens, or spread the experts over more ranks"
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
        found = find_spec(module) is not None
        report.machine.append(Line(module, "installed" if found else "not installed", "" if found else purpose))
        if needed and not found:
            report.problems.append(f"{module} is not installed; {purpose}")
    # The wheel installs mpirun next to this Python, which need not be on the path.
    mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    report.machine.append(Line("mpirun", mpirun or "not found", "only for a start by MPI"))


def _describe_port(report: Report, purpose: str, host: str, port: int, setting: str) -> None:
    name, address = f"port for {purpose}", f"{host}:{port}"
    try:
        open_port(host, port, which=setting).close()
    except PortError as error:
        report.machine.append(Line(name, address, "cannot be opened here"))
        report.problems.append(str(error))
    except LaunchError:
        report.machine.append(Line(name, address, "cannot be opened here"))
        report.machine.append(Line("", "", f"{host} belongs to another machine: the front end must run there"))
    else:
        report.machine.append(Line(name, address, "free" if port else "any free one"))


def _count_in_words(number: int) -> str:
    """Returns a count with three digits and its unit: 6.01 M."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)


def available_bytes() -> int:
    """Returns the bytes of memory that this process can still take: of the machine, or of its control group."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        if limit != "max":
            used = int((group / "memory.current").read_text(encoding="ascii"))
            available = min(available, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass
    return available


def make_console() -> Console:
    """Returns a console for stdout, without markup or emoji: paths and messages may hold brackets and colons."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    return console
