"""The slab protocol over OpenSHMEM: real one-sided puts between processes give what the kernels give, byte for byte.

slabs.c is the protocol's twin in C. Its calls and the division of its region come from the code. OpenMPI's OpenSHMEM
within a host delivers puts in order, so a fence that lacks does not show here.
"""

import os
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_serve.dispatch.gpu.region import Region
from moe_serve.kernels.rows import weighted_sum_reference
from tests.dispatch.gpu.segmented import slab_reference
from tests.dispatch.models.programs import OVER_SLABS, program
from tests.kernels.conftest import RunCheck
from tests.kernels.data import assert_equal_bits

needs_openshmem = pytest.mark.skipif(
    shutil.which("oshcc") is None or shutil.which("oshrun") is None,
    reason="OpenSHMEM runs the slab protocol: apt-get install --no-install-recommends openmpi-bin libopenmpi-dev",
)
NUM_LAYERS = 2
NUM_CALLS = 2 * NUM_LAYERS
SLOTS, HIDDEN, TOPK, MOST_TOKENS = 2, 20, 3, 3
# [call][rank]: one rank has none for a while, so nothing but the end of a round holds it back
TOKENS = ((0, 3, 2), (0, 1, 3), (3, 2, 0), (2, 0, 3))

INPUT = np.dtype(
    [
        ("num_tokens", np.int64),
        ("ids", np.int64, (MOST_TOKENS, TOPK)),
        ("x", np.float32, (MOST_TOKENS, HIDDEN)),
        ("weights", np.float32, (MOST_TOKENS, TOPK)),
    ],
    align=True,  # as C does
)


@dataclass(frozen=True)
class Call:
    """A call of one rank. x: [T, H] float32;  ids: [T, K] int64, -1 = none;  weights: [T, K] float32"""

    x: Tensor
    ids: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Got:
    """What a rank got of a call.

    rows_per_slot: [S];  origin: [S, capacity] int64, source rank << 32 | t * K + k;  slab: [S, capacity, H]
    out:           [most tokens, H]
    """

    rows_per_slot: Tensor
    origin: Tensor
    slab: Tensor
    out: Tensor


def a_region(num_ranks: int) -> Region:
    return Region(num_ranks, SLOTS, MOST_TOKENS, HIDDEN, TOPK, value_bytes=4, result_value_bytes=4, stages=True)


def a_call(number: int, rank: int, num_ranks: int) -> Call:
    """Draws what a rank gives to a call: tokens without some or all experts, and tokens that name a slot twice."""
    draw = torch.Generator().manual_seed(100 * number + rank)
    num_tokens = TOKENS[number][rank]
    ids = torch.randint(-1, num_ranks * SLOTS, (num_tokens, TOPK), generator=draw)
    weights = torch.rand(num_tokens, TOPK, generator=draw)
    return Call(torch.randn(num_tokens, HIDDEN, generator=draw), ids, weights)


def given(call: Call) -> bytes:
    """Returns a call as `Input` of slabs.c holds it."""
    num_tokens = len(call.x)
    given = np.zeros((), dtype=INPUT)
    given["num_tokens"], given["ids"] = num_tokens, -1
    for name in ("ids", "x", "weights"):
        given[name][:num_tokens] = getattr(call, name).numpy()
    return given.tobytes()


def run_over_openshmem(num_ranks: int, folder: Path, **changed: object) -> subprocess.CompletedProcess[str]:
    """Compiles and runs slabs.c; ranks leave what they got in the folder. changed: what is defined above it"""
    region = a_region(num_ranks)
    sizes = asdict(region) | {
        name: getattr(region, name) for name in dir(Region) if isinstance(getattr(Region, name), property)
    }
    defined: dict[str, object] = {name.upper(): sizes[name] for name in (
        "header_ints", "counts_at", "done_at", "arrived_at", "rows_at", "staged_at", "row_bytes", "result_arrived_at",
        "result_rows_at", "result_staged_at", "result_row_bytes", "queue_bytes", "hidden", "topk",
    )}  # fmt: skip
    defined |= {"RANKS": num_ranks, "SLOTS": SLOTS, "MOST_TOKENS": MOST_TOKENS, "QUEUES": region.num_queues}
    defined |= {"CALLS": NUM_CALLS, "PROGRAM": program(NUM_LAYERS, OVER_SLABS)} | {"PAUSE_MS": 50, "AHEAD_MS": 200}
    defined |= changed
    lines = [f"#define {name} {value}" for name, value in defined.items()]
    text = Path(__file__).with_name("slabs.c").read_text(encoding="utf-8")
    (folder / "slabs.c").write_text("\n".join([*lines, text]), encoding="utf-8")
    for rank in range(num_ranks):
        data = b"".join(given(a_call(number, rank, num_ranks)) for number in range(NUM_CALLS))
        (folder / f"given{rank}").write_bytes(data)
    subprocess.run(["oshcc", "-O1", "-o", "slabs", "slabs.c", "-lm"], cwd=folder, check=True)
    command = ["oshrun", "--oversubscribe", "--timeout", "300", "-n"]
    if os.geteuid() == 0:
        command.insert(1, "--allow-run-as-root")
    return subprocess.run(
        [*command, str(num_ranks), "./slabs"], cwd=folder, check=False, capture_output=True, text=True
    )


def got(folder: Path, rank: int, num_ranks: int) -> tuple[list[Got], Tensor]:
    """Returns what a rank has left: of each call, and its region [region_bytes] uint8 at the end."""
    capacity = num_ranks * MOST_TOKENS
    output = np.dtype(
        [
            ("rows_per_slot", np.int64, (SLOTS,)),
            ("origin", np.int64, (SLOTS, capacity)),
            ("slab", np.float32, (SLOTS, capacity, HIDDEN)),
            ("out", np.float32, (MOST_TOKENS, HIDDEN)),
        ],
        align=True,
    )
    data = (folder / f"got{rank}").read_bytes()
    calls = np.frombuffer(data, dtype=output, count=NUM_CALLS)
    region = np.frombuffer(data, dtype=np.uint8, offset=calls.nbytes)
    names = output.names or ()
    of_calls = [Got(*(torch.from_numpy(call[name].copy()) for name in names)) for call in calls]
    return of_calls, torch.from_numpy(region.copy())


def check_calls(folder: Path, num_ranks: int) -> None:
    """Compares with the plain reference what all ranks got."""
    num_slots = num_ranks * SLOTS
    of_ranks = [got(folder, rank, num_ranks)[0] for rank in range(num_ranks)]
    for number in range(NUM_CALLS):
        calls = [a_call(number, rank, num_ranks) for rank in range(num_ranks)]
        slabs = slab_reference([call.x for call in calls], [call.ids for call in calls], num_slots)
        for rank, call in enumerate(calls):
            mine = of_ranks[rank][number]
            for slot, rows in enumerate(slabs[rank]):
                assert mine.rows_per_slot[slot] == len(rows)
                assert_equal_bits(mine.slab[slot, : len(rows)], rows)
            results = call.x[:, None] * (call.ids.clamp(min=0) + 1)[:, :, None]
            index = torch.where(call.ids < 0, -1, torch.arange(call.ids.numel()).view(call.ids.shape))
            home = weighted_sum_reference(results.flatten(0, 1), index, call.weights)
            assert_equal_bits(mine.out[: len(call.x)], home)


def check_kernels(device: str, folder: str, num_ranks: int) -> None:
    """Compares with the kernels what all ranks got, and their whole regions but for the rows that they sent from."""
    from moe_serve.dispatch.gpu.launch_triton import SlabRanks
    from tests.dispatch.gpu.virtual import virtual_regions

    region = a_region(num_ranks)
    virtual = virtual_regions(region, torch.device(device))
    ranks = SlabRanks(virtual, torch.float32, max_spins=4)
    of_ranks = [got(Path(folder), rank, num_ranks) for rank in range(num_ranks)]
    ids = torch.full((NUM_CALLS, num_ranks, MOST_TOKENS, TOPK), -1)
    x, weights = torch.zeros(*ids.shape[:3], HIDDEN), torch.zeros(ids.shape)
    for number in range(NUM_CALLS):
        for rank in range(num_ranks):
            call = a_call(number, rank, num_ranks)
            num_tokens = len(call.x)  # the kernels send none of the others, which name no slot
            x[number, rank, :num_tokens], ids[number, rank, :num_tokens] = call.x, call.ids
            weights[number, rank, :num_tokens] = call.weights
    factor = torch.arange(1, num_ranks * SLOTS + 1).view(num_ranks, SLOTS, 1, 1)
    sent, slabs = {}, {}
    for step in program(NUM_LAYERS, OVER_SLABS).split("; "):
        name, _, text = step.partition("(")
        number = int(text[:-1]) - 1
        match name:
            case "dispatch":
                sent[number] = ranks.dispatch_send(x[number], ids[number], number % region.num_queues)
            case "receive":
                slabs[number] = ranks.dispatch_receive(sent[number])
                for rank in range(num_ranks):
                    mine = of_ranks[rank][0][number]
                    assert torch.equal(mine.rows_per_slot, slabs[number].rows_per_slot[rank])
                    for slot, num_rows in enumerate(mine.rows_per_slot.tolist()):
                        assert torch.equal(mine.origin[slot, :num_rows], slabs[number].origin[rank, slot, :num_rows])
                        assert_equal_bits(mine.slab[slot, :num_rows], slabs[number].x[rank, slot, :num_rows])
            case "answer":
                ranks.combine_send(sent[number], slabs[number].x * factor)
            case "add":
                out = ranks.combine_receive(sent[number], weights[number])
                for rank in range(num_ranks):
                    assert_equal_bits(of_ranks[rank][0][number].out, out[rank])
    assert not ranks.late.any()
    theirs = virtual.memory.view(num_ranks, region.num_queues, region.queue_bytes)
    for rank in range(num_ranks):
        mine = of_ranks[rank][1].view(region.num_queues, region.queue_bytes)
        assert torch.equal(mine[:, : region.staged_at], theirs[rank, :, : region.staged_at])


@needs_openshmem
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_protocol_over_openshmem_gives_what_the_reference_gives(num_ranks: int, tmp_path: Path) -> None:
    done = run_over_openshmem(num_ranks, tmp_path)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    check_calls(tmp_path, num_ranks)


@pytest.mark.slow  # the interpreter is
@needs_openshmem
def test_the_kernels_leave_the_same_bytes_in_all_regions(interpreter: RunCheck, tmp_path: Path) -> None:
    done = run_over_openshmem(3, tmp_path)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    interpreter(check_kernels, str(tmp_path), 3)


@needs_openshmem
@pytest.mark.parametrize(
    "mistake, found",
    [("FLAG_FIRST", "a row that is not"), ("NO_DONE", "a later round"), ("ONE_QUEUE", "a later round")],
)
def test_a_mistake_in_the_order_is_seen(mistake: str, found: str, tmp_path: Path) -> None:
    # All ranks end as soon as one sees it, so AHEAD_MS may be as long as a busy machine needs. The first PAUSE_MS is
    # always waited for: no peer's atomics get to a rank that sleeps. The mistake shows in the second.
    pauses = {"PAUSE_MS": 5_000} if mistake == "FLAG_FIRST" else {"AHEAD_MS": 60_000}
    done = run_over_openshmem(2, tmp_path, **pauses, **{mistake: ""})
    assert f"finds {found}" in done.stdout, f"{done.stdout}{done.stderr}"
    assert done.returncode != 0
