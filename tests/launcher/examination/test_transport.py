"""What `check` says of the transport, for this machine and for machines that are not here."""

from dataclasses import replace

import pytest
import torch

from moe_serve.config import load_config
from moe_serve.dispatch.base import BufferLimits
from moe_serve.dispatch.gpu.facts import GpuFacts
from moe_serve.errors import ConfigError
from moe_serve.launcher.examination.check import examine
from moe_serve.launcher.examination.transport import Machine, TransportReport, describe_transport, look_here

LIMITS = BufferLimits(max_tokens_per_rank=1024, hidden=7168, topk=8, slots_per_rank=36)
HOST = Machine(64 << 30)
H100 = GpuFacts(host=0, capability=(9, 0), free_bytes=60 << 30)
NODE = Machine(60 << 30, gpu=H100, num_gpus=8)


def described(
    machine: Machine, *overrides: str, ranks: int = 8, device: str = "cuda", limits: BufferLimits = LIMITS
) -> TransportReport:
    config = load_config(overrides=[f"parallel.num_ranks={ranks}", f"parallel.device={device}", *overrides])
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return describe_transport(config, limits, dtype, device, machine)


def test_on_one_cpu_host_it_is_shared_memory_with_its_sizes() -> None:
    said = described(HOST, ranks=2, device="cpu")
    assert said.name == "low_latency (shared memory)"
    assert said.why == "auto: 2 CPU ranks on one host, if all are on this one; else the same with TCP between hosts"
    assert said.is_bitwise
    assert said.taken is None, "shared memory is taken as it is written"
    facts = {name: (value, why) for name, value, why in said.facts}
    assert facts["rows are moved by"][0] in ("a C helper", "numpy")
    value, why = facts["dispatch buffers"]
    assert value.startswith("up to")
    assert why.startswith("for 1024 tokens: ")
    assert why.endswith("tokens would fit here")
    off = described(HOST, "dispatch.compiled=false", ranks=2, device="cpu")
    assert off.facts[0] == ("rows are moved by", "numpy", "dispatch.compiled is off")


def test_what_fits_is_said_where_buffers_do_not() -> None:
    little = replace(HOST, free_bytes=1 << 20)
    said = described(little, "dispatch.backend=low_latency", ranks=2, device="cpu")
    (problem,) = said.problems
    assert "GiB of /dev/shm for 2 ranks and 0.00 GiB are free; lower dispatch.max_tokens_per_rank to" in problem
    assert described(little, ranks=2, device="cpu").name.startswith("collective"), "auto does not insist"


def test_gpus_that_nvshmem_joins_have_two_ways_by_size_of_step() -> None:
    said = described(NODE)
    assert said.name == "low_latency (NVSHMEM) up to 128 tokens, collective (NCCL) above"
    assert said.why.startswith("auto: NVSHMEM joins 8 GPU ranks")
    assert not said.problems
    assert said.taken is not None
    assert said.taken.max_tokens == 128
    two_nodes = described(NODE, ranks=16).why
    assert "rank 0 sees no RDMA device" in two_nodes
    assert two_nodes.endswith("(if all machines are like this one)")


@pytest.mark.parametrize(
    "machine, overrides, words",
    [
        (replace(NODE, gpu=replace(H100, lacks=1)), ["dispatch.backend=low_latency"], "pip install nvshmem4py-cu13"),
        (replace(NODE, gpu=replace(H100, capability=(8, 0))), ["dispatch.backend=cuda_ipc", "dispatch.wire_dtype=fp8"],
         "sm_80 and e4m3 begins with sm_89; set dispatch.wire_dtype: auto"),
        (replace(NODE, num_gpus=4), ["dispatch.backend=cuda_ipc"], "rank 4 is on another host than rank 0; set"),
        (replace(NODE, free_bytes=1 << 30), ["dispatch.backend=cuda_ipc"], "lower dispatch.max_tokens_per_rank to"),
    ],
)  # fmt: skip
def test_what_cannot_serve_on_these_gpus_is_a_problem_with_its_fix(
    machine: Machine, overrides: list[str], words: str
) -> None:
    assert any(words in problem for problem in described(machine, *overrides).problems)


def test_without_a_gpu_to_ask_the_rule_is_said() -> None:
    said = described(Machine(0))
    assert said.name == "low_latency (NVSHMEM) or collective (NCCL)"
    assert not said.problems, "that there is none is said elsewhere"
    ((name, _, why),) = said.facts
    assert name == "dispatch buffers"
    assert why.startswith("if NVSHMEM is taken, for 128 tokens: rows")
    assert described(Machine(0), "dispatch.backend=cuda_ipc").taken is not None, "sizes need no GPU"


def test_deepep_is_outside_the_bitwise_class() -> None:
    assert not described(NODE, "dispatch.backend=deepep").is_bitwise


def test_sums_by_rank_are_outside_the_bitwise_class_and_need_nccl_on_gpus() -> None:
    by_rank = "dispatch.combine=rank_sum"
    assert not described(HOST, by_rank, ranks=2, device="cpu").is_bitwise
    said = described(NODE, by_rank)
    assert (said.name, said.is_bitwise, said.problems) == ("collective (torch.distributed, NCCL)", False, ())
    for backend in ("cuda_ipc", "deepep"):
        with pytest.raises(ConfigError, match=f"rank_sum but {backend} adds results its own way; set"):
            described(NODE, by_rank, f"dispatch.backend={backend}")


def test_this_machine_can_be_looked_at() -> None:
    assert look_here("cpu", 0).free_bytes > 0
    assert look_here("cuda", 0).free_bytes == 0 or torch.cuda.is_available()


def test_the_report_has_the_transport_and_its_problems() -> None:
    free = ["server.port=0", "server.worker_port=0", "parallel.device=cpu", "parallel.num_ranks=2"]
    report = examine(load_config(overrides=free))
    assert [line.name for line in report.choices].index("dispatch buffers") > 0
    wanted = ["dispatch.backend=low_latency", "dispatch.max_tokens_per_rank=1000000000"]
    report = examine(load_config(overrides=[*free, *wanted]))
    assert any("of /dev/shm for 2 ranks" in problem for problem in report.problems)
